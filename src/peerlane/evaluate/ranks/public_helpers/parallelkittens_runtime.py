"""``utils.parallelkittens_runtime``: tensors that all ranks map, and barriers, of an extension compiled against ThunderKittens.

The extension brings the class ``TKParallelTensor(shape, dtype, rank, world_size, multicast)``. Each is made once per process.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from peerlane.settings import MULTICAST_REASON, multicast_allowed

_BARRIER_WORDS = 64

_made: dict[tuple[Any, ...], Any] = {}


def create_parallel_tensor(ext: Any, shape: Sequence[int], dtype: torch.dtype = torch.bfloat16, *, multicast: bool = True) -> Any:
    """A new tensor of this shape on every rank, which all ranks map. All ranks call it.

    Raises RuntimeError if it asks for multicast where that may not be used.
    """
    if multicast and not multicast_allowed():
        raise RuntimeError(f"this tensor needs {MULTICAST_REASON}; multicast=False does without")
    return ext.TKParallelTensor(list(shape), dtype, dist.get_rank(), dist.get_world_size(), multicast)


def get_or_create_parallel_tensor(ext: Any, shape: Sequence[int], dtype: torch.dtype = torch.bfloat16, *, multicast: bool = True) -> Any:
    """The tensor of this extension, shape, dtype and kind."""
    key = (id(ext), tuple(shape), dtype, multicast)
    if key not in _made:
        _made[key] = create_parallel_tensor(ext, shape, dtype, multicast=multicast)
    return _made[key]


def get_or_create_barrier(ext: Any, *, num_devices: int) -> Any:
    """The extension's barrier: 64 words with multicast."""
    if num_devices != dist.get_world_size():
        raise RuntimeError(
            f"a barrier of {num_devices} devices on {dist.get_world_size()} ranks: expected as many; use --world-size {num_devices}"
        )
    key = (id(ext), "barrier")
    if key not in _made:
        _made[key] = create_parallel_tensor(ext, [_BARRIER_WORDS], torch.int32, multicast=True)
    return _made[key]
