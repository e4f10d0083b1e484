"""Problem 103, all-gather and matrix product over several nodes: shards cross the network while the kit multiplies those of the own node.

Every rank sends its shard once to its rail. Then one kernel for each node gathers the shards of the node's ranks and multiplies them.
"""

import torch
import torch.distributed as dist

from peerlane.solutions.families.inside import multiply_gathered_rows
from peerlane.solutions.families.rails import start


def solution(A_local: torch.Tensor, B: torch.Tensor, node_group: dist.ProcessGroup, rail_group: dist.ProcessGroup) -> torch.Tensor:
    node, nodes = dist.get_rank(rail_group), dist.get_world_size(rail_group)
    own = A_local.contiguous()
    others = {n: torch.empty_like(own) for n in range(nodes) if n != node}
    transfers = {n: start({(node + node - n) % nodes: own}, {n: others[n]}, rail_group) for n in _by_distance(node, nodes)}
    rows: dict[int, torch.Tensor] = {}
    rows[node] = multiply_gathered_rows(own, B, node_group)
    for n in _by_distance(node, nodes):
        transfers[n].wait()
        rows[n] = multiply_gathered_rows(others[n], B, node_group)
    return torch.cat([rows[n] for n in range(nodes)])


def _by_distance(node: int, nodes: int) -> list[int]:
    """The other nodes, the one before first: in step s every node sends to the s-th one behind it."""
    return [(node - step) % nodes for step in range(1, nodes)]
