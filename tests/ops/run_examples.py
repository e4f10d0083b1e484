"""Runs examples of ``examples/training`` on two forked CPU ranks each, so that torch is imported once.

python tests/ops/run_examples.py NAME ...           exits with 1 where a rank of one fails
"""

from __future__ import annotations

import os
import runpy
import socket
import sys
import traceback
from pathlib import Path

import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.tensor.parallel  # noqa: F401

import peerlane.device.backend
import peerlane.ops.parallel  # noqa: F401

FOLDER, RANKS = Path(__file__).parents[2] / "examples" / "training", 2


def start(name: str, rank: int, port: int) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        sys.path.insert(0, str(FOLDER))
        sys.argv = [name, "--steps", "6", "--compiler", "aot_eager"]
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def main() -> None:
    failed = []
    for name in sys.argv[1:]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        print(f"== {name}", flush=True)
        children = [start(name, rank, port) for rank in range(RANKS)]
        if any(os.waitpid(child, 0)[1] for child in children):
            failed.append(name)
    raise SystemExit(f"failed: {failed}" if failed else 0)


if __name__ == "__main__":
    main()
