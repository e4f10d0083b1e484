"""Transforms of planes on emulated ranks: lengths of all radices, and an exchange with a step left out."""

import math

import pytest
import torch

from device.runs import run_call, run_calls
from device.twins import use_twin
from peerlane.device import group_of
from peerlane.solutions.families import fourier

LENGTHS = [(22, 26), (42, 90), (1440, 4), (34, 48)]
"""Rows and columns. Of the last pair cuFFT's transform is wanted, for 17 is a prime."""


def transformed(field: torch.Tensor, lengths: tuple[int, int], inverse: bool) -> list[torch.Tensor | None]:
    """What two ranks get of a field or half spectrum."""
    parts = [(part.clone(memory_format=torch.contiguous_format),) for part in field.chunk(2, dim=1 if inverse else 2)]
    return run_call(lambda x: fourier.transform_planes(group_of(), x, lengths, (1, 2), "ortho", inverse), parts)


def exchanged(x: torch.Tensor) -> torch.Tensor:
    """Planes between both passes."""
    passes = fourier.plane_passes(group_of(), fourier.Planes(False, *x.shape), (12, 8))
    assert passes is not None
    passes.first(x=x, scale=1.0)
    return passes.planes


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("inverse", [False, True])
def test_transforms_of_any_radix_are_right(lengths: tuple[int, int], inverse: bool) -> None:
    torch.manual_seed(0)
    if inverse:
        field = torch.randn(3, lengths[0], lengths[1] // 2 + 1, dtype=torch.complex64)
        weights = torch.full((field.shape[2],), 2.0)
        weights[0] = weights[-1] = 1.0
        rows = torch.fft.ifft(field.to(torch.complex128) * weights, n=lengths[1], norm="ortho")
        wanted = torch.fft.ifft(rows, dim=1, norm="ortho").real.chunk(2, dim=2)
    else:
        field = torch.randn(3, *lengths)
        wanted = torch.fft.rfft2(field.double(), norm="ortho").chunk(2, dim=1)
    for one, right in zip(transformed(field, lengths, inverse), wanted, strict=True):
        if lengths == LENGTHS[-1]:
            assert one is None
        else:
            assert one is not None and float((one - right).abs().max()) < 2e-6 * float(right.abs().max())


@pytest.mark.parametrize("lost", ["", "peers.wait_all(0, epoch);", "if (FIRST) peers.barrier(1 + blockIdx.x, epoch);"])
def test_an_exchange_needs_every_step(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if lost:
        use_twin(monkeypatch, fourier, "FOURIER_LINES", lost, "")
    given = [[(torch.randn(2, 12, 4),) for _ in range(2)] for _ in range(2)]  # between the calls the host reads the planes
    assert bool(run_calls(lambda rank: exchanged, given, schedules=4).kinds) == bool(lost)


@pytest.mark.parametrize("points", [1, 2, 16, 17, 24, 256, 720, 1024, 1440, 3600, 4096, 2 * 181])
def test_stages_multiply_to_the_length(points: int) -> None:
    stages = fourier.radices(points)
    if stages is None:
        assert points in (17, 2 * 181)
    else:
        assert math.prod(stages) == points and max(stages) <= fourier.MOST_RADIX
        assert len(stages) == max(1, math.ceil(math.log(points, fourier.MOST_RADIX)))
