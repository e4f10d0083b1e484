"""Prepares what the template shows of a board: its leaderboards, tiles, provenance, and the data of its plots."""

from __future__ import annotations

import base64
import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from peerlane.common.problem_files import slugs
from peerlane.common.words import counted
from peerlane.generate.summary import public_categories
from peerlane.publish.boards import Board, Row, category_of, measured_bound
from peerlane.publish.detail import Source, block_times, facts, source_of, speeds
from peerlane.publish.gather import WHOSE, Sample
from peerlane.publish.page.provenance import provenance
from peerlane.publish.points import message_bytes, speed_points
from peerlane.report.catalogue import plain
from peerlane.report.plots import preset_order
from peerlane.results.result import Result

_NOTICES = {
    "virtual": "Virtual node: several ranks share a GPU. Speeds here compare with each other only, never with those of a node.",
    "cpu": "CPU ranks: verdicts are of correctness alone. Speed needs GPUs, so none is shown.",
    "emulated": "Emulated ranks: verdicts are of correctness alone. Speed needs GPUs, so none is shown.",
}


_FAMILIES = {
    "pkb": "pkb: the sizes of the public benchmark, most of which measure latency.",
    "production": "production: sizes of layers of real models.",
    "sweep": "sweep: the same problems at growing sizes.",
    "small": "small: sizes for correctness; their speeds say little.",
    "bandwidth": "bandwidth: sizes at which links and memory are the limit.",
}
_TRACKS = {
    "open": "Open track: a candidate may communicate with any library.",
    "custom": "Custom track: a candidate must communicate by code of its own.",
}
_VERIFIED = (
    "Verdicts and speeds of verified entries were measured by the keeper of this page. Tokens and cost are what their authors say, and "
    "steps of their agents are not shown."
)
_NEED_MULTICAST = (
    "Some samples need NVLink multicast, which was off here. None of them counts as right. Behind each pass@k of their authors stands "
    "the share of the rest: without these samples, and without tasks that have no others. The order of the table does not depend on it."
)
_CLAIMED = "Entries that are not verified show what their authors claim."


_CATEGORY_NAMES = {"fsdp_zero": "FSDP / ZeRO", "geometric_spatial": "geometric / spatial"}


def category_name(category: str) -> str:
    """Returns a category in words."""
    return _CATEGORY_NAMES.get(category, category.replace("_", " "))


class Item:
    """A sample in the table of candidates, and its details."""

    def __init__(self, sample: Sample, number: int, board: Board, back: str) -> None:
        self.sample, self.key, self.back = sample, f"c{number}", back
        self.href = f"#{self.key}"
        self.category = category_name(category_of(sample.task.problem))
        self.slug = sample.result.problem.slug if sample.result is not None else slugs().get(sample.task.problem, "")
        self.title = f"{sample.task.problem} {self.slug}: {sample.name}"
        self.board_title = f"{board.title}, {board.key.node}"
        self.by_mode = {speed.mode: speed for speed in self.speeds}
        bounds = [bound for speed in self.speeds if (bound := measured_bound(speed.utilisation)) is not None]
        self.bound = bounds[0] if bounds else None
        self.share = max((bound.candidate for bound in bounds), default=None)

    @functools.cached_property
    def speeds(self) -> Sequence[Any]:
        """Measured speeds by mode."""
        return speeds(self.sample.result) if self.sample.result is not None else ()

    @property
    def whose(self) -> str:
        """Names who vouches for the figures; empty where the page's author judged."""
        return WHOSE[self.sample.standing]

    @property
    def blocks(self) -> list[Markup]:
        """A plot of block times for each of the speeds."""
        return [block_times(speed) for speed in self.speeds]

    @functools.cached_property
    def source(self) -> Source:
        """The code, highlighted."""
        return source_of(self.sample)

    @property
    def traces(self) -> list[tuple[str, str]]:
        """Name and data URI of each trace. As an image, an SVG runs no script and fetches nothing."""
        return [(name, f"data:image/svg+xml;base64,{base64.b64encode(data).decode()}") for name, data in self.sample.traces]

    @property
    def facts(self) -> list[tuple[str, str]]:
        """Provenance of the result."""
        return list(facts(self.sample.result)) if self.sample.result is not None else []


@dataclass
class View:
    """A board and what surrounds it on the page."""

    number: int
    board: Board
    items: list[Item]
    rows: list[Row]

    @classmethod
    def of(cls, number: int, board: Board, first_item: int) -> View:
        """The board as the page shows it; its items are numbered from ``first_item``."""
        back = "#candidates" if number == 0 else f"#candidates-{number}"
        samples = sorted([*board.samples, *board.references], key=_order)
        items = [Item(sample, first_item + index, board, back) for index, sample in enumerate(samples)]
        return cls(number, board, items, board.rows())

    @property
    def node_title(self) -> str:
        """The class of machine."""
        return str(self.board.key.node)

    @property
    def size(self) -> str:
        """The number of tasks that anyone tried, or of references."""
        tasks = len(self.board.tasks)
        return counted(tasks, "task") if tasks else f"{counted(len(self.board.references), 'reference')} alone"

    @property
    def modes(self) -> list[str]:
        """Launch modes in the order of columns: the one that ranks first."""
        return self.board.modes[::-1]

    @property
    def authors(self) -> list[str]:
        """In the order of the leaderboard, by which they have their colours."""
        return [row.author for row in self.rows]

    @functools.cached_property
    def presets(self) -> int:
        """The number of presets on the board."""
        return len({item.sample.task.preset for item in self.items})

    @property
    def kinds(self) -> list[str]:
        """Verdicts of the table, the most frequent first."""
        return [kind for kind, _ in Counter(item.sample.attempt.verdict for item in self.items).most_common()]

    @property
    def tokens(self) -> bool:
        """True if any author's tokens are known."""
        return any(row.usage.output_tokens for row in self.rows)

    @property
    def costs(self) -> bool:
        """True if any author's costs are known."""
        return any(row.usage.cost_usd is not None for row in self.rows)

    @staticmethod
    def name_of(category: str) -> str:
        """Returns a category as readers know it."""
        return category_name(category)

    @property
    def public_categories(self) -> dict[str, str]:
        """By category, its name in the public benchmark, and how many problems it has there."""
        return public_categories()

    @property
    def leaderboards(self) -> list[tuple[str, list[Row]]]:
        """One of all; with results that others claim, one of those apart."""
        claimed = [row for row in self.rows if row.standing in ("unverified", "differs")]
        trusted = [row for row in self.rows if row not in claimed]
        if not claimed:
            return [("", trusted)]
        return [(label, rows) for label, rows in ((": verified", trusted), (": not verified", claimed)) if rows]

    @property
    def notices(self) -> list[str]:
        """Sentences that a reader must know before comparing."""
        found = [text for kind, text in _NOTICES.items() if kind == self.board.key.node.kind]
        rules = {(result.evaluator_version, result.rules_hash) for result in self._results}
        if len(rules) > 1:
            found.append(f"The results were judged under {len(rules)} versions of the rules; compare their speeds with care.")
        standings = {sample.standing for sample in self.board.samples}
        found += [_VERIFIED] if "verified" in standings else []
        found += [_CLAIMED] if standings & {"unverified", "differs"} else []
        found += [_NEED_MULTICAST] if any(row.needs_multicast for row in self.rows) else []
        if not self.board.samples:
            found.append("Only references were judged here, so there is no leaderboard.")
        return found

    @property
    def silent(self) -> str:
        """The reasons why sections are missing."""
        missing = []
        if not self.board.modes:
            missing.append("speedups and the roofline: no speed was measured")
        if all(sample.attempt.correct for sample in self.board.samples):
            missing.append("verdicts: all samples are correct")
        if not self.board.mechanisms():
            missing.append("mechanisms: no audited result names any")
        return f"Not shown: {'; '.join(missing)}." if missing and self.board.samples else ""

    @property
    def tiles(self) -> list[tuple[str, str]]:
        """The headline figures: what was tried and solved, and the speed of the leading author over the tasks that were timed."""
        board = self.board
        if not board.samples:
            tasks = {sample.task for sample in board.references}
            return [(f"{len(tasks):,}", "tasks"), (f"{len(board.references):,}", "references")]
        correct = [sample for sample in board.samples if sample.attempt.correct]
        solved = {sample.task for sample in correct}
        found = [
            (f"{len(solved):,} of {len(board.tasks):,}", "tasks solved by anyone"),
            (f"{len(correct):,} of {len(board.samples):,}", "samples correct"),
        ]
        return found + [tile for mode in (board.main_mode,) if mode is not None for tile in self._speed_tiles(mode)]

    def _speed_tiles(self, mode: str) -> list[tuple[str, str]]:
        points = [point for point in speed_points(self.board) if point.speed.mode == mode]
        faster = {point.sample.task for point in points if point.speed.speedup.low > 1}
        found = [(f"{len(faster):,} of {len(self.board.tasks):,}", f"tasks faster than the reference, {mode}")]
        leader = next((row for row in self.rows if row.mean.get(mode) is not None), None)
        if leader is not None and (mean := leader.mean[mode]) is not None:
            whose = f", {leader.author}" if len(self.authors) > 1 else ""
            tasks = f"{leader.timed[mode]:,} timed task{'' if leader.timed[mode] == 1 else 's'}"
            found.append((f"{mean.value:.2f}x", f"geometric mean of {tasks}, {mode}{whose}"))
            best = max((point for point in points if point.sample.author == leader.author), key=lambda point: point.speed.speedup.median)
            found.append((f"{best.speed.speedup.median:.1f}x", f"largest speedup, {mode}{whose}: problem {best.sample.task.problem}"))
            if (share := leader.share[mode]) is not None:
                found.append((f"{100 * share:.0f} %", f"of the roofline bound, median of its tasks, {mode}"))
        return found

    @property
    def about(self) -> list[str]:
        """Sentences that explain the words of the board's title."""
        key = self.board.key
        track = _TRACKS.get(key.track)
        cases = "Only the case that is timed was judged." if key.cases == "timed" else None
        return [text for text in (_FAMILIES.get(key.family), track, cases) if text is not None]

    @property
    def provenance(self) -> list[tuple[str, str]]:
        """The machine, its software, and who judged when."""
        return provenance(self.board, [item.sample for item in self.items])

    @property
    def _results(self) -> list[Result]:
        return [item.sample.result for item in self.items if item.sample.result is not None]

    @functools.cached_property
    def _links(self) -> dict[int, str]:
        return {id(item.sample): item.href for item in self.items}

    @functools.cached_property
    def data(self) -> dict[str, Any]:
        """The plots' data, as JSON can hold it."""
        board = self.board
        verdicts = board.verdicts() if not all(sample.attempt.correct for sample in board.samples) else []
        return plain(  # type: ignore[no-any-return]
            {
                "authors": self.authors,
                "modes": board.modes,
                "fast": board.fast_p(),
                "speeds": self._speeds(),
                "verdicts": verdicts,
                "mechanisms": board.mechanisms(),
                "steps": board.steps(),
                "reached": self._reached(),
            }
        )

    def _task(self, sample: Sample) -> str:
        slug = sample.result.problem.slug if sample.result is not None else ""
        return f"{sample.task.problem} {slug}" + (f", {sample.task.preset.partition('_')[2]}" if self.presets > 1 else "")

    def _speeds(self) -> list[dict[str, Any]]:
        return [
            {
                "task": self._task(sample),
                "mode": speed.mode,
                "author": sample.author,
                "name": sample.name,
                "href": self._links[id(sample)],
                "speedup": speed.speedup.median,
                "low": speed.speedup.low,
                "high": speed.speedup.high,
                "us": speed.candidate_us.median,
                "reference_us": speed.reference_us.median,
            }
            for sample, speed in speed_points(self.board)
        ]

    def _reached(self) -> list[dict[str, Any]]:
        key = self.board.key
        references: dict[tuple[str, str], dict[str, Any]] = {}
        found = []
        for reached in sorted(self.board.reached, key=lambda reached: not reached.sample.is_reference):
            sample, bound, task = reached.sample, reached.bound, self._task(reached.sample)
            row = {"task": task, "mode": reached.mode, "bound_us": bound.bound_us, "bound_by": bound.bound_by, "ceilings": bound.ceilings}
            row |= {"problem": task.split(",")[0], "bytes": message_bytes(*sample.task, key.world_size, key.variant)}
            if sample.is_trusted:  # or a stranger would say how fast the reference is
                references.setdefault((task, reached.mode), row | {"share": bound.reference, "href": None})
            if sample.is_reference:
                references[task, reached.mode] |= {"share": reached.share, "href": self._links[id(sample)]}
            else:
                found.append(row | {"share": reached.share, "author": sample.author, "name": sample.name, "href": self._links[id(sample)]})
        return [row for row in [*references.values(), *found] if row["share"] > 0]


def _order(sample: Sample) -> tuple[object, ...]:
    return sample.task.problem, preset_order(sample.task.preset), sample.author, sample.attempt.sample
