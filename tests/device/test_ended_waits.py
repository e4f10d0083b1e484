"""Waits that end early: kernels run to their end, take no address from what has not come, and leave other memory alone."""

from pathlib import Path
from typing import Any

import pytest

from peerlane.emulator.ranks import EmulatedRanks, RankFailure
from peerlane.emulator.solution_run import load
from peerlane.emulator.team import EmulatedGroup

HARMLESS = {"race", "lost_update", "proxy_fence", "wrong_result"}
"""What the emulator says of data that nobody waited for. Anything else is a crash, a foreign address or a kernel without an end."""

HEAD = """
import torch
from peerlane import ops
from peerlane.device import communicator, group_of

def end_waits(group):
    for _, memory in group._arenas:
        for part in memory._parts.values():
            if part.name in ("table", "list", "places", "counts", "routes"):  # what has not come may be anything
                part.show()
                part.memory.fill_(0x7b)
    group.waits.stop("the test ends all waits")
"""
COLLECTIVES = """
def solution(seed, last):
    kit, group = communicator(), group_of()
    if last:
        end_waits(group)
    own = []
    for count in (50, 3000):
        x = torch.full((count,), 1.0, dtype=torch.bfloat16)
        whole = x.new_empty(count * group.world_size)
        kit.all_reduce(x)
        kit.broadcast(x, 0)
        kit.reduce(x, 1)
        kit.all_gather_into_tensor(whole, x)
        kit.reduce_scatter_tensor(x, whole)
        own += [x, whole]
    return own
"""
SUMS = """
def solution(seed, last):
    if last:
        end_waits(group_of())
    x, total = torch.ones(3000), torch.empty(3000)
    communicator().all_reduce(x, total)
    communicator().reduce_scatter_tensor(total[: 3000 // group_of().world_size], x)
    return [total]
"""
PRODUCTS = """
def solution(seed, last):
    if last:
        end_waits(group_of())
    x, w = (torch.ones(32, 64, dtype=torch.bfloat16) for _ in range(2))
    wide = torch.ones(64 * group_of().world_size, 48, dtype=torch.bfloat16)
    products = (ops.gemm_reduce_scatter, ops.gemm_all_reduce, ops.gemm_all_gather)
    return [ops.all_gather_gemm(x, wide), *(product(x, w.T.contiguous()) for product in products)]
"""
ATTENTION = """
def solution(seed, last):
    if last:
        end_waits(group_of())
    q = torch.ones(1, 40, 2, 64, dtype=torch.bfloat16)
    return [ops.ring_attention(q, q, q, causal=True), ops.ulysses_attention(q, q, q)]
"""
EXPERTS = """
def solution(seed, last):
    group = group_of()
    generator = torch.Generator().manual_seed(seed + group.rank)
    tokens, h, own = 24 + 40 * last, 16, 2
    x = torch.randn(tokens, h, generator=generator).bfloat16()
    experts = torch.rand(tokens, own * group.world_size, generator=generator).argsort(1)[:, :2].contiguous()
    layers = [torch.randn(own, *shape, generator=generator).bfloat16() for shape in ((8, h), (8, h), (h, 8))]
    if last:
        end_waits(group)
    return [ops.gated_experts(x, experts, torch.ones(tokens, 2, dtype=torch.bfloat16), *layers)]
"""
DISPATCH = """
def solution(seed, last):
    group = group_of()
    tokens, h = 12, 16
    x = torch.ones(tokens, h, dtype=torch.bfloat16)
    topk_idx = torch.arange(2 * tokens).view(tokens, 2) % (2 * group.world_size)
    if last:
        end_waits(group)
    config = ops.DispatchConfig(2 * group.world_size, 20, capacity=32, expert_alignment=4)
    rows, weights, handle = ops.dispatch(x, topk_idx, torch.ones(tokens, 2), config)
    return [ops.combine(ops.dispatch(x, handle=handle)[0] + rows, handle, weights)]
"""


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels look whether to stop at every poll."""
    plain = EmulatedGroup.kernel

    def kernel(self: EmulatedGroup, source: Any, name: str, *, defines: Any, on_failure: Any = None) -> Any:
        return plain(self, source, name, defines={**defines, "PEERLANE_POLLS": 1}, on_failure=on_failure)

    monkeypatch.setattr(EmulatedGroup, "kernel", kernel)


def end_waits(text: str, folder: Path, ranks: int, schedules: int) -> list[str]:
    """Runs a program once as it should be, once with waits that end early; returns what is not harmless."""
    file = folder / "program.py"
    file.write_text(HEAD + text)
    world = EmulatedRanks(ranks, schedules=schedules)
    world.load(lambda rank: load(file, rank))
    for last in (False, True):
        world.call([(1, last)] * ranks, lambda rank, output: None)
    return [str(finding) for report in world.reports() for finding in report.findings if finding.kind not in HARMLESS]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        (EXPERTS, 2),
        (SUMS, 2),
        pytest.param(DISPATCH, 2, marks=pytest.mark.slow),
        *(pytest.param(text, 2, marks=pytest.mark.long) for text in (PRODUCTS, ATTENTION, COLLECTIVES)),
        pytest.param(COLLECTIVES, 4, marks=pytest.mark.long),
        pytest.param(EXPERTS, 3, marks=pytest.mark.long),
    ],
    ids=["experts", "sums", "dispatch", "products", "attention", "collectives", "collectives of 4", "experts of 3"],
)
def test_kernels_end_where_their_waits_do(text: str, ranks: int, tmp_path: Path) -> None:
    try:
        assert end_waits(text, tmp_path, ranks, schedules=3) == []
    except RankFailure as failure:
        raise failure.error from None
