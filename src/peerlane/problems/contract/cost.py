"""What a call must move and compute at least, and what the steps of an algorithm do."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Cost:
    """What an ideal implementation must at least do, for one rank and one call.

    Attributes:
        flops: operations by unit: ``bf16``, ``fp16``, ``fp8`` (tensor cores), ``fp32``, ``fp64`` (vector units).
        hbm_bytes: compulsory reads and writes of device memory.
        egress_bytes, ingress_bytes: bytes that must leave or enter the rank's NVLink port: to and from ranks of its own node.
        network_egress_bytes, network_ingress_bytes: bytes that must leave or enter the rank's network adapter: to and from other nodes.
            Every rank has an adapter of its own, so the ranks of a node share evenly what the node must send and receive.
        typical: the amounts depend on a slot's layout or contents, and these are their mean: a single call may need less.
    """

    hbm_bytes: float
    egress_bytes: float
    ingress_bytes: float
    flops: Mapping[str, float] = field(default_factory=dict)
    typical: bool = False
    network_egress_bytes: float = 0.0
    network_ingress_bytes: float = 0.0

    @property
    def moves(self) -> bool:
        """Whether bytes must leave or enter the rank, on either tier."""
        return max(self.egress_bytes, self.ingress_bytes, self.network_egress_bytes, self.network_ingress_bytes) > 0

    @property
    def receives(self) -> bool:
        """Whether bytes must enter the rank, on either tier."""
        return max(self.ingress_bytes, self.network_ingress_bytes) > 0


@dataclass(frozen=True)
class Step:
    """A step of an algorithm on one rank, which ends on all ranks before the next one begins; what it moves and computes overlaps.

    ``cost``: everything that the algorithm moves and computes, more than a bound counts. ``barriers``: of all ranks, one after the other.
    ``places``: what it does in random places, in bytes or operations by the figure of the ceilings that is its rate; one after the other.
    """

    name: str
    cost: Cost
    barriers: int = 0
    places: Mapping[str, float] = field(default_factory=dict)


Steps = Sequence[Step]


def step(
    name: str,
    *,
    hbm: float = 0.0,
    link: float = 0.0,
    barriers: int = 0,
    flops: Mapping[str, float] | None = None,
    places: Mapping[str, float] | None = None,
) -> Step:
    """A step: bytes of device memory, bytes through the rank's link in its busier direction, barriers, operations by unit, and what is
    done in random places."""
    return Step(name, Cost(hbm, link, link, flops or {}), barriers, places or {})
