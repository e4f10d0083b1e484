"""The ranks of both sides, as the supervisor asks them about one case. Each method stands for a request of the same name, which
:mod:`peerlane.evaluate.rank_interface` explains."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from peerlane.errors import CaseTooLarge, HarnessError
from peerlane.evaluate import wire
from peerlane.evaluate.messages import Request
from peerlane.evaluate.processes.rank_group import GroupFailure, RankGroup
from peerlane.evaluate.processes.session import Session, case_id
from peerlane.evaluate.rank_interface import CandidateInterface, TrustedInterface
from peerlane.problems.contract.spec import Case
from peerlane.results.verdict import Phase

_BYTES = re.compile(r"allocate ([\d.]+ \w+)\. GPU \d+ has a total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free")
P = ParamSpec("P")
A = TypeVar("A")


def too_large(case: Case, than: str, where: str, failure: GroupFailure) -> str:
    """Returns the reason why a case is not judged or not timed, with the bytes that PyTorch asked for and those of the GPU, if named."""
    sizes = _BYTES.search(failure.message)
    bytes_ = "" if sizes is None else f" ({sizes[1]} more, on a GPU of {sizes[2]} that has {sizes[3]} left)"
    return f"{case.key} needs more memory than {than}: {where}{bytes_}; use more ranks, a smaller preset, or larger GPUs"


class _InSpace(Generic[P, A]):
    """A method of :class:`Trusted` that asks all ranks for something in its space."""

    def __init__(self, method: Callable[Concatenate[Any, str, P], A]) -> None:
        self._method = method

    def __get__(self, ranks: Trusted, owner: type[Trusted]) -> Callable[P, list[A]]:
        def ask(*positional: P.args, **named: P.kwargs) -> list[A]:
            return ranks.ask(Request(self._method, ranks.space, *positional, **named))

        return ask


class Trusted:
    """The trusted ranks with one case in one space. A failure of theirs is the harness's."""

    def __init__(self, session: Session, case: Case, space: str) -> None:
        self._session, self._case, self.space = session, case, space

    close_case = _InSpace(TrustedInterface.close_case)
    publish_inputs = _InSpace(TrustedInterface.publish_inputs)
    discard_outputs = _InSpace(TrustedInterface.discard_outputs)
    judge_outputs = _InSpace(TrustedInterface.judge_outputs)
    save_output = _InSpace(TrustedInterface.save_output)
    compare_output = _InSpace(TrustedInterface.compare_output)
    undo_swaps = _InSpace(TrustedInterface.undo_swaps)
    time_copies = _InSpace(TrustedInterface.time_copies)

    def open_case(self, slots: int, most_bytes: float, *, alone: bool) -> list[wire.OpenedCase]:
        return self.ask(Request(TrustedInterface.open_case, self.space, case_id(self._case), slots, most_bytes, alone))

    def generate_inputs(self, kinds: list[str]) -> None:
        self.ask(Request(TrustedInterface.generate_inputs, self.space, self._session.next_block(), kinds))

    def collect_outputs(
        self, slots: Sequence[int], contents: Sequence[int], outputs: Sequence[wire.Outputs], intact: Sequence[int]
    ) -> list[int]:
        """``outputs``: what each candidate's rank says that its calls returned. Raises ProtocolError if that cannot be passed on."""
        common = self.space, list(slots), list(contents)
        return self.ask([Request(TrustedInterface.collect_outputs, *common, described, list(intact)) for described in outputs])

    def warm_up_block(self) -> None:
        self.ask(Request(TrustedInterface.warm_up_block))

    def ready_block(self, core: int) -> None:
        self.ask(Request(TrustedInterface.ready_block, core))

    def run_block(self) -> list[wire.BlockRun]:
        return self.ask(Request(TrustedInterface.run_block))

    def prepare_block(self, mode: wire.LaunchMode, plan: wire.BlockPlan) -> list[str | None]:
        return self.ask(Request(TrustedInterface.prepare_block, self.space, mode, "reference", plan))

    @contextlib.contextmanager
    def preparing_block(self, mode: wire.LaunchMode, plan: wire.BlockPlan) -> Iterator[list[str | None]]:
        """Has them build their blocks while the candidate's ranks are asked; their answers are in the list afterwards."""
        with self._meanwhile(Request(TrustedInterface.prepare_block, self.space, mode, "reference", plan)) as answers:
            yield answers

    @contextlib.contextmanager
    def keeping_device_busy(self, seconds: Sequence[float]) -> Iterator[None]:
        """Has each keep its GPU busy for so long while the candidate's ranks are asked."""
        with self._meanwhile([Request(TrustedInterface.keep_device_busy, each) for each in seconds]):
            yield

    def ask(self, requests: Request[A] | Sequence[Request[A]]) -> list[A]:
        """Sends all ranks a request, or each its own, and returns their answers."""
        trusted, deadline_s = self._session.trusted, self._session.deadlines.trusted
        return self._blame_harness(requests, lambda: trusted.ask(requests, "correctness", deadline_s))

    @contextlib.contextmanager
    def _meanwhile(self, requests: Request[A] | Sequence[Request[A]]) -> Iterator[list[A]]:
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

    def _blame_harness(self, requests: Request[A] | Sequence[Request[A]], answers: Callable[[], list[A]]) -> list[A]:
        try:
            return answers()
        except GroupFailure as failure:
            op, key = (requests if isinstance(requests, Request) else requests[0]).op, self._case.key
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
        requests = [Request(CandidateInterface.attach_case, self._space, case.problem, case.variant, layout) for layout in layouts]
        self._group.ask(requests, "spawn", self._session.deadlines.spawn, calls=False)
        self._group.spaces.add(self._space)

    def detach_case(self) -> None:
        request = Request(CandidateInterface.detach_case, self._space)
        self._group.ask(request, "spawn", self._session.deadlines.spawn, calls=False)
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
        """The reference can be called until a candidate is loaded. ``quiet_s``: see :meth:`RankGroup.ask`."""
        request = Request(CandidateInterface.call, self._space, side, list(slots), marker, timeline)
        return self._group.ask(request, phase, deadline_s, quiet_s=quiet_s)

    def call_under_stress(self, requests: Sequence[Request[wire.Outputs]], deadline_s: float) -> list[wire.Outputs]:
        """One request for each rank."""
        return self._group.ask(requests, "stress", deadline_s)

    def prepare_block(self, mode: wire.LaunchMode, side: wire.Side, plan: wire.BlockPlan, deadline_s: float) -> list[str | None]:
        return self._group.ask(Request(CandidateInterface.prepare_block, self._space, mode, side, plan), "timing", deadline_s)

    def warm_up_block(self, deadline_s: float) -> None:
        self._group.ask(Request(CandidateInterface.warm_up_block), "timing", deadline_s)

    def run_block(self, deadline_s: float) -> list[wire.BlockRun]:
        return self._group.ask(Request(CandidateInterface.run_block), "timing", deadline_s)

    def profile_block(self, slots: int, marker: str, deadline_s: float, *, timeline: bool) -> list[wire.ProfiledBlock]:
        return self._group.ask(Request(CandidateInterface.profile_block, self._space, slots, marker, timeline), "audit", deadline_s)

    def ready_block(self, core: int) -> None:
        self._ask_evaluator(Request(CandidateInterface.ready_block, core), "timing")

    def describe_outputs(self, slots: int) -> list[wire.Outputs]:
        return self._ask_evaluator(Request(CandidateInterface.describe_outputs, self._space, slots), "timing")

    def recopy_output(self, slot: int, phase: Phase) -> None:
        self._ask_evaluator(Request(CandidateInterface.recopy_output, self._space, slot), phase)

    def list_connections(self) -> list[list[wire.Connection]]:
        return self._ask_evaluator(Request(CandidateInterface.list_connections), "audit")

    def list_loaded_code(self) -> list[wire.LoadedCode]:
        """One rank disassembles libraries."""
        requests = [Request(CandidateInterface.list_loaded_code, libraries=rank == 0) for rank in range(self._group.world_size)]
        return self._group.ask(requests, "audit", self._session.deadlines.build, calls=False)

    def _ask_evaluator(self, request: Request[A], phase: Phase) -> list[A]:
        """Asks for what runs code of the evaluator alone, with the deadline of a call."""
        return self._group.ask(request, phase, self._session.deadlines.calls, calls=False)
