"""The Python API: one Evaluator, warm, for many candidates, threads and tasks."""

import asyncio
import itertools
import os
import random
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import peerlane as pl
from e2e.runs import DEADLINES, GOOD, RIGHT, SLEEPS, STRESS, marked, marked_processes, wait_for
from peerlane.errors import UsageError
from peerlane.evaluate.candidates import candidate_text
from peerlane.evaluate.processes.session import Session, Strain
from peerlane.results.store import ResultsStore
from peerlane.results.verdict import BuildError, Hang, HarnessFailure, NotRun, RuntimeFailure, TooSlow
from peerlane.settings import Deadlines
from sample_results import measured, result, wrong_result

DAWDLES = RIGHT.replace("    out", "    [time.sleep(0.01) for _ in range(40)]\n    out", 1).replace("import", "import time\nimport", 1)
SOURCES = {
    RIGHT: "correct",
    "def solution(tensor):\n    return tensor.clone()\n": "wrong_result",
    "def solution(tensor):\n    return tensor.float().double()\n": "wrong_type",
    "def solution(tensor:\n": "import_error",
    "def solve(tensor): ...\n": "import_error",
    "import os\n\n\ndef solution(tensor):\n    os._exit(0)\n": "runtime_error",
}
DIES = """
import ctypes, os, sys, threading, time
import torch.distributed as dist


def solution(tensor):
    if dist.get_rank() == 1:
        sys.stderr.write("terminate called after throwing an instance of 'c10::AcceleratorError'\\n")
        sys.stderr.flush()
        {end}
    time.sleep(600)
"""
ENDS = {
    "os.abort()": "rank 1 was ended by signal SIGABRT: terminate called",
    "threading.Thread(target=time.sleep, args=(600,)).start(); ctypes.CDLL(None).syscall(60, 0)": "rank 1 died, and waits",
    "ctypes.CDLL('libstdc++.so.6')._ZSt9terminatev()": "rank 1 was ended by signal SIGABRT: terminate called",
    "raise ValueError('its own words')": "ValueError: its own words",
}
"""How a rank ends while another one waits, and what is said of it. The second is where a driver keeps a dead process: part of it stays."""
MARKED = f"api-{os.getpid()}"
QUICK: Any = {"presets": ("small",), "deadlines": DEADLINES, "stress": STRESS}


@pytest.fixture(scope="module")
def evaluator() -> Iterator[pl.Evaluator]:
    """One of two CPU ranks for all tests; nothing of it may be left."""
    with marked(MARKED), pl.Evaluator(2, "cpu", **QUICK) as evaluator:
        yield evaluator
    assert marked_processes(MARKED) == []


def judge_from_two_threads(evaluator: pl.Evaluator, count: int) -> None:
    """Right verdicts, and each call gets the result of its own source."""
    dice = random.Random(7)
    work = [(dice.choice(list(SOURCES)), f"sample{number}") for number in range(count)]
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda item: evaluator.evaluate(1, item[0], name=item[1], modes=()), work))
    for (source, name), got in zip(work, found, strict=True):
        assert (got.candidate.name, got.verdict.kind) == (name, SOURCES[source]), got.verdict


def test_evaluations_from_two_threads(evaluator: pl.Evaluator) -> None:
    judge_from_two_threads(evaluator, 12)


@pytest.mark.parametrize("end", ENDS, ids=["abort", "half gone", "terminate", "exception"])
def test_a_rank_that_dies_while_another_waits_is_to_blame(evaluator: pl.Evaluator, end: str) -> None:
    verdict = evaluator.evaluate(1, DIES.replace("{end}", end), modes=()).verdict
    assert isinstance(verdict, RuntimeFailure) and verdict.rank == 1 and ENDS[end] in verdict.message, verdict


@pytest.mark.slow
def test_thirty_evaluations_leave_nothing_behind(evaluator: pl.Evaluator) -> None:
    judge_from_two_threads(evaluator, 12)
    files, memory = len(os.listdir("/proc/self/fd")), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    processes = len(marked_processes(MARKED))
    judge_from_two_threads(evaluator, 30)
    wait_for(lambda: len(marked_processes(MARKED)) <= processes, 20, "the end of what was started")
    assert len(os.listdir("/proc/self/fd")) <= files + 16, "the pool may hold one warm group more"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < memory + 15_000, "kilobytes"


WATCHED = """
import sys
import time

import torch.distributed as dist


def solution(tensor):
    if sys._getframe(1).f_locals.get("marker"):
        time.sleep(60)
    dist.all_reduce(tensor := tensor.clone())
    return tensor
"""


def test_a_time_limit_behind_correctness_leaves_correct(evaluator: pl.Evaluator) -> None:
    got = evaluator.evaluate(1, WATCHED, timeout=3.0)
    assert got.correct and got.flags == ("time_limit",) and all(item.status != "measured" for item in got.speed)


def test_a_time_limit_is_for_the_whole_candidate(evaluator: pl.Evaluator, monkeypatch: pytest.MonkeyPatch) -> None:
    strained(monkeypatch, 0.0)
    begin = time.monotonic()
    got = evaluator.evaluate(1, SLEEPS, timeout=1.5, modes=())
    assert isinstance(got.verdict, Hang) and got.verdict.deadline_s > 0 and got.flags == ("time_limit",)
    assert time.monotonic() - begin < 60
    got = evaluator.evaluate(1, DAWDLES, timeout=5, modes=())
    assert isinstance(got.verdict, TooSlow) and got.verdict.limit_s == 5.0 and got.verdict.case is not None
    assert got.reward("correct") == 0.0 and got.flags == ("time_limit",)
    found = evaluator.evaluate_all([candidate_text(f"{SLEEPS}# {number}", 1, "sleeps") for number in range(2)], timeout=1.5, modes=())
    assert [item.flags for item in found] == [("time_limit",)] * 2, "each has its own"


def test_tasks_wait_and_can_be_cancelled(evaluator: pl.Evaluator) -> None:
    """A cancelled evaluation ends at once, whether it runs or waits; the others do not notice."""

    async def run() -> list[Any]:
        running = asyncio.create_task(evaluator.evaluate_async(1, SLEEPS, modes=()))
        await asyncio.sleep(0.5)
        waiting = asyncio.create_task(evaluator.evaluate_async(1, SLEEPS, modes=()))
        good = asyncio.create_task(evaluator.evaluate_async(1, RIGHT, modes=()))
        await asyncio.sleep(0.1)
        waiting.cancel()
        running.cancel()
        return [*await asyncio.gather(running, waiting, return_exceptions=True), await good]

    begin = time.monotonic()
    first, second, good = asyncio.run(run())
    assert isinstance(first, asyncio.CancelledError) and isinstance(second, asyncio.CancelledError)
    assert good.correct and time.monotonic() - begin < DEADLINES.first_call


def test_leaving_ends_what_still_runs() -> None:
    with pl.Evaluator(2, "cpu", presets=("small",)) as evaluator:
        caught: list[BaseException] = []

        def judge() -> None:
            try:
                evaluator.evaluate(1, SLEEPS)
            except BaseException as error:
                caught.append(error)

        thread = threading.Thread(target=judge)
        thread.start()
        time.sleep(1.0)
    thread.join(10)
    assert not thread.is_alive() and len(caught) == 1
    with pytest.raises(UsageError, match="closed"):
        evaluator.evaluate(1, RIGHT)


def test_a_repeated_candidate_gets_its_stored_result(tmp_path: Path) -> None:
    """Under the name that was asked for: samples with the same source keep a result each."""
    with pl.Evaluator(2, "cpu", **QUICK, out=str(tmp_path), modes=()) as evaluator:
        first = evaluator.evaluate(1, RIGHT, name="one")
        begin = time.monotonic()
        twin, again = evaluator.evaluate(1, RIGHT, name="two"), evaluator.evaluate(1, RIGHT, name="one")
        assert time.monotonic() - begin < 0.5 and again == first and twin.candidate.name == "two"
        assert twin == replace_name(first, "two")
        assert evaluator.evaluate(1, RIGHT, name="one", rerun=True).run_id == first.run_id
    stored = ResultsStore(tmp_path).results()
    assert [item.candidate.name for item in stored] == ["one", "two", "one"] and stored[2].finished_at > first.finished_at
    candidates = [candidate_text(RIGHT, 1, name) for name in ("three", "one")]
    plan = pl.EvaluationPlan(candidates, world_sizes=(2,), **QUICK, out=tmp_path, modes=())
    assert [item.candidate.name for item in pl.evaluate.evaluate(plan)] == ["three", "one"]


def test_two_runs_with_one_folder_judge_everything_once(tmp_path: Path) -> None:
    """Each gets all results, its own and the other's."""
    candidates = [candidate_text(f"{RIGHT}# {number}", 1, f"c{number}") for number in range(3)]
    plan = pl.EvaluationPlan(candidates, world_sizes=(2,), **QUICK, out=tmp_path, modes=())
    with ThreadPoolExecutor(2) as threads:
        one, two = (future.result(120) for future in [threads.submit(pl.evaluate.evaluate, plan) for _ in range(2)])
    assert [item.candidate.name for item in one] == ["c0", "c1", "c2"] and one == two
    assert len(ResultsStore(tmp_path).results()) == 3 and all(item.correct for item in one)


def test_candidates_that_could_not_be_run_keep_a_row_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal sources are judged once, also where there is no verdict to keep."""
    candidates = [candidate_text(RIGHT, 1, name) for name in ("one", "two")]
    plan = pl.EvaluationPlan(candidates, world_sizes=(2,), presets=("small",), out=tmp_path, modes=())
    with pl.Evaluator(plan=plan) as evaluator:
        monkeypatch.setattr(evaluator.scheduler, "placement", lambda _: "2 ranks need 2 GPUs")
        found = evaluator.evaluate_plan(plan)
    assert [(item.candidate.name, item.verdict.kind) for item in found] == [("one", "not_run"), ("two", "not_run")]
    assert ResultsStore(tmp_path).results() == found


def replace_name(item: pl.Result, name: str) -> pl.Result:
    return item.model_copy(update={"candidate": item.candidate.model_copy(update={"name": name})})


@pytest.mark.parametrize(
    ("request_", "told"),
    [
        ({"problem": 1}, "expected one of source=TEXT"),
        ({"source": RIGHT}, "problem=NUMBER"),
        ({"problem": 1, "source": RIGHT, "path": GOOD}, "expected one of source=TEXT"),
        ({"problem": 999, "source": RIGHT}, "no problem 999"),
        ({"problem": 1, "source": RIGHT, "presets": ("small", "pkb")}, "use evaluate_all"),
        ({"problem": 1, "source": RIGHT, "preset": "small"}, "unknown options: preset"),
        ({"problem": 1, "source": RIGHT, "device": "cuda"}, "cannot change from call to call"),
        ({"problem": 1, "source": 7}, "expected the text of a Python module"),
        ({"problem": 1, "source": "# \ud800"}, "cannot be encoded as UTF-8: surrogates not allowed at character 2"),
    ],
)
def test_a_request_that_cannot_be_is_told(request_: dict[str, Any], told: str, evaluator: pl.Evaluator) -> None:
    with pytest.raises(UsageError, match=told):
        evaluator.evaluate(**request_)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("out", ""), ("out", 3), ("presets", "small"), ("presets", ()), ("modes", ("fast",)), ("world_sizes", (0,)), ("world_sizes", 2),
        ("isolation", "L9"), ("device", "tpu"), ("cases", "some"), ("track", "closed"), ("timeout", -1), ("timeout", "1 s"),
        ("problems", 13), ("candidates", ["1_x.py"]), ("deadlines", 5),
    ],
)  # fmt: skip
def test_a_plan_checks_what_it_gets(field: str, value: Any) -> None:
    with pytest.raises(UsageError, match=rf"^{field}=.*expected"):
        pl.EvaluationPlan(**{"candidates": [], field: value})


def test_deadlines_are_positive() -> None:
    with pytest.raises(UsageError, match="load=-5"):
        Deadlines(load=-5)


def test_importing_peerlane_takes_no_time_and_no_torch() -> None:
    code = "import sys, time; begin = time.perf_counter(); import peerlane as pl; took = time.perf_counter() - begin\n"
    code += "assert took < 0.2, took; assert not {'torch', 'numpy', 'pydantic'} & sys.modules.keys()\n"
    code += "assert 'Evaluator' in dir(pl) and pl.problem(13).slug == 'gemm_allreduce' and len(pl.problems.suite()) == 87\n"
    code += "assert pl.solutions.__name__ == 'peerlane.solutions' and pl.evaluate.Evaluator is pl.Evaluator\n"
    code += "assert pl.Result and pl.Verdict"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_rewards_come_from_the_low_end_and_never_from_our_failures() -> None:
    fast = result(speed=(measured("eager", 100.0, 50.0), measured("graph", 100.0, 25.0)))
    low = fast.speedup("graph").low  # type: ignore[union-attr]
    assert fast.reward("correct") == 1.0 and fast.reward("fast_p", p=low - 0.01) == 1.0 and fast.reward("fast_p", p=low) == 0.0
    assert 2.0 < fast.reward("log_speedup") < 2.4 and fast.reward("log_speedup", mode="eager") < fast.reward("log_speedup")  # type: ignore[operator]
    wrong = result(verdict=RuntimeFailure(phase="import", message="no"), speed=())
    assert [wrong.reward(kind) for kind in ("correct", "log_speedup", "fast_p")] == [0.0] * 3  # type: ignore[arg-type]
    for verdict in (HarnessFailure(phase="spawn", message="no"), NotRun(missing="a GPU")):
        assert result(verdict=verdict, speed=()).reward("correct") is None
    with pytest.raises(UsageError, match="expected one of correct"):
        fast.reward("speed")  # type: ignore[arg-type]


def test_feedback_says_where_and_what_to_try_but_no_expected_value() -> None:
    told = "3 elements differ at [4]: got 1.5, expected 123.25"
    wrong = wrong_result(case="1/small/a/w2", rank=1, error_over_tolerance=7.5, detail=told, index=(4,), got=1.5, expected=123.25)
    text = result(verdict=wrong, speed=()).feedback()
    assert "7.5 times" in text and "rank: 1" in text and "case: 1/small/a/w2" in text and "try:" in text and "123.25" not in text
    log = 'Traceback\nnvcc ...\ncuda.cu(12): error: identifier "x" is undefined\n' + "noise\n" * 500
    text = result(verdict=BuildError(phase="build", message=log), speed=(), log_tail="line\n" * 500).feedback()
    assert "first compiler error: cuda.cu(12): error" in text and len(text.splitlines()) <= 60


def test_the_reason_of_a_failure_names_the_line(evaluator: pl.Evaluator) -> None:
    source = "import torch\n\n\ndef solution(tensor):\n    return torch.cat(tensor, 'x')\n"
    got = evaluator.evaluate(1, source, name="sample", modes=())
    assert "sample.py:5: TypeError" in got.verdict.reason and "place: sample.py:5" in got.feedback()


def test_overlapping_evaluators_leave_the_caller_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever order they end."""
    from peerlane.sandbox import linux

    monkeypatch.setattr(linux, "_hidden", [])
    before = linux.set_dumpable(True)
    first, second = linux.not_dumpable(), linux.not_dumpable()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not linux.set_dumpable(False)
    second.__exit__(None, None, None)
    assert linux.set_dumpable(before)


def test_a_deadline_missed_on_an_overloaded_machine_is_no_final_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The evaluation is repeated once, with more time; what hangs again is marked, and judged again when it is asked for again."""
    quicker = {**QUICK, "deadlines": Deadlines().with_calls(0.3)}
    with pl.Evaluator(2, "cpu", **quicker, out=tmp_path, modes=()) as evaluator:
        strained(monkeypatch, 1.0, 0.0)
        final = evaluator.evaluate(1, SLEEPS)
        assert isinstance(final.verdict, Hang) and final.verdict.deadline_s >= 0.6 and "overloaded" not in final.flags
        strained(monkeypatch, 1.0, 1.0)
        marked_ = evaluator.evaluate(1, SLEEPS + "#")
        assert "overloaded" in marked_.flags and evaluator._store is not None and marked_.reward("correct") is None
        assert evaluator._store.has(final.identity) and not evaluator._store.has(marked_.identity)


def test_a_time_limit_on_a_busy_machine_is_doubled_once(evaluator: pl.Evaluator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where others had the cores; the second limit is one of its own, not what the first left over."""
    ended: list[float] = []
    strained(monkeypatch, 1.0, 1.0, tell=ended.append)
    got = evaluator.evaluate(1, SLEEPS, timeout=1.0, modes=())
    assert isinstance(got.verdict, NotRun) and got.flags == ("overloaded", "time_limit") and got.says_nothing
    assert "kept the ranks from their cores" in got.verdict.reason and ended[1] - ended[0] >= 2.0
    strained(monkeypatch, 1.0, 0.0)
    got = evaluator.evaluate(1, SLEEPS, timeout=1.0, modes=())
    assert isinstance(got.verdict, Hang) and got.flags == ("time_limit",) and got.reward("correct") == 0.0


def strained(monkeypatch: pytest.MonkeyPatch, *shares: float, tell: Callable[[float], Any] = lambda _: None) -> None:
    """Has the next evaluations that are late kept from their cores for these shares of a long time, or not at all."""
    left = list(shares)

    def strain(self: Session, group: Any) -> Strain:
        tell(time.monotonic())
        return Strain(kept_s=1e6 * (left.pop(0) if left else 0.0))

    monkeypatch.setattr(Session, "strain", strain)


def test_memory_that_the_machine_lacks_is_not_the_candidates_fault(evaluator: pl.Evaluator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may pick the process that guards the ranks; a candidate that kills it itself is to blame as before."""
    kills = "import os, signal\n\n\ndef solution(tensor):\n    os.kill(os.getppid(), signal.SIGKILL)\n    import time; time.sleep(9)\n"
    with pl.Evaluator(2, "cpu", presets=("small",), isolation="L0", deadlines=DEADLINES, modes=()) as open_:
        assert open_.evaluate(1, kills).verdict.kind == "integrity_failure"
        counts = itertools.count()
        monkeypatch.setattr("peerlane.evaluate.processes.leader.out_of_memory_kills", lambda: next(counts))
        got = open_.evaluate(1, kills)
        assert got.verdict.kind == "harness_error" and "ran out of memory" in got.verdict.reason


def test_the_example_of_the_page_runs(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "python-api.md").read_text()
    script = tmp_path / "example.py"
    script.write_text(page.split("```python\n")[1].split("```")[0])
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert ran.stdout.splitlines()[:2] == ["correct", "1.0"], ran.stderr
