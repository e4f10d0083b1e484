"""What a rank locks and unlocks inputs with, and what it commits itself with: keystreams and digests, on the host or in stream order.

On GPUs the keystream is ChaCha8 (Bernstein, "ChaCha, a variant of Salsa20", 2008) and the digest a tree of its permutation, by kernels
that are compiled before candidate code is loaded; on CPU both come from hashlib. The two sides of an evaluation are on one kind of device.
"""

from __future__ import annotations

import abc
import ctypes
import functools
import hashlib
import os
import struct
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from peerlane.errors import HarnessError
from peerlane.evaluate.memory.arena import runtime
from peerlane.evaluate.memory.slots import ArgumentSlots, OutputRegions
from peerlane.evaluate.timing.turnstile import Page

_clock, _yield = time.monotonic, os.sched_yield
_shake, _blake, _unpack = hashlib.shake_128, hashlib.blake2b, struct.unpack

THREADS = 256
_BLOCKS_PER_SM = 4
_BYTES_PER_THREAD = 64

KEYSTREAM = r"""
typedef unsigned int u32;
typedef unsigned long long u64;

__device__ __forceinline__ u32 turned(u32 word, int by) { return word << by | word >> (32 - by); }

__device__ __forceinline__ void quarter(u32& a, u32& b, u32& c, u32& d) {
    a += b; d = turned(d ^ a, 16);
    c += d; b = turned(b ^ c, 12);
    a += b; d = turned(d ^ a, 8);
    c += d; b = turned(b ^ c, 7);
}

// Eight rounds of ChaCha.
__device__ __forceinline__ void permute(u32* out) {
#pragma unroll
    for (int round = 0; round < 4; round++) {
        quarter(out[0], out[4], out[8], out[12]);
        quarter(out[1], out[5], out[9], out[13]);
        quarter(out[2], out[6], out[10], out[14]);
        quarter(out[3], out[7], out[11], out[15]);
        quarter(out[0], out[5], out[10], out[15]);
        quarter(out[1], out[6], out[11], out[12]);
        quarter(out[2], out[7], out[8], out[13]);
        quarter(out[3], out[4], out[9], out[14]);
    }
}

__device__ __forceinline__ void chacha8(const u32* key, u64 block, u32* out) {
    const u32 begin[16] = {0x61707865, 0x3320646e, 0x79622d32, 0x6b206574, key[0], key[1], key[2], key[3], key[4], key[5], key[6], key[7],
                           (u32)block, (u32)(block >> 32), 0, 0};
#pragma unroll
    for (int i = 0; i < 16; i++) out[i] = begin[i];
    permute(out);
#pragma unroll
    for (int i = 0; i < 16; i++) out[i] += begin[i];
}

// target = source ^ keystream; both begin at a multiple of 16 bytes, and may be the same.
extern "C" __global__ void apply_keystream(const unsigned char* source, unsigned char* target, u64 bytes, const u32* shared_key) {
    u32 key[8], words[16];
#pragma unroll
    for (int i = 0; i < 8; i++) key[i] = shared_key[i];
    const u64 step = (u64)gridDim.x * blockDim.x;
    for (u64 block = (u64)blockIdx.x * blockDim.x + threadIdx.x; block * 64 < bytes; block += step) {
        chacha8(key, block, words);
        const u64 at = block * 64;
        if (at + 64 <= bytes) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                uint4 text = ((const uint4*)(source + at))[i];
                text.x ^= words[4 * i]; text.y ^= words[4 * i + 1]; text.z ^= words[4 * i + 2]; text.w ^= words[4 * i + 3];
                ((uint4*)(target + at))[i] = text;
            }
        } else {
#pragma unroll
            for (int i = 0; i < 64; i++)
                if (at + i < bytes) target[at + i] = source[at + i] ^ (unsigned char)(words[i / 4] >> (8 * (i % 4)));
        }
    }
}
"""

DIGEST = r"""
// A digest of data under a key of eight words, to result[0..1]; then ticket to result[2].
// Every thread chains the pieces of 32 bytes that are its own; trees join the threads of a block, and the blocks. A node is ChaCha8's
// permutation of 16 words with its first half fed forward. scratch: a counter that is 0, and is again afterwards, and 32 bytes a block.
__device__ __forceinline__ void chain(u32* node, const u32* piece) {
    u32 state[16];
#pragma unroll
    for (int i = 0; i < 8; i++) { state[i] = node[i]; state[8 + i] = piece[i]; }
    permute(state);
#pragma unroll
    for (int i = 0; i < 8; i++) node[i] ^= state[i];
}

__device__ __forceinline__ void begin_node(u32* node, const u32* key, u64 bytes, u32 number) {
#pragma unroll
    for (int i = 0; i < 8; i++) node[i] = key[i];
    node[0] ^= number;
    node[1] ^= (u32)bytes;
    node[2] ^= (u32)(bytes >> 32);
}

// Joins the nodes of a block's threads, a power of two, into that of thread 0.
__device__ __forceinline__ void join(u32* node, u32 (*nodes)[8]) {
    for (u32 half = blockDim.x / 2; half > 0; half /= 2) {
        for (int i = 0; i < 8; i++) nodes[threadIdx.x][i] = node[i];
        __syncthreads();
        if (threadIdx.x < half) chain(node, nodes[threadIdx.x + half]);
        __syncthreads();
    }
}

extern "C" __global__ void digest(const unsigned char* data, u64 bytes, const u32* key, u64* scratch, u64* result, u64 ticket) {
    __shared__ u32 nodes[256][8];
    __shared__ u32 is_last;
    u32 node[8], piece[8];
    const u32 thread = blockIdx.x * blockDim.x + threadIdx.x;
    begin_node(node, key, bytes, thread);
    for (u64 at = (u64)thread * 32; at < bytes; at += (u64)gridDim.x * blockDim.x * 32) {
        for (int i = 0; i < 8; i++) piece[i] = 0;
        if (at + 32 <= bytes) {
            for (int i = 0; i < 8; i++) piece[i] = ((const u32*)(data + at))[i];
        } else {
            for (u32 i = 0; at + i < bytes; i++) piece[i / 4] |= (u32)data[at + i] << (8 * (i % 4));
        }
        chain(node, piece);
    }
    join(node, nodes);
    if (threadIdx.x == 0) {
        volatile u32* mine = (volatile u32*)(scratch + 1 + 4 * blockIdx.x);
        for (int i = 0; i < 8; i++) mine[i] = node[i];
        __threadfence();
        is_last = atomicAdd((unsigned int*)scratch, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    begin_node(node, key, bytes, 0x80000000u + threadIdx.x);
    for (u32 block = threadIdx.x; block < gridDim.x; block += blockDim.x) {
        const volatile u32* other = (const volatile u32*)(scratch + 1 + 4 * block);
        for (int i = 0; i < 8; i++) piece[i] = other[i];
        chain(node, piece);
    }
    join(node, nodes);
    if (threadIdx.x == 0) {
        volatile u64* out = result;
        out[0] = node[0] | (u64)node[1] << 32;
        out[1] = node[2] | (u64)node[3] << 32;
        atomicSub((unsigned int*)scratch, gridDim.x);
        __threadfence_system();
        out[2] = ticket;
    }
}
"""

DOOR = r"""
// Says with the ticket that it waits, until line[4], which the host writes last, is the ticket, too, and takes the key before it; for no
// longer than so many nanoseconds.
extern "C" __global__ void take_key(u64* begun, const u64* line, u64 ticket, u64 nanoseconds, u64* key) {
    u64 begin, now, released;
    *(volatile u64*)begun = ticket;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin) :: "memory");
    const long long start = clock64(), most = (long long)nanoseconds * 4;  // cycles, if the timer stood still
    do {
        asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(released) : "l"(line + 4) : "memory");
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now) :: "memory");
    } while (released != ticket && now - begin < nanoseconds && clock64() - start < most);
    for (int i = 0; i < 4; i++) key[i] = ((const volatile u64*)line)[i];
}
"""


Hooks = dict[int, Callable[[], None]]
"""What is to be enqueued before a call, or behind it and the copy of its answer, outside of its time; by the call's position."""


class Locks(abc.ABC):
    """Keystreams and digests of one rank, and its side of a turnstile (see :mod:`peerlane.evaluate.timing.turnstile`).

    ``data`` are flat byte tensors on its device, and may be empty.
    """

    @abc.abstractmethod
    def lock(self, source: torch.Tensor, target: torch.Tensor, key: bytes) -> None:
        """Writes the source's bytes to the target under a key; the other way round, too. They may be the same."""

    @abc.abstractmethod
    def digests(self, data: Sequence[torch.Tensor], keys: Sequence[bytes]) -> list[tuple[int, int]]:
        """What a rank that has these keys, and gives these answers, commits itself to."""

    @abc.abstractmethod
    def door(self, data: torch.Tensor, answer: torch.Tensor, deadline_s: float) -> tuple[Callable[[int], None], ...]:
        """For a call on ``data``, whose answer is copied to ``answer``: what asks for the key of a ticket, waits for it, for so long at
        most, and unlocks the data; and what commits to the answer. Both in stream order: on a GPU, the host goes on."""

    def hooks(
        self, calls: Iterable[tuple[int, int, int]], inputs: ArgumentSlots, outputs: OutputRegions, deadline_s: float
    ) -> tuple[Hooks, Hooks]:
        """What is to be enqueued before each of these calls (position, slot, ticket), and what behind it and the copy of its answer."""
        before, behind = Hooks(), Hooks()
        for position, slot, ticket in calls:
            enter, leave = self.door(inputs.span(slot), outputs.span(slot), deadline_s)
            before[position] = functools.partial(enter, ticket)
            behind[position] = functools.partial(leave, ticket)
        return before, behind


class HostLocks(Locks):
    """On CPU, for a rank with this page."""

    def __init__(self, page: Page) -> None:
        self._page = page

    def lock(self, source: torch.Tensor, target: torch.Tensor, key: bytes) -> None:
        if source.numel():
            stream = torch.frombuffer(bytearray(_shake(key).digest(source.numel())), dtype=torch.uint8)
            torch.bitwise_xor(source, stream, out=target)

    def digests(self, data: Sequence[torch.Tensor], keys: Sequence[bytes]) -> list[tuple[int, int]]:
        return [self._digest(item, key) for item, key in zip(data, keys, strict=True)]

    @staticmethod
    def _digest(data: torch.Tensor, key: bytes) -> tuple[int, int]:
        text = ctypes.string_at(data.data_ptr(), data.numel()) if data.numel() else b""
        first, second = _unpack("<QQ", _blake(text, key=key, digest_size=16).digest())
        return first, second

    def door(self, data: torch.Tensor, answer: torch.Tensor, deadline_s: float) -> tuple[Callable[[int], None], ...]:
        page = self._page

        def enter(ticket: int) -> None:
            page.begun = ticket
            end = _clock() + deadline_s
            while page.released != ticket and _clock() < end:
                _yield()
            self.lock(data, data, bytes(page.key))

        def leave(ticket: int) -> None:
            page.digest[0], page.digest[1] = self._digest(answer, bytes(page.key))
            page.committed = ticket

        return enter, leave


class DeviceLocks(Locks):
    """On a GPU, the current device, for a rank with this page; ``code`` is what :func:`compile_locks` made for such a GPU."""

    def __init__(self, page: Page, code: bytes) -> None:
        from peerlane.device import Cubin, Kernel

        device = torch.cuda.current_device()
        properties = torch.cuda.get_device_properties(device)
        self._most_blocks = _BLOCKS_PER_SM * properties.multi_processor_count
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(code)
            cubin = Cubin(Path(file.name), f"sm_{properties.major}{properties.minor}", compiled_here=False)
            self._keystream, self._digest, self._take_key = (Kernel(cubin, name) for name in ("apply_keystream", "digest", "take_key"))
        self._key, self._scratch = (torch.zeros(size, dtype=torch.int64, device="cuda") for size in (4, 1 + 4 * self._most_blocks))
        self._page, self._line = page, _mapped(page)
        self._load()

    def _load(self) -> None:
        """Runs every kernel once: the first launch takes long."""
        data = torch.zeros(16, dtype=torch.uint8, device="cuda")
        for hook in self.door(data, data, 0.0):
            hook(0)
        torch.cuda.synchronize()

    def blocks(self, size: int) -> int:
        """Of threads, for so many bytes."""
        return max(1, min(self._most_blocks, -(-size // (_BYTES_PER_THREAD * THREADS))))

    def _bound_lock(self, source: torch.Tensor, target: torch.Tensor, key: torch.Tensor) -> Callable[[], None]:
        size = source.numel()
        if not size:
            return _nothing
        return self._keystream.bind(self.blocks(size), THREADS, (source, target, ctypes.c_uint64(size), key))

    def _bound_digest(self, data: torch.Tensor, key: torch.Tensor, result: int) -> Any:
        size = data.numel()
        args = (data, ctypes.c_uint64(size), key, self._scratch, ctypes.c_uint64(result), ctypes.c_uint64(0))
        return self._digest.bind(self.blocks(size), THREADS, args)

    def lock(self, source: torch.Tensor, target: torch.Tensor, key: bytes) -> None:
        self._bound_lock(source, target, _on_device(key))()

    def digests(self, data: Sequence[torch.Tensor], keys: Sequence[bytes]) -> list[tuple[int, int]]:
        results = torch.zeros(len(data), 4, dtype=torch.int64, device="cuda")
        for item, key, result in zip(data, _on_device(b"".join(keys)).view(-1, 4), results, strict=True):
            self._bound_digest(item, key, result.data_ptr())()
        return [(first % 2**64, second % 2**64) for first, second, *_ in results.tolist()]

    def door(self, data: torch.Tensor, answer: torch.Tensor, deadline_s: float) -> tuple[Callable[[int], None], ...]:
        words = (ctypes.c_uint64(self._line + word.offset) for word in (Page.begun, Page.key))
        args = (*words, ctypes.c_uint64(0), ctypes.c_uint64(int(deadline_s * 1e9)), self._key)
        take_key, unlock = self._take_key.bind(1, 1, args), self._bound_lock(data, data, self._key)
        commit = self._bound_digest(answer, self._key, self._line + Page.digest.offset)

        def enter(ticket: int) -> None:
            take_key.args[2].value = ticket
            take_key()
            unlock()

        def leave(ticket: int) -> None:
            commit.args[5].value = ticket
            commit()

        return enter, leave


def _mapped(page: Page) -> int:
    """Where the device finds a page of the host, which it does from now on for as long as the process lives."""
    cudart, address = runtime(), ctypes.addressof(page)
    (status,) = cudart.cudaHostRegister(address, ctypes.sizeof(Page), cudart.cudaHostRegisterMapped)
    pointer = 0
    if int(status) == 0:
        status, pointer = cudart.cudaHostGetDevicePointer(address, 0)
    if int(status) != 0:
        raise HarnessError(f"the page of a turnstile cannot be mapped for the GPU: {status.name}")
    return int(pointer)


def _nothing() -> None:
    pass


def _on_device(key: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(key), dtype=torch.int64).cuda()


def compile_locks(device: torch.device) -> bytes:
    """The kernels. For trusted ranks: confined ones may see no cache."""
    from peerlane.device import compile_cubin

    major, minor = torch.cuda.get_device_capability(device)
    return compile_cubin(KEYSTREAM + DIGEST + DOOR, arch=f"sm_{major}{minor}").path.read_bytes()
