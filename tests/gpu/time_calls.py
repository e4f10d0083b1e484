"""Times the host side of calls: what the backend ``peerlane`` and operators cost the calling thread, beside NCCL.

    PYTHONPATH=src timeout 90 python tests/gpu/time_calls.py [--ranks 2] [--out FILE]        one GPU is enough, 90 s at most

A line of JSON a call: median microseconds, over blocks of ``BLOCK`` small calls that the device has time for.
``call``: it blocks the stream alone; ``async``: with ``async_op=True``; ``wait``: the same and ``wait()`` of its work. NCCL has the same
ranks where it takes them, else a group of one rank. ``cpu_us`` is the CPU time of the thread.
"""

import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from harness import BF16, Row, meet, run_on_shared_gpus, script

import peerlane.device.backend  # noqa: F401
from peerlane import ops

BLOCK, BLOCKS, LIMIT_S = 40, 25, 80.0
Call = Callable[[], Any]


def collectives(group: Any, ranks: int) -> dict[str, Callable[..., Any]]:
    """Each takes ``async_op``."""
    part, whole = torch.ones(2048, dtype=BF16, device="cuda"), torch.ones(2048 * ranks, dtype=BF16, device="cuda")
    other = torch.empty_like(whole)
    root = dist.get_global_rank(group, 0)
    return {
        "all_reduce": lambda **way: dist.all_reduce(part, group=group, **way),
        "all_gather_into_tensor": lambda **way: dist.all_gather_into_tensor(whole, part, group=group, **way),
        "reduce_scatter_tensor": lambda **way: dist.reduce_scatter_tensor(part, whole, group=group, **way),
        "all_to_all_single": lambda **way: dist.all_to_all_single(other, whole, group=group, **way),
        "broadcast": lambda **way: dist.broadcast(part, root, group=group, **way),
    }


def operators() -> dict[str, Call]:
    a, b, x = (torch.randn(shape, device="cuda").to(BF16) for shape in ((256, 1024), (1024, 1024), (8, 4096)))
    weight = torch.ones(4096, dtype=BF16, device="cuda")
    tall = torch.randn(1024 * dist.get_world_size(), 1024, device="cuda").to(BF16)
    return {
        "ops.all_reduce": lambda: ops.all_reduce(x),
        "ops.all_gather": lambda: ops.all_gather(x),
        "ops.all_reduce_rms_norm": lambda: ops.all_reduce_rms_norm(x, weight, x),
        "ops.gemm_all_reduce": lambda: ops.gemm_all_reduce(a, b),
        "ops.gemm_reduce_scatter": lambda: ops.gemm_reduce_scatter(a, b),
        "ops.all_gather_gemm": lambda: ops.all_gather_gemm(a, tall),
        "ops.row_gather_gemm": lambda: ops.row_gather_gemm(a, [b]),
    }


def host_times(call: Call) -> dict[str, float]:
    """Returns the median wall and CPU time of the calling thread for one call, in microseconds."""
    for _ in range(3):
        call()
    wall, cpu = [], []
    for _ in range(BLOCKS):
        meet()
        begin, begin_cpu = time.perf_counter_ns(), time.thread_time_ns()
        for _ in range(BLOCK):
            call()
        cpu.append((time.thread_time_ns() - begin_cpu) / BLOCK / 1e3)
        wall.append((time.perf_counter_ns() - begin) / BLOCK / 1e3)
    return {"us": round(statistics.median(wall), 1), "cpu_us": round(statistics.median(cpu), 1)}


def nccl_group(ranks: int) -> tuple[Any, int]:
    """Returns a group of NCCL and its size: all ranks, or this one alone where they cannot share a GPU."""
    alone = [dist.new_group([rank], backend="nccl", timeout=timedelta(seconds=20)) for rank in range(ranks)][dist.get_rank()]
    whole = dist.new_group(backend="nccl", timeout=timedelta(seconds=20))
    problem = 0
    try:
        dist.all_reduce(torch.ones(1, device="cuda"), group=whole)
        torch.cuda.synchronize()
    except RuntimeError:
        problem = 1
    dist.all_reduce(failed := torch.tensor([problem]))
    return (alone, 1) if int(failed) else (whole, ranks)


def rows(rank: int, ranks: int) -> Iterable[Row]:
    warnings.simplefilter("ignore")
    end = time.monotonic() + LIMIT_S
    nccl, of_nccl = nccl_group(ranks)
    kit = dist.new_group(backend="peerlane", timeout=timedelta(seconds=20))
    waited: dict[str, Callable[[Callable[..., Any]], Call]] = {
        "call": lambda function: function,
        "async": lambda function: lambda: function(async_op=True),
        "wait": lambda function: lambda: function(async_op=True).wait(),
    }
    calls: list[tuple[str, str, int, Call]] = []
    for library, group, size in (("peerlane", kit, ranks), ("nccl", nccl, of_nccl)):
        for name, function in collectives(group, size).items():
            calls += [(f"{name}, {way}", library, size, made(function)) for way, made in waited.items()]
    for name, library, size, call in [*calls, *((name, "peerlane", ranks, call) for name, call in operators().items())]:
        dist.all_reduce(over := torch.tensor([int(time.monotonic() > end)]))
        if int(over):
            print("the time limit came first") if rank == 0 else None
            break
        yield {"call": name, "library": library, "of_ranks": size, **host_times(call)}


if __name__ == "__main__":
    options = script(__doc__, ranks=2).parse_args()
    run_on_shared_gpus(options.ranks, options.out, rows)
