"""Compares what a bundle claims with what another evaluation of its candidates found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import Field, ValidationError

from peerlane.errors import UsageError
from peerlane.generate.attempts import UNJUDGED
from peerlane.publish.bundle import Bundle
from peerlane.results.record import Record
from peerlane.results.result import Result
from peerlane.results.speed_record import ModeSpeed
from peerlane.version import __version__

Agreement = Literal["confirmed", "verdict_only", "differs", "not_judged"]
"""confirmed: the verdict, and the speeds if any were claimed. verdict_only: claimed speeds were not measured again on such a machine."""
SPEED_MARGIN = 0.1
"""Two measurements of one speedup on machines of one class may lie this far apart, beyond their intervals and noise floors."""


class Finding(Record):
    """One claimed result and what became of it."""

    problem: int
    preset: str
    world_size: int
    candidate: str
    sha256: str
    agreement: Agreement
    said: str = Field(default="", description="where it differs, or why it was not judged")


class Verification(Record):
    """The outcome for a bundle, as a file beside it."""

    format: Literal[1] = 1
    bundle_sha256: str
    peerlane: str
    verified_at: datetime = Field(default_factory=lambda: datetime.now(UTC))
    node_classes: tuple[str, ...]
    claimed: int = Field(ge=1, description="results in the bundle")
    findings: tuple[Finding, ...]

    @property
    def standing(self) -> Literal["verified", "unverified", "differs"]:
        """verified: all results in the bundle were confirmed, speeds included. differs: at least one was not."""
        kinds = Counter(finding.agreement for finding in self.findings)
        if kinds["differs"]:
            return "differs"
        return "verified" if kinds["confirmed"] == self.claimed else "unverified"

    def __str__(self) -> str:
        kinds = Counter(finding.agreement for finding in self.findings)
        counts = [
            (kinds["confirmed"], "confirmed"),
            (kinds["verdict_only"], "confirmed without their speeds"),
            (kinds["differs"], "different"),
            (kinds["not_judged"], "not judged"),
            (self.claimed - len(self.findings), "not looked at"),
        ]
        return f"{self.standing}: of {self.claimed} results " + ", ".join(f"{number} {what}" for number, what in counts if number)


class Question(NamedTuple):
    """What a claim and its check have in common."""

    problem: int
    sha256: str
    preset: str
    world_size: int
    variant: str
    track: str
    cases: str

    @classmethod
    def of(cls, result: Result) -> Question:
        """The question that a result answers."""
        problem = result.problem
        return cls(problem.id, result.candidate.sha256, result.preset, result.world_size, problem.variant, result.track, result.cases)


@dataclass(frozen=True)
class PlanKey:
    """Claims that one evaluation can check."""

    preset: str
    world_size: int
    variant: str
    track: Literal["open", "custom"]
    cases: Literal["all", "timed"]
    modes: tuple[Literal["eager", "graph"], ...]


def plans(claims: Iterable[Result]) -> dict[PlanKey, list[Result]]:
    """The claims by the evaluation that checks them."""
    found: dict[PlanKey, list[Result]] = {}
    for claim in claims:
        key = PlanKey(claim.preset, claim.world_size, claim.problem.variant, claim.track, claim.cases, claim.modes)
        found.setdefault(key, []).append(claim)
    return found


def verification(bundle: Bundle, claims: Sequence[Result], checks: Iterable[Result]) -> Verification:
    """Each claim beside its check. Claims without a check were not looked at, and have no finding."""
    by_question = {Question.of(check): check for check in checks}
    pairs = [(claim, check) for claim in claims if (check := by_question.get(Question.of(claim))) is not None]
    return Verification(
        bundle_sha256=bundle.sha256,
        peerlane=__version__,
        node_classes=tuple(dict.fromkeys(str(check.node) for _, check in pairs)),
        claimed=len(claims),
        findings=tuple(compare(claim, check) for claim, check in pairs),
    )


def compare(claim: Result, check: Result) -> Finding:
    """Whether a check confirms a claim. Speeds compare within one class of machine alone."""
    agreement, said = _agreement(claim, check)
    hashes = (claim.problem.source_hash, check.problem.source_hash)
    if agreement == "differs" and None not in hashes and hashes[0] != hashes[1]:
        said += f"; problem {claim.problem.id} has changed since"
    return Finding(
        problem=claim.problem.id,
        preset=claim.preset,
        world_size=claim.world_size,
        candidate=claim.candidate.name,
        sha256=claim.candidate.sha256,
        agreement=agreement,
        said=said,
    )


def _agreement(claim: Result, check: Result) -> tuple[Agreement, str]:
    if check.verdict.kind in UNJUDGED:
        return "not_judged", f"{check.verdict.kind}: {check.verdict.reason}"
    if claim.verdict.kind != check.verdict.kind:
        return "differs", f"claimed {claim.verdict.kind}, found {check.verdict.kind}: {check.verdict.reason}"
    claimed = {mode: speed for mode in claim.modes if (speed := claim.speed_in(mode)) is not None}
    if not claimed:
        return "confirmed", ""
    if claim.node != check.node:
        return "verdict_only", f"claimed on {claim.node}, judged on {check.node}"
    said = []
    for mode, speed in claimed.items():
        found = check.speed_in(mode)
        if found is None:
            why = next((item for item in check.speed if item.mode == mode), None)
            if why is not None and why.status == "failed":
                return "differs", f"{mode}: claimed {_text(speed)}, found that it failed: {why.reason}"
            return "verdict_only", f"{mode}: not measured again"
        if not _near(speed, found):
            said.append(f"{mode}: claimed {_text(speed)}, found {_text(found)}")
    return ("differs", "; ".join(said)) if said else ("confirmed", "")


def _near(claim: ModeSpeed, check: ModeSpeed) -> bool:
    """Whether the claim's interval, widened by both noise floors and the margin, meets the check's. A claim that is too low is near."""
    room = (1 + SPEED_MARGIN) * (1 + claim.noise_floor) * (1 + check.noise_floor)
    return claim.speedup.low <= check.speedup.high * room


def _text(speed: ModeSpeed) -> str:
    return f"{speed.speedup.median:.2f} [{speed.speedup.low:.2f}, {speed.speedup.high:.2f}]"


def verification_file(bundle: Path) -> Path:
    """Where the verification of a bundle lies."""
    return bundle.with_name(f"{bundle.name}.verified.json")


def read_verification(bundle: Bundle) -> Verification | None:
    """The verification beside a bundle; None if there is none, or one of another bundle. Raises UsageError for a damaged file."""
    file = verification_file(bundle.path)
    if not file.is_file():
        return None
    try:
        found = Verification.model_validate_json(file.read_text(encoding="utf-8"))
    except (OSError, ValidationError) as error:
        raise UsageError(f"{file} is damaged ({error}); delete it and run `peerlane verify {bundle.path}` again") from None
    return found if found.bundle_sha256 == bundle.sha256 else None
