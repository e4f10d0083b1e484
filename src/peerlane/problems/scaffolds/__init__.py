"""Candidate files to begin with: the problem's reference, with one simple kernel for all its communication. Right, and slow."""

import re
from pathlib import Path

from peerlane.errors import UsageError
from peerlane.problems.contract.spec import Problem

BACKENDS = ("kit", "cuda", "nvshmem", "nccl", "triton", "pytorch")
_HERE = Path(__file__).parent
_ONE_SIDED = re.compile(r"\bdist\.(send|recv)\b")
_ENDING = {"kit": "cuda"}
_ABOUT = {
    "kit": "One kernel of the device kit moves all data. It runs on emulated ranks, a virtual node and a node: see docs/laptop.md.",
    "cuda": "One kernel reads the peers' memory, by torch's symmetric memory. It also runs on emulated ranks.",
    "nvshmem": "One kernel puts into the peers' memory and signals, by NVSHMEM. It needs GPUs and pip install 'peerlane[nvshmem]'.",
    "nccl": "One kernel reads the peers' memory, in windows of NCCL's device API. It also runs on emulated ranks. It needs nvcc.",
    "triton": "torch.distributed moves the data, and a Triton kernel sums it.",
    "pytorch": "This is the reference, under the name that candidates have.",
}


def scaffold_name(problem: Problem, backend: str) -> str:
    """Returns the file name that says problem and backend, such as ``36_ulysses_gather_seq_scatter_heads_cuda.py``."""
    return f"{problem.id}_{problem.slug}_{_ENDING.get(backend, backend)}.py"


def scaffold_backend(problem: Problem) -> str:
    """Returns the first backend that serves a problem: ``kit``, or ``pytorch`` between nodes and where two ranks of the reference talk
    alone."""
    from peerlane.problems.reference_source import reference_source

    return "pytorch" if 1 not in problem.nodes or _ONE_SIDED.search(reference_source(problem)) else "kit"


def scaffold(problem: Problem, backend: str, variant: str = "default") -> str:
    """Returns the source of a candidate with the problem's signature, which is right as it comes.

    Raises :class:`UsageError` for a backend that is none, and where two ranks of the reference talk while the others do not call:
    only ``pytorch`` does so.
    """
    from peerlane.problems.reference_source import reference_source

    if backend not in BACKENDS:
        raise UsageError(f"--backend got {backend!r}: expected one of {', '.join(BACKENDS)}")
    reference = re.sub(r"\breference\(", "solution(", reference_source(problem, variant))
    head = f'"""Problem {problem.id}: {problem.title}.\n\n{_ABOUT[backend]}\nReplace it step by step by kernels that are faster.\n"""\n\n'
    if backend == "pytorch":
        return head + reference
    if (match := _ONE_SIDED.search(reference)) is not None:
        raise UsageError(
            f"--backend {backend} got problem {problem.id}, whose reference calls {match[0]} on two ranks alone: expected calls that all "
            "ranks of a group make; begin with --backend pytorch"
        )
    imports, rest = _split(reference)
    text = (_HERE / f"{backend}.txt").read_text(encoding="utf-8")
    own, code = _split(text)
    first = ["from __future__ import annotations\n", "\nfrom types import SimpleNamespace\n"]
    lines = sorted({*imports, "import torch\n"} - {"import torch.distributed as dist\n", *first})
    return "".join([head, *first, "".join(["\n", *lines, *own]), "\n", code, "\n\n", _collectives(reference), "\n\n", rest])


def _collectives(reference: str) -> str:
    """Returns the stand-in for torch.distributed, with the functions that the reference calls."""
    head, *functions = (_HERE / "collectives.txt").read_text(encoding="utf-8").split("    @staticmethod\n    def ")
    named = {function.partition("(")[0]: function for function in functions}
    called = set(re.findall(r"\bdist\.(\w+)", reference))
    while more := set(re.findall(r"\bdist\.(\w+)", "".join(named[name] for name in called & named.keys()))) - called:
        called |= more
    return "    @staticmethod\n    def ".join([head, *(function for name, function in named.items() if name in called)]).rstrip() + "\n"


def _split(source: str) -> tuple[list[str], str]:
    """Returns the import lines that a source begins with, and the rest."""
    lines = source.splitlines(keepends=True)
    end = next(i for i, line in enumerate(lines) if line.strip() and not line.startswith(("import ", "from ")))
    imports = [line for line in lines[:end] if line.strip() and not line.startswith("from __future__")]
    return imports, "".join(lines[end:])
