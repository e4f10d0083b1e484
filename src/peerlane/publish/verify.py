"""Compares what a bundle claims with what another evaluation of its candidates found.

The author of a bundle claims; the keeper of a leaderboard checks. All room in the comparison comes from the keeper's measurement.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field, ValidationError

from peerlane.common.files import read_regular
from peerlane.common.version import __version__
from peerlane.errors import FileRefused, UsageError
from peerlane.publish.bundle import Bundle
from peerlane.results.record import Record
from peerlane.results.result import Result
from peerlane.results.speed_record import ModeSpeed

Agreement = Literal["confirmed", "verdict_only", "differs", "not_judged"]
"""confirmed: the verdict, and the speeds if any were claimed. verdict_only: claimed speeds were not measured again on such a machine, or
too coarsely."""
SPEED_MARGIN = 0.1
"""A claimed speed may be larger by this much, and by what the keeper's own measurement leaves open."""
COARSEST = 0.5
"""A measurement that leaves more open than this says nothing about a claim: a candidate could otherwise make room by disturbing it."""


_MOST_BYTES = 256 << 20


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
    """The outcome for a bundle, as a file beside it. The keeper of a leaderboard writes it: whoever runs ``peerlane verify``."""

    format: Literal[2] = 2
    bundle_sha256: str
    peerlane: str
    verified_at: datetime = Field(default_factory=lambda: datetime.now(UTC))
    node_classes: tuple[str, ...]
    claimed: int = Field(ge=1, description="results in the bundle")
    findings: tuple[Finding, ...]
    results: tuple[Result, ...] = Field(description="the keeper's, one for every finding")
    environments: dict[str, dict[str, Any]] = Field(description="of these results, by hash")

    def keepers_results(self) -> list[Result]:
        """Returns the keeper's results with their environments."""
        return [result.model_copy(update={"environment": self.environments.get(result.environment_hash, {})}) for result in self.results]

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
    """Properties that a claim and its check share."""

    problem: int
    sha256: str
    preset: str
    world_size: int
    variant: str
    track: str
    cases: str

    @classmethod
    def of(cls, result: Result) -> "Question":
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
    found = list({Question.of(check): check for _, check in pairs}.values())
    return Verification(
        bundle_sha256=bundle.sha256,
        peerlane=__version__,
        node_classes=tuple(dict.fromkeys(str(check.node) for _, check in pairs)),
        claimed=len(claims),
        findings=tuple(compare(claim, check) for claim, check in pairs),
        results=tuple(found),
        environments={check.environment_hash: check.environment for check in found},
    )


def compare(claim: Result, check: Result) -> Finding:
    """Compares a claim with its check. Speeds compare within one class of machine alone."""
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
    if check.says_nothing:
        return "not_judged", f"{check.verdict.kind}: {check.verdict.reason}"
    if claim.verdict.kind != check.verdict.kind:
        return "differs", f"claimed {claim.verdict.kind}, found {check.verdict.kind}: {check.verdict.reason}"
    claimed = {mode: speed for mode in claim.modes if (speed := claim.speed_in(mode)) is not None}
    if not claimed:
        return "confirmed", ""
    if claim.node != check.node:
        return "verdict_only", f"claimed on {claim.node}, judged on {check.node}"
    if "kittens" in (protocols := (claim.timing_protocol, check.timing_protocol)) and protocols[0] != protocols[1]:
        return "verdict_only", f"timed by protocol {protocols[0]}, judged by {protocols[1]}"
    said: list[str] = []
    coarse: list[str] = []
    for mode, speed in claimed.items():
        found = check.speed_in(mode)
        if found is None:
            why = next((item for item in check.speed if item.mode == mode), None)
            if why is not None and why.status == "failed":
                return "differs", f"{mode}: claimed {_text(speed)}, found that it failed: {why.reason}"
            coarse.append(f"{mode}: not measured again")
        elif (open_part := _left_open(found)) > COARSEST:
            coarse.append(f"{mode}: the measurement is too coarse to confirm a speed: it leaves {open_part:.0%} open")
        else:
            said += [f"{mode}: {text}" for text in _excesses(speed, found)]
    if said:
        return "differs", "; ".join(said)
    return ("verdict_only", "; ".join(coarse)) if coarse else ("confirmed", "")


def _left_open(speed: ModeSpeed) -> float:
    """Returns the share by which another honest measurement may differ: the noise floor and half of the interval."""
    return speed.noise_floor + speed.speedup.half_width


def _excesses(claim: ModeSpeed, check: ModeSpeed) -> Iterator[str]:
    """Names the figures of a claim that the keeper's check does not bear out. The claim's own noise floor and interval give no room."""
    room = (1 + SPEED_MARGIN) * (1 + _left_open(check))
    ends = [(getattr(claim.speedup, name), getattr(check.speedup, name)) for name in ("low", "median", "high")]
    if any(claimed > found * room for claimed, found in ends):
        yield f"claimed {_text(claim)}, found {_text(check)}"
    found_shares = {item.ceilings: item.candidate for item in check.utilisation}
    for item in claim.utilisation:
        share = found_shares.get(item.ceilings)
        if share is not None and item.candidate > share * room:
            yield f"claimed {item.candidate:.0%} of the roofline ({item.ceilings}), found {share:.0%}".replace("%", " %")


def _text(speed: ModeSpeed) -> str:
    return f"{speed.speedup.median:.2f} [{speed.speedup.low:.2f}, {speed.speedup.high:.2f}]"


def verification_file(bundle: Path) -> Path:
    return bundle.with_name(f"{bundle.name}.verified.json")


def read_verification(bundle: Bundle) -> Verification | None:
    """The verification beside a bundle; None if there is none, or one of another bundle. Raises UsageError for a damaged file."""
    file = verification_file(bundle.path)
    if not file.is_file():
        return None
    try:
        found = Verification.model_validate_json(read_regular(file, _MOST_BYTES))
    except (FileRefused, ValidationError) as error:
        why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise UsageError(f"{file} cannot be used ({why}); delete it and run `peerlane verify {bundle.path}` again") from None
    return found if found.bundle_sha256 == bundle.sha256 else None
