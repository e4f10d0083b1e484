"""Candidates per minute through the service with 1 and with 8 clients, against the bare Evaluator; CPU seconds of the service.

    python tests/service_throughput.py --candidates 16 --out results/cpu/service.json

Not a test: it takes two minutes, and wants an idle machine. The three ways take turns, a round each, on CPU ranks.
"""

from __future__ import annotations

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


def timed(judge: Callable[[str], pl.Result], work: list[str], clients: int, pid: int) -> dict[str, float]:
    """Candidates per minute, and CPU seconds of the supervising process per candidate."""
    waits: list[float] = []

    def one(source: str) -> None:
        begin = time.monotonic()
        kind = judge(source).verdict.kind
        assert kind == ("correct" if source.startswith(RIGHT) else "wrong_result"), kind
        waits.append(time.monotonic() - begin)

    begin, cpu = time.monotonic(), spent(pid)
    with ThreadPoolExecutor(clients) as threads:
        list(threads.map(one, work))
    seconds = time.monotonic() - begin
    return {
        "per_minute": 60 * len(work) / seconds,
        "supervisor_cpu_s": (spent(pid) - cpu) / len(work),
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
    found: dict[str, list[dict[str, float]]] = {"bare": [], "clients_1": [], "clients_8": []}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "peerlane", "serve", "--port", str(port), "--out", folder, "--world-size", "2", "--device", "cpu"]
        service = subprocess.Popen([*command, "--no-check"], env={**os.environ, "PEERLANE_TOKEN": TOKEN})
        try:
            client = pl.Client(f"http://127.0.0.1:{port}", TOKEN, **OPTIONS)
            with client, pl.Evaluator(2, "cpu", presets=("small",)) as evaluator:
                client.evaluate(1, RIGHT + "# warm")  # ranks are up on both sides before anything is counted
                evaluator.evaluate(1, RIGHT, modes=())
                for number in range(asked.rounds):
                    for name, clients in (("bare", 1), ("clients_1", 1), ("clients_8", 8)):
                        work = sources(asked.candidates, f"{name} {number}")
                        if name == "bare":
                            row = timed(lambda source: evaluator.evaluate(1, source, modes=()), work, clients, os.getpid())
                        else:
                            row = timed(lambda source: client.evaluate(1, source), work, clients, service.pid)
                        found[name].append(row)
                        print(name, {key: round(value, 4) for key, value in row.items()}, flush=True)
        finally:
            service.terminate()
            service.wait(60)
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
