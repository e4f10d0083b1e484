"""The tuner's choices on GPUs, beside every option timed at length: right within 5 %, and in how many seconds.

    PYTHONPATH=src python tests/gpu/check_tuner.py [--ranks 4] [--out FILE]

Ranks share GPUs where there are fewer GPUs than ranks. For each kernel and shape the tuner chooses at first use, with an empty cache. Then
every option of the kernel is made again and timed, in stretches that take turns: a time is the slowest rank's median.
``lost`` is how much slower the tuner's choice is than the fastest option; ``model`` the same for the model's choice. Exits with 1 where a
choice is more than 5 % slower, or took more than 3 s.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from harness import BF16, Row, run_on_shared_gpus, script, slowest_in_turn

from peerlane.device import group_of
from peerlane.device.host import tune
from peerlane.device.host.group import Group
from peerlane.device.products.all_gather_gemm import all_gather_gemm
from peerlane.device.products.gemm_all_gather import gemm_all_gather
from peerlane.device.products.gemm_all_reduce import gemm_all_reduce
from peerlane.device.products.gemm_reduce_scatter import gemm_reduce_scatter

CALLS = 10
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


def rows_of(rank: int, ranks: int) -> Iterator[Row]:
    torch.manual_seed(rank)
    tune.choose = Watched()  # type: ignore[assignment]
    group = group_of()
    for kernel, first_use in KERNELS.items():
        for m, n in SHAPES:
            first_use(group, m, n)
            options, make, chosen, seconds = Watched.last
            calls = {str(option): make(option) for option in options}
            times = slowest_in_turn({name: call for name, (call, _) in calls.items()}, CALLS, warm_up=CALLS)
            for _, close in calls.values():
                close()
            best = min(times.values())
            row: Row = {"kernel": kernel, "m": m, "n": n, "chosen": str(chosen), "seconds": round(max(group.exchange(seconds)), 2)}
            row |= {"lost": round(times[str(chosen)] / best - 1, 3), "model": round(times[str(options[0])] / best - 1, 3), "us": times}
            yield row | {"wrong": int(rank == 0 and (row["lost"] > LOST or row["seconds"] > SECONDS))}


if __name__ == "__main__":
    options = script(__doc__, ranks=4).parse_args()
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {"PEERLANE_TUNE": "1", "PEERLANE_CACHE_DIR": cache}
        run_on_shared_gpus(options.ranks, options.out, rows_of)
