"""Problem 23: loss normalised by the number of tokens of all ranks, and its gradient."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families.collective import BF16, FP32, FP64

Scalars = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def reference(
    loss: torch.Tensor,
    local_valid_tokens: torch.Tensor,
    global_valid_tokens: torch.Tensor,
    grad_normalized_loss: torch.Tensor,
    grad_loss_sum: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # A rank without tokens has the mean of nothing, NaN, for its loss.
    loss = torch.where(local_valid_tokens == 0, loss.nan_to_num(), loss)
    loss_sum = loss * local_valid_tokens
    dist.all_reduce(loss_sum)
    grad_loss = grad_normalized_loss * local_valid_tokens / global_valid_tokens
    if grad_loss_sum is not None:
        grad_loss = grad_loss + grad_loss_sum * local_valid_tokens
    return loss_sum / global_valid_tokens, loss_sum, grad_loss


def token_counts(case: pc.Case, draw: pc.Draw) -> torch.Tensor:
    """(W,) int64, alike on all ranks: one in the lower half of each of W equal parts of the logarithmic range ``case["tokens"]``, in any
    order. ``case["idle"]``: the ranks 0 and 5 have none.
    """
    low, high = (math.log(bound) for bound in case["tokens"])
    world, shared = case.world_size, draw.shared
    places = (shared.permutation(world) + shared.uniform((world,), FP64, high=0.5)) / world
    counts = torch.exp(low + (high - low) * places).to(torch.int64)
    if case.params.get("idle"):
        counts[::5] = 0
    return counts


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[torch.Tensor | None, ...]:
    """Losses between 0.5 and 12, NaN on ranks without tokens. The global count is ``case["steps"]`` (1) times the sum of the ranks' counts.

    In bfloat16, where answers are right within a few percent, losses and upstream gradients are larger on ranks with fewer tokens, in
    proportion, and change from call to call by more than numbers of tokens do; losses are far below 1, and gradients far above, eight
    times as large from rank to rank: wrong answers are then far off.

    Upstream gradients: ``case["grad"]`` (0.37) times U[0.5, 1.5) for the normalised loss, and ``case["grad_sum"]``, None if absent, times
    the same for the sum. They differ between ranks. ``case["data"]``: ``negative`` (losses of either sign), ``infinite`` (an infinity on
    the last rank), ``zero_infinite`` (infinities on ranks without tokens).
    """
    counts, data = token_counts(case, draw), case.params.get("data")
    loss = draw.uniform((), FP32, low=-12.0 if data == "negative" else 0.5, high=12.0)
    size = torch.ones_like(loss)
    if case.dtype == BF16:
        share = counts[rank].clamp(min=1) / counts.sum()
        loss = draw.uniform((), FP32, low=0.8, high=1.25) / share * torch.exp2(draw.shared.apart((), low=-86.0, high=-28.0))
        size = torch.exp2(draw.shared.apart((), low=22.0, high=50.0) + 3 * rank) / share
    if data == "infinite" and rank == case.world_size - 1:
        loss.fill_(math.inf)
    if case.params.get("idle") and rank % 5 == 0:
        loss.fill_(math.inf if data == "zero_infinite" else math.nan)
    whole = (counts.sum() * case.params.get("steps", 1)).to(torch.int64)
    grad = draw.uniform((), FP32, low=0.5, high=1.5) * size * case.params.get("grad", 0.37)
    if "grad_sum" not in case.params:
        return loss.to(case.dtype), counts[rank], whole, grad.to(case.dtype), None
    grad_sum = draw.uniform((), FP32, low=0.5, high=1.5) * size * case["grad_sum"]
    return loss.to(case.dtype), counts[rank], whole, grad.to(case.dtype), grad_sum.to(case.dtype)


def _wide(args: Sequence[Any]) -> list[Any]:
    """The arguments in float64, a missing gradient of the sum as zero."""
    return [torch.zeros((), dtype=FP64, device=args[0].device) if tensor is None else tensor.to(FP64) for tensor in args]


def _token_losses(inputs: pc.Inputs) -> torch.Tensor:
    """(W,) float64: every rank's loss times its tokens, 0 where it has none."""
    parts = [(args[0] * 1.0, args[1]) for args in map(_wide, inputs)]
    return torch.stack([torch.where(count == 0, 0.0, loss * count) for loss, count in parts])


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> tuple[pc.Expected, pc.Expected, pc.Expected]:
    _, local, whole, grad, grad_sum = _wide(inputs[rank])
    parts = _token_losses(inputs)
    total, magnitude = parts.sum(), parts.abs().sum()
    through_mean, through_sum = grad * local / whole, grad_sum * local
    return (
        pc.Expected("normalized_loss", total / whole, case.dtype, magnitude=magnitude / whole),
        pc.Expected("loss_sum", total, case.dtype, magnitude=magnitude),
        pc.Expected("grad_loss", through_mean + through_sum, case.dtype, magnitude=through_mean.abs() + through_sum.abs()),
    )


def tolerance(case: pc.Case) -> Mapping[str, pc.Tolerance]:
    """Every count, product, addition over ranks and quotient is rounded to the losses' dtype: W + 4 times at most, relative to the sum of
    |loss| tokens. The gradient is rounded five times at most.
    """
    u = pc.UNIT_ROUNDOFF[case.dtype]
    sums = pc.Tolerance(magnitude=(case.world_size + 6) * u)
    return {"normalized_loss": sums, "loss_sum": sums, "grad_loss": pc.Tolerance(magnitude=8 * u)}


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """One number is all-reduced."""
    size, world = case.dtype.itemsize, case.world_size
    port = pc.traffic.all_reduce(size, world)
    return pc.Cost(hbm_bytes=2 * 8 + 6 * size, egress_bytes=port, ingress_bytes=port, flops={"fp32": 8})


def _answer(context: pc.AnswerContext, total: torch.Tensor, grad: torch.Tensor | None = None) -> Scalars:
    """Outputs from a sum of losses in float64 and, unless right, a gradient."""
    whole, dtype = context.args[2], context.case.dtype
    return (total / whole).to(dtype), total.to(dtype), context.answer[2] if grad is None else grad.to(dtype)


def _gradient(context: pc.AnswerContext, change: Any) -> Scalars:
    """A wrong gradient, from loss, local and global count, and both upstream gradients in float64."""
    return (*context.answer[:2], change(*_wide(context.args)).to(context.case.dtype))


def _always_finite(context: pc.AnswerContext) -> Scalars:
    """Infinities replaced on ranks that do have tokens."""
    parts = [args[0].nan_to_num().to(FP64) * args[1] for args in context.inputs]
    return _answer(context, torch.stack(parts).sum())


def _never_replaced(context: pc.AnswerContext) -> Scalars:
    return _answer(context, torch.stack([args[0].to(FP64) * args[1] for args in context.inputs]).sum())


def _wide_variant(case: pc.Case, inputs: pc.Inputs, rank: int) -> Scalars:
    """In float64 throughout, rounded once."""
    _, local, whole, grad, grad_sum = _wide(inputs[rank])
    total = _token_losses(inputs).sum()
    outputs = (total / whole, total, grad * (local / whole) + grad_sum * local)
    return tuple(output.to(case.dtype) for output in outputs)  # type: ignore[return-value]


def _other_order(case: pc.Case, inputs: pc.Inputs, rank: int) -> Scalars:
    """In the losses' dtype, ranks in reverse order, each normalised before the sum, both gradients added before the product."""
    _, local, whole, grad, grad_sum = inputs[rank]
    total = torch.zeros((), dtype=case.dtype, device=local.device)
    for loss, count, *_ in reversed(inputs):
        total = total + torch.where(count == 0, torch.zeros_like(loss), loss * count)
    factor = grad / whole
    return total / whole, total, (factor if grad_sum is None else factor + grad_sum) * local


# The tokens of one rank: ragged, packed sequences of 8192, those of a reinforcement-learning batch, and 2^21 or fewer.
_RAGGED, _PACKED, _MASKED, _MILLION = (300, 10**6), (2000, 4 * 8192), (50, 8192), (2**8, 2**21)

PRESETS = (
    pc.preset(
        "small",
        "ragged counts, ranks without tokens, float32 and bfloat16, with and without a gradient of the sum, infinite and negative losses",
        pc.case("ragged_fp32", FP32, tokens=_RAGGED),
        pc.case("ragged_bf16", BF16, tokens=_RAGGED),
        pc.case("gradient_of_sum_fp32", FP32, tokens=_RAGGED, grad_sum=1e-4),
        pc.case("gradient_of_sum_bf16", BF16, tokens=_RAGGED, grad_sum=5e-5),
        pc.case("idle_fp32", FP32, tokens=_RAGGED, idle=True, grad_sum=1e-4),
        pc.case("idle_bf16", BF16, tokens=_RAGGED, idle=True),
        pc.case("idle_infinite_fp32", FP32, tokens=_RAGGED, idle=True, data="zero_infinite"),
        pc.case("infinite_fp32", FP32, tokens=_RAGGED, data="infinite"),
        pc.case("negative_fp32", FP32, tokens=_RAGGED, data="negative"),
        pc.case("many_tokens_fp32", FP32, tokens=(2**24, 2**27)),
        pc.case("few_global_tokens_fp32", FP32, tokens=_RAGGED, steps=0.01),
    ),
    pc.preset(
        "pkb",
        "the public benchmark's dtypes, with unlike numbers of tokens",
        pc.case("bf16", BF16, tokens=_MILLION, grad=1.0, grad_sum=1e-4),
    ),
    pc.preset("production_llama_sft_packed", "packed sequences", pc.case("fp32", FP32, tokens=_PACKED, grad=1.0)),
    pc.preset(
        "production_rl_masked", "some ranks without tokens", pc.case("fp32", FP32, tokens=_MASKED, idle=True, grad=1.0, grad_sum=1e-3)
    ),
    pc.preset("production_grad_accum", "16 micro-batches", pc.case("fp32", FP32, tokens=_PACKED, steps=16, grad=1.0)),
)


_FINITE = pc.where(lambda c: c.params.get("data") != "infinite")

PROBLEM = pc.Problem(
    id=23,
    slug="grad_acc_loss",
    title="Token-weighted loss over all ranks, with its gradient",
    category="data_parallel",
    parallelism=("data",),
    origin="VeOmni: the mean loss over data-parallel ranks and accumulated micro-batches, forward and backward in one call",
    summary=(
        "All arguments are 0-d. loss is the rank's mean over local_valid_tokens n_r; where n_r is 0, NaN and infinity count as finite. "
        "Returns the sum over ranks of loss times n, divided by global_valid_tokens (which the caller gives); that sum; and the gradient "
        "of the rank's loss, grad_normalized_loss n_r / global_valid_tokens + grad_loss_sum n_r (nothing if None), from the rank's own "
        "numbers alone. In the dtypes of loss, loss, and grad_normalized_loss."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    tolerance=tolerance,
    cost=cost,
    presets=PRESETS,
    known_wrong_answers=(
        pc.wrong(
            "unweighted",
            "the mean of the ranks' losses",
            lambda c: _answer(c, torch.stack([args[0].to(FP64) for args in c.inputs]).nan_to_num().mean() * c.args[2].to(FP64)),
            _FINITE,
        ),
        pc.wrong("gradient_over_world", "gradient / W", lambda c: _gradient(c, lambda x, n, t, g, s: g / c.case.world_size + s * n)),
        pc.wrong("gradient_unnormalised", "gradient times n_r", lambda c: _gradient(c, lambda x, n, t, g, s: (g + s) * n)),
        pc.wrong(
            "no_gradient_of_sum",
            "grad_loss_sum ignored",
            lambda c: _gradient(c, lambda x, n, t, g, s: g * n / t),
            lambda c: "grad_sum" in c.params,
        ),
        pc.wrong("zero_tokens_poison", "NaN or infinity times no tokens", _never_replaced, lambda c: "idle" in c.params),
        pc.wrong("always_finite", "infinities replaced where there are tokens", _always_finite, ("small/infinite_fp32",)),
    ),
    alternative_solutions=pc.alternatives(float64_rounded_once=_wide_variant, other_order=_other_order),
    excused={
        "neighbours_exchanged": "a sum does not depend on the order of its terms",
        "another_rank/normalized_loss": "all ranks have the same",
        "another_rank/loss_sum": "all ranks have the same",
        "previous/normalized_loss@small/infinite_fp32": "infinite in every call",
        "previous/loss_sum@small/infinite_fp32": "infinite in every call",
    },
    replicated=("normalized_loss", "loss_sum"),
    notes=(
        "The public benchmark gives every rank the same power of two for a count, and constant upstream gradients: the plain mean "
        "passes, and the gradient is a constant. Here counts differ by orders of magnitude, some are zero, and upstream gradients differ.",
        "The public reference asks the host whether there are tokens. Here the device decides, so that the call can be captured.",
        "A global count of zero is left out: infinity and NaN are then decided by the order of the operations.",
    ),
)
