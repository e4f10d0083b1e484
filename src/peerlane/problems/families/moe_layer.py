"""What the fused expert-parallel mixture-of-experts layers share: the function and its arguments.

One call routes a rank's tokens, sends them to the ranks of their experts, applies those ranks' feed-forward function and adds up what
comes back. All experts of a rank are the same function, for the interface has one set of weights per rank. Arguments are (hidden_states,
gate_weight, gate_bias, gate_proj, up_proj, down_proj, six low-rank factors or none, num_experts, top_k, group).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from peerlane.problems import contract as pc
from peerlane.problems.families import moe
from peerlane.problems.families.collective import FP32, group_members

# Logits of a token's experts lie in [-0.9, 0.9), where bfloat16 errs by 0.002; those of all others at least GAP below.
_CHOSEN = (-0.9, 0.9)
GAP = 0.5
_JITTER = 0.2

# Norm of a router's row; size of an expert's biases; what low-rank factors add to a projection of size 1.
_ROUTER_NORM = 2.0
_BIAS = 0.25
_LOW_RANK = 0.5


def expert_parallel(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    gate_bias: torch.Tensor | None,
    expert: Callable[[torch.Tensor], torch.Tensor],
    top_k: int,
    group: dist.ProcessGroup | None,
    owners: range | None = None,
) -> torch.Tensor:
    """The layer's reference. ``expert`` is this rank's function of rows (n, H).

    ``owners``: the ranks of the group that share the experts out, in order, this one among them; all of them if None.
    """
    tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
    ranks, num_experts = dist.get_world_size(group), gate_weight.shape[0]
    owners = range(ranks) if owners is None else owners
    if num_experts % len(owners):
        raise ValueError(f"got {num_experts} experts on {len(owners)} ranks: expected a multiple of the number of ranks")
    weights, experts = F.linear(tokens, gate_weight, gate_bias).softmax(dim=-1).topk(top_k, dim=-1)
    order = experts.flatten().argsort(stable=True)
    token = order // top_k
    counts = torch.zeros(num_experts, dtype=torch.int64, device=tokens.device)
    counts.scatter_add_(0, experts.flatten(), torch.ones_like(order))
    sent = counts.new_zeros(ranks)
    sent[owners.start : owners.stop] = counts.view(len(owners), -1).sum(1)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    rows_sent, rows_received = torch.stack([sent, received]).tolist()  # the host has to know the split sizes

    dispatched = tokens[token]
    arrived = tokens.new_empty((sum(rows_received), tokens.shape[1]))
    dist.all_to_all_single(arrived, dispatched, rows_received, rows_sent, group=group)
    returned = torch.empty_like(dispatched)
    dist.all_to_all_single(returned, expert(arrived), rows_sent, rows_received, group=group)
    weighted = returned * weights.flatten()[order].unsqueeze(1)
    return torch.zeros_like(tokens).index_add_(0, token, weighted)


@torch.no_grad()
def reference(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    gate_bias: torch.Tensor | None,
    gate_proj: torch.nn.Linear,
    up_proj: torch.nn.Linear,
    down_proj: torch.nn.Linear,
    num_experts: int,
    top_k: int,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    def expert(rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = down_proj(F.silu(gate_proj(rows)) * up_proj(rows))
        return result

    return expert_parallel(hidden_states, gate_weight, gate_bias, expert, top_k, group)


def owners_of(case: pc.Case, rank: int) -> Sequence[int]:
    """World ranks that hold the experts of the rank's tokens, in order: its group; without one the world or, if there are fewer experts
    than ranks, its block of E neighbours."""
    experts = moe.experts_of(case)
    if "group" in case.params or experts >= case.world_size:
        return group_members(case, rank)
    first = rank // experts * experts
    return range(first, first + experts)


def _chosen(case: pc.Case, rank: int, draw: pc.Draw) -> torch.Tensor:
    """Experts (T, k) of the rank's tokens, distinct for each. ``case["exponent"]`` and ``case["empty"]`` are those of
    :func:`_moe.log_popularity`; ``case["uneven"]`` adds as many natural units of spread between ranks. ``case["pattern"]``:

    * ``one_rank``: all tokens of all ranks choose experts of one rank;
    * ``together``: all experts of a token are on one rank, any;
    * ``spread``: they are on different ranks;
    * ``own``: they are on the token's own rank;
    * ``rotated``: token t of rank r goes to rank r + t, modulo the number of ranks;
    * ``balanced``: every rank chooses every expert equally often;
    * ``first_block``: only the first E ranks have popular experts.
    """
    owners, experts, k, tokens = owners_of(case, rank), moe.experts_of(case), case["k"], moe.tokens_of(case, rank)
    ranks, local, pattern = len(owners), moe.experts_of(case) // len(owners), case.params.get("pattern")
    scores = moe.log_popularity(case, draw)
    target = draw.shared.permutation(ranks)[:1]
    if "uneven" in case.params:
        scores = scores + draw.normal(scores.shape, FP32, scale=case["uneven"])
    if pattern == "first_block" and rank >= experts:
        scores = torch.zeros_like(scores)
    scores = scores.expand(tokens, -1)
    place = torch.arange(tokens, device=draw.device)
    match pattern:
        case "balanced":
            first = draw.permutation(tokens).unsqueeze(1) * k + draw.integers(0, experts, (1,))
            return torch.remainder(first + torch.arange(k, device=draw.device), experts)
        case "spread":
            on_rank = draw.uniform((tokens, ranks), FP32).topk(k).indices
            return torch.add(draw.integers(0, local, (tokens, k)), on_rank, alpha=local)
        case "one_rank":
            only = target.expand(tokens)
        case "together":
            only = draw.integers(0, ranks, (tokens,))
        case "own":
            only = torch.full_like(place, owners.index(rank))
        case "rotated":
            only = (place + owners.index(rank)) % ranks
        case _:
            return moe.draw_experts(case, draw, scores, k)
    elsewhere = torch.arange(experts, device=draw.device) // local != only.unsqueeze(1)
    return moe.draw_experts(case, draw, scores.masked_fill(elsewhere, -math.inf), k)


def _hidden_states(case: pc.Case, rank: int, draw: pc.Draw, gate_weight: torch.Tensor, gate_bias: torch.Tensor | None) -> torch.Tensor:
    """Tokens (T, H) whose logits are planted, so that every honest way to compute them chooses the same experts.

    N(0, 1) entries (times ``case["scale"]``), to which the least change is made that gives them the logits wanted: the transposed router
    times the inverse of its Gram matrix times what is missing. Nothing is left to see of it in any entry.

    With ``case["logits"]`` all logits are that much larger, more than the exponentials of float32 can hold, and multiples of a half, which
    bfloat16 has up to 128; every expert's is an entry of the token plus its bias.
    """
    tokens, experts, k = moe.tokens_of(case, rank), gate_weight.shape[0], case["k"]
    wanted = draw.uniform((tokens, experts), FP32, low=_floor(experts, k) - _JITTER, high=_floor(experts, k))
    low, high = _CHOSEN
    wanted.scatter_(1, _chosen(case, rank, draw), draw.uniform((tokens, k), FP32, low=low, high=high))
    if "logits" in case.params:
        wanted = wanted.mul(2.0).round().div(2.0).add(case["logits"])
    hidden = draw.normal((tokens, case["hidden"]), FP32, scale=case.params.get("scale", 1.0))
    router = gate_weight.to(FP32)
    missing = wanted - F.linear(hidden, router, None if gate_bias is None else gate_bias.to(FP32))
    hidden += missing @ torch.linalg.inv_ex(router @ router.t()).inverse @ router
    if case.params.get("nan") and rank == 0:
        hidden[1] = math.nan
    return hidden.to(case.dtype)


def _floor(experts: int, k: int) -> float:
    """The largest logit of experts that are not chosen: together they have about as much weight as those that are."""
    return min(_CHOSEN[0] - GAP, math.log(1.2 * k / max(1, experts - k)))


def linear(draw: pc.Draw, fan_in: int, fan_out: int, dtype: torch.dtype, gain: float = 1.0) -> torch.nn.Linear:
    """A layer that keeps the size of its input, times ``gain``; biases N(0, 0.25^2)."""
    weight = draw.normal((fan_out, fan_in), dtype, scale=gain * fan_in**-0.5)
    return pc.linear_over(weight, draw.normal((fan_out,), dtype, scale=_BIAS))


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    """Every rank has the same router, unless ``case["own_routers"]``, and an expert of its own.

    Channels of tokens, and of results, differ in size by powers of two, equal on all ranks (see :meth:`Draw.octaves`), for both cross the
    wire. What reads the tokens makes up for it, so that routing and inner activations are those of channels of one size.
    """
    experts, hidden_size, inner, dtype = moe.experts_of(case), case["hidden"], case["inner"], case.dtype
    entering, leaving = (draw.shared.octaves((hidden_size,)).to(dtype) for _ in range(2))
    router = draw if case.params.get("own_routers") else draw.shared
    norm = _ROUTER_NORM / case.params.get("scale", 1.0)
    gate_weight = router.normal((experts, hidden_size), dtype, scale=norm * hidden_size**-0.5)
    if "logits" in case.params:
        gate_weight = torch.eye(experts, hidden_size, dtype=dtype, device=draw.device)  # logits are exact
    gate_bias = _router_bias(case, router) if case.params.get("bias", True) else None
    hidden = _hidden_states(case, rank, draw, gate_weight, gate_bias)
    if case.params.get("three_axes"):
        hidden = hidden.unsqueeze(0)
    layers = [linear(draw, *size, dtype, gain) for size, gain in _projections(hidden_size, inner)]
    factors = _low_rank_factors(case, draw, layers)
    for tensor in (gate_weight, layers[0].weight.data, layers[1].weight.data, *factors[0:4:2]):
        tensor /= entering
    for tensor in (layers[2].weight.data.t(), layers[2].bias.data, *(b.t() for b in factors[5:])):
        tensor *= leaving
    group = pc.GroupRef(case["group"]) if "group" in case.params else None
    return (hidden * entering, gate_weight, gate_bias, *layers, *factors, experts, case["k"], group)


def _router_bias(case: pc.Case, draw: pc.Draw) -> torch.Tensor:
    """Half of the experts, every other one, are favoured by 1.8 natural units, more or less; all by ``case["logits"]``."""
    experts = moe.experts_of(case)
    floor = _floor(experts, case["k"])
    bias = draw.uniform((experts,), FP32, low=floor - 0.4, high=floor + 0.4)
    bias[::2].add_(0.9)
    bias[1::2].sub_(0.9)
    return bias.add_(case.params.get("logits", 0.0)).to(case.dtype)


def _projections(hidden: int, inner: int) -> list[tuple[tuple[int, int], float]]:
    """(fan in, fan out) and gain of an expert's gate, up and down projections. The gain of the last makes up for what the product loses."""
    return [((hidden, inner), 1.0), ((hidden, inner), 1.0), ((inner, hidden), 1.7)]


def _low_rank_factors(case: pc.Case, draw: pc.Draw, layers: Sequence[torch.nn.Linear]) -> list[torch.Tensor]:
    """A and B of gate, up and down, if ``case["low_rank"]`` names their rank. ``case["factors"]``:

    * absent: B A adds half as much as the projection itself;
    * ``zero``: B is 0;
    * ``alone``: the projections are 0;
    * ``cancelling``: the projections also hold -B A, 0.7 times as large as what they are otherwise.
    """
    if "low_rank" not in case.params:
        return []
    factors, kind, depth = [], case.params.get("factors"), case["low_rank"]
    for layer, (_, gain) in zip(layers, _projections(case["hidden"], case["inner"]), strict=True):
        size = {None: _LOW_RANK, "zero": 0.0, "cancelling": 0.7}.get(kind, 1.0)
        a = draw.normal((depth, layer.in_features), case.dtype, scale=layer.in_features**-0.5)
        b = draw.normal((layer.out_features, depth), case.dtype, scale=size * gain * depth**-0.5)
        weight = layer.weight.data
        if kind == "alone":
            weight.zero_()
            layer.bias.data.zero_()
        elif kind == "cancelling":
            weight.copy_(weight.to(FP32) - b.to(FP32) @ a.to(FP32))
        factors += [a, b]
    return factors
