"""A pass of torch.compile that puts the kit's fused operators in the place of all-reduces and what surrounds them.

    torch.compile(model, options={"post_grad_custom_post_pass": AllReduceFusion()})

After gradients it finds sums over ranks of ``torch.distributed``, of ``peerlane.ops``, of vLLM and of SGLang. A sum, perhaps a residual, an
RMSNorm and perhaps a quantisation to e4m3 become ``all_reduce_rms_norm``; another sum of a product becomes ``gemm_all_reduce``. Both round
once where the graph had rounded twice or more. Residuals are the same on all ranks, as in tensor parallelism. Graphs that keep a norm's
parts for a gradient stay as they are.
"""

import contextlib
import math
import operator
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from peerlane.device.collectives import rms_norm
from peerlane.device.products import gemm
from peerlane.ops.groups import world_size
from peerlane.ops.norms import FP8

FxNode = Any
"""A node of a graph: torch's own type makes each of its arguments a union of all that arguments can be."""
_FUNCTIONAL_SUM, _WAIT = "_c10d_functional.all_reduce.default", "_c10d_functional.wait_tensor.default"
_ENGINE_SUMS = {"vllm.all_reduce.default": "vllm", "sglang.outplace_all_reduce.default": "sglang.srt"}
"""The package whose ``distributed.parallel_state`` knows the group, by operator."""
_VIEWS = {"aten.view.default", "aten.reshape.default", "aten._unsafe_view.default"}
_OF_QUANTISATION = {
    *_VIEWS, "prims.convert_element_type.default", "aten.abs.default", "aten.amax.default", "aten.div.Tensor", "aten.mul.Tensor",
    "aten.clamp.default", "aten.clamp_min.default", "aten.clamp_max.default", "aten.unsqueeze.default",
}  # fmt: skip
_LARGEST = 448.0


class AllReduceFusion(CustomGraphPass):
    """The pass. ``found`` counts what it has replaced so far, by the operator that it put there."""

    def __init__(self) -> None:
        self.found = {"all_reduce_rms_norm": 0, "gemm_all_reduce": 0}

    def __call__(self, graph: Graph) -> None:
        for node in list(graph.nodes):
            if _is(node, "aten.rsqrt.default") and (norm := _norm_at(node)) is not None:
                self.found["all_reduce_rms_norm"] += 1
                _replace_norm(graph, norm)
        stable_topological_sort(graph)
        _erase_unused(graph)
        for node in list(graph.nodes):
            if (total := _sum_of(node)) is not None and _replace_product(graph, total):
                self.found["gemm_all_reduce"] += 1
        _erase_unused(graph)

    def uuid(self) -> bytes:
        """Returns what tells compiled graphs of this pass from others."""
        return get_hash_for_files((str(Path(__file__)),))


def fuse_all_reduces(graph: Graph) -> None:
    """Applies the pass to a graph: for engines that name a pass by its place."""
    AllReduceFusion()(graph)


# --- finding ---


@dataclass
class _Sum:
    """A sum over ranks in a graph: the node that has it, what is added, and the group."""

    node: FxNode
    x: FxNode
    group: str


@dataclass
class _Norm:
    """A sum over ranks with its residual and norm: ``totals`` and ``y`` are the nodes to replace."""

    x: FxNode
    residual: FxNode | None
    weight: FxNode
    epsilon: float
    offset: float
    group: str
    totals: list[FxNode]
    y: FxNode


@dataclass
class _Quantised:
    """The quantisation of a norm: the nodes that have the values and, where the kernel finds them, the scales; else the given scale."""

    values: FxNode
    kind: str
    scale: FxNode
    shape: Any = None
    """The shape of the values, as the graph's view of the norm says; None for the norm's own."""


def _name(node: Any) -> str:
    return str(node.target) if _is_node(node) and node.op == "call_function" else ""


def _is_node(value: Any) -> bool:
    return isinstance(value, Node)


def _value(node: Any) -> torch.Tensor:
    value: torch.Tensor = node.meta["val"]
    return value


def _is(node: Any, *names: str) -> bool:
    return _name(node) in names


def _only_user(node: FxNode, *names: str) -> FxNode | None:
    """Returns the one user of a node, if it is one of these operators."""
    user = next(iter(node.users)) if len(node.users) == 1 else None
    return user if _is(user, *names) else None


def _widened(node: Any) -> Any:
    """Returns what a node widens to float32, else the node."""
    narrow = (torch.bfloat16, torch.float16)
    if _is(node, "prims.convert_element_type.default") and node.args[1] == torch.float32 and _value(node.args[0]).dtype in narrow:
        return node.args[0]
    return node


def _sum_of(node: Any) -> _Sum | None:
    """Returns the sum over ranks that a node has; None if it has none, or one that others use before it is there."""
    waits = _is(node, _WAIT)
    call = node.args[0] if waits else node
    if not _is(call, _FUNCTIONAL_SUM if waits else "peerlane.all_reduce.default", *(() if waits else _ENGINE_SUMS)):
        return None
    names = (argument.name for argument in call.target._schema.arguments)
    given = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
    if (waits and len(call.users) > 1) or given.get("reduce_op", given.get("op", "sum")) != "sum" or given.get("factor", 1.0) != 1.0:
        return None
    x, group = next(iter(given.values())), given.get("group_name", given.get("group"))
    if _name(call) in _ENGINE_SUMS:
        group = _engine_group(_ENGINE_SUMS[_name(call)], str(group))
    return None if group is None else _Sum(node, x, group)


def _engine_group(package: str, name: str) -> str | None:
    """Returns the name that torch has for the device group of an engine's coordinator."""
    known = getattr(sys.modules.get(f"{package}.distributed.parallel_state"), "_groups", {})
    coordinator = known[name]() if name in known else None
    return None if coordinator is None else str(coordinator.device_group.group_name)


def _norm_at(rsqrt: FxNode) -> _Norm | None:
    """Returns the norm whose reciprocal root this is, if it is that of a sum over ranks and has a kernel."""
    wide, epsilon = _mean_square(rsqrt)
    if wide is None or len(rsqrt.users) != 1:
        return None
    base = _widened(wide)
    total, residual = _sum_of(base), None
    if total is None and _is(base, "aten.add.Tensor") and not base.kwargs:
        for left, right in (base.args, base.args[::-1]):
            found = _sum_of(_widened(left))
            if found is not None and len(found.node.users) == 1 and len(left.users) == 1 and _is_node(right):
                total, residual = found, _widened(right)
                break
    if total is None or not _serves(total, residual):
        return None
    dtype = _value(total.x).dtype
    totals = [base] if _value(base).dtype == dtype else [user for user in base.users if _narrows(user, dtype)]
    scaled = next(iter(rsqrt.users))
    if not _is(scaled, "aten.mul.Tensor") or all(_widened(factor) is not base for factor in scaled.args):
        return None
    if _value(base).dtype != dtype and any(user not in (scaled, *totals) and not _is_square(user) for user in base.users):
        return None  # the sum in float32 has other uses than its norm and its rounding
    out = next((user for user in scaled.users if len(scaled.users) == 1 and _narrows(user, dtype)), scaled)
    y = _only_user(out, "aten.mul.Tensor")
    if y is None:
        return None
    weight, offset = _weight(next((factor for factor in y.args if factor is not out), None))
    if weight is None or _value(weight).dtype != dtype or tuple(_value(weight).shape) != tuple(_value(base).shape[-1:]):
        return None
    if _value(y).dtype != dtype:
        y = next((user for user in y.users if len(y.users) == 1 and _narrows(user, dtype)), y)
    return _Norm(total.x, residual, weight, epsilon, offset, total.group, totals, y)


def _serves(total: _Sum, residual: FxNode | None) -> bool:
    """Tells whether the decode norm has a kernel for this sum."""
    x = _value(total.x)
    columns = x.shape[-1]
    fits = isinstance(columns, int) and not columns % 8 and columns >= 8 * world_size(total.group)
    alike = residual is None or (_value(residual).dtype == x.dtype and _same_shape(_value(residual), _value(total.node)))
    return x.dtype in rms_norm.DTYPES and fits and alike and world_size(total.group) > 1


def _same_shape(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tells whether two shapes are known to be the same, symbols included."""
    return one.dim() == other.dim() and all(statically_known_true(a == b) for a, b in zip(one.shape, other.shape, strict=True))


def _is_square(node: FxNode) -> bool:
    return (_is(node, "aten.pow.Tensor_Scalar") and node.args[1] == 2) or (_is(node, "aten.mul.Tensor") and node.args[0] is node.args[1])


def _mean_square(rsqrt: FxNode) -> tuple[Any, float]:
    """Returns whose mean square along the last axis, plus a number, this is the reciprocal root of, and the number; else None."""
    added = rsqrt.args[0]
    if not _is(added, "aten.add.Tensor", "aten.add.Scalar") or not isinstance(added.args[1], float) or len(added.users) != 1:
        return None, 0.0
    mean = added.args[0]
    if not _is(mean, "aten.mean.dim") or len(mean.args) < 3 or not mean.args[2] or not _is_square(mean.args[0]):
        return None, 0.0
    last = mean.args[1] in ([-1], [_value(mean.args[0]).dim() - 1])
    return (mean.args[0].args[0] if last and len(mean.args[0].users) == 1 else None), added.args[1]


def _narrows(node: Any, dtype: torch.dtype) -> bool:
    return _is(node, "prims.convert_element_type.default") and node.args[1] == dtype


def _weight(gain: Any) -> tuple[Any, float]:
    """Returns the weight that a norm is multiplied by, and what is added to that before; None for anything else."""
    gain, offset = _widened(gain), 0.0
    if _is(gain, "aten.add.Tensor", "aten.add.Scalar") and isinstance(gain.args[1], int | float) and not gain.kwargs:
        gain, offset = _widened(gain.args[0]), float(gain.args[1])
    return (gain if _is_node(gain) and _value(gain).dim() == 1 else None), offset


# --- quantisation ---


def _quantisation_of(y: FxNode, columns: int) -> _Quantised | None:
    """Returns the quantisation to e4m3 that is all that a norm is for, by a given scale, by tokens or by blocks of 128 columns."""
    for node in _reached(y):
        if _narrows(node, FP8) and (found := _quantised_at(node, y, columns)) is not None:
            ends = {found.values} | ({found.scale} if found.kind != "tensor" else set())
            if all(_is(user, *_OF_QUANTISATION) for user in _reached(y, ends)):
                return found
    return None


def _reached(start: FxNode, ends: set[FxNode] | None = None) -> Iterator[FxNode]:
    """Returns all nodes that use ``start``, and what uses them, up to ``ends``: through operators that quantise, and those behind them."""
    seen, waiting = set(), [start]
    while waiting:
        for user in waiting.pop().users:
            if user not in seen and not (ends and user in ends):
                seen.add(user)
                yield user
                if _is(user, *_OF_QUANTISATION) and not _narrows(user, FP8):
                    waiting.append(user)


def _quantised_at(values: FxNode, y: FxNode, columns: int) -> _Quantised | None:
    node: Any = values.args[0]
    while _is(node, *_VIEWS, "aten.clamp.default", "aten.clamp_min.default", "aten.clamp_max.default"):
        if not _is(node, *_VIEWS) and any(abs(limit) != _LARGEST for limit in node.args[1:] if limit is not None):
            return None
        node = node.args[0]
    if not _is(node, "aten.div.Tensor") or not _is_node(node.args[1]) or _sources(node.args[0])[-1] is not y:
        return None
    scale, shape = node.args[1], next((view.args[1] for view in _sources(node.args[0]) if _is(view, *_VIEWS)), None)
    if statically_known_true(_value(scale).numel() == 1) and _value(scale).dtype == torch.float32 and scale not in set(_reached(y)):
        return _Quantised(values, "tensor", scale, shape)
    largest = scale.args[0] if _is(scale, "aten.clamp_min.default") else scale
    divides = _is(largest, "aten.div.Tensor") and largest.args[1] == _LARGEST
    factor = largest.args[1] if _is(largest, "aten.mul.Tensor") else None
    if not divides and not (isinstance(factor, float) and math.isclose(factor, 1 / _LARGEST, rel_tol=1e-6)):
        return None
    peak = largest.args[0]
    whole = _is(peak, "aten.amax.default") and len(peak.args) > 2 and peak.args[2] and _is(peak.args[0], "aten.abs.default")
    if not whole or peak.args[1] not in ([-1], [_value(peak.args[0]).dim() - 1]) or _sources(peak.args[0].args[0])[-1] is not y:
        return None
    width = _value(peak.args[0]).shape[-1]
    if width == columns:
        return _Quantised(values, "token", scale, shape)
    blocks = width == rms_norm.BLOCK_COLUMNS and rms_norm.serves_blocks(columns)
    return _Quantised(values, "block", scale, shape) if blocks else None


def _sources(node: Any) -> list[Any]:
    """Returns a node and what it is a view of, or widens, and so on."""
    found = [node]
    while _is(found[-1], *_VIEWS) or _widened(found[-1]) is not found[-1]:
        found.append(found[-1].args[0])
    return found


# --- replacing ---


def _call(graph: Graph, target: Callable[..., Any], *args: Any) -> FxNode:
    """Returns a new node, with the shapes of its result."""
    node = graph.call_function(target, args)
    given = torch.fx.node.map_arg(args, lambda argument: argument.meta["val"])
    node.meta["val"] = target(*given)
    return node


def _replace_norm(graph: Graph, norm: _Norm) -> None:
    """Puts the fused operator at the end; the caller sorts the graph."""
    quantised = _quantisation_of(norm.y, _value(norm.weight).shape[0])
    kind = "none" if quantised is None else quantised.kind
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    with graph.inserting_before(output), _fake_mode(norm.x):
        scale = _call(graph, torch.ops.aten.reshape.default, quantised.scale, [1]) if quantised is not None and kind == "tensor" else None
        given = norm.x, norm.weight, norm.residual, scale, norm.epsilon, norm.offset, kind, norm.group
        fused = _call(graph, torch.ops.peerlane.all_reduce_rms_norm.default, *given)
        y, total, scales = (_call(graph, operator.getitem, fused, place) for place in range(3))
        if quantised is None:
            wanted = _value(norm.y).dtype
            same = wanted == _value(y).dtype
            norm.y.replace_all_uses_with(y if same else _call(graph, torch.ops.prims.convert_element_type.default, y, wanted))
        else:
            values = y if quantised.shape is None else _call(graph, torch.ops.aten.reshape.default, y, quantised.shape)
            quantised.values.replace_all_uses_with(values)
            if kind != "tensor":
                quantised.scale.replace_all_uses_with(_call(graph, torch.ops.aten.unsqueeze.default, scales, -1))
        for node in norm.totals:
            node.replace_all_uses_with(total)


def _fake_mode(node: FxNode) -> contextlib.AbstractContextManager[Any]:
    """Returns the mode in which the graph's shapes were found."""
    return torch._guards.detect_fake_mode([_value(node)]) or contextlib.nullcontext()


def _erase_unused(graph: Graph) -> None:
    """Erases nodes without uses, waits for sums too."""
    graph.eliminate_dead_code()
    for node in reversed(graph.nodes):
        if not node.users and _is(node, _WAIT):
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _replace_product(graph: Graph, total: _Sum) -> bool:
    """Puts a fused product where a sum over ranks is that of a product which has no other use. Tells whether it did."""
    views, node = [], total.x
    while _is(node, *_VIEWS) and len(node.users) == 1:
        views.append(node)
        node = node.args[0]
    if not _is(node, "aten.mm.default") or len(node.users) != 1 or _value(node).dtype not in gemm.ELEMENT_TYPES:
        return False
    if world_size(total.group) < 2:
        return False
    with graph.inserting_before(total.node), _fake_mode(node):
        fused = _call(graph, torch.ops.peerlane.gemm_all_reduce.default, *node.args, None, None, "none", 1.0, total.group)
        for view in reversed(views):
            fused = _call(graph, torch.ops.aten.reshape.default, fused, view.args[1])
    total.node.replace_all_uses_with(fused)
    return True
