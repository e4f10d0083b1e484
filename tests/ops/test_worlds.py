"""Operators on emulated ranks: groups of one to eight, reductions, axes and outputs that stay, memory that is bounded."""

import random
from typing import Any

import pytest
import torch

from device.runs import run_call, run_calls
from peerlane import ops
from peerlane.device import communicator, group_of
from peerlane.device.host.group import current_group
from peerlane.emulator.ranks import EmulatedRanks
from peerlane.emulator.team import EmulatedGroup, EmulatedLaunch
from peerlane.ops import preparation
from representatives import first

BF16 = torch.bfloat16


def call_collectives(x: torch.Tensor) -> list[torch.Tensor]:
    out, own = torch.empty_like(x), x.clone()
    found = [ops.all_reduce(x, reduce_op=op) for op in ("sum", "avg", "max", "min")]
    found += [ops.all_reduce(x, out=out), ops.all_reduce(own, reduce_op="max", out=own)]
    found += [ops.all_gather(x, axis=axis) for axis in (0, 1, -1)]
    found += [ops.reduce_scatter(x, axis=0), ops.reduce_scatter(x, axis=1, reduce_op="avg")]
    found += [ops.all_gather(x, axis=1, out=torch.empty(x.shape[0], len(x) * x.shape[1], 2))]
    found += [ops.reduce_scatter(x, out=torch.empty_like(x[:1])), ops.all_to_all(x)]
    assert found[4] is out and found[5] is own and all(value.is_contiguous() for value in found)
    return found


def call_products(a: torch.Tensor, b: torch.Tensor, wide: torch.Tensor) -> list[torch.Tensor]:
    return [ops.gemm_all_reduce(a, b), ops.gemm_reduce_scatter(a, b), ops.gemm_all_gather(a, b), ops.all_gather_gemm(a, wide)]


def hold_results(name: str, calls: list[tuple[Any, ...]]) -> list[bool]:
    """Whether results lie in places of their own, and whether each is what it was."""
    held = []
    for arguments in calls:
        result = getattr(ops, name)(*arguments)
        held.append((result, result.clone()))
    places = {result.data_ptr() for result, _ in held}
    return [len(places) == len(held)] + [bool(torch.equal(result, copy)) for result, copy in held]


def integers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("ranks", first([1, 3, 8, 2, 5], 3))
def test_collectives_are_right_in_every_world(ranks: int) -> None:
    x = [integers(ranks, 2 * ranks, 2, seed=rank) for rank in range(ranks)]
    every = torch.stack(x)
    total, mean, most, least = every.sum(0), every.sum(0) / ranks, every.amax(0), every.amin(0)
    for rank, found in enumerate(run_call(call_collectives, [(own,) for own in x])):
        wide = torch.cat(x, 1)
        wanted = [total, mean, most, least, total, most, torch.cat(x), wide, torch.cat(x, 2), total[rank : rank + 1]]
        wanted += [mean[:, 2 * rank : 2 * rank + 2], wide, total[rank : rank + 1], every[:, rank]]
        for number, (got, want) in enumerate(zip(found, wanted, strict=True)):
            assert torch.equal(got, want), f"output {number} of rank {rank}"


def call_uneven(sizes: list[int], *calls: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
    found = [ops.all_gatherv(own, sizes) for own, _ in calls]
    return found + [ops.reduce_scatterv(whole, sizes, reduce_op=op) for _, whole in calls for op in ("sum", "avg")]


@pytest.mark.parametrize(
    ("ranks", "rows", "columns"),
    [
        (2, (3, 5), 7),
        (3, (4, 0, 1), 3),
        (4, (0, 2, 0, 9), 5),
        (4, (0, 0, 0, 0), 5),
        pytest.param(3, (2, 7, 0), 120_000, marks=pytest.mark.long),
    ],
)
def test_unequal_parts_are_gathered_and_scattered(ranks: int, rows: tuple[int, ...], columns: int) -> None:
    """Of a few bytes at odd places, of nothing, and in several rounds of packets."""
    own = [[integers(size, columns, seed=rank, dtype=dtype) for rank, size in enumerate(rows)] for dtype in (BF16, torch.float32)]
    whole = [[integers(sum(rows), columns, seed=9 + rank, dtype=dtype) for rank in range(ranks)] for dtype in (BF16, torch.float32)]
    calls = [(list(rows), *[(own[d][rank], whole[d][rank]) for d in range(2)]) for rank in range(ranks)]
    totals = [torch.stack(every).float().sum(0) for every in whole]
    for rank, found in enumerate(run_call(call_uneven, calls)):
        gathered, sums, means = found[:2], found[2::2], found[3::2]
        for number, dtype in enumerate((BF16, torch.float32)):
            assert torch.equal(gathered[number], torch.cat(own[number]))
            part = totals[number].split(list(rows))[rank]
            assert torch.equal(sums[number], part.to(dtype)) and torch.equal(means[number], (part / ranks).to(dtype))


@pytest.mark.parametrize("ranks", first([1, 8, 3, 5], 2))
def test_fused_products_are_right_in_every_world(ranks: int) -> None:
    a, b = (
        [integers(ranks, 8, seed=rank, dtype=BF16) for rank in range(ranks)],
        [integers(8, 8, seed=9 + rank, dtype=BF16) for rank in range(ranks)],
    )
    wide = integers(8 * ranks, 8, seed=30, dtype=BF16)
    products = [left.float() @ right.float() for left, right in zip(a, b, strict=True)]
    total = torch.stack(products).sum(0)
    gathered = torch.cat(a, 1).float() @ wide.float()
    for rank, found in enumerate(run_call(call_products, [(a[rank], b[rank], wide.clone()) for rank in range(ranks)])):
        for got, want in zip(found, (total, total[rank : rank + 1], torch.cat(products, 1), gathered), strict=True):
            assert torch.equal(got, want.to(BF16))


def held_calls(name: str, rank: int, ranks: int) -> list[tuple[Any, ...]]:
    """Three calls of an operator, with other contents each."""
    calls: list[tuple[Any, ...]] = []
    for number in range(3):
        seed, arguments = 10 * number + rank, tuple[Any, ...]()
        if "attention" in name:
            arguments = tuple(integers(1, 4, 2, 16, seed=seed + part, dtype=BF16) for part in range(3))
        elif name == "gated_experts":
            tokens = integers(4, 16, seed=seed, dtype=BF16), torch.arange(4).view(4, 1) % ranks, torch.ones(4, 1, dtype=BF16)
            arguments = *tokens, *(integers(1, *shape, seed=seed, dtype=BF16) for shape in ((8, 16), (8, 16), (16, 8)))
        elif name == "all_gather_gemm":
            arguments = integers(4, 8, seed=seed, dtype=BF16), integers(8 * ranks, 8, seed=7, dtype=BF16)
        elif "gemm" in name:
            arguments = integers(4, 8, seed=seed, dtype=BF16), integers(8, 8, seed=7, dtype=BF16)
        else:
            arguments = (integers(4, 8, seed=seed),)
        calls.append(arguments)
    return calls


OPERATORS = [
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "gemm_all_reduce", "gemm_reduce_scatter", "gemm_all_gather",
    "all_gather_gemm", "ring_attention", "ulysses_attention", "gated_experts",
]  # fmt: skip


@pytest.mark.parametrize("ranks", first([2, 1]))
@pytest.mark.parametrize("name", OPERATORS)
def test_no_output_is_overwritten_by_later_calls(name: str, ranks: int) -> None:
    calls = [(name, held_calls(name, rank, ranks)) for rank in range(ranks)]
    assert run_call(hold_results, calls) == [[True] * 4] * ranks


class Counter:
    """How often the ranks of a run took memory, met, and asked for a kernel that no rank had asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts, self._kernels = dict.fromkeys(("allocate", "exchange", "kernel"), 0), set[Any]()
        for name in ("allocate", "exchange"):
            monkeypatch.setattr(EmulatedGroup, name, self.counting(name, getattr(EmulatedGroup, name)))
        monkeypatch.setattr(EmulatedGroup, "kernel", self.compiling(EmulatedGroup.kernel))
        monkeypatch.setattr(EmulatedLaunch, "__call__", lambda launch: None)

    def counting(self, name: str, method: Any) -> Any:
        def counted(group: EmulatedGroup, *args: Any, **kwargs: Any) -> Any:
            self.counts[name] += 1
            return method(group, *args, **kwargs)

        return counted

    def compiling(self, method: Any) -> Any:
        def counted(group: EmulatedGroup, source: Any, name: str, *, defines: Any, **kwargs: Any) -> Any:
            self._kernels.add((source, name, tuple(sorted(defines.items()))))
            self.counts["kernel"] = len(self._kernels)
            return method(group, source, name, defines=defines, **kwargs)

        return counted


def on_two_ranks(solution: Any) -> list[Any]:
    return run_calls(lambda rank: solution, [[()] * 2], sm_count=8).clean()[0]


HIDDEN, MOST = 32, 8192


def mixed_calls(sizes: list[int]) -> None:
    """A layer of every kind of each number of tokens, 0 among them."""
    weight, wide = torch.zeros(HIDDEN, HIDDEN, dtype=BF16), torch.zeros(HIDDEN, 2 * HIDDEN, dtype=BF16)
    share = HIDDEN // group_of().world_size
    x, part = torch.zeros(MOST, HIDDEN, dtype=BF16), torch.zeros(MOST, share, dtype=BF16)
    for tokens in sizes:
        ops.all_reduce(x[:tokens])
        ops.all_gather(x[:tokens])
        ops.gemm_all_reduce(x[:tokens], weight)
        ops.gemm_reduce_scatter(x[:tokens], weight)
        ops.gemm_all_gather(x[:tokens], weight[:, :share].contiguous())
        ops.all_gather_gemm(part[:tokens], wide)


def test_sizes_behind_the_largest_take_no_memory_and_no_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    counter, draw = Counter(monkeypatch), random.Random(3)
    first = [2 * draw.randrange(MOST // 2 + 1) for _ in range(20)]
    rest = [0, 2, *(2 * draw.randrange(MOST // 2 + 1) for _ in range(300))]

    def solution() -> list[dict[str, int]]:
        mixed_calls([*first, MOST])
        group_of().exchange(None)  # both ranks are behind the largest
        before = dict(counter.counts)
        mixed_calls(rest)
        return [before, dict(counter.counts)]

    for before, after in on_two_ranks(solution):
        assert before["allocate"] > 0
        assert {name: after[name] - before[name] for name in ("allocate", "exchange")} == {"allocate": 0, "exchange": 0}


def test_prepared_sizes_take_memory_once_and_close_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    counter, draw = Counter(monkeypatch), random.Random(4)
    sizes = [8190, 0, 2, *(2 * draw.randrange(MOST // 2 + 1) for _ in range(100))]

    def solution() -> list[Any]:
        told = ops.prepare(max_tokens=MOST, hidden=HIDDEN)
        group_of().exchange(None)
        before = dict(counter.counts)
        mixed_calls(sizes)
        after = dict(counter.counts)
        held = ops.memory_report()
        ops.close()
        closed = ops.memory_report()
        mixed_calls([2])  # it is taken anew
        return [told, before, after, held, closed, ops.memory_report()]

    for told, before, after, held, closed, again in on_two_ranks(solution):
        assert after == before and before["kernel"] > 10
        assert told.leased_bytes == held.leased_bytes > 0
        assert {"collectives", *preparation.PRODUCTS} == set(held.by_kernel)
        assert closed.leased_bytes == 0 and 0 < again.leased_bytes < held.leased_bytes


def test_prepared_experts_take_no_memory_and_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = Counter(monkeypatch)

    def solution() -> list[Any]:
        ranks = group_of().world_size
        ops.prepare(max_tokens=300, hidden=32, products=(), experts=ops.ExpertLayers(2 * ranks, 2, inner=16))
        group_of().exchange(None)
        before = dict(counter.counts)
        for tokens in (300, 1, 0, 128):
            x, topk_idx = torch.zeros(tokens, 32, dtype=BF16), torch.zeros(tokens, 2, dtype=torch.int64)
            weights, layer = torch.ones(tokens, 2, dtype=BF16), torch.zeros(2, 16, 32, dtype=BF16)
            rows, of_rows, handle = ops.dispatch(x, topk_idx, weights, ops.DispatchConfig(2 * ranks, 300))
            ops.combine(ops.dispatch(x, handle=handle)[0] + rows, handle, of_rows)
            ops.dispatch(torch.cat([x, x], 1), topk_idx, weights, ops.DispatchConfig(2 * ranks, 512))  # as the gradient does
            ops.gated_experts(x, topk_idx, weights, layer, layer, layer.mT.contiguous())
        return [before, dict(counter.counts)]

    for before, after in on_two_ranks(solution):
        assert before["allocate"] > 3
        assert {name: after[name] - before[name] for name in ("allocate", "kernel")} == {"allocate": 0, "kernel": 0}


def test_a_world_of_one_rank_takes_no_memory() -> None:
    def solution() -> tuple[float, int]:
        mixed_calls([2])
        told = ops.prepare(max_tokens=8, hidden=8)
        group = current_group()
        assert group is not None
        return float(ops.all_reduce(torch.ones(3)).sum()), told.allocations + group.memory_report().allocations

    made = EmulatedRanks(1, schedules=1)
    made.load(lambda rank: solution)
    assert made.call([()], lambda rank, result: result) == [(3.0, 0)] and not made.launches


def test_staged_all_reduces_share_memory_that_close_gives_back(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = Counter(monkeypatch)

    def solution() -> list[Any]:
        ops.prepare(max_tokens=MOST, hidden=512, products=())
        group_of().exchange(None)
        before = dict(counter.counts)
        for tokens in (MOST, 6000, 5000, 8000):  # 5 to 8 MiB
            ops.all_reduce(torch.zeros(tokens, 512, dtype=BF16))
        after = dict(counter.counts)
        ops.close()
        return [before, after, ops.memory_report().leased_bytes]

    for before, after, left in on_two_ranks(solution):
        assert before == after and before["allocate"] > 2 and left == 0


def test_backend_and_operators_share_one_communicator() -> None:
    def solution() -> list[Any]:
        group = group_of()
        of_backend = communicator(group).serving_backend()
        x, y = torch.ones(3), torch.ones(3)
        of_backend.all_reduce(x)
        first = ops.all_reduce(y)
        told = group.memory_report()
        of_backend.close()
        left, closed = group.memory_report().leased_bytes, communicator(group).closed
        return [x.tolist(), first.tolist(), told.allocations, left, of_backend.closed, closed, ops.all_reduce(y).tolist()]

    summed = [2.0, 2.0, 2.0]
    assert run_call(solution, [()] * 2) == [[summed, summed, 1, 0, True, False, summed]] * 2
