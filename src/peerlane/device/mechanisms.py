"""How fast each way to move data between the GPUs of this machine is, by size, number of blocks and peers; and how long messages take.

One process holds all GPUs. GPU 0 moves data to or from one peer, or all; the other GPUs are idle. Times are of the device, from events.
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from peerlane.device import _cuda
from peerlane.device.arena import MAX_RANKS, ArenaView
from peerlane.device.jit import Cubin, compile_cubin
from peerlane.device.launch import Kernel
from peerlane.device.layout import LINE_BYTES, Layout
from peerlane.errors import DeviceError, UsageError

Mechanism = Literal["copy_engine_push", "copy_engine_pull", "sm_store", "sm_load", "bulk_store", "bulk_add", "bulk_load"]

SIZES = (64 << 10, 1 << 20, 16 << 20, 240 << 20)
BLOCKS = (4, 8, 16, 32, 64, 128)
SAMPLES, WARM_UP = 7, 2
ROUNDS = 1000
TILE_BYTES, STAGES = 16384, 4
_FLAG_SLOTS = 256
_TIMEOUT_NS = 2_000_000_000

_SOURCE = """
#include <peerlane/mechanisms.cuh>
using namespace peerlane;
#define MOVE(name, call, threads) extern "C" __global__ void __launch_bounds__(threads) name( \\
    const __grid_constant__ Arena arena, u64 flags, u64 data, char* local, u64 bytes, u32 count) { call; }
#define TURNS(name, call) extern "C" __global__ void __launch_bounds__(32) name( \\
    const __grid_constant__ Arena arena, u64 flags, u64 packets, u32 number, u32 rounds) { call; }
MOVE(sm_store, bench_sm_store<WORLD_SIZE>(arena, data, local, bytes, count), 512)
MOVE(sm_load, bench_sm_load<WORLD_SIZE>(arena, data, local, bytes, count), 512)
MOVE(bulk_store, (bench_bulk_store<WORLD_SIZE, false>(arena, flags, data, bytes, count)), 32)
MOVE(bulk_add, (bench_bulk_store<WORLD_SIZE, true>(arena, flags, data, bytes, count)), 32)
MOVE(bulk_load, bench_bulk_load<WORLD_SIZE>(arena, flags, data, bytes, count), 32)
TURNS(flag, bench_flag<WORLD_SIZE>(arena, flags, number, rounds))
TURNS(packet, bench_packet<WORLD_SIZE>(arena, packets, number, rounds))
TURNS(barrier, bench_barrier<WORLD_SIZE>(arena, flags, number, rounds))
"""
KERNELS: Mapping[str, tuple[int, int]] = {
    "sm_store": (512, 0),
    "sm_load": (512, 0),
    "bulk_store": (32, TILE_BYTES),
    "bulk_add": (32, TILE_BYTES),
    "bulk_load": (32, STAGES * TILE_BYTES),
}
"""Threads of a block and bytes of dynamic shared memory of each kernel that moves data."""


@dataclass(frozen=True)
class Bandwidth:
    """10^9 bytes/s of payload through GPU 0's port: the median of ``n`` launches, and the slowest and fastest. No blocks: copy engine."""

    mechanism: str
    nbytes: int
    blocks: int
    peers: int
    gbps: float
    lowest_gbps: float
    highest_gbps: float
    n: int


@dataclass(frozen=True)
class Latency:
    """Microseconds per round: a flag or packet there and back, or a barrier of all GPUs. Median of ``n`` launches of many rounds."""

    what: str
    us: float
    lowest_us: float
    highest_us: float
    n: int


@dataclass(frozen=True)
class Mechanisms:
    """Everything that was measured on one machine."""

    gpus: int
    bandwidths: tuple[Bandwidth, ...]
    latencies: tuple[Latency, ...]


def compile_mechanisms(world_size: int, arch: str) -> Cubin:
    """The cubin of all kernels measured here."""
    return compile_cubin(_SOURCE, arch=arch, defines={"WORLD_SIZE": world_size})


def cases(world_size: int, sm_count: int) -> Iterator[tuple[str, int, int, int]]:
    """Mechanism, bytes (a multiple of 16 for every peer), blocks and peers of every measurement of bandwidth."""
    for peers in sorted({1, world_size - 1}):
        for size in SIZES:
            nbytes = size // (16 * peers) * 16 * peers
            for direction in ("push", "pull"):
                yield f"copy_engine_{direction}", nbytes, 0, peers
            for mechanism in KERNELS:
                for blocks in BLOCKS:
                    if blocks <= sm_count and blocks * 512 <= nbytes // peers:
                        yield mechanism, nbytes, blocks, peers


def measure_mechanisms(gpus: int | None = None) -> Mechanisms:
    """Measure, on the first ``gpus`` GPUs (default: all, at most 8). Raises UsageError where there are fewer than two."""
    found = torch.cuda.device_count()
    count = min(found, MAX_RANKS) if gpus is None else gpus
    if not 2 <= count <= min(found, MAX_RANKS):
        raise UsageError(f"mechanisms are measured on 2 to {MAX_RANKS} GPUs; {count} wanted, {found} found: run it where there are more")
    bench = _Bench(count)
    bandwidths = tuple(bench.bandwidth(*case) for case in cases(count, bench.sm_count))
    return Mechanisms(count, bandwidths, tuple(bench.latency(what) for what in ("flag", "packet", "barrier")))


class _Bench:
    """The memory of all GPUs, and their kernels."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.sm_count = torch.cuda.get_device_properties(0).multi_processor_count
        _enable_peer_access(count)
        layout = Layout(1 << 62, reserved=LINE_BYTES)
        self.flags = layout.take(_FLAG_SLOTS * count * LINE_BYTES)
        self.packets = layout.take(16)
        self.data = layout.take(SIZES[-1])
        self.memory = [torch.zeros(layout.taken, dtype=torch.uint8, device=f"cuda:{gpu}") for gpu in range(count)]
        self.local = torch.zeros(SIZES[-1], dtype=torch.uint8, device="cuda:0")
        self.fault = torch.zeros(8, dtype=torch.int32, pin_memory=True)
        major, minor = torch.cuda.get_device_capability(0)
        self.cubin = compile_mechanisms(count, f"sm_{major}{minor}a")
        self.number = 0

    def view(self, rank: int) -> ArenaView:
        bases = [memory.data_ptr() for memory in self.memory]
        return ArenaView(
            base=(ctypes.c_uint64 * MAX_RANKS)(*bases),
            rank=rank,
            world_size=self.count,
            timeout_ns=_TIMEOUT_NS,
            fault=self.fault.data_ptr(),
        )

    def bandwidth(self, mechanism: str, nbytes: int, blocks: int, peers: int) -> Bandwidth:
        with torch.cuda.device(0):
            move = self._copies(mechanism, nbytes, peers) if blocks == 0 else self._kernel(mechanism, nbytes, blocks, peers)
            rates = [nbytes / (seconds * 1e9) for seconds in _seconds(move)]
        return Bandwidth(mechanism, nbytes, blocks, peers, statistics.median(rates), min(rates), max(rates), len(rates))

    def latency(self, what: str) -> Latency:
        """Every launch is of all GPUs; GPU 0's events are what counts: it can not end before its partners have answered."""
        launches = []
        for rank in range(self.count):
            with torch.cuda.device(rank):
                args = (
                    self.view(rank),
                    ctypes.c_uint64(self.flags),
                    ctypes.c_uint64(self.packets),
                    ctypes.c_uint32(),
                    ctypes.c_uint32(ROUNDS),
                )
                launches.append(Kernel(self.cubin, what).bind(1, 32, args))
        others, first = launches[1:], launches[0]

        def start() -> None:
            for rank, launch in enumerate(others, start=1):
                with torch.cuda.device(rank):
                    launch.args[3].value = self.number
                    launch()

        def turn() -> None:
            first.args[3].value = self.number
            first()
            self.number += ROUNDS

        with torch.cuda.device(0):
            rounds_us = [seconds / ROUNDS * 1e6 for seconds in _seconds(turn, before=start)]
        return Latency(what, statistics.median(rounds_us), min(rounds_us), max(rounds_us), len(rounds_us))

    def _kernel(self, mechanism: str, nbytes: int, blocks: int, peers: int) -> Callable[[], None]:
        threads, shared_bytes = KERNELS[mechanism]
        args = (
            self.view(0),
            ctypes.c_uint64(self.flags),
            ctypes.c_uint64(self.data),
            self.local,
            ctypes.c_uint64(nbytes),
            ctypes.c_uint32(peers),
        )
        return Kernel(self.cubin, mechanism).bind(blocks, threads, args, shared_bytes=shared_bytes)

    def _copies(self, mechanism: str, nbytes: int, peers: int) -> Callable[[], None]:
        part = nbytes // peers
        pairs = [
            (self.memory[q + 1][self.data + q * part : self.data + (q + 1) * part], self.local[q * part : (q + 1) * part])
            for q in range(peers)
        ]

        def copy() -> None:
            for there, here in pairs:
                if mechanism == "copy_engine_push":
                    there.copy_(here, non_blocking=True)
                else:
                    here.copy_(there, non_blocking=True)

        return copy


def _seconds(work: Callable[[], None], before: Callable[[], None] | None = None) -> list[float]:
    """Device times of some calls of ``work`` on the current GPU's stream, warmed up; ``before`` each, what is not timed."""
    found = []
    for sample in range(WARM_UP + SAMPLES):
        if before is not None:
            before()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call, unused-ignore]
        start.record()
        work()
        end.record()
        for gpu in range(torch.cuda.device_count()):
            torch.cuda.synchronize(gpu)
        if sample >= WARM_UP:
            found.append(start.elapsed_time(end) / 1e3)
    return found


def _enable_peer_access(count: int) -> None:
    """Let every GPU address every other one's memory. torch's own copies do so too, and do not mind that it is done already."""
    driver = _cuda.driver()
    contexts = []
    for gpu in range(count):
        torch.zeros(1, device=f"cuda:{gpu}")
        status, context = driver.cuDevicePrimaryCtxRetain(gpu)
        if status:
            raise DeviceError(f"GPU {gpu} has no context: {_cuda.describe(status)}")
        contexts.append(context)
    already: Any = driver.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
    for gpu in range(count):
        with torch.cuda.device(gpu):
            for other in range(count):
                if other == gpu:
                    continue
                (status,) = driver.cuCtxEnablePeerAccess(contexts[other], 0)
                if status and status != already:
                    raise DeviceError(
                        f"GPU {gpu} can not address GPU {other}: {_cuda.describe(status)}; see what `nvidia-smi topo -p2p rw` says"
                    )
