"""The picture of the code for contributors: rooms (folders) and floors, drawn from the import contracts in ``pyproject.toml``.

``lint-imports`` proves that the code obeys these contracts, and ``make check`` that the picture shows them.
"""

import textwrap
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias
from xml.sax.saxutils import escape

from peerlane.errors import UsageError

PICTURE = Path("docs/images/architecture.svg")
PACKAGE = Path("src/peerlane")
PURPOSES = {
    "peerlane.cli": "one module for each command",
    "peerlane.publish": "bundles, result pages",
    "peerlane.service": "HTTP, queue, farm",
    "peerlane.generate": "candidates from models",
    "peerlane.report": "tables, plots, pages of problems",
    "peerlane.evaluate.selftest": "runs the corpus",
    "peerlane.evaluate": "verdicts and speeds",
    "peerlane.results": "records, store",
    "peerlane.sandbox": "isolation",
    "peerlane.solutions": "kernels",
    "peerlane.problems": "inputs, oracles",
    "peerlane.hardware": "GPUs, rooflines",
    "peerlane.ops": "operators",
    "peerlane.nn": "sharded layers",
    "peerlane.device": "the device kit",
    "peerlane.common": "places of ranks, files, words",
    "peerlane.evaluate.evaluator": "the API, many candidates, the store",
    "peerlane.evaluate.scheduler": "when a job is judged, and where",
    "peerlane.evaluate.job_runner": "what is judged once more",
    "peerlane.evaluate.worker_slots": "evaluations side by side",
    "peerlane.evaluate.pipeline": "the stages of one evaluation",
    "peerlane.evaluate.ranks": "what runs in the ranks",
    "peerlane.evaluate.candidate_group": "the ranks of a candidate",
    "peerlane.evaluate.audit": "what ran, what moved the data",
    "peerlane.evaluate.timing": "blocks, rounds, scores",
    "peerlane.evaluate.correctness": "cases, stress, slot swaps",
    "peerlane.evaluate.processes": "ranks and their groups",
    "peerlane.evaluate.candidates": "files to judge",
    "peerlane.evaluate.memory": "arenas, slots, guard bands",
    "peerlane.evaluate.messages": "plain form, checked",
    "peerlane.evaluate.rank_interface": "requests to ranks",
    "peerlane.evaluate.wire": "what they hold",
    "peerlane.evaluate.wire_format": "records as JSON",
    "peerlane.device.backend": "torch.distributed",
    "peerlane.emulator": "races without a GPU",
    "peerlane.device.attention": "ring, heads",
    "peerlane.device.moe": "experts",
    "peerlane.device.nvshmem": "kernels that call NVSHMEM",
    "peerlane.device.nccl": "kernels that use NCCL's windows",
    "peerlane.device.tools": "lint, traces",
    "peerlane.device.products": "matrix products, alone and fused with collectives",
    "peerlane.device.collectives": "one kernel for each collective",
    "peerlane.device.host": "groups, arenas, declared kernels, compilation, launches",
}
"""Module of a room -> what it is for, in few words. The picture needs an entry for every room of the contracts."""

_WIDTH, _MARGIN, _STOREY, _GAP = 1000, 24, 64, 6
_LINE_CHARACTERS = 44  # of text on the ground floor of a house

_STYLE = """
text { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #16202a; }
.page { fill: #ffffff; }
.name { font-weight: 700; font-size: 22px; }
.purpose { font-size: 14.5px; fill: #44515c; }
.title { font-size: 18px; font-weight: 600; }
.package { fill: #dcebf7; } .evaluate { fill: #fbe3d3; } .device { fill: #d5efe6; } .ground { fill: #e6e8ea; }
.from-evaluate { fill: #d55e00; opacity: 0.13; } .from-device { fill: #009e73; opacity: 0.15; }
.arrow { stroke: #44515c; stroke-width: 2; fill: none; }
@media (prefers-color-scheme: dark) {
text { fill: #eef2f5; }
.page { fill: #14191e; }
.purpose { fill: #b3bec8; }
.package { fill: #1d3a52; } .evaluate { fill: #5a3016; } .device { fill: #12463a; } .ground { fill: #2d343a; }
.from-evaluate, .from-device { opacity: 0.2; }
.arrow { stroke: #b3bec8; }
}"""


Floor: TypeAlias = tuple[str, ...]
"""Rooms, by the names of their modules, that import neither each other nor anything above."""


@dataclass(frozen=True)
class House:
    """A package with its floors, the top one first, and the line that says what all of them stand on."""

    package: str
    floors: tuple[Floor, ...]
    ground: str = ""

    @property
    def height(self) -> int:
        return (len(self.floors) + bool(self.ground)) * (_STOREY + _GAP) - _GAP


@dataclass(frozen=True)
class Box:
    """A room where it is drawn."""

    room: str
    x: float
    y: float
    width: float


def read_floors(contracts: str, package: str) -> tuple[Floor, ...]:
    """Returns the floors of a package, the top one first, from the text of ``pyproject.toml``; raises UsageError if it has none."""
    for contract in tomllib.loads(contracts).get("tool", {}).get("importlinter", {}).get("contracts", ()):
        if contract["type"] == "layers" and contract["containers"] == [package]:
            return tuple(tuple(f"{package}.{name.strip()}" for name in layer.split("|")) for layer in contract["layers"])
    raise UsageError(f"pyproject.toml has no contract of layers for {package}; expected one under tool.importlinter.contracts")


def architecture(root: Path) -> str:
    """Returns the picture of a checkout as SVG: the package, and the rooms ``evaluate`` and ``device`` opened."""
    contracts = (root / "pyproject.toml").read_text(encoding="utf-8")
    shared = sorted(path.stem for path in (root / PACKAGE).glob("*.py") if not path.stem.startswith("_"))
    package = House("peerlane", read_floors(contracts, "peerlane"), ", ".join(shared))
    evaluator = House("peerlane.evaluate", read_floors(contracts, "peerlane.evaluate"))
    kit = House("peerlane.device", read_floors(contracts, "peerlane.device"), "include/peerlane: device code in CUDA C++")
    top, half = 92, (_WIDTH - 3 * _MARGIN) / 2
    kit_y = top + max(package.height, evaluator.height) + 72
    drawn = {
        package.package: _place(package, _MARGIN, top, half),
        evaluator.package: _place(evaluator, 2 * _MARGIN + half, top, half),
        kit.package: _place(kit, _MARGIN, kit_y, _WIDTH - 2 * _MARGIN),
    }
    height = kit_y + kit.height + _MARGIN
    inside = {box.room: box for box in drawn["peerlane"]}
    parts = [
        f'<rect class="page" width="{_WIDTH}" height="{height}" rx="10"/>',
        _title("Each room imports only from the floors below its own", _MARGIN + 22, 36),
        f'<path class="arrow" d="M{_MARGIN + 8} 20V38m-6 -7l6 7l6 -7"/>',
        _title("The package", _MARGIN, top - 14),
        _title("Inside evaluate", 2 * _MARGIN + half, top - 14),
        _title("Inside device: the kit", _MARGIN, kit_y - 14),
        _beam(inside["peerlane.evaluate"], drawn["peerlane.evaluate"]),
        _drop(inside["peerlane.device"], kit_y),
    ]
    for house in (package, evaluator, kit):
        parts += [_box(house, box) for box in drawn[house.package]]
        if house.ground:
            parts.append(_ground(house, drawn[house.package]))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">'
    title = "<title>Rooms and floors of peerlane</title>"
    return "\n".join([head, title, f"<style>{_STYLE}\n</style>", *parts, "</svg>", ""])


def _place(house: House, x: float, y: float, width: float) -> list[Box]:
    boxes = []
    for number, floor in enumerate(house.floors):
        each = (width - _GAP * (len(floor) - 1)) / len(floor)
        boxes += [Box(room, x + at * (each + _GAP), y + number * (_STOREY + _GAP), each) for at, room in enumerate(floor)]
    return boxes


def _box(house: House, box: Box) -> str:
    kind = {"peerlane.evaluate": "evaluate", "peerlane.device": "device"}.get(box.room if house.package == "peerlane" else house.package)
    middle = box.x + box.width / 2
    return (
        f'<rect class="{kind or "package"}" x="{box.x:g}" y="{box.y:g}" width="{box.width:g}" height="{_STOREY}" rx="7"/>'
        f'<text class="name" x="{middle:g}" y="{box.y + 29:g}" text-anchor="middle">{escape(box.room.rpartition(".")[2])}</text>'
        f'<text class="purpose" x="{middle:g}" y="{box.y + 51:g}" text-anchor="middle">{escape(_purpose(box.room))}</text>'
    )


def _ground(house: House, boxes: Sequence[Box]) -> str:
    x, y = min(box.x for box in boxes), max(box.y for box in boxes) + _STOREY + _GAP
    width = max(box.x + box.width for box in boxes) - x
    lines = textwrap.wrap(house.ground, _LINE_CHARACTERS)
    first = y + _STOREY / 2 + 5 - 11 * (len(lines) - 1)
    rows = [
        f'<text class="purpose" x="{x + width / 2:g}" y="{first + 22 * number:g}" text-anchor="middle">{escape(line)}</text>'
        for number, line in enumerate(lines)
    ]
    return f'<rect class="ground" x="{x:g}" y="{y:g}" width="{width:g}" height="{_STOREY}" rx="7"/>{"".join(rows)}'


def _beam(box: Box, boxes: Sequence[Box]) -> str:
    """Joins a room with the house beside it that shows its inside."""
    left, right = box.x + box.width, boxes[0].x
    low = boxes[-1].y + _STOREY
    points = f"{left:g},{box.y:g} {right:g},{boxes[0].y:g} {right:g},{low:g} {left:g},{box.y + _STOREY:g}"
    return f'<polygon class="from-evaluate" points="{points}"/>'


def _drop(box: Box, kit_y: float) -> str:
    """Joins a room with the house below it that shows its inside."""
    right = box.x + box.width
    points = f"{right:g},{box.y:g} {_WIDTH - _MARGIN:g},{kit_y:g} {right:g},{kit_y:g} {right:g},{box.y + _STOREY:g}"
    return f'<polygon class="from-device" points="{points}"/>'


def _title(text: str, x: float, y: float) -> str:
    return f'<text class="title" x="{x:g}" y="{y:g}">{escape(text)}</text>'


def _purpose(room: str) -> str:
    if room not in PURPOSES:
        raise UsageError(f"the contracts in pyproject.toml name {room}, which has no purpose; add one to PURPOSES in {__name__}")
    return PURPOSES[room]
