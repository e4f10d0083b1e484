"""Pictures of the tutorials that show measurements: drawn from committed results, as SVG for light and dark pages."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from peerlane.errors import UsageError

FOLDER = Path("docs/images")
TRACE = Path("results/h100x1/trace.json")
TRAINING = Path("results/h200x1/training_examples.txt")
_WIDTH, _MARGIN = 600, 12

_STYLE = """
text { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; font-size: 15px; fill: #16202a; }
.page { fill: #ffffff; } .head { font-weight: 700; } .soft { fill: #44515c; font-size: 14px; } .on { fill: #ffffff; }
.computes { fill: #0072b2; } .communicates { fill: #d55e00; } .both { fill: #009e73; } .idle { fill: #d9dee2; }
.axis { stroke: #8a96a0; fill: none; } .line { stroke: #d55e00; stroke-width: 2.4; fill: none; }
.dot { fill: none; stroke: #0072b2; stroke-width: 2.4; }
@media (prefers-color-scheme: dark) {
text { fill: #eef2f5; } .page { fill: #14191e; } .soft { fill: #b3bec8; } .idle { fill: #3d474f; } .dot { stroke: #56b4e9; }
}"""


def pictures(root: Path) -> dict[Path, str]:
    """Returns path -> SVG of the tutorials' pictures, from the results below ``root``."""
    return {FOLDER / "overlap.svg": overlap(root / TRACE), FOLDER / "training.svg": training(root / TRAINING)}


def shares_us(side: Mapping[str, float]) -> dict[str, float]:
    """Returns what a call's time goes to, in microseconds, from one side of a recorded trace; the parts add up to the call."""
    both = side["communicating"] * side["overlap"]
    shares = {"computes": side["computing"] - both, "both": both, "communicates": side["communicating"] - both, "idle": side["idle"]}
    return {name: share * side["us_per_call"] for name, share in shares.items()}


def overlap(trace: Path) -> str:
    """Draws the time of a call of reference and kernel by what runs, from the file that ``peerlane trace --json`` printed."""
    sides = [side for side in json.loads(trace.read_text(encoding="utf-8"))["sides"] if "stamped" not in side["candidate"]]
    scale = (_WIDTH - 2 * _MARGIN) / max(side["us_per_call"] for side in sides)
    parts, y = [_text(_MARGIN, 28, "What runs during a call, microseconds", "head")], 44
    for side in sides:
        name = "PyTorch, product after all-gather" if side["candidate"] == "reference" else "one kernel of the kit"
        parts.append(_text(_MARGIN, y + 16, f"{name}: {side['us_per_call']:.1f} us"))
        x, y = float(_MARGIN), y + 26
        for kind, time in shares_us(side).items():
            width = time * scale
            parts.append(f'<rect class="{kind}" x="{x:.2f}" y="{y}" width="{width:.2f}" height="36"/>')
            if width > 40:
                parts.append(_text(x + width / 2, y + 23, f"{time:.1f}", "" if kind == "idle" else "on", "middle"))
            x += width
        y += 56
    names = {"computes": "computes", "both": "both at once", "communicates": "communicates", "idle": "nothing runs"}
    x = float(_MARGIN)
    for kind, name in names.items():
        parts += [f'<rect class="{kind}" x="{x:g}" y="{y}" width="16" height="16"/>', _text(x + 22, y + 13, name, "soft")]
        x += 46 + 8 * len(name)
    return _svg(parts, y + 30, "Time of a call by what runs: reference and fused kernel")


def read_losses(log: str, example: str) -> tuple[list[int], dict[str, list[float]]]:
    """Returns the steps, and by library the losses of one example in the log of ``tests/gpu/train_examples.py``; raises UsageError if the
    log does not have it."""
    found = re.search(rf"^== {example}\n(.*?)(?=^== |\Z)", log, re.DOTALL | re.MULTILINE)
    rows = {} if found is None else {words[0]: words[1:] for line in found[1].splitlines() if len(words := line.split()) > 2}
    if not {"step", "peerlane", "torch.distributed"} <= rows.keys():
        raise UsageError(f"{TRAINING} has no losses of {example}; run python tests/gpu/train_examples.py and commit what it prints")
    losses = {name: [float(value) for value in rows[name]] for name in ("peerlane", "torch.distributed")}
    return [int(step) for step in rows["step"]], losses


def training(log: Path) -> str:
    """Draws the losses of the example with DistributedDataParallel on both backends."""
    steps, losses = read_losses(log.read_text(encoding="utf-8"), "ddp")
    left, right, top, bottom = 56, _WIDTH - 24, 56, 216
    highest = max(max(values) for values in losses.values())

    def place(step: int, loss: float) -> tuple[float, float]:
        return left + (right - left) * step / steps[-1], bottom - (bottom - top) * loss / highest

    points = {name: [place(step, loss) for step, loss in zip(steps, values, strict=True)] for name, values in losses.items()}
    parts = [
        _text(_MARGIN, 28, "Loss of a small GPT under DistributedDataParallel", "head"),
        f'<path class="axis" d="M{left} {top}V{bottom}H{right}"/>',
        *(_text(place(step, 0)[0], bottom + 20, str(step), "soft", "middle") for step in steps),
        *(_text(left - 8, place(0, loss)[1] + 5, f"{loss}", "soft", "end") for loss in range(int(highest) + 1)),
        _line(points["torch.distributed"]),
        *(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="6"/>' for x, y in points["peerlane"]),
        '<circle class="dot" cx="330" cy="76" r="6"/>',
        _text(346, 81, "backend peerlane"),
        '<path class="line" d="M318 102H342"/>',
        _text(346, 107, "NCCL"),
        _text(right, bottom + 40, "steps", "soft", "end"),
    ]
    return _svg(parts, bottom + 52, "Losses of the same training on two backends")


def _line(points: Sequence[tuple[float, float]]) -> str:
    return f'<path class="line" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in points)}"/>'


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(parts: Sequence[str], height: float, title: str) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:g}" width="{_WIDTH}" role="img">'
    page = f'<rect class="page" width="{_WIDTH}" height="{height:g}" rx="8"/>'
    return "\n".join([head, f"<title>{escape(title)}</title>", f"<style>{_STYLE}\n</style>", page, *parts, "</svg>", ""])
