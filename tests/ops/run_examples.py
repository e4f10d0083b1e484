"""Runs examples of ``examples/training`` on two forked CPU ranks each, so that torch is imported once.

python tests/ops/run_examples.py FOLDER NAME[+][:MODEL] ...        exits with 1 where a rank of one fails

Numbers go to FOLDER/NAME[+][:MODEL].json. With a + layers are sharded, and the model is written to or read from FOLDER/gpt.
A model of a real size is trained with smaller layers and more of them than Dynamo would compile.
"""

import importlib
import os
import runpy
import socket
import sys
import traceback
from dataclasses import replace
from pathlib import Path

import torch._dynamo
import torch._inductor.pattern_matcher
import torch.distributed.fsdp
import torch.distributed.tensor.parallel

import peerlane.device.backend
import peerlane.ops.parallel  # noqa: F401

FOLDER, RANKS = Path(__file__).parents[2] / "examples" / "training", 2


def shrink(model: str) -> None:
    """Replaces a real size by one for CPU ranks that has its precision."""
    sizes = importlib.import_module("gpt").SIZES
    layers = torch._dynamo.config.recompile_limit + 1
    sizes[model] = replace(sizes[model], vocabulary=96, context=32, width=32, head=8, layers=layers, batch=2, rate=3e-3)


def start(run: str, rank: int, port: int, folder: Path) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        sys.path.insert(0, str(FOLDER))
        name, _, model = run.partition(":")
        sys.argv = [name, "--steps", "6", "--compiler", "aot_eager", "--json", str(folder / f"{run}.json")]
        if model:
            shrink(model)
            sys.argv += ["--model", model]
        if name.endswith("+"):
            name, sys.argv = name[:-1], [*sys.argv, "--tensor-parallel", str(RANKS), "--checkpoint", str(folder / "gpt")]
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def main() -> None:
    torch.compile(torch.neg, backend="aot_eager")(torch.zeros(1))  # imports what ranks would import one by one
    failed = []
    for name in sys.argv[2:]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        print(f"== {name}", flush=True)
        children = [start(name, rank, port, Path(sys.argv[1])) for rank in range(RANKS)]
        if any(os.waitpid(child, 0)[1] for child in children):
            failed.append(name)
    raise SystemExit(f"failed: {failed}" if failed else 0)


if __name__ == "__main__":
    main()
