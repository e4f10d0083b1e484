"""Messages between nodes over a rail: few and large, started as soon as their contents are there, and waited for where they are used."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Transfers:
    """Messages on their way, with the tensors that they read and write."""

    works: list[dist.Work]
    tensors: list[torch.Tensor]

    def wait(self) -> None:
        """Waits for all of them: on GPUs the current stream does, not the host."""
        for work in self.works:
            work.wait()


def start(sent: Mapping[int, torch.Tensor], received: Mapping[int, torch.Tensor], rail: dist.ProcessGroup) -> Transfers:
    """Starts to send contiguous tensors to nodes and to receive others, one of each for a node.

    Both sides leave out empty tensors. A node's entries for itself are ignored.
    """
    own = dist.get_rank(rail)
    messages = [
        dist.P2POp(operation, tensor, group=rail, group_peer=node)
        for operation, tensors in ((dist.isend, sent), (dist.irecv, received))
        for node, tensor in tensors.items()
        if node != own and tensor.numel()
    ]
    return Transfers(dist.batch_isend_irecv(messages) if messages else [], [*sent.values(), *received.values()])
