"""Keeps torch's symmetric memory within the nodes of a virtual cluster, where the machine would let it map any rank's memory."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d

from peerlane.common.cluster import Cluster

_c10d: Any = _distributed_c10d


def keep_symmetric_memory_within_nodes(cluster: Cluster) -> None:
    """Makes a rendezvous raise RuntimeError in a group whose ranks are in several nodes, as it does on real hosts."""
    memory = _c10d._SymmetricMemory
    rendezvous = memory.rendezvous

    def rendezvous_within_node(tensor: Any, group_name: str | None = None) -> Any:
        group = dist.group.WORLD if not group_name else _c10d._resolve_process_group(group_name)
        members = distributed_c10d.get_process_group_ranks(group)
        if cluster.spans_nodes(*members):
            nodes = sorted({cluster.node_of(rank) for rank in members})
            raise RuntimeError(
                f"symmetric memory: ranks {members} are in nodes {nodes}, and memory of another node cannot be mapped; "
                "pass the group of one node's ranks"
            )
        return rendezvous(tensor, group_name)

    memory.rendezvous = staticmethod(rendezvous_within_node)
