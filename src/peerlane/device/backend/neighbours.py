"""The hosts and GPUs of a group's ranks: who lives on one host, and whether some ranks share a GPU."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from peerlane.device.host.ipc import host_name
from peerlane.settings import shared_gpu_environment


@dataclass(frozen=True)
class Seat:
    """The place of a rank: its host, and the identifiers of the GPUs that it can see."""

    host: str
    gpus: tuple[str, ...]

    @classmethod
    def own(cls) -> "Seat":
        """Returns the seat of this process."""
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        gpus = tuple(str(torch.cuda.get_device_properties(index).uuid) for index in range(count))
        return cls(host_name(), gpus)


def share_gpus(seats: Sequence[Seat]) -> bool:
    """Tells whether some host has more ranks than GPUs that these ranks can see, so that at least two of them use one GPU."""
    for host in {seat.host for seat in seats}:
        here = [seat for seat in seats if seat.host == host]
        gpus = {gpu for seat in here for gpu in seat.gpus}
        if gpus and len(here) > len(gpus):
            return True
    return False


def prepare_shared_gpus(seats: Sequence[Seat], label: str) -> Mapping[str, str]:
    """Sets what NCCL and torch's symmetric memory need where ranks share a GPU; returns the variables that were not set before.

    ``label`` is another one for every rank of the node. Must come before the first NCCL communicator of the process.
    """
    if not share_gpus(seats):
        return {}
    one_host = len({seat.host for seat in seats}) == 1
    missing = {name: value for name, value in shared_gpu_environment(label, one_host=one_host).items() if name not in os.environ}
    os.environ.update(missing)
    return missing
