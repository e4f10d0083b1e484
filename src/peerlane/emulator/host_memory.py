"""Memory of emulated ranks: parts of arenas and ordinary tensors, at the addresses that their kernels use."""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from peerlane.emulator.cuda_runtime import runtime
from peerlane.emulator.job import BASE, PAGE_BYTES, Region, whole_pages

MOST_BYTES = 1 << 40
MOST_TABLE_BYTES = 1 << 16
"""Memory that may be a table of addresses. What lies behind a larger one must be an argument, or symmetric."""


class Part:
    """Host memory that kernels of emulated ranks find at ``address``."""

    def __init__(self, name: str, rank: int, address: int, memory: torch.Tensor, *, symmetric: bool = False) -> None:
        self.name, self.rank, self.address, self.symmetric = name, rank, address, symmetric
        self.memory = memory
        self._bytes = memory.numpy()
        self.shown = not symmetric
        """whether the host can see it, hence change it"""
        self.read_by_caller = True
        """whether a caller reads it behind each call, if the host can see it"""
        self._pages: set[int] | None = None if self.shown else set()

    @property
    def nbytes(self) -> int:
        return self._bytes.nbytes

    def show(self) -> None:
        """Allows the host to read and write the part from now on."""
        self.shown, self._pages = True, None

    def contents(self) -> list[tuple[int, bytes]]:
        """Returns all pages that are not zero: offset and content."""
        pages: Sequence[int] = range(-(-self.nbytes // PAGE_BYTES)) if self._pages is None else sorted(self._pages)
        contents = ((page * PAGE_BYTES, self._bytes[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]) for page in pages)
        return [(offset, page.tobytes()) for offset, page in contents if page.any()]

    def update(self, pages: Sequence[tuple[int, bytes]]) -> None:
        """Takes over what a kernel has written."""
        for offset, content in pages:
            self._bytes[offset : offset + len(content)] = np.frombuffer(content, dtype=np.uint8)
        if self._pages is not None:
            self._pages |= {offset // PAGE_BYTES for offset, _ in pages}

    def region(self, rank: int, contents: Sequence[tuple[int, bytes]], expected: bytes | None = None) -> Region:
        """Returns the part as a job has it, where its rank has number ``rank``."""
        return Region(self.name, rank, self.address, self.nbytes, self.symmetric, torch.uint8, contents, expected)


class MulticastPart(Part):
    """A rank's multicast address: it stands for ``parts``, which have the same size on each rank, and holds nothing itself."""

    def __init__(self, rank: int, address: int, parts: Sequence[Part]) -> None:
        super().__init__(f"multicast address of {parts[0].name}", rank, address, torch.empty(0, dtype=torch.uint8), symmetric=True)
        self._parts = list(parts)

    def region(self, rank: int, contents: Sequence[tuple[int, bytes]], expected: bytes | None = None) -> Region:
        """Returns the address as a job has it."""
        return Region(self.name, rank, self.address, self._parts[0].nbytes, False, multicast=tuple(part.address for part in self._parts))


class AddressSpace:
    """Addresses of all emulated ranks. None is given twice, and tensors that have one are kept."""

    def __init__(self) -> None:
        self._end = PAGE_BYTES
        self._by_storage: dict[int, Part] = {}
        self._placed: list[Part] = []
        """by address"""

    def reserve(self, nbytes: int) -> int:
        """Reserves ``nbytes`` of free addresses, with a guard page behind them; returns the first."""
        if (found := runtime()) is not None:
            return found.take(nbytes)
        address = BASE + self._end
        self._end += whole_pages(nbytes)
        return address

    def address_of_new(self, memory: torch.Tensor) -> int:
        """Returns the address for memory that has none yet: where it lies, if C++ code of the rank sees the same memory there."""
        lies, found = memory.untyped_storage().data_ptr(), runtime()
        return lies if found is not None and found.keep(lies) else self.reserve(memory.untyped_storage().nbytes())

    def place(self, part: Part) -> None:
        """Makes the part lie at its address from now on."""
        self._by_storage[part.memory.untyped_storage().data_ptr()] = part
        bisect.insort(self._placed, part, key=lambda placed: placed.address)

    def part_of(self, tensor: torch.Tensor) -> Part | None:
        """Returns the part in which the tensor lies, if that has an address already."""
        return self._by_storage.get(tensor.untyped_storage().data_ptr())

    def address(self, tensor: torch.Tensor, rank: int) -> int:
        """Returns the address of the tensor's first element in a rank's kernels; 0 for an empty one."""
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0:
            return 0
        part = self._by_storage.get(storage.data_ptr())
        offset = int(tensor.storage_offset()) * tensor.itemsize
        if part is None:
            name = f"a tensor {tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"
            if (found := runtime()) is not None:
                found.adopt(tensor)
                self.at(tensor.untyped_storage().data_ptr(), name)
                return tensor.untyped_storage().data_ptr() + offset
            part = Part(name, rank, self.reserve(storage.nbytes()), torch.empty(0, dtype=torch.uint8).set_(storage))
            self.place(part)
        return part.address + offset

    def reached(self, arguments: Iterable[bytes]) -> Iterator[Part]:
        """Yields the parts into which a word of the arguments points, or a word of a small part that is reached so, as in a table."""
        seen: set[Part] = set()
        words = [np.frombuffer(argument[: len(argument) // 8 * 8], dtype=np.uint64) for argument in arguments]
        while words:
            for part in self._pointed(words.pop()):
                if part not in seen:
                    seen.add(part)
                    yield part
                    if part.nbytes <= MOST_TABLE_BYTES:
                        words.append(part.memory.numpy()[: part.nbytes // 8 * 8].view(np.uint64))

    def _pointed(self, words: np.ndarray[Any, np.dtype[np.uint64]]) -> Iterator[Part]:
        for word in words[(words >= BASE) & (words < BASE + MOST_BYTES)]:
            if (part := self.at(int(word))) is not None:
                yield part

    def at(self, address: int, name: str = "") -> Part | None:
        """Returns the part in which an address lies, a new one of this name if C++ code has taken the memory; None where there is none."""
        index = bisect.bisect_right(self._placed, address, key=lambda placed: placed.address)
        if index and address < self._placed[index - 1].address + self._placed[index - 1].nbytes:
            return self._placed[index - 1]
        found = runtime()
        if found is None or (block := found.keep(address)) is None:
            return None
        memory = torch.frombuffer((ctypes.c_uint8 * block.nbytes).from_address(block.begin), dtype=torch.uint8)
        part = Part(name or f"memory of {block.nbytes} bytes", block.rank, block.begin, memory, symmetric=block.exported)
        part.show()
        self.place(part)
        return part
