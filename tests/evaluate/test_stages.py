"""The order of an evaluation's stages, with scripted ranks: what a failure costs, and what state a group is left in."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from peerlane import problems
from peerlane.cli.exit_codes import ExitCode, exit_code
from peerlane.errors import CaseTooLarge, HarnessError
from peerlane.evaluate import pipeline as pipeline_module
from peerlane.evaluate.candidates import candidate_file, reference_candidate
from peerlane.evaluate.correctness.case_runner import Evidence, Rejected
from peerlane.evaluate.messages import Request
from peerlane.evaluate.node import Node
from peerlane.evaluate.pipeline import EvaluationPipeline
from peerlane.evaluate.plan import Job
from peerlane.evaluate.processes.limit import OutOfTime
from peerlane.evaluate.processes.rank_group import GroupFailure
from peerlane.evaluate.processes.session import Strain
from peerlane.evaluate.timing.benchmark import Unmeasurable
from peerlane.results.speed_record import Failed, ModeSpeed
from peerlane.results.verdict import Hang, NotRun, WrongType
from peerlane.sandbox.isolation import NO_ISOLATION, Isolation
from peerlane.settings import Deadlines, PoolSettings, TimingRules
from sample_results import measured

OPERATIONS = {"load_candidate": "load", "load_reference": "load", "exit": "exit"}


@dataclass
class Stage:
    """Everything that happens, in order, and what is to go wrong: an exception by the name of the step."""

    log: list[str] = field(default_factory=list)
    wrong: dict[str, BaseException] = field(default_factory=dict)
    broken_baselines: int = 0
    limits: list[tuple[str, int, float | None, float]] = field(default_factory=list)
    """of every check: its phase, calls, and the deadlines of the first and of the others"""
    strain: Strain = field(default_factory=Strain)
    measured: dict[str, Any] = field(default_factory=dict)
    """what is to be special of a speed"""

    def step(self, name: str) -> None:
        self.log.append(name)
        if name in self.wrong:
            raise self.wrong.pop(name)


@dataclass
class ScriptedGroup:
    stage: Stage
    name: str

    def admit(self, sha256: str) -> None: ...

    def ask(self, request: Request[Any], phase: str, deadline_s: float, **_: Any) -> list[None]:
        self.stage.step(f"{self.name} {OPERATIONS[request.op]}")
        return [None]

    def await_end(self, deadline_s: float) -> tuple[int, ...]:
        return ()

    def log_tail(self) -> str:
        return "printed"


@dataclass
class ScriptedSession:
    stage: Stage
    deadlines: Deadlines = field(default_factory=Deadlines)
    isolation: Isolation = NO_ISOLATION
    pool_settings: PoolSettings = field(default_factory=PoolSettings)
    taken: int = 0

    def take_group(self) -> ScriptedGroup:
        self.taken += 1
        self.stage.step(f"take {self.taken}")
        return ScriptedGroup(self.stage, f"group{self.taken}")

    def start_warm_groups(self, expected: int) -> None:
        self.stage.log.append(f"warm groups {expected}")

    def import_ahead(self, source: str) -> None: ...

    def mark_core_time(self, group: ScriptedGroup) -> None: ...

    def strain(self, group: ScriptedGroup) -> Strain:
        return self.stage.strain

    def wait_for_starts(self) -> None:
        self.stage.log.append("wait for starts")

    def end(self, group: ScriptedGroup) -> None:
        self.stage.log.append(f"end {group.name}")


def scripted(stage: Stage) -> tuple[type, type, type]:
    """A Trial, a Stress and a SpeedTrial that follow the script."""

    class ScriptedRunner:
        aliased = False
        judge_s, quickest_s, samples_ranks = 0.001, 0.0001, False

        def __init__(
            self, session: Any, group: ScriptedGroup, problem: Any, case: Any, space: str, slots: int, *, evidence: Evidence
        ) -> None:
            self.group, self.case, self.slots = group, case, slots
            evidence.slots = 4

        def open(self) -> None: ...

        def refresh_inputs(self, slots: int, *, mixed: bool) -> None: ...

        def check(self, phase: str, deadline_s: float, slots: Any, *, first_s: float | None = None) -> None:
            stage.limits.append((phase, len(slots), first_s, deadline_s))
            stage.step(f"{self.group.name} {phase}")

        def close(self) -> None: ...

    class ScriptedStress:
        def __init__(self, checked: Any, rules: Any) -> None:
            self.checked = checked

        def run(self, end: float) -> None:
            stage.step(f"{self.checked.group.name} stress")

    class ScriptedSpeed:
        def __init__(self, runner: Any, modes: Any, *_: Any) -> None:
            self.runner, self.unmeasurable, self.broken = runner, dict[str, str](), False

        def baseline(self) -> None:
            stage.step(f"{self.runner.group.name} baseline")
            if stage.broken_baselines:
                stage.broken_baselines -= 1
                self.unmeasurable["graph"], self.broken = "the reference could not be captured here", True

        def first_calls(self) -> None:
            stage.step(f"{self.runner.group.name} first calls")

        def measure(self, mode: str) -> None:
            stage.step(f"{self.runner.group.name} {mode}")
            if mode in self.unmeasurable:
                raise Unmeasurable(self.unmeasurable[mode])

        def record(self, mode: str) -> Any:
            return measured(mode, 100.0, 50.0).model_copy(update=stage.measured)

    return ScriptedRunner, ScriptedStress, ScriptedSpeed


OUT_OF_MEMORY = "Tried to allocate 8.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1.90 GiB is free."
Run = Callable[..., EvaluationPipeline]


@pytest.fixture
def stage() -> Stage:
    return Stage()


@pytest.fixture
def run(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs an evaluation on pretended GPUs; the examination, with its result in ``result``."""
    runner, stress, speed = scripted(stage)
    monkeypatch.setattr(pipeline_module, "CaseRunner", runner)
    monkeypatch.setattr(pipeline_module, "Stress", stress)
    monkeypatch.setattr(pipeline_module, "Benchmark", speed)
    monkeypatch.setattr(EvaluationPipeline, "_audit", lambda self, runner, speed: stage.step(f"{self.group.ranks.name} audit"))
    path = tmp_path / "1_scripted_pytorch.py"
    path.write_text("")

    def run(
        candidate: Any = None, group: Any = None, modes: Any = ("graph", "eager"), variables: Any = None, **asked: Any
    ) -> EvaluationPipeline:
        job = Job(candidate or candidate_file(path), problems.get(1), "small", 2, modes, **asked)
        node = Node("run", "cuda", 2, {"variables": variables}, None, (), 80e9)
        session: Any = ScriptedSession(stage)
        pipeline = EvaluationPipeline(session, job, node, TimingRules(), lambda _: None, None, 5, group)  # type: ignore[arg-type]
        pipeline.result = pipeline.run()  # type: ignore[attr-defined]
        return pipeline

    return run


def test_the_first_call_of_every_case_may_compile_and_tune(run: Run, stage: Stage) -> None:
    assert run().result.correct
    limits, cases = Deadlines(), len(problems.get(1).cases("small", 2))
    first = [("first_call", 1, None, limits.first_call), ("correctness", 3, None, limits.calls)]
    assert stage.limits == [*first, *[("correctness", 4, limits.first_call, limits.calls)] * (cases - 1)]
    assert limits.first_call > limits.calls


def test_flags_of_a_mode_are_flags_of_the_result(run: Run, stage: Stage) -> None:
    stage.measured["flags"] = ("slower_reference",)
    assert run().result.flags == ("slower_reference",)


REJECTED = Rejected(WrongType(case="c", rank=0, detail="no"))
CRASH = GroupFailure("exit", "first_call", "rank 0 exited", rank=0)


def test_a_right_candidate_is_timed_in_a_second_group_after_the_reference(run: Run, stage: Stage) -> None:
    assert run().result.correct
    cases = len(problems.get(1).cases("small", 2))
    judged = ["group1 load", "group1 first_call", *["group1 correctness"] * cases]
    judged += [*["group1 stress"] * cases, "group1 exit", "end group1"]
    timed = ["take 2", "wait for starts", "group2 baseline", "group2 load", "group2 first calls", "group2 eager", "group2 graph"]
    timed += ["group2 audit", "group2 exit"]
    assert stage.log == ["warm groups 7", "take 1", "warm groups 6", *judged, *timed]


@pytest.mark.parametrize(
    ("step", "error"), [("group1 load", CRASH), ("group1 first_call", CRASH), ("group1 correctness", REJECTED), ("group1 stress", REJECTED)]
)
def test_a_wrong_candidate_costs_one_group_and_no_timing(step: str, error: Exception, run: Run, stage: Stage) -> None:
    stage.wrong[step] = error
    result = run().result
    assert not result.correct and result.verdict.kind in ("wrong_type", "runtime_error") and result.log_tail == "printed"
    assert stage.log[-2:] == [step, "end group1"]
    assert not any("baseline" in item or "take 2" in item for item in stage.log)


def test_a_candidate_that_cannot_leave_costs_no_timing(run: Run, stage: Stage) -> None:
    stage.wrong["group1 exit"] = GroupFailure("hang", "exit", "no answer", ranks=(0,), deadline_s=5.0)
    assert run().result.verdict.kind == "hang" and "take 2" not in stage.log


@pytest.mark.parametrize("step", ["group2 baseline", "take 2"])
def test_what_fails_before_the_candidate_is_loaded_is_not_its_fault(step: str, run: Run, stage: Stage) -> None:
    stage.wrong[step] = GroupFailure("cuda_error", "timing", "sticky", rank=1) if "baseline" in step else HarnessError("none left")
    assert run().result.verdict.kind == "harness_error"


def test_a_failed_capture_of_the_reference_costs_the_group_and_the_mode(run: Run, stage: Stage) -> None:
    stage.broken_baselines = 1
    result = run().result
    assert result.correct and result.speed[0].why == "the reference could not be captured here"
    assert isinstance(result.speed[1], ModeSpeed)
    assert "group2 load" not in stage.log and stage.log.index("end group2") < stage.log.index("take 3") < stage.log.index("group3 baseline")


def test_the_reference_keeps_its_group_unless_a_capture_failed(run: Run, stage: Stage) -> None:
    kept: Any = ScriptedGroup(stage, "kept")
    pipeline = run(reference_candidate(), kept)
    assert pipeline.result.correct and pipeline.group.ranks is kept and pipeline.group.reusable
    assert not any(item.startswith(("take", "warm_groups", "end", "kept exit")) for item in stage.log)

    stage.wrong["kept graph"] = Unmeasurable("cannot be captured: no")
    pipeline = run(reference_candidate(), kept)
    assert pipeline.result.correct and not pipeline.group.reusable

    stage.broken_baselines = 1
    pipeline = run(reference_candidate(), kept)
    assert pipeline.result.correct and pipeline.group.ranks is not kept and pipeline.group.reusable


def test_a_reference_that_does_not_return_is_no_hang(run: Run, stage: Stage) -> None:
    """It is the evaluator's own code, so nothing is said of a candidate."""
    stage.wrong["kept first_call"] = GroupFailure("hang", "first_call", "no answer", ranks=(0,), deadline_s=5.0)
    pipeline = run(reference_candidate(), ScriptedGroup(stage, "kept"))
    assert pipeline.result.verdict.kind == "harness_error" and "the reference did not return" in pipeline.result.verdict.message
    stage.wrong["kept first_call"] = OutOfTime("first_call", 1.0, 1.0, (0, 1), 1.0)
    assert run(reference_candidate(), ScriptedGroup(stage, "kept")).result.verdict.kind == "not_run"


@pytest.mark.parametrize(
    ("called_s", "call_s", "kind"), [(9.0, 9.0, "hang"), (9.0, 4.5, "hang"), (9.0, 3.0, "too_slow"), (0.5, 0.1, "too_slow")]
)
def test_a_limit_that_passes_is_a_hang_if_one_call_took_the_time(called_s: float, call_s: float, kind: str, run: Run, stage: Stage) -> None:
    """However the time was spent, in calls or beside them, a candidate gets nothing for it."""
    stage.wrong["group1 correctness"] = OutOfTime("correctness", 10.0, called_s, (1,), call_s)
    result = run().result
    assert result.verdict.kind == kind and result.reward("correct") == 0.0 and result.flags == ("time_limit",)
    assert "correctness" in result.verdict.reason and "1/small" in result.verdict.reason


def test_an_endless_import_is_a_hang_without_a_case(run: Run, stage: Stage) -> None:
    stage.wrong["group1 load"] = OutOfTime("import", 10.0, 9.0, (0, 1), 9.0)
    verdict = run().result.verdict
    assert isinstance(verdict, Hang) and (verdict.phase, verdict.case, verdict.deadline_s) == ("import", None, 9.0)


def test_a_limit_that_the_evaluator_used_itself_says_nothing(run: Run, stage: Stage) -> None:
    stage.strain = Strain(own_s=5.0)
    stage.wrong["group1 correctness"] = OutOfTime("correctness", 10.0, 4.0, (), 0.0)
    verdict = run().result.verdict
    assert isinstance(verdict, NotRun) and "the evaluator's own ranks computed for 5 s" in verdict.missing


def test_a_limit_that_passes_before_the_import_says_nothing(run: Run, stage: Stage) -> None:
    stage.wrong["take 1"] = OutOfTime("spawn", 10.0)
    verdict = run().result.verdict
    assert isinstance(verdict, NotRun) and "the time limit of 10 s passed in spawn" in verdict.reason


def test_ranks_that_do_not_exit_are_late_as_others_are(run: Run, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the evaluator looks at the load before it believes the hang."""
    stage.strain = Strain(kept_s=1e9)
    monkeypatch.setattr(ScriptedGroup, "await_end", lambda *_: (1,))
    pipeline = run()
    assert pipeline.result.verdict.kind == "hang" and pipeline.late and pipeline.kept_share > 1


def test_a_custom_candidate_buys_nothing_by_a_late_audit(run: Run, stage: Stage) -> None:
    stage.wrong["group2 audit"] = OutOfTime("audit", 10.0, 9.0, (0,), 8.0)
    assert run().result.correct
    stage.wrong["group2 audit"] = OutOfTime("audit", 10.0, 9.0, (0,), 8.0)
    assert run(track="custom").result.verdict.kind == "hang"


def test_a_group_lost_in_a_mode_leaves_the_others_unmeasured(run: Run, stage: Stage) -> None:
    stage.wrong["group2 eager"] = Unmeasurable("rank 1 stuck", kind="hang", group_lost=True)
    result = run().result
    assert result.correct and {speed.mode: speed.status for speed in result.speed} == {"eager": "failed", "graph": "not_measured"}
    failed = next(speed for speed in result.speed if isinstance(speed, Failed))
    assert (failed.kind, failed.reason) == ("hang", "rank 1 stuck") and "group2 exit" not in stage.log
    assert exit_code([result]) == ExitCode.NOT_CORRECT


def test_a_flag_tells_who_needs_multicast(run: Run, stage: Stage, tmp_path: Path) -> None:
    """The verdict stays, and so does the reward."""
    path = tmp_path / "1_multicast_pytorch.py"
    path.write_text("def solution(x):\n    return launch(x, handle.multicast_ptr)\n")
    for off in ("0", "1"):
        stage.wrong["group1 first_call"] = GroupFailure("cuda_error", "first_call", "illegal address", rank=0)
        result = run(candidate_file(path), variables={"TORCH_SYMM_MEM_DISABLE_MULTICAST": off}).result
        assert result.verdict.kind == "cuda_error" and result.reward("correct") == 0.0
        assert result.flags == (("needs_multicast",) if off == "1" else ())
    assert run(candidate_file(path), variables={"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}).result.flags == (), "it does without"


def test_a_defect_ends_one_evaluation_and_not_the_run(run: Run, stage: Stage) -> None:
    stage.wrong["group1 correctness"] = ZeroDivisionError("by a candidate")
    verdict = run().result.verdict
    assert verdict.kind == "harness_error" and "Traceback" in verdict.message
    assert verdict.reason.endswith("this is a defect of peerlane, please report it: ZeroDivisionError: by a candidate")
    assert stage.log[-1] == "end group1"


def test_a_failure_that_no_verdict_can_hold_ends_one_evaluation_too(run: Run, stage: Stage) -> None:
    stage.wrong["group1 correctness"] = GroupFailure("runtime_error", "correctness", "bare \ud800", rank=0)
    verdict = run().result.verdict
    assert verdict.kind == "harness_error" and verdict.model_dump_json()
    assert "this is a defect of peerlane" in verdict.message and stage.log[-1] == "end group1"


def test_a_case_that_does_not_fit_is_nobody_s_fault(run: Run, stage: Stage) -> None:
    stage.wrong["group1 correctness"] = CaseTooLarge("1/huge needs more memory")
    pipeline = run()
    assert pipeline.result.verdict == NotRun(missing="1/huge needs more memory") and not pipeline.group.healthy


def test_a_reference_without_memory_in_the_candidate_s_ranks_leaves_a_right_candidate_untimed(run: Run, stage: Stage) -> None:
    stage.wrong["group2 baseline"] = GroupFailure("out_of_memory", "timing", OUT_OF_MEMORY, rank=1)
    pipeline = run()
    assert pipeline.result.correct and {speed.status for speed in pipeline.result.speed} == {"not_measured"} and not pipeline.group.healthy
    why = pipeline.result.speed[0].why
    assert "the reference ran out of it" in why and "(8.00 GiB more, on a GPU of 139.80 GiB that has 1.90 GiB left)" in why


def test_a_right_candidate_that_cannot_be_timed_for_want_of_memory_is_right(run: Run, stage: Stage) -> None:
    stage.wrong["group2 graph"] = CaseTooLarge("1/huge needs more memory")
    result = run().result
    speeds = {speed.mode: speed for speed in result.speed}
    assert result.correct and [speeds[mode].status for mode in ("eager", "graph")] == ["measured", "not_measured"], "eager came first"
    assert "more memory" in speeds["graph"].why
