"""What the problems with quantised payloads share: codes and their ties, block maxima, the amax history, hard values."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from peerlane.problems import contract as pc

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
E4M3 = torch.float8_e4m3fn

# The largest finite e4m3fn number: 1.75 x 2^8.
E4M3_MAX = 448.0

# The least amax that a history's scale is made from.
AMAX_FLOOR = 1e-12

# How far a quotient x / scale in float32 may be from the exact one, relatively: 16 unit roundoffs. Two IEEE divisions cost 2; a
# reciprocal and a product, or an approximate division of 2 ulp, cost up to 6. Both codes are right for an element this near a tie.
QUOTIENT_SLACK = 2.0**-20

# Elements of a gradient or parameter vector that belong to one tensor and are of one size.
_RUN = 8


def student_t(draw: pc.Draw, shape: Sequence[int]) -> torch.Tensor:
    """Student's t with 3 degrees of freedom, float32: heavy tails, as activations and gradients have them."""
    squares = draw.normal((3, *shape), FP32).square_().mean(0)
    return draw.normal(shape, FP32).div_(squares.sqrt_().clamp_(min=1e-3))


def flat_blocks(tensor: torch.Tensor, block_size: int) -> torch.Tensor:
    """The elements in row-major order as (blocks, block_size), the last block filled up with zeros."""
    flat = tensor.reshape(-1)
    return F.pad(flat, (0, -flat.numel() % block_size)).view(-1, block_size)


def e4m3(values: torch.Tensor) -> torch.Tensor:
    """Rounded to e4m3fn, nearest even. Values must not exceed 464, from where on they would become NaN."""
    return values.to(FP32).to(E4M3)


def widened(values: torch.Tensor, slack: float = QUOTIENT_SLACK) -> tuple[torch.Tensor, torch.Tensor]:
    """(values - |values| slack, values + |values| slack)."""
    width = values.abs() * slack
    return values - width, values + width


# Vectors with an amax history: every rank quantises its own to e4m3 with one scale, from the largest of its last maxima, the new included.


def push_history(flat: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
    """The history without its first entry, and with max |x| behind the last."""
    low, high = torch.aminmax(flat)
    largest = torch.maximum(-low, high).abs()  # of zeros alone it would be -0, which max |x| never is
    return torch.cat((history[1:], largest.to(history.dtype).view(1)))


def history_scale(history: torch.Tensor) -> torch.Tensor:
    """0-d float32 scale of the history's largest entry."""
    return history.to(FP32).max().clamp(min=AMAX_FLOOR) / E4M3_MAX


def through_codes(flat: torch.Tensor, scale: torch.Tensor, codes: torch.dtype = E4M3) -> torch.Tensor:
    """Quantised by true float32 division, decoded, and rounded to the vector's dtype; what exceeds the largest code becomes it."""
    largest = torch.finfo(codes).max
    quotients = (flat.to(FP32) / scale).clamp_(-largest, largest)
    return (quotients.to(codes).to(FP32) * scale).to(flat.dtype)


def fp8_round_trip(flat: torch.Tensor, history: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The vector after its round trip through e4m3, and the new history."""
    updated = push_history(flat, history)
    return through_codes(flat, history_scale(updated)), updated


@dataclass(frozen=True)
class Decoded:
    """What a vector may be after the round trip, in its dtype: any value in [low, high], ``value`` to the letter of the definition."""

    value: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor


def exact_scale(history: torch.Tensor) -> torch.Tensor:
    """The scale of an updated history in float64."""
    return history.to(FP64).max().clamp(min=AMAX_FLOOR) / E4M3_MAX


def decoded(flat: torch.Tensor, scale: torch.Tensor) -> Decoded:
    """The round trip of (part of) a vector with the exact scale, float64.

    Codes may fall to either side where the quotient is within :data:`QUOTIENT_SLACK` of a tie, and so may the last rounding.
    """
    low, high = widened(flat.to(FP64) / scale)
    low, _ = widened(e4m3(low).to(FP64).mul_(scale))
    _, high = widened(e4m3(high).to(FP64).mul_(scale))
    return Decoded(through_codes(flat, scale.to(FP32)), low.to(flat.dtype), high.to(flat.dtype))


def history_answer(args: tuple[Any, ...]) -> pc.Expected:
    """The exact new history of a rank with the arguments (flat, history)."""
    return pc.exactly("history", push_history(args[0], args[1]))


def vector_and_history(case: pc.Case, rank: int, draw: pc.Draw, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A vector of N(0, s^2) and a history of ``case["history"]`` entries.

    The standard deviation s is ``case["size"]`` (1) times 2^rank, and another for every run of 8 elements: 1 to 2^-21, drawn alike
    on all ranks, as the tensors in a bucket are of unlike size. A fifth of them e4m3 holds with few bits, or not at all.

    The history's first entry, which is dropped, is above 60 s. On every other rank, which ones being new in every call, another entry,
    between 6 s and 9 s, decides the scale, for max|x| is less; on the rest an element of 20 s to 28 s does, so that neither the history
    nor the vector alone tells the scale. With ``case["data"]`` the history decides. ``case["history_of"]``: ``quiet`` (all 1e-8: the
    vector itself decides).

    ``case["data"]``:

    * ``rank_scale``: ranks' sizes spread over 10^6, the last is the largest
    * ``outlier``: one element on every rank is 10^4 times as large
    * ``ties``: the last rank's values are powers of two times numbers halfway between two codes, and its amax is 448 times a power of two
    * ``idle``: rank 0 has a zero vector and a zero history
    * ``floor``: rank 0 has values and history far below 1e-12
    * ``nan``, ``inf``: in one element of the last rank
    """
    data, last = case.params.get("data"), rank == case.world_size - 1
    size = case.params.get("size", 1.0) * 2.0**rank
    if data == "rank_scale":
        size = case.params.get("size", 1.0) * 10.0 ** (6.0 * rank / (case.world_size - 1) - 6.0)
    elif data == "floor" and rank == 0:
        size = 1e-18
    runs = torch.exp2(draw.shared.uniform((-(-count // _RUN),), FP32, low=-21.0, high=0.0))
    flat = draw.normal((count,), FP32, scale=size)
    flat *= runs.repeat_interleave(_RUN)[:count]
    if data is None:
        largest = draw.uniform((1,), FP32, low=20.0, high=28.0) * size
        place, turn = draw.integers(0, count, (1,)), (draw.shared.integers(0, 2, (1,)) + rank) % 2
        flat[place] = torch.where(turn == 0, largest, flat[place])

    entries = case["history"]
    history = draw.uniform((entries,), FP32, low=0.2, high=1.0) * (3.0 * size)
    if entries > 1:
        history[1 + draw.layout.randrange(entries - 1)] += 6.0 * size
    history[0] += 60.0 * size
    if case.params.get("history_of") == "quiet":
        history.fill_(1e-8)

    if data == "outlier":
        flat[draw.permutation(count)[:1]] *= 1e4
    elif data == "ties" and last:
        # 1 + (2 m + 1) / 16 is halfway between two codes of three mantissa bits.
        power = torch.exp2(draw.integers(-9, 8, (count,), FP32))
        flat = (
            (1.0 + (2.0 * draw.integers(0, 7, (count,), FP32) + 1.0) / 16.0) * power * draw.integers(0, 2, (count,), FP32).mul_(2).sub_(1)
        )
        flat[count // 2] = E4M3_MAX
        history.fill_(1.0)
    elif data == "idle" and rank == 0:
        flat.zero_()
        history.zero_()
    elif data in ("nan", "inf") and last:
        flat[count // 2] = float(data)
    return flat.to(case.dtype), history.to(case.params.get("history_dtype", case.dtype))


# Wrong answers and alternative solutions of problems 52 and 53, which send a vector of every rank through e4m3.


_WRONG_SCALES: Mapping[str, tuple[str, Callable[[pc.Inputs, int], torch.Tensor]]] = {
    "history_ignored": (
        "the scale of the current amax alone",
        lambda inputs, q: history_scale(push_history(inputs[q][0], inputs[q][1][:1])),
    ),
    "current_ignored": (
        "the scale of the older entries alone, without waiting for the current amax",
        lambda inputs, q: history_scale(inputs[q][1][1:] if inputs[q][1].numel() > 1 else inputs[q][1]),
    ),
    "stale_history": ("the scale of the history before the call", lambda inputs, q: history_scale(inputs[q][1])),
    "scale_of_next_rank": ("quantised with the next rank's scale", lambda inputs, q: _scale(inputs, (q + 1) % len(inputs))),
    "common_scale": (
        "the largest scale of all ranks",
        lambda inputs, q: torch.stack([_scale(inputs, p) for p in range(len(inputs))]).max(),
    ),
    "scale_one": ("values rounded to e4m3 as they are", lambda inputs, q: torch.ones((), device=inputs[q][0].device)),
}
"""by name, what is wrong, and the scale with which rank q's vector is quantised"""


def _scale(inputs: pc.Inputs, q: int) -> torch.Tensor:
    """Rank q's right scale."""
    return history_scale(push_history(inputs[q][0], inputs[q][1]))


def _decoded_by(inputs: pc.Inputs, q: int, rank: int) -> torch.Tensor:
    """Rank q's vector, quantised with its own scale and decoded with another rank's."""
    flat: torch.Tensor = inputs[q][0]
    quotients = (flat.to(FP32) / _scale(inputs, q)).clamp_(-E4M3_MAX, E4M3_MAX)
    return (quotients.to(E4M3).to(FP32) * _scale(inputs, rank)).to(flat.dtype)


def _through_e5m2(inputs: pc.Inputs, q: int) -> torch.Tensor:
    """Rank q's vector through the other float8 format, scaled to its own largest number."""
    codes = torch.float8_e5m2
    return through_codes(inputs[q][0], _scale(inputs, q) * (E4M3_MAX / torch.finfo(codes).max), codes)


def _unshifted_history(context: pc.AnswerContext) -> torch.Tensor:
    """The history with the new amax in the place of the last one, the oldest still there."""
    history: torch.Tensor = context.args[1].clone()
    history[-1] = context.answer[1][-1]
    return history


def trip_wrong_answers(
    result: Callable[[pc.Case, list[torch.Tensor], int], torch.Tensor], cases: Mapping[str, pc.Where], others: pc.Where | None = None
) -> tuple[pc.KnownWrongAnswer, ...]:
    """Wrong round trips with the right history, and wrong histories.

    ``result(case, every rank's vector after its round trip, rank)`` is what the rank returns beside its history. ``cases`` says by name
    where an answer is wrong, and ``others`` where the other round trips are.
    """

    def wrong(name: str, why: str, trip: Callable[[pc.AnswerContext, int], torch.Tensor]) -> pc.KnownWrongAnswer:
        def answer(context: pc.AnswerContext) -> tuple[torch.Tensor, torch.Tensor]:
            return result(context.case, [trip(context, q) for q in context.ranks], context.rank), context.answer[1]

        return pc.wrong(name, why, answer, cases.get(name, others))

    def scaled(scale: Callable[[pc.Inputs, int], torch.Tensor]) -> Callable[[pc.AnswerContext, int], torch.Tensor]:
        return lambda c, q: through_codes(c.inputs[q][0], scale(c.inputs, q))

    return (
        *(wrong(name, why, scaled(scale)) for name, (why, scale) in _WRONG_SCALES.items()),
        wrong("own_scale_decodes", "all ranks' codes decoded with the rank's own scale", lambda c, q: _decoded_by(c.inputs, q, c.rank)),
        wrong("e5m2", "the other float8 format", lambda c, q: _through_e5m2(c.inputs, q)),
        pc.wrong(
            "history_not_shifted",
            "the amax in the place of the last entry",
            lambda c: (c.answer[0], _unshifted_history(c)),
            cases["history_not_shifted"],
        ),
        pc.wrong("history_unchanged", "the history as it came", lambda c: (c.answer[0], c.args[1])),
    )


def by_reciprocal(flat: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
    """The round trip with products by 1/448 and by the scale's reciprocal in place of divisions."""
    scale = push_history(flat, history).to(FP32).max().clamp(min=AMAX_FLOOR) * (1 / E4M3_MAX)
    quotients = (flat.to(FP32) * (1 / scale)).clamp_(-E4M3_MAX, E4M3_MAX)
    return (quotients.to(E4M3).to(FP32) * scale).to(flat.dtype)


def by_division(flat: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
    """The round trip to the letter, without the history."""
    return fp8_round_trip(flat, history)[0]


def history_to_the_letter(flat: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
    """The new history with the amax as its definition has it."""
    return torch.cat((history[1:], flat.abs().amax().to(history.dtype).view(1)))


def trip_variants(combine: Callable[[pc.Case, list[torch.Tensor], pc.Inputs, int], pc.Tree]) -> tuple[pc.AlternativeSolution, ...]:
    """Both ways to the quotient; ``combine(case, every rank's vector after the round trip, inputs, rank)`` makes the answer.

    The combined answer's history is to be that of :func:`history_to_the_letter`: it is compared bit for bit with another way to the amax.
    """

    def variant(trip: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[pc.Case, pc.Inputs, int], pc.Tree]:
        return lambda case, inputs, rank: combine(case, [trip(args[0], args[1]) for args in inputs], inputs, rank)

    return pc.alternatives(true_division=variant(by_division), reciprocal=variant(by_reciprocal))


def block_length(case: pc.Case) -> int:
    """Elements that share a scale."""
    return int(case.params.get("block", 128))


def shard_length(case: pc.Case) -> int:
    """Elements of a shard: ``shard``, or a W-th of ``elements``."""
    return int(case["shard"] if "shard" in case.params else case["elements"] // case.world_size)
