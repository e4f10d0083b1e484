"""Prepares what the template shows of a board: its leaderboards, tiles, provenance, and the data of its plots."""

from __future__ import annotations

import base64
import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from peerlane.generate.metrics import total_usage
from peerlane.problem_files import slugs
from peerlane.publish.boards import Board, Row, category_of, measured_bound
from peerlane.publish.detail import Source, block_times, facts, source_of, speeds
from peerlane.publish.gather import WHOSE, Sample
from peerlane.report.catalogue import plain
from peerlane.results.result import Result

_NOTICES = {
    "virtual": "Virtual node: several ranks share a GPU. Speeds here compare with each other only, never with those of a node.",
    "cpu": "CPU ranks: verdicts are of correctness alone. Speed needs GPUs, so none is shown.",
    "emulated": "Emulated ranks: verdicts are of correctness alone. Speed needs GPUs, so none is shown.",
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


class Item:
    """A sample in the table of candidates, and its details."""

    def __init__(self, sample: Sample, number: int, board: Board, back: str) -> None:
        self.sample, self.key, self.back = sample, f"c{number}", back
        self.href = f"#{self.key}"
        self.category = category_of(sample.task.problem).replace("_", " ")
        self.slug = sample.result.problem.slug if sample.result is not None else slugs().get(sample.task.problem, "")
        self.title = f"{sample.task.problem} {self.slug}: {sample.name}"
        self.board_title = f"{board.title}, {board.key.node}"
        bounds = [measured_bound(speed.utilisation) for speed in self.speeds]
        self.share = max((bound.candidate for bound in bounds if bound is not None), default=None)

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
        samples = sorted([*board.samples, *board.references], key=lambda sample: (sample.task.place, sample.author, sample.attempt.sample))
        items = [Item(sample, first_item + index, board, back) for index, sample in enumerate(samples)]
        return cls(number, board, items, board.rows())

    @property
    def node_title(self) -> str:
        """The class of machine."""
        return str(self.board.key.node)

    @property
    def authors(self) -> list[str]:
        """In the order of the leaderboard, by which they have their colours."""
        return [row.author for row in self.rows]

    @property
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
        if not self.board.mechanisms():
            missing.append("mechanisms: no audited result names any")
        return f"Not shown: {'; '.join(missing)}." if missing and self.board.samples else ""

    @property
    def tiles(self) -> list[tuple[str, str]]:
        """The headline figures."""
        board = self.board
        if not board.samples:
            tasks = {sample.task for sample in board.references}
            return [(f"{len(tasks):,}", "tasks"), (f"{len(board.references):,}", "references")]
        correct = [sample for sample in board.samples if sample.attempt.correct]
        solved = {sample.task for sample in correct}
        mode = board.main_mode
        faster = {s.task for s in correct if mode is not None and mode in s.attempt.speedups and s.attempt.speedups[mode].low > 1}
        found = [
            (f"{len(board.tasks):,}", "tasks"),
            (f"{len(board.authors):,}", "author" if len(board.authors) == 1 else "authors"),
            (f"{len(board.samples):,}", "samples"),
            (f"{len(correct) / len(board.samples):.0%}".replace("%", " %"), "of samples correct"),
            (f"{len(solved):,}", "tasks solved by anyone"),
        ]
        return found + ([(f"{len(faster):,}", f"tasks faster, {mode}")] if mode is not None else [])

    @property
    def provenance(self) -> list[tuple[str, str]]:
        """The machine, its software, and who judged when."""
        results, environments = self._results, [result.environment for result in self._results]
        revisions = [_revision(environment) for environment in environments]
        days = sorted(f"{result.finished_at:%Y-%m-%d}" for result in results)
        usage = total_usage([sample.attempt for sample in self.board.samples])
        rows: list[tuple[str, list[str]]] = [
            ("machine", [str(self.board.key.node)]),
            ("driver", [str(environment.get("driver") or "") for environment in environments]),
            *((name, [value]) for name, value in self.board.key.node.switches()),
            ("CPU", [_cpu(environment) for environment in environments]),
            ("system", [str(environment.get("os") or "") for environment in environments]),
            ("software", [_software(environment) for environment in environments]),
            ("evaluator", [f"peerlane {result.evaluator_version}" for result in results]),
            ("revision", revisions),
            ("rules", [result.rules_hash or "" for result in results]),
            ("isolation", [result.isolation for result in results]),
            ("judged", [days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"] if days else []),
            ("model calls", [f"{usage.calls:,}"] if usage.calls else []),
        ]
        return [(name, "; ".join(told)) for name, values in rows if (told := [value for value in dict.fromkeys(values) if value])]

    @property
    def _results(self) -> list[Result]:
        return [item.sample.result for item in self.items if item.sample.result is not None]

    @functools.cached_property
    def data(self) -> dict[str, Any]:
        """The plots' data, as JSON can hold it."""
        board = self.board
        verdicts = board.verdicts()
        return plain(  # type: ignore[no-any-return]
            {
                "authors": self.authors,
                "modes": board.modes,
                "fast": board.fast_p(),
                "verdicts": verdicts,
                "mechanisms": board.mechanisms(),
                "steps": board.steps(),
                "reached": self._reached(),
            }
        )

    def _reached(self) -> list[dict[str, Any]]:
        links = {id(item.sample): item.href for item in self.items}
        several = self.presets > 1
        references: dict[tuple[str, str], dict[str, Any]] = {}
        found = []
        for reached in sorted(self.board.reached(), key=lambda reached: not reached.sample.is_reference):
            sample, bound = reached.sample, reached.bound
            slug = sample.result.problem.slug if sample.result is not None else ""
            task = f"{sample.task.problem} {slug}" + (f", {sample.task.preset}" if several else "")
            row = {"task": task, "mode": reached.mode, "bound_us": bound.bound_us, "bound_by": bound.bound_by, "ceilings": bound.ceilings}
            references.setdefault((task, reached.mode), row | {"share": bound.reference, "href": None})
            if sample.is_reference:
                references[task, reached.mode] |= {"share": reached.share, "href": links[id(sample)]}
            else:
                found.append(row | {"share": reached.share, "author": sample.author, "name": sample.name, "href": links[id(sample)]})
        return [row for row in [*references.values(), *found] if row["share"] > 0]


def _cpu(environment: dict[str, Any]) -> str:
    cpu = environment.get("cpu") or {}
    return ", ".join(filter(None, [str(cpu.get("model") or ""), f"{cpu['cores']} cores" if cpu.get("cores") else ""]))


def _software(environment: dict[str, Any]) -> str:
    versions = environment.get("software") or {}
    return ", ".join(f"{name} {versions[name]}" for name in ("torch", "cuda", "nccl", "triton", "python") if versions.get(name))


def _revision(environment: dict[str, Any]) -> str:
    git = environment.get("git") or {}
    revision = str(git.get("revision") or "")[:12]
    return f"{revision} (changed)" if revision and git.get("dirty") else revision
