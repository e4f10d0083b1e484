"""Wrong answers to problem 77 and other right ones. Evaluations do not import this module."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from peerlane.problems import contract as pc
from peerlane.problems.families import attention
from peerlane.problems.families.collective import FP32, group_members, group_size
from peerlane.problems.p077_range_shuffled_async_attention import _assembled, _heads, _ranges, _sizes


def _attend(
    case: pc.Case,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    ranges: Sequence[tuple[int, int]],
    *,
    scale: float | None = None,
    rounded: bool = False,
    blocks: int = 1,
) -> torch.Tensor:
    """Every range of queries (R spb, Hq, D) to its keys (1, S, Hkv, D), in float32; ``rounded``: probabilities too, for their product."""
    heads, outputs = query.shape[1], []
    for part, (first, last) in zip(query.chunk(len(ranges)), ranges, strict=True):
        output = torch.empty((1, *part.shape[:2], values.shape[-1]), device=query.device)
        pieces = attention.score_pieces(
            part.unsqueeze(0), keys[:, first:last], scale=scale or case["depth"] ** -0.5, offset=None, work=FP32
        )
        for chosen, rows, scores in pieces:
            value = attention.key_heads(values[:, first:last], chosen, heads).transpose(1, 2).to(FP32)
            weights = torch.exp(scores - scores.amax(-1, keepdim=True))
            total = weights.sum(-1, keepdim=True)
            if rounded:
                weights = weights.to(case.dtype).to(FP32)
            # From the last block of keys to the first: another order of summation.
            products = [w @ v for w, v in zip(weights.chunk(blocks, -1), value.chunk(blocks, -2), strict=True)]
            output[:, rows, chosen] = (torch.stack(products[::-1]).sum(0) / total).transpose(1, 2)
        outputs.append(output.squeeze(0))
    return torch.cat(outputs).to(case.dtype)


def _answer(case: pc.Case, inputs: pc.Inputs, rank: int, **how: Any) -> torch.Tensor:
    keys, values = _assembled(case, inputs, group_members(case, rank), _sizes(case)[2])
    return _attend(case, inputs[rank][0], keys, values, _ranges(inputs[rank]), **how)


def _other_ranges(ranges: Callable[[pc.AnswerContext], Sequence[tuple[int, int]]]) -> Callable[[pc.AnswerContext], torch.Tensor]:
    """A wrong answer: other keys for the ranges of queries."""

    def answer(context: pc.AnswerContext) -> torch.Tensor:
        keys, values = _assembled(context.case, context.inputs, context.members, _sizes(context.case)[2])
        return _attend(context.case, context.args[0], keys, values, ranges(context))

    return answer


def _rank_major(context: pc.AnswerContext) -> torch.Tensor:
    """All of the first rank's keys first, then all of the second's."""
    count, _, clip = _sizes(context.case)
    whole = torch.cat([context.inputs[q][1] for q in context.members])[: count * clip]
    keys, values = whole.unsqueeze(0).chunk(2, dim=-1)
    return _attend(context.case, context.args[0], keys, values, _ranges(context.args))


def _padding_kept(context: pc.AnswerContext) -> torch.Tensor:
    _, rows, _ = _sizes(context.case)
    keys, values = _assembled(context.case, context.inputs, context.members, len(context.members) * rows)
    return _attend(context.case, context.args[0], keys, values, _ranges(context.args))


def _padding_dropped(context: pc.AnswerContext) -> torch.Tensor:
    count, rows, clip = _sizes(context.case)
    real = min(max(clip - context.place * rows, 0), rows)
    result: torch.Tensor = context.answer.clone()
    result.view(count, rows, -1)[:, real:] = 0.0
    return result


def _strided_heads(context: pc.AnswerContext) -> torch.Tensor:
    keys, values = _assembled(context.case, context.inputs, context.members, _sizes(context.case)[2])
    (heads, kv_heads), device = _heads(context.case), context.args[0].device
    index = torch.arange(heads, device=device) % kv_heads
    return _attend(context.case, context.args[0], keys[:, :, index], values[:, :, index], _ranges(context.args))


def _ranges_rotated(context: pc.AnswerContext) -> pc.Tree:
    return context.answer.roll(_sizes(context.case)[1], dims=0)


def _padded(case: pc.Case) -> bool:
    _, rows, clip = _sizes(case)
    return group_size(case) * rows > clip


KNOWN_WRONG_ANSWERS = (
    pc.wrong(
        "all_keys",
        "k_ranges ignored",
        _other_ranges(lambda c: [(0, c.case["ranges"] * _sizes(c.case)[2])] * c.case["ranges"]),
        lambda c: c["ranges"] > 1,
    ),
    pc.wrong(
        "own_range",
        "every range of queries sees its own range of keys",
        _other_ranges(lambda c: [(i * _sizes(c.case)[2], (i + 1) * _sizes(c.case)[2]) for i in range(c.case["ranges"])]),
        lambda c: c["see"] != "own",
    ),
    pc.wrong(
        "first_range",
        "the first range's keys for all queries",
        _other_ranges(lambda c: _ranges(c.args)[:1] * c.case["ranges"]),
        lambda c: c["ranges"] > 1,
    ),
    pc.wrong(
        "ranges_of_another_call",
        "every range of queries sees the keys of the next, as it might in another call",
        _other_ranges(lambda c: _ranges(c.args)[1:] + _ranges(c.args)[:1]),
        lambda c: c["ranges"] > 1,
    ),
    pc.wrong("rank_major", "keys in the order of ranks instead of ranges", _rank_major, lambda c: c["ranges"] > 1),
    pc.wrong(
        "padding_kept",
        "clip_token_nums ignored, which shifts keys of later ranges",
        _padding_kept,
        lambda c: _padded(c) and c["ranges"] > 1,
    ),
    pc.wrong("padding_dropped", "zeros for the queries of padding tokens", _padding_dropped, _padded),
    pc.wrong("strided_key_heads", "query head h with key head h mod Hkv", _strided_heads, lambda c: _heads(c)[1] > 1),
    pc.wrong("ranges_rotated", "every range's output in the place of the next", _ranges_rotated, lambda c: c["ranges"] > 1),
    pc.wrong("no_scale", "scores not divided by sqrt(D)", lambda c: c.by(_answer, scale=1.0)),
)

ALTERNATIVE_SOLUTIONS = pc.alternatives(
    dense_fp32=_answer, rounded_probabilities_by_block=lambda case, inputs, rank: _answer(case, inputs, rank, rounded=True, blocks=4)
)
