"""Late and dead ranks: training survives a long pause; a pause beyond the timeout, or a death, ends in exceptions, soon and on all ranks.

    PYTHONPATH=src python tests/gpu/check_faults.py --ranks 4 --nap 60 --out FILE [--scenes nap late kill store] [--no-mps]
    python tests/gpu/check_faults.py --ranks 4 --nap 3 --late 8 --timeout 2 --cpu          try it on gloo

    nap     a rank sleeps NAP seconds in the middle of training, with the default timeout: training goes on, and every sum is right
    late    a rank sleeps LATE seconds with a timeout of TIMEOUT seconds: the others raise within TIMEOUT + 5 s, the sleeper at its next
            call; all destroy the group, make a new one in the same processes and go on
    kill    a rank is killed in the middle of training, in time slices: the others raise within 15 s and end; nothing is left on the GPU
    store   the same with the rank whose process holds the store

Every step of training is an all-reduce by ``peerlane.ops`` and one by the backend, both checked. Exits with 1 if a scene failed.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from harness import Row, Rows, end_ranks, script

import peerlane.device.backend
import peerlane.errors
from peerlane import ops
from peerlane.hardware.virtual_node import VirtualNode, available_sharing

SCENES = ("nap", "late", "kill", "store")
SLACK_S, DEATH_S, START_S = 5.0, 15.0, 90.0
BROKEN = (RuntimeError, peerlane.errors.PeerlaneError)


class Rank:
    """This rank of a scene. It writes what it sees to a file, which outlives it."""

    def __init__(self, rank: int, scene: str, options: argparse.Namespace) -> None:
        self.rank, self.scene, self.options = rank, scene, options
        self.device = torch.device("cpu") if options.cpu else torch.device("cuda", 0)
        self._log = (Path(options.folder) / f"{scene}.{rank}").open("a", buffering=1)
        if not options.cpu:
            torch.cuda.set_device(self.device)

    def say(self, what: str, **more: Any) -> None:
        self._log.write(json.dumps({"what": what, "at": time.time(), **more}) + "\n")

    def join(self, name: str, timeout_s: float | None) -> None:
        timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        where = Path(self.options.folder) / f"{self.scene}.{name}"
        method = f"tcp://127.0.0.1:{self.options.port}" if name == "tcp" else f"file://{where}"
        dist.init_process_group("peerlane", init_method=method, rank=self.rank, world_size=self.options.ranks, timeout=timeout)

    def steps(self, count: int, begin: int = 0) -> None:
        """Some steps of training. Raises RuntimeError for a wrong sum."""
        ranks = self.options.ranks
        for step in range(begin, begin + count):
            given = torch.full((4096,), float((self.rank + 1) * (step % 7 + 1)), device=self.device)
            expected = ranks * (ranks + 1) / 2 * (step % 7 + 1)
            by_ops = ops.all_reduce(given)
            dist.all_reduce(given)
            for total in (by_ops, given):
                if not bool((total == expected).all()):
                    getattr(dist.group.WORLD, "_check", lambda: None)()  # raises where a wait has ended early, which explains the sum
                    raise AssertionError(f"step {step}: got {total[0].item()}, expected {expected}")

    def until_it_breaks(self, seconds: float) -> str:
        """Trains until an exception comes; returns it."""
        end, step = time.monotonic() + seconds, 0
        try:
            while time.monotonic() < end:
                self.steps(1, step)
                step += 1
        except BROKEN as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def leave(self) -> None:
        begin = time.monotonic()
        dist.destroy_process_group()
        self.say("destroyed", seconds=time.monotonic() - begin)


def nap(at: Rank) -> None:
    at.join("group", None)
    at.steps(20)
    begin = time.monotonic()
    if at.rank == 1:
        time.sleep(at.options.nap)
    at.steps(200, 20)
    at.say("went on", seconds=time.monotonic() - begin)
    at.leave()


def late(at: Rank) -> None:
    at.join("group", 120.0)
    at.steps(20)
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=at.options.timeout), dist.group.WORLD)
    begin = time.monotonic()
    if at.rank == 1:
        time.sleep(at.options.late)
        begin = time.monotonic()
    error = at.until_it_breaks(at.options.timeout + 20)
    at.say("raised", seconds=time.monotonic() - begin, error=error)
    at.leave()
    at.join("again", 120.0)
    at.steps(50)
    at.say("went on")
    at.leave()


def kill(at: Rank, name: str = "group") -> None:
    at.join(name, None)
    at.steps(20)
    at.say("ready")
    error = at.until_it_breaks(60.0)
    at.say("raised", error=error)
    at.leave()


def store(at: Rank) -> None:
    kill(at, "tcp")


def main_of(rank: int, scene: str, options: argparse.Namespace, environments: list[dict[str, str]]) -> None:
    os.environ.update(environments[rank])
    at = Rank(rank, scene, options)
    try:
        globals()[scene](at)
    except BaseException as error:
        at.say("failed", error=f"{type(error).__name__}: {error}"[:1500])
        raise
    at.say("ended")


def said(options: argparse.Namespace, scene: str, rank: int, what: str) -> dict[str, Any] | None:
    path = Path(options.folder) / f"{scene}.{rank}"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return next((line for line in lines if line["what"] == what), None)


def asked(query: str) -> list[str]:
    """What nvidia-smi says of the GPU, line by line."""
    command = ["nvidia-smi", f"--query-{query}", "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.split()


def memory_mib(options: argparse.Namespace) -> float:
    """What all processes take of the GPU."""
    return 0.0 if options.cpu else float(asked("gpu=memory.used")[0])


def processes_left(options: argparse.Namespace, pids: list[int]) -> list[int]:
    """Those of ``pids`` that still have a context on the GPU."""
    return [] if options.cpu else sorted({int(pid) for pid in asked("compute-apps=pid")} & set(pids))


def play(scene: str, options: argparse.Namespace) -> Row:
    """Plays one scene; returns what came of it, with ``wrong``."""
    slices = scene in ("kill", "store") or options.no_mps
    sharing = "time_slices" if slices or options.cpu else available_sharing()
    node, before = VirtualNode(options.ranks, 1, sharing), memory_mib(options)
    with node.daemon() if not options.cpu else nullcontext() as daemon:
        environments = [{} if options.cpu else node.rank_environment(rank, daemon) for rank in range(options.ranks)]
        begin = time.monotonic()
        context = mp.spawn(main_of, (scene, options, environments), nprocs=options.ranks, join=False)
        processes, killed = list(context.processes), None
        pids = [process.pid for process in processes]
        if scene in ("kill", "store"):
            victim = 0 if scene == "store" else options.ranks // 2
            end = time.monotonic() + START_S
            while time.monotonic() < end and not all(said(options, scene, rank, "ready") for rank in range(options.ranks)):
                time.sleep(0.1)
            time.sleep(1.0)
            os.kill(processes[victim].pid, signal.SIGKILL)
            killed = time.time()
        limit = {"nap": options.nap + START_S, "late": options.late + START_S}.get(scene, 45.0)
        stuck, _, errors = end_ranks(context, time.monotonic() + limit, at_failure=False)
    time.sleep(1.0)
    found: Row = {
        "scene": scene, "sharing": sharing, "seconds": time.monotonic() - begin, "stuck": stuck,
        "codes": [process.exitcode for process in processes], "mib_left": memory_mib(options) - before,
        "on_gpu": processes_left(options, pids),
    }  # fmt: skip
    ranks = [rank for rank in range(options.ranks) if killed is None or rank != victim]
    for what in ("went on", "raised", "destroyed", "failed"):
        found[what] = {rank: line for rank in ranks if (line := said(options, scene, rank, what)) is not None}
    if killed is not None:
        found["raised_after_s"] = {rank: line["at"] - killed for rank, line in found["raised"].items()}
    found["errors"] = [error[-1000:] for error in errors if killed is None]
    failed = not good(scene, found, ranks, options) or stuck or found["failed"] or found["on_gpu"]
    return found | {"wrong": int(bool(failed))}


def good(scene: str, found: Row, ranks: list[int], options: argparse.Namespace) -> bool:
    if scene == "nap":
        return len(found["went on"]) == len(ranks) and all(line["seconds"] >= options.nap * 0.9 for line in found["went on"].values())
    if len(found["raised"]) < len(ranks) or not all(line["error"] for line in found["raised"].values()):
        return False
    if scene == "late":
        on_time = [line["seconds"] <= (options.timeout if rank != 1 else 0) + SLACK_S for rank, line in found["raised"].items()]
        return all(on_time) and len(found["went on"]) == len(ranks)
    return all(seconds <= DEATH_S for seconds in found["raised_after_s"].values())


def main() -> int:
    parser = script(__doc__, ranks=4)
    parser.add_argument("--nap", type=float, default=60.0)
    parser.add_argument("--late", type=float, default=20.0)
    parser.add_argument("--timeout", type=float, default=5.0)
    parser.add_argument("--scenes", nargs="+", choices=SCENES, default=list(SCENES))
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--no-mps", action="store_true")
    parser.add_argument("--port", type=int, default=29517)
    options = parser.parse_args()
    kept = Rows(options.out, ranks=options.ranks)
    with tempfile.TemporaryDirectory() as folder:
        options.folder = folder
        for scene in options.scenes:
            kept.add(play(scene, options))
    return int(kept.wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
