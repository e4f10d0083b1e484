"""One candidate group on one case: generates and publishes inputs, calls, judges. Turns what ranks report into verdicts."""

import contextlib
import importlib.util
import math
import random
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from peerlane.errors import ProtocolError
from peerlane.evaluate import wire
from peerlane.evaluate.correctness.ranks import Candidate, Trusted
from peerlane.evaluate.correctness.slot_swaps import kinds_of_slots
from peerlane.evaluate.processes.rank_group import GroupFailure, RankGroup
from peerlane.evaluate.processes.session import Session
from peerlane.problems.contract.draw import INTEGER, RANDOM
from peerlane.problems.contract.judge import plainly
from peerlane.problems.contract.spec import Case, Problem
from peerlane.problems.contract.tree import dtype_name
from peerlane.results.verdict import (
    ARGUMENT,
    CHANGED,
    BuildError,
    CudaError,
    Hang,
    ImportFailure,
    IntegrityFailure,
    NotRun,
    OutOfMemory,
    Phase,
    RuntimeFailure,
    Unstable,
    Verdict,
    WrongResult,
    WrongType,
)

_MOST_WAITING_BYTES = 512 << 20  # of inputs and outputs of calls at rest, that a rank keeps to judge them together
SLOW_JUDGING_S = 0.5
"""Where comparing one call takes longer on ranks that share a GPU, one rank's output is compared from then on: they compute in turns."""
_WARM_UP = 4.0  # times as long the first comparison may take: libraries are loaded then
_PATIENCE = 50.0  # a candidate may take so many times as long as the reference
_dice = random.SystemRandom()
_SETTLING_S = 0.003  # what is still at work after a call's end has this long to show it


class Rejected(Exception):
    """The candidate is not correct; carries the verdict."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.kind)
        self.verdict = verdict


_FAILURES: dict[str, type[RuntimeFailure | ImportFailure | CudaError | OutOfMemory | BuildError]] = {
    "runtime_error": RuntimeFailure,
    "import_error": ImportFailure,
    "cuda_error": CudaError,
    "out_of_memory": OutOfMemory,
    "build_error": BuildError,
}


def verdict_of(failure: GroupFailure, case: Case | None = None) -> Verdict:
    """The verdict for a candidate group that failed, in a case if one ran."""
    phase: Phase = failure.phase  # type: ignore[assignment]
    key, dtype = (None, None) if case is None else (case.key, dtype_name(case.dtype))
    if failure.kind == "hang":
        return Hang(phase=phase, case=key, dtype=dtype, ranks=failure.ranks, deadline_s=failure.deadline_s)
    if failure.kind == "garbage":
        return IntegrityFailure(phase=phase, what=failure.message)
    if failure.kind == "not_run" and importlib.util.find_spec("triton") is None:  # anybody can say so
        return NotRun(missing="triton is not installed here: pip install 'peerlane[triton]'")
    kind = _FAILURES.get(failure.kind, ImportFailure if failure.kind == "not_run" else RuntimeFailure)
    return kind(phase=phase, case=key, dtype=dtype, rank=failure.rank, message=failure.message)


@dataclass
class Evidence:
    """The comparisons of one case so far."""

    slots: int = 0
    integer_slots: int = 0
    timed_slots: int = 0
    stressed_slots: int = 0
    stressed_calls: int = 0
    max_error_over_tolerance: float = 0.0


def _wrong_whole(output: str, detail: str, slot: int = 0) -> wire.SlotScore:
    """A wrong output that has no worst element."""
    return wire.SlotScore(slot, ratio=math.inf, output=output, detail=detail)


@dataclass
class CaseRunner:
    """A case laid out in one space of the trusted and, once attached, of the candidate's ranks: ``slots`` calls, or fewer if these take
    more than ``most_bytes`` for inputs or for outputs on a rank."""

    session: Session
    group: RankGroup
    problem: Problem
    case: Case
    space: str
    slots: int
    most_bytes: float = 512 << 20
    evidence: Evidence = field(default_factory=Evidence)
    quiet_s: float = math.inf
    """after which a call at rest hangs if its ranks make no progress"""
    layouts: list[wire.CaseLayout] = field(default_factory=list)
    """The layouts of every rank."""
    kinds: list[str] = field(default_factory=list)
    alike: list[int] = field(default_factory=list)
    """kinds of slots, see :func:`kinds_of_slots`"""
    aliased: bool = False
    collectives: int = 0
    """the most that a rank's process groups counted in a timed block of the candidate, warm-up apart"""
    judge_s: float = 0.0
    """what comparing one slot took, last time"""
    samples_ranks: bool = False
    """Whether further calls have the output of one rank compared: an oracle takes long, and the ranks share a GPU. Every rank has its
    turn, in random order."""
    reference_s: float = 0.0
    """the longest that one call of the reference took on a rank, at this time and on this machine"""
    quickest_s: float = 0.0
    """the shortest, on the rank where it took longest"""
    block_s: float = 0.0
    """what as many calls as a block has took the candidate, one behind the other"""
    call_s: float = 0.0
    """what one call took at rest, messages included, last time"""
    _judges: list[int] = field(default_factory=list)
    """ranks whose turn is still to come"""
    _waiting: list[str] = field(default_factory=list)
    """kinds of the contents whose outputs wait to be judged"""

    def __post_init__(self) -> None:
        self.trusted = Trusted(self.session, self.case, self.space)
        self.candidate = Candidate(self.session, self.group, self.space)

    def open(self) -> None:
        """Lays the case out and attaches the candidate's ranks. The first case of a group closes what the trusted ranks had open before."""
        opened = self.trusted.open_case(self.slots, self.most_bytes, alone=self.candidate.alone)
        self.layouts = [answer.layout for answer in opened]
        self.slots, self.alike = len(self.layouts[0].arguments), kinds_of_slots(self.layouts)
        self.reference_s = max(answer.reference_s for answer in opened)
        self.quickest_s = max(answer.quickest_s for answer in opened)
        self.candidate.attach_case(self.case, self.layouts)

    @property
    def slot_bytes(self) -> float:
        """Returns the bytes of one slot, with its outputs, on the rank that needs most."""
        return max(layout.input_bytes + layout.output_bytes for layout in self.layouts) / max(1, self.slots)

    def close(self) -> None:
        self.candidate.detach_case()
        self.trusted.close_case()

    def deadline(self, seconds: float, calls: int = 1) -> float:
        """Returns the timeout of so many calls of the candidate: ``seconds``, or more where the reference is slow here, or where it is
        known that the candidate is slow and does return."""
        return max(seconds, _PATIENCE * calls * self.reference_s, 2 * self.block_s if calls > 1 else 0.0)

    def generate_inputs(self, *, mixed: bool = False, slots: int | None = None) -> None:
        """New contents in every slot, or in the first ``slots``. ``mixed``: integer draws in one or more of them, at random, where the
        problem has them."""
        self.kinds = [RANDOM] * (self.slots if slots is None else slots)
        if mixed and self.problem.integer_exact:
            one = _dice.randrange(len(self.kinds))
            self.kinds = [INTEGER if slot == one or _dice.random() < 1 / 4 else RANDOM for slot in range(len(self.kinds))]
        self.trusted.generate_inputs(self.kinds)

    def refresh_inputs(self, slots: int | None = None, *, mixed: bool = False) -> None:
        """Generates new contents and publishes them."""
        self.generate_inputs(mixed=mixed, slots=slots)
        self.publish_inputs(slots)

    def publish_inputs(self, slots: int | None = None) -> None:
        """Makes the generated contents visible to the candidate, of all slots or the first ``slots``."""
        self.trusted.publish_inputs(self.slots if slots is None else slots)

    def prepare_block(self, mode: wire.LaunchMode, side: wire.Side, plan: wire.BlockPlan) -> tuple[list[str | None], list[str | None]]:
        """Has the trusted and the candidate's ranks build their timed blocks, at the same time; returns the answers of both."""
        with self.trusted.preparing_block(mode, plan) as ours:
            theirs = self.candidate.prepare_block(mode, side, plan, self.deadline(self.session.deadlines.first_call, plan.calls))
        return ours, theirs

    @contextlib.contextmanager
    def time_slicing(self, rank: int | None, seconds: float) -> Iterator[None]:
        """Has a trusted rank keep the GPU of ``rank`` busy for ``seconds``; with None no GPU is kept busy.

        What is asked of the candidate's ranks in here shares that GPU in time slices.
        """
        if rank is None:
            yield
            return
        with self.trusted.keeping_device_busy([seconds if number == rank else 0.0 for number in range(len(self.layouts))]):
            yield

    def check(
        self,
        phase: Phase,
        deadline_s: float,
        slots: Sequence[int],
        *,
        first_s: float | None = None,
        marker: str | None = None,
        timeline: bool = False,
    ) -> list[wire.Called]:
        """Calls the candidate on these slots of the published inputs and judges them; raises :class:`Rejected`.

        The calls are at rest: none begins before the one before it has ended on every rank. Returns the answers to the last one.
        ``first_s``: the deadline of the first, where it is another one. With a ``marker`` the calls are recorded.
        """
        answers: list[wire.Called] = []
        outputs: list[wire.Outputs] = [[] for _ in self.layouts]
        waiting: list[int] = []
        for number, slot in enumerate(slots):
            begin = time.monotonic()
            limit_s = self.deadline(first_s if first_s is not None and number == 0 else deadline_s)
            quiet_s = self.deadline(self.quiet_s)
            answers = self.candidate.call([slot], phase, limit_s, marker=marker, timeline=timeline, quiet_s=quiet_s)
            self.call_s = time.monotonic() - begin
            self.aliased |= any(answer.aliased for answer in answers)
            for rank, answer in enumerate(answers):
                outputs[rank] += answer.outputs
            waiting.append(slot)
            if len(waiting) * self.slot_bytes > _MOST_WAITING_BYTES and slot != slots[-1]:
                self.collect(waiting, waiting, outputs, phase)
                self.judge(phase)
                waiting, outputs = [], [[] for _ in self.layouts]
        self.collect(waiting, waiting, outputs, phase)
        self.judge(phase, at_rest=True)
        return answers

    def count_collectives(self, answers: Sequence[wire.BlockRun]) -> None:
        """Takes in what the candidate's process groups counted in a timed block."""
        self.collectives = max(self.collectives, *(answer.collectives for answer in answers))

    def collect_from(
        self,
        outputs: Sequence[wire.Outputs],
        chosen: Sequence[int],
        phase: Phase,
        contents: Sequence[int] | None = None,
        intact: Collection[int] | None = None,
    ) -> int:
        """Collects the slots ``chosen`` of a block or pass, of which ranks have described all outputs; returns the bytes that wait.

        ``contents``: for every slot, the one that its inputs were generated for, where slots were swapped. ``intact``: slots that the
        evaluator has not modified; by default all of them.
        """
        sources = chosen if contents is None else [contents[slot] for slot in chosen]
        kept = [slot for slot in chosen if intact is None or slot in intact]
        return self.collect(chosen, sources, [[described[slot] for slot in chosen] for described in outputs], phase, kept)

    def collect(
        self, slots: Sequence[int], contents: Sequence[int], outputs: Sequence[wire.Outputs], phase: Phase, intact: Sequence[int] = ()
    ) -> int:
        """Has the trusted ranks copy the snapshots of ``slots``, whose calls got what was generated for the slots ``contents``.

        ``outputs[rank][i]`` describes the i-th. The inputs of the slots ``intact`` may not have changed. Returns the bytes that wait.
        """
        try:
            answers = self.trusted.collect_outputs(slots, contents, outputs, intact)
        except ProtocolError as error:  # JSON that a rank wrote can grow when it is written again
            raise GroupFailure("garbage", phase, f"a rank's description of its outputs cannot be passed on: {error}") from None
        self._waiting += [self.kinds[slot] for slot in contents]
        return max(answers)

    def recheck_output(self, slot: int, phase: Phase, ended: float) -> None:
        """Compares what the latest call of a block or pass returned, in this slot, with its snapshot; raises :class:`Rejected`.

        A result is good until the next call, and there was none: what changes now was not done when the call ended. ``ended``: when the
        answers came, on the clock ``time.monotonic``; what has been done since then counts as waiting.
        """
        self.trusted.save_output(slot)
        time.sleep(max(0.0, ended + _SETTLING_S - time.monotonic()))
        self.candidate.recopy_output(slot, phase)
        answers = self.trusted.compare_output()
        for rank, answer in enumerate(answers):
            if answer.changed is not None:
                detail = f"still changing {_SETTLING_S * 1e3:g} ms after its end"
                self._reject(phase, [rank], _wrong_whole(f"output {answer.changed}", detail), (1, 1))
        self._raise_if_out_of_bounds(phase, answers)

    def discard(self) -> None:
        """Forgets what was collected and not judged."""
        self.trusted.discard_outputs()
        self._waiting, self._judges = [], []

    def _next_judge(self) -> int:
        if not self._judges:
            self._judges = _dice.sample(range(len(self.layouts)), len(self.layouts))
        return self._judges.pop()

    def judge(self, phase: Phase, *, at_rest: bool = False) -> None:
        """Has the trusted ranks compare what was collected; raises :class:`Rejected`. ``at_rest``: nobody else has touched any inputs since
        they were published, so that all of them are looked at, and what lies between them."""
        begin = time.monotonic()
        judges = [self._next_judge() for _ in self._waiting] if self.samples_ranks else []
        answers = self.trusted.judge_outputs(at_rest, judges)
        kinds, self._waiting = self._waiting, []
        if kinds:
            self.judge_s = (time.monotonic() - begin) / len(kinds)
            slow_s = SLOW_JUDGING_S if self.evidence.slots else _WARM_UP * SLOW_JUDGING_S
            self.samples_ranks |= self.judge_s > slow_s and self.session.place.shares_gpus
        self._raise_if_wrong(phase, answers)
        self.evidence.slots += len(kinds)
        self.evidence.integer_slots += kinds.count(INTEGER)
        self.evidence.timed_slots += len(kinds) if phase == "timing" else 0
        self.evidence.stressed_slots += len(kinds) if phase == "stress" else 0
        ratios = [score.ratio for answer in answers for score in answer.slots]
        self.evidence.max_error_over_tolerance = max([self.evidence.max_error_over_tolerance, *ratios])

    def _raise_if_wrong(self, phase: Phase, answers: Sequence[wire.Judgement]) -> None:
        for rank, answer in enumerate(answers):
            for score in answer.slots:
                if score.mismatch is not None:
                    raise Rejected(WrongType(case=self.case.key, rank=rank, detail=plainly(self.problem, score.mismatch)))
        wrong = [(rank, score) for rank, answer in enumerate(answers) for score in answer.slots if score.ratio > 1.0]
        if wrong:
            ranks, compared = sorted({rank for rank, _ in wrong}), len(answers[0].slots)
            bad = len({number for answer in answers for number, score in enumerate(answer.slots) if score.ratio > 1.0})
            unstable = phase == "stress" or (phase == "timing" and bad < compared)
            self._reject(phase, ranks, wrong[0][1], (bad, compared) if unstable else None)
        for rank, answer in enumerate(answers):
            if answer.changed_arguments:
                names = ", ".join(f"`{name}`" for name in answer.changed_arguments)
                self._reject(phase, [rank], _wrong_whole(f"{ARGUMENT}{names}", CHANGED))
        self._raise_if_out_of_bounds(phase, answers)
        for rank, answer in enumerate(answers if self.problem.replicated else ()):
            pairs = list(zip(answer.slots, answers[0].slots, strict=True))
            torn = ((mine.slot, torn_output(mine.digests, first.digests)) for mine, first in pairs)
            if differ := [(slot, output) for slot, output in torn if output is not None]:
                detail = "not the same bits as on rank 0; all ranks must return the same"
                wrong_bits = _wrong_whole(differ[0][1], detail, differ[0][0])
                self._reject(phase, [rank], wrong_bits, (len(differ), len(pairs)) if phase == "stress" else None)

    def _raise_if_out_of_bounds(self, phase: Phase, answers: Sequence[wire.Judgement | wire.OutputComparison]) -> None:
        for rank, answer in enumerate(answers):
            if (region := answer.out_of_bounds) is not None:
                where = f"something was written outside it, {region.place}, where nothing belongs to the candidate"
                self._reject(phase, [rank], _wrong_whole(region.name, where, region.slot))

    def _reject(self, phase: Phase, ranks: Sequence[int], wrong: wire.SlotScore, unstable: tuple[int, int] | None = None) -> NoReturn:
        """``wrong``: what is wrong on these ranks. ``unstable``: how many slots are wrong, of how many, where they were right at rest."""
        common: dict[str, Any] = {"case": self.case.key, "rank": ranks[0], "output": wrong.output, "detail": wrong.detail}
        if unstable is not None:
            raise Rejected(Unstable(**common, wrong_slots=unstable[0], compared_slots=unstable[1]))
        raise Rejected(
            WrongResult(
                **common,
                phase=phase,
                slot=wrong.slot,
                error_over_tolerance=wrong.ratio,
                index=wrong.index,
                got=wrong.got,
                expected=wrong.want,
                wrong_ranks=tuple(ranks),
            )
        )


def torn_output(digests: Sequence[tuple[str, int]], others: Sequence[tuple[str, int]]) -> str | None:
    """The first output whose digest is not that of another rank, of two ranks' (name, digest) in the same order."""
    return next((mine[0] for mine, other in zip(digests, others, strict=True) if mine[1] != other[1]), None)
