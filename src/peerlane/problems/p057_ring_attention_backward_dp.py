"""Problem 57: the backward pass of ring attention, its gradients averaged over replicas."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families import attention
from peerlane.problems.families.attention import Grid, local_length, scale_of
from peerlane.problems.families.attention_backward import Gradients, How, Shards, by_block, forward, gradients
from peerlane.problems.families.collective import BF16, FP32, sequential_sum

_NAMES = ("dq", "dk", "dv")


def reference(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    cp_group: dist.ProcessGroup | None = None,
    dp_group: dist.ProcessGroup | None = None,
) -> Gradients:
    rank, world = dist.get_rank(cp_group), dist.get_world_size(cp_group)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    queries, d_out = (tensor.transpose(1, 2).to(FP32) for tensor in (q, dout))  # (B, h, S, D), as everything below
    delta = (d_out * out.transpose(1, 2).to(FP32)).sum(-1, keepdim=True)
    lse = softmax_lse.unsqueeze(-1)
    future = queries.new_ones(q.shape[1], k.shape[1], dtype=torch.bool).triu_(1) if causal else None

    dq = torch.zeros_like(queries)
    blocks = [k.contiguous(), v.contiguous()]
    # The gradients of the block that is here travel with it, and end where the block came from.
    block_gradients = [queries.new_zeros(queries.shape) for _ in range(2)]
    arrivals: list[dist.Work] = []
    for step in range(world):
        if step + 1 < world:
            incoming, requests = attention.exchange(blocks, cp_group)
        owner = (rank - step) % world
        contributions: list[torch.Tensor] = []
        if not causal or owner <= rank:
            keys, values = (block.transpose(1, 2).to(FP32) for block in blocks)
            scores = torch.matmul(queries, keys.transpose(-1, -2)).mul_(scale)
            if future is not None and owner == rank:
                scores.masked_fill_(future, -math.inf)
            p = scores.sub_(lse).exp_()
            ds = torch.matmul(d_out, values.transpose(-1, -2)).sub_(delta).mul_(p)
            dq += torch.matmul(ds, keys)
            contributions = [torch.matmul(ds.transpose(-1, -2), queries), torch.matmul(p.transpose(-1, -2), d_out)]
        for request in arrivals:
            request.wait()
        for total, contribution in zip(block_gradients, contributions, strict=False):
            total += contribution
        if world > 1:
            block_gradients, arrivals = attention.exchange(block_gradients, cp_group)
        if step + 1 < world:
            for request in requests:
                request.wait()
            blocks = incoming
    for request in arrivals:
        request.wait()
    dk, dv = block_gradients
    rounded = dq.mul_(scale).to(q.dtype), dk.mul_(scale).to(k.dtype), dv.to(v.dtype)
    results = [gradient.transpose(1, 2).contiguous() for gradient in rounded]
    if dp_group is not None and (replicas := dist.get_world_size(dp_group)) > 1:
        for result in results:
            dist.all_reduce(result, group=dp_group)
            result /= replicas
    return results[0], results[1], results[2]


def _grid(case: pc.Case) -> Grid:
    """Groups of replicas and rings. ``case``: ``dp``, the number of replicas or ``"world"``; ``inner``: ``dp`` or ``cp``."""
    return Grid.of(case, "dp", inner="cp")


def process_groups(case: pc.Case) -> pc.GroupLayout:
    """With a single replica both groups are None: no averaging, and the ring is the world."""
    return {} if case["dp"] == 1 else {"replicas": _grid(case).along, "context": _grid(case).across}


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    """N(0, 1) entries, queries twice as large; out and softmax_lse are those of attention over the whole sequence, computed in float32.

    All ranks draw the whole sequences of all replicas and keep their part, for out depends on all of its keys. ``case["pattern"]``:

    * ``one_hot``: queries 4 times as large, so that most gradients of scores cancel, and no probability underflows;
    * ``sparse_dout``: dout is zero but for about one token in 4;
    * ``late_dout``: dout is zero but on the last rank of a ring, so that everything flows to earlier ranks;
    * ``large_dout``: dout is 1000 times as large;
    * ``nan_dout``: one token of dout on the first rank of every ring has NaN in head 0, for cases that are not causal.
    """
    replicas, ring = _grid(case).lines(rank)
    replica, place, local = replicas.index(rank), ring.index(rank), local_length(case, len(ring))
    pattern = case.params.get("pattern")
    shape = (case["batch"], len(ring) * local, case["heads"], case["depth"])
    q, k, v = (
        [draw.shared.normal(shape, case.dtype, scale=scale) for _ in replicas][replica]
        for scale in (8.0 if pattern == "one_hot" else 2.0, 1.0, 1.0)
    )
    own = slice(place * local, (place + 1) * local)
    queries = q[:, own].clone()
    seen = slice(0, own.stop if case["causal"] else shape[1])
    out, lse = forward(queries, k[:, seen], v[:, seen], scale_of(case), own.start if case["causal"] else None)
    dout = draw.normal(queries.shape, case.dtype, scale=1000.0 if pattern == "large_dout" else 1.0)
    if pattern == "sparse_dout":
        dout *= draw.permutation(local).remainder(4).eq(0).view(1, -1, 1, 1)
    elif pattern == "late_dout" and place < len(ring) - 1:
        dout.zero_()
    elif pattern == "nan_dout" and place == 0:
        dout[:, local // 2, 0] = math.nan
    groups = process_groups(case)
    cp_group, dp_group = (pc.GroupRef(name) if name in groups else None for name in ("context", "replicas"))
    keys, values = k[:, own].clone(), v[:, own].clone()
    return dout, queries, keys, values, out.to(case.dtype), lse, case.params.get("scale"), case["causal"], cp_group, dp_group


def _shards(case: pc.Case, inputs: pc.Inputs, rank: int) -> tuple[Shards, int]:
    """What the ranks of the rank's ring hold, and its place there."""
    ring = _grid(case).lines(rank)[1]
    return [inputs[q][:6] for q in ring], ring.index(rank)


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> tuple[pc.Expected, pc.Expected, pc.Expected]:
    """The mean over replicas. The magnitude adds to the errors' standard deviations the sizes of what is rounded before it is added."""
    replicas = _grid(case).lines(rank)[0]
    each = [gradients(*_shards(case, inputs, replica), causal=case["causal"], scale=scale_of(case)) for replica in replicas]
    expected = []
    for index, name in enumerate(_NAMES):
        value = torch.stack([values[index] for values, _ in each]).mean(0)
        magnitude = torch.stack([errors[index] for _, errors in each]).mean(0)
        if len(replicas) > 1:
            magnitude += torch.stack([values[index].abs() for values, _ in each]).mean(0)
        expected.append(pc.Expected(name, value, case.dtype, magnitude=magnitude))
    return expected[0], expected[1], expected[2]


def tolerance(case: pc.Case) -> Mapping[str, pc.Tolerance]:
    """The magnitude is how p and ds, rounded to the dtype for their products, err in sum, plus what the average over replicas rounds.

    In bfloat16 5 u of it: one rounding errs by 0.41 u, so that this is twelve standard deviations. Normwise the roundings of p, of ds and
    of the result cost 2.4e-3 to 5e-3. In float32 scores up to 60 err by 60 u, and dP - delta by a few u of the terms that it sums.
    """
    u = pc.UNIT_ROUNDOFF[case.dtype]
    if case.dtype == FP32:
        return dict.fromkeys(_NAMES, pc.Tolerance(relative=4 * u, magnitude=512 * u))
    return dict.fromkeys(_NAMES, pc.Tolerance(relative=2 * u, magnitude=5 * u, normwise=1.2e-2))


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """Keys and values go to the ranks whose queries see them, and queries and dout to the ranks whose keys they see: 2 n elements each.

    That is what must move if dk and dv are computed by their owners; sending their parts back, rounded, is as much. Under a causal mask
    every pair of ranks exchanges one of the two kinds in each direction. Or ranks share the heads: all but 1 / ring of q, k, v and dout
    goes to other ranks, and as much of the three gradients comes back; then all ranks have the same work, the least that the busiest one
    can have. The average over replicas is an all-reduce of 3 n elements.
    """
    replicas, ring = (len(members) for members in _grid(case).lines(rank))
    size = case.dtype.itemsize
    tokens = case["batch"] * local_length(case, ring) * case["heads"]
    elements = tokens * case["depth"]
    pairs = attention.visible_pairs((ring - 1) / 2, ring, local_length(case, ring), case["causal"])
    shared = min((ring - 1) * (2 if case["causal"] else 4), 7 * (ring - 1) / ring)  # times n elements
    port = (shared + 2 * (replicas - 1) / replicas * 3) * elements * size
    return pc.Cost(
        hbm_bytes=8 * elements * size + tokens * FP32.itemsize,
        egress_bytes=port,
        ingress_bytes=port,
        flops={"fp32" if case.dtype == FP32 else "bf16": 10 * case["batch"] * case["heads"] * case["depth"] * pairs},
    )


def _shared_heads(case: pc.Case, rank: int) -> pc.Steps:
    least, (replicas, ring) = cost(case, rank), (len(members) for members in _grid(case).lines(rank))
    shard = case["batch"] * local_length(case, ring) * case["heads"] * case["depth"] * case.dtype.itemsize
    moved, averaged = shard * (ring - 1) / ring, (replicas > 1) * 3 * shard
    return (
        pc.step("inputs, to their heads' ranks", hbm=4 * shard + least.hbm_bytes / 2, link=4 * moved, barriers=1),
        pc.step("gradients of a rank's heads", hbm=7 * shard, flops=least.flops),
        pc.step("mean over replicas", hbm=averaged, link=pc.traffic.all_reduce(averaged, replicas), barriers=2 * (replicas > 1)),
        pc.step("gradients, to their tokens' ranks", hbm=6 * shard, link=3 * moved, barriers=1),
    )


def _how(case: pc.Case, **changes: Any) -> How:
    return How(**{"causal": case["causal"], "scale": scale_of(case), **changes})


def _averaged(case: pc.Case, inputs: pc.Inputs, rank: int, how: How) -> pc.Tree:
    """The mean over replicas, rounded once."""
    each = [by_block(*_shards(case, inputs, replica), how) for replica in _grid(case).lines(rank)[0]]
    return tuple(torch.stack(replicas).mean(0).to(case.dtype) for replicas in zip(*each, strict=True))


def _rounded(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Tree:
    """p, ds and every replica's gradients rounded to the dtype, and the sum of these."""
    each = [by_block(*_shards(case, inputs, replica), _how(case, rounded=case.dtype)) for replica in _grid(case).lines(rank)[0]]
    return tuple(sequential_sum([one.to(case.dtype) for one in replicas]) / len(each) for replicas in zip(*each, strict=True))


def _with(**changes: Any) -> Callable[[pc.AnswerContext], pc.Tree]:
    """A wrong answer: computed in another way."""
    return lambda c: _averaged(c.case, c.inputs, c.rank, _how(c.case, **changes))


def _own_replica(context: pc.AnswerContext, factor: int) -> pc.Tree:
    """Without the average, times ``factor``."""
    own = by_block(*_shards(context.case, context.inputs, context.rank), _how(context.case))
    return tuple((factor * gradient).to(context.case.dtype) for gradient in own)


def _one_rotation_short(context: pc.AnswerContext) -> pc.Tree:
    """dk and dv of the next rank's keys: the ring stopped before they came home."""
    ring = _grid(context.case).lines(context.rank)[1]
    other = context.answers[ring[(ring.index(context.rank) + 1) % len(ring)]]
    return context.answer[0], other[1], other[2]


def _local_softmax(context: pc.AnswerContext) -> pc.Tree:
    """out and softmax_lse of the rank's own block in place of those given: the public benchmark's inputs."""
    local = []
    for args in context.inputs:
        q, k, v = args[1:4]
        out, lse = forward(q, k, v, scale_of(context.case), 0 if context.case["causal"] else None)
        local.append((*args[:4], out.to(context.case.dtype), lse, *args[6:]))
    return _averaged(context.case, local, context.rank, _how(context.case))


def _small(label: str, dtype: torch.dtype = BF16, **params: Any) -> pc.CaseSpec:
    sizes = {"batch": 2, "local": 3, "heads": 2, "depth": 8}
    return pc.case(label, dtype, **{**sizes, "causal": True, "dp": 1, **params})


PRESETS = (
    pc.preset(
        "small",
        "replicas and rings in both orders, either alone; causal and not; one-hot softmax; sparse, late, large and NaN output gradients",
        _small("replicas_bf16", dp=2),
        _small("replicas_full_fp32", FP32, dp=2, causal=False, scale=0.5),
        _small("ring_alone_bf16"),
        _small("ring_alone_full_fp32", FP32, causal=False),
        _small("replicas_alone_bf16", dp="world"),
        _small("replicas_inner_bf16", dp=2, inner="dp", world_sizes=(4, 8)),
        _small("scaled_full_bf16", causal=False, scale=0.5),
        _small("one_hot_bf16", pattern="one_hot"),
        _small("sparse_dout_bf16", pattern="sparse_dout", local=5, dp=2, causal=False),
        _small("late_dout_bf16", pattern="late_dout"),
        _small("large_dout_bf16", pattern="large_dout", causal=False),
        _small("nan_dout_bf16", pattern="nan_dout", causal=False),
    ),
    pc.preset(
        "pkb",
        "the public benchmark's shape: 16 tokens, two replicas, not causal; and causal",
        pc.case("bf16", BF16, batch=16, length=16, heads=8, depth=64, causal=False, dp=2),
        pc.case("causal_bf16", BF16, batch=16, length=16, heads=8, depth=64, causal=True, dp=2),
    ),
    pc.preset(
        "production_llama2_7b_16k",
        "two replicas, 16384 tokens, causal",
        pc.case("bf16", BF16, batch=1, length=16384, heads=32, depth=128, causal=True, dp=2, world_sizes=(4, 8)),
    ),
    pc.preset(
        "production_llama2_7b_4k",
        "two replicas (one on two ranks), 4096 tokens, causal",
        pc.case("bf16", BF16, batch=1, length=4096, heads=32, depth=128, causal=True, dp=2, world_sizes=(4, 8)),
        pc.case("one_replica_bf16", BF16, batch=1, length=4096, heads=32, depth=128, causal=True, dp=1, world_sizes=(2,)),
    ),
    pc.preset(
        "production_llama3_70b_64k",
        "8 heads (the slice of 8-way tensor parallelism), 65536 tokens, causal",
        pc.case("bf16", BF16, batch=1, length=65536, heads=8, depth=128, causal=True, dp=1, world_sizes=(4, 8)),
    ),
    pc.preset(
        "production_wan2_1_14b_480p",
        "video diffusion self-attention, 32760 tokens, not causal",
        pc.case("bf16", BF16, batch=1, length=32760, heads=40, depth=128, causal=False, dp=1, world_sizes=(4, 8)),
    ),
)


_REPLICATED, _RINGED = pc.where(lambda c: _grid(c).sizes[0] > 1), pc.where(lambda c: _grid(c).sizes[1] > 1)

PROBLEM = pc.Problem(
    id=57,
    slug="ring_attention_backward_dp",
    title="Ring attention, backward, with gradients averaged over replicas",
    category="context_parallel",
    parallelism=("context", "sequence", "data"),
    origin="zhuzilin/ring-flash-attention: the backward pass that passes keys, values and their gradients around the ring",
    summary=(
        "dout, q, k, v and out (B, S, h, D) are the rank's part of a sequence sharded in rank order over cp_group (the world if None); out "
        "and softmax_lse (B, h, S; float32, natural logarithm) come from the forward pass over the whole sequence. With "
        "p_ij = exp(scale q_i.k_j - lse_i), 0 for j > i in the whole sequence if causal, and ds_ij = p_ij (dout_i.v_j - dout_i.out_i): "
        "dq_i = scale sum_j ds_ij k_j, dk_j = scale sum_i ds_ij q_i, dv_j = sum_i p_ij dout_i. Returns (dq, dk, dv) in the dtypes of q, k, "
        "v, each averaged over dp_group if there is one; scale is D^-0.5 if None. p and ds may be rounded to the inputs' dtype, and so may "
        "gradients before they are averaged; sums are in float32."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    tolerance=tolerance,
    cost=cost,
    attainable=pc.Algorithm("ranks share the heads", "Jacobs et al., DeepSpeed Ulysses, 2023", _shared_heads),
    bandwidth="production_llama2_7b_4k",
    presets=PRESETS,
    known_wrong_answers=(
        pc.wrong("no_ring", "the rank's own block alone", _with(other_keys=False, other_queries=False), _RINGED),
        pc.wrong("parts_lost", "dk and dv from the rank's own queries alone", _with(other_queries=False), _RINGED),
        pc.wrong("one_rotation_short", "dk and dv of the next rank's keys", _one_rotation_short, _RINGED),
        pc.wrong("local_softmax", "out and softmax_lse of the rank's own block", _local_softmax, _RINGED),
        pc.wrong("no_delta", "ds without the term of dout.out", _with(delta=False)),
        pc.wrong(
            "default_scale",
            "softmax_scale ignored",
            lambda c: _averaged(c.case, c.inputs, c.rank, _how(c.case, scale=c.case["depth"] ** -0.5)),
            lambda c: "scale" in c.params,
        ),
        pc.wrong(
            "mask_inverted",
            "a causal mask instead of none, or none instead of a causal mask",
            lambda c: _averaged(c.case, c.inputs, c.rank, _how(c.case, causal=not c.case["causal"])),
        ),
        pc.wrong("no_average", "the rank's own replica", lambda c: _own_replica(c, 1), _REPLICATED),
        pc.wrong(
            "own_times_replicas",
            "the rank's own replica times their number",
            lambda c: _own_replica(c, _grid(c.case).sizes[0]),
            _REPLICATED,
        ),
        pc.wrong(
            "sum_over_replicas",
            "the sum in place of the mean",
            lambda c: tuple(_grid(c.case).sizes[0] * gradient for gradient in c.answer),
            _REPLICATED,
        ),
    ),
    alternative_solutions=pc.alternatives(
        fp32_rounded_once=lambda case, inputs, rank: _averaged(case, inputs, rank, _how(case)), every_step_rounded=_rounded
    ),
    excused={
        f"another_rank@{name}": "all ranks hold the same place of the sequence, and have the same mean"
        for name in pc.names_of(PRESETS, lambda c: _grid(c).sizes[1] == 1)
    },
    process_groups=process_groups,
    notes=(
        "In the public benchmark out and softmax_lse come from the rank's own block of keys alone, so that p is no probability and the "
        "answer no gradient. Here they belong to the whole sequence. The operator is the same, and a candidate may rely on p <= 1.",
        "The public benchmark is never causal. Here most cases are.",
        "Results are equal on all ranks of a dp_group by definition; that their bits are is not checked.",
        "NaN is in one token of dout only, in cases that are not causal: it belongs in that row of dq and in all of dk and dv. Under a "
        "causal mask a dense product spreads it to rows that a tiled kernel leaves finite.",
        "Real systems average gradients of weights, not of activations; the average is kept, as the public problem has it.",
    ),
)
