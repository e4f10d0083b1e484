"""Shared parts of the problems between nodes: the groups of both tiers, sizes, and bytes of collectives."""

from collections.abc import Sequence

import torch

from peerlane.problems import contract as pc

NODE, RAIL = pc.GroupRef("node"), pc.GroupRef("rail")
"""The groups of :func:`pc.node_and_rail`, as arguments."""

NODES, WORLD_SIZES = (2, 4), (4, 8, 16, 32)

GROUPS = (
    "node_group holds the ranks of the rank's own node, whose memory it can map. rail_group holds the ranks with the same place in all "
    "nodes, node by node. Rank r is the rank r mod L of node r // L, with L ranks on every node."
)


def node_of(case: pc.Case, rank: int) -> tuple[int, ...]:
    """The ranks of a rank's node."""
    return case.cluster.node_groups[case.cluster.node_of(rank)]


def rail_of(case: pc.Case, rank: int) -> tuple[int, ...]:
    """The ranks with the same place in all nodes, node by node."""
    return case.cluster.rail_groups[case.cluster.local_rank(rank)]


def reordered(rows: torch.Tensor, lengths: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
    """Rows that lie in chunks of ``lengths[a, b, ...]``, the last index fastest, with their chunks in the order of permuted axes.

    ``lengths`` is on the rows' device; ``axes`` are its axes from the slowest to the fastest of the result. Does not wait for the device.
    """
    starts = (lengths.flatten().cumsum(0).view(lengths.shape) - lengths).permute(*axes).flatten()
    sizes = lengths.permute(*axes).flatten()
    shifts = starts - (sizes.cumsum(0) - sizes)
    count = rows.shape[0]
    return rows[torch.repeat_interleave(shifts, sizes, output_size=count) + torch.arange(count, device=rows.device)]
