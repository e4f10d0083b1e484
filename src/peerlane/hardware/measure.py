"""Measures a node's ceilings, for ``peerlane doctor --measure``.

Three steps, one after the other, none in the calling process, which never gets a CUDA context: every GPU on its own (all at the same time),
the links (one process holding all GPUs), and a small NCCL group. Each step has a deadline; a process that misses it is killed and what it
had measured until then is kept. On a machine without GPUs, or with a torch without CUDA, the answer is empty and its notes say why.
"""

import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from peerlane.common.version import PACKAGE
from peerlane.hardware.ceilings import Ceilings, Measurement
from peerlane.hardware.environment import node_class, record
from peerlane.hardware.topology import Topology, discover

BUDGET_S = 40.0
_POLL_S = 0.02
PROBES = (sys.executable, "-m", "peerlane.hardware.probes")


@dataclass(frozen=True)
class ProbeJob:
    """One probe process: a name for messages, its command line, and the file in which it leaves its results."""

    name: str
    command: tuple[str, ...]
    out: Path


def measure_node() -> Ceilings:
    """Measures this machine's ceilings in at most about ``BUDGET_S`` seconds; stores nothing.

    A step may take what earlier ones left of the budget, less 5 s for each one after it. What a machine lacks or a probe fails at raises
    nothing: those figures are missing, and ``Ceilings.notes`` says why.
    """
    topology = discover()
    environment = record(topology)
    taken_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    samples: dict[str, list[float]] = {}
    notes: list[str] = []
    obstacle = _obstacle(topology)
    if obstacle:
        notes.append(obstacle)
    else:
        deadline = time.monotonic() + BUDGET_S
        with tempfile.TemporaryDirectory(prefix="peerlane-measure-") as folder:
            steps = _steps(len(topology.gpus), Path(folder))
            for position, jobs in enumerate(steps):
                limit_s = deadline - time.monotonic() - 5.0 * (len(steps) - 1 - position)
                for found_samples, found_notes in run_probes(jobs, limit_s):
                    for figure, values in found_samples.items():
                        samples.setdefault(figure, []).extend(values)
                    notes.extend(found_notes)
        if len(topology.gpus) == 1:
            notes.append("links and NCCL were not measured: there is one GPU")
    figures = {figure: Measurement.of(values) for figure, values in samples.items() if values}
    return Ceilings(node_class(environment), taken_at, environment, figures, tuple(notes))


def run_probes(jobs: Sequence[ProbeJob], limit_s: float) -> list[tuple[dict[str, list[float]], list[str]]]:
    """Runs the jobs side by side for at most ``limit_s`` seconds, kills what is left, and returns every job's samples and notes."""
    deadline = time.monotonic() + limit_s
    running = [(job, _start(job)) for job in jobs]
    try:
        while time.monotonic() < deadline and any(process.poll() is None for _, process in running):
            time.sleep(_POLL_S)
    finally:
        late = {job.name for job, process in running if process.poll() is None}
        for _, process in running:
            _kill(process)
    results = []
    for job, process in running:
        samples, notes = _read(job.out)
        if job.name in late:
            notes.append(f"{job.name} was stopped after {max(limit_s, 0):.0f} s: look for a hung GPU")
        elif process.returncode and not notes:
            notes.append(f"{job.name} ended with code {process.returncode}: {_last_line(job.out.with_suffix('.log'))}")
        results.append((samples, notes))
    return results


def _obstacle(topology: Topology) -> str:
    """Returns the reason why nothing can be measured here, or an empty string."""
    if not topology.gpus:
        return f"nothing was measured: no GPU ({topology.reason})"
    if torch.version.cuda is None:
        return f"nothing was measured: torch {torch.__version__} is built without CUDA; install a CUDA build from https://pytorch.org"
    return ""


def _steps(gpus: int, folder: Path) -> list[list[ProbeJob]]:
    def job(name: str, *arguments: str) -> ProbeJob:
        out = folder / (name.replace(" ", "-") + ".json")
        return ProbeJob(name, (*PROBES, *arguments, "--out", str(out)), out)

    devices = ("--devices", str(gpus))
    steps = [[job(f"probe of GPU {device}", "gpu", "--device", str(device)) for device in range(gpus)]]
    if gpus > 1:
        steps.append([job("probe of places", "places", *devices)])
        rendezvous = ("--rendezvous", str(folder / "rendezvous"))
        steps.append([job("probe of links", "links", *devices)])
        steps.append([job(f"probe of NCCL rank {rank}", "nccl", "--rank", str(rank), *devices, *rendezvous) for rank in range(gpus)])
    return steps


def _start(job: ProbeJob) -> subprocess.Popen[bytes]:
    source = str(PACKAGE.parent)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))}
    # Latency of 8 bytes needs no NVLink multicast, and a program that uses it can take shared GPUs out of service.
    environ.setdefault("NCCL_NVLS_ENABLE", "0")
    with job.out.with_suffix(".log").open("wb") as log:
        # A session of its own, so that children of the probe die with it.
        return subprocess.Popen(job.command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read(out: Path) -> tuple[dict[str, list[float]], list[str]]:
    if not out.exists():
        return {}, []
    written: dict[str, Any] = json.loads(out.read_text())
    return written["samples"], written["notes"]


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
