"""Candidates per minute through the service with 1 and with 8 clients, against the bare Evaluator; CPU seconds of service and candidates.

    python tests/service_throughput.py --candidates 16 --out results/cpu/service.json

Not a test: it takes two minutes, and wants an idle machine and root. The three ways take turns, a round each, on CPU ranks.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import peerlane as pl

TOKEN = "a-token-of-the-measurement"
RIGHT = "import torch.distributed as dist\n\n\ndef solution(tensor):\n    out = tensor.clone()\n    dist.all_reduce(out)\n    return out\n"
WRONG = "def solution(tensor):\n    return tensor.clone()\n"
OPTIONS: dict[str, Any] = {"presets": ("small",), "modes": (), "track": "open"}


def sources(count: int, mark: str) -> list[str]:
    """Half of them right; none is like any other, so that nothing is answered from the store."""
    return [f"{RIGHT if number % 2 else WRONG}# {mark} {number}\n" for number in range(count)]


def spent(pid: int) -> float:
    """CPU seconds of a process, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class ControlGroup:
    """Counts the CPU time of processes and all their descendants, however they end; needs root and a mounted cgroup2."""

    def __init__(self, name: str) -> None:
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
        self.folder = Path(next(mount[1] for mount in mounts if mount[2] == "cgroup2")) / f"{name}-{os.getpid()}"
        self.folder.mkdir()

    def join(self) -> None:
        """The calling process, and what it starts from now on."""
        (self.folder / "cgroup.procs").write_text("0")

    def spent(self) -> float:
        """CPU seconds so far."""
        return int((self.folder / "cpu.stat").read_text().split()[1]) / 1e6

    def remove(self) -> None:
        """Gives its processes back to the group above."""
        for process in (self.folder / "cgroup.procs").read_text().split():
            (self.folder.parent / "cgroup.procs").write_text(process)
        self.folder.rmdir()


def timed(judge: Callable[[str], pl.Result], work: list[str], clients: int, pid: int, group: ControlGroup) -> dict[str, float]:
    """Candidates per minute; CPU seconds per candidate, of the supervising process and of all that it started."""
    waits: list[float] = []

    def one(source: str) -> None:
        begin = time.monotonic()
        kind = judge(source).verdict.kind
        assert kind == ("correct" if source.startswith(RIGHT) else "wrong_result"), kind
        waits.append(time.monotonic() - begin)

    begin, cpu, below = time.monotonic(), spent(pid), group.spent() - spent(pid)
    with ThreadPoolExecutor(clients) as threads:
        list(threads.map(one, work))
    seconds = time.monotonic() - begin
    own, ranks = (spent(pid) - cpu) / len(work), (group.spent() - spent(pid) - below) / len(work)
    return {
        "per_minute": 60 * len(work) / seconds,
        "supervisor_cpu_s": own,
        "ranks_cpu_s": ranks,
        "supervisor_over_ranks": own / ranks,
        "median_wait_s": statistics.median(waits),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--candidates", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    groups = [ControlGroup("bare"), ControlGroup("service")]
    found: dict[str, list[dict[str, float]]] = {"bare": [], "clients_1": [], "clients_8": []}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "peerlane", "serve", "--port", str(port), "--out", folder, "--world-size", "2", "--device", "cpu"]
        service = subprocess.Popen([*command, "--no-check"], env={**os.environ, "PEERLANE_TOKEN": TOKEN}, preexec_fn=groups[1].join)
        groups[0].join()
        try:
            client = pl.Client(f"http://127.0.0.1:{port}", TOKEN, **OPTIONS)
            with client, pl.Evaluator(2, "cpu", presets=("small",)) as evaluator:
                client.evaluate(1, RIGHT + "# warm")  # ranks are up on both sides before anything is counted
                evaluator.evaluate(1, RIGHT, modes=())
                for number in range(asked.rounds):
                    for name, clients in (("bare", 1), ("clients_1", 1), ("clients_8", 8)):
                        work = sources(asked.candidates, f"{name} {number}")
                        if name == "bare":
                            row = timed(lambda source: evaluator.evaluate(1, source, modes=()), work, clients, os.getpid(), groups[0])
                        else:
                            row = timed(lambda source: client.evaluate(1, source), work, clients, service.pid, groups[1])
                        found[name].append(row)
                        print(name, {key: round(value, 4) for key, value in row.items()}, flush=True)
        finally:
            service.terminate()
            service.wait(60)
            for group in groups:
                group.remove()
    document = {
        "taken_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"python tests/service_throughput.py --candidates {asked.candidates} --rounds {asked.rounds} --out {asked.out}",
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "candidates_per_round": asked.candidates,
        "rounds": found,
    }
    asked.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
