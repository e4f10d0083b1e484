"""peerlane generate with the real client against servers on loopback: retries, limits, kills, more samples, clear errors."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from command_line import Peerlane
from generate.fake_provider import MODEL, FakeServer
from peerlane.cli.exit_codes import ExitCode
from peerlane.generate.extra import require_models_extra
from peerlane.generate.run_folder import RunFolder

require_models_extra()  # says what to install

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("model_surroundings")]  # warnings of other people's packages

CODE = "def solution(*args):\n    return args[0]\n"


def answer(messages: list[dict[str, Any]], tools: list[str]) -> dict[str, Any]:
    return {"text": f"Here:\n```python\n{CODE}```", "reasoning": "so far"}


@pytest.mark.parametrize("model", [MODEL, "anthropic/claude-sonnet-4-5"])
def test_samples_are_kept_with_tokens_and_cost_through_faults(model: str, tmp_path: Path, peerlane: Peerlane) -> None:
    with FakeServer(answer, rate_limited=2, broken=1) as server:
        common = ["1-2", *server.words(model), "--out", tmp_path / "run", "--prices", "10,100,1"]
        peerlane("generate", *common, "--samples", 2, "--connections", 1)
        assert server.counts["n_200"] == 4 and server.counts["n_429"] == 2 and server.counts["n_500"] == 1
        asked = json.dumps(server.requests[-1]["messages"])
        assert "Problem 2: " in asked
    run = RunFolder.open(tmp_path / "run")
    assert [key.folder for key in run.sample_keys()] == ["001/0", "001/1", "002/0", "002/1"]
    record = run.sample(run.sample_keys()[0])
    assert (record.status, record.input_tokens, record.cached_tokens, record.output_tokens) == ("code", 100, 64, 40)
    assert record.cost_usd == pytest.approx((36 * 10 + 40 * 100 + 64 * 1) / 1e6)
    assert (tmp_path / "run" / "001" / "0" / "candidate.py").read_text() == CODE
    assert "```python" in (tmp_path / "run" / "001" / "0" / "reply.md").read_text()
    assert "Problem 1: " in (tmp_path / "run" / "001" / "prompt.md").read_text() and list((tmp_path / "run" / "logs").glob("*.eval"))


def test_more_samples_and_problems_ask_for_what_is_missing(tmp_path: Path, peerlane: Peerlane) -> None:
    with FakeServer(answer) as server:
        common = [*server.words(), "--out", tmp_path / "run"]
        peerlane("generate", "1", *common, "--samples", 2)
        peerlane("generate", "1-2", *common, "--samples", 3)
        assert server.counts == {"n_200": 6}
        peerlane("generate", "1-2", *common, "--samples", 3)
        assert server.counts == {"n_200": 6}


@pytest.mark.slow
def test_a_killed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    with FakeServer(answer, delay_s=0.4) as server:
        words = ["generate", "1-6", *server.words(), "--samples", "2", "--connections", "2", "--out", str(tmp_path / "run")]
        command = [sys.executable, "-m", "peerlane", *words]
        first = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=dict(os.environ), start_new_session=True)
        end = time.monotonic() + 120
        while len(list((tmp_path / "run").glob("*/*/sample.json"))) < 3:
            assert first.poll() is None and time.monotonic() < end
            time.sleep(0.05)
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
        done = len(list((tmp_path / "run").glob("*/*/sample.json")))
        assert 3 <= done < 12
        time.sleep(0.5)
        server.counts.clear()
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL, timeout=120)
        assert server.counts == {"n_200": 12 - done}
    assert len(RunFolder.open(tmp_path / "run").sample_keys()) == 12


def test_a_provider_that_stays_down_ends_the_run(tmp_path: Path, peerlane: Peerlane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peerlane.generate.single_shot.FAILURES_IN_A_ROW", 2)
    with FakeServer(answer) as server:
        common = ["1-5", *server.words(), "--out", tmp_path / "run", "--connections", 1, "--retries", 1]
        server.broken = 10**6
        said = peerlane("generate", *common, code=ExitCode.CHECK_FAILED).err
        assert "5 of 5 samples are missing: " in said and "002/0: " in said and "003/0: " not in said
        server.broken = 0
        peerlane("generate", *common)
        assert server.counts["n_200"] == 5


def test_cut_replies_and_refusals_are_samples_without_code(tmp_path: Path, peerlane: Peerlane) -> None:
    replies = iter([{"text": f"```python\n{CODE}", "cut": True}, {"text": "I will not."}])
    with FakeServer(lambda messages, tools: next(replies)) as server:
        peerlane("generate", "1-2", *server.words(), "--connections", 1, "--out", tmp_path / "run")
    run = RunFolder.open(tmp_path / "run")
    records = [run.sample(key) for key in run.sample_keys()]
    assert [record.status for record in records] == ["truncated", "refused"] and records[0].stop_reason == "max_tokens"


def test_money_is_not_spent_beyond_the_limit(tmp_path: Path, peerlane: Peerlane) -> None:
    with FakeServer(answer) as server:
        common = ["1-5", *server.words(), "--out", tmp_path / "run", "--connections", 1, "--prices", "10,100"]
        said = peerlane("generate", *common, "--max-cost", 0.009, code=ExitCode.CHECK_FAILED)
        assert server.counts == {"n_200": 2} and "--max-cost is 0.009" in said.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nonsense"], "expected PROVIDER/NAME"),
        (["--model", "nonsense/x"], "not recognized"),
        (["--model", "openai-api/nokey/x"], "NOKEY_"),
        (["--model", "peerlane/nobody"], "expected one of peerlane/expert"),
        (["--model", "peerlane/broken", "--prices", "a"], "--prices got 'a'"),
        (["--model", "peerlane/broken", "--max-cost", "3"], "--max-cost needs --prices"),
        (["--model", "peerlane/broken", "--shots", "9"], "--shots got 9"),
        (["--model", "peerlane/broken", "--effort", "much"], "--effort got 'much'"),
        (["--model", "peerlane/broken", "-M", "x"], "--model-arg got 'x'"),
    ],
)
def test_what_cannot_be_is_one_clear_line(arguments: list[str], message: str, tmp_path: Path, peerlane: Peerlane) -> None:
    said = peerlane("generate", "1", "--hardware", "h200x4", "--out", tmp_path / "run", *arguments, code=ExitCode.USAGE).err
    assert message in said and "Traceback" not in said and not (tmp_path / "run").exists()


def test_a_run_of_other_settings_or_version_is_refused(tmp_path: Path, peerlane: Peerlane) -> None:
    common = ["1", "--model", "peerlane/broken", "--hardware", "h200x4", "--out", tmp_path / "run"]
    peerlane("generate", *common)
    assert "temperature None (now 0.5)" in peerlane("generate", *common, "--temperature", 0.5, code=ExitCode.USAGE).err
    file = tmp_path / "run" / "run.json"
    file.write_text(file.read_text().replace('"format": 1', '"format": 7'))
    for command in (["generate", *common], ["metrics", tmp_path / "run"], ["eval", tmp_path / "run"]):
        said = peerlane(*command, code=ExitCode.USAGE)
        assert re.search(r"format 7: this peerlane .* reads 1", said.err)


def test_without_the_extra_the_command_says_what_to_install(tmp_path: Path, peerlane: Peerlane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = peerlane("generate", "1", "--model", "peerlane/broken", "--out", tmp_path / "run", code=ExitCode.USAGE)
    assert "pip install 'peerlane[models]'" in said.err
