"""Ranks in nodes: two tiers of memory and links. No torch here: the command line asks too."""

from dataclasses import dataclass

from peerlane.errors import UsageError

RANKS_OF_A_NODE = (2, 8)
"""The fewest and the most ranks that each of several nodes has."""


@dataclass(frozen=True)
class Cluster:
    """``world_size`` ranks in ``nodes`` nodes of the same size: rank r is on node ``r // ranks_per_node``.

    Ranks of one node address each other's memory. Ranks of different nodes exchange messages over the network, and nothing else. One node
    is the ordinary case, of any size. Raises :class:`UsageError` for a number of ranks that cannot be divided so.
    """

    nodes: int
    world_size: int

    def __post_init__(self) -> None:
        least, most = RANKS_OF_A_NODE
        whole = self.nodes >= 1 and self.world_size % self.nodes == 0
        if not whole or (self.nodes > 1 and not least <= self.world_size // self.nodes <= most):
            raise UsageError(
                f"{self.world_size} ranks on {self.nodes} nodes: expected the same number on every node, {least} to {most}; "
                f"use --world-size {self.nodes * least} or --nodes 1"
            )

    @classmethod
    def fits(cls, nodes: int, world_size: int) -> bool:
        """Tells whether so many ranks can be divided so."""
        try:
            cls(nodes, world_size)
        except UsageError:
            return False
        return True

    @property
    def ranks_per_node(self) -> int:
        return self.world_size // self.nodes

    def node_of(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def local_rank(self, rank: int) -> int:
        """Returns the place of a rank within its node."""
        return rank % self.ranks_per_node

    def spans_nodes(self, *ranks: int) -> bool:
        """Tells whether some of these ranks are on different nodes."""
        return len({self.node_of(rank) for rank in ranks}) > 1

    @property
    def node_groups(self) -> tuple[tuple[int, ...], ...]:
        """Returns the ranks of every node: ``((0, 1), (2, 3))`` for 2 x 2."""
        size = self.ranks_per_node
        return tuple(tuple(range(node * size, (node + 1) * size)) for node in range(self.nodes))

    @property
    def rail_groups(self) -> tuple[tuple[int, ...], ...]:
        """Returns the ranks of the same local rank, one of every node: ``((0, 2), (1, 3))`` for 2 x 2."""
        return tuple(zip(*self.node_groups, strict=True))

    def __str__(self) -> str:
        return f"{self.nodes}x{self.ranks_per_node}"


CLUSTERS = (Cluster(2, 4), Cluster(2, 8), Cluster(2, 16), Cluster(4, 32))
"""The profiles 2x2, 2x4, 2x8 and 4x8 (nodes x ranks of a node), whose rooflines pages show."""
