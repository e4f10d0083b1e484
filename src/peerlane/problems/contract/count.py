"""An independent count of what a reference does in one call: its collectives, its matrix products, the tensors its operators touch.

It comes from watching the operators that PyTorch dispatches, and knows nothing of a problem's own cost model, which it is held against.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from peerlane.problems.contract.cost import Cost
from peerlane.problems.contract.tree import Tree, leaves


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> float:
    """Operations of both products of attention; heads of queries (B, h, S, D) may share those of keys, which not every PyTorch knows."""
    return 2.0 * math.prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _transform(complex_to_complex: bool) -> Callable[..., float]:
    """Operations of a fast Fourier transform: 5 N log2 N for N complex values, half as many where one side is real (Cooley and Tukey)."""

    def operations(source: torch.Tensor, axes: Sequence[int], *_: Any, out_val: torch.Tensor) -> float:
        larger = max(source, out_val, key=torch.Tensor.numel)
        length = math.prod(larger.shape[axis] for axis in axes)
        return (5.0 if complex_to_complex else 2.5) * larger.numel() * math.log2(max(length, 2))

    return operations


_OPERATIONS: Mapping[Any, Callable[..., float]] = {
    torch.ops.aten._fft_c2c: _transform(True),
    torch.ops.aten._fft_r2c: _transform(False),
    torch.ops.aten._fft_c2r: _transform(False),
    **flop_registry,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention: _attention,
    torch.ops.aten._scaled_dot_product_efficient_attention: _attention,
    torch.ops.aten._scaled_dot_product_cudnn_attention: _attention,
}

SLACK = 1.01
"""A declared minimum may exceed a count by so much: bounds are real numbers, tensors have whole elements."""

TYPICAL_SLACK, TYPICAL_SPARE_BYTES = 2.0, 1024.0
"""The same for a mean over layouts or contents (:attr:`Cost.typical`): one call may need less, and a tiny one none at all."""

COMPUTE = "compute"
TENSOR_UNITS = ("bf16", "fp16", "fp8")


@dataclass
class Step:
    """Consecutive equal collectives, or the operators between two collectives, on one rank.

    Attributes:
        kind: ``all_reduce``, ``all_to_all``, ``send``, ...; or ``compute``.
        times: how many in a row.
        ranks: members of the group; 0 for compute.
        egress_bytes, ingress_bytes: out of and into the rank, by the collective's best algorithm, of all of them together.
        flops: operations of the matrix products, convolutions, attentions and Fourier transforms between collectives.
        touched_bytes: what the operators between collectives read and write, each its inputs and its outputs.
    """

    kind: str
    times: int = 1
    ranks: int = 0
    egress_bytes: float = 0.0
    ingress_bytes: float = 0.0
    flops: float = 0.0
    touched_bytes: float = 0.0

    def merge(self, other: Step) -> None:
        """Takes in a step of the same kind that follows this one."""
        self.times += other.times
        self.egress_bytes += other.egress_bytes
        self.ingress_bytes += other.ingress_bytes
        self.flops += other.flops
        self.touched_bytes += other.touched_bytes


@dataclass
class Count:
    """One rank's call. ``output_bytes``: of what it returned."""

    steps: list[Step] = field(default_factory=list)
    output_bytes: float = 0.0

    def _sum(self, name: str) -> float:
        return float(sum(getattr(step, name) for step in self.steps))

    @property
    def egress_bytes(self) -> float:
        """Bytes that its collectives send."""
        return self._sum("egress_bytes")

    @property
    def ingress_bytes(self) -> float:
        """Bytes that its collectives receive."""
        return self._sum("ingress_bytes")

    @property
    def flops(self) -> float:
        """Operations of matrix products, convolutions, attentions and Fourier transforms."""
        return self._sum("flops")

    @property
    def touched_bytes(self) -> float:
        """Bytes that its operators read and write, collectives included: more than a fused implementation would."""
        return self._sum("touched_bytes") + self.egress_bytes + self.ingress_bytes

    def add(self, step: Step) -> None:
        """Appends a step, or merges it with an equal one before it."""
        last = self.steps[-1] if self.steps else None
        if last is not None and (last.kind, last.ranks) == (step.kind, step.ranks):
            last.merge(step)
        else:
            self.steps.append(step)


def cost_faults(costs: Sequence[Cost], counts: Sequence[Count]) -> list[str]:
    """Where a declared minimum is more than the reference really does, which proves it wrong. Of both, the rank with most counts."""

    def most(values: Iterable[float]) -> float:
        return max(values, default=0.0)

    pairs = {  # the counts are of both tiers together
        "ingress_bytes": (
            most(cost.ingress_bytes + cost.network_ingress_bytes for cost in costs),
            most(count.ingress_bytes for count in counts),
        ),
        "egress_bytes": (
            most(cost.egress_bytes + cost.network_egress_bytes for cost in costs),
            most(count.egress_bytes for count in counts),
        ),
        "hbm_bytes": (most(cost.hbm_bytes for cost in costs), most(count.touched_bytes + count.output_bytes for count in counts)),
        "tensor-core flops": (
            most(sum(cost.flops.get(unit, 0.0) for unit in TENSOR_UNITS) for cost in costs),
            most(count.flops for count in counts),
        ),
    }
    typical = any(cost.typical for cost in costs)
    allowed, spare_bytes = (TYPICAL_SLACK, TYPICAL_SPARE_BYTES) if typical else (SLACK, 0.0)
    return [
        f"the cost model's {name} are {declared:.6g}, but the reference needs only {counted:.6g}"
        for name, (declared, counted) in pairs.items()
        if declared > allowed * counted + spare_bytes
    ]


def _nbytes(tree: Any) -> float:
    return float(sum(tensor.nbytes for tensor in _tensors(tree)))


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _tensors(item)


def _group(args: Sequence[Any]) -> Any:
    for item in args:
        if isinstance(item, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(item)
            except (RuntimeError, TypeError):
                continue
    raise ValueError("a collective without a process group")


def _all_to_all_single(args: Sequence[Any], rank: int, size: int) -> tuple[float, float]:
    def others(tensor: torch.Tensor, splits: Sequence[int]) -> float:
        own = splits[rank] / max(sum(splits), 1) if splits else 1 / size
        return tensor.nbytes * (1 - own)

    output, source, _, output_splits, input_splits = args[:5]
    return others(source, input_splits), others(output, output_splits)


def _all_to_all(args: Sequence[Any], rank: int, size: int) -> tuple[float, float]:
    outputs, sources = args[0], args[1]
    return _nbytes(sources) - sources[rank].nbytes, _nbytes(outputs) - outputs[rank].nbytes


def _rooted(at_root: tuple[float, float], elsewhere: tuple[float, float], root: int, rank: int) -> tuple[float, float]:
    return at_root if rank == root else elsewhere


Traffic = Callable[[Sequence[Any], int, int], tuple[float, float]]

_TRAFFIC: Mapping[str, tuple[str, Traffic]] = {
    # operator: name, and (egress, ingress) of (arguments, rank in the group, size of the group)
    "allreduce_": ("all_reduce", lambda a, r, n: (2 * (n - 1) / n * _nbytes(a[0]),) * 2),
    "allreduce_coalesced_": ("all_reduce", lambda a, r, n: (2 * (n - 1) / n * _nbytes(a[0]),) * 2),
    "_allgather_base_": ("all_gather", lambda a, r, n: ((n - 1) * _nbytes(a[1]),) * 2),
    "allgather_into_tensor_coalesced_": ("all_gather", lambda a, r, n: ((n - 1) * _nbytes(a[1]),) * 2),
    "allgather_": ("all_gather", lambda a, r, n: ((n - 1) * _nbytes(a[1]), _nbytes(a[0]) - _nbytes(a[1]))),
    "_reduce_scatter_base_": ("reduce_scatter", lambda a, r, n: ((n - 1) / n * _nbytes(a[1]),) * 2),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", lambda a, r, n: ((n - 1) / n * _nbytes(a[1]),) * 2),
    "reduce_scatter_": ("reduce_scatter", lambda a, r, n: (_nbytes(a[1]) * (n - 1) / n, (n - 1) * _nbytes(a[0]))),
    "alltoall_base_": ("all_to_all", _all_to_all_single),
    "alltoall_": ("all_to_all", _all_to_all),
    "broadcast_": ("broadcast", lambda a, r, n: _rooted((_nbytes(a[0]), 0.0), (_nbytes(a[0]),) * 2, a[2], r)),
    "reduce_": ("reduce", lambda a, r, n: _rooted((0.0, _nbytes(a[0])), (_nbytes(a[0]),) * 2, a[3], r)),
    "gather_": ("gather", lambda a, r, n: _rooted((0.0, (n - 1) * _nbytes(a[1])), (_nbytes(a[1]), 0.0), a[3], r)),
    "scatter_": ("scatter", lambda a, r, n: _rooted(((n - 1) * _nbytes(a[0]), 0.0), (0.0, _nbytes(a[0])), a[3], r)),
    "send": ("send", lambda a, r, n: (_nbytes(a[0]), 0.0)),
    "recv_": ("recv", lambda a, r, n: (0.0, _nbytes(a[0]))),
    "barrier": ("barrier", lambda a, r, n: (0.0, 0.0)),
}


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds every dispatched operator to a count."""

    def __init__(self, count: Count) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._count = count

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and to say so at every call torch would first import its compiler, for seconds on every rank."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace == "c10d":
            self._collective(func.overloadpacket.__name__, args)
        elif func.namespace == "aten":
            self._compute(func, args, kwargs, result)
        return result

    def _collective(self, name: str, args: tuple[Any, ...]) -> None:
        if name not in _TRAFFIC:
            raise ValueError(f"cannot count the collective {name!r}: expected one of {', '.join(_TRAFFIC)}")
        kind, traffic = _TRAFFIC[name]
        group = _group(args)
        egress, ingress = traffic(args, group.rank(), group.size())
        self._count.add(Step(kind, ranks=group.size(), egress_bytes=egress, ingress_bytes=ingress))

    def _compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        sources = [*_tensors(args), *_tensors(list(kwargs.values()))]
        results = list(_tensors(result)) or _written(func, args)  # lists that are changed in place are not returned
        if not func._schema.is_mutable and any(_share_storage(a, b) for a in results for b in sources):
            return  # a view moves nothing
        operations = _OPERATIONS.get(func.overloadpacket)
        self._count.add(
            Step(
                COMPUTE,
                flops=float(operations(*args, **kwargs, out_val=result)) if operations else 0.0,
                touched_bytes=float(sum(tensor.nbytes for tensor in [*sources, *results] if tensor.layout == torch.strided)),
            )
        )


def _written(func: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """The positional arguments that the operator's schema says it writes."""
    written = [
        value for argument, value in zip(func._schema.arguments, args, strict=False) if getattr(argument.alias_info, "is_write", False)
    ]
    return list(_tensors(written))


def _share_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.layout != torch.strided or b.layout != torch.strided:
        return False
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() != 0


def counted(call: Callable[[], Tree]) -> tuple[Tree, Count]:
    """Makes a call and counts what it does on this rank. Every rank of its collectives makes it."""
    count = Count()
    with _Watch(count):
        result = call()
    count.output_bytes = float(sum(tensor.nbytes for tensor in leaves(result)))
    return result, count
