"""Places where `peerlane eval` judges: on this machine, on a service, or on many nodes by Ray or Slurm.

collect.py keeps what comes in; batch.py is the process that judges on a node; farm.py decides which node gets what.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from peerlane.errors import UsageError

if TYPE_CHECKING:
    from peerlane.evaluate.evaluator import Progress
    from peerlane.evaluate.plan import EvaluationPlan
    from peerlane.results.result import Result

PLACES = "local, the URL of a service, ray, ray:ADDRESS, slurm or slurm:PARTITION"


class Dispatcher(Protocol):
    """Judges a plan somewhere."""

    def world_sizes(self) -> tuple[int, ...]:
        """Numbers of ranks to judge on where the user names none; empty: those of this machine."""

    def run(self, plan: EvaluationPlan, progress: Progress) -> list[Result]:
        """All results in the plan's order; each is stored in ``plan.out`` as it comes, and what is there already is not judged again.

        Raises :class:`UsageError`, :class:`RunStopped` if some have no result in the end, and :class:`MissingDependency`.
        """


class Local:
    """This machine."""

    def world_sizes(self) -> tuple[int, ...]:
        return ()

    def run(self, plan: EvaluationPlan, progress: Progress) -> list[Result]:
        from peerlane.evaluate.evaluator import evaluate

        return evaluate(plan, progress)


def choose_dispatcher(place: str) -> Dispatcher:
    """The dispatcher that ``--on`` names; raises :class:`UsageError`."""
    kind, _, detail = place.partition(":")
    if place == "local":
        return Local()
    if kind in ("http", "https"):
        from peerlane.service.dispatch.remote import Remote

        return Remote(place)
    if kind == "ray":
        from peerlane.service.dispatch.by_ray import RayDispatcher

        return RayDispatcher(detail or None)
    if kind == "slurm":
        from peerlane.service.dispatch.by_slurm import SlurmDispatcher

        return SlurmDispatcher(partition=detail or None)
    raise UsageError(f"--on got {place!r}: expected {PLACES}")
