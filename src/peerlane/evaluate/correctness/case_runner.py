"""One candidate group on one case: generates and publishes inputs, calls, judges. Turns what ranks report into verdicts."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import random
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from peerlane.errors import CaseTooLarge, HarnessError, ProtocolError
from peerlane.evaluate.correctness.slot_swaps import SlotSwaps, kinds_of_slots
from peerlane.evaluate.processes.protocol import Message, is_count
from peerlane.evaluate.processes.rank_group import GroupFailure, RankGroup
from peerlane.evaluate.processes.session import Session, case_request
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
    TrackViolation,
    Unstable,
    Verdict,
    WrongResult,
    WrongType,
)

_Answers = TypeVar("_Answers")
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
    if failure.kind == "track_violation":
        return TrackViolation(what=failure.message.splitlines()[-1].partition(": ")[2] or failure.message)
    kind = _FAILURES.get(failure.kind, ImportFailure if failure.kind == "not_run" else RuntimeFailure)
    return kind(phase=phase, case=key, dtype=dtype, rank=failure.rank, message=failure.message)


@dataclass
class Evidence:
    """What has been compared in one case so far."""

    slots: int = 0
    integer_slots: int = 0
    timed_slots: int = 0
    stressed_slots: int = 0
    stressed_calls: int = 0
    max_error_over_tolerance: float = 0.0


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
    layouts: list[Message] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    alike: list[int] = field(default_factory=list)
    """kinds of slots, see :func:`kinds_of_slots`"""
    aliased: bool = False
    collectives: int = 0
    """the most that a rank's process groups counted in a timed block of the candidate, warm-up apart"""
    judge_s: float = 0.0
    """what comparing one slot took, last time"""
    reference_s: float = 0.0
    """the longest that one call of the reference took on a rank, at this time and on this machine"""
    call_s: float = 0.0
    """what one call took at rest, messages included, last time"""
    _waiting: list[str] = field(default_factory=list)

    def trusted(self, requests: str | Sequence[Message], **more: Any) -> list[Message]:
        """Asks the trusted ranks: one operation with the same arguments, or one request each. A failure there is the harness's."""
        each: Message | list[Message]
        if isinstance(requests, str):
            each = {"op": requests, "space": self.space, **more}
        else:
            each = [{"space": self.space, **request} for request in requests]
        what = requests if isinstance(requests, str) else requests[0]["op"]
        return self._of_trusted(what, lambda: self.session.trusted.ask(each, "correctness", self.session.deadlines.trusted))

    def _of_trusted(self, what: str, answers: Callable[[], _Answers]) -> _Answers:
        try:
            return answers()
        except GroupFailure as failure:
            tail = self.session.trusted.log_tail()
            self.session.drop_trusted()
            if failure.kind == "out_of_memory":
                raise CaseTooLarge(
                    f"{self.case.key} needs more memory than there is beside the candidate: the evaluator's rank {failure.rank} ran out of "
                    f"it at {what}; use more ranks, a smaller preset, or larger GPUs"
                ) from None
            if failure.kind == "cuda_error" and self.session.shares_faults:
                # The trusted ranks ran code of ours alone; what they report here is a fault of the candidate's that they share.
                told = f"a fault ended all ranks that share a GPU, the evaluator's at {what} of {self.case.key}: {failure.message}"
                raise GroupFailure("cuda_error", "spawn", told) from None
            raise HarnessError(f"{tail}\ntrusted ranks failed at {what} of {self.case.key}: {failure}".strip()) from None

    def ask(self, op: str, phase: Phase, deadline_s: float, **more: Any) -> list[Message]:
        return self.group.ask({"op": op, "space": self.space, **more}, phase, deadline_s)

    def open(self) -> None:
        """Lays the case out and attaches the candidate's ranks. The first case of a group closes what the trusted ranks had open before."""
        room = {"slots": self.slots, "most_bytes": self.most_bytes, "alone": not self.group.spaces}
        self.layouts = self.trusted("open_case", **room, **case_request(self.case))
        self.slots, self.alike = len(self.layouts[0]["arguments"]), kinds_of_slots(self.layouts)
        self.reference_s = max(float(layout["reference_s"]) for layout in self.layouts)
        case = {"op": "attach_case", "space": self.space, "problem": self.case.problem, "variant": self.case.variant}
        requests = [{**{key: value for key, value in layout.items() if key != "ok"}, **case} for layout in self.layouts]
        self.group.ask(requests, "spawn", self.session.deadlines.spawn)
        self.group.spaces.add(self.space)

    def close(self) -> None:
        self.ask("detach", "spawn", self.session.deadlines.spawn)
        self.trusted("close_case")
        self.group.spaces.discard(self.space)

    def deadline(self, seconds: float, calls: int = 1) -> float:
        """How long so many calls of the candidate may take: ``seconds``, or more where the reference is slow or the machine is busy."""
        return max(seconds, _PATIENCE * calls * self.reference_s)

    def generate_inputs(self, *, mixed: bool = False, slots: int | None = None) -> None:
        """New contents in every slot, or in the first ``slots``. ``mixed``: integer draws in one or more of them, at random, where the
        problem has them."""
        self.kinds = [RANDOM] * (self.slots if slots is None else slots)
        if mixed and self.problem.integer_exact:
            one = _dice.randrange(len(self.kinds))
            self.kinds = [INTEGER if slot == one or _dice.random() < 1 / 4 else RANDOM for slot in range(len(self.kinds))]
        self.trusted("generate_inputs", block=self.session.next_block(), kinds=self.kinds)

    def renew(self, slots: int | None = None, *, mixed: bool = False) -> None:
        self.generate_inputs(mixed=mixed, slots=slots)
        self.publish_inputs(slots)

    def publish_inputs(self, slots: int | None = None) -> None:
        """Makes the generated contents visible to the candidate, of all slots or the first ``slots``."""
        self.trusted("publish_inputs", slots=self.slots if slots is None else slots)

    def prepare(self, mode: str, side: str, plan: Message) -> tuple[list[Message], list[Message]]:
        """Has the trusted and the candidate's ranks build their timed blocks, at the same time; the answers of both."""
        with self._meanwhile("prepare", {"op": "prepare", "space": self.space, "mode": mode, "plan": plan}) as ours:
            theirs = self.ask("prepare", "timing", self.session.deadlines.first_call, mode=mode, side=side, plan=plan)
        return ours, theirs

    @contextlib.contextmanager
    def time_slicing(self, rank: int | None, seconds: float) -> Iterator[None]:
        """What is asked of the candidate's ranks in here finds the GPU of ``rank`` kept busy by a trusted rank for ``seconds``, and shares
        it in time slices; with None no GPU.
        """
        if rank is None:
            yield
            return
        requests = [{"op": "keep_busy", "seconds": seconds if number == rank else 0.0} for number in range(len(self.layouts))]
        with self._meanwhile("keep_busy", requests):
            yield

    @contextlib.contextmanager
    def _meanwhile(self, what: str, requests: Message | Sequence[Message]) -> Iterator[list[Message]]:
        """Has the trusted ranks do something while the candidate's are asked. Their answers, which are awaited even if the candidate
        fails, are in the list afterwards; a failure of theirs is the harness's, but for a fault of the GPU after which the candidate
        has failed too.
        """
        trusted, answers = self.session.trusted, list[Message]()
        trusted.begin(requests, "correctness", self.session.deadlines.trusted)
        try:
            yield answers
        except GroupFailure:
            try:
                self._of_trusted(what, trusted.finish)
            except HarnessError as error:
                if not (isinstance(error.__context__, GroupFailure) and error.__context__.kind == "cuda_error"):
                    raise
            raise
        except BaseException:
            self._of_trusted(what, trusted.finish)
            raise
        answers += self._of_trusted(what, trusted.finish)

    def check(self, phase: Phase, deadline_s: float, slots: Sequence[int], *, first_s: float | None = None, **more: Any) -> list[Message]:
        """Calls the candidate on these slots of the published inputs and judges them; raises :class:`Rejected`.

        The calls are at rest: none begins before the one before it has ended on every rank. Returns the answers to the last one.
        ``first_s``: the deadline of the first, where it is another one.
        """
        answers: list[Message] = []
        outputs: list[list[Any]] = [[] for _ in self.layouts]
        for number, slot in enumerate(slots):
            begin = time.monotonic()
            limit_s = self.deadline(first_s if first_s is not None and number == 0 else deadline_s)
            answers = self.ask("call", phase, limit_s, side="candidate", slots=[slot], **more)
            self.call_s = time.monotonic() - begin
            self.aliased |= any(bool(answer.get("aliased")) for answer in answers)
            for rank, answer in enumerate(answers):
                outputs[rank] += _outputs(answer, 1, phase, rank)
        self.collect(slots, slots, outputs, phase)
        self.judge(phase, at_rest=True)
        return answers

    def count_collectives(self, answers: Sequence[Message]) -> None:
        """Takes in what the candidate's process groups counted in a timed block."""
        self.collectives = max(self.collectives, *(collectives_of(answer, "timing", rank) for rank, answer in enumerate(answers)))

    def collect_from(
        self,
        answers: Sequence[Message],
        chosen: Sequence[int],
        phase: Phase,
        slot_swaps: SlotSwaps | None = None,
        intact: Collection[int] | None = None,
    ) -> int:
        """Collects these slots of a block or pass, whose answers describe the outputs of all slots; the bytes that wait. ``intact``: those
        whose inputs only a candidate can have touched; by default all of them."""
        described = [_outputs(answer, self.slots, phase, rank) for rank, answer in enumerate(answers)]
        contents = chosen if slot_swaps is None else [slot_swaps.contents[slot] for slot in chosen]
        kept = [slot for slot in chosen if intact is None or slot in intact]
        return self.collect(chosen, contents, [[outputs[slot] for slot in chosen] for outputs in described], phase, kept)

    def collect(
        self, slots: Sequence[int], contents: Sequence[int], outputs: Sequence[list[Any]], phase: Phase, intact: Sequence[int] = ()
    ) -> int:
        """Has the trusted ranks copy the snapshots of ``slots``, whose calls got what was generated for the slots ``contents``.

        ``outputs[rank][i]`` describes the i-th. The inputs of the slots ``intact`` may not have changed. Returns the bytes that wait.
        """
        common = {"op": "collect", "slots": list(slots), "contents": list(contents), "intact": list(intact)}
        try:
            answers = self.trusted([{**common, "outputs": described} for described in outputs])
        except ProtocolError as error:  # JSON that a rank wrote can grow when it is written again
            raise GroupFailure("garbage", phase, f"a rank's description of its outputs cannot be passed on: {error}") from None
        self._waiting += [self.kinds[slot] for slot in contents]
        return max(int(answer["bytes"]) for answer in answers)

    def recheck_output(self, slot: int, phase: Phase, ended: float) -> None:
        """Compares what the latest call of a block or pass returned, in this slot, with its snapshot; raises :class:`Rejected`.

        A result is good until the next call, and there was none: what changes now was not done when the call ended. ``ended``: when the
        answers came, on the clock ``time.monotonic``; what has been done since then counts as waiting.
        """
        self.trusted("checksum_output", slot=slot)
        time.sleep(max(0.0, ended + _SETTLING_S - time.monotonic()))
        self.ask("copy_again", phase, self.session.deadlines.calls, slot=slot)
        answers = self.trusted("compare_checksum")
        for rank, answer in enumerate(answers):
            if answer["changed"] is not None:
                detail = f"still changing {_SETTLING_S * 1e3:g} ms after its end"
                self._reject(phase, [rank], {"output": f"output {answer['changed']}", "detail": detail}, (1, 1))
        self._raise_if_out_of_bounds(phase, answers)

    def discard(self) -> None:
        self.trusted("discard")
        self._waiting = []

    def judge(self, phase: Phase, *, at_rest: bool = False) -> None:
        """Has the trusted ranks compare what was collected; raises :class:`Rejected`. ``at_rest``: nobody else has touched any inputs since
        they were published, so that all of them are looked at, and what lies between them."""
        begin = time.monotonic()
        answers = self.trusted("judge", at_rest=at_rest)
        kinds, self._waiting = self._waiting, []
        if kinds:
            self.judge_s = (time.monotonic() - begin) / len(kinds)
        self._raise_if_wrong(phase, answers)
        self.evidence.slots += len(kinds)
        self.evidence.integer_slots += kinds.count(INTEGER)
        self.evidence.timed_slots += len(kinds) if phase == "timing" else 0
        self.evidence.stressed_slots += len(kinds) if phase == "stress" else 0
        ratios = [float(item["ratio"]) for answer in answers for item in answer["slots"]]
        self.evidence.max_error_over_tolerance = max([self.evidence.max_error_over_tolerance, *ratios])

    def _raise_if_wrong(self, phase: Phase, answers: Sequence[Message]) -> None:
        for rank, answer in enumerate(answers):
            for item in answer["slots"]:
                if "type" in item:
                    raise Rejected(WrongType(case=self.case.key, rank=rank, detail=plainly(self.problem, item["type"])))
        wrong = [(rank, item) for rank, answer in enumerate(answers) for item in answer["slots"] if item["ratio"] > 1.0]
        if wrong:
            ranks, compared = sorted({rank for rank, _ in wrong}), len(answers[0]["slots"])
            bad = len({number for answer in answers for number, item in enumerate(answer["slots"]) if item["ratio"] > 1.0})
            unstable = phase == "stress" or (phase == "timing" and bad < compared)
            self._reject(phase, ranks, wrong[0][1], (bad, compared) if unstable else None)
        for rank, answer in enumerate(answers):
            if answer["changed_arguments"]:
                names = ", ".join(f"`{name}`" for name in answer["changed_arguments"])
                self._reject(phase, [rank], {"slot": 0, "output": f"{ARGUMENT}{names}", "detail": CHANGED})
        self._raise_if_out_of_bounds(phase, answers)
        for rank, answer in enumerate(answers if self.problem.replicated else ()):
            pairs = list(zip(answer["slots"], answers[0]["slots"], strict=True))
            torn = ((mine["slot"], torn_output(mine["digests"], first["digests"])) for mine, first in pairs)
            if differ := [(slot, output) for slot, output in torn if output is not None]:
                detail = "not the same bits as on rank 0; all ranks must return the same"
                found = {"slot": differ[0][0], "output": differ[0][1], "detail": detail}
                self._reject(phase, [rank], found, (len(differ), len(pairs)) if phase == "stress" else None)

    def _raise_if_out_of_bounds(self, phase: Phase, answers: Sequence[Message]) -> None:
        for rank, answer in enumerate(answers):
            if (found := answer["out_of_bounds"]) is not None:
                where = f"something was written outside it, {found['place']}, where nothing belongs to the candidate"
                self._reject(phase, [rank], {"slot": found["slot"], "output": found["name"], "detail": where})

    def _reject(self, phase: Phase, ranks: Sequence[int], found: Message, unstable: tuple[int, int] | None = None) -> NoReturn:
        """``found``: slot, output and detail of what is wrong on these ranks; of a value also how far it is off, where, and what it is.
        ``unstable``: how many slots are wrong, of how many, where they were right at rest."""
        common = {"case": self.case.key, "rank": ranks[0], "output": found["output"], "detail": found["detail"]}
        if unstable is not None:
            raise Rejected(Unstable(**common, wrong_slots=unstable[0], compared_slots=unstable[1]))
        raise Rejected(
            WrongResult(
                **common,
                phase=phase,
                slot=found["slot"],
                error_over_tolerance=found.get("ratio", math.inf),
                index=found.get("index"),
                got=found.get("got"),
                expected=found.get("want"),
                wrong_ranks=tuple(ranks),
            )
        )


def torn_output(digests: Sequence[tuple[str, int]], others: Sequence[tuple[str, int]]) -> str | None:
    """The first output whose digest is not that of another rank, of two ranks' (name, digest) in the same order."""
    return next((mine[0] for mine, other in zip(digests, others, strict=True) if mine[1] != other[1]), None)


def collectives_of(answer: Message, phase: Phase, rank: int) -> int:
    """How many collectives the process groups of a candidate's rank counted; raises GroupFailure if it does not say."""
    total: Any = answer.get("collectives")
    if not is_count(total):
        raise GroupFailure("garbage", phase, "a rank answered without the number of its collectives", rank=rank)
    return int(total)


def _outputs(answer: Message, count: int, phase: Phase, rank: int) -> list[Any]:
    outputs = answer.get("outputs")
    if not isinstance(outputs, list) or len(outputs) != count:
        raise GroupFailure("garbage", phase, "a rank answered without describing its outputs", rank=rank)
    return outputs
