"""Prepares what the template shows of a board: its leaderboards, tiles, provenance, and the data of its plots."""

import base64
import functools
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

from peerlane.common.problem_files import slugs
from peerlane.common.words import counted
from peerlane.generate import metrics
from peerlane.generate.board import Board, Entry, category_of, public_categories
from peerlane.generate.metrics import CORRECT, Estimate, Metric
from peerlane.generate.samples import Sample, Task
from peerlane.publish.gather import WHOSE
from peerlane.publish.page import plot_data
from peerlane.publish.page.detail import Source, block_times, facts, provenance, source_of
from peerlane.report.catalogue import plain
from peerlane.report.plots import preset_order
from peerlane.report.tiers import LATENCY_US

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
    return _CATEGORY_NAMES.get(category, category.replace("_", " "))


class Item:
    """A sample in the table of candidates, and its details."""

    def __init__(self, sample: Sample, number: int, board: Board, back: str) -> None:
        self.sample, self.key, self.back = sample, f"c{number}", back
        self.href = f"#{self.key}"
        self.category = category_name(category_of(sample.problem))
        self.slug = sample.result.problem.slug if sample.result is not None else slugs().get(sample.problem, "")
        self.title = f"{sample.problem} {self.slug}: {sample.name}"
        self.board_title = f"{board.title}, {board.setting.node_class}"
        self.speeds = sample.result.speeds if sample.result is not None else []
        self.facts = list(facts(sample.result)) if sample.result is not None else []
        self.whose = WHOSE[sample.standing]
        self.by_mode = {speed.mode: speed for speed in self.speeds}
        bounds = [bound for speed in self.speeds if (bound := plot_data.measured_bound(speed.utilisation)) is not None]
        self.bound = bounds[0] if bounds else None
        self.share = max((bound.candidate for bound in bounds), default=None)

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


class Cell(NamedTuple):
    """The expected numbers of tasks that one author solves in a group with one sample. ``faster``: None where not measured."""

    correct: float
    faster: float | None


Heat = dict[str, tuple[int, dict[str, Cell]]]
"""The size of each group of tasks, and a cell for each author."""


class Row:
    """An author's line of the leaderboard. Estimates are shares of the board's tasks, or geometric means; None: not measured."""

    def __init__(self, entry: Entry, board: Board, reached: Sequence[plot_data.Reached]) -> None:
        timed = {mode: entry.timed(mode) for mode in board.modes}
        ks = [k for k in board.ks if k <= entry.samples_per_task]
        rest = entry.without_multicast
        rest_ks = [k for k in board.ks if k <= max(rest.samples_per_task, 1)] if entry.needs_multicast and rest.tasks else []
        shares = {mode: [item.share for item in reached if (item.sample.author, item.mode) == (entry.author, mode)] for mode in board.modes}
        self.entry, self.author = entry, entry.author
        self.pass_at = {k: entry.count(CORRECT, k).share for k in ks}
        self.pass_most = {k: entry.count(CORRECT, k).most / len(entry.tasks) for k in ks if entry.unjudged}
        self.fast = {mode: entry.count(Metric(mode, 1.0)).share for mode in entry.modes}
        self.mean: Mapping[str, Estimate] = {mode: metrics.geometric_mean(list(timed[mode].values())) for mode in entry.modes}
        self.timed = {mode: len(values) for mode, values in timed.items()}
        self.with_fallback = {mode: entry.geometric_mean(mode) for mode in entry.modes}
        self.share = {mode: statistics.median(values) if values else None for mode, values in shares.items()}
        self.without_multicast = {k: rest.count(CORRECT, k).share for k in rest_ks}


class View:
    """A board and what surrounds it on the page. Its items are numbered from ``first_item``."""

    def __init__(self, number: int, board: Board, first_item: int) -> None:
        self.number, self.board = number, board
        back = "#candidates" if number == 0 else f"#candidates-{number}"
        samples = sorted([*board.samples, *board.references], key=_order)
        self.items = [Item(sample, first_item + index, board, back) for index, sample in enumerate(samples)]
        self.reached = plot_data.reached(board)
        self.rows = [Row(entry, board, self.reached) for entry in board.ranked()]
        self.authors = [row.author for row in self.rows]  # colours go by their order
        self.modes = board.modes[::-1]  # the one that ranks first
        self.node_title = str(board.setting.node_class)
        self.presets = len({sample.task.preset for sample in samples})
        self.verdicts = [kind for kind, _ in Counter(sample.verdict for sample in samples).most_common()]
        self.tokens = any(row.entry.usage.output_tokens for row in self.rows)
        self.costs = any(row.entry.usage.cost_usd is not None for row in self.rows)
        self.public_categories, self.name_of = public_categories(), category_name
        self.provenance = provenance(board, samples)

    @property
    def size(self) -> str:
        """The number of tasks that anyone tried, or of references."""
        tasks = len(self.board.tasks)
        return counted(tasks, "task") if tasks else f"{counted(len(self.board.references), 'reference')} alone"

    @functools.cached_property
    def heat(self) -> Heat:
        """Tasks solved by category."""
        groups = self.board.categories
        return self._heat({name: groups[name] for name in [*sorted(groups.keys() - {"total"}), "total"]})

    @functools.cached_property
    def kinds(self) -> Heat:
        """The same for tasks that latency bounds, and for the others; without tasks whose roofline is not known here."""
        names = {"latency": f"bound below {LATENCY_US:g} us (latency)", "bandwidth": "bound by bandwidth or compute"}
        return self._heat({title: self.board.bounds[name] for name, title in names.items() if name in self.board.bounds})

    def _heat(self, groups: Mapping[str, Sequence[Task]]) -> Heat:
        mode = self.board.main_mode or ""

        def cell(entry: Entry, tasks: Sequence[Task]) -> Cell:
            faster = entry.count(Metric(mode, 1.0), 1, tasks).solved if mode in entry.modes else None
            return Cell(entry.count(CORRECT, 1, tasks).solved, faster)

        return {name: (len(tasks), {entry.author: cell(entry, tasks) for entry in self.board.entries}) for name, tasks in groups.items()}

    @property
    def leaderboards(self) -> list[tuple[str, list[Row]]]:
        """One of all; with results that others claim, one of those apart."""
        claimed = [row for row in self.rows if row.entry.standing in ("unverified", "differs")]
        trusted = [row for row in self.rows if row not in claimed]
        if not claimed:
            return [("", trusted)]
        return [(label, rows) for label, rows in ((": verified", trusted), (": not verified", claimed)) if rows]

    @property
    def notices(self) -> list[str]:
        """Sentences that a reader must know before comparing."""
        notices = [text for kind, text in _NOTICES.items() if kind == self.board.setting.node_class.kind]
        results = [item.sample.result for item in self.items if item.sample.result is not None]
        rules = {(result.evaluator_version, result.rules_hash) for result in results}
        if len(rules) > 1:
            notices.append(f"The results were judged under {len(rules)} versions of the rules; compare their speeds with care.")
        standings = {sample.standing for sample in self.board.samples}
        notices += [_VERIFIED] if "verified" in standings else []
        notices += [_CLAIMED] if standings & {"unverified", "differs"} else []
        notices += [_NEED_MULTICAST] if any(row.entry.needs_multicast for row in self.rows) else []
        if not self.board.samples:
            notices.append("Only references were judged here, so there is no leaderboard.")
        return notices

    @property
    def silent(self) -> str:
        """The reasons why sections are missing."""
        missing = []
        if not self.board.modes:
            missing.append("speedups and the roofline: no speed was measured")
        if all(sample.correct for sample in self.board.samples):
            missing.append("verdicts: all samples are correct")
        if not self.data["mechanisms"]:
            missing.append("mechanisms: no audited result names any")
        return f"Not shown: {'; '.join(missing)}." if missing and self.board.samples else ""

    @property
    def tiles(self) -> list[tuple[str, str]]:
        """The headline figures: what was tried and solved, and the speed of the leading author over the tasks that were timed."""
        board = self.board
        if not board.samples:
            tasks = {sample.task for sample in board.references}
            return [(f"{len(tasks):,}", "tasks"), (f"{len(board.references):,}", "references")]
        correct = [sample for sample in board.samples if sample.correct]
        solved = {sample.task for sample in correct}
        tiles = [
            (f"{len(solved):,} of {len(board.tasks):,}", "tasks solved by anyone"),
            (f"{len(correct):,} of {len(board.samples):,}", "samples correct"),
        ]
        return tiles + [tile for mode in (board.main_mode,) if mode is not None for tile in self._speed_tiles(mode)]

    def _speed_tiles(self, mode: str) -> list[tuple[str, str]]:
        measured = [(sample, speed.speedup) for sample, speed in plot_data.speeds(self.board) if speed.mode == mode]
        faster = {sample.task for sample, speedup in measured if speedup.low > 1}
        tiles = [(f"{len(faster):,} of {len(self.board.tasks):,}", f"tasks faster than the reference, {mode}")]
        leader = next((row for row in self.rows if mode in row.mean), None)
        if leader is not None:
            whose = f", {leader.author}" if len(self.authors) > 1 else ""
            tasks = f"{leader.timed[mode]:,} timed task{'' if leader.timed[mode] == 1 else 's'}"
            tiles.append((f"{leader.mean[mode].value:.2f}x", f"geometric mean of {tasks}, {mode}{whose}"))
            best, speedup = max((pair for pair in measured if pair[0].author == leader.author), key=lambda pair: pair[1].median)
            tiles.append((f"{speedup.median:.1f}x", f"largest speedup, {mode}{whose}: problem {best.problem}"))
            if (share := leader.share[mode]) is not None:
                tiles.append((f"{100 * share:.0f} %", f"of the roofline bound, median of its tasks, {mode}"))
        return tiles

    @property
    def about(self) -> list[str]:
        """Sentences that explain the words of the board's title."""
        key = self.board.setting
        track = _TRACKS.get(key.track)
        cases = "Only the case that is timed was judged." if key.cases == "timed" else None
        return [text for text in (_FAMILIES.get(key.preset), track, cases) if text is not None]

    @functools.cached_property
    def _links(self) -> dict[int, str]:
        return {id(item.sample): item.href for item in self.items}

    @functools.cached_property
    def data(self) -> dict[str, Any]:
        """The plots' data, as JSON can hold it."""
        board = self.board
        verdicts = plot_data.verdicts(board) if not all(sample.correct for sample in board.samples) else []
        return plain(  # type: ignore[no-any-return]
            {
                "authors": self.authors,
                "modes": board.modes,
                "fast": plot_data.fast_p(board),
                "speeds": self._speeds(),
                "verdicts": verdicts,
                "mechanisms": plot_data.mechanisms(board),
                "steps": plot_data.steps(board),
                "reached": self._reached(),
            }
        )

    def _task(self, sample: Sample) -> str:
        slug = sample.result.problem.slug if sample.result is not None else ""
        return f"{sample.problem} {slug}" + (f", {sample.task.preset.partition('_')[2]}" if self.presets > 1 else "")

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
            for sample, speed in plot_data.speeds(self.board)
        ]

    def _reached(self) -> list[dict[str, Any]]:
        key = self.board.setting
        references: dict[tuple[str, str], dict[str, Any]] = {}
        rows = []
        for reached in sorted(self.reached, key=lambda reached: not reached.sample.is_reference):
            sample, bound, task = reached.sample, reached.bound, self._task(reached.sample)
            row = {"task": task, "mode": reached.mode, "bound_us": bound.bound_us, "bound_by": bound.bound_by, "ceilings": bound.ceilings}
            row |= {"problem": task.split(",")[0], "bytes": plot_data.message_bytes(*sample.task, key.world_size, key.variant)}
            if sample.is_trusted:  # or a stranger would say how fast the reference is
                references.setdefault((task, reached.mode), row | {"share": bound.reference, "href": None})
            if sample.is_reference:
                references[task, reached.mode] |= {"share": reached.share, "href": self._links[id(sample)]}
            else:
                rows.append(row | {"share": reached.share, "author": sample.author, "name": sample.name, "href": self._links[id(sample)]})
        return [row for row in [*references.values(), *rows] if row["share"] > 0]


def _order(sample: Sample) -> tuple[object, ...]:
    return sample.problem, preset_order(sample.task.preset), sample.author, sample.number
