"""What the mixture-of-experts problems share: which experts tokens go to, the metadata of a dispatch, and the order of its rows.

Expert e of E lives on rank e // (E / P) of a group of P ranks. Routing is drawn in two ways. :func:`draw_experts` decides everything by
contents. :func:`assign_experts` keeps the number of rows per expert, which decides host arguments and shapes, to what the layout says.
"""

import functools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from peerlane.problems import contract as pc
from peerlane.problems.families.collective import group_members, group_size

FP32 = torch.float32

# Spread of the natural logarithm of an expert's popularity between ranks, where the layout draws the counts.
_RANK_SPREAD = 0.4


def tokens_of(case: pc.Case, rank: int) -> int:
    """T: ``case["tokens"]``, one number or one per rank (repeated as often as the world needs)."""
    tokens = case["tokens"]
    return int(tokens if isinstance(tokens, int) else tokens[rank % len(tokens)])


def experts_of(case: pc.Case) -> int:
    """E: ``case["experts"]``; or ``case["experts_per_rank"]`` times the world size; or the world size over ``case["replicas"]``."""
    if "experts_per_rank" in case.params:
        return int(case["experts_per_rank"]) * case.world_size
    if "replicas" in case.params:
        return case.world_size // int(case["replicas"])
    return int(case["experts"])


def log_popularity(case: pc.Case, draw: pc.Draw) -> torch.Tensor:
    """The logarithm of every expert's popularity, (E,), equal on all ranks and new in every call.

    Zipf's law with ``case["exponent"]`` (none: all equal) in random order; ``case["empty"]`` experts are chosen by nobody.
    """
    experts = experts_of(case)
    place = draw.shared.permutation(experts)
    popularity = (place + 1).to(FP32).log() * -float(case.params.get("exponent", 0.0))
    return popularity.masked_fill(place >= experts - case.params.get("empty", 0), -math.inf)


def draw_experts(case: pc.Case, draw: pc.Draw, scores: torch.Tensor, k: int) -> torch.Tensor:
    """Draws k distinct experts for every row of ``scores`` (rows, E), the logarithms of popularities: (rows, k), the first drawn first.

    ``case["limit"]`` = (groups, chosen): only experts of the best groups count, as in models that bound the number of nodes per token.
    """
    noise = draw.uniform(scores.shape, FP32, low=1e-9).log().neg().log().neg()
    scores = scores + noise
    if "limit" in case.params:
        groups, chosen = case["limit"]
        by_group = scores.view(scores.shape[0], groups, -1)
        allowed = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter_(1, by_group.amax(-1).topk(chosen).indices, True)
        scores = by_group.masked_fill(~allowed.unsqueeze(-1), -math.inf).view_as(scores)
    return scores.topk(k).indices


def apportion(total: int, cap: int, weights: Sequence[float]) -> list[int]:
    """Whole shares of ``total`` in proportion to the weights, none above ``cap``; what the cap cuts off goes to smaller weights."""
    shares = [0] * len(weights)
    rest, left = total, sum(weights)
    for index in sorted((i for i, weight in enumerate(weights) if weight > 0), key=lambda i: -weights[i]):
        # Rounded up, the largest remaining share is at least the mean, so that the others never need more than the cap.
        shares[index] = min(cap, rest, math.ceil(rest * weights[index] / left - 1e-9))
        rest, left = rest - shares[index], left - weights[index]
    if rest:
        raise ValueError(f"cannot divide {total} into shares of at most {cap} over {len(weights)} weights: {rest} are left over")
    return shares


@dataclass(frozen=True)
class Dispatch:
    """Rows per source and expert: ``counts[q][e]`` come from the q-th rank of the group for expert e."""

    counts: Sequence[Sequence[int]]

    @property
    def local(self) -> int:
        """Experts per rank."""
        return len(self.counts[0]) // len(self.counts)

    def per_local(self, me: int) -> list[list[int]]:
        """Rows that arrive at the member ``me``, by source and local expert."""
        return [list(row[me * self.local : (me + 1) * self.local]) for row in self.counts]

    def input_splits(self, me: int) -> list[int]:
        """Rows that the member ``me`` sends to every member."""
        return [sum(self.per_local(target)[me]) for target in range(len(self.counts))]

    def output_splits(self, me: int) -> list[int]:
        """Rows that the member ``me`` receives from every member."""
        return [sum(row) for row in self.per_local(me)]


@functools.lru_cache(maxsize=64)
def _count_table(
    seed: int, tokens: tuple[int, ...], experts: int, k: int, exponent: float, empty: int, owners: int, limit: tuple[int, int], blocks: int
) -> tuple[tuple[int, ...], ...]:
    """Rows per rank and expert: Zipf's law with a spread between ranks, no expert more than once per token.

    Without an exponent, experts of one of ``blocks`` equal parts have different counts by turns, and the parts have equal ones.
    ``owners`` > 0: only the experts of one of so many ranks are chosen. ``limit``: see :func:`draw_experts`; every token then takes as many
    experts from each of its groups.
    """
    generator = random.Random(seed)
    places = generator.sample(range(experts), experts)
    target = generator.randrange(owners) if owners else 0
    popularity = [0.0 if place >= experts - empty else (place + 1.0) ** -exponent for place in places]
    if owners:
        popularity = [weight if e * owners // experts == target else 0.0 for e, weight in enumerate(popularity)]
    groups, chosen = limit
    size = experts // groups
    table = []
    for count in tokens:
        spread = _RANK_SPREAD if exponent else 0.0
        weights = [weight * math.exp(generator.gauss(0.0, spread)) for weight in popularity]
        by_group = [weights[group * size : (group + 1) * size] for group in range(groups)]
        pairs = apportion(count * chosen, count, [sum(part) for part in by_group])
        shares = [apportion(pair * (k // chosen), pair, part) for pair, part in zip(pairs, by_group, strict=True)]
        rows = [n for part in shares for n in part]
        for first in range(0, experts, experts // blocks) if not exponent else ():
            for a in range(first, first + experts // blocks - 1, 2):
                moved = min(rows[a + 1] // 4, pairs[a // size] - rows[a])
                rows[a], rows[a + 1] = rows[a] + moved, rows[a + 1] - moved
        table.append(tuple(rows))
    return tuple(table)


def is_drawn(case: pc.Case) -> bool:
    """Whether :func:`drawn_counts` differ between slots."""
    return bool(case.params.get("exponent") or case.params.get("empty") or case.params.get("one_rank"))


def routed_tokens(case: pc.Case, rank: int) -> int:
    """Tokens that are routed at all: all but ``case["dropped"]``."""
    return max(0, tokens_of(case, rank) - int(case.params.get("dropped", 0)))


def drawn_counts(case: pc.Case, draw: pc.Draw) -> tuple[tuple[int, ...], ...]:
    """Rows per world rank and expert, from the layout: ``case["exponent"]``, ``case["empty"]``, ``case["one_rank"]``, ``case["limit"]``."""
    return _count_table(
        draw.layout.getrandbits(62),
        tuple(routed_tokens(case, q) for q in range(case.world_size)),
        case["experts"],
        case["k"],
        case.params.get("exponent", 0.0),
        case.params.get("empty", 0),
        len(group_members(case, 0)) if case.params.get("one_rank") else 0,
        case.params.get("limit", (1, 1)),
        _blocks(case),
    )


def _blocks(case: pc.Case) -> int:
    """Equal parts of the experts, none of which lies on two ranks of the group or in two groups of experts."""
    return math.lcm(len(group_members(case, 0)), case.params.get("limit", (1, 1))[0])


def counts_vary(case: pc.Case) -> bool:
    """Whether experts of one rank may have different counts, of several sources, so that :func:`fixed_routing` changes their places."""
    own = experts_of(case) // group_size(case)
    return own > (case["k"] if case.params.get("one_rank") else 1) and several_sources(case) and "literal" not in case.params


def assign_experts(draw: pc.Draw, counts: Sequence[int], tokens: int, k: int, limit: tuple[int, int] = (1, 1)) -> torch.Tensor:
    """Random sets of k distinct experts for every token, (T, k) in random order, that use expert e exactly ``counts[e]`` times.

    Experts in random order, each repeated as often as it is used, are dealt to the tokens in rounds: T places apart no expert comes twice.
    Then experts are exchanged between random pairs of tokens wherever both sets stay sets. With a ``limit`` the groups are dealt in the
    same way first, and then the experts of a group to its tokens.
    """
    groups, chosen = limit
    experts, per = len(counts), k // chosen
    used = pc.constant(counts, draw.device)
    if groups == 1:
        group_of = torch.zeros((tokens, 1), dtype=torch.int64, device=draw.device)
    else:
        size = experts // groups
        group_of = assign_experts(draw, [sum(counts[g * size : (g + 1) * size]) // per for g in range(groups)], tokens, chosen)
    shuffled, order = draw.permutation(tokens * chosen), draw.permutation(experts)
    shuffled = shuffled[group_of.flatten()[shuffled].argsort(stable=True)]
    order = order[(order * groups // experts).argsort(stable=True)]
    dealt = torch.repeat_interleave(order, used[order], output_size=tokens * k)

    row_group = group_of.flatten()[shuffled]
    rows_of = used.view(groups, -1).sum(1) // per
    first = (rows_of.cumsum(0) - rows_of)[row_group]
    place = per * first + torch.arange(tokens * chosen, device=draw.device) - first
    rounds = torch.arange(per, device=draw.device)
    rows = dealt[place.unsqueeze(1) + rounds * rows_of[row_group].unsqueeze(1)]
    for _ in range(per):
        _exchange(draw, rows, row_group)
        rows = rows.roll(1, 1)

    selected = torch.empty_like(rows)
    selected[shuffled] = rows
    slots = draw.uniform((tokens, k), FP32).argsort(1)
    return selected.view(tokens, k).gather(1, slots)


def _exchange(draw: pc.Draw, rows: torch.Tensor, group_of: torch.Tensor) -> None:
    """Swaps the first entries of random pairs of rows of one group, in place, where neither row then holds an entry twice."""
    half = rows.shape[0] // 2
    pairs = draw.permutation(rows.shape[0])
    a, b = pairs[:half], pairs[half : 2 * half]
    first, second = rows[a], rows[b]
    clash = (first == second[:, :1]).any(1) | (second == first[:, :1]).any(1) | (group_of[a] != group_of[b])
    rows[a, 0] = torch.where(clash, first[:, 0], second[:, 0])
    rows[b, 0] = torch.where(clash, second[:, 0], first[:, 0])


def expert_mask(selected: torch.Tensor, experts: int, dtype: torch.dtype, *, permuted: bool = False) -> torch.Tensor:
    """One-hot (E, k, T) of selected experts (T, k); ``permuted``: a view of a contiguous (T, k, E), as one_hot makes it."""
    tokens, k = selected.shape
    if permuted:
        mask = torch.zeros((tokens, k, experts), dtype=dtype, device=selected.device)
        return mask.scatter_(2, selected.unsqueeze(2), 1).permute(2, 1, 0)
    return torch.zeros((experts, k, tokens), dtype=dtype, device=selected.device).scatter_(0, selected.t().unsqueeze(0), 1)


@dataclass(frozen=True)
class Routing:
    """One rank's routing under fixed counts.

    Attributes:
        selected: experts of every token and slot, (T, slots), int64.
        routed: tokens that have rows at all, (T), bool.
        dispatch: what the group's members send to each other, up to the places of a rank's experts.
        me: the rank's place in its group.
        order: (E,) the expert of ``dispatch`` that has each expert's rows; it is on the same rank.
    """

    selected: torch.Tensor
    routed: torch.Tensor
    dispatch: Dispatch
    me: int
    order: torch.Tensor

    def metadata(self, device: torch.device) -> tuple[list[int], list[int], torch.Tensor]:
        """input_splits, output_splits, and rows by source and own expert, (P, E / P)."""
        local = self.dispatch.local
        per_local = pc.constant(self.dispatch.counts, device)[:, self.order[self.me * local : (self.me + 1) * local]]
        return self.dispatch.input_splits(self.me), self.dispatch.output_splits(self.me), per_local

    def mask(self, experts: int, dtype: torch.dtype, *, permuted: bool = False) -> torch.Tensor:
        """One-hot (E, slots, T), zero for tokens without rows; strides as :func:`expert_mask` has them."""
        return expert_mask(self.selected, experts, dtype, permuted=permuted).mul_(self.routed)


def fixed_routing(case: pc.Case, rank: int, draw: pc.Draw) -> Routing:
    """Routing whose splits come from the layout (:func:`drawn_counts`) and whose contents are permuted under them.

    Experts of one rank (and of one group, see :func:`draw_experts`) exchange their counts in every call, so that what a rank receives for
    each of its experts does not follow from the splits.

    ``case["dropped"]`` tokens have no rows, ``case["duplicates"]`` repeats one expert of every token in a further slot, and with
    ``case["literal"]`` the splits are all equal, whatever the routing, as the public benchmark's are.
    """
    tokens, k, members = tokens_of(case, rank), case["k"], group_members(case, rank)
    table = drawn_counts(case, draw)
    selected = draw.integers(0, case["experts"], (tokens, k))
    kept = draw.permutation(tokens)[: routed_tokens(case, rank)]
    selected[kept] = assign_experts(draw, table[rank], len(kept), k, case.params.get("limit", (1, 1)))
    blocks, place = _blocks(case), torch.arange(case["experts"], device=draw.device)
    within = draw.shared.uniform((blocks, case["experts"] // blocks), FP32).argsort(1)
    order = place.view(blocks, -1).gather(1, within).flatten()
    selected = torch.empty_like(order).scatter_(0, order, place)[selected]
    if case.params.get("duplicates"):
        selected = torch.cat([selected, selected[:, :1]], dim=1)
    routed = torch.zeros(tokens, dtype=torch.bool, device=draw.device).index_fill_(0, kept, True)
    counts = [table[q] for q in members]
    if case.params.get("literal"):
        counts = [(tokens * k // case["experts"],) * case["experts"]] * len(members)
    return Routing(selected, routed, Dispatch(counts), members.index(rank), order)


def expert_major(routing_map: torch.Tensor, rows: int) -> torch.Tensor:
    """Where the ``rows`` nonzero entries of (E, T) lie, row by row, as flat indices; does not wait for the device."""
    routed = (routing_map != 0).flatten().to(torch.uint8)
    return routed.argsort(descending=True, stable=True)[:rows]


def chunk_order(lengths: torch.Tensor, rows: int) -> torch.Tensor:
    """``rows`` rows lie in chunks (a, b) of ``lengths[a, b]`` rows, a outermost: x[chunk_order(...)] has b outermost.

    Does not wait for the device.
    """
    starts = (lengths.flatten().cumsum(0).view_as(lengths) - lengths).t().flatten()
    sizes = lengths.t().flatten()
    shifts = starts - (sizes.cumsum(0) - sizes)
    return torch.repeat_interleave(shifts, sizes, output_size=rows) + torch.arange(rows, device=lengths.device)


def distinct_ranks(case: pc.Case, ranks: int) -> float:
    """How many ranks of the group a token's experts are on, on average; where popularity is uneven, the least that its order can make it.

    Equal popularity: P (1 - C(E - E/P, k) / C(E, k)). Otherwise experts are taken as independent, each chosen with probability
    1 - exp(-s p), s such that these add up to k; the number is least if the most popular experts share a rank.
    """
    units, taken = experts_of(case), case["k"]
    if "limit" in case.params:
        units, taken = case["limit"]
    exponent, empty = case.params.get("exponent", 0.0), case.params.get("empty", 0)
    if case.params.get("one_rank"):
        return 1.0
    ranks = min(ranks, units)  # of those that share a unit, one at least is hit
    if "limit" in case.params or not (exponent or empty):
        return ranks * (1 - math.comb(units - units // ranks, taken) / math.comb(units, taken))
    return _ranks_of_uneven(units, taken, exponent, empty, ranks)


@functools.cache
def _ranks_of_uneven(units: int, taken: int, exponent: float, empty: int, ranks: int) -> float:
    """:func:`distinct_ranks` where popularity is uneven."""
    per_rank = units // ranks
    popularity = [(place + 1.0) ** -exponent if place < units - empty else 0.0 for place in range(units)]
    low, high = 0.0, 2.0**60
    for _ in range(200):
        middle = (low + high) / 2
        chosen = sum(1 - math.exp(-middle * weight) for weight in popularity)
        low, high = (middle, high) if chosen < taken else (low, middle)
    return sum(1 - math.exp(-low * sum(popularity[q * per_rank : (q + 1) * per_rank])) for q in range(ranks))


def travelling_rows(case: pc.Case, rank: int) -> float:
    """The least number of rows that a rank must send, or receive, if a token's rows for one rank travel as one.

    The mean over the ranks of the group, which the busiest, who alone bounds the time, cannot fall below.
    """
    members = group_members(case, rank)
    tokens = sum(routed_tokens(case, q) for q in members) / len(members)
    return tokens * distinct_ranks(case, len(members)) * (len(members) - 1) / len(members)


def several_sources(case: pc.Case) -> bool:
    """Whether more than one rank of a group has rows to send, if only to itself."""
    return sum(tokens_of(case, q) > 0 for q in group_members(case, 0)) > 1


def several_ranks(case: pc.Case) -> bool:
    """Whether a group has more than one rank."""
    return group_size(case) > 1
