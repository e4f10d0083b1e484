"""Problem 17: rotary embedding of a sequence shard's queries and keys, then all-gather along the sequence."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families.collective import BF16, FP32, FP64, all_gather_single

# Position offsets keep all positions below this.
_CONTEXT_LENGTH = 131072


def reference(
    q_local: torch.Tensor, k_local: torch.Tensor, cos_local: torch.Tensor, sin_local: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = cos_local.unsqueeze(2), sin_local.unsqueeze(2)
    q = q_local * cos + rotate_half(q_local) * sin
    k = k_local * cos + rotate_half(k_local) * sin
    return _gather_sequence(q), _gather_sequence(k)


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """(x_1, x_2) -> (-x_2, x_1), where x_1 and x_2 are the halves of the last axis."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _gather_sequence(x: torch.Tensor) -> torch.Tensor:
    """All ranks' x (B, S_local, ...) along axis 1."""
    gathered = x.new_empty((dist.get_world_size() * x.shape[0], *x.shape[1:]))
    all_gather_single(gathered, x)
    return gathered.view(-1, *x.shape).transpose(0, 1).flatten(1, 2)


def _local_length(case: pc.Case) -> int:
    return int(case["local"] if "local" in case.params else case["length"] // case.world_size)


def _table_dtype(case: pc.Case) -> torch.dtype:
    dtype: torch.dtype = case.params.get("table_dtype", case.dtype)
    return dtype


def _answer_dtype(case: pc.Case) -> torch.dtype:
    return torch.promote_types(case.dtype, _table_dtype(case))


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[torch.Tensor, ...]:
    """N(0, scale^2) queries and keys; tables of the rank's positions, from an offset that all ranks share and that differs in the batch.

    The halves of a table are equal, unless ``case["unequal_halves"]``. ``case["special"]``: a NaN in q and an infinity in k, on every rank.
    """
    batch, local, depth = case["batch"], _local_length(case), case["depth"]
    shapes = [(batch, local, case[heads], depth) for heads in ("q_heads", "k_heads")]
    if draw.integer:
        # Products of integers up to 8, and sums of two of them, are exact in bfloat16.
        q, k = (draw.integers(-8, 9, shape, case.dtype) for shape in shapes)
        cos, sin = (draw.integers(-8, 9, (batch, local, depth), _table_dtype(case)) for _ in range(2))
        return q, k, cos, sin
    q, k = (draw.normal(shape, case.dtype, scale=case.params.get("scale", 1.0)) for shape in shapes)
    if case.params.get("special"):
        q[0, -1, 0, rank % depth], k[-1, 0, -1, (rank + 2) % depth] = float("nan"), float("inf")
    room = max(1, _CONTEXT_LENGTH - local * case.world_size)
    positions = draw.shared.integers(0, room, (batch, 1)) + torch.arange(rank * local, (rank + 1) * local, device=draw.device)
    exponents = torch.arange(depth // 2, device=draw.device, dtype=FP32)
    halves = (exponents, exponents + 0.5) if case.params.get("unequal_halves") else (exponents, exponents)
    frequencies = case["theta"] ** (torch.cat(halves) * (-2.0 / depth))
    angles = positions.unsqueeze(-1) * frequencies
    return q, k, angles.cos().to(_table_dtype(case)), angles.sin().to(_table_dtype(case))


def _terms(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, work: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The two products whose sum is the rotated x, in ``work``."""
    x = x.to(work)
    return x * cos.to(work).unsqueeze(2), rotate_half(x).mul_(sin.to(work).unsqueeze(2))


def _expected(case: pc.Case, inputs: pc.Inputs, name: str, index: int) -> pc.Expected:
    """In float64, shard by shard, so that no wide copy of the gathered input is held."""
    batch, local, heads, depth = inputs[0][index].shape
    value = torch.empty((batch, local * len(inputs), heads, depth), dtype=FP64, device=inputs[0][index].device)
    magnitude = torch.empty_like(value)
    for rank, args in enumerate(inputs):
        shard = slice(rank * local, (rank + 1) * local)
        kept, turned = _terms(args[index], args[2], args[3], FP64)
        torch.add(kept, turned, out=value[:, shard])
        torch.add(kept.abs_(), turned.abs_(), out=magnitude[:, shard])
    return pc.Expected(name, value, _answer_dtype(case), magnitude=magnitude)


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> tuple[pc.Expected, pc.Expected]:
    return _expected(case, inputs, "q", 0), _expected(case, inputs, "k", 1)


def tolerance(case: pc.Case) -> Mapping[str, pc.Tolerance]:
    """Two products and their sum, rounded one by one, err by 2u (|x cos| + |rot(x) sin|) at most, and by 0.6 u normwise.

    Two and a half times that is allowed; a single rounding errs less.
    """
    dtype = _answer_dtype(case)
    bound = pc.Tolerance(magnitude=5 * pc.UNIT_ROUNDOFF[dtype], normwise=6e-3 if dtype == BF16 else None)
    return {"q": bound, "k": bound}


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """What travels is rotated queries and keys, or, if that is less, queries and keys as they are and the tables."""
    world, tokens = case.world_size, case["batch"] * _local_length(case)
    heads, depth = case["q_heads"] + case["k_heads"], case["depth"]
    tables = 2 * depth * _table_dtype(case).itemsize
    rotated, raw = heads * depth * _answer_dtype(case).itemsize, heads * depth * case.dtype.itemsize
    port = (world - 1) * tokens * min(rotated, raw + tables)
    return pc.Cost(
        hbm_bytes=tokens * (raw + tables + world * rotated),
        egress_bytes=port,
        ingress_bytes=port,
        flops={"fp32": 3 * tokens * heads * depth},
    )


Rotation = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _rounded_once(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    kept, turned = _terms(x, cos, sin, FP32)
    return (kept + turned).to(torch.promote_types(x.dtype, cos.dtype))


def _rounded_three_times(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return x * cos.unsqueeze(2) + rotate_half(x) * sin.unsqueeze(2)


def _gathered(inputs: pc.Inputs, rotation: Rotation) -> tuple[torch.Tensor, ...]:
    return tuple(torch.cat([rotation(args[index], args[2], args[3]) for args in inputs], dim=1) for index in (0, 1))


def _rotation(function: Rotation) -> Callable[[pc.AnswerContext], tuple[torch.Tensor, ...]]:
    """The right gather of a wrong rotation."""
    return lambda context: _gathered(context.inputs, function)


def _arranged(order: Callable[[list[torch.Tensor], int], torch.Tensor]) -> Callable[[pc.AnswerContext], tuple[torch.Tensor, ...]]:
    """Right rotations gathered in a wrong way: ``order(shards, rank)``."""
    return lambda context: tuple(order(list(output.chunk(context.case.world_size, dim=1)), context.rank) for output in context.answer)


def _with_tables_of(context: pc.AnswerContext, rank: int) -> tuple[torch.Tensor, ...]:
    """All shards rotated by one rank's tables, as if their positions were its."""
    return _gathered([(*args[:2], *context.inputs[rank][2:]) for args in context.inputs], _rounded_once)


def _sign_forgotten(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return x * cos.unsqueeze(2) + x.roll(x.shape[-1] // 2, -1) * sin.unsqueeze(2)


def _neighbours_paired(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """GPT-J's convention: channels 2i and 2i + 1 are a pair, instead of i and i + D/2."""
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return x * cos.unsqueeze(2) + turned * sin.unsqueeze(2)


def _half_tables(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    cos, sin = (table.chunk(2, dim=-1)[0].repeat(1, 1, 2) for table in (cos, sin))
    return _rounded_once(x, cos, sin)


def _batch_inside(shards: list[torch.Tensor], rank: int) -> torch.Tensor:
    """The gathered memory as it comes: rank outside, batch inside."""
    joined = torch.cat(shards, dim=1)
    return torch.cat(shards).reshape(joined.shape)


def _small(label: str, dtype: torch.dtype, **params: Any) -> pc.CaseSpec:
    return pc.case(label, dtype, **{"batch": 2, "local": 3, "q_heads": 4, "k_heads": 2, "depth": 6, "theta": 1e4, **params})


PRESETS = (
    pc.preset(
        "small",
        "grouped keys, odd half width, one token per rank, tables with unlike halves or in float32, large queries, NaN and infinities",
        _small("grouped_bf16", BF16),
        _small("grouped_fp32", FP32),
        _small("single_token_bf16", BF16, batch=1, local=1),
        _small("unequal_halves_bf16", BF16, unequal_halves=True),
        _small("fp32_tables_bf16", BF16, table_dtype=FP32),
        _small("one_key_head_bf16", BF16, batch=1, local=5, q_heads=3, k_heads=1, depth=16),
        _small("large_bf16", BF16, scale=1e4),
        _small("special_bf16", BF16, special=True),
    ),
    pc.preset(
        "pkb",
        "the public benchmark's shape: 16 tokens over all ranks",
        pc.case("bf16", BF16, batch=16, length=16, q_heads=8, k_heads=8, depth=64, theta=1e4, unequal_halves=True),
    ),
    pc.preset(
        "production_llama3_8b_32k",
        "32768 tokens, 32 query and 8 key heads of 128",
        pc.case("bf16", BF16, batch=1, length=32768, q_heads=32, k_heads=8, depth=128, theta=5e5),
    ),
    pc.preset(
        "production_qwen3_235b_64k",
        "65536 tokens, 64 query and 4 key heads of 128",
        pc.case("bf16", BF16, batch=1, length=65536, q_heads=64, k_heads=4, depth=128, theta=1e6),
    ),
    pc.preset(
        "production_deepseek_v3_mla",
        "2 x 32768 tokens, 128 query heads and one key head of 64: the rotary part",
        pc.case("bf16", BF16, batch=2, length=32768, q_heads=128, k_heads=1, depth=64, theta=1e4),
    ),
)

_BATCHED = tuple(f"small/{spec.label}" for spec in PRESETS[0].cases if spec.params["batch"] > 1)

PROBLEM = pc.Problem(
    id=17,
    slug="rope_allgather",
    title="Rotary embedding of a sequence shard, then all-gather of queries and keys",
    category="sequence_parallel",
    parallelism=("sequence",),
    origin="Rotary embedding in the half-rotation form of Hugging Face's Llama, before a sequence-parallel gather",
    summary=(
        "e(x) = x cos + rot(x) sin with rot(x) = (-x_2, x_1), x_1 and x_2 being the halves of the last axis; the tables cos and sin "
        "(B, S_local, D) are the same for all heads, and their halves may differ. Every rank returns e(q) (B, W S_local, Hq, D) and e(k) "
        "(B, W S_local, Hk, D) of all ranks in rank order along axis 1, contiguous, with the same bits everywhere, in the promoted dtype "
        "of inputs and tables. Products and sum may each be rounded to it, or be kept wider."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    tolerance=tolerance,
    cost=cost,
    presets=PRESETS,
    known_wrong_answers=(
        pc.wrong("batch_inside", "batch and ranks in the wrong order", _arranged(_batch_inside), _BATCHED),
        pc.wrong(
            "not_rotated", "queries and keys as they were", _rotation(lambda x, cos, sin: x.to(torch.promote_types(x.dtype, cos.dtype)))
        ),
        pc.wrong("sign_forgotten", "rot(x) without its minus sign", _rotation(_sign_forgotten)),
        pc.wrong("neighbours_paired", "channels 2i and 2i + 1 rotated together", _rotation(_neighbours_paired)),
        pc.wrong("positions_restart", "all shards rotated by the first rank's tables", lambda c: _with_tables_of(c, 0)),
        pc.wrong("own_tables", "all shards rotated by the rank's own tables", lambda c: _with_tables_of(c, c.rank)),
        pc.wrong(
            "half_tables", "the first half of each table taken for both", _rotation(_half_tables), ("small/unequal_halves_bf16", "pkb/bf16")
        ),
    ),
    alternative_solutions=pc.alternatives(
        rounded_once=lambda case, inputs, rank: _gathered(inputs, _rounded_once),
        rounded_three_times=lambda case, inputs, rank: _gathered(inputs, _rounded_three_times),
    ),
    excused={"another_rank": "all ranks have the same answer"},
    replicated=True,
    integer_exact=True,
    notes=(
        "The public benchmark's tables are noise. Here they are cosines and sines of positions up to 131071, from an offset that is new in "
        "every call, and with unlike halves in some cases.",
        "The public benchmark judges by the bits of three roundings and so rejects, in a few elements, arithmetic in float32 that is "
        "rounded once. Here both pass.",
        "Lengths of production presets are those of the whole sequence.",
    ),
)
