"""A GPU at rest: nothing of this process runs on any of its GPUs, no part of the L2 cache is set aside, and nothing useful is in it.

Functions are bound by :func:`bind`, which ranks call before candidate code is loaded.
"""

import functools
from collections.abc import Callable

import torch

from peerlane.evaluate.memory.arena import runtime

_synchronize, _count = torch.cuda.synchronize, torch.cuda.device_count
_in_use = getattr(torch._C, "_cuda_hasPrimaryContext", lambda _: False)  # a build without CUDA has no such function
_fill = torch.Tensor.fill_

_L2_MULTIPLE = 3  # of what the cache holds, that is written to leave nothing else in it


def synchronize_all() -> None:
    """Waits for everything that this process has enqueued on any GPU, on any stream: work left elsewhere is not done either."""
    _synchronize()
    for device in range(_count()):
        if _in_use(device):
            _synchronize(device)


def quiesce() -> None:
    """Waits until this process does nothing, and takes back what part of the current device's L2 cache it may have set aside."""
    synchronize_all()
    bind()()


def evict() -> None:
    """Leaves nothing in the current device's L2 cache that a call could find there, in stream order."""
    _fill(_filler(), 0)


def zeros(most_bytes: int) -> torch.Tensor:
    """Returns a part of what :func:`evict` writes, of so many bytes at most: they are zeros, of no use to any call."""
    return _filler()[: most_bytes // 4 * 4].view(torch.float32)


@functools.cache
def _filler() -> torch.Tensor:
    """Returns the tensor that is written for that; made by the first block, which runs before candidate code is loaded."""
    l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return torch.zeros(_L2_MULTIPLE * l2_bytes, dtype=torch.uint8, device="cuda")


@functools.cache
def bind() -> Callable[[], None]:
    """The function that undoes a persisting L2 carve-out on the current device. A device that knows none says so, and need not."""
    cudart = runtime()
    reset, limit = cudart.cudaCtxResetPersistingL2Cache, cudart.cudaDeviceSetLimit
    persisting = cudart.cudaLimit.cudaLimitPersistingL2CacheSize

    def undo() -> None:
        reset()
        limit(persisting, 0)

    return undo
