"""The examples of training and decoding, a few steps each on two CPU ranks: losses and tokens are those of gloo, and times are told."""

import importlib
import json
import os
import re
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

PROGRAM = Path(__file__).parent / "run_examples.py"
FOLDER = Path(__file__).parents[2] / "examples" / "training"
TRAININGS = ("ddp", "fsdp2+", "tensor_parallel", "ddp:400m", "fsdp2:1.4b", "tensor_parallel:1.4b")
STEPS, SIDES = 6, ("peerlane", "torch.distributed")


@dataclass(frozen=True)
class Ran:
    """What the examples printed, by run, and the folder with their numbers."""

    printed: dict[str, str]
    folder: Path

    def numbers(self, run: str) -> dict[str, Any]:
        numbers: dict[str, Any] = json.loads((self.folder / f"{run}.json").read_text())
        return numbers


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("numbers")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(PROGRAM), str(folder), *TRAININGS, "decode", "decode+"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return Ran(dict(re.findall(r"== (\S+)\n([^=]*)", done.stdout)), folder)


@pytest.mark.parametrize("run", TRAININGS)
def test_training_has_the_losses_of_gloo(run: str, ran: Ran) -> None:
    ours, theirs = (re.findall(r"\d+\.\d+", line) for line in ran.printed[run].splitlines()[1:3])
    assert len(ours) == len(theirs) == 5
    assert [float(loss) for loss in ours] == pytest.approx([float(loss) for loss in theirs], rel=1e-3 if ":" in run else 1e-4)
    assert float(ours[-1]) < 0.97 * float(ours[0])


@pytest.mark.parametrize("run", TRAININGS)
def test_training_tells_and_stores_losses_and_step_times(run: str, ran: Ran) -> None:
    numbers = ran.numbers(run)
    assert (numbers["model"], numbers["ranks"], numbers["steps"]) == (run.partition(":")[2] or "tiny", 2, STEPS)
    told = re.search(r"^ms a step: (.+)$", ran.printed[run], re.MULTILINE)
    assert told is not None
    for name, said in zip(SIDES, told[1].split(", "), strict=True):
        side = numbers["sides"][name]
        low, middle, high = side["quartiles_ms"]
        assert said == f"{name} {middle:.1f} ({low:.1f} to {high:.1f})"
        assert len(side["losses"]) == len(side["ms"]) == STEPS
        assert min(side["ms"]) > 0
        assert [low, middle, high] == pytest.approx(statistics.quantiles(side["ms"][STEPS // 4 :], method="inclusive"), rel=1e-5)


@pytest.mark.parametrize("run", ["decode", "decode+"])
def test_decoding_gives_the_tokens_of_gloo(run: str, ran: Ran) -> None:
    assert "of the tokens follow the rule" in ran.printed[run]  # the example ends with an error if a token differs
    assert all(side["us_a_token"] > 0 for side in ran.numbers(run)["sides"].values())
    assert ("loss" in ran.printed[run]) == (run == "decode")


def test_next_tokens_follow_the_rule_four_times_in_five(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    gpt = importlib.import_module("gpt")
    size = gpt.SIZES["400m"]
    tokens = gpt.batch(size, 3, 1, torch.device("cpu"))
    assert tokens.shape == (size.batch, size.context + 1)
    assert torch.equal(tokens, gpt.batch(size, 3, 1, torch.device("cpu")))
    assert sorted(tokens.unique().tolist()) == list(range(gpt.SYMBOLS))
    follows = gpt.follower(tokens[:, :-1]) == tokens[:, 1:]
    assert float(follows.float().mean()) == pytest.approx(0.8 + 0.2 / gpt.SYMBOLS, abs=0.02)


@pytest.mark.parametrize(("model", "parameters"), [("400m", 0.4e9), ("1.4b", 1.4e9)])
def test_models_are_as_large_as_their_names_say(model: str, parameters: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    gpt = importlib.import_module("gpt")
    with torch.device("meta"):
        built = gpt.GPT(gpt.SIZES[model])
    assert sum(parameter.numel() for parameter in built.parameters()) == pytest.approx(parameters, rel=0.03)
