"""Graphs of problem 64: a structure that is layout, under names that are contents.

Everything about node i of the structure is a hash of i and of a salt: its owner, its degree and its neighbours. No list of edges is held,
so that a graph of billions of edges is written part by part straight into the ranks' arrays. Nodes are then renamed by a random
permutation. Samples of renamed graphs have the same sizes, for the j-th neighbour of a node keeps its place.
"""

import itertools
import random

import torch

from peerlane.problems import contract as pc
from peerlane.problems.families.collective import FP64, INT64

# Nodes whose edges are written at a time.
_CHUNK_NODES = 2**22


def _hash(values: torch.Tensor, salt: int) -> torch.Tensor:
    """Numbers in [0, 2^31) that look random: multiplications and shifts in 64-bit integers, which wrap (the finaliser of SplitMix64)."""
    mixed = values * 0x5851F42D4C957F2D + salt
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        mixed = (mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return (mixed >> 33) & (2**31 - 1)


def degree_of(case: pc.Case, uniform: torch.Tensor) -> torch.Tensor:
    """The degrees, int64, of nodes for which U[0, 1) numbers were drawn."""
    params = case.params
    if "degree" in params:
        return torch.full_like(uniform, params["degree"], dtype=INT64)
    if "max_degree" in params:
        return (uniform * (int(params["max_degree"]) + 1)).to(INT64)
    # u^(-2/3), cut at 1000, has a mean of 2.94 and is at least 1: degrees begin at a twentieth of their mean.
    return (((1 - uniform).pow(-2 / 3).clamp(max=1000.0) - 0.9) * (float(params["power"]) / 2.04)).round().to(INT64)


def mean_taken(case: pc.Case, fanout: int) -> float:
    """The mean number of neighbours that are sampled of a node."""
    uniform = (torch.arange(4096, dtype=FP64) + 0.5) / 4096
    degree = degree_of(case, uniform)
    return float((degree if fanout < 0 else degree.clamp(max=fanout)).to(FP64).mean())


class Structure:
    """A directed graph of ``nodes`` nodes on ``ranks`` ranks. ``case`` has:

    * ``degree``: for all nodes; or ``max_degree``: degrees U{0, ..., max_degree}; or ``power``: the mean degree of a power law with
      exponent 2.5, from a twentieth of the mean to 500 times it. Every 16th node has no neighbours if ``isolated``.
    * ``hub``: every node's first neighbour is node 0 for one node in two.
    * ``near``: this share of neighbours lies within 64 numbers of the node, the rest anywhere, small numbers preferred (``skew``).
    * ``parts``: ``modulo`` (node i on rank i mod W), ``blocks``, or ``random``.
    """

    def __init__(self, case: pc.Case, ranks: int, layout: random.Random) -> None:
        self.case, self.ranks = case, ranks
        self.nodes = int(case["nodes"] if "nodes" in case.params else case["nodes_per_rank"] * ranks)
        self.salt = layout.getrandbits(62)

    def uniform(self, values: torch.Tensor, what: int) -> torch.Tensor:
        """U[0, 1) for every value, in float64."""
        return _hash(values, self.salt + what * 0x9E3779B97F4A7C1).to(FP64).div_(2**31)

    def owner(self, node: torch.Tensor) -> torch.Tensor:
        """The rank, in its group, that stores a node's neighbours."""
        match self.case.params.get("parts", "modulo"):
            case "blocks":
                return node * self.ranks // self.nodes
            case "random":
                return (self.uniform(node, 1) * self.ranks).to(INT64)
            case _:
                return node % self.ranks

    def degree(self, node: torch.Tensor) -> torch.Tensor:
        """Numbers of neighbours."""
        degree = degree_of(self.case, self.uniform(node, 2))
        return degree.masked_fill(node % 16 == 15, 0) if self.case.params.get("isolated") else degree

    def neighbour(self, node: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        """The neighbour at a place of the node's list; the same one may come twice, and may be the node itself."""
        edge, params = node * 65536 + place, self.case.params
        near = node + (self.uniform(edge, 4) * 129).to(INT64) - 64
        anywhere = (self.uniform(edge, 5).pow(params.get("skew", 1.0)) * self.nodes).to(INT64)
        chosen = torch.where(self.uniform(edge, 3) < params.get("near", 0.0), near, anywhere) % self.nodes
        if params.get("hub"):
            chosen = torch.where((place == 0) & (node % 2 == 0), 0, chosen)
        return chosen

    def seeds(self, count: int, me: int, device: torch.device) -> torch.Tensor:
        """Different nodes, others for every rank. ``case["seeds_of"]``: ``remote``: all with the next rank; ``isolated``: rank 0's are.

        Steps of a stride that has no common factor with the number of nodes reach no node twice.
        """
        kind, step = self.case.params.get("seeds_of"), torch.arange(count, device=device)
        if kind == "remote":
            return (me + 1) % self.ranks + self.ranks * step
        if kind == "isolated" and me == 0:
            return 16 * step + 15
        stride = next(s for s in range(max(2, int(self.nodes * 0.618)), 2 * self.nodes) if _coprime(s, self.nodes))
        return (self.salt % self.nodes + (step + me * count) * stride) % self.nodes


def _coprime(a: int, b: int) -> bool:
    while b:
        a, b = b, a % b
    return a == 1


def graph_arguments(case: pc.Case, me: int, ranks: int, draw: pc.Draw) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(seed_nodes, local_adj_row_ptr, local_adj_col, node_to_rank) of a rank, int64.

    Names are a permutation that all ranks share; the order of the seeds is the rank's own.
    """
    structure, device = Structure(case, ranks, draw.layout), draw.device
    name = draw.shared.permutation(structure.nodes)
    order = torch.empty_like(name)  # The structure's number of every name.
    order[name] = torch.arange(structure.nodes, device=device)
    owner = structure.owner(order)
    degree = structure.degree(order)
    if not case.params.get("replicated"):
        degree = degree.masked_fill(owner != me, 0)
    pointer = torch.zeros(structure.nodes + 1, dtype=INT64, device=device)
    torch.cumsum(degree, 0, out=pointer[1:])
    column = torch.empty(int(pointer[-1]), dtype=INT64, device=device)
    bounds = [*pointer[::_CHUNK_NODES].tolist(), column.numel()]
    for chunk, (first, last) in enumerate(itertools.pairwise(bounds)):
        part = slice(chunk * _CHUNK_NODES, (chunk + 1) * _CHUNK_NODES)
        within = torch.arange(degree[part].numel(), device=device).repeat_interleave(degree[part], output_size=last - first)
        place = torch.arange(first, last, device=device) - pointer[part.start :][within]
        column[first:last] = name[structure.neighbour(order[part][within], place)]
    seeds = name[structure.seeds(case["seeds"], me, device)]
    return seeds[draw.permutation(case["seeds"])], pointer, column, owner
