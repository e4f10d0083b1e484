"""Gradients of attention over emulated ranks: heads travel in pieces, numbers are right, and twins with one thing wrong are caught."""

from functools import partial

import pytest
import torch

from device.runs import Run, run_calls
from device.test_attention import BF16, expected
from device.twins import use_twin
from peerlane.device.attention import head_exchange as exchange
from peerlane.device.attention import ring_backward
from peerlane.device.attention.head_exchange import HeadShape
from representatives import first

CHOOSES = ring_backward.pieces


def run(world_size: int, length: int, heads: tuple[int, int], *, causal: bool) -> tuple[Run, float]:
    """What came of two calls, and the largest error of a gradient, relative to its norm."""
    generator = torch.Generator().manual_seed(length)
    arguments, wanted = [], []
    for _ in range(2):
        tokens, depths = world_size * length, (16, 16, 8)
        whole = [torch.randn(1, tokens, h, d, generator=generator).to(BF16) for h, d in zip((*heads, heads[1]), depths, strict=True)]
        wide = [tensor.double().requires_grad_() for tensor in whole]
        out, logarithms = expected(wide[0], wide[1], wide[2], None, causal)
        dout = torch.randn(out.shape, generator=generator).to(BF16)
        wanted.append(torch.autograd.grad(out, wide, dout.double()))
        shards = [tensor.chunk(world_size, 1) for tensor in (dout, *whole, out.detach().to(BF16))]
        numbers = logarithms.detach().float().chunk(world_size, 2)
        parts = zip(*shards, numbers, strict=True)
        arguments.append([tuple(tensor.clone(memory_format=torch.contiguous_format) for tensor in part) for part in parts])
    found = run_calls(lambda rank: partial(ring_backward.attend_over_ranks_backward, causal=causal), arguments)
    worst = 0.0
    for want, got in zip(wanted, found.outputs, strict=False):
        for index, gradient in enumerate(want):
            whole = torch.cat([own[index] for own in got], 1)
            worst = max(worst, float((whole - gradient).norm() / gradient.norm()))
    return found, worst


@pytest.fixture(autouse=True)
def _two_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    def most(shape: HeadShape, world_size: int, sm_count: int) -> int:
        return 2 if shape.key_heads // world_size % 2 == 0 else 1

    monkeypatch.setattr(ring_backward, "pieces", most)


@pytest.mark.parametrize(
    ("world_size", "length", "heads", "causal"),
    [
        (2, 5, (4, 4), True),
        pytest.param(2, 3, (8, 4), False, marks=pytest.mark.long),
        pytest.param(3, 3, (6, 6), True, marks=pytest.mark.long),
        pytest.param(4, 3, (8, 4), True, marks=pytest.mark.long),
        pytest.param(2, 5, (2, 1), True, marks=pytest.mark.long),
    ],
)
def test_gradients_are_right_and_nothing_is_unordered(world_size: int, length: int, heads: tuple[int, int], causal: bool) -> None:
    found, worst = run(world_size, length, heads, causal=causal)
    found.clean(worst < 6e-3)


TWINS = {
    "read before others have pushed": ("    peers.barrier(blockIdx.x, epoch);", ""),
    "a piece at the wrong rank's place": ("+ arena.rank * args.blocks[t].of_rank", "+ q * args.blocks[t].of_rank"),
    "heads of another rank": ("+ q * args.blocks[t].for_rank", "+ arena.rank * args.blocks[t].for_rank"),
}


@pytest.mark.parametrize("name", first(TWINS))
def test_a_twin_with_one_thing_wrong_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_twin(monkeypatch, exchange, "HEAD_EXCHANGE", *TWINS[name])
    found, worst = run(2, 3, (4, 4), causal=True)
    assert found.faults(worst <= 0.01)


def test_pieces_fill_the_sms_and_are_equal() -> None:
    assert CHOOSES(HeadShape(1, 8192, 32, 32, 128, 128, BF16), 2, 132) == 8
    assert CHOOSES(HeadShape(1, 8, 32, 32, 128, 128, BF16), 2, 132) == 1
    assert CHOOSES(HeadShape(1, 8192, 12, 6, 128, 128, BF16), 2, 132) == 1
