"""The kernels that lock inputs and digest answers, in the emulator: what they make of bytes, and whether anything in them is unordered."""

from __future__ import annotations

import ctypes
import secrets
import struct

import pytest
import torch

from gpu.check_locks import digest_by_hand, keystream
from peerlane.device.emulator import Scenario, check
from peerlane.evaluate.timing.locks import DIGEST, KEYSTREAM
from peerlane.evaluate.timing.turnstile import KEY_BYTES

THREADS = 32


def random_bytes(count: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(secrets.token_bytes(count)), dtype=torch.uint8)


def words(key: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(key), dtype=torch.int32)


def signed(value: int) -> int:
    return int(struct.unpack("<q", struct.pack("<Q", value))[0])


def test_the_keystream_is_chacha8() -> None:
    """The first words for a key of zeros are those of published test vectors."""
    assert keystream(bytes(KEY_BYTES), 16).hex() == "3e00ef2f895f40d67f5bb8e81f09a5a1"


@pytest.mark.parametrize("size", [1, 64, 65, 1000])
def test_bytes_are_locked_with_the_keystream(size: int) -> None:
    key, data = secrets.token_bytes(KEY_BYTES), random_bytes(size)
    stream = torch.frombuffer(bytearray(keystream(key, size)), dtype=torch.uint8)
    scenario = Scenario("keystream", KEYSTREAM, 1)
    source, shared = scenario.buffer("source", [data]), scenario.buffer("key", [words(key)])
    target = scenario.buffer("target", [torch.zeros_like(data)], expected=[data ^ stream])
    arguments = [source, target, ctypes.c_uint64(size), shared]
    scenario.launch("apply_keystream", grid=2, block=THREADS, args=arguments)
    report = check(scenario, schedules=4)
    assert report.clean, str(report)


@pytest.mark.parametrize(("size", "grid"), [(0, 1), (5, 1), (1024, 1), (33, 2), (7000, 3), (3000, 40)])
def test_digests_are_what_is_written_down_whatever_the_order(size: int, grid: int) -> None:
    """Twice in a row: what the first leaves behind is what the second finds."""
    key, data = secrets.token_bytes(KEY_BYTES), random_bytes(max(size, 1))
    first, second = digest_by_hand(bytes(data[:size].tolist()), key, grid, THREADS)
    scenario = Scenario("digest", KEYSTREAM + DIGEST, 1)
    source, shared = scenario.buffer("source", [data]), scenario.buffer("key", [words(key)])
    scratch = scenario.buffer("scratch", [torch.zeros(1 + 4 * grid, dtype=torch.int64)])
    for ticket in (7, 8):
        expected = torch.tensor([signed(first), signed(second), ticket])
        result = scenario.buffer(f"result {ticket}", [torch.zeros(3, dtype=torch.int64)], expected=[expected])
        arguments = [source, ctypes.c_uint64(size), shared, scratch, result, ctypes.c_uint64(ticket)]
        scenario.launch("digest", grid=grid, block=THREADS, args=arguments)
    report = check(scenario, schedules=6)
    assert report.clean, str(report)
