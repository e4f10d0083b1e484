"""Jitter of ranks under stress: they wait on the host or in their stream, have some of their SMs held, or a GPU kept busy.

Which rank does what before which call, the supervisor draws and sends along with the request. All of it is made ready before candidate code
is loaded, and ends by itself, whatever the candidate does meanwhile.
"""

import ctypes
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_sleep = time.sleep
_device_sleep, _event = torch.cuda._sleep, torch.cuda.Event
_clock = time.monotonic
_CYCLES_PER_US = 1_800  # SM clock
_PIECE_CYCLES = 1_300_000  # 0.7 ms on an SM
_PIECES_AHEAD = 4  # the GPU need not wait for the host, and has nothing left to do a few milliseconds after the end

# One block fills half of an SM's threads and all but a little of its shared memory: no second one fits, nor any block that needs much.
_THREADS, _SHARED_BYTES_LEFT, _SHARE_OF_SMS = 1024, 28 << 10, 0.5
SM_HOLDER = r"""
#include <peerlane/ptx.cuh>
using namespace peerlane;

extern "C" __global__ void hold_sm(u64 nanoseconds) {
    extern __shared__ char unused[];
    const u64 begin = ptx::globaltimer();
    const long long start = clock64(), most = static_cast<long long>(nanoseconds) * 4;  // cycles, if the timer stood still
    do ptx::sleep(200);
    while (ptx::globaltimer() - begin < nanoseconds && clock64() - start < most);
}
"""


class Jitter:
    """The ways in which a rank can be disturbed, by the names that requests use: ``host``, and on GPUs ``stream`` and ``hold_sms``."""

    def __init__(self, device: torch.device) -> None:
        self._ways: dict[str, Callable[[float], None]] = {"host": lambda us: _sleep(us * 1e-6)}
        self._device = device
        if device.type == "cuda":
            self._ways["stream"] = lambda us: _device_sleep(int(us * _CYCLES_PER_US))  # type: ignore[no-untyped-call]

    def load_sm_holder(self, code: bytes) -> None:
        """Adds ``hold_sms``; ``code`` is what :func:`compile_sm_holder` made for such a GPU."""
        self._ways["hold_sms"] = _sm_holder(self._device, code)

    def __call__(self, way: str, us: float) -> None:
        self._ways[way](us)


def compile_sm_holder(device: torch.device) -> bytes:
    """Compiles the kernel that holds SMs. For trusted ranks: confined ones may see no cache."""
    from peerlane.device import compile_cubin

    major, minor = torch.cuda.get_device_capability(device)
    return compile_cubin(SM_HOLDER, arch=f"sm_{major}{minor}").path.read_bytes()


def _sm_holder(device: torch.device, code: bytes) -> Callable[[float], None]:
    """Returns a function that has half of the current device's SMs held, from a stream of its own, and returns at once."""
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


def keep_busy(seconds: float) -> None:
    """Enqueues short kernels on the current device for so long, and returns when the last of them has ended. With 0 it does nothing.

    Processes take turns on a GPU. When the time slice of one ends, its kernels stop wherever they are, and go on with its next slice,
    milliseconds later. So beside a trusted rank that keeps the GPU busy a candidate's rank falls behind inside of its kernels, where no
    wait before a call could hold it up.
    """
    end = _clock() + seconds
    ahead: deque[Any] = deque()
    while _clock() < end:
        _device_sleep(_PIECE_CYCLES)  # type: ignore[no-untyped-call]
        piece = _event(blocking=True)  # type: ignore[no-untyped-call]  # the host's core is left to the candidate
        piece.record()
        ahead.append(piece)
        if len(ahead) == _PIECES_AHEAD:
            ahead.popleft().synchronize()
    for piece in ahead:
        piece.synchronize()
