"""The tuner's choices on GPUs, beside every option timed at length: right within 5 %, and in how many seconds.

    PYTHONPATH=src python tests/gpu/check_tuner.py [--ranks 4] [--out FILE]

Ranks share GPUs where there are fewer GPUs than ranks. For each kernel and shape the tuner chooses at first use, with an empty cache. Then
every option of the kernel is made again and timed, in stretches that take turns: a time is the slowest rank's, the median of the stretches.
``lost`` is how much slower the tuner's choice is than the fastest option; ``model`` the same for the model's choice. Exits with 1 where a
choice is more than 5 % slower, or took more than 3 s.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from peerlane.device import group_of
from peerlane.device.host import tune
from peerlane.device.host.group import Group
from peerlane.device.products.all_gather_gemm import all_gather_gemm
from peerlane.device.products.gemm_all_gather import gemm_all_gather
from peerlane.device.products.gemm_all_reduce import gemm_all_reduce
from peerlane.device.products.gemm_reduce_scatter import gemm_reduce_scatter
from peerlane.hardware.environment import record
from peerlane.hardware.virtual_node import share_gpus

BF16 = torch.bfloat16
STRETCHES, CALLS = 7, 10
LOST, SECONDS = 0.05, 3.0
SHAPES = ((1024, 4096), (2048, 2048), (4096, 4096), (4096, 8192), (8192, 8192))
"""Rows and columns of the result."""
KERNELS: dict[str, Callable[[Group, int, int], object]] = {
    "gemm_all_reduce": lambda group, m, n: gemm_all_reduce(group, m, n, BF16),
    "gemm_reduce_scatter": lambda group, m, n: gemm_reduce_scatter(group, m, n, BF16),
    "gemm_all_gather": lambda group, m, n: gemm_all_gather(group, m, n // group.world_size, BF16),
    "all_gather_gemm": lambda group, m, n: all_gather_gemm(group, m, 4096 // group.world_size, BF16, n=n // group.world_size),
}


class Watched:
    """``tune.choose``, which keeps what it was called with, what it chose and how long that took."""

    choose = staticmethod(tune.choose)
    last: tuple[list[Any], Any, Any, float]

    def __call__(self, group: Group, kernel: str, shape: Any, options: Any, make: Any) -> Any:
        begin = time.monotonic()
        chosen = self.choose(group, kernel, shape, options, make)
        Watched.last = options, make, chosen, time.monotonic() - begin
        return chosen


def at_length(group: Group, options: list[Any], make: Callable[[Any], tuple[Callable[[], object], Callable[[], None]]]) -> dict[str, float]:
    """Microseconds of every option; stretches take turns."""
    calls = {str(option): make(option) for option in options}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for stretch in range(STRETCHES + 1):
        for name, (call, _) in calls.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            call()
            torch.cuda.synchronize()
            group.exchange(None)
            begin.record()
            for _ in range(CALLS):
                call()
            end.record()
            end.synchronize()
            slowest = max(group.exchange(begin.elapsed_time(end) / CALLS * 1e3))
            times[name] += [slowest] if stretch else []  # the first one warms up
    for _, close in calls.values():
        close()
    return {name: round(statistics.median(known), 2) for name, known in times.items()}


def rows_of(group: Group) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for kernel, first_use in KERNELS.items():
        for m, n in SHAPES:
            first_use(group, m, n)
            options, make, chosen, seconds = Watched.last
            times = at_length(group, options, make)
            best = min(times.values())
            row = {"kernel": kernel, "m": m, "n": n, "chosen": str(chosen), "seconds": round(max(group.exchange(seconds)), 2)}
            row |= {"lost": round(times[str(chosen)] / best - 1, 3), "model": round(times[str(options[0])] / best - 1, 3), "us": times}
            rows.append(row)
            if group.rank == 0:
                print(json.dumps(row), flush=True)
    return rows


def run(rank: int, ranks: int, environments: list[dict[str, str]], store: str, out: Path | None) -> None:
    os.environ |= environments[rank] | {"PEERLANE_TUNE": "1", "PEERLANE_CACHE_DIR": f"{store}-cache"}
    torch.cuda.set_device(rank * torch.cuda.device_count() // ranks)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    torch.manual_seed(rank)
    tune.choose = Watched()  # type: ignore[assignment]
    rows = rows_of(group_of())
    if rank == 0:
        if out is not None:
            out.write_text(json.dumps({"environment": record(), "ranks": ranks, "rows": rows}, indent=1, default=str))
        late = [row for row in rows if row["lost"] > LOST or row["seconds"] > SECONDS]
        print(
            f"{len(rows) - len(late)} of {len(rows)} within {LOST:.0%} and {SECONDS} s; worst lost {max(row['lost'] for row in rows):.1%}"
        )
        sys.exit(bool(late))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    node = share_gpus(options.ranks, torch.cuda.device_count())
    if node is None:
        parser.error("there is no GPU here, expected at least one")
    with tempfile.TemporaryDirectory() as folder, node.daemon() as daemon:
        environments = [node.rank_environment(rank, daemon) for rank in range(options.ranks)]
        mp.spawn(run, args=(options.ranks, environments, f"{folder}/store", options.out), nprocs=options.ranks)


if __name__ == "__main__":
    main()
