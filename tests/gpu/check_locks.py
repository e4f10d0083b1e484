"""Whether the kernels that lock inputs and digest answers do what they say, and how long they take. One GPU does.

    python tests/gpu/check_locks.py

Both are compared with what is written down here, for lengths around the size of their blocks; digests have to change with every bit that
is looked at, and with the key. Ends with 1 if anything is wrong.
"""

from __future__ import annotations

import secrets
import struct
import sys

import torch

from peerlane.evaluate.processes.fork_client import memory_file
from peerlane.evaluate.timing.locks import THREADS, DeviceLocks, compile_locks
from peerlane.evaluate.timing.turnstile import KEY_BYTES, Page

LENGTHS = (1, 15, 16, 63, 64, 65, 4096, 100_003)
TIMED_BYTES = (1 << 10, 1 << 20, 1 << 28)


def permuted(words: list[int]) -> list[int]:
    """Eight rounds of ChaCha."""
    w = list(words)

    def quarter(a: int, b: int, c: int, d: int) -> None:
        for x, y, z, by in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            w[x] = (w[x] + w[y]) & 0xFFFFFFFF
            turned = w[z] ^ w[x]
            w[z] = ((turned << by) | (turned >> (32 - by))) & 0xFFFFFFFF

    for _ in range(4):
        for column in range(4):
            quarter(column, 4 + column, 8 + column, 12 + column)
        for step in range(4):
            quarter(step, 4 + (step + 1) % 4, 8 + (step + 2) % 4, 12 + (step + 3) % 4)
    return w


def keystream(key: bytes, length: int) -> bytes:
    """ChaCha8 with a counter of 64 bits from 0 and a nonce of 0."""
    out = b""
    for block in range(-(-length // 64)):
        begin = [*struct.unpack("<4I", b"expand 32-byte k"), *struct.unpack("<8I", key), block & 0xFFFFFFFF, block >> 32, 0, 0]
        out += struct.pack("<16I", *((a + b) & 0xFFFFFFFF for a, b in zip(permuted(begin), begin, strict=True)))
    return out[:length]


def digest_by_hand(data: bytes, key: bytes, blocks: int, threads: int) -> tuple[int, int]:
    """What the kernel makes of it with so many blocks of threads."""

    def chained(node: list[int], piece: list[int]) -> list[int]:
        return [a ^ b for a, b in zip(node, permuted([*node, *piece]), strict=False)]

    def begun(number: int) -> list[int]:
        return [a ^ b for a, b in zip(struct.unpack("<8I", key), [number, len(data) & 0xFFFFFFFF, len(data) >> 32, *[0] * 5], strict=True)]

    def joined(nodes: list[list[int]]) -> list[int]:
        while half := len(nodes) // 2:
            nodes = [chained(mine, other) for mine, other in zip(nodes[:half], nodes[half:], strict=True)]
        return nodes[0]

    nodes = [begun(thread) for thread in range(blocks * threads)]
    for number, at in enumerate(range(0, len(data), 32)):
        thread = number % (blocks * threads)
        nodes[thread] = chained(nodes[thread], list(struct.unpack("<8I", data[at : at + 32].ljust(32, b"\0"))))
    of_blocks = [joined(nodes[first : first + threads]) for first in range(0, len(nodes), threads)]
    last = [begun(0x80000000 + thread) for thread in range(threads)]
    for block, node in enumerate(of_blocks):
        last[block % threads] = chained(last[block % threads], node)
    first, second, third, fourth, *_ = joined(last)
    return first | second << 32, third | fourth << 32


def digest(locks: DeviceLocks, data: torch.Tensor, key: bytes) -> tuple[int, int]:
    (found,) = locks.digests([data], [key])
    return found


def wrong_locks(locks: DeviceLocks) -> list[str]:
    wrong = []
    for length in LENGTHS:
        key = secrets.token_bytes(KEY_BYTES)
        plain = torch.randint(0, 256, (length + 32,), dtype=torch.uint8, device="cuda")
        target = torch.zeros_like(plain)
        locks.lock(plain[:length], target[:length], key)
        stream = torch.frombuffer(bytearray(keystream(key, length)), dtype=torch.uint8).cuda()
        if not torch.equal(target[:length] ^ plain[:length], stream) or target[length:].any():
            wrong.append(f"keystream of {length} bytes")
        locks.lock(target[:length], target[:length], key)
        if not torch.equal(target[:length], plain[:length]):
            wrong.append(f"unlocking {length} bytes")
    return wrong


def wrong_digests(locks: DeviceLocks) -> list[str]:
    wrong = []
    for length in LENGTHS:
        key = secrets.token_bytes(KEY_BYTES)
        data = torch.randint(0, 256, (length + 32,), dtype=torch.uint8, device="cuda")
        first = digest(locks, data[:length], key)
        if first != digest_by_hand(bytes(data[:length].tolist()), key, locks.blocks(length), THREADS):
            wrong.append(f"digest of {length} bytes")
        places = sorted({0, length - 1, length // 2, *torch.randint(0, length, (20,)).tolist()})
        others = [digest(locks, data[:length], secrets.token_bytes(KEY_BYTES))]
        for place in places:
            data[place] ^= 1 << (place % 8)
            others.append(digest(locks, data[:length], key))
            data[place] ^= 1 << (place % 8)
        data[length] ^= 255
        if first != digest(locks, data[:length], key):
            wrong.append(f"digest of {length} bytes: not the same again")
        if first in others or len(set(others)) < len(others) or any(0 in pair for pair in others):
            wrong.append(f"digest of {length} bytes: blind")
    return wrong


def shortest_us(call: object, times: int = 20) -> float:
    assert callable(call)
    found = []
    for _ in range(times):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e3)
    return min(found)


def main() -> int:
    locks = DeviceLocks(Page.of(memory_file("page")), compile_locks(torch.device("cuda")))
    wrong = wrong_locks(locks) + wrong_digests(locks)
    key, result = torch.randint(0, 2**62, (4,), device="cuda"), torch.zeros(4, dtype=torch.int64, device="cuda")
    for size in TIMED_BYTES:
        data = torch.zeros(size, dtype=torch.uint8, device="cuda")
        lock, digests = locks._bound_lock(data, data, key), locks._bound_digest(data, key, result.data_ptr())
        print(f"{size:>12} bytes: unlocked in {shortest_us(lock):8.1f} us, digested in {shortest_us(digests):8.1f} us")
    print(f"{len(wrong)} wrong", *wrong, sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
