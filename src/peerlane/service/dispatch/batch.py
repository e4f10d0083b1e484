"""A few evaluations in a process of their own on a node: ``python -m peerlane.service.dispatch.batch``, a pickled plan on stdin.

Only :func:`.run_batch` starts it; whoever calls that never touches CUDA itself.
"""

import json
import os
import pickle
import sys
from collections.abc import Sequence
from dataclasses import replace

from peerlane.errors import PeerlaneError
from peerlane.evaluate.candidates import CandidateFile
from peerlane.evaluate.plan import EvaluationPlan, Job
from peerlane.results.result import Result
from peerlane.sandbox.process_tree import die_with_parent


def batch_plan(plan: EvaluationPlan, jobs: Sequence[Job]) -> EvaluationPlan:
    """A plan for these jobs alone, which are of one kind (see :func:`.group`). Candidates travel as text, in place of their files."""
    first = jobs[0]
    return replace(
        plan,
        candidates=tuple(_portable(job) for job in jobs),
        problems=None,
        presets=(first.preset,),
        world_sizes=(first.world_size,),
        variant=first.variant,
        track=first.track,
        out=None,
    )


def _portable(job: Job) -> CandidateFile:
    candidate = replace(job.candidate, problem=job.problem.id)
    source = candidate.source()
    return candidate if source is None else replace(candidate, text=source.encode("latin-1"))


def write_result(result: Result) -> str:
    """A line for :func:`.run_batch`."""
    return json.dumps({**result.model_dump(mode="json"), "environment": result.environment})


def main() -> int:
    """The process: nothing but results goes to stdout. It ends with its worker, for the farm then gives the node more work."""
    from peerlane.evaluate.processes.prestart import early_start

    die_with_parent(os.getppid())
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    plan: EvaluationPlan = pickle.load(sys.stdin.buffer)
    try:
        with early_start(plan.device, plan.isolation):
            from peerlane.evaluate.evaluator import evaluate  # torch, which takes seconds

            results = evaluate(plan)
    except PeerlaneError as error:
        print(error, file=sys.stderr)
        return 1
    for result in results:
        print(write_result(result), file=out)
    out.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
