"""The fused expert-parallel mixture-of-experts layers: right and wrong answers, error model, cost, and what their declarations share.

See :mod:`peerlane.problems.families.moe_layer` for the function and its arguments.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from peerlane.problems import contract as pc
from peerlane.problems.families import moe
from peerlane.problems.families.collective import FP32, group_layout
from peerlane.problems.families.matmul import FLOP_UNIT, FP64
from peerlane.problems.families.moe_layer import inputs, owners_of, reference

RowFunction = Callable[[torch.Tensor, Sequence[Any]], torch.Tensor]
"""Of rows (n, H) and of the arguments of the rank that owns the expert."""


def _softmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.softmax(-1)


def tokens_and_weights(
    args: Sequence[Any], dtype: torch.dtype, softmax: Callable[[torch.Tensor], torch.Tensor] = _softmax
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rank's tokens (T, H) as they are, and the weight of every expert for them in ``dtype``, (T, E), 0 where it is not chosen."""
    hidden, gate_weight, gate_bias = args[:3]
    tokens = hidden.reshape(-1, hidden.shape[-1])
    logits = F.linear(tokens.to(dtype), gate_weight.to(dtype), None if gate_bias is None else gate_bias.to(dtype))
    best = softmax(logits).topk(args[-2], dim=-1)
    return tokens, torch.zeros_like(logits).scatter_(1, best.indices, best.values)


@dataclasses.dataclass(frozen=True)
class Expert:
    """How a rank's feed-forward function is computed: rightly, or with a part left out."""

    factors: tuple[bool, bool, bool] = (True, True, True)
    biases: bool = True
    exchanged: bool = False

    def _affine(self, rows: torch.Tensor, args: Sequence[Any], index: int) -> torch.Tensor:
        layer, factors = args[3 + index], args[6:-3]
        bias = layer.bias.detach().to(rows.dtype) if self.biases else None
        result = F.linear(rows, layer.weight.detach().to(rows.dtype), bias)
        if factors and self.factors[index]:
            a, b = (factor.to(rows.dtype) for factor in factors[2 * index : 2 * index + 2])
            result = result + F.linear(F.linear(rows, a), b)
        return result

    def __call__(self, rows: torch.Tensor, args: Sequence[Any]) -> torch.Tensor:
        """Rows (n, H), with every operation in their dtype; ``args`` are the arguments of the rank that owns the expert."""
        gate, up = (self._affine(rows, args, index) for index in ((1, 0) if self.exchanged else (0, 1)))
        return self._affine(F.silu(gate) * up, args, 2)


def _channel_sizes(inputs: pc.Inputs, owners: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """(H,): the root mean square, over the owners, of what writes a channel: the down projection's row and that of its low-rank factor."""
    writers = [matrix for q in owners for matrix in (inputs[q][5].weight, *inputs[q][11:-3])]
    return torch.stack([matrix.detach().to(dtype).square().sum(1) for matrix in writers]).sum(0).div(len(owners)).sqrt()


def combine(
    inputs: pc.Inputs, tokens: torch.Tensor, weights: torch.Tensor, owners: Sequence[int], expert: RowFunction | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer's answer (T, H) in the weights' dtype, and of what size the experts' rows are, added with their weights, (T, H).

    A row's size in a channel is the channel's size times the root mean square of the row in such units.
    """
    expert = expert or Expert()
    channels = _channel_sizes(inputs, owners, weights.dtype)
    value = weights.new_zeros((tokens.shape[0], tokens.shape[1]))
    size = weights.new_zeros((tokens.shape[0], 1))
    for part, q in zip(weights.chunk(len(owners), dim=1), owners, strict=True):
        weight = part.sum(1)
        hit = weight.nonzero().squeeze(1)
        if hit.numel():
            rows = expert(tokens[hit].to(weights.dtype), inputs[q])
            value.index_add_(0, hit, rows * weight[hit].unsqueeze(1))
            size.index_add_(0, hit, (rows / channels).square().mean(1, keepdim=True).sqrt() * weight[hit].unsqueeze(1))
    return value, size * channels


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    tokens, weights = tokens_and_weights(inputs[rank], FP64)
    value, size = combine(inputs, tokens, weights, owners_of(case, rank))
    return pc.Expected("output", value, case.dtype, magnitude=size)


def tolerance(case: pc.Case) -> Mapping[str, pc.Tolerance]:
    """Magnitude is the size of the experts' rows in the channel, added with the weights: see :func:`combine`.

    u is the unit roundoff of the dtype. A chosen logit errs by u / 2, and another one by up to 2 u. A probability errs by u, which all
    channels of a row share. An expert's row errs by about u in its norm, from four roundings within the expert and its own. The weighted
    sum errs by u / 2 more.

    Together that is 1.5 u over many rows and 2.5 u over few. It is up to 5 u in one row whose largest channels outweigh the others. The
    bounds are twice that, and a quarter more with low-rank factors. An element may be off by five standard deviations; on GPUs it was half
    as much again. In float32 the order of sums takes the place of rounding, with 16 unit roundoffs.
    """
    u = pc.UNIT_ROUNDOFF[case.dtype] * (16 if case.dtype == FP32 else 1)
    room = 1.25 if "low_rank" in case.params else 1.0
    size = "the weighted sum over the token's experts of the root mean square of their output row, scaled to the channel"
    return {"output": pc.Tolerance(relative=4 * u, magnitude=20 * room * u, normwise=5 * room * u, rowwise=10 * room * u, size=size)}


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """Tokens travel once per rank that has one of their experts, and come back; or the weights travel instead, if they are smaller.

    Traffic and work are the mean over the ranks, which the busiest, who alone bounds the time, cannot fall below.
    """
    owners, hidden, inner, size = owners_of(case, rank), case["hidden"], case["inner"], case.dtype.itemsize
    ranks, experts, depth = len(owners), moe.experts_of(case), case.params.get("low_rank", 0)
    tokens = sum(moe.tokens_of(case, q) for q in owners) / ranks
    pairs = tokens * _ranks_per_token(case, ranks)
    remote = 0.0 if case.params.get("pattern") == "own" else pc.traffic.all_to_all(pairs, ranks)
    parameters = 3 * hidden * inner + 2 * inner + hidden + 3 * depth * (hidden + inner)
    port = min(2 * remote * hidden, (ranks - 1) * parameters) * size
    return pc.Cost(
        hbm_bytes=(2 * tokens * hidden + parameters + experts * hidden) * size,
        egress_bytes=port,
        ingress_bytes=port,
        flops={FLOP_UNIT[case.dtype]: 2 * tokens * hidden * experts + 6 * pairs * (hidden * inner + depth * (hidden + inner))},
        typical=True,
    )


def _ranks_per_token(case: pc.Case, ranks: int) -> float:
    match case.params.get("pattern"):
        case "one_rank" | "together" | "own" | "rotated":
            return 1.0
        case "spread":
            return float(case["k"])
        case _ if "uneven" in case.params:
            return max(1.0, float(case["k"]) * ranks / moe.experts_of(case))
        case _:
            return moe.distinct_ranks(case, ranks)


def _wide(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    """All in float32, a token's weights on one rank added before its row is multiplied, one rounding."""
    tokens, weights = tokens_and_weights(inputs[rank], FP32)
    return combine(inputs, tokens, weights, owners_of(case, rank))[0].to(case.dtype)


def _narrow(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    """Every operation rounded, and the last rank's experts added first."""
    tokens, weights = tokens_and_weights(inputs[rank], case.dtype)
    owners = owners_of(case, rank)
    reordered = torch.cat(weights.chunk(len(owners), dim=1)[::-1], dim=1)
    return combine(inputs, tokens, reordered, owners[::-1])[0]


ALTERNATIVE_SOLUTIONS = pc.alternatives(fp32_accumulation=_wide, every_step_rounded=_narrow)

Reweigh = Callable[[torch.Tensor, pc.Case], torch.Tensor]


def _spoilt(
    *,
    weights: Reweigh | None = None,
    owners: Callable[[pc.Case, int], Sequence[int]] = owners_of,
    expert: RowFunction | None = None,
    router: Callable[[pc.AnswerContext], tuple[Any, ...]] = lambda context: context.args,
    softmax: Callable[[torch.Tensor], torch.Tensor] = _softmax,
) -> Callable[[pc.AnswerContext], torch.Tensor]:
    """A wrong answer in float32: other weights, other owners, another expert, another router (whose arguments' is used) or softmax."""

    def answer(context: pc.AnswerContext) -> torch.Tensor:
        args = (context.args[0], *router(context)[1:])
        tokens, own = tokens_and_weights(args, FP32, softmax)
        changed = own if weights is None else weights(own, context.case)
        return combine(context.inputs, tokens, changed, owners(context.case, context.rank), expert)[0].to(context.case.dtype)

    return answer


def _smallest_dropped(weights: torch.Tensor, case: pc.Case) -> torch.Tensor:
    least = weights.masked_fill(weights == 0, math.inf).amin(1, keepdim=True)
    return weights.masked_fill(weights == least, 0.0)


def _renormalised(weights: torch.Tensor, case: pc.Case) -> torch.Tensor:
    return weights.div(weights.sum(1, keepdim=True))


def _equal(weights: torch.Tensor, case: pc.Case) -> torch.Tensor:
    return weights.sum(1, keepdim=True).div(case["k"]).mul(weights != 0)


def _interleaved(weights: torch.Tensor, case: pc.Case) -> torch.Tensor:
    """Expert e on rank e mod P."""
    ranks = len(owners_of(case, 0))
    return weights.view(weights.shape[0], weights.shape[1] // ranks, ranks).transpose(1, 2).flatten(1)


def _capacity(weights: torch.Tensor, case: pc.Case) -> torch.Tensor:
    """No expert takes more than 1.25 times its equal share of a rank's tokens."""
    room = math.ceil(1.25 * case["k"] * weights.shape[0] / weights.shape[1])
    return weights.masked_fill((weights != 0).cumsum(0) > room, 0.0)


def _neighbour(context: pc.AnswerContext) -> tuple[Any, ...]:
    return context.inputs[(context.rank + 1) % context.case.world_size]


def _first_neighbours(case: pc.Case, rank: int) -> Sequence[int]:
    """As many ranks as own the experts, but the first ones of the world."""
    return range(len(owners_of(case, rank)))


def known_wrong_answers(presets: Sequence[pc.Preset]) -> tuple[pc.KnownWrongAnswer, ...]:
    """The wrong answers of the layer, each restricted to the cases in which it is wrong."""

    def where(condition: Callable[[pc.Case], bool]) -> tuple[str, ...]:
        return pc.names_of(presets, condition)

    def pattern(case: pc.Case) -> Any:
        return case.params.get("pattern")

    def ranks(case: pc.Case) -> int:
        return len(owners_of(case, 0))

    def experts(case: pc.Case) -> int:
        return moe.experts_of(case)

    several = where(lambda c: c["k"] > 1)
    unlike = where(lambda c: c["k"] > 1 and pattern(c) not in ("one_rank", "together", "own"))
    left_out = where(lambda c: experts(c) >= 2 * c["k"])
    unequal = where(lambda c: ranks(c) > 1 and experts(c) > ranks(c))
    low_rank = where(lambda c: "low_rank" in c.params and c.params.get("factors") != "zero")
    found = [
        pc.wrong(
            "owners_reversed",
            "the experts in the order of the last rank first",
            _spoilt(owners=lambda case, rank: owners_of(case, rank)[::-1]),
            where(lambda c: ranks(c) > 1),
        ),
        pc.wrong("experts_interleaved", "expert e on rank e mod P", _spoilt(weights=_interleaved), unequal),
        pc.wrong("smallest_dropped", "a token's expert of the smallest weight left out", _spoilt(weights=_smallest_dropped), several),
        pc.wrong("equal_weights", "a token's weights replaced by their mean", _spoilt(weights=_equal), unlike),
        pc.wrong("renormalised", "a token's weights made to add up to 1", _spoilt(weights=_renormalised), left_out),
        pc.wrong(
            "capacity",
            "rows above 1.25 times an equal share dropped",
            _spoilt(weights=_capacity),
            where(lambda c: pattern(c) == "one_rank" or c.params.get("exponent", 0.0) >= 1.0),
        ),
        pc.wrong(
            "router_without_bias",
            "gate_bias ignored",
            _spoilt(router=lambda c: (*c.args[:2], None, *c.args[3:])),
            where(lambda c: c.params.get("bias", True) and experts(c) > 1 and pattern(c) != "one_rank"),
        ),
        pc.wrong(
            "neighbours_router", "the next rank's router", _spoilt(router=_neighbour), where(lambda c: bool(c.params.get("own_routers")))
        ),
        pc.wrong(
            "first_ranks_router",
            "the router of the world's first rank",
            _spoilt(router=lambda c: c.inputs[0]),
            where(lambda c: bool(c.params.get("own_routers"))),
        ),
        pc.wrong(
            "router_without_maximum",
            "exponentials of logits as they are",
            _spoilt(softmax=lambda logits: logits.exp().div(logits.exp().sum(-1, keepdim=True))),
            where(lambda c: "logits" in c.params),
        ),
        pc.wrong(
            "no_expert_bias",
            "the experts' biases left out",
            _spoilt(expert=Expert(biases=False)),
            where(lambda c: c.params.get("factors") != "alone" and "scale" not in c.params),
        ),
        pc.wrong("gate_and_up_exchanged", "silu of the wrong projection", _spoilt(expert=Expert(exchanged=True))),
        pc.wrong("tokens_rotated", "every row in the next token's place", lambda c: c.answer.roll(1, 0)),
        pc.wrong(
            "first_ranks_experts",
            "the experts of the world's first ranks",
            _spoilt(owners=_first_neighbours),
            where(
                lambda c: any(moe.tokens_of(c, q) and list(owners_of(c, q)) != list(_first_neighbours(c, q)) for q in range(c.world_size))
            ),
        ),
    ]
    if low_rank:
        for index, name in enumerate(("gate", "up", "down")):
            kept = Expert(factors=(index != 0, index != 1, index != 2))
            found.append(pc.wrong(f"no_{name}_factors", f"the low-rank factors of {name} left out", _spoilt(expert=kept), low_rank))
    return tuple(item for item in found if item.cases != ())


ROUTING = (
    "Tokens x (T, H) are hidden_states with its leading axes flattened. Their probabilities are softmax(x gate_weight^T + gate_bias) over "
    "the E experts. A token goes to its top_k experts; their probabilities, as they are, are its weights. The group has P ranks and is "
    "the world if None. Rank q holds experts [q E/P, (q+1) E/P). All its experts are the same function: "
)
SWIGLU = "down(silu(gate(z)) * up(z)) with its three layers. "
RESULT = (
    "Returns (T, H) in the inputs' dtype: for every token the sum of its weights times its experts' results. Every rank routes by its own "
    "router. T may differ from rank to rank and be 0. Logits, probabilities and everything after them may be rounded or kept wider."
)
NOTES = (
    "The public benchmark's logits have a standard deviation of 32, so nearly all weight is on one expert. Half of the rows could be left "
    "out unseen, while another rounding of a logit changes the answer.",
    "Here logits are planted. Those of the chosen experts lie between -0.9 and 0.9. All others are lower by at least half a unit, a "
    "hundred times the error of bfloat16. The chosen experts have about half of the weight.",
    "In one case all logits are about 104, in steps of a half. Rounding to bfloat16 does not change these.",
    "All ranks have the same router, as in a model. One case has a router per rank, as the public benchmark always has.",
    "Experts keep the size of their input, where the public benchmark's are mostly bias.",
    "Channels of tokens and results differ in size by powers of two, from 1/16 to 16. The weights that read the tokens compensate. "
    "Elements are compared in units of their channel.",
    "Comparison is by row and over all, where the public benchmark's is by element. So fused and wider computations pass. The order of a "
    "token's sum is free.",
)


def layer(presets: Sequence[pc.Preset], *, notes: Sequence[str], **fields: Any) -> pc.Problem:
    """A problem with this module's function; ``fields`` are what it does not share with the others, or replaces."""
    return pc.Problem(
        **{
            "category": "expert_parallel",
            "parallelism": ("expert",),
            "reference": reference,
            "inputs": inputs,
            "oracle": oracle,
            "tolerance": tolerance,
            "cost": cost,
            "presets": tuple(presets),
            "known_wrong_answers": known_wrong_answers(presets),
            "alternative_solutions": ALTERNATIVE_SOLUTIONS,
            "process_groups": group_layout,
            "graph": False,
            "graph_reason": "the router decides how many rows go to which rank, and the host must know that to exchange them",
            "notes": (*notes, *NOTES),
            **fields,
        }
    )
