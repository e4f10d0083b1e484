"""Problem 104, attention over a sequence on several nodes: blocks cross the network while the kit attends to those of the own node.

Every rank sends its keys and values once to its rail: under a causal mask only to later nodes. Then one kernel for each node attends to
the blocks that the node's ranks have, and outputs are joined by the logarithms of their sums of exponentials.
"""

import torch
import torch.distributed as dist

from peerlane.solutions.families.inside import attend, join
from peerlane.solutions.families.rails import start


def solution(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    node_group: dist.ProcessGroup,
    rail_group: dist.ProcessGroup,
) -> torch.Tensor:
    node, nodes = dist.get_rank(rail_group), dist.get_world_size(rail_group)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    own = torch.stack((k, v))
    blocks, transfers = {node: own}, {}
    for step in range(1, nodes):
        behind, before = (node + step) % nodes, (node - step) % nodes
        sent = {behind: own} if not causal or behind > node else {}
        received = {before: torch.empty_like(own)} if not causal or before < node else {}
        transfers[before] = start(sent, received, rail_group)
        blocks |= received

    parts = []
    for other, (keys, values) in blocks.items():
        if other != node:
            transfers[other].wait()
        parts.append(attend(q, keys, values, scale, causal and other == node, node_group))
    for sent_only in transfers.keys() - blocks.keys():
        transfers[sent_only].wait()
    return join(parts).to(q.dtype).contiguous()
