"""The examples of ``examples/training`` with all their steps: losses and tokens beside those of NCCL, on ranks that may share a GPU.

    PYTHONPATH=src python tests/gpu/train_examples.py [--ranks 4] [--steps 200] [--limit-s 150] [NAME ...]

Prints what each example prints. Exits with 1 where one fails or runs longer than the limit.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch

from peerlane.hardware.virtual_node import share_gpus

FOLDER = Path(__file__).parents[2] / "examples" / "training"
NAMES = ("ddp", "fsdp2", "tensor_parallel", "decode")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(name: str, ranks: int, steps: int, limit_s: float, environment: dict[str, str]) -> bool:
    """Runs an example on all ranks and tells whether it ended well."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    command, start = [sys.executable, str(FOLDER / f"{name}.py"), "--steps", str(steps)], time.monotonic()
    children = [
        subprocess.Popen(command, env={**os.environ, **environment, **address, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(ranks)
    ]
    while any(child.poll() is None for child in children):
        if time.monotonic() - start > limit_s or any(child.poll() for child in children):
            time.sleep(1)
            for child in children:
                child.kill()
        time.sleep(0.1)
    good = all(child.returncode == 0 for child in children)
    print(f"{name}: {'good' if good else 'FAILED'} in {time.monotonic() - start:.0f} s", flush=True)
    return good


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=list(NAMES))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--limit-s", type=float, default=150.0)
    options = parser.parse_args()
    node = share_gpus(options.ranks, torch.cuda.device_count())
    if node is None:
        parser.error("there is no GPU here, expected at least one")
    with node.daemon() as daemon:
        environment = {} if daemon is None else daemon.environment
        good = [run(name, options.ranks, options.steps, options.limit_s, environment) for name in options.names]
    raise SystemExit(not all(good))


if __name__ == "__main__":
    main()
