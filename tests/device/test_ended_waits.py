"""Waits that end early: kernels run to their end, take no address from what has not come, and leave other memory alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from device.runs import run_calls
from peerlane import ops
from peerlane.device import communicator, group_of
from peerlane.emulator.team import EmulatedGroup

HARMLESS = {"race", "lost_update", "proxy_fence", "wrong_result"}
"""What the emulator says of data that nobody waited for. Anything else is a crash, a foreign address or a kernel without an end."""

BF16 = torch.bfloat16
Tensors = list[torch.Tensor]


def end_waits() -> None:
    group: Any = group_of()
    for _, memory in group._arenas:
        for part in memory._parts.values():
            if part.name in ("table", "list", "places", "counts", "routes"):  # what has not come may be anything
                part.show()
                part.memory.fill_(0x7B)
    group.waits.stop("the test ends all waits")


def call_collectives(last: bool) -> Tensors:
    kit, group = communicator(), group_of()
    if last:
        end_waits()
    own = []
    for count in (50, 3000):
        x = torch.full((count,), 1.0, dtype=BF16)
        whole = x.new_empty(count * group.world_size)
        kit.all_reduce(x)
        kit.broadcast(x, 0)
        kit.reduce(x, 1)
        kit.all_gather_into_tensor(whole, x)
        kit.reduce_scatter_tensor(x, whole)
        own += [x, whole]
    return own


def sum_tensors(last: bool) -> Tensors:
    if last:
        end_waits()
    x, total = torch.ones(3000), torch.empty(3000)
    communicator().all_reduce(x, total)
    communicator().reduce_scatter_tensor(total[: 3000 // group_of().world_size], x)
    return [total]


def call_products(last: bool) -> Tensors:
    if last:
        end_waits()
    x, w = (torch.ones(32, 64, dtype=BF16) for _ in range(2))
    wide = torch.ones(64 * group_of().world_size, 48, dtype=BF16)
    products = (ops.gemm_reduce_scatter, ops.gemm_all_reduce, ops.gemm_all_gather)
    return [ops.all_gather_gemm(x, wide), *(product(x, w.T.contiguous()) for product in products)]


def attend(last: bool) -> Tensors:
    if last:
        end_waits()
    q = torch.ones(1, 40, 2, 64, dtype=BF16)
    return [ops.ring_attention(q, q, q, causal=True), ops.ulysses_attention(q, q, q)]


def ask_experts(last: bool) -> Tensors:
    group = group_of()
    generator = torch.Generator().manual_seed(1 + group.rank)
    tokens, h, own = 24 + 40 * last, 16, 2
    x = torch.randn(tokens, h, generator=generator).bfloat16()
    experts = torch.rand(tokens, own * group.world_size, generator=generator).argsort(1)[:, :2].contiguous()
    layers = [torch.randn(own, *shape, generator=generator).bfloat16() for shape in ((8, h), (8, h), (h, 8))]
    if last:
        end_waits()
    return [ops.gated_experts(x, experts, torch.ones(tokens, 2, dtype=BF16), *layers)]


def dispatch(last: bool) -> Tensors:
    group = group_of()
    tokens, h = 12, 16
    x = torch.ones(tokens, h, dtype=BF16)
    topk_idx = torch.arange(2 * tokens).view(tokens, 2) % (2 * group.world_size)
    if last:
        end_waits()
    config = ops.DispatchConfig(2 * group.world_size, 20, capacity=32, expert_alignment=4)
    rows, weights, handle = ops.dispatch(x, topk_idx, torch.ones(tokens, 2), config)
    return [ops.combine(ops.dispatch(x, handle=handle)[0] + rows, handle, weights)]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels look whether to stop at every poll."""
    plain = EmulatedGroup.kernel

    def kernel(self: EmulatedGroup, source: Any, name: str, *, defines: Any, on_failure: Any = None) -> Any:
        return plain(self, source, name, defines={**defines, "PEERLANE_POLLS": 1}, on_failure=on_failure)

    monkeypatch.setattr(EmulatedGroup, "kernel", kernel)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("program", "ranks"),
    [
        (ask_experts, 2),
        (sum_tensors, 2),
        (dispatch, 2),
        *(pytest.param(program, 2, marks=pytest.mark.long) for program in (call_products, attend, call_collectives)),
        pytest.param(call_collectives, 4, marks=pytest.mark.long),
        pytest.param(ask_experts, 3, marks=pytest.mark.long),
    ],
    ids=["experts", "sums", "dispatch", "products", "attention", "collectives", "collectives of 4", "experts of 3"],
)
def test_kernels_end_where_their_waits_do(program: Callable[[bool], Tensors], ranks: int) -> None:
    """Once as they should be, once with waits that end early."""
    run = run_calls(lambda rank: program, [[(last,)] * ranks for last in (False, True)], schedules=3)
    if run.failure is not None:
        raise run.failure
    assert run.kinds <= HARMLESS, "\n".join(map(str, run.findings))
