"""Results made by hand, for tests of what is printed about them. No figure here was measured."""

import json
import math
from datetime import UTC, datetime
from typing import Any

from peerlane.results.result import Audit, CandidateInfo, CaseEvidence, EnvironmentLine, ProblemInfo, Result
from peerlane.results.speed_record import Estimate, ModeSpeed, NotMeasured, Utilisation
from peerlane.results.verdict import Correct, Hang, WrongResult

ENVIRONMENT = {
    "gpus": [{"name": "NVIDIA H200"}] * 4,
    "interconnect": "NVLink",
    "driver": "580.1",
    "cpu": {"cores": 64},
    "software": {"torch": "2.11.0", "nccl": "2.28.9", "triton": None},
}
VIRTUAL = {**ENVIRONMENT, "virtual_node": {"ranks_per_gpu": 4, "sharing": "mps"}}


def estimate(median: float, spread: float = 0.02) -> Estimate:
    return Estimate(median=median, low=median * (1 - spread), high=median * (1 + spread), n=9)


def measured(mode: str, reference_us: float, candidate_us: float, noise_floor: float = 0.03) -> ModeSpeed:
    return ModeSpeed(
        mode=mode,  # type: ignore[arg-type]
        speedup=estimate(reference_us / candidate_us),
        reference_us=estimate(reference_us),
        candidate_us=estimate(candidate_us),
        noise_floor=noise_floor,
        calls_per_block=32,
        rounds=9,
        reference_blocks_us=(32 * reference_us,) * 9,
        candidate_blocks_us=(32 * candidate_us,) * 9,
        utilisation=(
            Utilisation(ceilings="datasheet", profile="H200 SXM", bound_us=7.0, bound_by="nvlink", reference=0.1, candidate=0.25),
            Utilisation(ceilings="measured", profile="H200 SXM", bound_us=9.0, bound_by="nvlink", reference=0.2, candidate=0.5),
        ),
    )


def own_audit(**changes: Any) -> Audit:
    """An audit that saw a kernel of the candidate's own and nothing else."""
    fields: dict[str, Any] = {
        "calls": 2,
        "block_modes": ("eager", "graph"),
        "kernels": {"own": 1},
        "copies": {},
        "memsets": 0,
        "operators": {},
        "other": 3,
        "kernel_names": ("two_shot",),
        "unrecorded_collectives": 0,
        "complete": True,
    }
    return Audit(**{**fields, **changes})


def result(**changes: Any) -> Result:
    """A correct candidate for problem 1, timed in both modes."""
    fields: dict[str, Any] = {
        "evaluator_version": "0.1.0",
        "run_id": "run",
        "finished_at": datetime(2026, 1, 2, tzinfo=UTC),
        "candidate": CandidateInfo(name="1_allreduce_cuda", path="examples/1_allreduce_cuda.py", sha256="0" * 64, backend="cuda"),
        "problem": ProblemInfo(id=1, slug="allreduce", variant="default"),
        "preset": "pkb",
        "world_size": 4,
        "device": "cuda",
        "modes": ("eager", "graph"),
        "isolation": "L1",
        "track": "open",
        "verdict": Correct(),
        "correctness": (CaseEvidence(case="1/pkb/bf16/w4", slots=16, integer_slots=4, timed_slots=8, max_error_over_tolerance=0.3),),
        "speed": (measured("eager", 40.0, 20.0), measured("graph", 30.0, 29.8)),
        "environment": ENVIRONMENT,
    }
    return Result(**{**fields, **changes})


def on_cpu(**changes: Any) -> Result:
    """A correct candidate on CPU ranks: no speed."""
    why = "device times need CUDA GPUs"
    speed = (NotMeasured(mode="eager", why=why), NotMeasured(mode="graph", why=why))
    return result(**{"device": "cpu", "speed": speed, **changes})


def wrong_result(**changes: Any) -> WrongResult:
    """A verdict."""
    fields = {"case": "1/small/ragged_bf16/w4", "phase": "correctness", "rank": 2, "slot": 3, "output": "sum", "index": (0, 7)}
    fields |= {"error_over_tolerance": math.inf, "detail": "elementwise: error 3, allowed 0.1", "got": 1.0, "expected": 4.0}
    return WrongResult(**{**fields, "wrong_ranks": (2,), **changes})


def wrong(**changes: Any) -> Result:
    """A candidate with wrong contents."""
    return result(**{"verdict": wrong_result(), "speed": (), **changes})


def text_of(*results: Result) -> str:
    """The file that these results make."""
    found = {item.environment_hash: item.environment for item in results}
    environments = (EnvironmentLine(environment_hash=name, environment=environment) for name, environment in found.items())
    return "".join(line.model_dump_json() + "\n" for line in (*environments, *results))


def again(item: Result) -> Result:
    """The result as a reader of its file gets it."""
    return Result.model_validate({**json.loads(item.model_dump_json()), "environment": item.environment})


def hung(**changes: Any) -> Result:
    """A candidate of which one rank did not return."""
    return result(**{"verdict": Hang(phase="first_call", ranks=(1,), deadline_s=20.0), "speed": (), **changes})
