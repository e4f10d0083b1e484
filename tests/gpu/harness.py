"""What the scripts here share: ranks that share GPUs, replayed graphs that take turns, wrong words, and lines of JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from local_ranks import LocalRanks

from peerlane.device.host.arena import faults
from peerlane.hardware.virtual_node import share_gpus

BF16 = torch.bfloat16
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
STRETCHES = 5
Call = Callable[[], Any]
Row = dict[str, Any]


def median_in_turn(stretches: Mapping[str, Callable[[], float]]) -> dict[str, float]:
    """Returns the median of what each of them measures, which they do in turn: a GPU's clocks follow its power of the last milliseconds."""
    times: dict[str, list[float]] = {name: [] for name in stretches}
    for _ in range(STRETCHES):
        for name, stretch in stretches.items():
            times[name].append(stretch())
    return {name: statistics.median(values) for name, values in times.items()}


# --- one process ---


def graph_of(call: Call) -> torch.cuda.CUDAGraph:
    """Captures a call on a stream of its own, where it has run once."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call, unused-ignore]
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph


def microseconds_of(graph: torch.cuda.CUDAGraph, count: int) -> float:
    """Returns the time of a replay, of so many that follow each other."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call, unused-ignore]
    begin.record()
    for _ in range(count):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / count * 1e3


def captured(ranks: LocalRanks, work: Callable[[int, int], None], number: int, rank: int) -> torch.cuda.CUDAGraph:
    """Captures ``work(number, rank)`` on the rank's stream."""
    graph = torch.cuda.CUDAGraph()
    with (
        torch.cuda.device(ranks.groups[rank].device),
        torch.cuda.graph(graph, stream=ranks.groups[rank].shared.streams[rank], capture_error_mode="thread_local"),
    ):
        work(number, rank)
    return graph


@contextlib.contextmanager
def faults_told() -> Iterator[None]:
    """Says who waited for whom when a kernel has given up."""
    try:
        yield
    except RuntimeError:
        for said in faults():
            print(f"FAIL {said}", flush=True)
        raise


def integers(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, largest: int = 3) -> torch.Tensor:
    """Draws small integers, of which sums are exact."""
    return torch.randint(-largest, largest + 1, shape, device=device).to(dtype)


def wrong_words(got: torch.Tensor | None, expected: torch.Tensor | None) -> torch.Tensor | int:
    """Counts elements that differ."""
    if got is None or expected is None:
        return 0
    if got.dtype in FP8:  # which cannot be compared as numbers
        got, expected = got.view(torch.uint8), expected.view(torch.uint8)
    return (got != expected).sum()


# --- a process for each rank ---


def meet() -> None:
    """Waits for this rank's device and for all ranks."""
    torch.cuda.synchronize()
    dist.barrier()


def replay(call: Call) -> Call:
    """Captures a call after three others; returns what replays it."""
    for _ in range(3):
        call()
    meet()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    return graph.replay


def slowest_in_turn(graphs: Mapping[str, Call], count: int, warm_up: int, start_delay: int = 0, device: str = "cpu") -> dict[str, float]:
    """Returns the slowest rank's median time of a replay, in microseconds.

    ``start_delay``: cycles for which the device waits first, so that the host is ahead. ``device``: where ranks compare, ``cuda`` needs a
    GPU for each of them.
    """

    def stretch(graph: Call) -> float:
        meet()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if start_delay:
            torch.cuda._sleep(start_delay)
        for _ in range(warm_up):
            graph()
        start.record()
        for _ in range(count):
            graph()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / count * 1e3

    medians = median_in_turn({name: lambda graph=graph: stretch(graph) for name, graph in graphs.items()})
    slowest = torch.tensor(list(medians.values()), device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return {name: round(us, 2) for name, us in zip(medians, slowest.tolist(), strict=True)}


def run_on_shared_gpus(
    parser: argparse.ArgumentParser, ranks: int, out: Path | None, rows: Callable[..., Iterable[Row]], *arguments: Any
) -> None:
    """Runs ``rows(*arguments, rank, ranks)`` in a process for each rank, and prints its rows.

    Ranks share GPUs where there are fewer of them. ``out`` gets the rows as lines of JSON. Exits with 1 if a rank counted wrong words.
    """
    node = share_gpus(ranks, torch.cuda.device_count())
    if node is None:
        parser.error("there is no GPU here, expected at least one")
    with tempfile.TemporaryDirectory() as folder, node.daemon() as daemon:
        environments = [node.rank_environment(rank, daemon) for rank in range(ranks)]
        mp.spawn(_run_rank, args=(ranks, environments, f"{folder}/store", out, rows, arguments), nprocs=ranks)


def _run_rank(
    rank: int,
    ranks: int,
    environments: list[dict[str, str]],
    store: str,
    out: Path | None,
    rows: Callable[..., Iterable[Row]],
    arguments: tuple[Any, ...],
) -> None:
    os.environ |= environments[rank]
    torch.cuda.set_device(rank * torch.cuda.device_count() // ranks)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=rank, world_size=ranks)
    wrong = 0
    for row in rows(*arguments, rank, ranks):
        if "wrong" in row:
            counted = torch.tensor([row["wrong"]])
            dist.all_reduce(counted)
            row |= {"wrong": int(counted), "ranks": ranks}
            wrong += row["wrong"]
        if rank == 0:
            print(json.dumps(row), flush=True)
            append(out, row | {"gpu": torch.cuda.get_device_name(), "gpus": torch.cuda.device_count()})
    meet()
    os._exit(1 if wrong else 0)  # communicators of two libraries have no order in which to be taken down


def append(out: Path | None, row: Row) -> None:
    """Appends a row to a file of lines of JSON, if there is one."""
    if out is not None:
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
