"""The outcome of judging a corpus candidate once, as it is stored, and whether it is what the table promises."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from peerlane.common.place import Device
from peerlane.errors import UsageError
from peerlane.evaluate.selftest.table import Entry
from peerlane.hardware.environment import node_class
from peerlane.results.json_lines import whole_lines
from peerlane.results.record import Record
from peerlane.results.result import Result
from peerlane.results.speed_record import Estimate

FILE = "selftest.jsonl"


class Outcome(Record):
    """One judgement. The table's promise is not part of it: it is looked up when outcomes are read."""

    schema_version: Literal[2] = 2
    evaluator_version: str
    finished_at: datetime = Field(default_factory=lambda: datetime.now(UTC))
    row: str
    file: str
    sha256: str
    after: str | None = Field(description="the candidate that was judged before it in the same session")
    world_size: int
    device: Device
    track: str
    isolation: str
    verdict: str
    phase: str | None
    reason: str
    faster: bool = Field(description="its speedup counts as one, in some launch mode")
    speedups: dict[str, Estimate] = Field(default_factory=dict, description="by launch mode; missing in older outcomes")
    flags: tuple[str, ...]
    stage_seconds: dict[str, float] = Field(default_factory=dict, description="wall time by stage; one stage total in older outcomes")
    node: str
    torch: str
    load: int = Field(default=0, description="processes that kept cores busy meanwhile")
    timeout: float | None = Field(default=None, description="seconds that the evaluation might take")

    @staticmethod
    def of(entry: Entry, result: Result, after: str | None, *, load: int = 0, timeout: float | None = None) -> "Outcome":
        """Returns the outcome of an entry that a result shows."""
        measured = {mode: speed for mode in result.modes if (speed := result.speed_in(mode)) is not None}
        return Outcome(
            evaluator_version=result.evaluator_version,
            row=entry.row,
            file=entry.file,
            sha256=result.candidate.sha256,
            after=after,
            world_size=result.world_size,
            device=result.device,
            track=result.track,
            isolation=result.isolation,
            verdict=result.verdict.kind,
            phase=getattr(result.verdict, "phase", None),
            reason=result.verdict.reason,
            faster=any(speed.faster for speed in measured.values()),
            speedups={mode: speed.speedup for mode, speed in measured.items()},
            flags=result.flags,
            stage_seconds=dict(result.stage_seconds),
            node=str(result.node) if result.node.place.shares_gpus else node_class(result.environment),
            torch=str(result.environment["software"]["torch"]),
            load=load,
            timeout=timeout,
        )

    @property
    def seconds(self) -> float:
        """The duration of the judgement."""
        return round(sum(self.stage_seconds.values()), 3)

    @property
    def honest_class(self) -> str:
        """Returns what the outcome says of an honest candidate.

        ``correct``, ``overloaded``, ``not_run`` and ``harness_error`` accuse nobody; every other verdict is ``false``.
        """
        if self.verdict != "correct" and "overloaded" in self.flags:
            return "overloaded"
        return self.verdict if self.verdict in ("correct", "not_run", "harness_error") else "false"

    @property
    def identity(self) -> tuple[str, ...]:
        """The fields that judgements must share to be counted together."""
        return identity(self.evaluator_version, self.sha256, self.world_size, self.device, self.track, self.isolation)


def identity(version: str, sha256: str, world_size: int, device: str, track: str, isolation: str) -> tuple[str, ...]:
    """Returns an identity; see :attr:`Outcome.identity`."""
    return (version, sha256, str(world_size), device, track, isolation)


def objection(entry: Entry, outcome: Outcome) -> str | None:
    """Returns the reason why an outcome is not what the table promises; None if it is."""
    accepted = entry.accepted(outcome.device)
    if outcome.verdict not in accepted:
        return f"expected {' or '.join(accepted)}, got {outcome.verdict} ({outcome.reason})"
    if entry.kind == "cheat" and outcome.faster and entry.wins_at_most is None:
        return "its trick made it faster"
    if entry.phase is not None and outcome.phase != entry.phase:
        return f"expected {outcome.verdict} in phase {entry.phase}, got it in {outcome.phase}"
    if missing := sorted(set(entry.flags) - set(outcome.flags)):
        return f"expected the flag {', '.join(missing)}, got {', '.join(outcome.flags) or 'none'}"
    return None


def read_outcomes(path: Path) -> list[Outcome]:
    """Reads the outcomes in a file; none if it does not exist. Raises :class:`UsageError` for a line of another version."""
    outcomes = []
    for number, line in enumerate(whole_lines(path) if path.is_file() else [], 1):
        try:
            outcomes.append(Outcome.model_validate_json(line))
        except ValidationError as error:
            first = error.errors()[0]
            raise UsageError(
                f"{path}, line {number} is not an outcome of this version ({first['msg']} at {first['loc']}); "
                "choose another folder with --out"
            ) from None
    return outcomes


def totals(pairs: Sequence[tuple[Entry, Outcome]]) -> dict[str, int]:
    """Counts judgements: ``bad`` and ``bad_ok`` of cheats and bugs, ``good`` and ``good_ok`` of legitimate candidates that were run."""
    counts = dict.fromkeys(("bad", "bad_ok", "good", "good_ok"), 0)
    for entry, outcome in pairs:
        if entry.accepted(outcome.device) == ("not_run",):
            continue
        side = "good" if entry.kind == "legitimate" else "bad"
        counts[side] += 1
        counts[f"{side}_ok"] += objection(entry, outcome) is None
    return counts
