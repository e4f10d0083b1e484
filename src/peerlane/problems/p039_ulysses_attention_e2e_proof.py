"""Wrong answers to problem 39 and other right ones. Evaluations do not import this module."""

from collections.abc import Callable, Sequence

import torch

from peerlane.problems import contract as pc
from peerlane.problems.families.collective import FP32, group_members
from peerlane.problems.p039_ulysses_attention_e2e import (
    FP64,
    _context,
    _dense,
    _future,
    _legacy_context,
    _output,
    _projected,
    _visible,
)


def _in_steps(
    case: pc.Case,
    inputs: pc.Inputs,
    rank: int,
    rounded: torch.dtype | None,
    sent: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
) -> torch.Tensor:
    """Dense attention in float32 arithmetic; with ``rounded``, every stage's result is rounded to that dtype.

    ``sent``: what becomes of projected tokens and of the context on their ways between ranks, in the default variant.
    """
    if case.variant == "pkb":
        context = _legacy_context(case, inputs, rank, causal=case["causal"], work=FP32, rounded=rounded)
    else:
        owners = _visible(case, rank, case["causal"])
        projected = [_projected(case, inputs, owner, FP32) for owner in owners]
        if rounded is not None:
            projected = [tensor.to(rounded).to(FP32) for tensor in projected]
        projected = [sent(tensor) for tensor in projected]
        q = projected[owners.index(rank)][:, :, 0]
        k, v = torch.cat([tensor[:, :, 1:] for tensor in projected], dim=1).unbind(2)
        hidden = _future(q.shape[1], k.shape[1], q.device) if case["causal"] else None
        context = sent(_dense(q, k, v, scale=case["depth"] ** -0.5, hidden=hidden, rounded=rounded))
    if rounded is not None:
        context = context.to(rounded).to(FP32)
    return _output(inputs, rank, context).to(case.dtype)


def _answer(
    context: pc.AnswerContext, *, owners: Sequence[int] | None = None, causal: bool | None = None, scale: float | None = None
) -> torch.Tensor:
    """The answer to another question: other owners of keys, mask or scale."""
    case, rank = context.case, context.rank
    masked = case["causal"] if causal is None else causal
    chosen = _visible(case, rank, masked) if owners is None else owners
    attended = _context(case, context.inputs, rank, owners=chosen, causal=masked, scale=scale)
    return _output(context.inputs, rank, attended).to(case.dtype)


def _legacy_answer(context: pc.AnswerContext, *, causal: bool | None = None) -> torch.Tensor:
    masked = context.case["causal"] if causal is None else causal
    attended = _legacy_context(context.case, context.inputs, context.rank, causal=masked, work=FP64)
    return _output(context.inputs, context.rank, attended).to(context.case.dtype)


def _farthest_dropped(context: pc.AnswerContext) -> torch.Tensor:
    """Without the keys of the last rank, or of the first under a causal mask, unless it sees no others."""
    visible = _visible(context.case, context.rank, context.case["causal"])
    return _answer(context, owners=(visible[1:] if context.case["causal"] else visible[:-1]) or visible)


def _later_ranks_visible(context: pc.AnswerContext) -> torch.Tensor:
    """A causal mask within the rank's own tokens only, whereas all of other ranks' keys count."""
    case, rank = context.case, context.rank
    q = _projected(case, context.inputs, rank, FP32)[:, :, 0]
    k, v = torch.cat([_projected(case, context.inputs, owner, FP32)[:, :, 1:] for owner in context.members], dim=1).unbind(2)
    local, place = q.shape[1], context.place
    hidden = torch.zeros(local, k.shape[1], dtype=torch.bool, device=q.device)
    hidden[:, place * local : (place + 1) * local] = _future(local, local, q.device)
    attended = _dense(q, k, v, scale=case["depth"] ** -0.5, hidden=hidden)
    return _output(context.inputs, rank, attended).to(case.dtype)


def _heads_rolled(context: pc.AnswerContext) -> torch.Tensor:
    """The right context with the heads of one rank in the place of another's."""
    case, rank = context.case, context.rank
    attended = _context(case, context.inputs, rank, owners=_visible(case, rank, case["causal"]), causal=case["causal"])
    per_rank = attended.shape[2] // len(group_members(case, rank))
    return _output(context.inputs, rank, attended.roll(per_rank, 2)).to(case.dtype)


def _no_maximum(context: pc.AnswerContext) -> torch.Tensor:
    """A softmax whose exponentials overflow."""
    case, rank = context.case, context.rank
    q = _projected(case, context.inputs, rank, FP32)[:, :, 0]
    owners = _visible(case, rank, False)
    k, v = torch.cat([_projected(case, context.inputs, owner, FP32)[:, :, 1:] for owner in owners], dim=1).unbind(2)
    weights = torch.exp(torch.einsum("bqhd,bkhd->bhqk", q, k) * case["depth"] ** -0.5)
    attended = torch.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdim=True), v)
    return _output(context.inputs, rank, attended).to(case.dtype)


_DEFAULT = pc.where(lambda c: c.variant == "default")

# Where one key takes all, it still does when scores are scaled.
_UNSATURATED = pc.where(lambda c: c.variant == "default" and "spread" not in c.params)

_CAUSAL = pc.where(lambda c: c.variant == "default" and c["causal"])

# In the public semantics a single head per group has nothing to attend to but itself.
_LEGACY_SEVERAL = ("small/public_full_bf16", "small/public_causal_fp32")

KNOWN_WRONG_ANSWERS = (
    pc.wrong("heads_attended", "heads of a rank attend to one another, in every position: the public semantics", _legacy_answer, _DEFAULT),
    pc.wrong("farthest_dropped", "one rank's keys left out", _farthest_dropped, _DEFAULT),
    pc.wrong(
        "mask_inverted",
        "a causal mask instead of none, or none instead of a causal mask",
        lambda c: _answer(c, causal=not c.case["causal"]),
        _DEFAULT,
    ),
    pc.wrong("later_ranks_visible", "a causal mask within the rank's own tokens only", _later_ranks_visible, _CAUSAL),
    pc.wrong("uniform", "equal weights for all keys", lambda c: _answer(c, scale=0.0), _DEFAULT),
    pc.wrong("unscaled", "scores not divided by sqrt(D)", lambda c: _answer(c, scale=1.0), _UNSATURATED),
    pc.wrong(
        "values_only",
        "every token attends to itself alone",
        lambda c: _output(c.inputs, c.rank, _projected(c.case, c.inputs, c.rank, FP32)[:, :, 2]).to(c.case.dtype),
        lambda c: _DEFAULT(c) or c.label in ("public_full_bf16", "public_causal_fp32"),
    ),
    pc.wrong("heads_rolled", "heads put together in the wrong order", _heads_rolled, _DEFAULT),
    pc.wrong("no_maximum", "exponentials that overflow", _no_maximum, ("small/large_scores_fp32",)),
    pc.wrong("positions_attended", "attention over the sequence, where the public semantics is asked for", _answer, _LEGACY_SEVERAL),
    pc.wrong(
        "heads_mask_inverted", "the mask over heads inverted", lambda c: _legacy_answer(c, causal=not c.case["causal"]), _LEGACY_SEVERAL
    ),
)

ALTERNATIVE_SOLUTIONS = pc.alternatives(
    wide=lambda case, inputs, rank: _in_steps(case, inputs, rank, None),
    rounded_stages=lambda case, inputs, rank: _in_steps(case, inputs, rank, case.dtype),
)
