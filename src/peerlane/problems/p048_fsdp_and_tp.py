"""Problem 48: forward pass of a SwiGLU MLP whose weights are sharded over a grid of FSDP and tensor-parallel ranks."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from peerlane.problems import contract as pc
from peerlane.problems.families.collective import BF16, FP32, FP64
from peerlane.problems.families.matmul import FLOP_UNIT

# How many times the root of the sum of squared errors' bounds is allowed: six standard deviations of rounding errors, or more.
_ROOTS = 3.25


def reference(
    x_local: torch.Tensor, W1_shard: torch.Tensor, W2_shard: torch.Tensor, W3_shard: torch.Tensor, n_tp: int, n_fsdp: int
) -> torch.Tensor:
    if n_tp * n_fsdp != dist.get_world_size():
        raise ValueError(f"got a grid of {n_tp} x {n_fsdp} on {dist.get_world_size()} ranks: expected as many ranks as places")
    fsdp_index, tp_index = divmod(dist.get_rank(), n_tp)
    fsdp_peers = [index * n_tp + tp_index for index in range(n_fsdp)]
    tp_peers = [fsdp_index * n_tp + index for index in range(n_tp)]

    shards = [shard.contiguous() for shard in (W1_shard, W2_shard, W3_shard)]
    gathered = [shard.new_empty(n_fsdp, *shard.shape) for shard in shards]
    for shard, buffer in zip(shards, gathered, strict=True):
        buffer[fsdp_index] = shard
    _exchange(
        [(peer, shard) for peer in fsdp_peers for shard in shards],
        [(peer, buffer[index]) for index, peer in enumerate(fsdp_peers) for buffer in gathered],
    )
    w1, w2 = (buffer.flatten(0, 1) for buffer in gathered[:2])
    w3 = torch.cat(gathered[2].unbind(), dim=1)
    partial = (F.silu(x_local @ w1) * (x_local @ w2)) @ w3
    if n_tp == 1:
        return partial

    # An all-reduce within the tensor-parallel group: rows are reduced where they belong, and gathered.
    parts = partial.tensor_split(n_tp)
    terms = partial.new_empty(n_tp, *parts[tp_index].shape)
    terms[tp_index] = parts[tp_index]
    _exchange(list(zip(tp_peers, parts, strict=True)), list(zip(tp_peers, terms.unbind(), strict=True)))
    reduced = terms.sum(0)
    result = torch.empty_like(partial)
    rows = result.tensor_split(n_tp)
    rows[tp_index].copy_(reduced)
    _exchange([(peer, reduced) for peer in tp_peers], list(zip(tp_peers, rows, strict=True)))
    return result


def _exchange(sent: Iterable[tuple[int, torch.Tensor]], received: Iterable[tuple[int, torch.Tensor]]) -> None:
    """Sends tensors to other ranks and receives into others, each with its peer; what is empty or the rank's own stays."""
    me = dist.get_rank()
    transfers = [dist.P2POp(dist.isend, tensor, peer) for peer, tensor in sent if peer != me and tensor.numel()]
    transfers += [dist.P2POp(dist.irecv, tensor, peer) for peer, tensor in received if peer != me and tensor.numel()]
    if transfers:
        for request in dist.batch_isend_irecv(transfers):
            request.wait()


def grid(case: pc.Case) -> tuple[int, int]:
    """(n_tp, n_fsdp) from ``n_tp`` or ``n_fsdp``. ``square``: n_tp is 2, but 1 on two ranks, as in the public benchmark."""
    world = case.world_size
    if case.params.get("square"):
        return (2, world // 2) if world > 2 else (1, world)
    if "n_tp" in case.params:
        return int(case["n_tp"]), world // int(case["n_tp"])
    return world // int(case["n_fsdp"]), int(case["n_fsdp"])


def _rows(case: pc.Case, fsdp_index: int) -> int:
    """B: ``rows``, ``rows_by_index`` (by place in the FSDP group, repeated), or a place's share of ``rows_total``."""
    if "rows_by_index" in case.params:
        by_index = case["rows_by_index"]
        return int(by_index[fsdp_index % len(by_index)])
    return int(case["rows"] if "rows" in case.params else case["rows_total"] // grid(case)[1])


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    """x of N(0, s^2) entries with s from 0.5 to 2 per token; weights of variance 1 / fan-in.

    What crosses the wire has rows and columns that differ in size by powers of two (see :meth:`Draw.octaves`): channels of x, for which W1
    and W2 make up; every other gate x W1, and units of x W2, for which W3 makes up; and channels of y.
    ``case["pattern"]``:

    * ``saturated``: x is 15 times as large, so that SiLU is nearly zero or the identity
    * ``cancelling``: partial sums of neighbouring tensor-parallel ranks cancel but for noise of half their size
    * ``nan``: a NaN in one token of the first place of the FSDP group
    """
    (n_tp, n_fsdp), pattern = grid(case), case.params.get("pattern")
    fsdp_index, tp_index = divmod(rank, n_tp)
    depth, width = case["depth"] // n_fsdp, case["width"] // n_tp
    entering, leaving = (draw.shared.octaves((case["depth"],)) for _ in range(2))
    gates, units = (draw.shared.octaves((width,)) for _ in range(2))  # the same in every slice, whose partial sums may have to cancel
    gates[::2] = 1.0  # SiLU is told from other activations by gates of this size
    for index in range(n_fsdp):  # ranks of one tensor-parallel group have the same tokens
        tokens = draw.shared.normal((_rows(case, index), case["depth"]), FP32)
        tokens *= draw.shared.uniform((tokens.shape[0], 1), FP32, low=0.5, high=2.0)
        if index == fsdp_index:
            x = tokens
    if pattern == "saturated":
        x *= 15.0
    elif pattern == "nan" and fsdp_index == 0:
        x[x.shape[0] // 2, 1] = math.nan
    scales = (case["depth"] ** -0.5, case["depth"] ** -0.5, case["width"] ** -0.5)
    shapes = ((depth, width), (depth, width), (width, depth))
    if pattern == "cancelling":
        for index in range(n_fsdp):
            shards = [draw.shared.normal(shape, FP32, scale=scale) for shape, scale in zip(shapes, scales, strict=True)]
            if index == fsdp_index:
                weights = shards
        weights[2] = weights[2] * (-1.0) ** tp_index + draw.normal(shapes[2], FP32, scale=0.5 * scales[2])
    else:
        weights = [draw.normal(shape, FP32, scale=scale) for shape, scale in zip(shapes, scales, strict=True)]
    own = slice(fsdp_index * depth, (fsdp_index + 1) * depth)
    for weight, rows, columns in zip(
        weights, (1 / entering[own], 1 / entering[own], 1 / (gates * units)), (gates, units, leaving[own]), strict=True
    ):
        weight *= rows.unsqueeze(1) * columns
    return ((x * entering).to(case.dtype), *(weight.to(case.dtype) for weight in weights), n_tp, n_fsdp)


def _whole_weights(inputs: pc.Inputs, ranks: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
    """W1, W2 (D, F / n_tp) and W3 (F / n_tp, D) from the shards of these ranks, in order."""
    return [torch.cat([inputs[q][position] for q in ranks], dim=1 if position == 3 else 0).to(dtype) for position in (1, 2, 3)]


def _fsdp_peers(case: pc.Case, tp_index: int) -> list[int]:
    n_tp, n_fsdp = grid(case)
    return [index * n_tp + tp_index for index in range(n_fsdp)]


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    """In float64. The magnitude is what rounding every intermediate to the dtype may leave, in units of its roundoff: _ROOTS times the root
    of the sum of squares that hidden units' errors and partial sums' roundings amount to.
    """
    n_tp, _ = grid(case)
    x = inputs[rank][0].to(FP64)
    value = torch.zeros_like(x)
    squares = torch.zeros_like(x)
    for tp_index in range(n_tp):
        w1, w2, w3 = _whole_weights(inputs, _fsdp_peers(case, tp_index), FP64)
        gate, up = x @ w1, x @ w2
        sigmoid = gate.sigmoid()
        silu = gate * sigmoid
        hidden = silu * up
        # Both factors, the product and SiLU's argument are rounded; the derivative of SiLU is sigmoid (1 + gate (1 - sigmoid)).
        error = 3 * hidden.abs() + (silu * (1 + gate * (1 - sigmoid)) * up).abs()
        partial = hidden @ w3
        value += partial
        # A partial sum is rounded, and so is every sum of partial sums.
        squares += error.square() @ w3.square() + n_tp * partial.square()
    return pc.Expected("y", value, case.dtype, magnitude=_ROOTS * squares.sqrt())


def tolerance(case: pc.Case) -> Mapping[str, pc.Tolerance]:
    """The oracle's magnitude, where a unit is the dtype's roundoff and the random walk of float32 sums as deep as the widest product.

    Normwise bfloat16 leaves 4e-3, and hardly more than twice that in a token, if partial sums do not cancel.
    """
    unit = pc.UNIT_ROUNDOFF[case.dtype] + pc.UNIT_ROUNDOFF[FP32] * math.sqrt(max(case["depth"], case["width"]))
    average = case.dtype == BF16 and case["depth"] >= 256 and case.params.get("pattern") != "cancelling"
    size = f"{_ROOTS:g} times the root of the sum of squares of what rounding every intermediate once to relative precision 1 would do"
    return {"y": pc.Tolerance(magnitude=unit, normwise=1e-2 if average else None, rowwise=2e-2 if average else None, size=size)}


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """Gathering the weights of a tensor-parallel slice, and an all-reduce of the output; own shards, tokens and output cross memory."""
    (n_tp, n_fsdp), size = grid(case), case.dtype.itemsize
    rows, depth, width = _rows(case, rank // n_tp), case["depth"], case["width"]
    weights = 3 * depth * width / n_tp
    port = ((n_fsdp - 1) / n_fsdp * weights + 2 * (n_tp - 1) / n_tp * rows * depth) * size
    return pc.Cost(
        hbm_bytes=(weights / n_fsdp + 2 * rows * depth) * size,
        egress_bytes=port,
        ingress_bytes=port,
        flops={FLOP_UNIT[case.dtype]: 2 * rows * weights},
    )


def _where(*, tp: bool, fsdp: bool, only: Callable[[str, pc.CaseSpec], bool] = lambda *_: True) -> tuple[str, ...]:
    """The cases whose grid has more than one tensor-parallel rank, or more than one FSDP rank, and that ``only`` admits."""
    found = []
    for item in PRESETS:
        for spec in item.cases:
            for world_size in spec.world_sizes or (2, 4, 8):
                one = pc.Case(48, item.name, spec.label, world_size, spec.dtype, params=spec.params)
                n_tp, n_fsdp = grid(one)
                if (n_tp > 1 or not tp) and (n_fsdp > 1 or not fsdp) and only(item.name, spec):
                    found.append(one.name)
    return tuple(found)


def _small(label: str, dtype: torch.dtype, **params: Any) -> pc.CaseSpec:
    return pc.case(label, dtype, **{"depth": 40, "width": 72, "rows": 7, **params})


PRESETS = (
    pc.preset(
        "small",
        "FSDP alone, tensor parallelism alone and grids of both; batches that differ in size; saturated SiLU, cancelling partial sums, a "
        "NaN",
        _small("fsdp_bf16", BF16, n_tp=1),
        _small("tp_bf16", BF16, n_fsdp=1),
        _small("tp_fp32", FP32, n_fsdp=1),
        _small("grid_bf16", BF16, n_tp=2, world_sizes=(4, 8)),
        _small("grid_fp32", FP32, n_tp=2, world_sizes=(4, 8)),
        _small("tall_grid_fp32", FP32, n_fsdp=2, world_sizes=(4, 8)),
        _small("unequal_rows_bf16", BF16, n_fsdp=2, rows_by_index=(3, 8), world_sizes=(4, 8)),
        _small("saturated_bf16", BF16, square=True, pattern="saturated"),
        _small("cancelling_bf16", BF16, n_tp=2, pattern="cancelling"),
        _small("nan_bf16", BF16, square=True, pattern="nan"),
    ),
    pc.preset(
        "pkb",
        "the public benchmark's shape: a grid of 2 x 4 on 8 ranks, 1 x 2 on 2, hidden 256, intermediate 1024, 2048 tokens over the FSDP "
        "group",
        pc.case("bf16", BF16, square=True, depth=256, width=1024, rows_total=2048),
    ),
    pc.preset(
        "production_llama3_8b_mlp",
        "8192 tokens per FSDP place, 2 tensor-parallel ranks; and FSDP alone",
        pc.case("bf16", BF16, n_tp=2, depth=4096, width=14336, rows=8192),
        pc.case("fsdp_bf16", BF16, n_tp=1, depth=4096, width=14336, rows=8192),
    ),
    pc.preset(
        "production_llama3_70b_mlp",
        "4096 tokens per FSDP place, 2 such places; and tensor parallelism alone",
        pc.case("bf16", BF16, n_fsdp=2, depth=8192, width=28672, rows=4096),
        pc.case("tp_bf16", BF16, n_fsdp=1, depth=8192, width=28672, rows=4096),
    ),
)


PROBLEM = pc.Problem(
    id=48,
    slug="fsdp_and_tp",
    title="SwiGLU MLP with weights sharded over a grid of FSDP and tensor-parallel ranks",
    category="fsdp_zero",
    parallelism=("fsdp", "tensor"),
    origin="two-dimensional sharding of transformer layers, as in torchtitan",
    summary=(
        "Rank f n_tp + t has place t in a tensor-parallel group of consecutive ranks and place f in an FSDP group of every n_tp-th rank. "
        "W1_shard and W2_shard (D/n_fsdp, F/n_tp) are its rows of the slice t of W1 and W2 (D, F), W3_shard (F/n_tp, D/n_fsdp) its "
        "columns of the slice t of W3 (F, D); x_local (B, D) is the same within a tensor-parallel group, and B may differ between them. "
        "Every rank returns (silu(x W1) * (x W2)) W3 (B, D) over the whole weights, in the inputs' dtype. Process groups are the "
        "solution's own affair."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    tolerance=tolerance,
    cost=cost,
    presets=PRESETS,
    known_wrong_answers=pc.FromProof(__name__, "KNOWN_WRONG_ANSWERS"),
    alternative_solutions=pc.FromProof(__name__, "ALTERNATIVE_SOLUTIONS"),
    excused={
        f"another_rank@{name}": "all ranks are in one tensor-parallel group"
        for name in sorted(set(_where(tp=True, fsdp=False)) - set(_where(tp=True, fsdp=True)))
    },
    notes=(
        "The public reference creates n_tp + n_fsdp process groups in every call, and its time is theirs; ours creates none, and moves "
        "shards between pairs of ranks.",
        "The public benchmark's N(0, 1) weights give outputs of size 6000 and gates that saturate. Here weights have variance 1 / fan-in. "
        "It has no tensor parallelism on two ranks. Here small cases and a production case do.",
        "Channels of x and y, units of x W2 and every other gate differ in size by powers of two, from 1/16 to 16, as far as the weights "
        "that follow can make up for it.",
    ),
    speed_note="The public one creates its process groups in every call; this one creates none and moves shards between pairs of ranks.",
)
