"""Adapters in the real trainers, on a real service with CPU ranks. `make test-trainers` installs each of them, and runs these."""

import ast
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.runs import RIGHT
from generate.fake_provider import FakeServer
from service.stand_in import TOKEN
from service.test_serve import free_port, served

ROOT = Path(__file__).parents[2]
WRONG = "def solution(tensor):\n    return tensor.clone()\n"
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a trainer's process."""
    port = free_port()
    with served(tmp_path_factory.mktemp("service"), port):
        yield {**os.environ, "PEERLANE_TOKEN": TOKEN, "PEERLANE_URL": f"http://127.0.0.1:{port}"}


def run(trainer: str, program: str, *words: str, environment: dict[str, str], folder: Path) -> str:
    """What a program of the trainer's virtual environment prints."""
    programs = ROOT / f".venv-{trainer}" / "bin"
    if not (programs / program).exists():
        pytest.skip(f"NOT RUN: {trainer} is not installed: run `make test-trainers`")
    given = {**environment, "PATH": f"{programs}:{environment['PATH']}"}
    ended = subprocess.run([programs / program, *words], env=given, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


def test_trl_trains_two_steps_on_rewards_that_differ(environment: dict[str, str], tmp_path: Path) -> None:
    out = run("trl", "python", str(ROOT / "examples" / "rl" / "train_trl.py"), environment=environment, folder=tmp_path)
    rewards = ast.literal_eval(out.rpartition("rewards by step: ")[2])
    assert rewards == [[1.0, 0.0, 0.0, 0.0]] * 2
    gradients = [float(found) for found in re.findall(r"'grad_norm': '([\d.e-]+)'", out)]
    assert len(gradients) == 2 and all(gradient > 0 for gradient in gradients)


VERL = """
import asyncio, json, sys
import numpy as np, torch
from pathlib import Path
from hydra import compose, initialize_config_dir
import verl
from verl.trainer.ppo.reward import load_reward_manager

class Letters:
    def decode(self, ids, skip_special_tokens):
        return "".join(chr(letter) for letter in ids)

replies, overrides = json.loads(sys.argv[1])
with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
    config = compose("ppo_trainer", overrides=overrides)

async def judge(reply):
    ids = torch.tensor([[ord(letter) for letter in reply]])
    others = {"data_source": "peerlane", "reward_model": {"ground_truth": "1"}, "extra_info": {}}
    data = verl.DataProto.from_dict(
        tensors={"responses": ids, "attention_mask": torch.ones_like(ids)},
        non_tensors={name: np.array([value], dtype=object) for name, value in others.items()},
    )
    router = {"reward_router_address": "127.0.0.1:9", "reward_model_tokenizer": None}
    return (await load_reward_manager(config, Letters(), **router).run_single(data))

async def all_of():
    return [await judge(reply) for reply in replies]

print(json.dumps(asyncio.run(all_of())))
"""


def test_verls_reward_manager_takes_the_score(environment: dict[str, str], tmp_path: Path) -> None:
    """With verl's own configuration, and settings as its command line has them."""
    at = "reward.custom_reward_function"
    options = f"+{at}.reward_kwargs.options={{presets: [small], modes: [], track: open}}"
    overrides = [f"{at}.path=pkg://peerlane.service.adapters.verl", f"{at}.name=compute_score", options]
    asked = json.dumps([[f"```python\n{source}```" for source in (RIGHT, WRONG)], overrides])
    found = json.loads(run("verl", "python", "-c", VERL, asked, environment=environment, folder=tmp_path).splitlines()[-1])
    assert [item["reward_score"] for item in found] == [1.0, 0.0]
    assert [item["reward_extra_info"]["verdict"] for item in found] == ["correct", "wrong_result"]


def test_verifiers_records_both_rewards(environment: dict[str, str], tmp_path: Path) -> None:
    """Its command, with the taskset of the example, on a model that answers from a script."""
    example = (ROOT / "examples" / "rl" / "peerlane_vf.py").read_text()
    options = 'RewardSettings(options={"presets": ("small",), "modes": (), "track": "open"}), "1-2"'
    changed = example.replace("taskset_class()", f"taskset_class({options})")
    (tmp_path / "peerlane_vf.py").write_text(f"from peerlane.service.adapters.reward import RewardSettings\n{changed}")
    with FakeServer(lambda messages, tools: {"text": f"```python\n{RIGHT}```"}) as model:
        words = ["peerlane_vf", "-n", "2", "-m", "fake", "--no-push", "--no-rich", "-o", "runs", "--run.dir", "one", "--client.base-url"]
        words += [
            model.url, "--client.api-key-var", "MODEL_KEY", "--env.agent.harness.id", "null", "--env.agent.runtime.type", "subprocess",
        ]  # fmt: skip
        run("verifiers", "vf-eval", *words, environment={**environment, "MODEL_KEY": "x", "PYTHONPATH": "."}, folder=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "runs" / "one" / "traces.jsonl").read_text().splitlines()]
    rewards = {row["task"]["data"]["problem"]: [trace["rewards"] for trace in row["traces"]] for row in rows}
    assert {name: reward["score"] for name, reward in rewards[1][0].items()} == {"correct": 1.0, "fast": 0.0}
    assert rewards[2][0]["correct"]["score"] == 0.0, "an all-reduce is no all-gather"
