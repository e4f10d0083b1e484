"""Device memory that torch's allocator knows nothing of, and the driver calls behind it."""

from collections.abc import Callable
from typing import Any

import torch

from peerlane.device.host import cuda_bindings
from peerlane.device.host.group import Small
from peerlane.device.host.waits import RECORD_WORDS
from peerlane.errors import DeviceError

GRANULARITY_BYTES = 2 << 20
"""The driver gives memory in multiples of this."""


Exchange = Callable[[Small], list[Small]]


class DeviceMemory:
    """Raw device memory with the array interface by which torch takes a view of it."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (pointer, False), "version": 3, "strides": None}


def bytes_at(pointer: int, size: int, device: torch.device) -> torch.Tensor:
    """Device memory as a tensor of bytes. It owns nothing: not to be used once the memory was given back."""
    return torch.as_tensor(DeviceMemory(pointer, size), device=device)


def whole_granules(nbytes: int) -> int:
    """Returns at least so many bytes, in a size that the driver allocates."""
    return -(-nbytes // GRANULARITY_BYTES) * GRANULARITY_BYTES


def pinned_fault() -> torch.Tensor:
    """A wait record that kernels and the host can read and write, the host also after the device was lost."""
    return torch.zeros(RECORD_WORDS, dtype=torch.int32, device="cpu", pin_memory=True)


def pinned_word() -> torch.Tensor:
    """A word that kernels and the host can read and write."""
    return torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)


def checked(result: tuple[Any, ...], what: str) -> Any:
    """The value of a driver call; raises DeviceError that says what failed."""
    status, *values = result
    if status:
        raise DeviceError(f"{what} failed: {cuda_bindings.describe(status)}")
    return values[0] if values else None


def together(exchange: Exchange, step: Callable[[], Small]) -> list[Small]:
    """Collective: what ``step`` returns on every rank, by rank. Raises DeviceError on all ranks if it failed on one."""
    own, problem = None, ""
    try:
        own = step()
    except Exception as error:
        problem = f"{error}"
    answers = exchange([problem, own])
    if problems := [f"rank {rank}: {problem}" for rank, (problem, _) in enumerate(answers) if problem]:
        raise DeviceError("; ".join(problems))
    return [value for _, value in answers]
