"""The torch.distributed backend ``peerlane``: the kit's collectives in unchanged PyTorch programs.

    torch.distributed.init_process_group("peerlane")
    ...
    print(peerlane.device.backend.report())         which calls ran where, and why

A CUDA tensor whose operation, dtype and group the kit supports is served by one kernel of the kit. Every other call goes to NCCL (CUDA
tensors) or gloo (CPU tensors). Nothing is compiled when this module is imported. Where the package is
installed, ``import torch`` registers the backend by itself (``peerlane.autoload``).

Rules for programs:

* Ranks issue the collectives of a group in one order. The collectives of one process run one after the other, whatever their groups.
* Each collective of each shape runs once before a CUDA graph is captured.
* Split sizes of ``all_to_all_single`` are given on all ranks of a call, or on none.
"""

from peerlane.autoload import register
from peerlane.device.backend.captured_messages import check_captured_messages
from peerlane.device.backend.process_group import PeerlaneGroup
from peerlane.device.host.tally import Count, counts, report, reset_counts

__all__ = ["Count", "PeerlaneGroup", "check_captured_messages", "counts", "report", "reset_counts"]

register()
