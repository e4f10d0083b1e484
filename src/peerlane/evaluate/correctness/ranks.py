"""The ranks of both sides, as the supervisor asks them about one case: a method for each request.

Every request is a class of :mod:`peerlane.evaluate.wire`. The methods of the same names in ``ranks/trusted.py`` and ``ranks/candidate.py``
carry it out.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from peerlane.errors import CaseTooLarge, HarnessError
from peerlane.evaluate import wire
from peerlane.evaluate.processes.rank_group import GroupFailure, RankGroup
from peerlane.evaluate.processes.session import Session, case_id
from peerlane.problems.contract.spec import Case
from peerlane.results.verdict import Phase

_BYTES = re.compile(r"allocate ([\d.]+ \w+)\. GPU \d+ has a total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free")
A = TypeVar("A", bound=wire.Answer)
Steps = tuple[tuple[int, int, int], ...]
"""of :class:`SlotSwaps`"""


def too_large(case: Case, than: str, where: str, failure: GroupFailure) -> str:
    """Returns the reason why a case is not judged or not timed, with the bytes that PyTorch asked for and those of the GPU, if named."""
    found = _BYTES.search(failure.message)
    bytes_ = "" if found is None else f" ({found[1]} more, on a GPU of {found[2]} that has {found[3]} left)"
    return f"{case.key} needs more memory than {than}: {where}{bytes_}; use more ranks, a smaller preset, or larger GPUs"


class Trusted:
    """The trusted ranks with one case in one space. A failure of theirs is the harness's."""

    def __init__(self, session: Session, case: Case, space: str) -> None:
        self._session, self._case, self._space = session, case, space

    def open_case(self, slots: int, most_bytes: float, *, alone: bool) -> list[wire.OpenedCase]:
        return self._ask(wire.OpenCase(self._space, case_id(self._case), slots, most_bytes, alone))

    def close_case(self) -> None:
        self._ask(wire.CloseCase(self._space))

    def generate_inputs(self, kinds: list[str]) -> None:
        self._ask(wire.GenerateInputs(self._space, self._session.next_block(), kinds))

    def publish_inputs(self, slots: int) -> None:
        self._ask(wire.PublishInputs(self._space, slots))

    def collect_outputs(
        self, slots: Sequence[int], contents: Sequence[int], outputs: Sequence[wire.Outputs], intact: Sequence[int]
    ) -> list[wire.CollectedBytes]:
        """``outputs``: what each candidate's rank says that its calls returned. Raises ProtocolError if that cannot be passed on."""
        common = list(slots), list(contents)
        return self._ask([wire.CollectOutputs(self._space, *common, described, list(intact)) for described in outputs])

    def discard_outputs(self) -> None:
        self._ask(wire.DiscardOutputs(self._space))

    def judge_outputs(self, *, at_rest: bool, judges: Sequence[int] = ()) -> list[wire.Judgement]:
        return self._ask(wire.JudgeOutputs(self._space, at_rest, [*judges]))

    def save_output(self, slot: int) -> None:
        self._ask(wire.SaveOutput(self._space, slot))

    def compare_output(self) -> list[wire.OutputComparison]:
        return self._ask(wire.CompareOutput(self._space))

    def prepare_block(self, mode: wire.LaunchMode, plan: wire.BlockPlan) -> list[wire.PreparedBlock]:
        return self._ask(wire.PrepareBlock(self._space, mode, "reference", plan))

    def warm_up_block(self) -> None:
        self._ask(wire.WarmUpBlock())

    def ready_block(self, core: int) -> None:
        self._ask(wire.ReadyBlock(core))

    def run_block(self) -> list[wire.BlockRun]:
        return self._ask(wire.RunBlock())

    def undo_swaps(self) -> None:
        self._ask(wire.UndoSwaps(self._space))

    def time_copies(self) -> list[wire.CopiesTime]:
        return self._ask(wire.TimeCopies(self._space))

    @contextlib.contextmanager
    def preparing_block(self, mode: wire.LaunchMode, plan: wire.BlockPlan) -> Iterator[list[wire.PreparedBlock]]:
        """Has them build their blocks while the candidate's ranks are asked; their answers are in the list afterwards."""
        with self._meanwhile(wire.PrepareBlock(self._space, mode, "reference", plan)) as answers:
            yield answers

    @contextlib.contextmanager
    def keeping_device_busy(self, seconds: Sequence[float]) -> Iterator[None]:
        """Has each keep its GPU busy for so long while the candidate's ranks are asked."""
        with self._meanwhile([wire.KeepDeviceBusy(each) for each in seconds]):
            yield

    def _ask(self, requests: wire.Request[A] | Sequence[wire.Request[A]]) -> list[A]:
        trusted, deadline_s = self._session.trusted, self._session.deadlines.trusted
        return self._blame_harness(requests, lambda: trusted.ask(requests, "correctness", deadline_s))

    @contextlib.contextmanager
    def _meanwhile(self, requests: wire.Request[A] | Sequence[wire.Request[A]]) -> Iterator[list[A]]:
        """Has the trusted ranks do something while the candidate's are asked. Their answers, which are awaited even if the candidate
        fails, are in the list afterwards; a failure of theirs is the harness's, but for a fault of the GPU after which the candidate
        has failed too.
        """
        trusted, answers = self._session.trusted, list[A]()
        trusted.begin(requests, "correctness", self._session.deadlines.trusted)
        try:
            yield answers
        except GroupFailure:
            try:
                self._blame_harness(requests, trusted.finish)
            except HarnessError as error:
                if not (isinstance(error.__context__, GroupFailure) and error.__context__.kind == "cuda_error"):
                    raise
            raise
        except BaseException:
            self._blame_harness(requests, trusted.finish)
            raise
        answers += self._blame_harness(requests, trusted.finish)

    def _blame_harness(self, requests: wire.Request[A] | Sequence[wire.Request[A]], answers: Callable[[], list[A]]) -> list[A]:
        try:
            return answers()
        except GroupFailure as failure:
            op, key = (requests if isinstance(requests, wire.Request) else requests[0]).op, self._case.key
            tail = self._session.trusted.log_tail()
            self._session.drop_trusted()
            if failure.kind == "out_of_memory":
                where = f"the evaluator's rank {failure.rank} ran out of it at {op}"
                raise CaseTooLarge(too_large(self._case, "there is beside the candidate", where, failure)) from None
            if failure.kind == "cuda_error" and self._session.shares_faults:
                # The trusted ranks ran code of ours alone; what they report here is a fault of the candidate's that they share.
                shared = f"a fault ended all ranks that share a GPU, the evaluator's at {op} of {key}: {failure.message}"
                raise GroupFailure("cuda_error", "spawn", shared) from None
            raise HarnessError(f"{tail}\ntrusted ranks failed at {op} of {key}: {failure}".strip()) from None


class Candidate:
    """A candidate's ranks with one case in one space. Every method raises GroupFailure for what they do, or fail to do.

    ``calls=False`` marks the requests that run no code of the candidate: who does not answer one of them does not hang.
    """

    def __init__(self, session: Session, group: RankGroup, space: str) -> None:
        self._session, self._group, self._space = session, group, space

    @property
    def alone(self) -> bool:
        """True if no case is attached."""
        return not self._group.spaces

    def attach_case(self, case: Case, layouts: Sequence[wire.CaseLayout]) -> None:
        requests = [wire.AttachCase(self._space, case.problem, case.variant, layout) for layout in layouts]
        self._group.ask(requests, "spawn", self._session.deadlines.spawn, calls=False)
        self._group.spaces.add(self._space)

    def detach_case(self) -> None:
        self._group.ask(wire.DetachCase(self._space), "spawn", self._session.deadlines.spawn, calls=False)
        self._group.spaces.discard(self._space)

    def call(
        self,
        slots: Sequence[int],
        phase: Phase,
        deadline_s: float,
        *,
        side: wire.Side = "candidate",
        marker: str | None = None,
        timeline: bool = False,
        quiet_s: float = math.inf,
    ) -> list[wire.Called]:
        """With a ``marker`` the calls are recorded, with ``timeline`` event by event. The reference can be called until a candidate is
        loaded. ``quiet_s``: see :meth:`RankGroup.ask`."""
        return self._group.ask(wire.Call(self._space, side, list(slots), marker, timeline), phase, deadline_s, quiet_s=quiet_s)

    def call_under_stress(self, requests: Sequence[wire.CallUnderStress], deadline_s: float) -> list[wire.DescribedOutputs]:
        """One request for each rank."""
        return self._group.ask(requests, "stress", deadline_s)

    def prepare_block(self, mode: wire.LaunchMode, side: wire.Side, plan: wire.BlockPlan, deadline_s: float) -> list[wire.PreparedBlock]:
        return self._group.ask(wire.PrepareBlock(self._space, mode, side, plan), "timing", deadline_s)

    def warm_up_block(self, deadline_s: float) -> None:
        self._group.ask(wire.WarmUpBlock(), "timing", deadline_s)

    def ready_block(self, core: int) -> None:
        self._group.ask(wire.ReadyBlock(core), "timing", self._session.deadlines.calls, calls=False)

    def run_block(self, deadline_s: float) -> list[wire.BlockRun]:
        return self._group.ask(wire.RunBlock(), "timing", deadline_s)

    def describe_outputs(self, slots: int) -> list[wire.DescribedOutputs]:
        return self._group.ask(wire.DescribeOutputs(self._space, slots), "timing", self._session.deadlines.calls, calls=False)

    def recopy_output(self, slot: int, phase: Phase) -> None:
        self._group.ask(wire.RecopyOutput(self._space, slot), phase, self._session.deadlines.calls, calls=False)

    def profile_block(self, slots: int, marker: str, deadline_s: float, *, timeline: bool) -> list[wire.ProfiledBlock]:
        return self._group.ask(wire.ProfileBlock(self._space, slots, marker, timeline), "audit", deadline_s)

    def list_connections(self) -> list[wire.Connections]:
        return self._group.ask(wire.ListConnections(), "audit", self._session.deadlines.calls, calls=False)

    def list_loaded_code(self) -> list[wire.LoadedCode]:
        """One rank disassembles libraries."""
        requests = [wire.ListLoadedCode(libraries=rank == 0) for rank in range(self._group.world_size)]
        return self._group.ask(requests, "audit", self._session.deadlines.build, calls=False)
