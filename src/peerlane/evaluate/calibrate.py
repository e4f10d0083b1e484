"""Calibration: how far the reference, honest variants and wrong answers of every case are from what is allowed, on real ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

import peerlane
from peerlane import problems
from peerlane.errors import HarnessError, UsageError
from peerlane.evaluate.evaluation import Device, presets_of
from peerlane.evaluate.groups import GroupFailure
from peerlane.evaluate.session import Session, case_request
from peerlane.evaluate.store import append_line, whole_lines
from peerlane.problems._calibration import Margins, worst
from peerlane.problems._count import Count, Step, cost_faults
from peerlane.problems._spec import Case
from peerlane.settings import Deadlines

Ratios = dict[str, float]


class CountedStep(BaseModel):
    """See :class:`peerlane.problems._count.Step`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str
    times: int
    ranks: int
    egress_bytes: float
    ingress_bytes: float
    matmul_flops: float
    touched_bytes: float


class Calibration(BaseModel):
    """The margins of one case, the worst over its ranks. A ratio is an error divided by the allowed one, by output; right iff at most 1."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=True, ser_json_inf_nan="strings")

    schema_version: Literal[1] = 1
    evaluator_version: str
    torch_version: str
    device: str
    """``cpu``, or the GPU's name"""
    problem: int
    slug: str
    preset: str
    label: str
    variant: str
    world_size: int
    reference: Ratios
    variants: dict[str, Ratios]
    nulls: dict[str, Ratios]
    steps: tuple[CountedStep, ...]
    """what the reference did on rank 0: its collectives, and the operators between them"""
    complaints: tuple[str, ...]

    @property
    def key(self) -> tuple[str, ...]:
        """Identifies the calibration: a second run with the same key has nothing to add."""
        return (self.evaluator_version, self.device, str(self.problem), self.preset, self.label, str(self.world_size))

    @property
    def margins(self) -> Margins:
        """The ratios as :class:`Margins`."""
        return Margins(reference=self.reference, variants=self.variants, nulls=self.nulls)


@dataclass(frozen=True)
class CalibrationPlan:
    """What to calibrate: problems (``"1-8,13"`` or ``"all"``), presets, world sizes, a device, a file of records to add to."""

    problems: str = "all"
    presets: tuple[str, ...] = ("small",)
    world_sizes: tuple[int, ...] = (2, 4)
    device: Device = "cpu"
    out: Path | None = None
    deadlines: Deadlines = field(default_factory=Deadlines)


def read_calibrations(path: Path) -> list[Calibration]:
    """The records of a file, oldest first; none if there is no file. Raises HarnessError for a line that is no record."""
    if not path.exists():
        return []
    try:
        return [Calibration.model_validate_json(line) for line in whole_lines(path)]
    except ValidationError as error:
        raise HarnessError(f"{path} holds a line that is no calibration of this version: {error.errors()[0]['msg']}") from None


def cases_of(plan: CalibrationPlan, world_size: int) -> list[Case]:
    """All cases of the plan at a world size, of every variant; problems that do not run on so many ranks have none."""
    return [
        case
        for problem in problems.select(plan.problems)
        if world_size in problem.world_sizes
        for preset in presets_of(problem, plan.presets)
        for variant in problem.variants
        for case in problem.cases(preset, world_size, variant)
        if case.variant == variant
    ]


def calibrate(plan: CalibrationPlan, tell: Callable[[str], None] = lambda _: None) -> Iterator[Calibration]:
    """Calibrates what the plan names and its file does not hold yet; records are appended as they come.

    A case that cannot be calibrated (out of memory, a defect) yields a record whose complaint says so. Raises :class:`UsageError` if the
    machine has too few GPUs.
    """
    node = _device_name(plan)
    done = set() if plan.out is None else {item.key for item in read_calibrations(plan.out)}
    for world_size in plan.world_sizes:
        cases = [case for case in cases_of(plan, world_size) if _key(case, node) not in done]
        if not cases:
            continue
        with Session(plan.device, world_size, plan.deadlines) as session:
            for number, case in enumerate(cases, 1):
                tell(f"[{number}/{len(cases)}] {case.key}")
                record = _record(case, node, _margins(session, case))
                if plan.out is not None:
                    append_line(plan.out, record.model_dump_json().encode())
                yield record


def _device_name(plan: CalibrationPlan) -> str:
    if plan.device == "cpu":
        return "cpu"
    if torch.cuda.device_count() < max(plan.world_sizes):
        raise UsageError(f"{max(plan.world_sizes)} ranks need as many GPUs; this machine has {torch.cuda.device_count()}")
    return torch.cuda.get_device_name(0)


def _key(case: Case, node: str) -> tuple[str, ...]:
    return (peerlane.__version__, node, str(case.problem), case.preset, case.label, str(case.world_size))


def _margins(session: Session, case: Case) -> Margins | str:
    try:
        answers = session.trusted.ask({"op": "margins", **case_request(case)}, "correctness", session.deadlines.trusted)
    except GroupFailure as failure:
        session.drop_trusted()
        return str(failure).strip().splitlines()[-1]
    found = worst([_parsed(answer["margins"]) for answer in answers])
    problem = problems.get(case.problem)
    found.faults += cost_faults([problem.cost(case, rank) for rank in range(case.world_size)], found.counts)
    return found


def _parsed(message: dict[str, Any]) -> Margins:
    counts = [Count([Step(**step) for step in count["steps"]], count["output_bytes"]) for count in message["counts"]]
    return Margins(**{**message, "counts": counts})


def _record(case: Case, node: str, found: Margins | str) -> Calibration:
    margins = Margins(counts=[Count()]) if isinstance(found, str) else found
    return Calibration(
        evaluator_version=peerlane.__version__,
        torch_version=torch.__version__,
        device=node,
        problem=case.problem,
        slug=problems.get(case.problem).slug,
        preset=case.preset,
        label=case.label,
        variant=case.variant,
        world_size=case.world_size,
        reference=_rounded(margins.reference),
        variants={name: _rounded(ratios) for name, ratios in margins.variants.items()},
        nulls={name: _rounded(ratios) for name, ratios in margins.nulls.items()},
        steps=tuple(CountedStep(**asdict(step)) for step in margins.counts[0].steps),
        complaints=(f"not calibrated: {found}",) if isinstance(found, str) else tuple(margins.complaints()),
    )


def _rounded(ratios: Ratios) -> Ratios:
    """To four digits: more would be noise that fills the file."""
    return {name: float(f"{ratio:.4g}") for name, ratio in ratios.items()}


def sound(records: Sequence[Calibration]) -> bool:
    """Whether nothing is wrong with any of them."""
    return not any(record.complaints for record in records)
