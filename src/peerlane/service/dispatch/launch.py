"""Starts the processes that check a node and judge on it. What Ray and Slurm run on nodes: no torch here, for they start it often."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from peerlane.service import node_check

_TOLD_CHARACTERS = 1000


class BatchFault(Exception):
    """The process did not judge its batch; says nothing about the candidates."""


@dataclass(frozen=True)
class BatchTask:
    """Input of a node: bytes and numbers only, so that every framework can carry them."""

    plan: bytes
    deadline_s: float
    command: tuple[str, ...] = (sys.executable, "-P", "-m", "peerlane.service.dispatch.batch")


@dataclass(frozen=True)
class CheckTask:
    """Check of a node: the request to ``node_check``, and its command."""

    asked: dict[str, Any]
    command: tuple[str, ...]


def run_batch(task: BatchTask) -> list[dict[str, Any]]:
    """The results, as JSON with their environment, in the plan's order. Raises :class:`BatchFault`; then no process is left."""
    status, out, err = _run(task.command, task.plan, task.deadline_s, "the batch")
    if status != 0:
        told = err[-_TOLD_CHARACTERS:].decode(errors="replace").strip()
        raise BatchFault(f"the batch ended with status {status}: {(told.splitlines() or ['it printed nothing'])[-1]}")
    return [json.loads(line) for line in out.splitlines()]


def run_check(task: CheckTask) -> dict[str, Any]:
    """The report on this node, as JSON. Raises :class:`BatchFault` if it takes too long."""
    status, out, err = _run(task.command, json.dumps(task.asked).encode(), node_check.LIMIT_S, "the check")
    return node_check.read_report(status, out, err).to_json()


def check_and_run(check: CheckTask, batch: BatchTask) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The report, and the results if the node is fit."""
    report = run_check(check)
    return report, [] if report["faults"] else run_batch(batch)


def _run(command: tuple[str, ...], given: bytes, seconds: float, what: str) -> tuple[int, bytes, bytes]:
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    try:
        out, err = process.communicate(given, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise BatchFault(f"{what} did not end within {seconds:g} s") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # its fork server sees that, and ends all ranks
            process.communicate()
    return process.returncode, out, err
