"""What a rank does to its own timing under stress: it waits on the host or in its stream, or has some of its SMs held.

Which rank does what before which call, the supervisor draws and sends along with the request. All of it is made ready before candidate code
is loaded, and ends by itself, whatever the candidate does meanwhile.
"""

from __future__ import annotations

import ctypes
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

_sleep = time.sleep
_device_sleep = torch.cuda._sleep
_CYCLES_PER_US = 1_800  # SM clock

# One block fills half of an SM's threads and all but a little of its shared memory: no second one fits, nor any block that needs much.
_THREADS, _SHARED_BYTES_LEFT, _SHARE_OF_SMS = 1024, 28 << 10, 0.5
CROWD = r"""
extern "C" __global__ void hold_sm(unsigned long long nanoseconds) {
    extern __shared__ char unused[];
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin) :: "memory");
    const long long start = clock64(), most = (long long)nanoseconds * 4;  // cycles, if the timer stood still
    do {
        __nanosleep(200);
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now) :: "memory");
    } while (now - begin < nanoseconds && clock64() - start < most);
}
"""


class Jitter:
    """The ways in which a rank can be disturbed, by the names that requests use: ``host``, and on GPUs ``stream`` and ``crowd``."""

    def __init__(self, device: torch.device) -> None:
        self._ways: dict[str, Callable[[float], None]] = {"host": lambda us: _sleep(us * 1e-6)}
        self._device = device
        if device.type == "cuda":
            self._ways["stream"] = lambda us: _device_sleep(int(us * _CYCLES_PER_US))  # type: ignore[no-untyped-call]

    def arm(self, code: bytes) -> None:
        """Adds ``crowd``; ``code`` is what :func:`compile_crowd` made for such a GPU."""
        self._ways["crowd"] = _crowd(self._device, code)

    def __call__(self, way: str, us: float) -> None:
        self._ways[way](us)


def compile_crowd(device: torch.device) -> bytes:
    """The kernel that holds SMs. For trusted ranks: confined ones may see no cache."""
    from peerlane.device import compile_cubin

    major, minor = torch.cuda.get_device_capability(device)
    return compile_cubin(CROWD, arch=f"sm_{major}{minor}").path.read_bytes()


def _crowd(device: torch.device, code: bytes) -> Callable[[float], None]:
    """A function that has half of the current device's SMs held, from a stream of its own, and returns at once."""
    from peerlane.device import Cubin, Kernel

    major, minor = torch.cuda.get_device_capability(device)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(code)
        kernel = Kernel(Cubin(Path(file.name), f"sm_{major}{minor}", compiled_here=False), "hold_sm")
    properties = torch.cuda.get_device_properties(device)
    blocks = max(1, int(properties.multi_processor_count * _SHARE_OF_SMS))
    shared_bytes = properties.shared_memory_per_multiprocessor - _SHARED_BYTES_LEFT
    launch = kernel.bind(blocks, _THREADS, (ctypes.c_ulonglong(0),), shared_bytes=shared_bytes)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def hold(us: float) -> None:
        launch.args[0].value = int(us * 1e3)
        launch(stream.cuda_stream)

    return hold
