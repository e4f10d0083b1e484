"""What the two-dimensional distributed Fourier transforms share: sizes and axes of a case, the exchange of blocks, and the error model."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families.collective import FP32, group_members

COMPLEX64, COMPLEX128 = torch.complex64, torch.complex128


def exchange(blocks: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """All-to-all of a contiguous complex tensor (W, ...): block q goes to rank q of the group. Sent as pairs of reals, which gloo knows."""
    sent = torch.view_as_real(blocks)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.view_as_complex(received)


def size(rule: int | Sequence[int], ranks: int) -> int:
    """A length: a number, or (a, b) for a W + b."""
    if isinstance(rule, int):
        return rule
    per_rank, rest = rule
    return per_rank * ranks + rest


def axes(case: pc.Case) -> tuple[int, int]:
    """The transformed axes (d0, d1) of ``case["dim"]``, counted from the front."""
    dims = len(case["lead"]) + 2
    first, second = case["dim"]
    return first % dims, second % dims


def full_shape(case: pc.Case, rows: int, columns: int) -> list[int]:
    """``case["lead"]`` with ``rows`` inserted at axis d0 and ``columns`` at axis d1."""
    d0, d1 = axes(case)
    lead = iter(case["lead"])
    return [rows if axis == d0 else columns if axis == d1 else next(lead) for axis in range(len(case["lead"]) + 2)]


def slice_scales(case: pc.Case, draw: pc.Draw) -> torch.Tensor:
    """(..., 1, 1) over the untouched axes: every slice has a scale of its own, within two decades around ``case["scale"]`` (default 1)."""
    exponent = draw.shared.uniform(full_shape(case, 1, 1), FP32, low=-1.0, high=1.0)
    return torch.pow(10.0, exponent).mul_(case.params.get("scale", 1.0))


def gathered(inputs: pc.Inputs, members: Sequence[int], axis: int, dtype: torch.dtype) -> torch.Tensor:
    """The members' first arguments, concatenated along the axis that is sharded."""
    return torch.cat([inputs[q][0].to(dtype) for q in members], dim=axis)


def part(tensor: torch.Tensor, axis: int, place: int, ranks: int) -> torch.Tensor:
    """The place-th of W equal blocks along an axis."""
    length = tensor.shape[axis] // ranks
    return tensor.narrow(axis, place * length, length)


def expected(name: str, case: pc.Case, whole: torch.Tensor, axis: int, rank: int, dtype: torch.dtype) -> pc.Expected:
    """The rank's block, along ``axis``, of a transform.

    Its magnitude is the sum of the root mean squares of slice, row and column and of an eighth of the slice's largest element.
    """
    members = group_members(case, rank)
    place, ranks, (d0, d1) = members.index(rank), len(members), axes(case)
    power = whole.real.square() + whole.imag.square() if whole.is_complex() else whole.square()
    rows, columns = power.mean(d1, keepdim=True), power.mean(d0, keepdim=True)
    largest = power.amax((d0, d1), keepdim=True)
    magnitude = rows.mean(d0, keepdim=True).sqrt() + rows.sqrt() + columns.sqrt() + largest.sqrt() / 8
    return pc.Expected(name, part(whole, axis, place, ranks), dtype, magnitude=part(magnitude, axis, place, ranks))


def fft_tolerance(name: str) -> Callable[[pc.Case], Mapping[str, pc.Tolerance]]:
    """A fast Fourier transform in float32 errs by a few u of the root mean square, whatever its length.

    The root mean square error of N = 2^20 points is 2 to 3 u (the square root of log2 N, times a constant below one), and the largest of
    millions of errors is five times that. Errors of the first pass spread over the slice, those of either pass stay within rows or columns
    where these hold all energy, the last rounding is relative, and those of a single wave add up at a few frequencies, to about u of its
    size. 32 u of each (4 u of the largest wave) leave room for lengths that are not a power of two. Numbers sent in half precision would
    err by 2^13 u or 2^16 u. There is no bound on the norm of a rank's part: of a smooth field, most parts hold next to nothing, and their
    errors follow from what the others hold.
    """
    u = pc.UNIT_ROUNDOFF[FP32]
    size = "the root mean square of the slice, plus those of the element's row and column, plus an eighth of the slice's largest element"
    return lambda _: {name: pc.Tolerance(relative=32 * u, magnitude=32 * u, size=size)}


def sizes(case: pc.Case, ranks: int) -> tuple[int, int]:
    """Rows and columns of the whole field."""
    return size(case["rows"], ranks), size(case["columns"], ranks)


def fft_flops(slices: int, rows: int, columns: int) -> float:
    """Operations of a real two-dimensional transform: 2 N log2 N for N = rows x columns (split radix, using the symmetry)."""
    return 2.0 * slices * rows * columns * math.log2(max(rows * columns, 2))


def transposed_steps(read: float, between: float, written: float, ranks: int, operations: float) -> pc.Steps:
    """Steps of a transform that reads, hands on and writes so many bytes a rank: the lines of one axis, a transpose, those of the other."""
    return (
        pc.step("lines of the whole axis", hbm=read + between, flops={"fp32": operations / 2}),
        pc.step("transpose", hbm=2 * between, link=pc.traffic.all_to_all(between, ranks), barriers=1),
        pc.step("lines of the sharded axis", hbm=between + written, flops={"fp32": operations / 2}),
    )


@dataclass(frozen=True)
class Transform:
    """Right and wrong answers of a transform whose shards come in along one axis and leave along the other.

    Attributes:
        compute: the whole answer from whatever whole field or spectrum, its case, and a rank's arguments.
        entering: which of :func:`axes` is sharded at first.
        dtype: of shards.
        result: of the answer.
    """

    compute: Callable[[torch.Tensor, pc.Case, Sequence[Any]], torch.Tensor]
    entering: int
    dtype: torch.dtype
    result: torch.dtype

    def whole(self, case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
        """What the rank's group was given."""
        return gathered(inputs, group_members(case, rank), axes(case)[self.entering], self.dtype)

    def own(self, case: pc.Case, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """The rank's part of a whole answer."""
        members = group_members(case, rank)
        return part(whole, axes(case)[1 - self.entering], members.index(rank), len(members)).to(self.result).contiguous()

    def answer(self, case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
        """What the rank returns."""
        return self.own(case, self.compute(self.whole(case, inputs, rank), case, inputs[rank]), rank)

    def of(self, change: Callable[[torch.Tensor, pc.AnswerContext], torch.Tensor]) -> Callable[[pc.AnswerContext], torch.Tensor]:
        """A wrong answer: that to a changed field or spectrum."""

        def answer(context: pc.AnswerContext) -> torch.Tensor:
            whole = change(self.whole(context.case, context.inputs, context.rank), context)
            return self.own(context.case, self.compute(whole, context.case, context.args), context.rank)

        return answer

    @property
    def other_norm(self) -> pc.KnownWrongAnswer:
        """The wrong answer with another normalisation."""
        return pc.wrong("other_norm", "another normalisation", self._other_norm)

    def _other_norm(self, context: pc.AnswerContext) -> torch.Tensor:
        whole, args = self.whole(context.case, context.inputs, context.rank), list(context.args)
        args[3] = {"ortho": "backward", "backward": "forward", "forward": "ortho"}[args[3]]
        return self.own(context.case, self.compute(whole, context.case, args), context.rank)


def through(dtype: torch.dtype, spectrum: torch.Tensor) -> torch.Tensor:
    """Complex numbers as they are after a journey in a narrow dtype."""
    return torch.view_as_complex(torch.view_as_real(spectrum).to(dtype).to(FP32))
