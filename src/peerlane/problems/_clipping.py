"""What the gradient-clipping problems share: lists of gradients, p-norms over ranks, clipped gradients with their error model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems._collective import FP32
from peerlane.problems._draw import Draw
from peerlane.problems._spec import UNIT_ROUNDOFF, Case, Expected, Tolerance, exactly

FP64 = torch.float64

Shape = tuple[int, ...]
Entry = tuple[Shape, torch.dtype] | None
"""Shape and dtype of one entry of a list of gradients; None for a parameter without a gradient."""

Gradients = list[torch.Tensor | None]

# Relative error of a norm accumulated in float32, at least: 168 of its unit roundoffs.
NORM_ERROR = 1e-5

# What a GPU can hold between reading gradients for their norm and scaling them: L2, shared memory and registers of an H200, rounded up.
_ON_CHIP_BYTES = 128 * 2**20

# Elements that the oracle holds in float64 at a time.
_CHUNK = 2**26

# Outliers of a gradient, which make up half of its sum of squares.
_OUTLIERS = 8


# For the references.


def present(gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """The gradients that there are and that have elements."""
    return [gradient for gradient in gradients if gradient is not None and gradient.numel()]


def power_sum(gradients: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Sum of |g|^p over all elements, a float32 scalar; zero for no gradients."""
    if not gradients:
        return torch.zeros((), device="cuda" if dist.get_backend() == "nccl" else "cpu")
    norms = torch._foreach_norm(gradients, norm_type, dtype=FP32)
    return torch.stack(norms).pow(norm_type).sum()


def clip(gradients: list[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scales by max_norm / norm in place where norm > max_norm, which the host need not know."""
    if gradients:
        torch._foreach_mul_(gradients, coefficient(norm, max_norm))


# For inputs.


def tensors(dtype: torch.dtype, *shapes: Shape | None) -> tuple[Entry, ...]:
    """Entries of one dtype."""
    return tuple(None if shape is None else (shape, dtype) for shape in shapes)


def shard(entries: Sequence[Entry], ranks: int, place: int, axis: int = 0) -> tuple[Entry, ...]:
    """Entries cut along an axis into parts of ceil(length / ranks), of which this is the one at ``place``; the last ones may be empty."""
    parts: list[Entry] = []
    for entry in entries:
        if entry is None:
            parts.append(None)
            continue
        shape, dtype = entry
        most = -(-shape[axis] // ranks)
        length = max(0, min(most, shape[axis] - place * most))
        parts.append(((*shape[:axis], length, *shape[axis + 1 :]), dtype))
    return tuple(parts)


def draw_gradients(case: Case, rank: int, draw: Draw, entries: Sequence[Entry], level: float) -> Gradients:
    """N(0, s^2) with s = level x 10^U(-0.6, 0.6) x rank_base^rank, where every parameter has its own U, the same on all ranks.

    ``case["rank_base"]`` is 1.5 if absent. The level itself moves by a factor of U[1, 3), the same on all ranks. A few elements of every
    gradient, at places of the rank's own, are so large that they decide its norm: a sample of the elements does not tell it.
    """
    exponents = draw.shared.uniform((len(entries) + 1,), FP32, low=-0.6, high=0.6)
    common = level * case.params.get("rank_base", 1.5) ** rank * draw.shared.uniform((1,), FP32, low=1.0, high=3.0)
    scales = (common * 10.0**exponents).unbind()
    result: Gradients = []
    for entry, scale in zip(entries, scales, strict=False):
        if entry is None:
            result.append(None)
        else:
            shape, dtype = entry
            values = draw.normal(shape, FP32).mul_(scale)
            if values.numel() > _OUTLIERS:
                values.view(-1)[draw.integers(0, values.numel(), (_OUTLIERS,))] *= math.sqrt(values.numel() / _OUTLIERS)
            result.append(values.to(dtype))
    return result


def poison(gradients: Gradients, value: float) -> None:
    """Puts ``value`` in the middle of the first gradient that has elements."""
    flat = present(gradients)[0].view(-1)
    flat[flat.numel() // 2] = value


# For oracles.


def wide_power_sum(gradients: Sequence[torch.Tensor | None], norm_type: float) -> torch.Tensor:
    """Sum of |g|^p over all elements, a float64 scalar on the gradients' device, or on the CPU if there are none."""
    parts = []
    for gradient in present(gradients):
        for chunk in torch.split(gradient.reshape(-1), _CHUNK):
            magnitude = chunk.to(FP64).abs_()
            parts.append(magnitude.pow_(norm_type).sum())
    return torch.stack(parts).sum() if parts else torch.zeros((), dtype=FP64)


def norm_of(power_sums: Sequence[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """The p-th root of the sum, which is infinite beyond float32's range."""
    total = torch.stack([term.to(device) for term in power_sums]).sum()
    total = torch.where(total > torch.finfo(FP32).max, math.inf, total)
    return total.pow(1.0 / norm_type)


def clipped(name: str, gradients: Sequence[torch.Tensor | None], norm: torch.Tensor, max_norm: float, divisor: int = 1) -> list[Any]:
    """The right gradients after the call: divided by ``divisor``, and scaled by max_norm / norm if norm > max_norm.

    What is not scaled must keep its bits, and what is divided by a power of two is exact, except where a NaN (which may change its
    payload) is about.
    """
    clips = bool(norm > max_norm)
    factor = (max_norm / norm if clips else 1.0) / divisor
    exact = not clips and divisor & (divisor - 1) == 0
    expected: list[Any] = []
    for index, gradient in enumerate(gradients):
        if gradient is None:
            expected.append(None)
        elif exact and not bool(gradient.isnan().any()):
            expected.append(exactly(f"{name}_{index}", gradient / divisor if divisor != 1 else gradient.clone()))
        else:
            wide = gradient.to(FP64 if gradient.dtype == FP32 else FP32)
            expected.append(Expected(f"{name}_{index}", wide * factor, gradient.dtype))
    return expected


def tolerances(name: str, entries: Sequence[Sequence[Entry]], error: float) -> Mapping[str, Tolerance]:
    """For the lists of all ranks, in which one index has one dtype; ``error``: the norm's own.

    Two roundings, of the coefficient (which a product of a GPU tensor and a GPU scalar takes in the tensor's dtype) and of the product,
    allowed twice; and the norm's own error.
    """
    return {
        f"{name}_{index}": Tolerance(relative=4 * UNIT_ROUNDOFF[entry[1]] + error)
        for one in entries
        for index, entry in enumerate(one)
        if entry is not None
    }


def norm_error(*lists: Sequence[Sequence[Entry]]) -> float:
    """Relative error of the norm, a float32 scalar, that is allowed: thrice what the random walk of additions in a row leaves.

    A rank may add the squares of all its elements to one accumulator, as PyTorch does on a CPU; measured there: half of sqrt(n) u for n
    elements.
    """
    elements = [sum(math.prod(entry[0]) for one in ranks for entry in one if entry is not None) for ranks in zip(*lists, strict=True)]
    return max(NORM_ERROR, 1.5 * UNIT_ROUNDOFF[FP32] * math.sqrt(max(elements)))


def traffic(entries: Sequence[Entry], *, clips: bool, always_written: Sequence[Entry] = ()) -> tuple[float, float]:
    """Compulsory bytes of device memory, and float32 operations.

    All gradients are read once for the norm. Those that change are written, and read again as far as they exceed what stays on the chip.
    """
    everything = [*entries, *always_written]
    elements, size = (sum(math.prod(entry[0]) * factor(entry) for entry in everything if entry) for factor in (lambda _: 1, _itemsize))
    written = sum(math.prod(entry[0]) * _itemsize(entry) for entry in (everything if clips else always_written) if entry)
    return size + written + (max(0, size - _ON_CHIP_BYTES) if clips else 0), (3 if clips else 2) * elements


def _itemsize(entry: tuple[Shape, torch.dtype]) -> int:
    return entry[1].itemsize


# For null answers and honest variants.


def narrow_power_sum(gradients: Sequence[torch.Tensor | None], norm_type: float, device: torch.device, divisor: int = 1) -> torch.Tensor:
    """Sum of |g / divisor|^p from float32 sums; zero for no gradients."""
    terms = [(g.to(FP32) / divisor).abs().pow(norm_type).sum() for g in present(gradients)]
    return torch.stack(terms).sum() if terms else torch.zeros((), device=device)


def narrow_norm(lists: Sequence[Sequence[torch.Tensor | None]], norm_type: float, device: torch.device) -> torch.Tensor:
    """The p-norm of all gradients of these lists, from float32 sums."""
    return torch.stack([narrow_power_sum(one, norm_type, device) for one in lists]).sum().pow(1.0 / norm_type)


def every_other(gradients: Sequence[torch.Tensor | None]) -> Gradients:
    """Every second element of every gradient, flat."""
    return [None if g is None else g.reshape(-1)[::2] for g in gradients]


def coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """max_norm / norm where the norm is larger, else 1."""
    return torch.where(norm > max_norm, max_norm / norm, 1.0)


def scaled(gradients: Sequence[torch.Tensor | None], factor: torch.Tensor | float, *, coarse: bool = False) -> Gradients:
    """Gradients times the factor, rounded once; ``coarse``: the factor is rounded to their dtype first."""
    result: Gradients = []
    for g in gradients:
        if g is None:
            result.append(None)
        else:
            own = torch.as_tensor(factor, dtype=FP32, device=g.device)
            result.append((g.to(FP32) * (own.to(g.dtype).to(FP32) if coarse else own)).to(g.dtype))
    return result
