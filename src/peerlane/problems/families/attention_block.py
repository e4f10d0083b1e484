"""What problems 55 and 56 share: an attention layer, from hidden states to its output projection, over a sequence-sharded context."""

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families import attention
from peerlane.problems.families.attention import Blocks, local_length, scale_of, visible
from peerlane.problems.families.collective import BF16, FP32, FP64

# How the queries at one place of a ring attend to its blocks.
Attend = Callable[[Blocks, int], torch.Tensor]
_SIZE = "the root of the sum of squares of the element's terms in the last product"


def attention_layer(
    hidden_states: torch.Tensor,
    w_qkv: torch.Tensor,
    w_o: torch.Tensor,
    heads: int,
    softmax_scale: float | None,
    causal: bool,
    cp_group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """hidden_states (B, S, H) @ w_qkv^T, ring attention over cp_group, @ w_o^T; w_qkv (3 h D, H): rows of Q, K and V, each head by head."""
    q, k, v = split_heads(hidden_states @ w_qkv.t(), heads)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    context = attention.ring_attention(q, k, v, scale, causal, cp_group)
    return context.flatten(2) @ w_o.t()


def split_heads(projected: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v (B, S, h, D) of (B, S, 3 h D)."""
    batch, length, width = projected.shape
    q, k, v = projected.view(batch, length, 3, heads, width // (3 * heads)).unbind(2)
    return q, k, v


def sized(
    w_qkv: torch.Tensor, w_o: torch.Tensor, shared: pc.Draw, *, states: torch.Tensor, outputs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """w_qkv (..., 3 h D, H) and w_o (..., H_out, h D) for hidden states whose channels are ``states`` times as large.

    Outputs become ``outputs`` times as large, channel by channel; q, 1 / k and v differ in size by channel as well. All sizes are powers of
    two, so that nothing else changes, not by a bit; but no tensor that ranks may exchange fits a code with one scale for neighbours.
    """
    pairs, values = (shared.octaves((w_o.shape[-1],)) for _ in "kv")
    rows = torch.cat([pairs, 1 / pairs, values]).unsqueeze(-1)
    return w_qkv * (rows / states).to(w_qkv.dtype), w_o * (outputs.unsqueeze(-1) / values).to(w_o.dtype)


def draw_hidden(case: pc.Case, ring: int, place: int, shared: pc.Draw, states: torch.Tensor) -> torch.Tensor:
    """The hidden states (B, S, H) at one place of a ring, N(0, 1) times ``states`` (H,), equal on all ranks that hold this place.

    ``case["pattern"]``: ``sink``: the first token is twice as large, so that many queries attend to little else; ``nan_last``: those
    of the last place are NaN, for causal cases, where no other place may look at them; ``large`` and ``growing``: two channels are the
    same for all tokens of a place, for :func:`shift_scores`, and with ``growing`` the second grows from place to place.
    """
    local = local_length(case, ring)
    whole = shared.normal((case["batch"], ring * local, case["hidden"]), case.dtype) * states.to(case.dtype)
    pattern = case.params.get("pattern")
    if pattern == "sink":
        whole[:, 0] *= 2.0
    elif pattern == "nan_last":
        whole[:, -local:] = math.nan
    elif pattern in ("large", "growing"):
        whole[:, :, 0] = states[0]
        for first in range(ring):
            whole[:, first * local : (first + 1) * local, 1] = states[1] / 8 * (1 + first if pattern == "growing" else 1)
    return whole[:, place * local : (place + 1) * local].clone()


def shift_scores(case: pc.Case, w_qkv: torch.Tensor, heads: int) -> None:
    """Makes all scores 1024 depth^-0.5 larger if ``case["pattern"]`` is ``large``: more than the exponentials of float32 can hold. With
    ``growing`` they are as much larger again from each place to the next, so that the last place seen has all the weight.

    One entry of every head's q reads the first channel of :func:`draw_hidden` alone, and that of its k the second one: powers of two, so
    that what is added to the scores is exact, and their differences within a place are those of other cases.
    """
    if case.params.get("pattern") in ("large", "growing"):
        rows = w_qkv.view(*w_qkv.shape[:-2], 3, heads, case["depth"], w_qkv.shape[-1])[..., :2, :, 0, :]
        rows.zero_()
        rows[..., 0, :, 0] = 64.0
        rows[..., 1, :, 1] = 128.0


def wide_product(tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """tokens (B, S, n) @ weight^T, weight (m, n), in float64."""
    return torch.matmul(tokens.to(FP64), weight.to(FP64).t())


def attended(case: pc.Case, xs: Sequence[torch.Tensor], w_qkv: torch.Tensor, heads: int, place: int) -> torch.Tensor:
    """The heads' outputs (B, S, h D) at one place of a ring with hidden states ``xs``, in float64."""
    seen = visible(place, len(xs), case["causal"])
    rows_q, rows_kv = w_qkv[: heads * case["depth"]], w_qkv[heads * case["depth"] :]
    q = wide_product(xs[place], rows_q)
    k, v = wide_product(torch.cat([xs[owner] for owner in seen], dim=1), rows_kv).chunk(2, dim=-1)
    q, k, v = (tensor.reshape(*tensor.shape[:2], heads, case["depth"]) for tensor in (q, k, v))
    return attention.attention(q, k, v, scale=scale_of(case), causal=case["causal"])[0].flatten(2)


def output_sized(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum over pairs (heads' outputs, w_o) of their products, and the size of its elements: their terms added in quadrature."""
    value = torch.stack([wide_product(heads_out, w_o) for heads_out, w_o in parts]).sum(0)
    squares = torch.stack([wide_product(heads_out.square(), w_o.to(FP64).square()) for heads_out, w_o in parts]).sum(0)
    return value, squares.sqrt()


def layer_tolerance(case: pc.Case, layers: int, cancels: bool) -> pc.Tolerance:
    """The magnitude is that of :func:`output_sized`: an element's size, in its channel, before anything cancels.

    Roundings of q, k, v, of the probabilities, of the heads' outputs and of the result, and of the scores through q and k: about five
    that cost 0.43 u each, 3.8e-3 in bfloat16 altogether, and spread by the projections over a row as its elements' sizes are. ``layers``
    one after the other add in quadrature. A short row with peaked scores errs by up to three times the average, an element by six times
    its row's average. In float32 there is the accumulation, and scores up to 30 that err by 30 u.
    """
    if case.dtype == FP32:
        return pc.Tolerance(magnitude=512 * pc.UNIT_ROUNDOFF[FP32] * layers, size=_SIZE)
    depth = layers**0.5
    return pc.Tolerance(magnitude=14 * pc.UNIT_ROUNDOFF[BF16] * depth, normwise=None if cancels else 1e-2 * depth, size=_SIZE)


def layer_flops(case: pc.Case, heads: int, ring: int, out: int) -> float:
    """Of the projections and of a rank's even share of attention to the keys that are seen."""
    local, depth = local_length(case, ring), case["depth"]
    projections = 2 * local * heads * depth * (3 * case["hidden"] + out)
    pairs = attention.visible_pairs((ring - 1) / 2, ring, local, case["causal"])
    return float(case["batch"] * (projections + 4 * heads * depth * pairs))


def ring_bytes(case: pc.Case, heads: int, ring: int) -> float:
    """Bytes out of and into a rank for the ring; hidden states to compute keys and values from go instead of these, if they are fewer."""
    token, width = case["batch"] * local_length(case, ring) * case.dtype.itemsize, heads * case["depth"]
    queries_outputs = token * (min(width, case["hidden"]) + width)
    return attention.shared_traffic(ring, case["causal"], token * min(2 * width, case["hidden"]), queries_outputs)


def narrow(case: pc.Case, xs: Sequence[torch.Tensor], w_qkv: torch.Tensor, heads: int, *, rounded: bool = False) -> Blocks:
    """q, k and v of every place of a ring, in float32, or rounded to the dtype."""
    dtype = case.dtype if rounded else FP32
    return [split_heads(torch.matmul(x.to(FP32), w_qkv.to(FP32).t()).to(dtype), heads) for x in xs]


def projected(heads_out: torch.Tensor, w_o: torch.Tensor) -> torch.Tensor:
    """The output projection, in float32."""
    return torch.matmul(heads_out.flatten(2).to(FP32), w_o.to(FP32).t())


def exact(case: pc.Case, scale: float | None = None) -> Attend:
    """Attention as it should be, in the blocks' dtype; or with another scale, which is wrong."""

    def attend(blocks: Blocks, place: int) -> torch.Tensor:
        seen = visible(place, len(blocks), case["causal"])
        return attention.dense(blocks, place, seen, causal=case["causal"], scale=scale_of(case) if scale is None else scale)

    return attend


def blockwise(case: pc.Case) -> Attend:
    """Attention with rounded probabilities, as flash kernels have it."""
    return lambda blocks, place: attention.flash(blocks, place, causal=case["causal"], scale=scale_of(case))


def _local_only(case: pc.Case) -> Attend:
    """A wrong answer: no ring."""
    return lambda blocks, place: attention.dense(blocks, place, [place], causal=case["causal"], scale=scale_of(case))


def _uniform(case: pc.Case) -> Attend:
    """A wrong answer: the mean of what can be seen."""
    return lambda blocks, place: attention.mean_of_visible(blocks, place, causal=case["causal"])


def _inverted(case: pc.Case) -> Attend:
    """A wrong answer: the mask where there should be none, or none."""
    return lambda blocks, place: attention.mask_inverted(blocks, place, causal=case["causal"], scale=scale_of(case))


def _no_maximum(case: pc.Case) -> Attend:
    """A wrong answer: exponentials of scores as they are."""
    return lambda blocks, place: attention.without_maximum(blocks, place, causal=case["causal"], scale=scale_of(case))


def _first_maximum(case: pc.Case) -> Attend:
    """A wrong answer: exponentials of scores less the maximum of the rank's own block, the first one that it sees."""
    return lambda blocks, place: attention.without_maximum(blocks, place, causal=case["causal"], scale=scale_of(case), own=True)


def _interleaved(case: pc.Case) -> Attend:
    """A wrong answer: rows of w_qkv taken to hold q, k and v head by head instead of all of Q, all of K, all of V."""

    def attend(blocks: Blocks, place: int) -> torch.Tensor:
        mixed = []
        for block in blocks:
            batch, length, heads, depth = block[0].shape
            columns = torch.stack(block, dim=2).view(batch, length, heads, 3, depth)
            q, k, v = columns.unbind(3)
            mixed.append((q, k, v))
        return exact(case)(mixed, place)

    return attend


def wrong_answers(
    layer: Callable[[pc.Case, pc.Inputs, int, Attend], torch.Tensor],
    *,
    ring: pc.Where,
    unequal: pc.Where | None = None,
    several_heads: pc.Where | None = None,
) -> tuple[pc.KnownWrongAnswer, ...]:
    """Wrong kinds of attention in ``layer(case, inputs, rank, attend)``.

    The arguments name the cases in which a rank needs others' keys, in which it matters how much a query sees of each key, and those that
    have several heads (None: all cases).
    """

    def wrong(name: str, why: str, attend: Callable[[pc.Case], Attend], cases: pc.Where | None) -> pc.KnownWrongAnswer:
        return pc.wrong(name, why, lambda c: layer(c.case, c.inputs, c.rank, attend(c.case)), cases)

    def pattern(*names: str) -> pc.Where:
        return lambda c: c.params.get("pattern") in names

    return (
        wrong("no_ring", "attention to the rank's own keys", _local_only, ring),
        wrong("uniform", "the mean of the values that can be seen", _uniform, unequal),
        wrong("mask_inverted", "a causal mask instead of none, or none instead of a causal mask", _inverted, unequal),
        wrong("interleaved_rows", "rows of w_qkv taken to be q, k and v of one head after the other", _interleaved, several_heads),
        wrong("default_scale", "softmax_scale ignored", lambda case: exact(case, case["depth"] ** -0.5), lambda c: "scale" in c.params),
        wrong("no_maximum", "exponentials of scores as they are", _no_maximum, pattern("large", "growing")),
        wrong("first_maximum", "exponentials of scores less the maximum of the first block", _first_maximum, pattern("growing")),
    )
