"""Tables of results, for terminals (rich) and as Markdown. Both come from the same rows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from rich.table import Table

    from peerlane.results.result import Result
    from peerlane.results.speed_record import Estimate, ModeSpeed, Utilisation

NOT_MEASURED = "not measured"
FAILED = "failed"
RESULT_COLUMNS = (
    "candidate", "problem", "preset", "W", "verdict", "mode", "reference us", "candidate us", "speedup [95 %]", "faster", "of bound",
)  # fmt: skip


_GAP = 3  # characters between columns
_NARROWER = ((20, 1000), (16, 24))
"""Characters that a sentence gets on a line, and after how many a word may be broken: the second where the first have no room."""


@dataclass
class TextTable:
    """Rows of strings under ``columns``. ``right``: the columns that hold numbers. ``spare``: those that narrow terminals can do
    without, the least important first. ``hidden_if_silent``: further ones that are left out where no row says anything there."""

    columns: Sequence[str]
    right: Collection[str] = ()
    spare: Sequence[str] = ()
    hidden_if_silent: Collection[str] = ()
    rows: list[tuple[str, ...]] = field(default_factory=list)

    def add(self, *cells: str) -> None:
        """Appends a row; raises ValueError unless it has a cell for every column."""
        if len(cells) != len(self.columns):
            raise ValueError(f"the table has columns {tuple(self.columns)}, got {len(cells)} cells: {cells}")
        self.rows.append(cells)

    def rich(self, room: int | None = None) -> Table:
        """Returns the table for a screen with room for so many characters a line: without columns that say nothing, and without spare
        ones until it fits. If it does not fit then, each row becomes a block of lines ``column: cell``, with all that it says.

        Spare columns that are alike in every row go first. A caption has their cell, and names other columns that were left out.
        """
        from rich import box
        from rich.table import Table

        shown = self._telling()
        cells = {name: column for name, *column in zip(self.columns, *self.rows, strict=True) if name in shown}
        full = {name: max(map(len, (name, *column))) for name, column in cells.items()}
        spare = [name for name in self.spare if name in cells]
        alike = [name for name in spare if len(self.rows) > 1 and len(set(cells[name])) == 1]
        for sentence, word in _NARROWER:
            least = {name: full[name] if name in spare else self._narrowest(name, column, sentence, word) for name, column in cells.items()}
            left_out: list[str] = []
            for name in [*alike, *(name for name in spare if name not in alike)]:
                if room is None or sum(least.values()) + _GAP * len(least) <= room:
                    break
                left_out.append(name)
                del least[name]
            if room is None or (free := room - sum(least.values()) - _GAP * len(least)) >= 0:
                break
        else:
            return self._blocks(shown)
        said = ", ".join(f"{name} {cells[name][0]}" for name in left_out if name in alike)
        hidden = ", ".join(name for name in left_out if name not in alike)
        lines = [
            *([f"in every row: {said}"] if said else []),
            *([f"no room for the columns {hidden}: a wider terminal shows them"] if hidden else []),
        ]
        caption = "\n".join(lines) or None
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=caption, caption_justify="left")
        wants = sorted((full[name] - least[name], name) for name in least)
        for number, (want, name) in enumerate(wants if room is not None else ()):
            given = min(want, free // (len(wants) - number))
            least[name], free = least[name] + given, free - given
        for name in cells:
            if name in least:
                justify: Literal["left", "right"] = "right" if name in self.right else "left"
                table.add_column(name, justify=justify, overflow="fold", width=None if room is None else least[name])
        for row in self.rows:
            table.add_row(*(cell for column, cell in zip(self.columns, row, strict=True) if column in least))
        return table

    def _narrowest(self, column: str, cells: Sequence[str], sentence: int, word: int) -> int:
        """Returns the fewest characters in which a column can be read, if sentences get so many a line, and words are not broken before
        so many. Numbers are never broken."""
        widest = max(map(len, cells), default=0)
        words = [min(len(part), word) for text in (column, *cells) for part in text.split()]
        return max([widest if column in self.right else min(widest, sentence), *words])

    def _blocks(self, shown: Sequence[str]) -> Table:
        from rich.table import Table

        table = Table.grid(padding=(0, 1))
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        table.add_row("", "")
        for row in self.rows:
            for column, cell in zip(self.columns, row, strict=True):
                if column in shown and cell:
                    table.add_row(f"{column}:", cell)
            table.add_row("", "")
        return table

    def markdown(self) -> str:
        """Returns the table in GitHub's dialect, one line a row, with a newline at the end; without spare columns that say nothing."""
        shown = self._telling()
        rule = ["---:" if column in self.right else "---" for column in self.columns]
        lines = [self.columns, rule, *([cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in self.rows)]
        kept = ([cell for column, cell in zip(self.columns, line, strict=True) if column in shown] for line in lines)
        return "".join(f"| {' | '.join(line)} |\n" for line in kept)

    def _telling(self) -> list[str]:
        """Returns the columns, but for those that say nothing in any row and may then be left out."""
        silent = {name for name, *cells in zip(self.columns, *self.rows, strict=True) if self.rows and {*cells} <= {"-", NOT_MEASURED}}
        return [name for name in self.columns if name not in silent or name not in {*self.spare, *self.hidden_if_silent}]


def result_table(results: Iterable[Result]) -> TextTable:
    """Returns one row per result and launch mode with a measured speed, one row for a result without any.

    Times are medians; a speedup has its 95 % interval; "faster" means that the interval's lower end is above 1 plus the noise floor;
    "of bound" is the candidate's, against the measured ceilings where there are some, else against the datasheet.
    """
    spare = ("problem", "reference us", "candidate us", "faster", "of bound", "W", "preset")
    table = TextTable(RESULT_COLUMNS, {"W", "reference us", "candidate us"}, spare, hidden_if_silent={"mode", "speedup [95 %]"})
    for result in results:
        remarks = (*(("custom track",) if result.track == "custom" else ()), *result.flags)
        verdict = result.verdict.kind + (f" ({', '.join(remarks)})" if remarks else "")
        head = (result.candidate.name, _problem(result), result.preset, str(result.world_size), verdict)
        unmeasured = tuple(item.mode for item in result.speed if item.status == "not_measured")
        for speed in result.speeds:
            table.add(*head, *_speed_cells(speed))
        for item in result.speed:
            if item.status == "failed":
                table.add(*head, item.mode, *([FAILED] * 5))
        if unmeasured:
            table.add(*head, ", ".join(unmeasured), *([NOT_MEASURED] * 5))
        if not result.speed:
            table.add(*head, *(["-"] * 6))
    return table


def reasons(results: Iterable[Result]) -> list[str]:
    """Returns a line for every result that is not correct or ran in several nodes, and for every reason why a correct one was not timed."""
    lines: dict[str, None] = {}
    unmeasured: dict[str, dict[str, None]] = {}
    for result in results:
        where = f"{result.candidate.name}, problem {_problem(result)}, {result.preset}, W={result.world_size}"
        if not result.correct:
            lines[f"{where}: {result.verdict.kind}: {result.verdict.reason}"] = None
        for speed in result.speed:
            if speed.status == "failed":
                lines[f"{where}: {speed.mode} failed: {speed.kind}: {speed.reason}"] = None
            if speed.status == "not_measured":
                unmeasured.setdefault(speed.why, {})[speed.mode] = None
        if (moved := result.network) is not None:
            over = "" if moved.over_least is None else f", {moved.over_least:.2f} times the bound"
            most, least = max(moved.egress, moved.ingress), max(moved.least_egress, moved.least_ingress)
            lines[f"{where}: {most:,} bytes between nodes on the busiest rank in one call; the bound is {least:,.0f}{over}"] = None
    return [*lines, *(f"{', '.join(modes)} not measured: {why}" for why, modes in unmeasured.items())]


def mechanism_lines(results: Iterable[Result]) -> list[str]:
    """Returns a line for every audited result: how it moved data between ranks, mechanism by mechanism, and how sure that is."""
    return [
        f"{result.candidate.name}, problem {_problem(result)}, {result.preset}, W={result.world_size} moves data by: {_mechanisms(result)}"
        for result in results
        if result.audit is not None
    ]


def _mechanisms(result: Result) -> str:
    names = [f"{item.name} ({item.confidence})" for item in result.mechanisms]
    return ", ".join(names) or "nothing that was recognised"


def _problem(result: Result) -> str:
    variant = "" if result.problem.variant == "default" else f" ({result.problem.variant})"
    return f"{result.problem.id} {result.problem.slug}{variant}"


def _speed_cells(speed: ModeSpeed) -> tuple[str, ...]:
    return (
        speed.mode,
        microseconds(speed.reference_us),
        microseconds(speed.candidate_us),
        f"{shown_speedup(speed):.2f} [{speed.speedup.low:.2f}, {speed.speedup.high:.2f}]",
        "yes" if speed.faster else "no",
        _share(speed.utilisation),
    )


def shown_speedup(speed: ModeSpeed) -> float:
    """Returns the quotient of the two times shown; the recorded speedup is rounded to it. Earlier protocols recorded other times."""
    reference_us, candidate_us = (float(microseconds(times)) for times in (speed.reference_us, speed.candidate_us))
    quotient = reference_us / candidate_us if candidate_us else 0.0
    return quotient if abs(quotient - speed.speedup.median) <= 0.02 * speed.speedup.median else speed.speedup.median


def microseconds(estimate: Estimate) -> str:
    """Returns the median, with three digits."""
    return f"{estimate.median:.1f}" if estimate.median < 100 else f"{estimate.median:.0f}"


def _share(utilisation: Sequence[Utilisation]) -> str:
    if not utilisation:
        return "-"
    best = next((item for item in utilisation if item.ceilings == "measured"), utilisation[0])
    return f"{percent(best.candidate)} of {best.bound_by} ({best.ceilings})"


def percent(share: float) -> str:
    """Returns a share with two digits that say something: 65%, 6.2%, 0.43%."""
    digits = next((number for number, least in enumerate((0.0995, 0.00995)) if share >= least), 2)
    return f"{share:.{digits}%}"


def quantity(value: float) -> str:
    """Returns three digits and a decimal prefix, to be followed by the unit: ``1.5 M``."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {prefix}"
    return f"{value:.3g} "


def shown_us(value: float) -> str:
    """Returns a time with three digits and no exponent: 4.56, 78.9, 1,230."""
    return f"{value:.3g}" if value < 999.5 else f"{float(f'{value:.3g}'):,.0f}"


def environment_lines(results: Iterable[Result]) -> list[str]:
    """Returns the places of the results: a line per node class, software and evaluator version."""
    lines: dict[str, None] = {}
    for result in results:
        software = result.environment.get("software", {})
        versions = ", ".join(f"{name} {software[name]}" for name in ("torch", "cuda", "nccl", "triton") if software.get(name))
        timing = f"; timing protocol {result.timing_protocol}" if result.modes else ""
        lines[f"Node: {result.node}; {versions or 'software unknown'}; evaluator {result.evaluator_version}{timing}."] = None
    return list(lines)


def by_node(results: Iterable[Result]) -> dict[str, list[Result]]:
    """Groups results by class of machine and, where it is not the current one, the timing protocol.

    Results that a later one replaces are left out. Only results of one group may be compared.
    """
    from peerlane.results.reader import newest  # tables of problems need no results

    groups: dict[str, list[Result]] = {}
    for result in newest(results):
        older = result.other_protocol
        groups.setdefault(f"{result.node}" + (f", timing protocol {older}" if older else ""), []).append(result)
    return groups


class ReportPart(NamedTuple):
    """The results of one class of machine: a heading, empty if there is one class only, a table, and sentences below it."""

    heading: str
    table: TextTable
    notes: list[str]


def report_parts(results: Iterable[Result]) -> list[ReportPart]:
    """Returns a part for every class of machine."""
    groups = by_node(results)
    parts = []
    for node, mine in groups.items():
        notes = [*mechanism_lines(mine), *environment_lines(mine), *(f"* {line.rstrip('.')}." for line in reasons(mine))]
        heading = f"Results of {node}, which compare with no others here:" if len(groups) > 1 else ""
        parts.append(ReportPart(heading, result_table(mine), notes))
    return parts


def results_report(results: Iterable[Result]) -> str:
    """Returns a table for every class of machine, as Markdown, and the sentences that belong to it."""
    return "\n\n".join(
        (f"{part.heading}\n\n" if part.heading else "") + f"{part.table.markdown()}\n" + "\n\n".join(part.notes)
        for part in report_parts(results)
    )
