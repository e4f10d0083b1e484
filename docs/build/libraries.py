"""Libraries that a user could take in the place of a kernel: candidates of examples/, or the reference's own calls."""

import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from peerlane.results.reader import newest
from peerlane.results.result import Result

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FOLDERS = ("libraries", "symm_mem")

REFERENCES: Mapping[int, str] = {
    **dict.fromkeys((3, 4, 5, 6, 8, 27, 33, 34, 35, 36, 37, 38), "NCCL"),
    **dict.fromkeys((15, 31, 32, 46, 48, 49, 50, 51), "cuBLAS, NCCL"),
    **dict.fromkeys((21, 22), "torch._foreach_norm"),
    **dict.fromkeys((39, 77), "SDPA, NCCL"),
    **dict.fromkeys((59, 60, 72), "cuFFT, NCCL"),
    67: "torch.sort, NCCL",
    **dict.fromkeys((76, 87), "cuDNN, NCCL"),
    79: "cuBLAS, torch.topk",
    85: "torch.sort, NCCL",
}
"""Problems whose references call the best library already, which does all that costs time."""
NONE_KNOWN = frozenset({64})
"""Problems for which no library is known, beyond what the reference is made of, that can be installed as a wheel of 35 MiB."""


@cache
def candidates() -> Mapping[int, list[str]]:
    """Returns the names of the candidates in :data:`FOLDERS`, by problem."""
    found: dict[int, list[str]] = {}
    for path in sorted(path for folder in FOLDERS for path in (EXAMPLES / folder).glob("*.py")):
        if number := re.match(r"\d+", path.name):
            found.setdefault(int(number.group()), []).append(path.stem)
    return found


def best_library(result: Result, libraries: Iterable[Result]) -> str:
    """Returns the fastest library on the same question and class of machine, and its speedup over the reference: in graph mode where that
    was measured, else in eager mode. Without a measurement, returns which library a user could take."""
    question = result.problem.id, result.problem.variant, result.preset, result.world_size, result.node
    rivals = [item for item in newest(libraries) if item.correct]
    rivals = [item for item in rivals if (item.problem.id, item.problem.variant, item.preset, item.world_size, item.node) == question]
    for mode in ("graph", "eager"):
        speeds = [(speed.speedup.median, item) for item in rivals if (speed := item.speed_in(mode)) is not None]
        if speeds and result.speed_in(mode) is not None:
            speedup, item = max(speeds, key=lambda pair: pair[0])
            return f"{_short(item.candidate.name, result)} {speedup:.2f}{'' if mode == 'graph' else ' (eager)'}"
    if names := candidates().get(result.problem.id):
        return f"{', '.join(_short(name, result) for name in names)}: not measured"
    if library := REFERENCES.get(result.problem.id):
        return f"the reference ({library})"
    return "none known" if result.problem.id in NONE_KNOWN else "none written"


def _short(name: str, result: Result) -> str:
    """Returns a candidate's name without its problem and its backend: ``fused`` of ``16_gemm_reducescatter_fused_pytorch``."""
    return name.rpartition("_")[0].removeprefix(f"{result.problem.id}_").removeprefix(f"{result.problem.slug}_")
