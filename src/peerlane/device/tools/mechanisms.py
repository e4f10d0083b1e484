"""Bandwidth of each way to move data between this machine's GPUs, by size, number of blocks and peers; and latency of messages.

One process holds all GPUs. GPU 0 moves data to or from one peer, or all, while the other GPUs are idle; then all GPUs move data at once.

Times are of the device alone: it is kept waiting until the host has enqueued everything between the two events, and a sample for which the
host was late is taken again. Small sizes are moved several times between the events: what is left per launch is what a stream of such
launches takes, a microsecond or two between kernels included.
"""

import ctypes
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from peerlane.device.host import cuda_bindings
from peerlane.device.host.arena import ArenaView
from peerlane.device.host.cuda_group import enable_peer_access
from peerlane.device.host.group import MAX_RANKS
from peerlane.device.host.jit import Cubin, compile_cubin
from peerlane.device.host.launch import Kernel, Launch
from peerlane.device.host.layout import LINE_BYTES, Layout
from peerlane.device.host.waits import RECORD_WORDS, WaitRecord, record_in
from peerlane.errors import DeviceError, UsageError

SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 240 << 20)
BLOCKS = (4, 8, 16, 32, 64, 128)
SAMPLES, WARM_UP = 7, 2
ROUNDS = 1000
TILE_BYTES, STAGES = 16384, 4
_BATCH_BYTES, _MOST_LAUNCHES = 16 << 20, 16
_FLAG_SLOTS = 256
_TIMEOUT_NS = 2_000_000_000
# Far less than the timeout of a wait, since GPUs that are ready wait for those that are not.
_HEAD_START_US, _LONGEST_HEAD_START_US = 200.0, 500_000.0
_CYCLES_PER_US = 2_000  # about that of the fastest SM clock: a head start may be longer, not shorter

_SOURCE = """
#include <peerlane/peers/mechanisms.cuh>
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

_sleep: Callable[[int], None] = torch.cuda._sleep


@dataclass(frozen=True)
class Move:
    """A case: ``movers`` GPUs, the first or all, move ``nbytes`` each, in equal parts to or from ``peers`` others. Without
    blocks, copy engines do it."""

    mechanism: str
    nbytes: int
    blocks: int
    peers: int
    movers: int


@dataclass(frozen=True)
class Bandwidth(Move):
    """10^9 bytes/s of payload by each mover, the slowest one's: the median of ``n`` samples, the lowest and the highest."""

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
    """All measurements of one machine."""

    gpus: int
    bandwidths: tuple[Bandwidth, ...]
    latencies: tuple[Latency, ...]


def compile_mechanisms(world_size: int, arch: str) -> Cubin:
    """Compiles all kernels measured here."""
    return compile_cubin(_SOURCE, arch=arch, defines={"WORLD_SIZE": world_size})


def launches_between_events(nbytes: int) -> int:
    """Returns how often small sizes are moved in one sample."""
    return max(1, min(_MOST_LAUNCHES, _BATCH_BYTES // nbytes))


def cases(world_size: int, sm_count: int) -> Iterator[Move]:
    """Returns what GPU 0 does alone, of every mechanism; bytes are a multiple of 16 for every peer."""
    for peers in sorted({1, world_size - 1}):
        for size in SIZES:
            nbytes = size // (16 * peers) * 16 * peers
            for direction in ("push", "pull"):
                yield Move(f"copy_engine_{direction}", nbytes, 0, peers, 1)
            for mechanism in KERNELS:
                for blocks in BLOCKS:
                    if blocks <= sm_count and blocks * 512 <= nbytes // peers:
                        yield Move(mechanism, nbytes, blocks, peers, 1)


def fastest(rows: Iterable[Bandwidth]) -> list[Bandwidth]:
    """Returns of each mechanism and size the row with the highest rate, in the order in which they come."""
    best: dict[tuple[str, int], Bandwidth] = {}
    for row in rows:
        key = (row.mechanism, row.nbytes)
        if key not in best or row.gbps > best[key].gbps:
            best[key] = row
    return list(best.values())


def cases_of_all(world_size: int, alone: Sequence[Bandwidth]) -> Iterator[Move]:
    """Returns what all GPUs do at once: every mechanism at the largest size, with the block count that was fastest for GPU 0 alone."""
    rows = [row for row in alone if row.peers == world_size - 1]
    largest = max(row.nbytes for row in rows)
    for row in fastest(row for row in rows if row.nbytes == largest):
        yield Move(row.mechanism, row.nbytes, row.blocks, row.peers, world_size)


def measure_mechanisms() -> Mechanisms:
    """Measures on all GPUs, at most 8. Raises UsageError where there are fewer than two."""
    count = min(torch.cuda.device_count(), MAX_RANKS)
    if count < 2:
        raise UsageError(f"mechanisms are measured on 2 to {MAX_RANKS} GPUs; {count} found: run it where there are more")
    bench = _Bench(count)
    alone = [bench.bandwidth(move) for move in cases(count, bench.sm_count)]
    together = [bench.bandwidth(move) for move in cases_of_all(count, alone)]
    return Mechanisms(count, (*alone, *together), tuple(bench.latency(what) for what in ("flag", "packet", "barrier")))


def samples(take: Callable[[float], float | None]) -> list[float]:
    """Returns the measurements of ``take(head_start_us)``, without the first ones, which warm up.

    Where it has nothing, since the host was late, it is called again with twice the head start; raises DeviceError when that gets absurd.
    """
    head_start_us = _HEAD_START_US
    taken: list[float] = []
    while len(taken) < WARM_UP + SAMPLES:
        seconds = take(head_start_us)
        if seconds is not None:
            taken.append(seconds)
            continue
        head_start_us *= 2
        if head_start_us > _LONGEST_HEAD_START_US:
            raise DeviceError(
                f"the host needs more than {head_start_us / 2e3:.0f} ms to enqueue a few launches; expected a few microseconds a launch: "
                "stop what else runs on this machine"
            )
    return taken[WARM_UP:]


class _Bench:
    """The memory of all GPUs, their kernels and streams."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.sm_count = torch.cuda.get_device_properties(0).multi_processor_count
        enable_peer_access(count)
        layout = Layout(1 << 62, reserved=LINE_BYTES)
        self.flags = layout.take(_FLAG_SLOTS * count * LINE_BYTES)  # raised behind bulk stores; nobody waits for them
        self.turns = layout.take(2 * count * LINE_BYTES)
        self.packets = layout.take(16)
        self.data = layout.take(SIZES[-1])
        self.memory = [torch.zeros(layout.taken, dtype=torch.uint8, device=f"cuda:{gpu}") for gpu in range(count)]
        self.local = [torch.zeros(SIZES[-1], dtype=torch.uint8, device=f"cuda:{gpu}") for gpu in range(count)]
        # Not the default streams: a copy between two of those waits for all work of both GPUs.
        self.streams = [torch.cuda.Stream(gpu) for gpu in range(count)]  # type: ignore[no-untyped-call, unused-ignore]
        self.fault = torch.zeros(RECORD_WORDS, dtype=torch.int32, device="cpu", pin_memory=True)
        record_in(self.fault).limit_ns = _TIMEOUT_NS
        major, minor = torch.cuda.get_device_capability(0)
        self.cubin = compile_mechanisms(count, f"sm_{major}{minor}a")
        for gpu, stream in enumerate(self.streams):
            torch.cuda.synchronize(gpu)  # the memory was set to zero on the default streams
            with torch.cuda.stream(stream):
                _sleep(1)  # loads it
        self.number = 0
        self.gates = self._turns("barrier")

    def bandwidth(self, move: Move) -> Bandwidth:
        works = []
        for gpu in range(move.movers):
            with torch.cuda.stream(self.streams[gpu]):
                works.append(self._copies(move, gpu) if move.blocks == 0 else self._kernel(move, gpu))
                works[gpu]()  # loads the kernel, which may wait for the GPU: not while others wait for this one
        self._synchronize()
        launches = launches_between_events(move.nbytes)
        rates = [launches * move.nbytes / (seconds * 1e9) for seconds in self._seconds(works, launches)]
        return Bandwidth(**vars(move), gbps=statistics.median(rates), lowest_gbps=min(rates), highest_gbps=max(rates), n=len(rates))

    def latency(self, what: str) -> Latency:
        def play(launch: Launch) -> Callable[[], None]:
            return lambda: self._play(launch, self.number + 1, ROUNDS)  # the gate has self.number

        rounds_us = [seconds / ROUNDS * 1e6 for seconds in self._seconds([play(launch) for launch in self._turns(what)])]
        return Latency(what, statistics.median(rounds_us), min(rounds_us), max(rounds_us), len(rounds_us))

    def _seconds(self, works: Sequence[Callable[[], None]], launches: int = 1) -> list[float]:
        """Returns device times of samples of ``launches`` calls of works[i] on GPU i; of several GPUs, the slowest one's."""
        return samples(lambda head_start_us: self._sample(works, launches, head_start_us))

    def _sample(self, works: Sequence[Callable[[], None]], launches: int, head_start_us: float) -> float | None:
        """Returns seconds of device time; None if a GPU began before the host had enqueued all work. Several GPUs start from a barrier."""
        events = []
        for gpu, work in enumerate(works):
            with torch.cuda.stream(self.streams[gpu]):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call, unused-ignore]
                _sleep(int(head_start_us * _CYCLES_PER_US))
                if len(works) > 1:
                    self._play(self.gates[gpu], self.number, 1)
                start.record()
                for _ in range(launches):
                    work()
                end.record()
                events.append((start, end))
        late = any(start.query() for start, _ in events)  # type: ignore[no-untyped-call, unused-ignore]
        self._synchronize()
        self.number += 1 + ROUNDS
        return None if late else max(start.elapsed_time(end) for start, end in events) / 1e3

    def _synchronize(self) -> None:
        for stream in self.streams:
            stream.synchronize()

    def _view(self, rank: int) -> ArenaView:
        bases = [memory.data_ptr() for memory in self.memory]
        return ArenaView(
            base=(ctypes.c_uint64 * MAX_RANKS)(*bases),
            rank=rank,
            world_size=self.count,
            stop=self.fault.data_ptr() + WaitRecord.stop.offset,
            fault=self.fault.data_ptr(),
        )

    def _turns(self, what: str) -> list[Launch]:
        """Returns a launch of the round trips ``what`` for every GPU, which has been launched without rounds once, and so is loaded."""
        launches = []
        for gpu in range(self.count):
            with torch.cuda.stream(self.streams[gpu]):
                places = (ctypes.c_uint64(self.turns), ctypes.c_uint64(self.packets))
                launch = Kernel(self.cubin, what).bind(1, 32, (self._view(gpu), *places, ctypes.c_uint32(), ctypes.c_uint32()))
                launch()
            launches.append(launch)
        self._synchronize()
        return launches

    @staticmethod
    def _play(launch: Launch, number: int, rounds: int) -> None:
        launch.args[3].value, launch.args[4].value = number, rounds
        launch()

    def _kernel(self, move: Move, gpu: int) -> Callable[[], None]:
        threads, shared_bytes = KERNELS[move.mechanism]
        args = (
            self._view(gpu),
            ctypes.c_uint64(self.flags),
            ctypes.c_uint64(self.data),
            self.local[gpu],
            ctypes.c_uint64(move.nbytes),
            ctypes.c_uint32(move.peers),
        )
        return Kernel(self.cubin, move.mechanism).bind(move.blocks, threads, args, shared_bytes=shared_bytes)

    def _copies(self, move: Move, gpu: int) -> Callable[[], None]:
        """Returns a copy for every peer, one behind the other, as kernels cut the data."""
        driver, stream = cuda_bindings.driver(), self.streams[gpu].cuda_stream
        part = move.nbytes // move.peers
        pairs = []
        for index in range(move.peers):
            there = self.memory[(gpu + 1 + index) % self.count].data_ptr() + self.data + index * part
            here = self.local[gpu].data_ptr() + index * part
            pairs.append((there, here) if move.mechanism == "copy_engine_push" else (here, there))

        def copy() -> None:
            for target, source in pairs:
                (status,) = driver.cuMemcpyDtoDAsync(target, source, part, stream)
                if status:
                    raise DeviceError(f"GPU {gpu} can not copy {part} bytes to or from a peer: {cuda_bindings.describe(status)}")

        return copy
