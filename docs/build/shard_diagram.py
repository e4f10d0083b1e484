"""The picture on a problem's page: what every rank holds before a call, which messages its answers need, and what it holds afterwards."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from xml.sax.saxutils import escape

from docs.build.dependence import Answer, Dependence
from peerlane.problems import Cost
from peerlane.problems.contract.count import Step
from peerlane.report.tables import quantity

MOST_ROWS, MOST_STEPS = 6, 12
_WIDTH, _MARGIN, _GAP = 560, 8, 12
_LINE, _BOX, _ANSWER, _BAND = 21, 20, 48, 108
_CHARACTER = 7.6  # width of one at 14 px, on average

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#8c6bb1")
"""The colours of ranks. People who see few colours can distinguish them."""
_LIGHT = (1, 3, 4, 6)  # of these, which need dark text

_STYLE = """
text { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; font-size: 14px; fill: #16202a; }
.page { fill: #ffffff; } .head { font-weight: 700; font-size: 15px; } .soft { fill: #44515c; } .on { fill: #ffffff; font-weight: 600; }
.on-light { fill: #16202a; font-weight: 600; }
.same { fill: #d9dee2; } .none { fill: none; stroke: #8a96a0; stroke-dasharray: 4 3; } .frame { fill: none; stroke: #44515c; }
.work { fill: #eef1f3; } .moves { fill: #fbe3d3; } .message { fill: none; stroke-width: 2.5; }
@media (prefers-color-scheme: dark) {
text { fill: #eef2f5; } .page { fill: #14191e; } .soft { fill: #b3bec8; } .on { fill: #ffffff; } .on-light { fill: #16202a; }
.same { fill: #3d474f; } .none { stroke: #8a96a0; } .frame { stroke: #b3bec8; } .work { fill: #2d343a; } .moves { fill: #5a3016; }
}"""


@dataclass
class _Canvas:
    """Lines of SVG, drawn from the top down."""

    ranks: int
    y: float = _MARGIN
    parts: list[str] = field(default_factory=list)
    mixed: set[frozenset[int]] = field(default_factory=set)

    @property
    def column(self) -> float:
        """The width of a rank's column."""
        return (_WIDTH - 2 * _MARGIN - (self.ranks - 1) * _GAP) / self.ranks

    def left(self, rank: int) -> float:
        """The left edge of a rank's column."""
        return _MARGIN + rank * (self.column + _GAP)

    def middle(self, rank: int) -> float:
        """The middle of a rank's column."""
        return self.left(rank) + self.column / 2

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        """Writes a line of text."""
        self.parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>')

    def line(self, text: str, kind: str = "") -> None:
        """Writes a line of text below what is drawn, cut to the width of the picture."""
        most = int((_WIDTH - 2 * _MARGIN) / _CHARACTER)
        self.text(_MARGIN, self.y + 15, text if len(text) <= most else f"{text[: most - 1]}…", kind)
        self.y += _LINE

    def rectangle(self, x: float, y: float, width: float, height: float, paint: str, rounded: float = 0.0) -> None:
        """Draws a rectangle; ``paint``: attributes."""
        corner = f' rx="{rounded:g}"' if rounded else ""
        self.parts.append(f'<rect x="{x:.4g}" y="{y:.4g}" width="{width:.4g}" height="{height:.4g}"{corner} {paint}/>')

    def paint(self, ranks: frozenset[int]) -> str:
        """Returns the fill that stands for the data of these ranks: a colour, or stripes of several."""
        if len(ranks) == 1:
            return f'fill="{_colour(min(ranks))}"'
        if not ranks:
            return 'class="same"'
        self.mixed.add(ranks)
        return f'fill="url(#{_pattern_name(ranks)})"'


def shard_diagram(
    dependence: Dependence, shapes: Mapping[str, str], costs: Sequence[Cost], steps: Sequence[Step], title: str, preset: str
) -> str:
    """Returns the picture as SVG.

    ``shapes``: by parameter, its shape at ``preset`` on rank 0, in words. ``costs``: of one call at ``preset`` by rank; may be empty.
    ``steps``: what the reference does in one call at ``preset`` on rank 0; may be empty.
    """
    canvas = _Canvas(dependence.ranks)
    _head(canvas)
    _before(canvas, dependence, shapes)
    _messages(canvas, dependence, costs, preset)
    _after(canvas, dependence.answers)
    _reference(canvas, steps, preset)
    _legend(canvas)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {canvas.y:g}" width="{_WIDTH}" role="img">'
    patterns = "".join(_pattern(ranks) for ranks in sorted(canvas.mixed, key=sorted))
    page = f'<rect class="page" width="{_WIDTH}" height="{canvas.y:g}" rx="6"/>'
    names = f"<title>{escape(title)}</title>\n<style>{_STYLE}\n</style>"
    return "\n".join([head, names, f"<defs>{patterns}</defs>", page, *canvas.parts, "</svg>", ""])


def _colour(rank: int) -> str:
    return COLOURS[rank % len(COLOURS)]


def _head(canvas: _Canvas) -> None:
    for rank in range(canvas.ranks):
        canvas.rectangle(canvas.left(rank), canvas.y, canvas.column, 24, f'fill="{_colour(rank)}"', 4)
        canvas.text(canvas.middle(rank), canvas.y + 17, f"rank {rank}", "on-light" if rank in _LIGHT else "on", "middle")
    canvas.y += 32


def _before(canvas: _Canvas, dependence: Dependence, shapes: Mapping[str, str]) -> None:
    canvas.line("Before the call", "head")
    held = dependence.held
    shown = held if len(held) <= MOST_ROWS else held[: MOST_ROWS - 1]
    for item in shown:
        shape = shapes.get(item.name, "")
        canvas.line(f"{item.name}{': ' if shape else ''}{shape}", "soft")
        if item.replicated:
            canvas.rectangle(_MARGIN, canvas.y, _WIDTH - 2 * _MARGIN, _BOX, 'class="same"', 3)
            canvas.text(_WIDTH / 2, canvas.y + 15, "the same on all ranks", "soft", "middle")
        else:
            for rank in range(canvas.ranks):
                canvas.rectangle(canvas.left(rank), canvas.y, canvas.column, _BOX, f'fill="{_colour(rank)}"', 3)
        canvas.y += _BOX + 4
    if len(shown) < len(held):
        canvas.line(f"and {len(held) - len(shown)} more: {', '.join(item.name for item in held[len(shown) :])}", "soft")
    canvas.y += 6


def _messages(canvas: _Canvas, dependence: Dependence, costs: Sequence[Cost], preset: str) -> None:
    canvas.line("Messages that the answers need", "head")
    pairs = [(source, rank) for rank, needs in enumerate(dependence.needs) for source in sorted(needs) if source != rank]
    if not pairs:
        canvas.line("none in the case that was drawn", "soft")
        return
    if costs:
        canvas.line(f"at least so many bytes leave and enter a rank in one call at {preset}", "soft")
        for rank, cost in enumerate(costs):
            out, into = cost.egress_bytes + cost.network_egress_bytes, cost.ingress_bytes + cost.network_ingress_bytes
            canvas.text(canvas.middle(rank), canvas.y + 14, f"{quantity(out)}B out", "soft", "middle")
            canvas.text(canvas.middle(rank), canvas.y + _BAND + 6, f"{quantity(into)}B in", "soft", "middle")
    top, bottom = canvas.y + 20, canvas.y + _BAND - 16
    for source, rank in pairs:
        start, end = canvas.middle(source), canvas.middle(rank)
        bend = (bottom - top) * 0.45
        curve = f"M{start:.4g} {top:g}C{start:.4g} {top + bend:g} {end:.4g} {bottom - bend:g} {end:.4g} {bottom:g}"
        canvas.parts.append(f'<path class="message" stroke="{_colour(source)}" d="{curve}"/>')
    for rank in {rank for _, rank in pairs}:
        x = canvas.middle(rank)
        canvas.parts.append(f'<path class="frame" d="M{x - 5:.4g} {bottom - 2:g}L{x:.4g} {bottom + 5:g}L{x + 5:.4g} {bottom - 2:g}"/>')
    canvas.y += _BAND + 18


def _after(canvas: _Canvas, answers: Sequence[Answer]) -> None:
    canvas.line("After the call: whose data each part depends on", "head")
    shown = answers if len(answers) <= MOST_ROWS else answers[: MOST_ROWS - 1]
    for answer in shown:
        canvas.line(answer.name, "soft")
        for rank, cells in enumerate(answer.maps):
            if cells is None:
                canvas.rectangle(canvas.left(rank), canvas.y, canvas.column, _ANSWER, 'class="none"', 3)
                canvas.text(canvas.middle(rank), canvas.y + 29, "empty", "soft", "middle")
            else:
                _cells(canvas, canvas.left(rank), cells)
        canvas.y += _ANSWER + 6
    if len(shown) < len(answers):
        canvas.line(f"and {len(answers) - len(shown)} more", "soft")
    canvas.y += 4


def _cells(canvas: _Canvas, left: float, rows: Sequence[Sequence[frozenset[int]]]) -> None:
    """Draws a map of an answer; equal neighbours are one rectangle."""
    y = canvas.y
    for row, same in groupby(rows):
        height = _ANSWER * len(list(same)) / len(rows)
        x = left
        for ranks, run in groupby(row):
            width = canvas.column * len(list(run)) / len(row)
            canvas.rectangle(x, y, width, height, canvas.paint(ranks))
            x += width
        y += height
    canvas.rectangle(left, canvas.y, canvas.column, _ANSWER, 'class="frame"')


def _reference(canvas: _Canvas, steps: Sequence[Step], preset: str) -> None:
    """Draws the reference's steps as a chain that is wrapped like text."""
    if not steps:
        return
    canvas.line(f"How the reference does it: one call at {preset}, seen from rank 0", "head")
    canvas.y += 4
    x = float(_MARGIN)
    for number, (label, moves) in enumerate(_labels(steps)):
        width = len(label) * _CHARACTER + 14
        if x > _MARGIN and x + 16 + width > _WIDTH - _MARGIN:
            x, canvas.y = float(_MARGIN), canvas.y + 30
        if number:
            canvas.text(x, canvas.y + 17, "→")
            x += 18
        canvas.rectangle(x, canvas.y, width, 24, f'class="{"moves" if moves else "work"}"', 4)
        canvas.text(x + width / 2, canvas.y + 17, label, "", "middle")
        x += width + 4
    canvas.y += 36


def _labels(steps: Sequence[Step]) -> Iterator[tuple[str, bool]]:
    """Returns what each step is called, and whether it moves data; long chains are cut in the middle, and say so."""
    cut = len(steps) - MOST_STEPS
    for number, step in enumerate(steps):
        if cut > 0 and number == MOST_STEPS // 2:
            yield f"{cut} more steps", False
        if cut > 0 and MOST_STEPS // 2 <= number < len(steps) - MOST_STEPS // 2:
            continue
        times = f" x{step.times}" if step.times > 1 else ""
        if step.ranks:
            yield f"{step.kind.replace('_', '-')}{times}: {quantity(step.egress_bytes)}B out, {quantity(step.ingress_bytes)}B in", True
        else:
            work = f"{quantity(step.flops)}FLOP" if step.flops else f"touch {quantity(step.touched_bytes)}B"
            yield f"{step.times} operator{'s' if step.times > 1 else ''}, {work}", False


def _legend(canvas: _Canvas) -> None:
    canvas.line("A colour is data of one rank, stripes are data of several ranks.", "soft")
    canvas.line("Grey parts depend on no rank's own data.", "soft")
    canvas.y += _MARGIN


def _pattern_name(ranks: frozenset[int]) -> str:
    return "m" + "".join(f"{rank:x}" for rank in sorted(ranks))


def _pattern(ranks: frozenset[int]) -> str:
    """Returns diagonal stripes in the colours of these ranks."""
    size = 6 * len(ranks)
    stripes = "".join(
        f'<rect x="{6 * place}" width="6" height="{size}" fill="{_colour(rank)}"/>' for place, rank in enumerate(sorted(ranks))
    )
    turned = 'patternUnits="userSpaceOnUse" patternTransform="rotate(45)"'
    return f'<pattern id="{_pattern_name(ranks)}" width="{size}" height="{size}" {turned}>{stripes}</pattern>'
