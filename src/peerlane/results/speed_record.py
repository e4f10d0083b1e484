"""The stored speed of a candidate in a launch mode."""

import statistics
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from peerlane.results.record import Mode, Record

LARGE_COPIES = 0.25
"""The share of a block from which on swaps and copies make its speed uncertain."""


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

    @property
    def half_width(self) -> float:
        """Half the interval's length, relative to the median."""
        return (self.high - self.low) / 2 / self.median

    def scaled(self, factor: float) -> "Estimate":
        """This many times as much."""
        return Estimate(median=self.median * factor, low=self.low * factor, high=self.high * factor, n=self.n)


class Utilisation(Record):
    """Time at the roofline bound, and the share of it that was reached (1.0: at the bound)."""

    ceilings: Literal["datasheet", "measured"]
    profile: str
    bound_us: float = Field(ge=0)
    bound_by: Literal["tensor", "vector", "hbm", "nvlink", "network", "latency"]
    reference: float = Field(ge=0)
    candidate: float = Field(ge=0)


class ModeSpeed(Record):
    """Speed in one launch mode. Times are microseconds of the slowest rank; docs/judging.md has the protocol in ten steps."""

    status: Literal["measured"] = "measured"
    mode: Mode
    speedup: Estimate = Field(description="median over rounds of reference time over candidate time, corrected for the group offset")
    reference_us: Estimate = Field(description="per call: the candidate's time times the speedup, so the quotient of both is the speedup")
    candidate_us: Estimate = Field(description="per call: median over blocks")
    noise_floor: float = Field(ge=0, description="a speedup below 1 plus this may be noise: how well the group offset is known")
    group_offset: float = Field(
        default=1.0, gt=0, description="trusted ranks' time over that of the candidate's ranks, both running the reference, before loading"
    )
    group_offset_applied: bool = Field(default=False, description="the speedup was divided by the group offset")
    reference_slowdown: float = Field(
        default=1.0, gt=0, description="the reference's time beside the candidate over its time before the candidate was loaded"
    )
    calls_per_block: int = Field(ge=1)
    rounds: int = Field(ge=1)
    hand_off_us: float = Field(default=0.0, description="taken off every clock time: 90th percentile of the reference's clock minus events")
    copies_us: float = Field(default=0.0, ge=0, description="taken off every block: slot swaps and output copies, timed alone")
    copies_launch_us: float = Field(default=0.0, ge=0, description="the host's time to launch these copies, in eager mode")
    reference_blocks_us: tuple[float, ...] = Field(description="every block's event time")
    candidate_blocks_us: tuple[float, ...]
    reference_clock_us: tuple[float, ...] = Field(default=(), description="the same blocks by the supervisor's clock")
    candidate_clock_us: tuple[float, ...] = ()
    reference_launch_us: tuple[float, ...] = Field(default=(), description="the host's time to launch the calls of the same blocks")
    candidate_launch_us: tuple[float, ...] = ()
    utilisation: tuple[Utilisation, ...]
    flags: tuple[str, ...] = Field(
        default=(), description="slower_reference: the reference's time before loading counts instead; few_rounds: fewer than five rounds"
    )

    @property
    def faster(self) -> bool:
        """True when the interval's lower end is above 1 plus the noise floor."""
        return self.speedup.low > 1.0 + self.noise_floor

    @property
    def copies_matter(self) -> bool:
        """True when swaps and copies took more than a quarter of the candidate's usual block.

        The difference is then uncertain. In older results of eager mode it also flatters the faster side: the host's time of launching was
        taken off, which costs nothing while the device still computes.
        """
        return self.copies_us > LARGE_COPIES * statistics.median(self.candidate_blocks_us)


class Failed(Record):
    """A candidate that is correct when it is called went wrong in this launch mode."""

    status: Literal["failed"] = "failed"
    mode: Mode
    kind: str = Field(min_length=1, description="the verdict that the same failure has outside of this mode, such as hang")
    reason: str = Field(min_length=1, description="what went wrong, and where: rank, output, slot, case")


class NotMeasured(Record):
    """The reason why there is no speed in this mode."""

    status: Literal["not_measured"] = "not_measured"
    mode: Mode
    why: str = Field(min_length=1)


Speed = Annotated[ModeSpeed | Failed | NotMeasured, Field(discriminator="status")]
