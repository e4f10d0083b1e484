"""What is stored of a candidate's speed in a launch mode."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from peerlane.evaluate.results.record import Mode, Record


class Estimate(Record):
    """An estimate from ``n`` blocks or rounds, which is ``median`` by name, with its 95 % interval."""

    median: float = Field(gt=0)
    low: float = Field(gt=0)
    high: float = Field(gt=0)
    n: int = Field(ge=1)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.low <= self.median <= self.high:
            raise ValueError(f"an estimate needs low <= median <= high, got {self.low}, {self.median}, {self.high}")
        return self


class Utilisation(Record):
    """Time at the roofline bound, and the share of it that was reached (1.0: at the bound)."""

    ceilings: Literal["datasheet", "measured"]
    profile: str
    bound_us: float = Field(ge=0)
    bound_by: Literal["tensor", "vector", "hbm", "nvlink", "latency"]
    reference: float = Field(ge=0)
    candidate: float = Field(ge=0)


class ModeSpeed(Record):
    """Speed in one launch mode. Times are device times in microseconds, the slowest rank's."""

    status: Literal["measured"] = "measured"
    mode: Mode
    speedup: Estimate
    reference_us: Estimate
    candidate_us: Estimate
    noise_floor: float = Field(
        ge=0,
        description="relative half-width of what is known of the reference's speed in the candidate's own ranks; in earlier records of "
        "what was timed of it alone",
    )
    group_offset: float | None = Field(
        default=None,
        gt=0,
        description="the reference's speed in the candidate's own ranks over that in the trusted ones, which the speedup takes into "
        "account as far as it is certain; missing in older records",
    )
    reference_slowdown: float | None = Field(
        default=None, gt=0, description="the trusted reference's time next to the candidate, over that before; missing in older records"
    )
    reference_counted: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="the share of that time that counts: less than 1 where it took longer than before by more than what varies anyway",
    )
    slots_per_block: int = Field(ge=1)
    rounds: int = Field(ge=1)
    discarded_rounds: int = Field(ge=0, description="rounds in which the outer clock and the events disagreed")
    reference_blocks_us: tuple[float, ...]
    candidate_blocks_us: tuple[float, ...]
    scored_by: Literal["quantile", "mean", "locked", "middle_round", "graph", "median"] = Field(
        default="median",
        description="what is scored: the calls between two quantiles (the mean of all eager ones between the first and the third decile, "
        "of each block's replayed ones between the quartiles), or the mean of all, where the candidate's are more unequal than the "
        "reference's; or, where that is more, what locked calls take at least, or calls in the middle round, with what passes between "
        "them, or, of eager calls, four fifths of what graphs of them take. median: by an earlier evaluator",
    )
    candidate_p10_us: float = Field(gt=0)
    candidate_p90_us: float = Field(gt=0)
    clock_minus_events_us: float = Field(description="largest accepted excess of the outer clock over the events, per block")
    outer_excess_us: float | None = Field(
        default=None, description="how much larger it was than next to the reference, median of all rounds; missing in older records"
    )
    stretch_excess_us: tuple[float, ...] = Field(
        default=(),
        description="by how much a call of each longer stretch, which the outer clock alone timed, exceeded what the events say, next to "
        "the reference's; of candidates that claim to be faster",
    )
    locked_excess_us: float | None = Field(
        default=None,
        description="by how much more than the reference's locked calls exceeded their events, by the outer clock",
    )
    gaps_us: tuple[float, float] | None = Field(
        default=None,
        description="what usually passes between two calls, of the trusted reference and of the candidate, on the rank where it is most; "
        "missing in older records",
    )
    utilisation: tuple[Utilisation, ...]

    @property
    def faster(self) -> bool:
        """True when the interval's lower end is above 1 plus the noise floor."""
        return self.speedup.low > 1.0 + self.noise_floor


class NotMeasured(Record):
    """Why there is no speed in this mode."""

    status: Literal["not_measured"] = "not_measured"
    mode: Mode
    why: str = Field(min_length=1)


Speed = Annotated[ModeSpeed | NotMeasured, Field(discriminator="status")]
