"""Problem 86: Muon's orthogonalisation of a sharded momentum matrix by Newton-Schulz iterations."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families.collective import group_layout, group_members
from peerlane.problems.families.matmul import BF16, FP32, FP64

Triples = tuple[tuple[float, float, float], ...]

# (a, b, c) of X <- a X + (b G + c G^2) X with G = X X^T, used in turn.
COEFFICIENTS: Mapping[str, Triples] = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4647, 0.5074),
        (2.2779, -1.6447, 0.4162),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
    "aol": ((4.0098, -7.0585, 2.4635), (3.4585, -5.5479, 2.5959), (2.7573, -3.2939, 1.4254), (2.7215, -3.0494, 1.3169)),
}

# The smallest Frobenius norm that the matrix is divided by.
_FLOOR = 1e-7


def reference(
    x: torch.Tensor, steps: int = 5, coefficient_type: str = "quintic", partition_dim: int = 1, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    assert coefficient_type in COEFFICIENTS, f"got coefficient type {coefficient_type!r}: expected one of {', '.join(COEFFICIENTS)}"
    triples = COEFFICIENTS[coefficient_type]
    assert steps % len(triples) == 0, f"got {steps} steps: expected a multiple of {len(triples)}"
    assert x.dim() == 2 and partition_dim in (0, 1), f"got {x.dim()} axes, partitioned along {partition_dim}: expected 2, and 0 or 1"

    shard = (x if partition_dim == 1 else x.t()).to(torch.float32)
    square_norm = shard.square().sum()
    dist.all_reduce(square_norm, group=group)
    shard = shard / square_norm.sqrt().clamp(min=_FLOOR)
    for step in range(steps):
        a, b, c = triples[step % len(triples)]
        gram = shard @ shard.t()
        dist.all_reduce(gram, group=group)
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        shard = torch.addmm(shard, polynomial, shard, beta=a)
    return (shard if partition_dim == 1 else shard.t()).to(x.dtype).contiguous()


def _shape(case: pc.Case, rank: int) -> tuple[int, int]:
    """m and this rank's share of n, of the matrix whose Gram matrix is taken: ``local`` columns, or ``columns`` in all."""
    ranks = len(group_members(case, rank))
    return case["rows"], int(case["local"] if "local" in case.params else case["columns"] // ranks)


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    """N(0, 1) entries, 3 times as large in every other shard; rows of the matrix (m, n) differ in size by ``case["decades"]`` powers of ten
    (2), which spreads its spectrum.

    ``case["pattern"]`` may make it hard: ``rank_one``, an outer product (before it is rounded); ``zero_shard``, nothing on the first rank;
    ``tiny`` and ``huge``, entries of 1e-12 and of 1e16.
    """
    (rows, local), pattern = _shape(case, rank), case.params.get("pattern")
    decades = case.params.get("decades", 2.0)
    sizes = 10.0 ** draw.shared.uniform((rows, 1), FP32, low=-decades / 2, high=decades / 2)
    place = group_members(case, rank).index(rank)
    if pattern == "rank_one":
        x = draw.shared.normal((rows, 1), FP32) * draw.normal((1, local), FP32)
    else:
        x = draw.normal((rows, local), FP32, scale=3.0 ** (place % 2)) * sizes
    if pattern == "zero_shard" and place == 0:
        x.zero_()
    x *= {"tiny": 1e-12, "huge": 1e16}.get(str(pattern), 1.0)
    group = pc.GroupRef(case["group"]) if "group" in case.params else None
    x = x if case["partition_dim"] == 1 else x.t()
    return (x.to(case.dtype).contiguous(), case["steps"], case["coefficients"], case["partition_dim"], group)


def _shards(case: pc.Case, inputs: pc.Inputs, ranks: Sequence[int], work: torch.dtype) -> list[torch.Tensor]:
    """The ranks' shards as columns of the matrix whose Gram matrix is taken."""
    return [(inputs[q][0] if case["partition_dim"] == 1 else inputs[q][0].t()).to(work) for q in ranks]


def iterate(x: torch.Tensor, steps: int, triples: Triples) -> torch.Tensor:
    """The iterations, by their definition, on a whole matrix that has been divided by its norm."""
    for step in range(steps):
        a, b, c = triples[step % len(triples)]
        gram = x @ x.t()
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _own(case: pc.Case, whole: torch.Tensor, rank: int) -> torch.Tensor:
    """The rank's columns of the whole matrix, as the rank stores them."""
    members = group_members(case, rank)
    shard = whole.chunk(len(members), 1)[members.index(rank)]
    return shard if case["partition_dim"] == 1 else shard.t()


def _orthogonalised(
    case: pc.Case,
    inputs: pc.Inputs,
    rank: int,
    work: torch.dtype,
    *,
    floor: float = _FLOOR,
    steps: int | None = None,
    coefficients: str | None = None,
    norm_of: Sequence[int] | None = None,
) -> torch.Tensor:
    """The rank's part of the answer, not rounded, computed on the assembled matrix in ``work``."""
    members = group_members(case, rank)
    x = torch.cat(_shards(case, inputs, members, work), 1)
    normed = x if norm_of is None else torch.cat(_shards(case, inputs, norm_of, work), 1)
    triples = COEFFICIENTS[coefficients or case["coefficients"]]
    return _own(case, iterate(x / normed.norm().clamp(min=floor), case["steps"] if steps is None else steps, triples), rank)


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    return pc.Expected("orthogonalised", _orthogonalised(case, inputs, rank, FP64), case.dtype)


def tolerance(case: pc.Case) -> Mapping[str, pc.Tolerance]:
    """One rounding of the result, and errors of products, which the iterations amplify in the directions of small singular values.

    In bfloat16 the rounding leaves 1.7e-3 normwise, and up to 2.3e-3 where entries are alike, and products in TensorFloat32 1.4e-3, of
    matrices of rank one up to 6e-3 (in bfloat16 5e-3 and more, and 2.6e-2: too much). In float32 the iterations on the Gram matrix alone,
    instead of the whole matrix, leave up to 5e-5, if it is not singular; TensorFloat32 does not do there.
    """
    normwise, largest = (5e-3, 2e-2) if case.dtype == BF16 else (2e-4, 2e-3)
    if case.params.get("pattern") == "rank_one":
        normwise, largest = 2.5 * normwise, 2.5 * largest
    return {"orthogonalised": pc.Tolerance(relative=2 * pc.UNIT_ROUNDOFF[case.dtype], rms=largest, normwise=normwise)}


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """The Gram matrix has to be summed for the first step only, for those of later steps follow from it, and only half of it, for it is
    symmetric; or the matrix itself is gathered; the less of both.

    The first Gram matrix and the last product need operands as they are stored; at least one product of a step's symmetric matrices,
    shared by the ranks, needs TensorFloat32.
    """
    ranks, (rows, local) = len(group_members(case, rank)), _shape(case, rank)
    gram = pc.traffic.all_reduce(rows * (rows + 1) / 2 * FP32.itemsize, ranks)
    port = min(gram, (ranks - 1) * rows * local * case.dtype.itemsize)
    side = min(rows, ranks * local)
    unit = "bf16" if case.dtype == BF16 else "fp32"
    flops = {unit: 3.0 * rows * local * side}
    flops["fp32"] = flops.get("fp32", 0.0) + case["steps"] * side**3 / ranks
    return pc.Cost(hbm_bytes=2 * rows * local * case.dtype.itemsize, egress_bytes=port, ingress_bytes=port, flops=flops)


def _whole_fp32(case: pc.Case, inputs: pc.Inputs, rank: int, **mistakes: Any) -> torch.Tensor:
    return _orthogonalised(case, inputs, rank, FP32, **mistakes).to(case.dtype)


def _gram_recursion(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    """One sum over ranks: iterations on the Gram matrix, whose product is applied to the rank's shard at the end."""
    members = group_members(case, rank)
    shards = _shards(case, inputs, members, FP32)
    gram = torch.stack([shard @ shard.t() for shard in shards]).sum(0)
    norm = gram.trace().sqrt().clamp(min=_FLOOR)
    gram = gram / norm / norm
    identity = torch.eye(gram.shape[0], device=gram.device)
    total, triples = identity, COEFFICIENTS[case["coefficients"]]
    for step in range(case["steps"]):
        a, b, c = triples[step % len(triples)]
        factor = a * identity + b * gram + c * (gram @ gram)
        total, gram = factor @ total, factor @ gram @ factor
    shard = total @ (shards[members.index(rank)] / norm)
    return (shard if case["partition_dim"] == 1 else shard.t()).to(case.dtype)


def _local_grams(context: pc.AnswerContext) -> torch.Tensor:
    """Divided by the norm of the whole matrix, then without communication."""
    case = context.case
    members = group_members(case, context.rank)
    norm = torch.cat(_shards(case, context.inputs, members, FP32), 1).norm().clamp(min=_FLOOR)
    (x,) = _shards(case, context.inputs, [context.rank], FP32)
    result = iterate(x / norm, case["steps"], COEFFICIENTS[case["coefficients"]])
    return (result if case["partition_dim"] == 1 else result.t()).to(case.dtype)


def _exactly_orthogonal(context: pc.AnswerContext) -> torch.Tensor:
    """U V^T of the singular value decomposition, to which the iterations converge, but not with these coefficients in these steps."""
    case = context.case
    x = torch.cat(_shards(case, context.inputs, group_members(case, context.rank), FP64), 1)
    u, sizes, v = torch.linalg.svd(x, full_matrices=False)
    kept = (sizes > 1e-9 * sizes[0]).to(FP64)
    return _own(case, (u * kept) @ v, context.rank).to(case.dtype)


def _first_triple(context: pc.AnswerContext) -> torch.Tensor:
    case = context.case
    x = torch.cat(_shards(case, context.inputs, group_members(case, context.rank), FP32), 1)
    result = iterate(x / x.norm().clamp(min=_FLOOR), case["steps"], COEFFICIENTS[case["coefficients"]][:1])
    return _own(case, result, context.rank).to(case.dtype)


def _small(label: str, dtype: torch.dtype, **params: Any) -> pc.CaseSpec:
    sizes = {"rows": 12, "local": 5, "partition_dim": 1, "steps": 5, "coefficients": "quintic"}
    return pc.case(label, dtype, **{**sizes, **params})


PRESETS = (
    pc.preset(
        "small",
        "all coefficients, both partitions, more rows than columns; a steep spectrum, rank one, an empty shard, tiny and huge entries",
        _small("quintic_bf16", BF16),
        _small("quintic_fp32", FP32),
        _small("polar_express_fp32", FP32, rows=6, local=12, steps=8, coefficients="polar_express"),
        _small("quintic_twice_fp32", FP32, rows=6, local=12, steps=10),
        _small("zero_shard_fp32", FP32, pattern="zero_shard", world_sizes=(4, 8)),
        _small("rows_simple_fp32", FP32, partition_dim=0, coefficients="simple"),
        _small("rows_aol_bf16", BF16, partition_dim=0, steps=4, coefficients="aol"),
        _small("wide_bf16", BF16, rows=6, local=20),
        _small("steep_bf16", BF16, decades=4.0, local=9),
        _small("rank_one_bf16", BF16, pattern="rank_one"),
        _small("tiny_fp32", FP32, pattern="tiny"),
        _small("huge_bf16", BF16, pattern="huge"),
        _small("strided_group_bf16", BF16, group="strided", world_sizes=(4, 8)),
    ),
    pc.preset(
        "pkb",
        "the public benchmark's shape: 512 x 512, sharded by columns",
        pc.case("bf16", BF16, rows=512, columns=512, partition_dim=1, steps=5, coefficients="quintic"),
    ),
    pc.preset(
        "production_llama3_8b_mlp",
        "gate or up projection of Llama-3-8B, 4096 x 14336, sharded by columns",
        pc.case("bf16", BF16, rows=4096, columns=14336, partition_dim=1, steps=5, coefficients="quintic"),
        pc.case("fp32", FP32, rows=4096, columns=14336, partition_dim=1, steps=5, coefficients="quintic"),
    ),
    pc.preset(
        "production_moonlight_mlp",
        "MLP of Moonlight-16B, 2048 x 11264, sharded by columns, 8 steps of Polar Express",
        pc.case("bf16", BF16, rows=2048, columns=11264, partition_dim=1, steps=8, coefficients="polar_express"),
    ),
    pc.preset(
        "production_qwen_7b_down",
        "down projection of Qwen-7B, 11008 x 4096, sharded by rows",
        pc.case("bf16", BF16, rows=4096, columns=11008, partition_dim=0, steps=5, coefficients="quintic"),
    ),
)


# Beside the floor, Gram matrices of tiny entries change nothing.
_NOT_TINY = pc.where(lambda c: c.params.get("pattern") != "tiny")

PROBLEM = pc.Problem(
    id=86,
    slug="tp_muon_newton_schulz",
    title="Muon's Newton-Schulz orthogonalisation of a sharded matrix",
    category="tensor_parallel",
    parallelism=("tensor",),
    origin="NVIDIA Emerging-Optimizers and Megatron-LM: tensor-parallel Muon",
    summary=(
        "x is the rank's shard of a matrix, sharded in equal parts by columns (partition_dim 1) or rows (0) over the group (the world if "
        "None); X (m, n) is the matrix, or its transpose if it is sharded by rows. In float32: X <- X / max(|X|_F, 1e-7); then, steps "
        "times, with the triples (a, b, c) of coefficient_type in turn, G = X X^T and X <- a X + (b G + c G^2) X. Returns the rank's shard "
        "of the result in x's shape and dtype. Products in float32, or in TensorFloat32 where x is bfloat16; steps is a multiple of "
        "the number of triples."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    tolerance=tolerance,
    cost=cost,
    presets=PRESETS,
    known_wrong_answers=(
        pc.wrong("local_grams", "the norm of the whole matrix, but Gram matrices of the shard", _local_grams, _NOT_TINY),
        pc.wrong("local_norm", "divided by the norm of the rank's shard", lambda c: c.by(_whole_fp32, norm_of=[c.rank]), _NOT_TINY),
        pc.wrong("only_normalised", "no iterations", lambda c: c.by(_whole_fp32, steps=0)),
        pc.wrong(
            "a_step_short",
            "one step less (the last of Polar Express changes nothing any more)",
            lambda c: c.by(_whole_fp32, steps=c.case["steps"] - 1),
            lambda c: c["coefficients"] != "polar_express",
        ),
        pc.wrong(
            "other_coefficients",
            "the one triple of 'simple', or of 'aol' for 'simple'",
            lambda c: c.by(_whole_fp32, coefficients="aol" if c.case["coefficients"] == "simple" else "simple"),
        ),
        pc.wrong("first_triple", "the first triple in all steps", _first_triple, lambda c: c["coefficients"] != "simple"),
        pc.wrong(
            "exactly_orthogonal",
            "U V^T of the singular value decomposition",
            _exactly_orthogonal,
            ("small/quintic_fp32", "small/rows_simple_fp32"),
        ),
        pc.wrong("floor_ignored", "divided by the norm, however small", lambda c: c.by(_whole_fp32, floor=0.0), ("small/tiny_fp32",)),
    ),
    alternative_solutions=pc.alternatives(whole_fp32=_whole_fp32, gram_recursion_fp32=_gram_recursion),
    process_groups=group_layout,
    notes=(
        "The public benchmark accepts an absolute error of 0.01 where entries are 0.035 in size. Here the error is relative, and strict "
        "enough to tell products in bfloat16 from those in TensorFloat32.",
        "The public benchmark's matrices are well-conditioned. Here rows differ in size by two powers of ten, which spreads the spectrum.",
        "Iterations on the Gram matrix alone need one sum over ranks. In float32 they diverge after ten steps if it is singular, for its "
        "eigenvalues that should be zero grow: no case has ten steps and more rows than columns.",
        "A sum of squares beyond float32 is not tested: the norm would be infinite in float32.",
    ),
)
