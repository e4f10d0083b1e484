"""What the scripts here share: options, ranks that share GPUs, replayed graphs that take turns, wrong words, and files of rows."""

import argparse
import contextlib
import json
import os
import pickle
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
import torch.multiprocessing as mp
from local_ranks import LocalRanks

from peerlane.device.host.arena import faults
from peerlane.hardware.environment import record
from peerlane.hardware.virtual_node import share_gpus

BF16 = torch.bfloat16
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
STRETCHES = 5
Call = Callable[[], Any]
Row = dict[str, Any]


def script(documentation: str | None, ranks: int | None = None, limit_s: float | None = None) -> argparse.ArgumentParser:
    """Returns the parser of a script, with ``--out`` and, if it has a number of ranks, ``--ranks``; 0 stands for all GPUs. With a time
    limit there are options of how ranks share GPUs, too; :func:`sharing` has their values."""
    parser = argparse.ArgumentParser(description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter)
    if ranks is not None:
        parser.add_argument("--ranks", "--world", type=int, default=ranks, help=f"by default {ranks or 'all GPUs'}")
    if limit_s is not None:
        parser.add_argument("--ranks-per-gpu", type=int, help="by default as many as share a GPU where all GPUs are used")
        parser.add_argument("--limit", type=float, default=limit_s, help="seconds, after which all ranks are killed")
        parser.add_argument("--no-mps", action="store_true")
    parser.add_argument(
        "--out", type=Path, help="gets the figures: one document if its name ends in .json, else lines of JSON behind others"
    )
    return parser


def sharing(options: argparse.Namespace) -> dict[str, Any]:
    """Returns what :func:`run_on_shared_gpus` takes of these options."""
    return {"limit_s": options.limit, "per_gpu": options.ranks_per_gpu, "mps": not options.no_mps}


class Rows:
    """Prints rows as they come and keeps them in ``out``, with where they were measured; counts those with wrong words."""

    def __init__(self, out: Path | None, **common: Any) -> None:
        self.out, self.common, self.rows, self.wrong = out, common, list[Row](), 0
        self.environment = record() if out is not None else {}

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.wrong += bool(row.get("wrong"))
        print("FAIL " * bool(row.get("wrong")) + json.dumps(row, default=str), flush=True)
        if self.out is None:
            return
        if self.out.suffix == ".json":
            self.out.write_text(json.dumps({"environment": self.environment, **self.common, "rows": self.rows}, indent=1, default=str))
        else:
            gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
            place = {"gpu": gpu, "gpus": torch.cuda.device_count()}
            place["revision"] = (self.environment.get("git") or {}).get("revision")
            with self.out.open("a") as file:
                file.write(json.dumps(row | place, default=str) + "\n")


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


def device_us(call: Call, count: int = 1) -> float:
    """Returns the device's time of a call, of so many that follow each other, in microseconds."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call, unused-ignore]
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / count * 1e3


def graph_times(calls: Mapping[str, Call], stretch_us: float, of_each: int = 1) -> tuple[dict[str, float], dict[str, str]]:
    """Returns the median time of each call, whose graphs take turns, in microseconds, and why others cannot be captured.

    ``of_each``: what a call does so many times, of which one counts.
    """
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    refused: dict[str, str] = {}
    for name, call in calls.items():
        try:
            graphs[name] = graph_of(call)
        except Exception as refusal:
            refused[name] = f"{type(refusal).__name__}: {str(refusal).splitlines()[0][:160]}"
    count = {name: max(2, int(stretch_us / device_us(graph.replay, 2))) for name, graph in graphs.items()}
    medians = median_in_turn({name: lambda name=name: device_us(graphs[name].replay, count[name]) / of_each for name in graphs})  # type: ignore[misc]
    return {name: round(median, 2) for name, median in medians.items()}, refused


def report(steps: Iterable[Iterable[Row]], out: Path | None, limit_s: float = float("inf"), **common: Any) -> NoReturn:
    """Runs the steps, each of which yields rows, and exits: with 1 if a row has wrong words, a step failed or the time is over."""
    begin, kept = time.monotonic(), Rows(out, **common)
    for step in steps:
        try:
            with faults_told():
                for row in step:
                    kept.add(row)
                    if time.monotonic() - begin > limit_s:
                        print(f"FAIL out of time, {limit_s:.0f} s", flush=True)
                        os._exit(1)
        except Exception:
            print(f"FAIL {traceback.format_exc()[-1500:]}", flush=True)
            kept.wrong += 1
    print(f"{'FAIL' if kept.wrong else 'ok'}: {kept.wrong} wrong, {time.monotonic() - begin:.0f} s", flush=True)
    os._exit(1 if kept.wrong else 0)  # a rank that waits for another would not let the process end


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


def small(*shape: int, seed: int, largest: int = 1) -> torch.Tensor:
    """Draws small integers, of which sums are exact; the same on all ranks for one seed."""
    return torch.randint(-largest, largest + 1, shape, generator=torch.Generator().manual_seed(seed)).to(BF16).cuda()


def in_symmetric_memory(values: torch.Tensor) -> tuple[torch.Tensor, str]:
    """Copies a tensor to where all ranks reach it, and names their group: what torch's operators of symmetric memory take."""
    shared, group = symmetric_memory.empty(values.shape, dtype=values.dtype, device=values.device), dist.group.WORLD
    symmetric_memory.rendezvous(shared, group)
    return shared.copy_(values), group.group_name


def meet() -> None:
    """Waits for this rank's device and for all ranks."""
    if torch.cuda.is_available():
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


def slowest_in_turn(graphs: Mapping[str, Call], count: int, warm_up: int, start_delay: int = 0) -> dict[str, float]:
    """Returns the slowest rank's median time of a replay, in microseconds.

    ``start_delay``: cycles for which the device waits first, so that the host is ahead.
    """

    def stretch(graph: Call) -> float:
        meet()
        if start_delay:
            torch.cuda._sleep(start_delay)
        for _ in range(warm_up):
            graph()
        return device_us(graph, count)

    medians = median_in_turn({name: lambda graph=graph: stretch(graph) for name, graph in graphs.items()})
    slowest = torch.tensor(list(medians.values()))
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return {name: round(us, 2) for name, us in zip(medians, slowest.tolist(), strict=True)}


def note_failure(name: str, error: Exception) -> None:
    """Says on stderr what cannot be called or captured here, and why."""
    print(json.dumps({"failed": name, "error": f"{type(error).__name__}: {str(error)[:300]}"}), file=sys.stderr, flush=True)


def microseconds(calls: Mapping[str, Call], count: int, warm_up: int | None = None, **how: Any) -> dict[str, float]:
    """Returns the slowest rank's median of each kind of call, as replayed graphs that take turns. One that cannot be captured has none."""
    for call in calls.values():  # torch's workspace grows and moves: a graph that was captured before would read what is gone
        with contextlib.suppress(Exception):
            call()
    graphs: dict[str, Call] = {}
    for name, call in calls.items():
        try:
            graphs[name] = replay(call)
        except Exception as error:
            note_failure(name, error)
    return slowest_in_turn(graphs, count, max(1, count // 4) if warm_up is None else warm_up, **how)


def run_on_shared_gpus(
    ranks: int,
    out: Path | None,
    rows: Callable[..., Iterable[Row]],
    *arguments: Any,
    backend: str = "cpu:gloo,cuda:nccl",
    timeout_s: float = 600.0,
    limit_s: float = float("inf"),
    per_gpu: int | None = None,
    mps: bool = True,
    cpu: bool = False,
) -> None:
    """Runs ``rows(*arguments, rank, ranks)`` in a process for each rank, and prints and keeps the rows of rank 0.

    Ranks share GPUs where there are fewer of them, or where ``per_gpu`` says so, in time slices without ``mps``; 0 stands for a rank on
    each. ``cpu``: to try a script. ``timeout_s``: of the process group. Exits with 1 if a rank counted wrong words or failed, and with 3
    where ranks are not done within ``limit_s``; they are killed then.
    """
    ranks, end = ranks or torch.cuda.device_count(), time.monotonic() + limit_s
    node = None if cpu else share_gpus(ranks, torch.cuda.device_count(), per_gpu, None if mps else "time_slices")
    if node is None and not cpu:
        raise SystemExit("there is no GPU here, expected at least one")
    with tempfile.TemporaryDirectory() as folder, node.daemon() if node else contextlib.nullcontext() as daemon:
        places = [(node.rank_environment(rank, daemon), node.device_index(rank)) if node else ({}, None) for rank in range(ranks)]
        store = f"file://{folder}/store", timedelta(seconds=timeout_s)
        context = mp.spawn(_run_rank, args=(ranks, places, backend, store, out, rows, arguments), nprocs=ranks, join=False)
        stuck, codes, texts = end_ranks(context, end, at_failure=True)
    if stuck or codes:
        print(f"FAIL ranks that were killed: {stuck}; exit codes: {codes}", *texts, sep="\n", flush=True)
        raise SystemExit(3 if time.monotonic() > end else 1)


def _run_rank(
    rank: int,
    ranks: int,
    places: list[tuple[dict[str, str], int | None]],
    backend: str,
    store: tuple[str, timedelta],
    out: Path | None,
    rows: Callable[..., Iterable[Row]],
    arguments: tuple[Any, ...],
) -> None:
    environment, gpu = places[rank]
    os.environ |= environment
    if gpu is not None:
        torch.cuda.set_device(gpu)
    dist.init_process_group(backend, init_method=store[0], timeout=store[1], rank=rank, world_size=ranks)
    kept, wrong = Rows(out if rank == 0 else None, ranks=ranks), 0
    for row in rows(*arguments, rank, ranks):
        if "wrong" in row:
            counted = torch.tensor([row["wrong"]])
            dist.all_reduce(counted)
            row |= {"wrong": int(counted), "ranks": ranks}
            wrong += row["wrong"]
        if rank == 0:
            kept.add(row)
    meet()
    os._exit(1 if wrong else 0)  # communicators of two libraries have no order in which to be taken down


def end_ranks(context: Any, deadline: float, *, at_failure: bool) -> tuple[list[int], dict[int, int], list[str]]:
    """Waits for the processes of ``mp.spawn(join=False)`` and kills those that are left; returns which, the exit codes that are not 0, and
    what ranks raised.

    ``deadline``: by ``time.monotonic``. ``at_failure``: a few seconds after the first rank has failed, too, for others may say the same.
    """
    processes = context.processes
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        if at_failure and any(process.exitcode for process in processes):
            deadline, at_failure = min(deadline, time.monotonic() + 5), False
        time.sleep(0.1)
    stuck = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
    for process in processes:
        process.join(5)
    codes = {rank: process.exitcode for rank, process in enumerate(processes) if process.exitcode}
    texts = [pickle.loads(Path(path).read_bytes()) for path in context.error_files if os.path.exists(path) and os.path.getsize(path)]
    return stuck, codes, texts
