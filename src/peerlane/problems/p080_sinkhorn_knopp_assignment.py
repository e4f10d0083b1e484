"""Problem 80: teacher assignments balanced over prototypes by Sinkhorn-Knopp, samples sharded across ranks."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families.collective import BF16, FP16, FP32, FP64, group_layout, group_members

# Bytes of float64 exponentials that the oracle holds at a time.
_CHUNK_BYTES = 2**30


def reference(
    teacher_output: torch.Tensor,
    teacher_temp: float,
    n_masked_patches_tensor: torch.Tensor,
    n_iterations: int = 3,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    q = torch.exp(teacher_output.to(torch.float32) / teacher_temp)
    prototypes = q.shape[1]
    samples = n_masked_patches_tensor.clone()
    dist.all_reduce(samples, group=group)
    mass = q.sum()
    dist.all_reduce(mass, group=group)
    q /= mass
    for _ in range(n_iterations):
        popularity = q.sum(0, keepdim=True)
        dist.all_reduce(popularity, group=group)
        q /= popularity.mul_(prototypes)
        q /= q.sum(1, keepdim=True).mul_(samples)
    return q.mul_(samples)


def _rows(case: pc.Case, rank: int) -> int:
    """Samples of one rank. ``case["rows"]``: one number, or numbers that repeat over the group's ranks."""
    count: int | Sequence[int] = case["rows"]
    return count if isinstance(count, int) else count[group_members(case, rank).index(rank) % len(count)]


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    """Logits like cosines: N(0, 0.25^2), moved per prototype by what all ranks share and by what is the rank's own, within +-limit.

    The number of masked patches exceeds that of rows and is odd on every other rank, so that neither rows nor one rank tell all of them.
    ``case["pattern"]``:

    * ``popular``: one prototype is the favourite of every sample
    * ``flat``: all logits of every other sample are equal
    * ``wide``: logits uniform over [-limit, limit]
    """
    rows, prototypes, limit = _rows(case, rank), case["prototypes"], case.params.get("limit", 1.0)
    pattern, shared = case.params.get("pattern"), draw.shared
    if pattern == "wide":
        logits = draw.uniform((rows, prototypes), FP32, low=-limit, high=limit)
    else:
        logits = draw.normal((rows, prototypes), FP32, scale=0.25 * limit)
        logits += shared.normal((prototypes,), FP32, scale=0.1 * limit) + draw.normal((prototypes,), FP32, scale=0.1 * limit)
        if pattern == "popular":
            logits[:, prototypes // 3] = shared.uniform((), FP32, low=0.9 * limit, high=limit)
        elif pattern == "flat":
            logits[::2] = draw.normal((rows, 1), FP32, scale=0.25 * limit)[::2]
        logits.clamp_(-limit, limit)
    place = group_members(case, rank).index(rank)
    masked = 2 * (rows // 2 + 1 + draw.integers(0, rows // 2 + 2, (1,))) + place % 2
    group = next((pc.GroupRef(name) for name in group_layout(case)), None)
    return (logits.to(case.dtype), case["temp"], masked, case["iterations"], group)


def _exponentials(case: pc.Case, logits: torch.Tensor) -> torch.Tensor:
    return logits.to(FP64).div_(case["temp"]).exp_()


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    """E_ik u_k v_i in float64, u_k = 1 / sum_i E_ik v_i and v_i = 1 / sum_k E_ik u_k in turn from v = 1; E is made anew in every pass."""
    members, prototypes = group_members(case, rank), case["prototypes"]
    rows = max(1, _CHUNK_BYTES // (prototypes * FP64.itemsize))
    blocks = [list(torch.split(inputs[q][0], rows)) for q in members]
    u = inputs[rank][0].new_ones(prototypes, dtype=FP64)
    v = [[torch.ones_like(block[:, 0], dtype=FP64) for block in of_rank] for of_rank in blocks]
    for _ in range(case["iterations"]):
        total = torch.zeros_like(u)
        for logits, weights in zip(_flat(blocks), _flat(v), strict=True):
            total += weights @ _exponentials(case, logits)
        u = 1 / total
        v = [[1 / (_exponentials(case, logits) @ u) for logits in of_rank] for of_rank in blocks]
    factor: torch.Tensor | float = 1.0
    if case["iterations"] == 0:
        mass = torch.stack([_exponentials(case, logits).sum() for logits in _flat(blocks)]).sum()
        factor = torch.stack([inputs[q][2] for q in members]).sum() / mass
    own = members.index(rank)
    value = torch.cat(
        [
            _exponentials(case, logits).mul_(u).mul_(weights.unsqueeze(1)).mul_(factor)
            for logits, weights in zip(blocks[own], v[own], strict=True)
        ]
    )
    magnitude = value.amax(1, keepdim=True) if value.numel() else None
    return pc.Expected("assignment", value, FP32, magnitude=magnitude)


def _flat(of_ranks: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    return [block for of_rank in of_ranks for block in of_rank]


def tolerance(case: pc.Case) -> Mapping[str, pc.Tolerance]:
    """All terms are positive, so errors are relative.

    An exponent rounded to float32 errs by its size times u, in the entry itself and in the weights of the sums it is divided by: 4 u per
    unit of the largest exponent. Every iteration adds two sums over thousands of terms and two divisions: 64 u. An entry may come out as
    zero when it is u^2 or less of the largest in its row (the magnitude).
    """
    u = pc.UNIT_ROUNDOFF[FP32]
    largest = case.params.get("limit", 1.0) / case["temp"]
    return {
        "assignment": pc.Tolerance(
            relative=u * (4 * largest + 64 * (case["iterations"] + 1)), magnitude=u * u, size="the largest element of the row"
        )
    }


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """Logits are read once, and again, as far as they did not stay on the chip, behind every sum over all ranks; the assignment is written.

    Each iteration has such a sum, of one float32 per prototype; the mass and the number of samples cancel, unless there is no iteration.
    """
    ranks, iterations, entries = len(group_members(case, rank)), case["iterations"], _rows(case, rank) * case["prototypes"]
    port = pc.traffic.all_reduce(FP32.itemsize * (case["prototypes"] * iterations or 1), ranks)
    return pc.Cost(
        hbm_bytes=entries * (case.dtype.itemsize + 4) + max(iterations, 1) * pc.traffic.read_again(entries * case.dtype.itemsize),
        egress_bytes=port,
        ingress_bytes=port,
        flops={"fp32": entries * max(4 * iterations, 2)},
    )


def _iterated(case: pc.Case, inputs: pc.Inputs, rank: int, members: Sequence[int], *, iterations: int, temp: float) -> torch.Tensor:
    """The rank's assignment by scaling vectors in float32, with sums over the members' samples; for one iteration or more."""
    logits = [inputs[q][0].to(FP32) / temp for q in members]
    largest = torch.stack([block.amax() for block in logits if block.numel()]).amax()
    e = [torch.exp(block - largest) for block in logits]
    v = [torch.ones_like(block[:, :1]) for block in e]
    for _ in range(iterations):
        u = 1 / torch.stack([(block * weights).sum(0) for block, weights in zip(e, v, strict=True)]).sum(0)
        v = [1 / (block * u).sum(1, keepdim=True) for block in e]
    own = members.index(rank)
    return e[own] * u * v[own]


def _unbalanced(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    """N E / sum(E), the answer without iterations."""
    members = group_members(case, rank)
    e = [torch.exp(inputs[q][0].to(FP32) / case["temp"]) for q in members]
    mass = torch.stack([block.sum() for block in e]).sum()
    return e[members.index(rank)] * (torch.stack([inputs[q][2] for q in members]).sum() / mass)


def _scaling_vectors(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    if case["iterations"] == 0:
        return _unbalanced(case, inputs, rank)
    return _iterated(case, inputs, rank, group_members(case, rank), iterations=case["iterations"], temp=case["temp"])


def _logarithmic(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    """Potentials instead of scaling vectors: every sum a log-sum-exp."""
    if case["iterations"] == 0:
        return _unbalanced(case, inputs, rank)
    members = group_members(case, rank)
    logits = [inputs[q][0].to(FP32) / case["temp"] for q in members]
    v = [torch.zeros_like(block[:, :1]) for block in logits]
    for _ in range(case["iterations"]):
        sums = [torch.logsumexp(block + shift, 0) for block, shift in zip(logits, v, strict=True) if block.numel()]
        u = -torch.logsumexp(torch.stack(sums), 0)
        v = [-torch.logsumexp(block + u, 1, keepdim=True) for block in logits]
    own = members.index(rank)
    return torch.exp(logits[own] + u + v[own])


def _wrong(*, members: Callable[[pc.AnswerContext], Sequence[int]] | None = None, fewer: int = 0, temp: float = 1.0) -> Any:
    """The right iterations over other ranks, fewer of them, or at another temperature (a factor)."""

    def answer(context: pc.AnswerContext) -> torch.Tensor:
        case = context.case
        if not context.args[0].numel():
            return torch.zeros_like(context.answer)  # nothing to spoil
        ranks = members(context) if members is not None else group_members(case, context.rank)
        return _iterated(case, context.inputs, context.rank, ranks, iterations=case["iterations"] - fewer, temp=case["temp"] * temp)

    return answer


def _prototypes_last(context: pc.AnswerContext) -> pc.Tree:
    """After the last iteration every prototype gets the same share once more: rows no longer sum to one."""
    samples = sum(context.answers[q].shape[0] for q in context.members)
    total = torch.stack([context.answers[q].sum(0) for q in context.members]).sum(0)
    return context.answer * (samples / context.case["prototypes"] / total)


def _scaled_by(samples: Callable[[pc.AnswerContext, int], torch.Tensor | int]) -> Callable[[pc.AnswerContext], pc.Tree]:
    """The answer without iterations, with another number of samples."""

    def answer(context: pc.AnswerContext) -> pc.Tree:
        right = torch.stack([context.inputs[q][2] for q in context.members]).sum()
        wrong = sum(samples(context, q) for q in context.members)
        return context.answer * (wrong / right)

    return answer


def _small(label: str, dtype: torch.dtype = FP32, **params: Any) -> pc.CaseSpec:
    return pc.case(label, dtype, **{"rows": (6, 9, 4, 7), "prototypes": 10, "temp": 0.1, "iterations": 3, **params})


PRESETS = (
    pc.preset(
        "small",
        "uneven rows, a single row, none; 0, 1 and 3 iterations; a favourite prototype, flat and wide logits, half precision, groups",
        _small("ragged_fp32"),
        _small("no_iteration_fp32", iterations=0),
        _small("one_iteration_bf16", BF16, iterations=1),
        _small("single_row_fp32", rows=(5, 1)),
        _small("empty_rank_fp16", FP16, rows=(4, 1, 0, 3)),
        _small("popular_fp32", pattern="popular", temp=0.06),
        _small("flat_fp32", pattern="flat"),
        _small("wide_fp32", pattern="wide", limit=3.5, iterations=5),
        _small("dense_bf16", BF16, rows=33, prototypes=257, temp=0.07),
        _small("strided_group_fp32", group="strided", world_sizes=(4, 8)),
    ),
    pc.preset(
        "pkb",
        "the public benchmark's shape, at the temperatures of the end and of the start of DINOv2's schedule",
        pc.case("fp32", FP32, rows=1024, prototypes=16384, temp=0.07, iterations=3),
        pc.case("cold_fp32", FP32, rows=1024, prototypes=16384, temp=0.04, iterations=3),
    ),
    pc.preset(
        "production_dinov2_vitl",
        "iBOT head of DINOv2 ViT-L: 131072 prototypes, 4096 masked patches per rank, half-precision logits",
        pc.case("fp16", FP16, rows=4096, prototypes=131072, temp=0.07, iterations=3),
    ),
    pc.preset(
        "production_dinov2_vitb",
        "65536 prototypes, 2048 masked patches per rank",
        pc.case("fp16", FP16, rows=2048, prototypes=65536, temp=0.07, iterations=3),
    ),
    pc.preset(
        "production_swav",
        "3000 prototypes, 512 samples per rank: latency",
        pc.case("fp32", FP32, rows=512, prototypes=3000, temp=0.05, iterations=3),
    ),
)


_ITERATED = pc.where(lambda c: c["iterations"] > 0)
_NOT_ITERATED = pc.where(lambda c: c["iterations"] == 0)

PROBLEM = pc.Problem(
    id=80,
    slug="sinkhorn_knopp_assignment",
    title="Distributed Sinkhorn-Knopp teacher assignment",
    category="data_parallel",
    parallelism=("data",),
    origin="DINOv2: Sinkhorn-Knopp centering of the teacher in its iBOT patch loss",
    summary=(
        "teacher_output (b, K) are the rank's samples' logits for K prototypes, b of any size. E = exp(float32(teacher_output) / "
        "teacher_temp), N is the sum over the group's ranks (the world if None) of n_masked_patches_tensor, and Q = E / (sum of all E). "
        "n_iterations times: divide Q[:, k] by K times its sum over all ranks' samples, then Q[i, :] by N times its sum. Returns N Q for "
        "the rank's samples, (b, K) float32. After one iteration or more every row sums to one, and N cancels. Exponents are small enough "
        "for exp to be finite in float32."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    tolerance=tolerance,
    cost=cost,
    presets=PRESETS,
    known_wrong_answers=(
        pc.wrong("one_iteration_less", "the last iteration skipped", _wrong(fewer=1), lambda c: c["iterations"] > 1),
        pc.wrong("one_iteration_more", "an iteration too many", _wrong(fewer=-1), _ITERATED),
        pc.wrong("warmer", "a temperature that is 2 % too high", _wrong(temp=1.02), _ITERATED),
        pc.wrong(
            "softmax", "rows normalised, prototypes not balanced", lambda c: torch.softmax(c.args[0].to(FP32) / c.case["temp"], dim=1)
        ),
        pc.wrong("prototypes_last", "prototypes balanced after the rows", _prototypes_last, _ITERATED),
        pc.wrong("rows_for_masked", "samples counted by rows", _scaled_by(lambda c, q: c.inputs[q][0].shape[0]), _NOT_ITERATED),
        pc.wrong("own_count", "every rank's count taken for this one's", _scaled_by(lambda c, _: c.args[2]), _NOT_ITERATED),
    ),
    alternative_solutions=pc.alternatives(scaling_vectors_fp32=_scaling_vectors, logarithmic_fp32=_logarithmic),
    process_groups=group_layout,
    notes=(
        "The public benchmark's logits are so close together that every entry is 6e-5 within a factor of two, below its absolute "
        "tolerance, and an answer of zeros passes. Here logits are spread like those of a trained head, and errors are relative.",
        "In the public benchmark the number of masked patches is the number of rows. Here it is any number, which matters only without "
        "iterations.",
        "Logits whose exponential overflows, or underflows for a whole prototype, are not part of the problem: the public reference "
        "returns NaN for them, and an implementation that subtracts the maximum need not.",
    ),
)
