"""The measurements themselves. Each runs in a process of its own, started by :mod:`peerlane.hardware.measure`:

``python -m peerlane.hardware.probes gpu --device D``            memory, matrix products and kernel launches of one GPU
``python -m peerlane.hardware.probes links --devices N``         copies and flags between GPUs, one process holding all
``python -m peerlane.hardware.probes places --devices N``        rows and words in random places, of one GPU and of another
``python -m peerlane.hardware.probes nccl --rank R --devices N --rendezvous FILE``   NCCL latency, one process a GPU

Each writes ``{"samples": {figure: [...]}, "notes": [...]}`` to the file that ``--out`` names, anew after every figure, so that a process
that is stopped halfway leaves what it had. A figure that fails becomes a note; the others go on.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from peerlane.common.files import write_atomically
from peerlane.common.places import ROW_BYTES
from peerlane.device.host.jit import INCLUDE_DIR

HBM_BUFFER_BYTES = 2 * 2**30
LINK_BUFFER_BYTES = 256 * 2**20
MATMUL_SIZE = 8192
NCCL_TIMEOUT_S = 15

# Every wait gives up after 2^31 clocks, about one second, and then leaves 0 as the elapsed time.
FLAG_EXCHANGE_SOURCE = r"""
#include <peerlane/ptx.cuh>
using namespace peerlane;

extern "C" __global__ void flag_exchange(u32* mine, u32* theirs, int warmup, int rounds, u64* elapsed_ns) {
    u64 start = 0;
    const long long begin = clock64();
    *elapsed_ns = 0;
    for (u32 round = 1; round <= static_cast<u32>(warmup + rounds); ++round) {
        ptx::fence_system();
        ptx::store_relaxed_system(theirs, round);
        while (ptx::load_relaxed_system(mine) < round)
            if (clock64() - begin > (1ll << 31)) return;
        ptx::fence_system();
        if (round == static_cast<u32>(warmup)) start = ptx::globaltimer();
    }
    *elapsed_ns = ptx::globaltimer() - start;
}
"""

PLACES_BYTES, ADDED_BYTES, TOUCHED_BYTES = 2 << 30, 32 << 20, 512 << 20
# The kernels go through `count` vectors of 16 bytes, or words of 8, row by row of `row` of them, each in a random one of `rows` places.
PLACES_SOURCE = r"""
#include <peerlane/ptx.cuh>
using namespace peerlane;

__device__ inline u64 place_of(u64 i, u32 row, u32 rows) {
    u64 mixed = (i / row + 1) * 0x9e3779b97f4a7c15ull;
    mixed = (mixed ^ mixed >> 30) * 0xbf58476d1ce4e5b9ull;
    mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111ebull;
    return (mixed >> 32) * rows / (u64(1) << 32) * row + i % row;
}

constexpr u32 one = 0x3f800000;  // the bits of 1.0f

// What touch(place, i) returns is stored if it is of a kind that does not come up.
template <class Item, class Touch>
__device__ inline void touch_all(u32 count, u32 row, u32 rows, Item* sink, const Touch& touch) {
    constexpr u32 at_once = 8;
    const u32 step = gridDim.x * blockDim.x;
    for (u32 first = blockIdx.x * blockDim.x + threadIdx.x; first < count; first += at_once * step) {
        Item item[at_once];
#pragma unroll
        for (u32 k = 0; k < at_once; ++k) item[k] = first + k * step < count ? touch(place_of(first + k * step, row, rows), first) : Item{};
#pragma unroll
        for (u32 k = 0; k < at_once; ++k) {
            if (*reinterpret_cast<const u64*>(&item[k]) == ~u64(0)) *sink = item[k];
        }
    }
}

#define PLACES(name, type, action)                                                                                                      \
    struct name##_touch {                                                                                                               \
        type* table;                                                                                                                    \
        __device__ type operator()(u64 place, u32 i) const { action; }                                                                 \
    };                                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(512) name(type* table, u32 count, u32 row, u32 rows, type* sink) {                      \
        touch_all(count, row, rows, sink, name##_touch{table});                                                                         \
    }
PLACES(read_rows, Vec16, return table[place])
PLACES(add_rows, Vec16, ptx::add_floats_relaxed_gpu(reinterpret_cast<float*>(table + place), Vec16{{one, one, one, one}}); return Vec16{})
PLACES(read_words, u64, return table[place])
PLACES(swap_words, u64, return atomicCAS(table + place, u64(i), u64(i) + 1))
"""


class Report:
    """The samples and notes of a probe, written to a file after every change."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.samples: dict[str, list[float]] = {}
        self.notes: list[str] = []

    def add(self, figure: str, samples: list[float]) -> None:
        self.samples.setdefault(figure, []).extend(samples)
        self._write()

    def note(self, text: str) -> None:
        self.notes.append(text)
        self._write()

    def attempt(self, figure: str, probe: Callable[..., list[float]], *arguments: Any, **options: Any) -> None:
        """Adds the probe's samples, or a note if it raises: one figure must not cost the others."""
        try:
            self.add(figure, probe(*arguments, **options))
        except Exception as error:
            first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
            self.note(f"{figure} was not measured: {first_line}")

    def _write(self) -> None:
        write_atomically(self.path, json.dumps({"samples": self.samples, "notes": self.notes}).encode())


def timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def timed_us(call: Callable[[], Any], *, warmup: int, n: int) -> list[float]:
    """Returns the device time of each of ``n`` calls on the current stream, after ``warmup`` untimed ones."""
    for _ in range(warmup):
        call()
    events = [(timing_event(), timing_event()) for _ in range(n)]
    for start, stop in events:
        start.record()
        call()
        stop.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) * 1e3 for start, stop in events]


# One GPU


def probe_gpu(report: Report, device: int) -> None:
    torch.cuda.set_device(device)
    report.attempt("hbm_copy_tbps", hbm_copy_tbps)
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        report.attempt(f"{name}_matmul_tflops", matmul_tflops, dtype)
    report.attempt("fp8_matmul_tflops", fp8_matmul_tflops)
    torch.set_float32_matmul_precision("high")
    report.attempt("tf32_matmul_tflops", matmul_tflops, torch.float32)
    torch.set_float32_matmul_precision("highest")
    report.attempt("fp32_matmul_tflops", matmul_tflops, torch.float32, warmup=2, n=8)
    report.attempt("kernel_launch_us", kernel_launch_us)


def hbm_copy_tbps() -> list[float]:
    free_bytes, _ = torch.cuda.mem_get_info()
    size = min(HBM_BUFFER_BYTES, free_bytes // 4)
    if size < LINK_BUFFER_BYTES:
        raise RuntimeError(
            f"only {free_bytes / 2**20:.0f} MiB of device memory are free; needs 1024 MiB, so that the copy is larger than L2"
        )
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return [2 * size / us / 1e6 for us in timed_us(lambda: target.copy_(source), warmup=5, n=20)]


def _tflops(us: float) -> float:
    return 2 * MATMUL_SIZE**3 / us / 1e6


def matmul_tflops(dtype: torch.dtype, warmup: int = 10, n: int = 40) -> list[float]:
    a = torch.randn(MATMUL_SIZE, MATMUL_SIZE, device="cuda", dtype=dtype)
    b = torch.randn(MATMUL_SIZE, MATMUL_SIZE, device="cuda", dtype=dtype)
    c = torch.empty_like(a)
    return [_tflops(us) for us in timed_us(lambda: torch.mm(a, b, out=c), warmup=warmup, n=n)]


def fp8_matmul_tflops() -> list[float]:
    def operand() -> torch.Tensor:
        return torch.randn(MATMUL_SIZE, MATMUL_SIZE, device="cuda", dtype=torch.bfloat16).to(torch.float8_e4m3fn)

    a, b = operand(), operand().t()  # the second operand must be column-major
    one = torch.ones((), device="cuda")

    def product() -> torch.Tensor:
        return torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)

    return [_tflops(us) for us in timed_us(product, warmup=10, n=40)]


def kernel_launch_us(launches: int = 200, n: int = 20) -> list[float]:
    """Returns the wall-clock time per launch of torch's spin kernel, told to spin for no cycles."""
    samples: list[float] = []
    for _ in range(n + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(launches):
            torch.cuda._sleep(0)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        samples.append((time.perf_counter() - start) * 1e6 / launches)
    return samples[1:]  # the first block loads the kernel


# Links


class Peer:
    """A GPU's buffers, and one stream each for what it sends and what it receives, so that copies wait for ports alone."""

    def __init__(self, device: int) -> None:
        with torch.cuda.device(device):
            self.device = device
            self.outgoing = torch.randint(0, 256, (LINK_BUFFER_BYTES,), dtype=torch.uint8, device="cuda")
            self.incoming = torch.empty_like(self.outgoing)
            self.flag = torch.zeros(1, dtype=torch.int32, device="cuda")
            self.elapsed_ns = torch.zeros(1, dtype=torch.int64, device="cuda")
            self.sends = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self.receives = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def push(self, to: Peer) -> None:
        """Copies to the peer, on the stream that sends: torch copies between GPUs with the source's copy engine."""
        # torch makes the source's current stream wait for the target's and the other way round, so neither may be one that others use.
        with torch.cuda.stream(to.receives), torch.cuda.stream(self.sends):
            to.incoming.copy_(self.outgoing, non_blocking=True)


def probe_links(report: Report, devices: int) -> None:
    pairs = [(a, b) for a in range(devices) for b in range(devices) if a != b]
    apart = [f"{a}->{b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    if apart:
        report.note(f"links were not measured: no peer access between GPUs {', '.join(apart)}")
        return
    peers = [Peer(device) for device in range(devices)]
    for a in range(devices):
        report.attempt("nvlink_pair_gbps", push_gbps, peers, [(a, (a + 1) % devices)])
    report.attempt("nvlink_ring_gbps", push_gbps, peers, [(a, (a + 1) % devices) for a in range(devices)])
    report.attempt("flag_exchange_us", flag_exchange_us, peers)


def push_gbps(peers: list[Peer], routes: list[tuple[int, int]], copies: int = 8, n: int = 8) -> list[float]:
    """Returns the bandwidth in one direction of the slowest route, all used at once: ``n`` samples of ``copies`` copies, after an untimed
    one."""
    samples: list[float] = []
    for _ in range(n + 1):
        synchronize(peers)
        starts, stops = [timing_event() for _ in routes], [timing_event() for _ in routes]
        for copy in range(copies):
            for (source, target), start in zip(routes, starts, strict=True):
                if copy == 0:
                    start.record(peers[source].sends)
                peers[source].push(peers[target])
        for (source, _), stop in zip(routes, stops, strict=True):
            stop.record(peers[source].sends)
        synchronize(peers)
        slowest_ms = max(start.elapsed_time(stop) for start, stop in zip(starts, stops, strict=True))
        samples.append(copies * LINK_BUFFER_BYTES / slowest_ms / 1e6)
    return samples[1:]


def flag_exchange_us(peers: list[Peer], warmup: int = 100, rounds: int = 1000, n: int = 5) -> list[float]:
    """Returns the device time of one exchange between two GPUs, over every pair; the copies before have opened peer access both ways."""
    kernels = []
    for peer in peers:
        with torch.cuda.device(peer.device):
            kernels.append(torch.cuda._compile_kernel(FLAG_EXCHANGE_SOURCE, "flag_exchange", cuda_include_dirs=[INCLUDE_DIR]))
            # No round: loads the kernel, which could otherwise wait for a peer that waits for it.
            kernels[-1](args=[peer.flag, peer.flag, 0, 0, peer.elapsed_ns])
    # A ring of copies opens access between neighbours alone.
    for a in peers:
        for b in peers:
            if a is not b:
                b.flag.copy_(a.flag)
    samples: list[float] = []
    for i, a in enumerate(peers):
        for b in peers[i + 1 :]:
            for _ in range(n):
                for peer in (a, b):
                    peer.flag.zero_()
                synchronize(peers)
                for peer, other in ((a, b), (b, a)):
                    with torch.cuda.device(peer.device):
                        kernels[peer.device](args=[peer.flag, other.flag, warmup, rounds, peer.elapsed_ns])
                synchronize(peers)
                elapsed_ns = min(a.elapsed_ns.item(), b.elapsed_ns.item())
                if elapsed_ns <= 0:
                    raise RuntimeError(f"GPUs {a.device} and {b.device} did not see each other's flags within a second")
                samples.append(elapsed_ns / 1e3 / rounds)
    return samples


def synchronize(peers: list[Peer]) -> None:
    for peer in peers:
        torch.cuda.synchronize(peer.device)


# Random places


def probe_places(report: Report, devices: int) -> None:
    """Measures GPU 0 in its own memory, and its reads of the next GPU's."""
    torch.cuda.set_device(0)
    table = torch.zeros(PLACES_BYTES, dtype=torch.uint8, device="cuda")
    tables = {"": table}
    if devices > 1:
        tables["peer_"] = torch.zeros(PLACES_BYTES, dtype=torch.uint8, device="cuda:1")
        tables["peer_"][:16].copy_(table[:16])  # PyTorch opens the source's access to the target
    for where, memory in tables.items():
        for row in ROW_BYTES:
            report.attempt(f"{where}read_rows_{row}b_tbps", places_per_us, "read_rows", memory, 16, row // 16, 16e-6)
        report.attempt(f"{where}read_words_gops", places_per_us, "read_words", memory, 8, 1, 1e-3)
    for row in ROW_BYTES:
        report.attempt(f"add_rows_{row}b_tbps", places_per_us, "add_rows", table[:ADDED_BYTES], 16, row // 16, 16e-6)
    report.attempt("swap_words_gops", places_per_us, "swap_words", table, 8, 1, 1e-3)


def places_per_us(kernel: str, table: torch.Tensor, item_bytes: int, row: int, factor: float, n: int = 7) -> list[float]:
    """Returns how many items a microsecond the kernel goes through, times ``factor``; an item is a vector or a word."""
    touch = torch.cuda._compile_kernel(PLACES_SOURCE, kernel, cuda_include_dirs=[INCLUDE_DIR])
    sink, count = torch.zeros(2, dtype=torch.int64, device="cuda"), TOUCHED_BYTES // item_bytes
    grid = (2 * torch.cuda.get_device_properties(0).multi_processor_count, 1, 1)
    arguments = [table, count, row, table.nbytes // item_bytes // row, sink]
    return [factor * count / us for us in timed_us(lambda: touch(grid, (512, 1, 1), arguments), warmup=2, n=n)]


# NCCL


def probe_nccl(report: Report, rank: int, devices: int, rendezvous: Path) -> None:
    with nccl_group(rank, devices, rendezvous):
        # Every rank takes the same path: a failure on one alone ends in NCCL's timeout, and then in the caller's.
        for payload_bytes in (8, 256, 2048):
            tensor = torch.zeros(payload_bytes // 4, device="cuda")
            samples = allreduce_us(functools.partial(dist.all_reduce, tensor))
            if rank == 0:
                report.add(f"nccl_allreduce_{payload_bytes}b_us", samples)
        samples = graph_allreduce_us()
        if rank == 0:
            report.add("nccl_allreduce_graph_8b_us", samples)


@contextlib.contextmanager
def nccl_group(rank: int, devices: int, rendezvous: Path) -> Iterator[None]:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=devices,
        timeout=datetime.timedelta(seconds=NCCL_TIMEOUT_S),
        device_id=device,
    )
    yield
    # Only when all went well: after a failure this would wait for ranks that are gone.
    dist.destroy_process_group()


def allreduce_us(call: Callable[[], Any], calls: int = 20, n: int = 20) -> list[float]:
    """Returns the time per call over blocks of ``calls`` calls, the slowest rank's for every block; the same list on all ranks."""

    def block() -> None:
        for _ in range(calls):
            call()

    samples = torch.tensor([us / calls for us in timed_us(block, warmup=2, n=n)], device="cuda")
    dist.all_reduce(samples, op=dist.ReduceOp.MAX)
    return [float(us) for us in samples.tolist()]


def graph_allreduce_us(calls: int = 20) -> list[float]:
    tensor = torch.zeros(2, device="cuda")
    graph = torch.cuda.CUDAGraph()
    # Thread-local: what NCCL's watchdog thread does meanwhile must not spoil the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(calls):
            dist.all_reduce(tensor)
    return [us / calls for us in allreduce_us(graph.replay, calls=1)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m peerlane.hardware.probes")
    parser.add_argument("probe", choices=("gpu", "links", "places", "nccl"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--rendezvous", type=Path)
    options = parser.parse_args(arguments)
    report = Report(options.out)
    try:
        if options.probe == "gpu":
            probe_gpu(report, options.device)
        elif options.probe == "links":
            probe_links(report, options.devices)
        elif options.probe == "places":
            probe_places(report, options.devices)
        else:
            probe_nccl(report, options.rank, options.devices, options.rendezvous)
    except Exception as error:
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        report.note(f"probe {options.probe} stopped: {first_line}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
