"""Pictures of the suite for the documentation: what its problems cover, and how far their references are from the roofline.

The pictures come from the problems' own tags and from committed results. Text stays text, and equal data give equal bytes.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from peerlane.problems import Problem
from peerlane.report.comparison import speedups
from peerlane.report.evidence import NOTHING, RESULTS, Evidence, ReferenceTime
from peerlane.report.findings import launch_modes
from peerlane.report.plots import COLOURS, matplotlib_parts
from peerlane.results.reader import read_results

FOLDER = Path("docs/images")
SOLUTIONS = RESULTS / "h100x2" / "solutions.jsonl"
COLUMNS = {
    "tensor_parallel": "tensor",
    "vocab_parallel": "tensor",
    "sequence_parallel": "sequence",
    "context_parallel": "context",
    "expert_parallel": "expert",
    "data_parallel": "data",
    "fsdp_zero": "FSDP, ZeRO",
    "pipeline_parallel": "pipeline",
}
"""Categories of problems that are kinds of parallelism of a transformer -> the title of their column."""


class Part(NamedTuple):
    """A part of a transformer or of its training step.

    Attributes:
        problems: those that are about this part.
        sharded: column -> what the ranks share out there.
    """

    title: str
    problems: frozenset[int]
    sharded: Mapping[str, str]


PARTS = (
    Part("embedding, head, loss", frozenset({10, 23, 25, 46, 73, 82, 83, 84}), {"tensor": "vocabulary", "data": "tokens"}),
    Part("normalisation", frozenset({9, 18, 45}), {"tensor": "hidden dimension", "data": "tokens"}),
    Part(
        "attention, other mixers",
        frozenset({17, *range(33, 40), 54, 55, 56, 57, 71, 72, 74, 75, 77}),
        {"sequence": "sequence, then heads", "context": "sequence", "pipeline": "layers"},
    ),
    Part("MLP, linear layers", frozenset(range(11, 17)), {"tensor": "weights, activations"}),
    Part("mixture of experts", frozenset({20, 24, *range(26, 33), 49, 50, 51}), {"expert": "experts"}),
    Part(
        "gradients, optimizer, parameters",
        frozenset({19, 21, 22, 40, 41, 42, 43, 44, 47, 48, 52, 53, 63, 86}),
        {"tensor": "weights", "expert": "experts' gradients", "data": "batch", "FSDP, ZeRO": "parameters and state"},
    ),
)
BEYOND = {
    "collectives": frozenset(range(1, 9)),
    "spatial": frozenset({59, 60, 61, 62, 76, 78, 87}),
    "graphs": frozenset(range(64, 71)),
    "vision and search": frozenset({58, 79, 80, 81, 85}),
}
"""What is no part of a transformer block."""

SOURCES = {
    "Megatron-LM, Megatron-Core": "Megatron",
    "VeOmni": "VeOmni",
    "PyTorch (DDP, FSDP, torchao, torchtitan)": r"PyTorch DDP|PyTorch FSDP|FSDP and ZeRO|as in FSDP|torch\.distributed|torchao|torchtitan",
    "DeepSpeed (ZeRO, Ulysses)": "DeepSpeed|ZeRO",
    "NVIDIA NeMo, BioNeMo, Transformer Engine": "NeMo|Transformer Engine",
    "NVIDIA PhysicsNeMo": "PhysicsNeMo",
    "DGL, GraphStorm, PyTorch Geometric": "DGL|GraphStorm|PyTorch Geometric",
    "TorchRec": "TorchRec",
    "ring-flash-attention": "ring-flash-attention",
    "flash-linear-attention": "flash-linear-attention",
    "Hyena, Evo 2": "Hyena",
    "Flux, Triton-distributed": "Flux",
    "DeepSeek-V3": "DeepSeek-V3",
    "Hugging Face Transformers, vLLM": "Hugging Face|vLLM",
    "Apex": "Apex",
    "MAGI-1, Open-Sora, DistriFusion": "MAGI-1|Open-Sora|DistriFusion",
    "DINOv2, OpenCLIP, SAM 3": "DINOv2|OpenCLIP|SAM 3",
    "gsplat, torch-harmonics, DeePMD-kit, cuPyNumeric": "gsplat|torch-harmonics|DeePMD|cuPyNumeric",
    "other papers and code": "Tinker|FP8-LM|GShard|Switch Transformer|DLRM|8-bit|FourCastNet|Emerging-Optimizers",
}
"""Codebase -> what the origin of a problem says that comes from there."""

BOUNDS = ("tensor", "vector", "hbm", "nvlink", "latency")
_BINS = tuple(10 ** (exponent / 4) for exponent in range(-20, 1))


def in_cell(suite: Sequence[Problem], part: Part, column: str) -> list[Problem]:
    """Returns the suite's problems that are about a part and of a kind of parallelism."""
    return [item for item in suite if item.id in part.problems and COLUMNS.get(item.category) == column]


def communication(problems: Sequence[Problem], evidence: Evidence) -> list[str]:
    """Returns the kinds of communication that the references use, as counted in one call; the most frequent first."""
    kinds: Counter[str] = Counter()
    for item in problems:
        steps = evidence.get(item.id, NOTHING).steps
        kinds.update({"send/recv" if step.kind in ("send", "recv") else step.kind for step in steps if step.ranks})
    return [kind.replace("_", "-") for kind, _ in kinds.most_common(3)]


def sources_of(problem: Problem) -> list[str]:
    """Returns the codebases that a problem's origin names."""
    return [name for name, words in SOURCES.items() if re.search(words, problem.origin)]


def headroom(evidence: Evidence, family: str, world_size: int) -> dict[int, ReferenceTime]:
    """Returns by problem the reference nearest to its bound among the family's presets; problems without a bound are left out."""
    best: dict[int, ReferenceTime] = {}
    for number, measured in evidence.items():
        times = [item for item in measured.times if item.preset.split("_")[0] == family and item.world_size == world_size]
        times = [item for item in times if item.bound_us > 0 and item.utilisation > 0]
        if times:
            best[number] = max(times, key=lambda item: item.utilisation)
    return best


def taxonomy(suite: Sequence[Problem], evidence: Evidence) -> str:
    """Draws a transformer's parts and kinds of parallelism: what is sharded, what communication follows, which problems."""
    columns = list(dict.fromkeys(COLUMNS.values()))

    def draw(figure: Any) -> None:
        area = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        area.set_axis_off()
        area.set_xlim(-1.45, len(columns) + 0.02)
        area.set_ylim(len(PARTS) + 0.85, -0.55)
        for x, column in enumerate(columns):
            area.text(x + 0.5, -0.2, column, ha="center", va="center", fontsize=10.5, fontweight="bold")
        for y, part in enumerate(PARTS):
            area.text(-1.42, y + 0.5, part.title.replace(", ", ",\n", 1), ha="left", va="center", fontsize=10, fontweight="bold")
            for x, column in enumerate(columns):
                _cell(area, x, y, part.sharded.get(column, ""), in_cell(suite, part, column), evidence, COLOURS[x % len(COLOURS)])
        others = " \u00b7 ".join(f"{title}: {_numbers(sorted(numbers))}" for title, numbers in BEYOND.items())
        area.text(-1.42, len(PARTS) + 0.25, "beyond a transformer", ha="left", va="center", fontsize=10, fontweight="bold")
        area.text(0.04, len(PARTS) + 0.25, others, ha="left", va="center", fontsize=9.5)
        legend = "In a cell: what is sharded, what the references communicate by, and the problems."
        area.text(0.04, len(PARTS) + 0.6, legend, ha="left", va="center", fontsize=9, style="italic")

    return _svg((12.5, 7.6), draw, layout="none")


def _cell(area: Any, x: int, y: int, sharded: str, problems: Sequence[Problem], evidence: Evidence, colour: str) -> None:
    patch = matplotlib_parts("patches").Rectangle
    face = (*_rgb(colour), 0.16) if problems else (0.5, 0.5, 0.5, 0.05)
    area.add_patch(patch((x + 0.03, y + 0.04), 0.94, 0.92, facecolor=face, linewidth=0))
    if not problems:
        return
    kinds = communication(problems, evidence)
    numbers = textwrap.fill(_numbers([item.id for item in problems]), 19)
    area.text(x + 0.5, y + 0.2, sharded, ha="center", va="center", fontsize=8, style="italic")
    area.text(x + 0.5, y + 0.48, textwrap.fill(", ".join(kinds), 25, break_on_hyphens=False), ha="center", va="center", fontsize=8)
    area.text(x + 0.5, y + 0.79, numbers, ha="center", va="center", fontsize=9, fontweight="bold")


def coverage(suite: Sequence[Problem]) -> str:
    """Draws how many problems there are of each kind of parallelism, and from each source."""
    kinds = Counter(tag for item in suite for tag in item.parallelism)
    sources = Counter(name for item in suite for name in sources_of(item))

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2, width_ratios=(1, 1.25))
        for area, counts, title, colour in ((left, kinds, "kind of parallelism", COLOURS[0]), (right, sources, "source", COLOURS[2])):
            names, values = zip(*reversed(counts.most_common()), strict=True)
            bars = area.barh(names, values, color=colour, height=0.72)
            area.bar_label(bars, padding=3, fontsize=8)
            area.set_title(f"problems by {title}", fontsize=11)
            area.tick_params(axis="y", length=0, labelsize=9)
            area.set_xticks([])
            area.spines[["top", "right", "bottom", "left"]].set_visible(False)

    return _svg((11.0, 5.2), draw)


def references(evidence: Evidence) -> str:
    """Draws what bounds the references, and the share of the bound that they reach."""
    panels = (("pkb on 4x H200", headroom(evidence, "pkb", 4)), ("production on 2x H200", headroom(evidence, "production", 2)))

    def draw(figure: Any) -> None:
        areas = figure.subplots(1, len(panels), sharey=True)
        for area, (title, nearest) in zip(areas, panels, strict=True):
            shares = {bound: [item.utilisation for item in nearest.values() if item.bound_by == bound] for bound in BOUNDS}
            present = {bound: values for bound, values in shares.items() if values}
            labels = [f"{bound}: {len(values)}" for bound, values in present.items()]
            colours = [COLOURS[BOUNDS.index(bound)] for bound in present]
            area.hist(list(present.values()), bins=_BINS, stacked=True, color=colours, label=labels, edgecolor="white", linewidth=0.5)
            below = [sum(item.utilisation < limit for item in nearest.values()) for limit in (0.1, 0.5)]
            area.set_title(f"{title}: {len(nearest)} references\n{below[0]} below 10 %, {below[1]} below 50 % of the bound", fontsize=10.5)
            for limit in (0.1, 0.5):
                area.axvline(limit, color="#555555", linewidth=0.8, linestyle=":")
                area.text(limit, 0.98, f" {limit:.0%}", transform=area.get_xaxis_transform(), ha="left", va="top", fontsize=8)
            area.set_xscale("log")
            area.set_xlim(1e-5, 1.2)
            area.set_xticks([1e-4, 1e-3, 0.01, 0.1, 1.0], ["0.01 %", "0.1 %", "1 %", "10 %", "100 %"], fontsize=9)
            area.minorticks_off()
            area.set_xlabel("share of the roofline bound that the reference reaches")
            area.legend(title="bound by", fontsize="small", frameon=False, loc="upper left")
            area.spines[["top", "right"]].set_visible(False)
        areas[0].set_ylabel("references")
        areas[0].yaxis.get_major_locator().set_params(integer=True)

    return _svg((11.0, 4.0), draw)


def figures(suite: Sequence[Problem], evidence: Evidence, root: Path) -> dict[Path, str]:
    """Returns path in a checkout -> SVG, of all pictures of the suite."""
    return {
        FOLDER / "taxonomy.svg": taxonomy(suite, evidence),
        FOLDER / "coverage.svg": coverage(suite),
        FOLDER / "references.svg": references(evidence),
        FOLDER / "solutions.svg": _svg((11.0, 3.9), lambda figure: speedups(figure, read_results(root / SOLUTIONS))),
        FOLDER / "launch-modes.svg": _svg((7.4, 5.8), lambda figure: launch_modes(figure, root / RESULTS)),
    }


def stale(root: Path, pictures: Mapping[Path, str]) -> list[str]:
    """Returns the pictures below a checkout that differ from these, each with the reason."""
    return [
        f"{path}: differs from what it is drawn from"
        for path, text in pictures.items()
        if not (root / path).is_file() or (root / path).read_text(encoding="utf-8") != text
    ]


def write(root: Path, pictures: Mapping[Path, str]) -> list[str]:
    """Makes all pictures anew; returns what changed."""
    changes = stale(root, pictures)
    for path, text in pictures.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    return changes


def _numbers(numbers: Sequence[int]) -> str:
    """Returns numbers with ranges, such as ``11-16, 86``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}\u2013{run[-1]}" for run in runs)


def _rgb(colour: str) -> tuple[float, float, float]:
    red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return red, green, blue


def _svg(inches: tuple[float, float], draw: Callable[[Any], None], layout: str = "constrained") -> str:
    matplotlib, figures_ = matplotlib_parts(""), matplotlib_parts("figure")
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "peerlane", "font.family": "DejaVu Sans"}):
        figure = figures_.Figure(figsize=inches, layout=layout)
        draw(figure)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return re.sub(r"[ \t]+$", "", out.getvalue(), flags=re.MULTILINE)
