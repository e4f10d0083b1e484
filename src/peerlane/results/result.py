"""The stored result of an evaluation: the verdict, the evidence, the speed, and the identity. Read :class:`Result` first.

A result that contradicts itself cannot be constructed.
"""

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal, NamedTuple, Self, get_args

from pydantic import Field, model_validator
from pydantic.json_schema import SkipJsonSchema

from peerlane.common.place import Device
from peerlane.common.words import counted
from peerlane.errors import UsageError
from peerlane.results.feedback import feedback
from peerlane.results.identity import Identity, NodeClass, environment_hash
from peerlane.results.record import Mode, Ratio, Record, Track
from peerlane.results.sanitize import sanitize
from peerlane.results.speed_record import Estimate, ModeSpeed, Speed
from peerlane.results.verdict import SAYS_NOTHING, Correct, Verdict
from peerlane.settings import TIMING_PROTOCOL

RewardKind = Literal["correct", "log_speedup", "fast_p"]
MechanismName = Literal["copy_engine", "sm_load_store", "tma", "nvls", "nvshmem", "nccl_device", "nccl", "gloo"]
Confidence = Literal["seen", "possible", "loaded"]
NEEDS_MULTICAST: Final = "needs_multicast"
"""The flag of a candidate that failed or was not run, and asks for NVLink multicast, which was off."""
OVERLOADED: Final = "overloaded"
"""The flag of an evaluation that other programs kept from its cores: it says nothing about the candidate."""
SCHEMA_VERSION: Final = 2
"""The version of the lines of a ``results.jsonl``."""


class CandidateInfo(Record):
    """The code that was judged."""

    name: str = Field(description="the path below the folder that was asked for, without .py; or reference")
    labels: dict[str, str | int] = Field(default_factory=dict, description="who wrote it: model, sample, step")
    path: str | None = Field(default=None, description="None for the built-in reference and for texts")
    sha256: str = Field(min_length=16, description="of the file's bytes; of the word 'reference' and the version for the reference")
    backend: Literal["pytorch", "cuda", "triton", "reference"]


class ProblemInfo(Record):
    """A problem in one of its variants."""

    id: int = Field(ge=1)
    slug: str
    variant: str
    source_hash: str | None = Field(default=None, description="of the code that judges and times the problem; None: not recorded")


class CaseEvidence(Record):
    """The comparisons of one case."""

    case: str
    slots: int = Field(ge=0, description="slots compared, on every rank")
    integer_slots: int = Field(ge=0, description="of those, drawn so that the answer is exact")
    timed_slots: int = Field(ge=0, description="of those, outputs of timed calls")
    stressed_slots: int = Field(default=0, ge=0, description="of those, outputs of calls under stress")
    stressed_calls: int = Field(default=0, ge=0, description="calls under stress, compared or not")
    max_error_over_tolerance: Ratio = Field(ge=0)


class Audit(Record):
    """A record of audited calls. Counts are per call: the largest of any rank and call."""

    calls: int = Field(ge=1, description="audited calls, on every rank")
    block_modes: tuple[Mode, ...] = Field(description="launch modes in which a whole block was recorded too")
    kernels: dict[str, int] = Field(description="by whose they are: own, triton, library, aten, nccl")
    copies: dict[str, int] = Field(description="by the memory at their ends: peer, same_gpu, host")
    memsets: int = Field(ge=0)
    operators: dict[str, int] = Field(description="PyTorch's operators of communication, by name")
    other: int = Field(ge=0, description="all else that was recorded: other operators, calls of the CUDA runtime")
    kernel_names: tuple[str, ...] = Field(description="of the kernels that ran, the most frequent first, 32 at most")
    compiled: tuple[str, ...] = Field(
        default=(), description="on emulated ranks: registers and shared memory of the kernels, as the GPU's compiler says; 32 at most"
    )
    choices: tuple[str, ...] = Field(default=(), description="of the kit's tuner, as rank 0 tells them; 16 at most")
    unrecorded_collectives: int = Field(ge=0, description="that process groups counted in calls which were not recorded")
    complete: bool = Field(description="every record has both marks that were set at its ends, and the profiler was left alone")

    @property
    def own_communication(self) -> bool:
        """True if the record is complete and holds no communication but the candidate's own."""
        return self.complete and not (self.operators or self.unrecorded_collectives or self.kernels.get("nccl", 0))


class Mechanism(Record):
    """A way to move data between ranks, and what speaks for its use.

    ``seen``: in an audited call, or instructions for it in a kernel that ran there. ``possible``: what ran there may have served it or
    something else. ``loaded``: instructions in code that was loaded and did not run there.
    """

    name: MechanismName
    confidence: Confidence
    evidence: str = Field(min_length=1)


BELOW_NETWORK_BOUND: Final = "below_network_bound"
"""The flag of a candidate whose ranks exchanged less over the network than the problem needs, hence something by another way."""


class NetworkBytes(Record):
    """Bytes between nodes in one call of the timed case, of the rank with most, read from the kernel's counters of TCP connections."""

    egress: int = Field(ge=0, description="sent to ranks of other nodes, with what libraries add")
    ingress: int = Field(ge=0, description="received from ranks of other nodes")
    least_egress: float = Field(ge=0, description="what the rank with most must send at least, by the problem's cost")
    least_ingress: float = Field(ge=0)

    @property
    def over_least(self) -> float | None:
        """The counted bytes over the least, of the direction where this is larger; None where nothing needs to be moved."""
        pairs = ((self.egress, self.least_egress), (self.ingress, self.least_ingress))
        return max((counted / least for counted, least in pairs if least), default=None)

    def is_below_bound(self, *, typical: bool) -> bool:
        """Tells whether less was moved than must be; ``typical``: the bound is a mean over contents, of which a call may need half."""
        certain = 0.5 if typical else 1.0
        return self.egress < certain * self.least_egress or self.ingress < certain * self.least_ingress


class Asked(NamedTuple):
    """The fields of a result that are known before it: what is asked, of which evaluator, and on what machine."""

    evaluator_version: str
    candidate: CandidateInfo
    problem: ProblemInfo
    preset: str
    world_size: int
    modes: tuple[Mode, ...]
    cases: Literal["all", "timed"]
    isolation: Literal["L0", "L1", "L2"]
    track: Track
    node: NodeClass
    rules_hash: str | None

    @property
    def identity(self) -> Identity:
        return Identity(
            sha256=self.candidate.sha256,
            problem=self.problem.id,
            preset=self.preset,
            world_size=self.world_size,
            variant=self.problem.variant,
            modes=self.modes,
            cases=self.cases,
            track=self.track,
            isolation=self.isolation,
            node=self.node,
            evaluator_version=self.evaluator_version,
            rules_hash=self.rules_hash,
            source_hash=self.problem.source_hash,
        )


class Result(Record):
    """One candidate, one problem, one preset, one world size: a line of ``results.jsonl``."""

    schema_version: Literal[2] = SCHEMA_VERSION
    type: Literal["result"] = "result"
    evaluator_version: str
    run_id: str
    finished_at: datetime = Field(default_factory=lambda: datetime.now(UTC))
    candidate: CandidateInfo
    problem: ProblemInfo
    preset: str
    world_size: int = Field(ge=1)
    device: Device
    modes: tuple[Mode, ...] = Field(description="launch modes asked for; none: correctness alone")
    cases: Literal["all", "timed"] = Field(default="all", description="timed: the preset's first case alone was judged")
    isolation: Literal["L0", "L1", "L2"] = Field(description="L0: unverified, the candidate was not confined")
    track: Track
    node: NodeClass
    rules_hash: str | None = Field(default=None, description="of the settings of timing, stress and deadlines; None: not recorded")
    timing_protocol: Annotated[int, Field(ge=1)] | Literal["kittens"] = Field(
        default=1, description="version of the timing protocol, 1: not every output was copied; kittens: the public protocol"
    )
    environment_hash: str = Field(default="", description="names the line of type environment that describes the machine and its software")
    verdict: Verdict
    correctness: tuple[CaseEvidence, ...] = ()
    speed: tuple[Speed, ...] = ()
    audit: Audit | None = Field(default=None, description="None where no call was audited: the reference, failures before, older records")
    mechanisms: tuple[Mechanism, ...] = Field(default=(), description="how it moves data, by evidence; says nothing without an audit")
    network: NetworkBytes | None = Field(default=None, description="between the nodes of a virtual cluster; None on one node")
    flags: tuple[str, ...] = Field(default=(), description="remarkable but legitimate, such as aliased_output")
    stage_seconds: dict[str, float] = Field(default_factory=dict, description="wall time by phase, seconds")
    log_tail: str = Field(default="", description="the end of what the candidate's ranks printed, after a failure")
    diagnostics: dict[str, Any] = Field(default_factory=dict, description="for developers of the evaluator; may change at any time")
    environment: SkipJsonSchema[dict[str, Any]] = Field(default_factory=dict, exclude=True, repr=False)
    """what ``environment_hash`` names; in files a line of its own"""

    @model_validator(mode="before")
    @classmethod
    def _with_environment(cls, data: Any) -> Any:
        """Adds what the environment says, where it is given."""
        if not isinstance(data, Mapping) or "environment" not in data or "environment_hash" in data:
            return data
        environment = sanitize(data["environment"])
        derived = {"environment_hash": environment_hash(environment)}
        return {"node": NodeClass.of(environment, data.get("device", "cuda")), **data, **derived, "environment": environment}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if isinstance(self.verdict, Correct):
            if not self.correctness or any(item.slots == 0 for item in self.correctness):
                raise ValueError("a correct verdict needs compared slots in every case")
            if any(item.max_error_over_tolerance > 1.0 for item in self.correctness):
                raise ValueError("a correct verdict cannot have an error ratio above 1")
            if tuple(item.mode for item in self.speed) != self.modes:
                raise ValueError("a correct verdict states the speed, or why it was not measured, for every mode asked for")
            if self.track == "custom" and (self.audit is None or not self.audit.own_communication):
                raise ValueError("a correct verdict in the custom track needs an audit that shows no communication but the candidate's own")
        elif self.speed:
            raise ValueError(f"a {self.verdict.kind} verdict cannot carry a speed")
        return self

    @property
    def correct(self) -> bool:
        """True for a correct verdict and nothing else."""
        return isinstance(self.verdict, Correct)

    @property
    def other_protocol(self) -> int | str | None:
        """Returns the timing protocol's version or name if it is not the current one and speed was asked for. Such figures stay apart."""
        return self.timing_protocol if self.modes and self.timing_protocol != TIMING_PROTOCOL else None

    @property
    def says_nothing(self) -> bool:
        """True if the result says nothing about the candidate: peerlane failed, or this machine could not run it, or was too busy to."""
        return self.verdict.kind in SAYS_NOTHING or OVERLOADED in self.flags

    @property
    def identity(self) -> Identity:
        """Two results of one identity answer the same question."""
        return Asked._make(getattr(self, name) for name in Asked._fields).identity

    @property
    def speeds(self) -> list[ModeSpeed]:
        """The measured speeds, in the order of the modes asked for."""
        return [speed for mode in self.modes if (speed := self.speed_in(mode)) is not None]

    def speed_in(self, mode: str) -> ModeSpeed | None:
        """The measured speed in a mode, or None."""
        for item in self.speed:
            if isinstance(item, ModeSpeed) and item.mode == mode:
                return item
        return None

    def speedup(self, mode: str) -> Estimate | None:
        """The speedup over the reference in a launch mode, with its 95 % interval; None where it was not measured."""
        measured = self.speed_in(mode)
        return None if measured is None else measured.speedup

    def reward(self, kind: RewardKind, *, p: float = 1.0, mode: Mode | None = None) -> float | None:
        """A number to train on, from the low end of a speedup's interval. 0.0 for a candidate that is not correct.

        Args:
            kind: ``correct``: 1.0. ``log_speedup``: log2(1 + speedup), so that a correct candidate as fast as the reference gets 1.0.
                ``fast_p``: 1.0 if the speedup is above ``p``, else 0.0. A speedup is the low end of its interval.
            mode: the launch mode that counts; None: the one with the largest speedup.

        Returns:
            None where the result says nothing: see :attr:`says_nothing`, or a speedup that was not measured.
        """
        if kind not in get_args(RewardKind):
            raise UsageError(f"reward {kind!r}: expected one of {', '.join(get_args(RewardKind))}")
        if not (math.isfinite(p) and p >= 0):
            raise UsageError(f"p={p!r}: expected a speedup, such as 1.0")
        if self.says_nothing:
            return None
        if not self.correct or kind == "correct":
            return float(self.correct)
        measured = [found.low for name in (self.modes if mode is None else (mode,)) if (found := self.speedup(name)) is not None]
        if not measured:
            return None
        return math.log2(1.0 + max(measured)) if kind == "log_speedup" else float(max(measured) > p)

    def feedback(self) -> str:
        """Returns a text for the candidate's author, 60 lines at most: verdict, where, how far, first error, hints; no expected value."""
        problem = self.problem
        where = f"preset {self.preset}, {counted(self.world_size, 'rank')}"
        about = [f"problem {problem.id} {problem.slug} ({problem.variant} variant), {where}"]
        about += [f"flags: {', '.join(self.flags)}"] if self.flags else []
        mechanisms = [f"{item.name} ({item.confidence})" for item in self.mechanisms]
        return feedback(self.verdict, self.speed, about, mechanisms, self.log_tail)


class EnvironmentLine(Record):
    """The machine and its software: a line of ``results.jsonl``, once for all results of a run."""

    schema_version: Literal[2] = SCHEMA_VERSION
    type: Literal["environment"] = "environment"
    environment_hash: str
    environment: dict[str, Any]
