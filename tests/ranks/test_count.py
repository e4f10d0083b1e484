"""The independent count: every collective's bytes, matrix products, and a cost model that asks for too much."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from peerlane.problems import Cost
from peerlane.problems.contract.count import Count, Step, cost_faults, counted
from peerlane.problems.families.collective import all_gather_single, reduce_scatter_single
from ranks.pool import RankPool

N = 96  # float32 elements


def calls(rank: int, world: int) -> dict[str, Callable[[], Any]]:
    x, many = torch.ones(N), torch.empty(N * world)
    pieces = [torch.empty(N) for _ in range(world)]
    splits = [N - (world - 1)] + [1] * (world - 1) if rank == 0 else [1] * world  # rank 0 keeps most
    received = [splits[0]] + [1] * (world - 1) if rank == 0 else [1] * world
    peer = rank ^ 1
    return {
        "all_reduce": lambda: dist.all_reduce(x),
        "all_gather": lambda: all_gather_single(many, x),
        "all_gather of lists": lambda: dist.all_gather(pieces, x),
        "reduce_scatter": lambda: reduce_scatter_single(torch.empty(N // world), x),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty(N), x),
        "all_to_all with splits": lambda: dist.all_to_all_single(torch.empty(sum(received)), torch.ones(sum(splits)), received, splits),
        "broadcast": lambda: dist.broadcast(x, 1),
        "reduce": lambda: dist.reduce(x, 1),
        "gather": lambda: dist.gather(x, pieces if rank == 1 else None, 1),
        "scatter": lambda: dist.scatter(x, pieces if rank == 1 else None, 1),
        "exchange": lambda: [
            work.wait() for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, many[:N], peer)])
        ],
    }


def traffic(rank: int, world: int, name: str) -> tuple[float, float]:
    _, count = counted(lambda: calls(rank, world)[name]())
    return count.egress_bytes, count.ingress_bytes


FULL = 4.0 * N
EXPECTED: dict[str, Callable[[int, int], tuple[float, float]]] = {
    "all_reduce": lambda r, w: (2 * (w - 1) / w * FULL,) * 2,
    "all_gather": lambda r, w: ((w - 1) * FULL,) * 2,
    "all_gather of lists": lambda r, w: ((w - 1) * FULL,) * 2,
    "reduce_scatter": lambda r, w: ((w - 1) / w * FULL,) * 2,
    "all_to_all": lambda r, w: ((w - 1) / w * FULL,) * 2,
    "all_to_all with splits": lambda r, w: (4.0 * (w - 1),) * 2,
    "broadcast": lambda r, w: (FULL, 0.0) if r == 1 else (FULL, FULL),
    "reduce": lambda r, w: (0.0, FULL) if r == 1 else (FULL, FULL),
    "gather": lambda r, w: (0.0, (w - 1) * FULL) if r == 1 else (FULL, 0.0),
    "scatter": lambda r, w: ((w - 1) * FULL, 0.0) if r == 1 else (0.0, FULL),
    "exchange": lambda r, w: (FULL, FULL),
}


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("world", [2, 4])
def test_bytes_of_every_collective(name: str, world: int, rank_pool: Callable[[int], RankPool]) -> None:
    found = rank_pool(world).run(traffic, name)
    for rank, bytes_ in enumerate(found):
        assert bytes_ == pytest.approx(EXPECTED[name](rank, world))


def test_matrix_products_are_counted_and_views_are_free() -> None:
    a, b = torch.ones(8, 16, dtype=torch.bfloat16), torch.ones(16, 4, dtype=torch.bfloat16)
    result, count = counted(lambda: (a @ b).t().reshape(2, 16)[:, :8])
    assert count.flops == 2 * 8 * 16 * 4 and result.shape == (2, 8)
    product, copy = 2.0 * (8 * 16 + 16 * 4 + 8 * 4), 2.0 * 2 * 8 * 4  # reshape of a transposed matrix copies it
    assert count.touched_bytes == product + copy
    assert count.output_bytes == 2.0 * 16


def test_a_backward_pass_is_counted() -> None:
    w = torch.ones(4, 4, requires_grad=True)
    _, count = counted(lambda: torch.autograd.grad((torch.ones(8, 4) @ w).sum(), w)[0])
    assert count.flops == 2 * (2 * 8 * 4 * 4)


def test_a_cost_above_the_count_is_a_fault() -> None:
    count = Count([Step("all_reduce", ranks=2, egress_bytes=100, ingress_bytes=100), Step("compute", flops=50, touched_bytes=1000)], 10)
    fair = Cost(hbm_bytes=1000, egress_bytes=100, ingress_bytes=90, flops={"bf16": 50})
    assert cost_faults([fair], [count]) == []
    unfair = Cost(hbm_bytes=1300, egress_bytes=110, ingress_bytes=90, flops={"bf16": 51, "fp32": 9e9})
    assert [fault.split(" are ")[0] for fault in cost_faults([unfair], [count])] == [
        "the cost model's egress_bytes",
        "the cost model's hbm_bytes",
        "the cost model's tensor-core flops",
    ]
    mean = Cost(hbm_bytes=1300, egress_bytes=110, ingress_bytes=90, flops={"bf16": 51}, typical=True)
    assert cost_faults([mean], [count]) == []


def test_what_is_changed_in_place_is_read_and_written() -> None:
    many = [torch.ones(6), torch.ones(10)]
    for call in (lambda: torch._foreach_mul_(many, 2.0), lambda: [one.mul_(2.0) for one in many]):
        _, count = counted(lambda call=call: [call(), torch.ones(1)][1])  # type: ignore[misc]
        assert count.touched_bytes == 2 * 4 * 16 + 4


def test_attention_is_counted_where_heads_share_keys_too() -> None:
    q, k, v = (torch.ones(3, heads, length, 16) for heads, length in ((4, 5), (2, 7), (2, 7)))
    for sharing, keys, values in ((True, k, v), (False, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))):
        _, count = counted(lambda: F.scaled_dot_product_attention(q, keys, values, enable_gqa=sharing))  # noqa: B023  (called at once)
        assert count.flops == 2 * 3 * 4 * 5 * 7 * (16 + 16)


def test_fourier_transforms_are_counted() -> None:
    x = torch.ones(3, 64)
    _, count = counted(lambda: torch.fft.irfft(torch.fft.rfft(x)))
    assert count.flops == 2 * 2.5 * 3 * 64 * 6
    _, count = counted(lambda: torch.fft.fft2(torch.ones(2, 8, 8, dtype=torch.complex64)))
    assert count.flops == 5 * 2 * 64 * 6
