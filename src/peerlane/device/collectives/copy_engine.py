"""Copies between ranks by the GPU's copy engines: no SM is used, and large copies run at the highest rate there is.

Deprecated: no kernel of the kit uses it, its calls cannot be replayed in CUDA graphs, and nothing ends its waits. New code uses
:class:`peerlane.device.Communicator`.

A large tensor goes in chunks. Behind each the engine raises a flag at the receiver, in stream order, so a kernel that waits for
``peers.wait(source, slot, number)`` starts on the first chunk while the next ones are on their way:

    engine = CopyEngine(arena, flags=arena.take(slots * arena.world_size * LINE_BYTES))
    chunks = engine.push(peer, target, tensor, slot=0, number=n, chunk_bytes=8 << 20)      chunk i raises the flag to n + 1 + i
    engine.join()                                                                          the current stream waits for all that was started

Numbers come from the host and only grow, so calls are not for replay in CUDA graphs: a replay would raise the flags to old numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from peerlane.device.host import cuda_bindings
from peerlane.device.host.arena import Arena
from peerlane.device.host.layout import LINE_BYTES
from peerlane.errors import DeviceError, UsageError

DEFAULT_CHUNK_BYTES = 8 << 20


def chunks(nbytes: int, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """Yields start and length of every chunk; the last may be shorter."""
    if chunk_bytes < 1:
        raise UsageError(f"chunks of {chunk_bytes} bytes; expected a positive number")
    return ((start, min(chunk_bytes, nbytes - start)) for start in range(0, nbytes, chunk_bytes))


def flag_offset(flags: int, slot: int, source: int, world_size: int) -> int:
    """Returns the offset of the flag that rank ``source`` raises in ``slot``; as ``peerlane::Peers`` has it."""
    return flags + (slot * world_size + source) * LINE_BYTES


class CopyEngine:
    """The copy engines, on a stream of their own, for copies to and from the peers of ``arena``; flags lie at offset ``flags``, as those of
    kernels do."""

    def __init__(self, arena: Arena, flags: int) -> None:
        self.arena = arena
        self.flags = flags
        arena.stay()
        self.stream = torch.cuda.Stream(arena.device)  # type: ignore[no-untyped-call, unused-ignore]

    def push(self, peer: int, target: int, source: torch.Tensor, *, slot: int, number: int, chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> int:
        """Copies ``source`` to offset ``target`` of rank ``peer``'s arena, behind what the current stream has done so far.

        Chunk i raises this rank's flag of ``slot`` there to ``number + 1 + i``; returns the number of chunks.
        """
        base = self.arena.view.base
        flag = base[peer] + flag_offset(self.flags, slot, self.arena.rank, self.arena.world_size)
        return self._copy(base[peer] + target, source.data_ptr(), _bytes(source), (flag, number, chunk_bytes))

    def pull(self, peer: int, source: int, target: torch.Tensor, *, slot: int, number: int, chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> int:
        """Copies from offset ``source`` of rank ``peer``'s arena to ``target``, behind what the current stream has done so far, and
        ``wait`` calls before this one. Chunk i raises the flag of (``slot``, ``peer``) here, as if the peer had pushed."""
        base = self.arena.view.base
        flag = base[self.arena.rank] + flag_offset(self.flags, slot, peer, self.arena.world_size)
        return self._copy(target.data_ptr(), base[peer] + source, _bytes(target), (flag, number, chunk_bytes))

    def wait(self, source: int, *, slot: int, number: int) -> None:
        """Makes what is started from here on wait until rank ``source`` has raised its flag of ``slot`` here to ``number`` or later.

        The hardware waits without a deadline: for flags that kernels raise, which have one.
        """
        driver = cuda_bindings.driver()
        flag = self.arena.view.base[self.arena.rank] + flag_offset(self.flags, slot, source, self.arena.world_size)
        at_least = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
        _check(driver.cuStreamWaitValue32(self.stream.cuda_stream, flag, number & 0xFFFFFFFF, at_least), "waiting for a flag")

    def join(self) -> None:
        """Makes the current stream wait for everything started here."""
        torch.cuda.current_stream(self.arena.device).wait_stream(self.stream)

    def _copy(self, target: int, source: int, nbytes: int, signal: tuple[int, int, int]) -> int:
        driver = cuda_bindings.driver()
        flag, number, chunk_bytes = signal
        self.stream.wait_stream(torch.cuda.current_stream(self.arena.device))
        stream, count = self.stream.cuda_stream, 0
        for start, length in chunks(nbytes, chunk_bytes):
            count += 1
            _check(driver.cuMemcpyDtoDAsync(target + start, source + start, length, stream), f"copying {length} bytes")
            # The default kind has a memory barrier for the whole system in front of the write.
            _check(driver.cuStreamWriteValue32(stream, flag, number + count & 0xFFFFFFFF, 0), "raising a flag")
        return count


def _bytes(tensor: torch.Tensor) -> int:
    if not tensor.is_contiguous():
        raise UsageError(f"a copy of strides {tensor.stride()}; expected a contiguous tensor: pass .contiguous()")
    return tensor.nbytes


def _check(result: tuple[object, ...], what: str) -> None:
    if result[0]:
        raise DeviceError(f"{what} failed: {cuda_bindings.describe(result[0])}")
