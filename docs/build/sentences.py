"""Sentences with figures, made from stored results, and the search for figures that were written by hand."""

import re
from collections.abc import Iterator
from pathlib import Path
from statistics import geometric_mean

from docs.build.production import last_of_newest_protocol
from peerlane.results.reader import read_results
from peerlane.results.result import Result

PAGES = ("README.md", "docs/compare.md", "docs/science.md", "docs/published-kernels.md", "docs/migrate", "docs/device")
"""Pages, and folders of pages, whose figures come from results."""
_BY_HAND = re.compile(r"\b\d[\d.,]* times\b|\d ?%|\b\d+ of (?:the )?\d+ (?:\w+ )?(?:are |is )?(?:right|correct|faster|slower)\b")


def headline(path: Path) -> str:
    """Returns how many kernels are right and faster than the reference at the sizes of real models, with the node and the day."""
    results = last_of_newest_protocol(read_results(path))
    speeds = [speed for result in results if (speed := result.speed_in("graph")) is not None]
    sure = [speed.speedup.median for speed in speeds if not speed.copies_matter]
    right = {result.problem.id for result in results if result.correct}
    left_out = f"; {len(speeds) - len(sure)} uncertain ones are left out" if len(speeds) > len(sure) else ""
    last = max(results, key=lambda result: result.finished_at)
    gpu = (last.node.gpu or "unknown GPU").removeprefix("NVIDIA ").partition(" ")[0]
    return (
        f"On {last.node.gpus} {gpu}, at the sizes of real models, {len(right)} of {len({result.problem.id for result in results})} kernels "
        f"are right. As CUDA graphs, {sum(speed.faster for speed in speeds)} of {len(speeds)} are faster than PyTorch with NCCL. "
        f"The geometric mean of their speedups is {geometric_mean(sure):.2f}{left_out}. Measured until {last.finished_at:%d %B %Y} by "
        f"version {last.timing_protocol} of the timing protocol.\n"
    )


def below_half(path: Path) -> str:
    """Returns how many references and kernels need more than twice the bound, by the faster of their launch modes."""
    shares = [share for result in last_of_newest_protocol(read_results(path)) if (share := _shares(result)) is not None]
    reference, kernel = (sum(share[side] < 0.5 for share in shares) for side in (0, 1))
    return f"Less than half of the bound: {reference} of {len(shares)} references, {kernel} of {len(shares)} kernels of the kit.\n"


def figures_by_hand(root: Path) -> list[str]:
    """Returns a line for each sentence of :data:`PAGES` below ``root`` with a figure outside of generated sections and code."""
    files = [file for name in PAGES for file in sorted(root.glob(name if name.endswith(".md") else f"{name}/*.md"))]
    return [f"{path.relative_to(root)}:{line}: a figure by hand: {words}" for path in files for line, words in _by_hand(path)]


def _by_hand(path: Path) -> Iterator[tuple[int, str]]:
    text = path.read_text(encoding="utf-8")
    for skipped in (r"<!-- (\w+):begin -->.*?<!-- \1:end -->", r"^```.*?^```", r"`[^`\n]*`"):
        text = re.sub(skipped, lambda match: re.sub(r"[^\n]", " ", match[0]), text, flags=re.DOTALL | re.MULTILINE)
    for number, line in enumerate(text.splitlines(), 1):
        for match in _BY_HAND.finditer(line):
            yield number, line[max(0, match.start() - 30) : match.end() + 30].strip()


def _shares(result: Result) -> tuple[float, float] | None:
    """Returns the largest shares of the datasheet's bound that reference and candidate reach in a mode; None if nothing was timed."""
    known = [(share.reference, share.candidate) for speed in result.speeds for share in speed.utilisation if share.ceilings == "datasheet"]
    return (max(share for share, _ in known), max(share for _, share in known)) if known else None
