"""Runs of models made by hand, for tests of what is published about them. No figure here was measured."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from peerlane.common.problem_files import slugs
from peerlane.generate.run_folder import RunFolder, RunSettings, SampleKey, SampleRecord, StepRecord
from peerlane.generate.samples import Usage
from peerlane.results.result import CandidateInfo, Mechanism, ProblemInfo, Result
from peerlane.results.speed_record import ModeSpeed, Utilisation
from peerlane.results.verdict import BuildError, RuntimeFailure, Unstable
from sample_results import estimate, hung, measured, own_audit, result, text_of, wrong

CODE = '''\
"""Sample {sample} of {model} for problem {problem}."""

import torch
import torch.distributed as dist

KERNEL = r"""
extern "C" __global__ void add(float* out, const float* in, int n) {{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] += in[i];  // one element a thread
}}
"""


def solution(*args):
    x = args[0]
    everyone = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, x.contiguous())  # 3 lines of PyTorch
    return sum(part.float() for part in everyone).to(x.dtype)
'''


def timed(mode: str, draw: random.Random, speedup: float, bound_share: float) -> ModeSpeed:
    """A speed whose blocks scatter by two per cent, with both clocks."""
    reference_us = 40.0 / bound_share
    plain = measured(mode, reference_us, reference_us / speedup)

    def blocks(us: float, more: float = 0.0) -> tuple[float, ...]:
        return tuple(plain.calls_per_block * us * draw.gauss(1.0, 0.02) + more for _ in range(9))

    bound = {"profile": "H200 SXM", "bound_us": 40.0, "bound_by": draw.choice(["nvlink", "hbm", "tensor"])}
    return plain.model_copy(
        update={
            "reference_blocks_us": blocks(reference_us),
            "candidate_blocks_us": blocks(reference_us / speedup),
            "reference_clock_us": blocks(reference_us, 30.0),
            "candidate_clock_us": blocks(reference_us / speedup, 30.0),
            "utilisation": (
                Utilisation(ceilings="measured", reference=bound_share, candidate=min(1.0, bound_share * speedup), **bound),  # type: ignore[arg-type]
            ),
        }
    )


def judged(problem: int, candidate: CandidateInfo, draw: random.Random, good: float, **changes: Any) -> Result:
    """A result that is correct with probability ``good``."""
    about = {"candidate": candidate, "problem": ProblemInfo(id=problem, slug=slugs()[problem], variant="default"), **changes}
    if draw.random() < good:
        speedup, share = draw.lognormvariate(0.0, 0.5), 0.02 + 0.6 * random.Random(problem).random() ** 2
        name = draw.choice(["tma", "sm_load_store", "copy_engine", "nvls", "nccl"])
        return result(
            speed=(timed("eager", draw, 0.9 * speedup, share), timed("graph", draw, speedup, share)),
            audit=own_audit(),
            mechanisms=(
                Mechanism(name=name, confidence="seen", evidence="in an audited call"),  # type: ignore[arg-type]
                Mechanism(name="sm_load_store", confidence="possible", evidence="a kernel that stores to a peer ran"),
            ),
            **about,
        )
    failures = (
        lambda: wrong(**about),
        lambda: hung(**about),
        lambda: result(speed=(), verdict=BuildError(phase="build", message='kernel.cu(7): error: identifier "nope" is undefined'), **about),
        lambda: result(speed=(), verdict=RuntimeFailure(phase="first_call", rank=1, message="RuntimeError: sizes differ"), **about),
        lambda: result(
            speed=(), verdict=Unstable(case="c", rank=0, output="sum", detail="differs", wrong_slots=1, compared_slots=9), **about
        ),
    )
    return draw.choices(failures, weights=(5, 1, 3, 2, 1))[0]()


def make_run(
    path: Path,
    model: str,
    problems: Sequence[int],
    samples: int = 1,
    *,
    good: float = 0.5,
    kind: Literal["generate", "agent"] = "generate",
    code: str = CODE,
    name: str | None = None,
    prompt_version: str | None = None,
    **changes: Any,
) -> list[Result]:
    """A judged run in a folder; every twelfth sample holds no code. An agent has four steps an episode. ``name``: of all results."""
    draw = random.Random(model)
    run = RunFolder.open_or_create(path, RunSettings(kind=kind, model=model, world_size=4, prompt_version=prompt_version))
    results = []
    for problem in problems:
        for sample in range(samples):
            key = SampleKey(problem, sample)
            source = None if draw.random() < 1 / 12 else code.format(sample=sample, model=model, problem=problem)
            usage = Usage(input_tokens=4000, output_tokens=draw.randrange(800, 9000), cost_usd=0.01, calls=1)
            record = SampleRecord.of(key, "code" if source is not None else "no_code", usage, seconds=1.0, stop_reason="stop")
            run.write_sample(record, "a reply", source)
            if source is None:
                continue
            sha256 = run.sample(key).sha256
            assert sha256 is not None
            candidate = CandidateInfo(name=name or key.folder, labels={"model": model, "sample": sample}, sha256=sha256, backend="cuda")
            results.append(judged(problem, candidate, draw, good, **changes))
            if kind == "agent":
                for step in range(1, 5):
                    verdict = results[-1].verdict.kind if step == 4 else draw.choice(["build_error", "wrong_result", "correct"])
                    speedups = {"graph": (step / 4, step / 3.9, step / 3.8)} if verdict == "correct" else {}
                    run.write_step(key, StepRecord(step=step, tool="judge", verdict=verdict, sha256=sha256, speedups=speedups), source)
    (path / "results.jsonl").write_text(text_of(*results))
    return results


def reference_results(problems: Sequence[int], **changes: Any) -> list[Result]:
    """The references as their own candidates."""
    draw = random.Random(0)
    candidate = CandidateInfo(name="reference", sha256="1" * 64, backend="reference")
    about = {"candidate": candidate, **changes}
    return [
        result(
            problem=ProblemInfo(id=number, slug=slugs()[number], variant="default"),
            speed=(timed("eager", draw, 1.0, share), timed("graph", draw, 1.0, share)),
            **about,
        )
        for number in problems
        if (share := 0.02 + 0.6 * random.Random(number).random() ** 2)
    ]


__all__ = ["CODE", "estimate", "judged", "make_run", "reference_results", "timed"]
