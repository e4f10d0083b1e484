"""One evaluation: build, import, first call, correctness, stress, speed, exit; the result, whatever happens.

The stages come in the order of their cost, and the first that fails is the last. A fresh group of ranks shows whether the candidate is
right. Only then a second fresh group times it, because there the reference has to be timed first, before any candidate code is loaded.
"""

import contextlib
import math
import random
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import InitVar, dataclass, field

from peerlane.common.words import counted
from peerlane.emulator.host_libraries import runs_here
from peerlane.errors import CandidateChanged, CaseTooLarge, HarnessError
from peerlane.evaluate import messages
from peerlane.evaluate.audit.audit import Auditor, profiler_works
from peerlane.evaluate.audit.library import team_collectives
from peerlane.evaluate.audit.network import count_network_bytes
from peerlane.evaluate.audit.timeline_writer import TimelineWriter
from peerlane.evaluate.candidate_group import CandidateGroup
from peerlane.evaluate.candidates import runs_emulated
from peerlane.evaluate.correctness.case_runner import CaseRunner, Evidence, Rejected, verdict_of
from peerlane.evaluate.correctness.ranks import too_large
from peerlane.evaluate.correctness.stress import Stress
from peerlane.evaluate.messages import Request
from peerlane.evaluate.node import Node
from peerlane.evaluate.plan import Job
from peerlane.evaluate.processes.limit import Cancelled, Limit, OutOfTime
from peerlane.evaluate.processes.pool import NoRanks
from peerlane.evaluate.processes.rank_group import GroupFailure, RankGroup
from peerlane.evaluate.processes.session import Session
from peerlane.evaluate.rank_interface import CandidateInterface
from peerlane.evaluate.ranks.builds import Builds
from peerlane.evaluate.ranks.rank import wants_gpu
from peerlane.evaluate.requirements import lacks_cuda, missing_before, missing_behind, missing_on_virtual_node, needs_gpu, needs_multicast
from peerlane.evaluate.timing.back_to_back import input_groups
from peerlane.evaluate.timing.benchmark import Benchmark, Unmeasurable, slots_to_time
from peerlane.problems.contract.spec import Case
from peerlane.problems.contract.tree import dtype_name
from peerlane.results.record import Mode
from peerlane.results.result import BELOW_NETWORK_BOUND, NEEDS_MULTICAST, Audit, CaseEvidence, NetworkBytes, Result
from peerlane.results.sanitize import sanitize
from peerlane.results.speed_record import Failed, ModeSpeed, NotMeasured, Speed
from peerlane.results.verdict import Correct, Hang, HarnessFailure, NotRun, Phase, TooSlow, TrackViolation, Verdict
from peerlane.sandbox.hidden_files import family_sources, is_answer_file
from peerlane.settings import CANDIDATE_WAIT_S, StressRules, TimingRules, timing_protocol

CHECKED_SLOTS = 4
CHECKED_SLOW_SLOTS, _SLOW_JUDGING_S = 2, 1.0
"""So few slots are checked at rest where comparing one takes longer: an oracle in float64 may take seconds at production sizes."""
_WHOLE_S = 40.0
"""Seconds for an evaluation of one case. Timing that begins late has less of them."""
_TIMED_SHARE = 1 / 4  # of these seconds that timing gets at least
_AUDITED_SHARE, _AUDITED_CALLS = 1 / 10, 8
"""The audit gets this share of the seconds, or the time in which so many calls are compared."""
_MIN_CALLS = 12  # that a right candidate gets: half of the calls of correctness and stress, because the first may be slower
_REPORT_S = 2.0  # seconds within which a kernel whose wait has timed out is heard of
_RAISED = ("runtime_error", "import_error", "cuda_error")


@dataclass
class EvaluationPipeline:
    """Runs one job in a session. ``run`` never raises for what a candidate does."""

    session: Session
    job: Job
    node: Node
    rules: TimingRules
    tell: Callable[[str], None]
    builds: Builds | None = None
    """those of the run, some of which are ahead; None: built when it is their turn"""
    groups_still_needed: int = 0
    """candidate groups that the run may take after this evaluation"""
    kept: InitVar[RankGroup | None] = None
    """the group that the last evaluation of the reference has left"""
    stress: StressRules = field(default_factory=StressRules)
    limit: Limit | None = None
    """the end of the evaluation that its caller sets"""
    tell_wait: Callable[[str, float], None] | None = None
    """hears of a call that may hang: the phase, and the seconds until it counts as one"""
    source: str | None = None
    """what is judged, read once: later changes of the file are nothing to this evaluation"""
    phase: Phase = "spawn"
    case: Case | None = None
    """the case that runs, or ran last"""
    stage_seconds: dict[str, float] = field(default_factory=dict)
    flags: set[str] = field(default_factory=set)
    evidence: dict[str, Evidence] = field(default_factory=dict)
    """by case"""
    shown_right: bool = False
    """the outputs of all cases were right, at rest and under stress"""
    short_of_memory: bool = False
    """the evaluator's own ranks had too little memory on the GPU"""
    runners: list[CaseRunner] = field(default_factory=list)
    """The runners of the cases that were opened, in their order."""
    late: bool = False
    """ranks did not answer in time, or the limit passed before a verdict, whoever is to blame"""
    kept_share: float = 0.0
    """The share of a late evaluation's time in which other programs kept its ranks from their cores."""
    stuck: bool = False
    """ranks made no progress, however busy the machine was"""
    speeds: list[Speed] = field(default_factory=list)
    auditor: Auditor | None = None
    network: NetworkBytes | None = None

    def __post_init__(self, kept: RankGroup | None) -> None:
        self.group = CandidateGroup(self.session, self.limit, kept, tell_wait=self.tell_wait)

    def run(self) -> Result:
        """The result: correct, or the reason why not. After a failure the group has been ended."""
        log = ""
        try:
            verdict = self._judge()
        except Cancelled:
            self.group.end()
            raise
        except Exception as error:  # a defect, which this candidate may have found: the others are judged all the same
            where = traceback.format_exc()[-messages.ERROR_CHARACTERS :]
            what = f"{where}\nthis is a defect of peerlane, please report it: {type(error).__name__}: {error}"
            verdict, self.group.healthy = HarnessFailure(phase=self.phase, message=what.encode(errors="replace").decode()), False
        if not isinstance(verdict, (Correct, NotRun)) and self.group.ranks is not None:
            self.group.end()
            log = self.group.ranks.log_tail()
        return self._result(verdict, log)

    def _judge(self) -> Verdict:
        """The verdict, also of what was raised."""
        try:
            return self._run_stages()
        except Rejected as rejected:
            missing = None
            if not self.node.place.runs_cuda:
                missing = missing_behind(rejected.verdict, self.job.candidate, self.source or "", self.job.problem, self.job.world_size)
            return rejected.verdict if missing is None else NotRun(missing=missing)
        except GroupFailure as failure:
            self.group.healthy, self.late = False, failure.kind in ("hang", "no_answer")
            self.stuck = failure.stuck
            if self.late and not self.stuck:
                self._strain()
            if failure.kind == "out_of_memory" and self.case is not None and not self.group.loaded:
                where = f"the reference ran out of it in {failure.phase}, in the ranks that the candidate gets"
                return self._too_large(too_large(self.case, "there is", where, failure))
            return self._blame(failure)
        except OutOfTime as out:
            self.group.healthy = False
            self.flags.add("time_limit")
            return self._out_of_time(out)
        except CandidateChanged as error:
            return NotRun(missing=str(error))
        except CaseTooLarge as error:
            return self._too_large(str(error))
        except HarnessError as error:
            self.group.healthy, self.group.no_ranks = False, isinstance(error, NoRanks)
            return HarnessFailure(phase=self.phase, message=str(error))

    def _out_of_time(self, out: OutOfTime) -> Verdict:
        """Returns the verdict of a candidate whose time has passed. Only what it cannot bring about itself is an excuse."""
        if self.shown_right and self.job.track != "custom":  # whose audit is a part of being right
            self._leave_untimed(f"time limit: {out}")
            return Correct()
        self.late, more = True, "give the evaluation more with --timeout"
        if not self.group.loaded or self.job.candidate.is_reference:
            return NotRun(missing=f"time: {out}, before a verdict was reached; {more}")
        if 2 * (own_s := self._strain(out.seconds)) >= out.seconds:
            return NotRun(missing=f"time: {out}, of which the evaluator's own ranks computed for {own_s:.3g} s; {more}")
        if out.ranks:
            failure = GroupFailure("hang", out.phase, str(out), ranks=out.ranks, deadline_s=round(out.call_s, 3))
            return verdict_of(failure, self._case_in(failure))
        key, dtype = (None, None) if self.case is None else (self.case.key, dtype_name(self.case.dtype))
        return TooSlow(phase=self.phase, case=key, dtype=dtype, limit_s=out.seconds, calls_s=round(out.called_s, 3))

    def _strain(self, seconds: float | None = None) -> float:
        """Notes the share of ``seconds``, or of the time of these ranks, in which others kept them from their cores; returns for how long
        our own ranks computed."""
        if self.group.ranks is None:
            return 0.0
        strain = self.session.strain(self.group.ranks)
        self.kept_share = strain.kept_s / (seconds or strain.seconds)
        return strain.own_s

    def _case_in(self, failure: GroupFailure) -> Case | None:
        return None if failure.phase in ("build", "import", "exit") else self.case

    def _too_large(self, what: str) -> Verdict:
        self.group.healthy, self.short_of_memory = False, True
        if self.shown_right and self.job.track != "custom":  # only timing takes more than what there is
            self._leave_untimed(what)
            return Correct()
        return NotRun(missing=what)

    def _blame(self, failure: GroupFailure) -> Verdict:
        line = failure.message.strip().splitlines()[-1:]
        compiles = self.job.candidate.is_cuda or self.job.candidate.compiles
        tells = wants_gpu if compiles else lacks_cuda
        if failure.kind in _RAISED and not self.node.place.runs_cuda and tells("".join(line)):
            return NotRun(missing=f"needs a GPU: {line[0]}; run it on a GPU node")
        if self.group.loaded and self.node.place.shares_gpus and (missing := missing_on_virtual_node(failure.message)) is not None:
            return NotRun(missing=f"{missing}: {''.join(line)}")
        stuck_reference = self.job.candidate.is_reference and self.late
        if failure.kind != "machine" and not stuck_reference and (failure.phase in ("build", "import") or self.group.loaded):
            if failure.phase == "spawn":  # it was asked to map another case's memory
                failure.phase = self.phase
            return verdict_of(failure, self._case_in(failure))
        what = "the machine failed" if failure.kind == "machine" else "the ranks failed before any candidate code was loaded"
        if stuck_reference:
            what = "the reference did not return"
        return HarnessFailure(phase=self.phase, message=f"{what}: {failure}")

    def give_up(self, verdict: NotRun) -> Result:
        return self._result(verdict, "")

    @contextlib.contextmanager
    def _in(self, phase: Phase) -> Iterator[None]:
        self.phase = phase
        self.tell(phase)
        if self.limit is not None:
            self.limit.check(phase)
        begin = time.monotonic()
        try:
            yield
        finally:
            self.stage_seconds[phase] = round(self.stage_seconds.get(phase, 0.0) + time.monotonic() - begin, 3)

    def _run_stages(self) -> Verdict:
        job, cases = self.job, self._cases()
        self.source = job.candidate.source()
        nvls = self.node.place.runs_cuda and self.node.node_class.nvls is not False
        if self.source is not None and (missing := missing_before(self.source, nvls=nvls)) is not None:
            return NotRun(missing=missing)
        if job.candidate.compiles:
            with self._in("build"):
                built = (self.builds or Builds(self.session, 0)).finish(job.candidate, self.limit)
            self.stage_seconds["build"] = round(built.seconds, 3)  # most of it was ahead
            if job.candidate.is_cuda and not self.node.place.runs_cuda:
                emulated = self.source is not None and (runs_emulated(self.source) or runs_here(self.source))
                return NotRun(missing=needs_gpu(sanitize(built.raised), built.by_nvcc, emulated=emulated))
        begin = time.monotonic()
        self._spawn()
        self._load()
        checked = [self._check(case, first=number == 0) for number, case in enumerate(cases)]
        with self._in("stress"):
            self._stress(checked)
        self.shown_right = True
        self.case, runner = cases[0], checked[0]
        if job.nodes > 1:
            with self._in("audit"):
                self.network = count_network_bytes(runner, self.session.cluster)
            if self.network.is_below_bound(typical=job.problem.cost(runner.case, 0).typical):
                self.flags.add(BELOW_NETWORK_BOUND)
        timed = bool(job.modes) and not self.node.place.untimed
        timelines = None if job.timelines is None else TimelineWriter(job.timelines, job, self.node.device)
        if timelines is not None and not (timed and job.candidate.is_reference):
            # Before any timing: what hangs there then has a timeline of one call all the same.
            with self._in("audit"):
                timelines.write_call(runner)
        speed: Benchmark | None = None
        if timed:
            speed = self._time(runner, begin)
            runner = speed.runner
        else:
            self._leave_untimed(self.node.place.untimed)
        if not job.candidate.is_reference:
            with self._in("audit"):
                self._audit(runner, speed)
        if timelines is not None and speed is not None and self.group.healthy:
            with self._in("audit"):
                timelines.write_blocks(speed, self.speeds, self.auditor)
        if self.group.healthy:
            self._leave()
            if job.candidate.is_reference and self.group.reusable:  # its group stays, and the next problem may need the memory
                for runner in reversed([runner for runner in self.runners if runner.group is self.group.ranks]):
                    runner.close()
        return Correct()

    def _leave_untimed(self, why: str) -> None:
        """Notes why the modes that have no speed yet get none."""
        measured = {item.mode: item for item in self.speeds}
        self.speeds = [measured.get(mode, NotMeasured(mode=mode, why=why)) for mode in self.job.modes]

    def _cases(self) -> tuple[Case, ...]:
        """Returns the cases to judge, the timed one first; raises :class:`Rejected` if the preset has none."""
        job = self.job
        if not (cases := job.judged_cases()):
            which = f"{job.preset} ({job.variant} variant)" if job.variant != "default" else job.preset
            raise Rejected(NotRun(missing=f"preset {which} of problem {job.problem.id} has no case for {counted(job.world_size, 'rank')}"))
        return cases

    def _spawn(self) -> None:
        with self._in("spawn"):
            if self.group.ranks is None:
                self.session.import_ahead(self.source or "")
                needed = max(1, self.job.groups_needed(self.node.place)) + self.groups_still_needed
                self.session.start_warm_groups(needed)
                self.group.take()
                self.session.start_warm_groups(needed - 1)
        if self.limit is not None:
            self.limit.end += self.stage_seconds["spawn"]  # no candidate is to blame for it

    def _load(self) -> None:
        """Loads the reference or the candidate in the ranks."""
        job, path = self.job, self.job.candidate.path
        if path is None:
            request = Request(CandidateInterface.load_reference, job.problem.id, job.variant)
        else:
            assert self.source is not None, "a candidate with a path has a source"
            cache = self.group.present.admit(job.candidate.sha256)
            arguments = str(path), self.source, cache, job.problem.id, job.variant, family_sources(path)
            request = Request(CandidateInterface.load_candidate, *arguments)
        with self._in("import"):
            self.group.load(request)

    def _open(self, case: Case, space: str, slots: int) -> CaseRunner:
        """A runner of a case; a case that is opened in both groups has one evidence."""
        evidence = self.evidence.setdefault(case.key, Evidence())
        opened = CaseRunner(self.session, self.group.present, self.job.problem, case, space, slots, evidence=evidence)
        opened.quiet_s = self._quiet_s()
        self.runners.append(opened)
        return opened

    def _quiet_s(self) -> float:
        """Returns after how many seconds a call hangs whose ranks make no progress.

        The candidate is called some two dozen times at least, so one with slower calls would not end before the limit. Emulated ranks say
        themselves that they hang, and so do kernels of the kit, with more words.
        """
        if self.limit is None or math.isinf(self.limit.seconds) or self.job.candidate.is_reference or self.node.place.emulated:
            return math.inf
        min_s = CANDIDATE_WAIT_S + _REPORT_S if "peerlane" in (self.source or "") else 0.0
        return max(self.session.deadlines.quiet, self.limit.seconds / _MIN_CALLS, min_s)

    def _check(self, case: Case, *, first: bool) -> CaseRunner:
        """Judges the candidate on a case, at rest, with room for the stress to come; the runner knows what that cost."""
        self.case, limits = case, self.session.deadlines
        stressed = not self.node.place.emulated and (first or self.job.problem.graph)  # without graphs every slot costs a reference call
        slots = CHECKED_SLOTS if not stressed else self.stress.max_slots if first else self.stress.min_slots
        runner = self._open(case, case.key, slots)
        with self._in("first_call" if first else "correctness"):
            runner.open()
            checked = min(CHECKED_SLOTS, runner.slots)
            runner.refresh_inputs(checked, mixed=True)
            if first:
                runner.check("first_call", limits.first_call, [0])
        with self._in("correctness"):
            if first and runner.judge_s > _SLOW_JUDGING_S:
                checked = min(CHECKED_SLOW_SLOTS, checked)
            rest, first_s = (range(1, checked), None) if first else (range(checked), limits.first_call)
            runner.check("correctness", limits.calls, rest, first_s=first_s)  # other shapes may be compiled or tuned for
        return runner

    def _stress(self, checked: list[CaseRunner]) -> None:
        """Stresses the timed case, and of the others, in random order, those that there is time for."""
        timed, *others = checked
        end = time.monotonic() + self.stress.budget_s
        for runner in [timed, *random.SystemRandom().sample(others, len(others))]:
            if runner is not timed and time.monotonic() >= end:
                break
            self.case = runner.case
            Stress(runner, self.stress).run(end)

    def _time(self, checked: CaseRunner, begin: float) -> Benchmark:
        """Times a candidate that is right, in ranks where its code is loaded only after the reference has been timed there. ``begin``: of
        the evaluation."""
        audit_s = max(_AUDITED_SHARE * _WHOLE_S, _AUDITED_CALLS * checked.judge_s)
        end = max(time.monotonic() + _TIMED_SHARE * _WHOLE_S, begin + _WHOLE_S - audit_s)
        if self.limit is not None and math.isfinite(self.limit.seconds):
            end = min(end, self.limit.end - _AUDITED_SHARE * self.limit.seconds)
        speed = self._baseline(checked, {}, end)
        if speed.broken:  # a group in which a capture failed is in a state that nobody knows: another one, without that mode
            self.group.reusable = False
            speed = self._baseline(checked, speed.unmeasurable, end)
        speed.runner.judge_s, speed.runner.samples_ranks = checked.judge_s, checked.samples_ranks
        self._load()
        with self._in("timing"):
            speed.first_calls()
            modes = sorted(self.job.modes)  # eager first: a failed capture must not reach it
            for mode in modes:
                result = self._measure(speed, mode)
                self.speeds = sorted([*self.speeds, result], key=lambda item: self.job.modes.index(item.mode))
        return speed

    def _baseline(self, checked: CaseRunner, unmeasurable: dict[str, str], end: float) -> Benchmark:
        """The reference's own times in a group that holds no candidate code. ``end``: when all timing has to end."""
        job, node = self.job, self.node
        if not (job.candidate.is_reference and self.group.reusable):
            self._leave()
            with self._in("spawn"):
                self.group.end()
                self.group.take()
        self.group.loaded = False
        with self._in("timing"):
            if self.session.pool_settings.timed_alone:
                self.session.wait_for_starts()
            runner = self._open(checked.case, "timed", self._slots_to_time(checked))
            speed = Benchmark(runner, job.modes, self.rules, node.profile, node.peaks, node.memory_bytes, end, job.protocol)
            speed.unmeasurable |= unmeasurable
            speed.baseline()
        return speed

    def _slots_to_time(self, checked: CaseRunner) -> int:
        if self.job.protocol == "kittens":
            group_bytes = max(layout.input_bytes for layout in checked.layouts) / checked.slots
            return input_groups(group_bytes, None if self.node.profile is None else self.node.profile.l2_mib)
        return slots_to_time(checked.quickest_s, self.rules)

    def _measure(self, speed: Benchmark, mode: Mode) -> Speed:
        """Measures a mode; returns the record, or why there is none. Flags what is remarkable."""
        if not self.group.healthy:
            return NotMeasured(mode=mode, why="the ranks were lost in another mode")
        try:
            speed.measure(mode)
        except Unmeasurable as reason:
            self.group.reusable = self.group.reusable and mode in speed.unmeasurable  # it was not even tried
            if reason.group_lost:
                self.group.healthy = False
            if reason.kind:
                return Failed(mode=mode, kind=reason.kind, reason=str(reason))
            return NotMeasured(mode=mode, why=str(reason))
        measured = speed.record(mode)
        self.flags |= set(measured.flags)
        return measured

    def _audit(self, runner: CaseRunner, speed: Benchmark | None) -> None:
        """Records what some calls run. The custom track stands or falls with it; in the open one it is evidence, and failing is a flag."""
        custom = self.job.track == "custom"
        if not self.group.healthy:
            if custom:
                raise Rejected(
                    TrackViolation(what="the ranks were lost under graph replay, before the audit: nothing shows what calls run")
                )
            return
        try:
            self._audit_calls(runner, speed)
        except GroupFailure:
            if custom:
                raise
            self.auditor, self.group.healthy = None, False
            self.flags.add("audit_failed")

    def _audit_calls(self, runner: CaseRunner, speed: Benchmark | None) -> None:
        auditor = self.auditor = Auditor(self.node.place, team_collectives=team_collectives(self.source or ""))
        if speed is not None:
            for item in self.speeds:
                if isinstance(item, ModeSpeed):
                    auditor.audit_block(speed, item.mode)
            auditor.count_timed(runner.collectives)
        auditor.audit_calls(runner, called=0 if speed is None else max(speed.calls.values(), default=0))
        if (integrity_failure := auditor.integrity_failure) is not None:
            raise Rejected(integrity_failure)
        if self.node.place.has_gpus:
            try:
                auditor.look_at_code(runner)
            except GroupFailure:
                self.group.healthy = False  # the code of its kernels then counts as not found, which says less and forgives nothing
        must_move = any(self.job.problem.cost(runner.case, rank).receives for rank in range(runner.case.world_size))
        if is_answer_file(self.job.candidate.path):
            auditor.library.clear()  # solutions that come with peerlane are made of it
        if self.job.track == "custom" and (objection := auditor.violation(must_move=must_move)) is not None:
            if auditor.saw_nothing and not profiler_works(self.session):
                raise Rejected(NotRun(missing="the profiler sees nothing of what a GPU does here, and the custom track needs it"))
            raise Rejected(objection)

    def _leave(self) -> None:
        """Lets the candidate's processes end by themselves, which they must."""
        if not self.group.loaded or self.job.candidate.is_reference:
            return
        with self._in("exit"):
            if stuck := self.group.leave():
                self.late = True
                self._strain()
                raise Rejected(Hang(phase="exit", ranks=stuck, deadline_s=self.session.deadlines.exit))

    def _audit_record(self) -> Audit | None:
        return None if self.auditor is None else self.auditor.record()

    def _result(self, verdict: Verdict, log: str) -> Result:
        job = self.job
        correct = isinstance(verdict, Correct)
        self.flags |= {"aliased_output" for runner in self.runners if runner.aliased}
        self.flags |= {"ranks_sampled" for runner in self.runners if runner.samples_ranks}
        if needs_multicast(verdict, self.source or "", lacking=self.node.node_class.lacks_multicast):
            self.flags.add(NEEDS_MULTICAST)
        return Result(
            **job.asked(self.node.node_class, self.session.isolation.tier, self.node.rules_hash)._asdict(),
            run_id=self.node.run_id,
            device=self.node.device,
            timing_protocol=timing_protocol(job.protocol),
            verdict=verdict,
            correctness=tuple(CaseEvidence(case=case, **vars(evidence)) for case, evidence in self.evidence.items() if evidence.slots),
            speed=tuple(self.speeds) if correct else (),
            audit=self._audit_record(),
            mechanisms=() if self.auditor is None else self.auditor.mechanisms(),
            network=self.network,
            flags=tuple(sorted(self.flags)),
            stage_seconds=self.stage_seconds,
            log_tail=log,
            environment={**self.node.environment, "isolation_measures": list(self.session.isolation.measures)},
        )
