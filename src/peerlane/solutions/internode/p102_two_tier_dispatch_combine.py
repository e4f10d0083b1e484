"""Problem 102, dispatch and combine over several nodes: a token crosses the network once for each node, and one row returns from it.

Each token goes over the rail with its experts on that node and their weights, and from there to the experts' ranks by the kit. On the way
back the rank that received a token adds up its experts' rows, weighted, and sends one row. Experts' rows go to that rank while tokens
cross the network, and tokens to experts while sums do.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from peerlane.solutions.families.inside import exchange_rows
from peerlane.solutions.families.rails import start

ABSENT = 32767  # of an expert on another node


def solution(
    tokens: torch.Tensor,
    selected_experts: torch.Tensor,
    routing_weights: torch.Tensor,
    expert_outputs: torch.Tensor,
    splits: list[list[int]],
    rows_by_expert: torch.Tensor,
    node_group: dist.ProcessGroup,
    rail_group: dist.ProcessGroup,
) -> tuple[torch.Tensor, torch.Tensor]:
    node, nodes = dist.get_rank(rail_group), dist.get_world_size(rail_group)
    place, places = dist.get_rank(node_group), dist.get_world_size(node_group)
    experts = rows_by_expert.shape[1] * places  # on every node
    own_node, rail = range(node * places, (node + 1) * places), range(place, nodes * places, places)
    between = torch.tensor([[splits[q][r] for r in own_node] for q in rail])
    sent = between.sum(0).tolist()
    received = [sum(splits[q][own_node[place]] for q in range(p, nodes * places, places)) for p in range(places)]
    by_place = rows_by_expert.view(nodes, places, -1).transpose(0, 1)

    home = selected_experts // experts
    chosen = [(home == n).any(1).nonzero()[:, 0] for n in range(nodes)]
    visitors = _counts(chosen, rail_group)
    packets = {n: _pack(tokens, selected_experts - n * experts, routing_weights, chosen[n], experts) for n in range(nodes)}
    arriving = {n: packets[n].new_empty((visitors[n], packets[n].shape[1])) for n in range(nodes)}
    transfers = start(packets, arriving, rail_group)
    arriving[node] = packets[node]

    # What the experts of this node made goes back to the ranks at whose places the tokens came, while tokens are still on their way.
    made = _chunks_reordered(expert_outputs, by_place.permute(2, 1, 0), (2, 1, 0))
    back = exchange_rows(made, received, sent, node_group)
    transfers.wait()
    guests = [Guests.of(arriving[n], tokens, selected_experts.shape[1], int(between[n].sum())) for n in range(nodes)]
    by_source = torch.split(_chunks_reordered(back, between.t(), (1, 0)), between.sum(1).tolist())
    partial = [one.combined(rows) for one, rows in zip(guests, by_source, strict=True)]
    returned = {n: tokens.new_empty((len(chosen[n]), tokens.shape[1])) for n in range(nodes)}
    returning = start(dict(enumerate(partial)), returned, rail_group)
    returned[node] = partial[node]

    rows = torch.cat([one.rows() for one in guests])
    arrived = exchange_rows(_chunks_reordered(rows, between, (1, 0)), sent, received, node_group)
    dispatched = _chunks_reordered(arrived, by_place, (2, 1, 0))
    returning.wait()
    combined = torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device)
    for n in range(nodes):
        combined[chosen[n]] += returned[n]
    return dispatched, combined.to(tokens.dtype)


@dataclass(frozen=True)
class Guests:
    """The tokens of one source that have experts on this node, and the rows that they need there, by expert and then token."""

    tokens: torch.Tensor
    weights: torch.Tensor
    """The weights of the rows."""
    origin: torch.Tensor
    """the token of each row"""

    @classmethod
    def of(cls, packet: torch.Tensor, like: torch.Tensor, slots: int, rows: int) -> "Guests":
        """Returns the contents of a packet of :func:`_pack`."""
        parts = torch.split(packet, [like.shape[1] * like.element_size(), 4 * slots, 2 * slots], dim=1)
        tokens, weights, local = (part.clone(memory_format=torch.contiguous_format) for part in parts)
        tokens, weights, local = tokens.view(like.dtype), weights.view(torch.float32), local.view(torch.int16)
        order = local.flatten().argsort(stable=True)[:rows]
        return cls(tokens, weights.flatten()[order], order // slots)

    def rows(self) -> torch.Tensor:
        """Returns a row for every expert of every token."""
        return self.tokens[self.origin]

    def combined(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns one row for every token: the weighted sum of its experts' rows."""
        total = torch.zeros(self.tokens.shape, dtype=torch.float32, device=rows.device)
        return total.index_add_(0, self.origin, rows * self.weights.unsqueeze(1)).to(self.tokens.dtype)


def _pack(tokens: torch.Tensor, local: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, experts: int) -> torch.Tensor:
    """Returns bytes (n, ...) of the chosen tokens: contents, weights, and experts as one node numbers them."""
    named = local.masked_fill((local < 0) | (local >= experts), ABSENT).to(torch.int16)
    parts = (tokens[chosen], weights[chosen].to(torch.float32), named[chosen])
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)


def _counts(chosen: list[torch.Tensor], rail: dist.ProcessGroup) -> list[int]:
    """Returns how many tokens every node of the rail has for this one. The host waits for the answer."""
    mine = torch.tensor([len(tokens) for tokens in chosen], device=chosen[0].device)
    theirs = torch.empty_like(mine)
    dist.all_to_all_single(theirs, mine, group=rail)
    counts: list[int] = theirs.tolist()
    return counts


def _chunks_reordered(rows: torch.Tensor, lengths: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    """Returns rows that lie in chunks of ``lengths[a, b, ...]`` with their chunks in the order of permuted axes."""
    lengths = lengths.to(rows.device)
    starts = (lengths.flatten().cumsum(0).view(lengths.shape) - lengths).permute(*axes).flatten()
    sizes = lengths.permute(*axes).flatten()
    shifts = starts - (sizes.cumsum(0) - sizes)
    count = rows.shape[0]
    return rows[torch.repeat_interleave(shifts, sizes, output_size=count) + torch.arange(count, device=rows.device)]
