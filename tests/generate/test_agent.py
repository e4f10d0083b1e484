"""Episodes of agents: with the real client and the real evaluator, and with a stub of the latter where speed decides."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from command_line import Peerlane
from generate.fake_provider import FakeServer
from peerlane import problems
from peerlane.cli.exit_codes import ExitCode
from peerlane.generate.extra import require_models_extra
from peerlane.generate.judging import Judged
from peerlane.generate.run_folder import RunFolder
from peerlane.generate.samples import Speedup
from peerlane.problems.reference_source import reference_source
from peerlane.results.reader import read_results

require_models_extra()  # says what to install

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("model_surroundings")]

WRONG = "def solution(tensor):\n    return tensor.clone()\n"
RIGHT = reference_source(problems.get(1)) + "\n\nsolution = reference\n"


def script(calls: list[tuple[str, dict[str, str]]]) -> Callable[..., dict[str, Any]]:
    """A model that makes these calls one after the other, and the last one for ever."""

    def reply(messages: list[dict[str, Any]], tools: list[str]) -> dict[str, Any]:
        done = sum(message["role"] == "tool" for message in messages)
        name, arguments = calls[min(done, len(calls) - 1)]
        return {"tool": name, "args": arguments}

    return reply


def said_by_tools(server: FakeServer) -> list[str]:
    return [str(message["content"]) for message in server.requests[-1]["messages"] if message["role"] == "tool"]


def test_an_episode_from_a_syntax_error_to_a_right_answer(tmp_path: Path, peerlane: Peerlane) -> None:
    calls = [
        ("test", {}),
        ("write", {"source": "def solution(tensor:\n"}),
        ("compile", {}),
        ("write", {"source": WRONG}),
        ("test", {}),
        ("lookup", {"topic": "mistakes"}),
        ("write", {"source": RIGHT}),
        ("compile", {}),
        ("test", {}),
        ("trace", {}),
        ("submit", {}),
    ]
    with FakeServer(script(calls)) as server:
        how = ["--device", "cpu", "--world-size", 2, "--preset", "small", "--track", "open"]
        words = ["agent", "1", *server.words(), "--out", tmp_path / "run", *how]
        peerlane(*words)
        said = said_by_tools(server)
        asked = len(server.requests)
        peerlane(*words)
        assert len(server.requests) == asked
    assert "call write first" in said[0] and "candidate.py:1" in said[2] and "wrong_result" in said[4]
    assert "release at system scope" in said[5] and "valid Python" in said[7] and "correct" in said[8] and "communicates" in said[9]
    run = RunFolder.open(tmp_path / "run")
    (key,) = run.sample_keys()
    assert [(step.tool, step.verdict) for step in run.steps(key)] == [("test", "wrong_result"), ("test", "correct"), ("submit", "correct")]
    record = run.sample(key)
    assert record.stop_reason == "submitted" and record.calls == 11 and record.limit is None
    assert (tmp_path / "run" / "001" / "0" / "candidate.py").read_text() == RIGHT
    results = read_results(tmp_path / "run")
    (setting,) = run.settings_judged(results)
    (sample,) = run.samples(results, setting)
    assert sample.correct and [sample.after(steps).correct for steps in (1, 2)] == [False, True]


class StubJudge:
    """Right from version 2 on; version v is v times as fast as the reference, and version 4 is wrong again."""

    def __init__(self, *_: Any) -> None: ...

    async def judge(self, problem: int, source: str, modes: tuple[str, ...]) -> Judged:
        version = int(source.removeprefix("# version "))
        digest = hashlib.sha256(source.encode()).hexdigest()
        if version in (1, 4):
            return Judged("wrong_result", "verdict: wrong_result", {}, digest)
        return Judged("correct", "verdict: correct", dict.fromkeys(modes, Speedup(version - 0.1, version, version + 0.1)), digest)


def versions(*numbers: int) -> list[tuple[str, dict[str, str]]]:
    return [call for number in numbers for call in (("write", {"source": f"# version {number}\n"}), ("time", {}))]


@pytest.mark.parametrize(
    ("limits", "limit", "best"),
    [
        (["--steps", 8], "steps", 3),
        (["--steps", 4], "steps", 2),
        (["--episode-tokens", 900], "tokens", 3),
        (["--prices", "10,100", "--episode-cost", 0.02], "cost", 2),
    ],
)
def test_a_limit_ends_an_episode_with_its_best_attempt(
    limits: list[object], limit: str, best: int, tmp_path: Path, peerlane: Peerlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peerlane.generate.judging.Judge", StubJudge)
    with FakeServer(script([*versions(1, 2, 3, 4), ("time", {})])) as server:
        peerlane("agent", "1", *server.words(), "--device", "cpu", "--out", tmp_path / "run", *limits)
    run = RunFolder.open(tmp_path / "run")
    (key,) = run.sample_keys()
    record = run.sample(key)
    assert (record.limit, record.stop_reason, record.status) == (limit, "limit", "code")
    assert (tmp_path / "run" / key.folder / "candidate.py").read_text() == f"# version {best}\n"


def test_a_task_is_exported_for_agents_from_elsewhere(tmp_path: Path, peerlane: Peerlane) -> None:
    words = ["agent", "13", "--export", tmp_path / "task", "--backend", "kit", "--hardware", "h200x4", "--device", "cpu"]
    peerlane(*words)
    text = (tmp_path / "task" / "TASK.md").read_text()
    assert "peerlane eval 13_candidate_cuda.py" in text and "def reference(" in text and "## Output" not in text
    assert (tmp_path / "task" / "notes" / "mistakes.md").is_file()
    assert "not empty" in peerlane(*words, code=ExitCode.USAGE).err
    peerlane("agent", "1-2", "--export", tmp_path / "other", code=ExitCode.USAGE)
    assert "missing --model" in peerlane("agent", "1", code=ExitCode.USAGE).err
