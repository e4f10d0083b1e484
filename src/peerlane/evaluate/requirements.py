"""What a candidate needs that this machine lacks, as its source and its verdict show."""

from __future__ import annotations

import ast
import inspect
import re

from peerlane.evaluate.candidates import CandidateFile
from peerlane.problems.contract.spec import Problem
from peerlane.results.verdict import Unstable, Verdict, WrongResult
from peerlane.settings import MULTICAST_REASON, multicast_allowed, thunderkittens_root

_TENSORS = ("get_or_create_parallel_tensor", "create_parallel_tensor")
_FP8 = re.compile(r"float8|fp8|e4m3|e5m2", re.IGNORECASE)
_TRITON = re.compile(r"^\s*(import|from) triton\b", re.MULTILINE)
_REDUCE = re.compile(r"\b(dist|distributed)\.reduce\(|^\s*from torch\.distributed import [^\n]*\breduce\b", re.MULTILINE)


def missing_before(source: str) -> str | None:
    """What has to be here before a candidate of this source is compiled, and is not; None if nothing is missing."""
    if "parallelkittens_runtime" not in source:
        return None
    if thunderkittens_root() is None:
        return "ThunderKittens, whose headers the candidate compiles against: set THUNDERKITTENS_ROOT to a checkout, which holds include/"
    if not multicast_allowed() and _asks_for_multicast(source):
        return MULTICAST_REASON
    return None


def _asks_for_multicast(source: str) -> bool:
    try:
        calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    except (SyntaxError, ValueError, RecursionError):
        return False
    for call in calls:
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        declined = any(item.arg == "multicast" and getattr(item.value, "value", True) is False for item in call.keywords)
        if name == "get_or_create_barrier" or (name in _TENSORS and not declined):
            return True
    return False


def needs_gpu(raised: str, by_nvcc: bool, *, emulated: bool) -> str:
    """Says of a CUDA candidate on CPU ranks what was tried: ``raised`` is what its import raised, ``by_nvcc`` whether nvcc compiled its
    extensions' device code, ``emulated`` whether emulated ranks could run it."""
    tried = f"its import here ended in {raised}" if raised else "its import works here"
    if by_nvcc and not raised:
        tried += ", nvcc compiles the device code of its extensions"
    where = "run it on a GPU node" + (", or add --device emulated" if emulated else "")
    return f"needs a GPU: {tried}; what it compiles when it is called was not compiled; {where}"


def missing_on_virtual_node(message: str) -> str | None:
    """What the ranks of a virtual node lack, if this failure shows that the candidate needs it; None if it does not."""
    if "invalid device ordinal" in message or "Duplicate GPU" in message:
        return "a GPU for every rank: the candidate addresses GPUs by the numbers of ranks, which share one here"
    if "NCCL" in message and re.search(r"invalid ?argument", message, re.IGNORECASE):
        return "a GPU for every rank: NCCL refused a call of the candidate, as it does for ranks that share one"
    return None


def missing_behind(verdict: Verdict, candidate: CandidateFile, source: str, problem: Problem, world_size: int) -> str | None:
    """What on CPU ranks explains a wrong result better than the candidate does; None if nothing does."""
    if not isinstance(verdict, (WrongResult, Unstable)):
        return None
    found = f"rank {verdict.rank} was wrong here: {verdict.detail}"
    if (candidate.backend == "triton" or _TRITON.search(source)) and _FP8.search(source):
        return f"a GPU: Triton's interpreter rounds float32 to fp8 otherwise than a GPU does, and has other codes for NaN; {found}"
    some_rank_is_right = isinstance(verdict, WrongResult) and len(verdict.wrong_ranks) < world_size
    if some_rank_is_right and all(map(_REDUCE.search, (source, inspect.getsource(problem.reference)))):
        return f"NCCL: the reduce of gloo, which CPU ranks use, leaves partial sums in the tensors of other ranks than the root; {found}"
    return None
