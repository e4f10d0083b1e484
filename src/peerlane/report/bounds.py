"""The bound of a stored result by today's cost model, and the time that a known algorithm reaches at the rates measured on its node."""

import functools

from peerlane import problems
from peerlane.errors import UsageError
from peerlane.hardware.ceilings import Ceilings
from peerlane.hardware.profiles import PROFILES, HardwareProfile
from peerlane.hardware.roofline import datasheet_peaks, roofline, steps_us
from peerlane.problems import Case, Problem
from peerlane.results.result import Result


def bound_us(result: Result) -> float | None:
    """Returns the bound by the datasheet of the result's GPUs; None without a speed there. Where the suite has the case no more, or not for
    so many ranks, it is the one that was stored."""
    stored = next((item for speed in result.speeds for item in speed.utilisation if item.ceilings == "datasheet"), None)
    if stored is None:
        return None
    if (found := _timed(result)) is None:
        return stored.bound_us
    problem, case = found
    return _bound_us(problem.id, case.preset, case.world_size, case.variant, case.nodes, stored.profile)


def attainable_us(result: Result, ceilings: Ceilings) -> dict[str, float] | None:
    """Returns the steps of the problem's algorithm with their times; None without one, and where the node's rates were not measured."""
    profile = _profile(next((item.profile for speed in result.speeds for item in speed.utilisation), ""))
    if profile is None or not str(result.node).startswith(ceilings.node) or (found := _timed(result)) is None:
        return None
    problem, case = found
    if isinstance(problem.attainable, str):
        return None
    steps = [problem.attainable.steps(case, rank) for rank in range(case.world_size)]
    times = steps_us(steps, ceilings, profile, launched=not problem.graph)
    return None if times is None else {step.name: time for step, time in zip(steps[0], times, strict=True)}


def _timed(result: Result) -> tuple[Problem, Case] | None:
    """Returns the problem and the timed case, as they are today."""
    try:
        problem = problems.get(result.problem.id)
        return problem, problem.cases(result.preset, result.world_size, result.problem.variant)[0]
    except (UsageError, IndexError):
        return None


@functools.cache
def _bound_us(number: int, preset: str, world_size: int, variant: str, nodes: int, profile_name: str) -> float:
    profile = _profile(profile_name)
    assert profile is not None, "a stored datasheet is a known one"
    problem = problems.get(number)
    case = problem.cases(preset, world_size, variant, nodes)[0]
    return roofline([problem.cost(case, rank) for rank in range(world_size)], datasheet_peaks(profile)).bound_us


def _profile(name: str) -> HardwareProfile | None:
    return next((profile for profile in PROFILES if profile.name == name), None)
