"""Memory of emulated ranks: parts of arenas and ordinary tensors, at the addresses that their kernels use."""

import bisect
import contextlib
import ctypes
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from peerlane.emulator.cuda_runtime import runtime
from peerlane.emulator.job import BASE, PAGE_BYTES, Region, whole_pages

Runs = np.ndarray[Any, np.dtype[np.int64]]
"""Rows of where a piece of a part begins, and how many bytes it has."""
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
        """whether a caller reads it behind this call, if the host can see it"""
        self._pages: set[int] | None = None if self.shown else set()
        self.dtype: torch.dtype | None = torch.uint8
        self.fresh: torch.Tensor | None = None
        """a tensor of this memory that nobody had written when it was made, as torch.empty returns it"""
        self.written = False
        """by a kernel"""
        self.closed = False
        self.mapped: dict[int, Part] = {}
        """by rank, whose own part must be in use so that it can use this one, too"""
        self._holders = self._count()

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

    @property
    def is_shared(self) -> bool:
        """True unless it is a tensor of symmetric memory of which no other rank knows yet."""
        return len(self.mapped) != 1

    def content(self, begin: int, nbytes: int) -> bytes:
        """Returns some of the part's bytes."""
        return self._bytes[begin : begin + nbytes].tobytes()

    def _count(self) -> int:
        return int(torch._C._storage_Use_Count(self.memory.untyped_storage()._cdata))

    def freed_on(self, rank: int) -> bool:
        """Tells whether a rank has freed its tensor, and the handle of its rendezvous, by which it uses this part."""
        own = self.mapped.get(rank)
        return self.closed or (own is not None and own._count() <= own._holders)

    @property
    def unwritten(self) -> bool:
        """True if host code has not written here yet."""
        return self.fresh is not None and not self.fresh.is_inference() and self.fresh._version == 0

    def update(self, pages: Sequence[tuple[int, bytes]]) -> None:
        """Takes over what a kernel has written."""
        self.written |= bool(pages)
        for offset, content in pages:
            self._bytes[offset : offset + len(content)] = np.frombuffer(content, dtype=np.uint8)
        if self._pages is not None:
            self._pages |= {offset // PAGE_BYTES for offset, _ in pages}

    def region(self, rank: int, contents: Sequence[tuple[int, bytes]], expected: bytes | None = None, unwritten: bool = False) -> Region:
        """Returns the part as a job has it, where its rank has number ``rank``."""
        region = Region(self.name, rank, self.address, self.nbytes, self.symmetric, self.dtype, contents, expected)
        region.unwritten, region.any_order = unwritten, True
        return region


class MulticastPart(Part):
    """A rank's multicast address: it stands for ``parts``, which have the same size on each rank, and holds nothing itself."""

    def __init__(self, rank: int, address: int, parts: Sequence[Part]) -> None:
        super().__init__(f"multicast address of {parts[0].name}", rank, address, torch.empty(0, dtype=torch.uint8), symmetric=True)
        self._parts = list(parts)

    def region(self, rank: int, contents: Sequence[tuple[int, bytes]], expected: bytes | None = None, unwritten: bool = False) -> Region:
        """Returns the address as a job has it."""
        return Region(self.name, rank, self.address, self._parts[0].nbytes, False, multicast=tuple(part.address for part in self._parts))


@contextlib.contextmanager
def empty_noted(space: "AddressSpace") -> Iterator[None]:
    """While this lasts, it is recorded which tensors hold what nobody has written."""
    made_by = [(torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty")]
    before = [getattr(place, name) for place, name in made_by]

    def noting(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *args, **kwargs: space.note_empty(make(*args, **kwargs))

    try:
        for (place, name), make in zip(made_by, before, strict=True):
            setattr(place, name, noting(make))
        yield
    finally:
        for (place, name), make in zip(made_by, before, strict=True):
            setattr(place, name, make)


class AddressSpace:
    """Addresses of all emulated ranks. None is given twice, and tensors that have one are kept."""

    def __init__(self) -> None:
        self._end = PAGE_BYTES
        self._by_storage: dict[int, Part] = {}
        self.placed: list[Part] = []
        """by address"""
        self._empty: dict[int, weakref.ref[torch.Tensor]] = {}
        """by storage, tensors that torch.empty has made"""
        self._reserved: list[range] = []
        """addresses that the runtime of C++ code has given, and that are no memory but where a part is placed"""

    def reserve(self, nbytes: int) -> int:
        """Reserves ``nbytes`` of free addresses, with a guard page behind them; returns the first."""
        if (found := runtime()) is not None:
            taken = found.take(nbytes)
            self._reserved.append(range(taken, taken + nbytes))
            return taken
        address = BASE + self._end
        self._end += whole_pages(nbytes)
        return address

    def address_of_new(self, memory: torch.Tensor) -> int:
        """Returns the address for memory that has none yet: where it lies, if C++ code of the rank sees the same memory there."""
        lies, found = memory.untyped_storage().data_ptr(), runtime()
        return lies if found is not None and found.keep(lies) else self.reserve(memory.untyped_storage().nbytes())

    def note_empty(self, tensor: torch.Tensor) -> torch.Tensor:
        """Records that nobody has written a tensor yet; returns it, full of NaN, so that a use of its contents shows."""
        if type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.numel():
            place = tensor.untyped_storage().fill_(0xFF).data_ptr()  # type: ignore[attr-defined]
            self._empty[place] = weakref.ref(tensor, lambda _: self._empty.pop(place, None))
        return tensor

    def place(self, part: Part) -> None:
        """Makes the part lie at its address from now on."""
        self._by_storage[part.memory.untyped_storage().data_ptr()] = part
        bisect.insort(self.placed, part, key=lambda placed: placed.address)

    def part_of(self, tensor: torch.Tensor) -> Part | None:
        """Returns the part in which the tensor lies, if that has an address already."""
        return self._by_storage.get(tensor.untyped_storage().data_ptr())

    def place_of(self, tensor: torch.Tensor) -> tuple[Part, int] | None:
        """Returns the part in which the tensor lies, and where in it, in bytes; None if it has no address yet."""
        lies = int(tensor.untyped_storage().data_ptr())
        part = self._by_storage.get(lies) or (None if runtime() is None else self._placed_at(lies))
        if part is None:
            return None
        within = lies - int(part.memory.untyped_storage().data_ptr())  # where C++ code has made the tensor
        return part, within + int(tensor.storage_offset()) * tensor.itemsize

    def address(self, tensor: torch.Tensor, rank: int) -> int:
        """Returns the address of the tensor's first element in a rank's kernels; 0 for an empty one."""
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0:
            return 0
        part = self._by_storage.get(storage.data_ptr())
        if part is None:
            name = f"a tensor {tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"
            made = self._empty.get(storage.data_ptr())
            if (found := runtime()) is not None:
                found.adopt(tensor)
                part = self.at(tensor.untyped_storage().data_ptr(), name)
                assert part is not None, "it was adopted"
            else:
                part = Part(name, rank, self.reserve(storage.nbytes()), torch.empty(0, dtype=torch.uint8).set_(storage))
                self.place(part)
            part.dtype = tensor.dtype
            # What C++ code writes is not seen.
            part.fresh = None if made is None or found is not None else made()
        part.dtype = part.dtype or tensor.dtype
        within = tensor.untyped_storage().data_ptr() - part.memory.untyped_storage().data_ptr()  # memory that C++ code has taken
        return part.address + int(within) + int(tensor.storage_offset()) * tensor.itemsize

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
        if (placed := self._placed_at(address)) is not None:
            return placed
        found = runtime()
        if found is None or any(address in area for area in self._reserved) or (block := found.keep(address)) is None:
            return None
        memory = torch.frombuffer((ctypes.c_uint8 * block.nbytes).from_address(block.begin), dtype=torch.uint8)
        part = Part(name or f"memory of {block.nbytes} bytes", block.rank, block.begin, memory, symmetric=block.exported)
        part.dtype = None
        part.show()
        self.place(part)
        return part

    def _placed_at(self, address: int) -> Part | None:
        index = bisect.bisect_right(self.placed, address, key=lambda placed: placed.address)
        return self.placed[index - 1] if index and address < self.placed[index - 1].address + self.placed[index - 1].nbytes else None
