"""Keeps track of what a dispatched run has and still lacks. Results of another class of nodes are never taken."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from peerlane.common.files import read_regular, write_atomically
from peerlane.common.version import __version__
from peerlane.common.words import counted
from peerlane.errors import HarnessError, RunStopped, UsageError
from peerlane.evaluate.candidates import candidate_info
from peerlane.evaluate.evaluator import Progress
from peerlane.evaluate.plan import EvaluationPlan, Job
from peerlane.results.identity import Identity, NodeClass
from peerlane.results.result import Result
from peerlane.results.store import ResultsStore
from peerlane.sandbox.isolation import Tier

FILE = "conditions.json"
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class Conditions:
    """Properties that all results of a run must share: by world size the class of nodes, the isolation, and the settings' hash."""

    classes: Mapping[int, NodeClass]
    isolation: Tier
    rules_hash: str

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Self:
        """Returns the facts that the check of a node reports."""
        classes = {int(size): NodeClass.model_validate(item) for size, item in told["classes"].items()}
        return cls(classes, told["isolation"], told["rules_hash"])

    @classmethod
    def of_earlier_run(cls, plan: EvaluationPlan) -> Self | None:
        """Those under which ``plan.out`` was begun, if results would still be comparable; a farm then takes no other class of nodes."""
        file = None if plan.out is None else plan.out / FILE
        if file is None or not os.path.lexists(file):
            return None
        data = read_regular(file, _MOST_BYTES)
        try:
            told = json.loads(data)
            same = told["evaluator_version"] == __version__ and told["rules_hash"] == plan.rules_hash
            found = cls.of(told) if same else None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UsageError(f"{file} does not hold the conditions of a run ({error!r}): delete it, or choose another --out") from None
        return found if found is not None and set(plan.world_sizes) <= found.classes.keys() else None

    @staticmethod
    def remember(plan: EvaluationPlan, told: Mapping[str, Any]) -> None:
        """Keeps them beside the results."""
        if plan.out is not None:
            plan.out.mkdir(parents=True, exist_ok=True)
            write_atomically(plan.out / FILE, json.dumps(told).encode())

    def identity(self, job: Job) -> Identity:
        """The identity of the result that a job will have."""
        return job.identity(self.classes[job.world_size], self.isolation, self.rules_hash)


class Collector:
    """Keeps the results of a plan's jobs.

    Args:
        plan: where they are stored.
        jobs: of the plan, in its order.
        conditions: which results are acceptable.
        progress: hears of them.
    """

    def __init__(self, plan: EvaluationPlan, jobs: Sequence[Job], conditions: Conditions, progress: Progress) -> None:
        self._jobs, self._conditions, self._progress = jobs, conditions, progress
        self._store = ResultsStore(plan.out) if plan.out is not None else None
        self._found: dict[int, Result] = {}
        for job in jobs:
            identity = conditions.identity(job)
            if self._store is not None and not plan.rerun and (known := self._store.find(identity, job.candidate.name)) is not None:
                same = known.candidate.name == job.candidate.name
                self._found[id(job)] = known if same else self._store_named(known, job)
        self.due = self.left()
        """jobs without a result, when the run began"""
        progress.started(len(self.due), len(jobs) - len(self.due))

    def keep(self, job: Job, result: Result) -> None:
        """Stores a result; raises :class:`HarnessError` if it comes from another class of nodes, and if it cannot be stored."""
        expected = self._conditions.classes[job.world_size]
        if result.node != expected:
            raise HarnessError(f"a result of {job.candidate.name} comes from {result.node}: expected {expected}; it is left out")
        self._found[id(job)] = result = self._store_named(result, job)
        self._progress.finished(result)

    def keep_batch(self, jobs: Sequence[Job], rows: Sequence[dict[str, Any]]) -> str | None:
        """Stores what :func:`.run_batch` gave for these jobs; returns why some of it could not be kept."""
        try:
            for job, result in zip(jobs, [Result.model_validate(row) for row in rows], strict=True):
                self.keep(job, result)
        except UsageError:
            raise
        except (HarnessError, ValueError) as fault:
            return str(fault)
        return None

    def left(self) -> list[Job]:
        """Jobs without a result."""
        return [job for job in self._jobs if id(job) not in self._found]

    def results(self, why: str = "") -> list[Result]:
        """All results, in order; raises :class:`RunStopped`, which holds those that there are, if one is missing."""
        found = [self._found[id(job)] for job in self._jobs if id(job) in self._found]
        if missing := len(self.left()):
            told = f": {why}" if why else ""
            raise RunStopped(f"no result of {counted(missing, 'evaluation')}{told}; the same command tries again", found)
        return found

    def _store_named(self, result: Result, job: Job) -> Result:
        """The result under the name that the job asks for: equal candidates share one evaluation."""
        result = result.model_copy(update={"candidate": candidate_info(job.candidate)})
        if self._store is not None:
            self._store.append(result)
        return result


def group(jobs: Sequence[Job], size: int) -> list[list[Job]]:
    """Batches of at most so many jobs that one plan can stand for: of one preset, world size, variant and track."""
    kinds: dict[tuple[object, ...], list[Job]] = {}
    for job in jobs:
        kinds.setdefault((job.world_size, job.preset, job.variant, job.track), []).append(job)
    return [same[first : first + size] for same in kinds.values() for first in range(0, len(same), size)]
