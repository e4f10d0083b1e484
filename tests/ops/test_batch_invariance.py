"""The batch-invariant mode on emulated ranks: a row has the same bits first, in the middle and last, beside few others and many; what has
no kernel that keeps them is refused. ``tests/gpu/check_batch_invariance.py`` looks at every number of rows."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from device.runs import run_call, run_calls
from peerlane import ops
from peerlane.device import group_of
from peerlane.device.attention.forward import attention
from peerlane.device.collectives import plans
from peerlane.errors import UsageError
from peerlane.ops.groups import rank, world_size

BF16 = torch.bfloat16
POOL, K, N = 264, 64, 72
Rows = list[int]
Operator = Callable[[Rows], torch.Tensor | tuple[torch.Tensor, ...]]


@pytest.fixture
def mode() -> Iterator[None]:
    ops.set_batch_invariant(True)
    yield
    ops.set_batch_invariant(False)


def random(*shape: int, seed: int, of_rank: bool = True) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 100 * (1 + rank("") if of_rank else 0))
    return torch.randn(shape, generator=generator)


def tokens(rows: Rows, columns: int = K, dtype: torch.dtype = BF16) -> torch.Tensor:
    """This rank's part of some rows of the pool."""
    return random(POOL, columns, seed=1).to(dtype)[rows]


def shard(rows: Rows) -> Rows:
    """Returns this rank's of some rows."""
    return rows[rank("") * len(rows) // world_size("") : (rank("") + 1) * len(rows) // world_size("")]


def right(n: int = N, k: int = K) -> torch.Tensor:
    return random(k, n, seed=2).to(BF16)


def same(*shape: int) -> torch.Tensor:
    """Drawn alike on all ranks."""
    return random(*shape, seed=3, of_rank=False).to(BF16)


def of_sum(name: str) -> Operator:
    """With a bias, an activation and a residual of each row."""

    def call(rows: Rows) -> torch.Tensor:
        residual = same(POOL, N)[rows if name == "gemm_all_reduce" else shard(rows)]
        found: torch.Tensor = getattr(ops, name)(tokens(rows), right(), bias=same(N), activation="silu", residual=residual)
        return found

    return call


def of_sum_fp8(name: str) -> Operator:
    def call(rows: Rows) -> torch.Tensor:
        x, w = ops.quantize_fp8(tokens(rows, 2 * K), "row"), ops.quantize_fp8(right(2 * K, N), "row")
        found: torch.Tensor = getattr(ops, name)(*x, w[0].t(), w[1].t())
        return found

    return call


def row_gather_fp8(rows: Rows) -> torch.Tensor:
    x, w = ops.quantize_fp8(same(POOL, 2 * K)[shard(rows)], "row"), ops.quantize_fp8(right(2 * K, N), "row")
    return ops.row_gather_gemm_fp8(*x, [w[0].t()], [w[1].t()])[0]


def norm(rows: Rows) -> tuple[torch.Tensor, ...]:
    return ops.all_reduce_rms_norm_fp8(tokens(rows, 1032), same(1032), same(POOL, 1032)[rows])


def sharded_norm(rows: Rows) -> tuple[torch.Tensor, ...]:
    y, total, scales = ops.reduce_scatter_rms_norm_fp8(tokens(rows, 1032), same(1032), same(POOL, 1032)[shard(rows)])
    return y, total, scales


def routes(rows: Rows) -> tuple[torch.Tensor, ...]:
    """Tokens of this rank, their two experts of four and weights."""
    experts = torch.stack([torch.arange(POOL) % 4, (torch.arange(POOL) % 4 + 1 + torch.arange(POOL) // 4 % 3) % 4], 1)
    return same(POOL, K)[shard(rows)], experts[shard(rows)], same(POOL, 2)[shard(rows)]


def dispatch_and_combine(rows: Rows) -> torch.Tensor:
    x, experts, weights = routes(rows)
    received, factors, handle = ops.dispatch(x, experts, weights.float(), ops.DispatchConfig(4, POOL))
    return ops.combine(received, handle, factors)


def gated_experts(rows: Rows) -> torch.Tensor:
    own = 4 // world_size("")
    return ops.gated_experts(*routes(rows), *(random(own, *size, seed=4).to(BF16) / 8 for size in ((N, K), (N, K), (K, N))))


def grouped(rows: Rows) -> torch.Tensor:
    """The last of two groups."""
    x, w = ops.quantize_fp8(tokens(rows, 2 * K), "row"), [ops.quantize_fp8(right(2 * K, N) + i, "row") for i in range(2)]
    b, scales = (torch.stack(parts).mT for parts in zip(*w, strict=True))
    return ops.grouped_gemm_fp8(*x, b, scales, torch.tensor([len(rows) // 3, len(rows)], dtype=torch.int32))[len(rows) // 3 :]


def attend(rows: Rows) -> torch.Tensor:
    """Queries of one line to 200 keys."""
    q, k, v = same(POOL, 2, 64)[rows].unsqueeze(0), same(1, 200, 2, 64), same(1, 200, 2, 64) * 2
    return attention(q, k, v, batch_invariant=True, group=group_of())[0][0]


ALL: Mapping[str, Operator] = {
    "all_reduce": lambda rows: ops.all_reduce(tokens(rows)),
    "all_gather_gemm": lambda rows: ops.all_gather_gemm(tokens(rows), right(k=K * world_size(""))),
    "gemm_all_gather": lambda rows: ops.gemm_all_gather(tokens(rows), right()),
    "gemm_all_reduce": of_sum("gemm_all_reduce"),
    "gemm_all_reduce_fp8": of_sum_fp8("gemm_all_reduce_fp8"),
    "row_gather_gemm": lambda rows: ops.row_gather_gemm(same(POOL, K)[shard(rows)], [right()])[0],
    "row_gather_gemm_fp8": row_gather_fp8,
    "all_reduce_rms_norm_fp8": norm,
    "attention": attend,
}
"""Their results have all rows on every rank."""
PARTS: Mapping[str, Operator] = {
    "reduce_scatter": lambda rows: ops.reduce_scatter(tokens(rows)),
    "gemm_reduce_scatter": of_sum("gemm_reduce_scatter"),
    "gemm_reduce_scatter_fp8": of_sum_fp8("gemm_reduce_scatter_fp8"),
    "reduce_scatter_rms_norm_fp8": sharded_norm,
    "dispatch and combine": dispatch_and_combine,
    "gated_experts": gated_experts,
}
"""A rank has its rows."""


QUICK = "gemm_all_reduce", "gemm_reduce_scatter", "all_reduce_rms_norm_fp8", "reduce_scatter_rms_norm_fp8"


def batches(ranks: int) -> Iterator[tuple[Rows, int]]:
    """Rows of the pool, and where row 0 is among them: beside different others, in one tile and in three."""
    for count in (ranks, 3 * ranks, 264 // ranks * ranks):
        for at in {0, count // 2, count - 1}:
            others = list(range(POOL - 1, 0, -1)) if at % 2 else list(range(1, POOL))
            yield [*others[:at], 0, *others[at : count - 1]], at


def bits(operator: Operator, ranks: int, gathers: bool) -> set[bytes]:
    """Returns the different bits that row 0 of the pool has."""
    found, made = set[bytes](), [*batches(ranks)]
    calls = run_calls(lambda rank: operator, [[(rows,)] * ranks for rows, _ in made]).clean()
    for (_, at), outputs in zip(made, calls, strict=True):
        tensors = [output if isinstance(output, tuple) else (output,) for output in outputs]
        whole = tensors[0] if not gathers else [torch.cat(parts) for parts in zip(*tensors, strict=True)]
        found.add(b"".join(part[at : at + 1].contiguous().view(torch.uint8).numpy().tobytes() for part in whole))
    return found


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in [*ALL, *PARTS]])
def test_a_row_has_the_same_bits_in_every_batch(name: str, mode: None) -> None:
    assert len(bits((ALL | PARTS)[name], 2, gathers=name in PARTS)) == 1


@pytest.mark.slow
def test_groups_of_rows_have_the_same_bits_in_every_batch(mode: None) -> None:
    """Row 0 of the pool is the first or the last of its group."""
    groups = [1, 0, 2], [5, 6, 0, 2, 3, 4], [*range(1, 50), 0, *range(50, 149)]
    calls = run_calls(lambda rank: grouped, [[(rows,)] * 2 for rows in groups]).clean()
    found = [out[rows.index(0) - len(rows) // 3] for rows, (out, _) in zip(groups, calls, strict=True)]
    assert all(torch.equal(row.view(torch.uint8), found[0].view(torch.uint8)) for row in found)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter", "gemm_all_reduce", "gemm_reduce_scatter", "reduce_scatter_rms_norm_fp8"])
def test_four_ranks_add_in_one_order_for_all_rows(name: str, mode: None) -> None:
    assert len(bits((ALL | PARTS)[name], 4, gathers=name in PARTS)) == 1


@pytest.mark.parametrize("name", ["gemm_all_reduce", "all_reduce_rms_norm_fp8"])
def test_bits_follow_the_batch_without_the_mode(name: str) -> None:
    """So that the tests above can fail."""
    assert len(bits(ALL[name], 2, gathers=False)) > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter"])
def test_every_kernel_of_a_sum_gives_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packets in one trip, in two, and rings: what a large tensor goes by."""
    found = bits((ALL | PARTS)[name], 3, gathers=name in PARTS)
    for limit in ("ONE_SHOT_EXCESS_BYTES", "TWO_SHOT_LIMIT_BYTES", "PORT_PACKET_LIMIT_BYTES"):
        monkeypatch.setattr(plans, limit, -1)
        found |= bits((ALL | PARTS)[name], 3, gathers=name in PARTS)
    assert len(found) == 1


def test_many_tokens_are_normalised_in_slices() -> None:
    """And summed and rounded once, as a single one is."""
    drawn = torch.randn(2, 600, 64, generator=torch.Generator().manual_seed(1)).to(BF16)
    residual, weight = drawn.flip(1)[0], torch.ones(64, dtype=BF16)
    slices = slice(0, 600), slice(0, 1), slice(599, 600)
    calls = [[(x[rows].clone(), weight.clone(), residual[rows].clone()) for x in drawn] for rows in slices]
    ((y, total), _), *singles = run_calls(lambda rank: ops.all_reduce_rms_norm, calls).clean()
    for at, ((one, of_one), _) in zip((0, 599), singles, strict=True):
        assert torch.equal(of_one[0], total[at]) and torch.equal(one[0], y[at])
    assert torch.equal(total, (drawn.float().sum(0) + residual.float()).to(BF16))


def test_what_has_no_batch_invariant_kernel_is_refused(mode: None) -> None:
    wide, narrow = torch.ones(4, K), torch.ones(4, 12, dtype=BF16)
    heads = torch.ones(1, 4, 2, 64, dtype=BF16)
    experts, sizes = torch.tensor([[0], [1]] * 2), [(2, N, K), (2, N, K), (2, K, N)]
    refused: Mapping[str, Callable[[], Any]] = {
        "gemm_all_reduce": lambda: ops.gemm_all_reduce(wide, torch.ones(K, N)),
        "gemm_reduce_scatter": lambda: ops.gemm_reduce_scatter(wide, torch.ones(K, N)),
        "all_gather_gemm": lambda: ops.all_gather_gemm(wide, torch.ones(2 * K, N)),
        "gemm_all_gather": lambda: ops.gemm_all_gather(wide, torch.ones(K, N)),
        "row_gather_gemm": lambda: ops.row_gather_gemm(wide, [torch.ones(K, N)]),
        "all_reduce_rms_norm": lambda: ops.all_reduce_rms_norm(narrow, narrow[0]),
        "reduce_scatter_rms_norm": lambda: ops.reduce_scatter_rms_norm(narrow, narrow[0]),
        "ring_attention": lambda: ops.ring_attention(heads, heads, heads),
        "ulysses_attention": lambda: ops.ulysses_attention(heads, heads, heads),
        "gated_experts with capacity=8": lambda: ops.gated_experts(
            torch.ones(4, K, dtype=BF16),
            experts,
            torch.ones(4, 1, dtype=BF16),
            *(torch.ones(size, dtype=BF16) for size in sizes),
            capacity=8,
        ),
    }

    def refuse() -> None:
        for name, call in refused.items():
            with pytest.raises(
                UsageError, match=rf"^{name} got .* in a group of 2: no kernel of the kit .* ops\.set_batch_invariant\(False\)"
            ):
                call()
        assert ops.gemm_all_reduce(wide[:0], torch.ones(K, N)).shape == (0, N)  # no row, no bits

    run_call(refuse, [(), ()])
