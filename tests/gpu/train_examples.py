"""The examples of ``examples/training``: losses, tokens and times of a step beside those of NCCL, on ranks that may share a GPU.

    PYTHONPATH=src python tests/gpu/train_examples.py [--ranks 4] [--steps 200] [--limit-s 150] [NAME ...]
    PYTHONPATH=src python tests/gpu/train_examples.py --ranks 2 --model 1.4b --steps 20 --out training.jsonl ddp fsdp2 tensor_parallel

Prints what each example prints. ``--out`` appends a JSON object for each, with losses, milliseconds of every step and the environment. Each
example trains with one library after the other. Exits with 1 where one fails or runs longer than the limit.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from harness import script

from peerlane.hardware.environment import record
from peerlane.hardware.virtual_node import share_gpus

FOLDER = Path(__file__).parents[2] / "examples" / "training"
NAMES = ("ddp", "fsdp2", "tensor_parallel", "decode")


def run(name: str, options: argparse.Namespace, environment: dict[str, str]) -> bool:
    """Runs an example on all ranks, stores its numbers and tells whether it ended well."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks)]
    with tempfile.TemporaryDirectory() as folder:
        numbers, start = Path(folder) / "numbers.json", time.monotonic()
        command += [str(FOLDER / f"{name}.py"), "--json", str(numbers)]
        command += [part for key in ("model", "steps", "compiler") for part in (f"--{key}", str(getattr(options, key)))]
        with subprocess.Popen(command, env=os.environ | environment) as launcher:
            try:
                launcher.wait(options.limit_s)
            except subprocess.TimeoutExpired:
                launcher.terminate()  # it ends the ranks
        good = launcher.returncode == 0
        print(f"{name}: {'good' if good else 'FAILED'} in {time.monotonic() - start:.0f} s", flush=True)
        if options.out is not None and numbers.exists():
            row = {"example": name, "good": good, **json.loads(numbers.read_text()), "environment": record()}
            with options.out.open("a") as out:
                print(json.dumps(row, default=str), file=out)
    return good


def main() -> None:
    parser = script(__doc__, ranks=4)
    parser.add_argument("names", nargs="*", default=list(NAMES))
    parser.add_argument("--model", default="tiny", help="a size of examples/training/gpt.py")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--compiler", default="inductor", help="the backend of torch.compile")
    parser.add_argument("--limit-s", type=float, default=150.0)
    options = parser.parse_args()
    node = share_gpus(options.ranks, torch.cuda.device_count())
    if node is None:
        parser.error("there is no GPU here, expected at least one")
    with node.daemon() as daemon:
        environment = {} if daemon is None else daemon.environment
        good = [run(name, options, environment) for name in options.names]
    raise SystemExit(not all(good))


if __name__ == "__main__":
    main()
