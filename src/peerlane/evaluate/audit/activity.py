"""The activity of an audited call, from the names that a profiler recorded: kernels, copies, memsets, operators of communication.

Pure: a rank counts names (recorder.py), this sorts the counts. Standard library only.
"""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

# What the CUDA libraries and PyTorch call their kernels. Names of candidates' own kernels are theirs to choose: one called ncclDevKernel_x
# speaks against its owner only.
_NCCL = re.compile(r"\bnccl(Dev|Sym|Kernel)\w*")
_ATEN = re.compile(r"^(void )?(at::|c10::|at_cuda_detail::)|^_ZN2at")
_LIBRARY = re.compile(
    r"^(void )?(cutlass|cublas|cudnn|cask_|cub::|thrust::|nvjet_|gemv\w+_kernel|gemmk1_|splitK|(ampere|turing|volta|sm\d\d)_xmma_"
    r"|(ampere|turing|volta)_\w*gemm|(vector|regular|multi_bluestein|composite_\w+)_fft\b)|\bcublas\w*"
)
_TEAM_COLLECTIVE = re.compile(r"\b(?:rdxn|reducescatter|alltoall|fcollect|broadcast)_on_stream_kernel\b")
_NVSHMEM = re.compile(rf"\bnvshmemi_\w+_kernel\b|\b(?:barrier|sync|quiet)_on_stream_kernel\b|{_TEAM_COLLECTIVE.pattern}")
_INDUCTOR = re.compile(r"^triton_")

_COPY = re.compile(r"^Memcpy (\w)to(\w) ")
_PEER_CALLS = ("cudaMemcpyPeer", "cuMemcpyPeer", "cudaMemcpy3DPeer", "cuMemcpy3DPeer")

COMMUNICATION = ("c10d::", "nccl:", "gloo:", "peerlane:", "symm_mem::")
# Operators of these families that carry no payload between ranks, or are how a kernel of one's own gets at symmetric memory.
_LOCAL = frozenset(
    f"symm_mem::{name}"
    for name in ("_async_input_mm", "_barrier", "_rendezvous", "get_remote_tensors", "memset32_", "stream_write_value32_")
) | {"c10d::check_for_nan"}


def kernel_kind(name: str, triton: Collection[str] = ()) -> str:
    """Returns ``nccl``, ``aten``, ``library`` (cuBLAS, cuDNN, CUTLASS, cuFFT, NVSHMEM), ``triton`` or ``own``.

    ``triton``: names that Triton compiled.
    """
    if _NCCL.search(name):
        return "nccl"
    if name in triton or _INDUCTOR.match(name):
        return "triton"
    if _ATEN.search(name):
        return "aten"
    return "library" if _LIBRARY.search(name) or _NVSHMEM.search(name) else "own"


@dataclass
class Activity:
    """Counts of one span of ``calls`` calls on one rank.

    Attributes:
        calls: how many calls lie in the span.
        kernels: by name, as CUPTI demangles it.
        copies: ``peer`` (between GPUs), ``same_gpu``, ``host``.
        memsets: on the device.
        operators: those of communication, by name: ``c10d::allreduce_``, ``gloo:all_reduce``, ``symm_mem::one_shot_all_reduce``.
        other: everything else that was recorded: other operators, calls of the CUDA runtime.
    """

    calls: int = 1
    kernels: Counter[str] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)
    memsets: int = 0
    operators: Counter[str] = field(default_factory=Counter)
    other: int = 0

    @property
    def device_events(self) -> int:
        """Kernels, copies and memsets."""
        return self.kernels.total() + self.copies.total() + self.memsets

    @property
    def empty(self) -> bool:
        """True if nothing was seen, neither on the device nor on the host."""
        return self.device_events + self.operators.total() + self.other == 0

    def forbidden(self) -> tuple[str, ...]:
        """The communication in it that is not the candidate's own, in order: operators, NCCL's kernels, NVSHMEM's collectives of teams."""
        libraries = (name for name in self.kernels if kernel_kind(name) == "nccl" or _TEAM_COLLECTIVE.search(name))
        return tuple(sorted([*self.operators, *libraries]))

    def without_snapshots(self) -> "Activity":
        """Without what the copies of outputs may have caused, which are made between the calls of a block."""
        kernels = Counter({name: count for name, count in self.kernels.items() if kernel_kind(name) != "aten"})
        copies = Counter({kind: count for kind, count in self.copies.items() if kind == "peer"})
        return Activity(self.calls, kernels, copies, 0, Counter(self.operators))


def activity(host: Mapping[str, int], device: Mapping[str, int], calls: int = 1) -> Activity:
    """Sorts counts of recorded names: those of the host (operators, annotations, calls of the CUDA runtime) and those of the device."""
    found = Activity(calls)
    for name, count in device.items():
        copy = _COPY.match(name)
        if copy:
            found.copies[_copy_kind(*copy.groups())] += count
        elif name.startswith("Memset"):
            found.memsets += count
        else:
            found.kernels[name] += count
    for name, count in host.items():
        if name.startswith(COMMUNICATION) and name not in _LOCAL:
            found.operators[name] += count
        else:
            found.other += count
    called = sum(count for name, count in host.items() if name.startswith(_PEER_CALLS))
    found.copies["peer"] = max(found.copies["peer"], called)  # a driver may record a copy between mapped GPUs as one on a single GPU
    found.copies += Counter()  # drops zeros
    return found


def _copy_kind(source: str, target: str) -> str:
    if "P" in (source, target):
        return "peer"
    return "same_gpu" if (source, target) == ("D", "D") else "host"


def most_per_call(spans: Iterable[Mapping[str, int]], calls: Iterable[int]) -> dict[str, int]:
    """Returns for every key the largest count per call (rounded up) in any of the spans."""
    largest: dict[str, int] = {}
    for counts, number in zip(spans, calls, strict=True):
        for key, count in counts.items():
            largest[key] = max(largest.get(key, 0), math.ceil(count / number))
    return dict(sorted(largest.items()))
