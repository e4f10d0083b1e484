"""Time the large collectives for many settings of their rings, on the GPUs of this machine.

    PYTHONPATH=src python tests/gpu/tune_rings.py [--world 2] [--out rings.json] [--budget 60] [--only depth=8,batch=1 ...]

Compiles every kernel of every setting first, in parallel. Then one process per GPU goes through the settings: each gets a communicator of
its own, each operation is checked on exact data, captured in a graph and replayed. Prints GB/s that the busiest port takes in, by setting
and size; the best of each column last. --out writes the same as JSON. Settings that are left when the budget is spent are named, not timed;
the first one is always timed.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from peerlane.device.collectives import Communicator
from peerlane.device.kernels import compile_kernel
from peerlane.device.workspace import RINGS, Rings

SIZES = (4 << 20, 16 << 20, 64 << 20)
"""Bytes of the whole tensor: what is gathered, scattered, exchanged or summed."""
SETTINGS = (
    {},
    {"batch": 1},
    {"depth": 16},
    {"depth": 16, "batch": 4},
    {"depth": 16, "stages": 5, "in_flight": 3},
    {"stages": 4, "in_flight": 3},
    {"stages": 3, "in_flight": 1},
    {"blocks": 64, "depth": 16},
    {"blocks": 96},
    {"blocks": 64, "tile_bytes": 32 << 10, "stages": 2, "in_flight": 1},
    {"tile_bytes": 8 << 10, "depth": 16, "batch": 4},
    {"tile_bytes": 8 << 10, "depth": 16, "stages": 8, "in_flight": 4},
    {"tile_bytes": 24 << 10, "stages": 3, "in_flight": 1},
    {"summing_warps": 4},
    {"summing_warps": 12},
    {"summing_warps": 16},
)
"""What differs from the default."""
RING_KERNELS = ("exchange_ring", "reduce_ring", "all_reduce_relay", "broadcast_relay", "reduce_relay")
REPLAYS, CALLS = 5, 4


@dataclass(frozen=True)
class Operation:
    """A collective on int32 tensors of ``nbytes`` in all: its call, made with tensors of this rank, and bytes into the busiest port."""

    name: str
    prepare: Callable[[Communicator, int], tuple[Callable[[], None], torch.Tensor, torch.Tensor]]
    port_share: Callable[[int], float]


def own_values(rank: int, count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int32, device="cuda") % 1021 + rank


def all_gather(group: Communicator, nbytes: int) -> tuple[Callable[[], None], torch.Tensor, torch.Tensor]:
    rank, world = group.member.rank, group.member.world_size
    shard = own_values(rank, nbytes // 4 // world)
    out = torch.zeros(shard.numel() * world, dtype=torch.int32, device="cuda")
    expected = torch.cat([own_values(q, shard.numel()) for q in range(world)])
    return lambda: group.all_gather_into_tensor(out, shard), out, expected


def all_to_all(group: Communicator, nbytes: int) -> tuple[Callable[[], None], torch.Tensor, torch.Tensor]:
    rank, world = group.member.rank, group.member.world_size
    source = own_values(rank, nbytes // 4 // world * world)
    out = torch.zeros_like(source)
    expected = torch.cat([own_values(q, source.numel()).chunk(world)[rank] for q in range(world)])
    return lambda: group.all_to_all_single(out, source), out, expected


def reduce_scatter(group: Communicator, nbytes: int) -> tuple[Callable[[], None], torch.Tensor, torch.Tensor]:
    rank, world = group.member.rank, group.member.world_size
    source = own_values(rank, nbytes // 4 // world * world)
    out = torch.zeros(source.numel() // world, dtype=torch.int32, device="cuda")
    expected = own_values(0, source.numel()).chunk(world)[rank] * world + sum(range(world))
    return lambda: group.reduce_scatter_tensor(out, source), out, expected


def all_reduce(group: Communicator, nbytes: int) -> tuple[Callable[[], None], torch.Tensor, torch.Tensor]:
    world = group.member.world_size
    source = own_values(group.member.rank, nbytes // 4)
    out = torch.zeros_like(source)
    return lambda: group.all_reduce(source, out), out, own_values(0, source.numel()) * world + sum(range(world))


def broadcast(group: Communicator, nbytes: int) -> tuple[Callable[[], None], torch.Tensor, torch.Tensor]:
    source = own_values(group.member.rank, nbytes // 4)
    out = torch.zeros_like(source)
    return lambda: group.broadcast(source, 0, out), out, own_values(0, source.numel())


OPERATIONS = (
    Operation("all_gather", all_gather, lambda world: (world - 1) / world),
    Operation("all_to_all", all_to_all, lambda world: (world - 1) / world),
    Operation("reduce_scatter", reduce_scatter, lambda world: (world - 1) / world),
    Operation("all_reduce", all_reduce, lambda world: 2 * (world - 1) / world),
    Operation("broadcast", broadcast, lambda world: 1.0),
)


def median_us(call: Callable[[], None]) -> float:
    """Of replays of a graph of some calls, per call, on the slowest rank."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(REPLAYS + 1):
        dist.barrier()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / CALLS)
    slowest = torch.tensor(statistics.median(times[1:]), device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def measure(rings: Rings) -> dict[str, float]:
    """GB/s by operation and size. Raises if a result is wrong."""
    group = Communicator(rings=rings, timeout_s=5.0)
    rates = {}
    for operation in OPERATIONS:
        for nbytes in SIZES:
            call, out, expected = operation.prepare(group, nbytes)
            time_us = median_us(call)
            if not torch.equal(out, expected):
                raise SystemExit(f"{operation.name} of {nbytes} bytes with {rings} is wrong on rank {group.member.rank}")
            rates[f"{operation.name} {nbytes >> 20}M"] = operation.port_share(group.member.world_size) * nbytes / time_us / 1000
    torch.cuda.synchronize()
    dist.barrier()
    group.close()
    return rates


def run(rank: int, world: int, port: int, settings: list[dict[str, int]], budget_s: float, out: str | None) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
        device_id=torch.device("cuda", rank),
    )
    deadline = time.monotonic() + budget_s
    rows: list[dict[str, Any]] = []
    names = [f"{operation.name} {nbytes >> 20}M" for operation in OPERATIONS for nbytes in SIZES]
    if rank == 0:
        print("\n".join(f"{column:3} {name}" for column, name in enumerate(names)))
        print(" ".join(f"{column:5}" for column in range(len(names))))
    for setting in settings:
        late = torch.tensor(time.monotonic() > deadline, device="cuda", dtype=torch.int32)
        dist.all_reduce(late, dist.ReduceOp.MAX)
        if late.item() and rows:
            if rank == 0:
                print("not timed, out of budget:", setting or "default")
            continue
        rates = measure(replace(RINGS, **setting))
        rows.append({"setting": setting, "gbps": rates})
        if rank == 0:
            print(" ".join(f"{rates[name]:5.0f}" for name in names), setting or "default", flush=True)
    if rank == 0:
        for name in names:
            best = max(rows, key=lambda row: row["gbps"][name])
            print(f"{name:20} {best['gbps'][name]:5.0f} GB/s with {best['setting'] or 'default'}")
        if out:
            Path(out).write_text(json.dumps({"world_size": world, "rows": rows}, indent=1))
    dist.barrier()
    dist.destroy_process_group()


def compile_one(job: tuple[str, int, Rings]) -> None:
    kernel, world, rings = job
    compile_kernel(kernel, world, torch.int32, "sm_90a", rings)


def parsed(text: str) -> dict[str, int]:
    return {name: int(value) for name, value in (item.split("=") for item in text.split(",") if item)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--world", type=int, default=0, help="GPUs to use (default: all)")
    parser.add_argument("--out", help="where to write the rates as JSON")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for timing, which comes after compilation")
    parser.add_argument("--only", nargs="*", type=parsed, help="these settings in place of the list, each as name=value,name=value")
    options = parser.parse_args()
    began = time.monotonic()
    world = options.world or torch.cuda.device_count()
    settings = list(SETTINGS) if options.only is None else options.only
    jobs = [(kernel, world, replace(RINGS, **setting)) for setting in settings for kernel in RING_KERNELS]
    unique = list({(kernel, rings.defines()["PEERLANE_RINGS"]): (kernel, world, rings) for kernel, world, rings in jobs}.values())
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1), mp_context=mp.get_context("spawn")) as pool:
        list(pool.map(compile_one, unique, chunksize=4))
    print(f"{len(unique)} kernels compiled in {time.monotonic() - began:.1f} s", flush=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(run, args=(world, port, settings, options.budget, options.out), nprocs=world)


if __name__ == "__main__":
    main()
