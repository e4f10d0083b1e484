"""The communication-aware roofline: how fast a problem could run at best on given hardware, and what stands in the way.

A problem's :class:`~peerlane.problems.Cost` says per rank how many operations, memory bytes and link bytes are compulsory. Each resource
alone would need some time for that; if all overlap perfectly, the call takes as long as the slowest of them:

========= ==============================================================================================
latency   one flag exchange between two GPUs, if any byte crosses a link; else 0
nvlink    max(egress, ingress) / link bandwidth in one direction
network   the same for bytes between nodes, by the rank's network adapter
hbm       memory bytes / memory bandwidth
tensor    sum over tensor-core types of operations / peak: the types share the tensor cores
vector    the same for the vector units
========= ==============================================================================================

A problem may also name an algorithm, whose steps follow each other: its time at measured rates is *attainable*, a model and no bound.

Every term is taken from the rank where it is largest. Two sets of peaks give two rooflines: the datasheet's, the same for everyone, and the
measured ceilings of the node, which tell how far a kernel is from what plain copies and matrix products reach there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from peerlane.errors import UsageError
from peerlane.hardware.ceilings import Ceilings
from peerlane.hardware.profiles import HardwareProfile

if TYPE_CHECKING:
    from peerlane.problems import Cost
    from peerlane.problems.contract.cost import Steps

Resource = Literal["latency", "nvlink", "network", "hbm", "tensor", "vector"]

TENSOR_DTYPES = ("bf16", "fp16", "fp8", "tf32")
VECTOR_DTYPES = ("fp32", "fp64")

FLAG_EXCHANGE_US = 1.3
"""Device time in which two GPUs send a flag to each other and see the other's. Measured on 4x H200 (NVLink 4 through NVSwitch, driver 580);
no datasheet gives it, so the datasheet rooflines of all GPUs use it. Between nodes it takes longer, and stays a bound."""

_TFLOPS_PER_US = 1e6  # operations in one microsecond at 1 TFLOP/s
_TBPS_PER_US = 1e6  # bytes in one microsecond at 1 TB/s
_GBPS_PER_US = 1e3  # bytes in one microsecond at 1 GB/s


@dataclass(frozen=True)
class Peaks:
    """The rates that a roofline divides by.

    Attributes:
        source: ``datasheet`` or ``measured``.
        tensor_tflops, vector_tflops: by the dtype names that ``Cost.flops`` uses.
        hbm_tbps: reads and writes together.
        nvlink_gbps, network_gbps: one direction.
        latency_us: one flag exchange.
        assumed: names of the rates that are not of the source but of the datasheet, because they were not measured.
    """

    source: Literal["datasheet", "measured"]
    tensor_tflops: Mapping[str, float]
    vector_tflops: Mapping[str, float]
    hbm_tbps: float
    nvlink_gbps: float
    network_gbps: float
    latency_us: float
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Roofline:
    """Microseconds that each resource alone needs for one call, on the rank where it needs most; and whose peaks these are."""

    source: Literal["datasheet", "measured"]
    latency_us: float
    nvlink_us: float
    network_us: float
    hbm_us: float
    tensor_us: float
    vector_us: float
    assumed: tuple[str, ...] = ()

    @property
    def times_us(self) -> dict[Resource, float]:
        """Resource -> microseconds."""
        return {
            "latency": self.latency_us,
            "nvlink": self.nvlink_us,
            "network": self.network_us,
            "hbm": self.hbm_us,
            "tensor": self.tensor_us,
            "vector": self.vector_us,
        }

    @property
    def bound_us(self) -> float:
        """The shortest possible time of one call at these peaks."""
        return max(self.times_us.values())

    @property
    def bound_by(self) -> Resource:
        """The resource that needs longest; of equal ones the first of latency, nvlink, network, hbm, tensor, vector."""
        times = self.times_us
        return max(times, key=times.__getitem__)

    def utilisation(self, measured_us: float) -> float:
        """Returns bound divided by measured time: 1 is perfect. Above 1, the peaks are too low or the time is wrong."""
        if not measured_us > 0:
            raise ValueError(f"measured time is {measured_us} us: expected more than 0")
        return self.bound_us / measured_us


def datasheet_peaks(profile: HardwareProfile) -> Peaks:
    """Returns the published peaks of a GPU, with :data:`FLAG_EXCHANGE_US`, which is not published."""
    return Peaks(
        source="datasheet",
        tensor_tflops={dtype: profile.tensor_tflops[dtype] for dtype in TENSOR_DTYPES},
        vector_tflops=dict(profile.vector_tflops),
        hbm_tbps=profile.hbm_tbps,
        nvlink_gbps=profile.nvlink_gbps,
        network_gbps=profile.network_gbps,
        latency_us=FLAG_EXCHANGE_US,
    )


_TRIPS = {"flag_exchange_us": 1.0, "flag_round_us": 0.5, "packet_round_us": 0.5}


def measured_peaks(ceilings: Ceilings, profile: HardwareProfile) -> Peaks:
    """Returns the medians measured on a node; what was not measured is the datasheet's, and named in ``assumed``.

    The link rate is the best that any mechanism reached. The latency is one trip over the link: half of what a packet or a flag takes
    there and back, or two flags that cross, whichever is shortest. NCCL's latency is no bound: kernels undercut it.
    """
    sheet = datasheet_peaks(profile)
    assumed: list[str] = []

    def measured(figure: str, otherwise: float, name: str) -> float:
        value = ceilings.median(figure)
        if value is None:
            assumed.append(name)
            return otherwise
        return value

    links = [item.median for name, item in ceilings.figures.items() if name.startswith("nvlink_")]
    trips = [item.median * share for name, share in _TRIPS.items() if (item := ceilings.figures.get(name)) is not None]
    assumed += [name for name, measured_values in (("nvlink", links), ("latency", trips)) if not measured_values]
    return Peaks(
        source="measured",
        tensor_tflops={dtype: measured(f"{dtype}_matmul_tflops", peak, dtype) for dtype, peak in sheet.tensor_tflops.items()},
        vector_tflops={dtype: measured(f"{dtype}_matmul_tflops", peak, dtype) for dtype, peak in sheet.vector_tflops.items()},
        hbm_tbps=measured("hbm_copy_tbps", sheet.hbm_tbps, "hbm"),
        nvlink_gbps=max(links, default=sheet.nvlink_gbps),
        network_gbps=sheet.network_gbps,
        latency_us=min(trips, default=sheet.latency_us),
        assumed=tuple(assumed),
    )


def roofline(costs: Sequence[Cost], peaks: Peaks) -> Roofline:
    """Returns the roofline of one call, from the costs of all ranks.

    Raises UsageError for an operation type that ``peaks`` has no rate for.
    """
    _check_types(costs)
    return Roofline(
        source=peaks.source,
        latency_us=peaks.latency_us if any(cost.moves for cost in costs) else 0.0,
        nvlink_us=_busiest(max(cost.egress_bytes, cost.ingress_bytes) / (peaks.nvlink_gbps * _GBPS_PER_US) for cost in costs),
        network_us=_busiest(
            max(cost.network_egress_bytes, cost.network_ingress_bytes) / (peaks.network_gbps * _GBPS_PER_US) for cost in costs
        ),
        hbm_us=_busiest(cost.hbm_bytes / (peaks.hbm_tbps * _TBPS_PER_US) for cost in costs),
        tensor_us=_busiest(_operations_us(cost, peaks.tensor_tflops) for cost in costs),
        vector_us=_busiest(_operations_us(cost, peaks.vector_tflops) for cost in costs),
        assumed=peaks.assumed,
    )


def steps_us(steps: Sequence[Steps], ceilings: Ceilings, profile: HardwareProfile, *, launched: bool) -> list[float] | None:
    """Returns the time of each step of an algorithm, of which ``steps`` has every rank's; None where a rate was not measured on the node.

    ``launched``: the host launches every step, because calls cannot be captured in a graph: no step is shorter than a launch then.
    """
    peaks, together = measured_peaks(ceilings, profile), [[step.cost for step in ranks] for ranks in zip(*steps, strict=True)]
    barrier_us, launch_us = ceilings.median("barrier_round_us"), ceilings.median("kernel_launch_us")
    places = [[step.places for step in ranks] for ranks in zip(*steps, strict=True)]
    rates = {figure: ceilings.median(figure) for of_step in places for of_rank in of_step for figure in of_rank}
    needed = {"hbm", "nvlink", "latency", *(unit for costs in together for cost in costs for unit in cost.flops)}
    if needed & set(peaks.assumed) or barrier_us is None or launch_us is None or None in rates.values():
        return None
    per_us = {figure: rate * (_TBPS_PER_US if figure.endswith("tbps") else _GBPS_PER_US) for figure, rate in rates.items() if rate}
    places_us = (max(sum(amount / per_us[figure] for figure, amount in of_rank.items()) for of_rank in of_step) for of_step in places)
    barriers = (max(step.barriers for step in ranks) for ranks in zip(*steps, strict=True))
    bounds_us = (
        max(roofline(costs, peaks).bound_us, its_us, launched * launch_us) for costs, its_us in zip(together, places_us, strict=True)
    )
    return [bound_us + count * barrier_us for bound_us, count in zip(bounds_us, barriers, strict=True)]


def physical_floor_us(costs: Sequence[Cost], profile: HardwareProfile, *, calls: int = 1) -> float:
    """A time that no honest candidate can beat for ``calls`` calls back to back: a shorter one means that the clock or the work is false.

    The datasheet bound, less everything that could make an honest call faster than it, so that nobody is accused wrongly:

    * tensor cores at their highest clock, not at the one that datasheets assume;
    * vector work at the tensor cores' rate for its type (tf32, fp64) where that is higher: sums may be written as matrix products;
    * memory bytes less twice the L2 cache, once for all calls: inputs may lie in it at the start, outputs at the end;
    * no memory bytes of a rank that neither computes nor exchanges anything: it may return its input as it is;
    * no latency term: a rank that starts late may find its data delivered;
    * half of it all where the costs are means over layouts or contents (``Cost.typical``), of which a block's calls may fall short.

    Many calls make it sharper than one, for the cache counts once. 0 is possible, and means that nothing can be said.
    """
    _check_types(costs)
    faster = profile.tensor_clock_headroom
    tensor = {dtype: profile.tensor_tflops[dtype] * faster for dtype in TENSOR_DTYPES}
    vector = {
        "fp32": max(profile.vector_tflops["fp32"], profile.tensor_tflops["tf32"]) * faster,
        "fp64": max(profile.vector_tflops["fp64"], profile.tensor_tflops["fp64"]) * faster,
    }
    cached_bytes = 2 * profile.l2_mib * 2**20
    certain = 0.5 if any(cost.typical for cost in costs) else 1.0
    return certain * max(
        calls * _busiest(_operations_us(cost, tensor) for cost in costs),
        # The two vector types may run side by side, on the vector units and the tensor cores.
        calls * _busiest(max(cost.flops.get(dtype, 0.0) / (rate * _TFLOPS_PER_US) for dtype, rate in vector.items()) for cost in costs),
        _busiest(max(calls * cost.hbm_bytes - cached_bytes, 0.0) for cost in costs if _works(cost)) / (profile.hbm_tbps * _TBPS_PER_US),
        calls * _busiest(max(cost.egress_bytes, cost.ingress_bytes) for cost in costs) / (profile.nvlink_gbps * _GBPS_PER_US),
    )


def _works(cost: Cost) -> bool:
    return any(cost.flops.values()) or cost.moves


def _busiest(values: Iterable[float]) -> float:
    return max(values, default=0.0)


def _operations_us(cost: Cost, tflops: Mapping[str, float]) -> float:
    """Returns the time of the operation types that ``tflops`` has rates for, one after the other."""
    return sum(count / (tflops[dtype] * _TFLOPS_PER_US) for dtype, count in cost.flops.items() if dtype in tflops)


def _check_types(costs: Sequence[Cost]) -> None:
    known = (*TENSOR_DTYPES, *VECTOR_DTYPES)
    unknown = sorted({dtype for cost in costs for dtype in cost.flops} - set(known))
    if unknown:
        raise UsageError(
            f"the cost model counts operations of type {', '.join(unknown)}; peaks exist for {', '.join(known)}: use one of these"
        )
