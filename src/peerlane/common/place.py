"""Places where ranks run: on CPUs, each on a GPU, several on each GPU, or in the emulator. No torch here: the command line asks too."""

from dataclasses import dataclass, replace
from typing import Literal

Device = Literal["cuda", "cpu", "emulated"]
"""as plans and records name it"""
NodeKind = Literal["node", "virtual", "cpu", "emulated"]
"""as records name the class of machine"""


@dataclass(frozen=True)
class Place:
    """One of :data:`CPU`, :data:`GPUS`, :data:`VIRTUAL` and :data:`EMULATED`.

    Attributes:
        title: its name in tables and messages.
        has_gpus: ranks run on GPUs; elsewhere they share memory by files, and no GPU may be visible to them.
        shares_gpus: several ranks run on each GPU.
        emulated: all ranks of a candidate are threads of one process, and their kernels run in the emulator.
        runs_cuda: kernels in CUDA can run; else a candidate that needs a GPU is not run, rather than wrong.
        groups: fresh groups of ranks that a candidate may take: one shows whether it is right, a second one times it.
        backend: what serves torch.distributed, where no virtual node says otherwise.
        untimed: why no speed is measured; empty where it is.
    """

    device: Device
    kind: NodeKind
    title: str
    has_gpus: bool = False
    shares_gpus: bool = False
    emulated: bool = False
    runs_cuda: bool = True
    groups: int = 1
    backend: Literal["nccl", "gloo"] = "gloo"
    untimed: str = ""

    @classmethod
    def of(cls, device: str, *, shared: bool = False) -> "Place":
        """The place with this device, as plans name it; ``shared``: where ranks share its GPUs."""
        found = _BY_DEVICE[device]
        return VIRTUAL if shared and found.has_gpus else found

    def in_nodes(self, nodes: int) -> "Place":
        """This place where its ranks are in so many nodes: several are a virtual cluster, where no speed is measured."""
        return self if nodes == 1 else replace(self, groups=1, untimed=VIRTUAL_CLUSTER)

    @classmethod
    def of_kind(cls, kind: NodeKind) -> "Place":
        """The place of this class of machine, as records name it."""
        return _BY_KIND[kind]


VIRTUAL_CLUSTER = "virtual cluster: its nodes share one machine, so times say nothing about a network"

CPU = Place("cpu", "cpu", "CPU ranks", runs_cuda=False, untimed="no GPU: times on CPU ranks say nothing about a kernel")
GPUS = Place("cuda", "node", "a GPU for every rank", has_gpus=True, groups=2, backend="nccl")
VIRTUAL = Place("cuda", "virtual", "virtual node", has_gpus=True, shares_gpus=True, groups=2, backend="nccl")
EMULATED = Place("emulated", "emulated", "emulated ranks", emulated=True, untimed="emulated ranks: nothing is timed")

_BY_KIND = {place.kind: place for place in (CPU, GPUS, VIRTUAL, EMULATED)}
_BY_DEVICE: dict[str, Place] = {place.device: place for place in (CPU, GPUS, EMULATED)}
