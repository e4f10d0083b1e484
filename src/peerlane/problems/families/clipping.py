"""What the gradient-clipping problems share: lists of gradients, p-norms over ranks, clipped gradients with their error model."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families.collective import FP32, FP64

Shape = tuple[int, ...]
Entry = tuple[Shape, torch.dtype] | None
"""Shape and dtype of one entry of a list of gradients; None for a parameter without a gradient."""

Gradients = list[torch.Tensor | None]

# Relative error of a norm accumulated in float32, at least: 168 of its unit roundoffs.
NORM_ERROR = 1e-5

# Elements that the oracle holds in float64 at a time.
_CHUNK = 2**26

# A gradient of so few elements, or fewer, has no spike.
_FEW = 8

# Of a list's rest, the part on the rank with the largest element: whoever adds this rank's squares in one row, in float32, loses what is
# small beside it.
_BESIDE = 5e-4


# For the references.


def present(gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """The gradients that there are and that have elements."""
    return [gradient for gradient in gradients if gradient is not None and gradient.numel()]


def power_sum(gradients: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Sum of |g|^p over all elements, a float32 scalar; zero for no gradients."""
    if not gradients:
        return torch.zeros((), device="cpu" if dist.get_backend() == "gloo" else "cuda")
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


@dataclass(frozen=True)
class Split:
    """What the norm of one call is made of, from :func:`draw_split`: a number for every list and holder.

    Attributes:
        rest: p-norm of all elements but the spike.
        spike: the list's largest element, or zero where there is none.
        holders: ranks that have elements.
    """

    rest: torch.Tensor
    spike: torch.Tensor
    holders: Sequence[int]


def draw_split(shared: pc.Draw, lists: Sequence[Mapping[int, Sequence[Entry]]], level: float, norm_type: float) -> Split:
    """Draws the norm and what makes it up, the same on all ranks; ``lists``: one or two, by rank.

    Leaving out a list, half of the elements or (with one list) the last rank is to miss the norm by a sixth, ten times what gradients in
    bfloat16 may; leaving out any other rank by some per mille.

    * The norm is that of N(0, level^2) everywhere, times U[1, 1.7) or U[2.3, 3) by turns: an earlier call's is wrong.
    * A spike, one element of one list on one rank, makes up 56 to 68 % of the sum of |g|^p. Whichever half of the elements stands for
      all, its sum doubled is 1.5 times the right one or half of it.
    * Of two lists, that without the spike makes up 30 to 33 %: a quarter of this in a spike of its own, so that half of this list alone
      does not do, although the ten times then hold for the norm only.
    * Of the rest of a list, the rank of the spike has next to nothing, another one most (60 %; if there is one list, three quarters; of
      two ranks, all), and there a smaller spike is too. The others share what is left evenly. The first two are the last rank and any
      other, or the other way round: with one list, either makes up at least 30 %.
    """
    sizes = [{rank: _elements(entries) for rank, entries in by_rank.items()} for by_rank in lists]
    filled = [any(by_rank.values()) for by_rank in sizes]
    holders = [rank for rank in sizes[0] if any(by_rank[rank] for by_rank in sizes)]
    last, root = len(holders) - 1, 1.0 / norm_type
    both = len(filled) == 2 and all(filled)
    low, high = (0.655, 0.67) if both else (0.56, 0.6) if last != 1 else (0.66, 0.68)
    most = (0.6 if both else 0.75) if last > 1 else 1.0 - _BESIDE if last else 1.0

    usual = level * (_moment(norm_type) * sum(sum(by_rank.values()) for by_rank in sizes)) ** root
    norm = shared.apart((1,), low=1.0, high=3.0) * usual
    draws = shared.uniform((5, 1), FP32)
    larger = low + (high - low) * draws[0]
    lesser = (1.0 - larger) * (0.92 + 0.03 * draws[1]) if both else torch.zeros_like(larger)
    first = draws[2] < (0.5 if both else float(filled[0]))
    other, swapped = (last * draws[3]).floor(), draws[4] < 0.5

    main = torch.stack([first, ~first])[: len(lists)]
    places = torch.arange(len(holders), device=norm.device)
    heavy = places == torch.where(swapped, last, other)
    spiked = places == torch.where(swapped, other, last)
    spike = torch.where(main, larger * spiked, 0.25 * lesser * heavy)
    rest = torch.where(main, 1.0 - larger - lesser, 0.75 * lesser)
    of_rank = torch.where(heavy, most, torch.where(spiked, _BESIDE, (1.0 - most - _BESIDE) / max(1, last - 1)))
    return Split(norm * (rest * of_rank) ** root, norm * spike**root, holders)


def draw_gradients(
    draw: pc.Draw,
    entries: Sequence[Entry],
    split: Split,
    norm_type: float,
    *,
    rank: int,
    which: int = 0,
    factor: float = 1.0,
    stacked: bool = False,
) -> Gradients:
    """The rank's list of this number, as the split has it, times a factor; ``stacked``: axis 0 of every entry counts experts.

    Elements are normal. The rest's parts in tensors, whatever their size, are as 10^U(-1.2, 1.2), and those in experts as 10^U(-0.6, 0.6).
    The spike is at a random place of any tensor with more than a few elements; the other such tensors have a zero at one.
    """
    sizes = [0 if entry is None else math.prod(entry[0]) for entry in entries]
    filled = sorted((index for index, size in enumerate(sizes) if size), key=lambda index: sizes[index] <= _FEW)
    order = {index: place for place, index in enumerate(filled)}
    if order:
        eligible = sum(size > _FEW for size in sizes) or len(order)
        rest, spike = (factor * numbers[which, split.holders.index(rank)] for numbers in (split.rest, split.spike))
        chosen = torch.arange(len(order), device=draw.device) == draw.integers(0, eligible, (1,))
        weights = _weights(draw, len(order), 1.2)
        scales = rest * (weights / weights.sum()) ** (1.0 / norm_type)
        spikes = {dtype: (spike * chosen).to(dtype) for dtype in {entry[1] for entry in entries if entry is not None}}
    if order and stacked:
        weights = _weights(draw, max(entry[0][0] for entry in entries if entry is not None), 0.6)
        scales = torch.outer(scales, (weights / weights.mean()) ** (1.0 / norm_type))

    result: Gradients = []
    for index, entry in enumerate(entries):
        if entry is None or not sizes[index]:
            result.append(None if entry is None else torch.empty(entry[0], dtype=entry[1], device=draw.device))
            continue
        shape, dtype = entry
        place = order[index]
        scale = scales[place, : shape[0]].view(-1, *[1] * (len(shape) - 1)) if stacked else scales[place]
        values = draw.normal(shape, FP32, scale=(_moment(norm_type) * sizes[index]) ** (-1.0 / norm_type))
        values = torch.mul(values, scale, out=values if dtype == FP32 else torch.empty_like(values, dtype=dtype))
        if place < eligible:
            values.view(-1).scatter_(0, draw.integers(0, sizes[index], (1,)), spikes[dtype][place : place + 1])
        result.append(values)
    return result


def _elements(entries: Sequence[Entry]) -> int:
    return sum(math.prod(entry[0]) for entry in entries if entry is not None)


def _moment(norm_type: float) -> float:
    """E |z|^p of z ~ N(0, 1)."""
    return 2 ** (norm_type / 2) * math.gamma((norm_type + 1) / 2) / math.sqrt(math.pi)


def _weights(draw: pc.Draw, count: int, decades: float) -> torch.Tensor:
    return 10.0 ** draw.uniform((count,), FP32, low=-decades, high=decades)


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
            expected.append(pc.exactly(f"{name}_{index}", gradient / divisor if divisor != 1 else gradient.clone()))
        else:
            wide = gradient.to(FP64 if gradient.dtype == FP32 else FP32)
            expected.append(pc.Expected(f"{name}_{index}", wide * factor, gradient.dtype))
    return expected


def tolerances(name: str, entries: Sequence[Sequence[Entry]], error: float) -> Mapping[str, pc.Tolerance]:
    """For the lists of all ranks, in which one index has one dtype; ``error``: the norm's own.

    Two roundings, of the coefficient (which a product of a GPU tensor and a GPU scalar takes in the tensor's dtype) and of the product,
    allowed twice; and the norm's own error.
    """
    return {
        f"{name}_{index}": pc.Tolerance(relative=4 * pc.UNIT_ROUNDOFF[entry[1]] + error)
        for one in entries
        for index, entry in enumerate(one)
        if entry is not None
    }


def norm_error(*lists: Sequence[Sequence[Entry]]) -> float:
    """Relative error of the norm, a float32 scalar, that is allowed: thrice what the random walk of additions in a row leaves.

    A rank may add the squares of all its elements to one accumulator, as PyTorch does on a CPU; measured there: half of sqrt(n) u for n
    elements. What it loses beside a spike is little, as :func:`draw_split` has little there.
    """
    elements = [sum(math.prod(entry[0]) for one in ranks for entry in one if entry is not None) for ranks in zip(*lists, strict=True)]
    return max(NORM_ERROR, 1.5 * pc.UNIT_ROUNDOFF[FP32] * math.sqrt(max(elements)))


def traffic(entries: Sequence[Entry], *, clips: bool, always_written: Sequence[Entry] = ()) -> tuple[float, float]:
    """Compulsory bytes of device memory, and float32 operations.

    All gradients are read once for the norm. Those that change are written, and read again as far as they exceed what stays on the chip.
    """
    everything = [*entries, *always_written]
    elements, size = (sum(math.prod(entry[0]) * factor(entry) for entry in everything if entry) for factor in (lambda _: 1, _itemsize))
    written = sum(math.prod(entry[0]) * _itemsize(entry) for entry in (everything if clips else always_written) if entry)
    return size + written + (pc.traffic.read_again(size) if clips else 0), (3 if clips else 2) * elements


def _itemsize(entry: tuple[Shape, torch.dtype]) -> int:
    return entry[1].itemsize


# For known wrong answers and alternative solutions.


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


def order_of(case: pc.Case) -> float:
    """p of the p-norm of a case."""
    return float(case.params.get("norm_type", 2.0))


def device_of(inputs: pc.Inputs) -> torch.device:
    """Where the arguments are."""
    return next(pc.leaves(list(inputs))).device
