"""Calibration: how far the reference, alternative solutions and wrong answers of every case are from what is allowed, on real ranks."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ValidationError

from peerlane import problems
from peerlane.common.place import Device, Place
from peerlane.common.version import __version__
from peerlane.common.words import counted
from peerlane.errors import UsageError
from peerlane.evaluate.messages import Request
from peerlane.evaluate.plan import must_have_presets, presets_of
from peerlane.evaluate.processes.rank_group import GroupFailure
from peerlane.evaluate.processes.session import Session, case_id
from peerlane.evaluate.rank_interface import TrustedInterface
from peerlane.hardware.environment import record as record_environment
from peerlane.hardware.virtual_node import VirtualNode, share_gpus
from peerlane.problems.contract.calibration import WRONG_LIMIT, Margins, worst
from peerlane.problems.contract.count import Count, Step, cost_faults
from peerlane.problems.contract.spec import Case, Problem
from peerlane.results.json_lines import append_lines, make_appendable, whole_lines
from peerlane.results.record import Ratio, Record
from peerlane.settings import Deadlines

Ratios = dict[str, Ratio]

_NOT_CALIBRATED = "not calibrated"


class Reach(Record):
    """The distance of a wrong answer from passing: the ratio of its best case, and which case that is; of a transport fault, that of the
    case which refuses it most clearly."""

    ratio: Ratio
    case: str


class Calibration(Record):
    """The margins of one problem's preset at one world size: the worst over its cases and ranks.

    A ratio is an error divided by the allowed one; right iff at most 1.
    """

    schema_version: Literal[2] = 2
    evaluator_version: str
    torch_version: str
    device: str
    """``cpu``, or the GPU's name"""
    problem: int
    slug: str
    variant: str
    preset: str
    world_size: int
    cases: tuple[str, ...]
    reference: Ratios
    """by output"""
    variants: dict[str, Ratios]
    wrong_answers: dict[str, Reach]
    steps: tuple[Step, ...]
    """what the reference did on rank 0 in the timed case: its collectives, and the operators between them"""
    complaints: tuple[str, ...]

    @property
    def key(self) -> tuple[str, ...]:
        """The identity of the calibration: a second run with the same key has nothing to add."""
        return (self.evaluator_version, self.device, str(self.problem), self.variant, self.preset, str(self.world_size))

    @property
    def finished(self) -> bool:
        """True if every case could be calibrated; if not, it is to be done again."""
        return not any(_NOT_CALIBRATED in line for line in self.complaints)

    @property
    def weakest(self) -> tuple[str, Reach] | None:
        """The wrong answer that comes nearest to passing."""
        return min(self.wrong_answers.items(), key=lambda item: item[1].ratio) if self.wrong_answers else None


@dataclass(frozen=True)
class CalibrationPlan:
    """A plan of calibrations: problems (``"1-8,13"`` or ``"all"``), presets, world sizes, a device, a file of records to add to.

    ``ranks_per_gpu``: as in an evaluation.
    """

    problems: str = "all"
    presets: tuple[str, ...] = ("small",)
    world_sizes: tuple[int, ...] = (2, 4)
    device: Device = "cpu"
    out: Path | None = None
    deadlines: Deadlines = field(default_factory=Deadlines)
    ranks_per_gpu: int = 0


def read_calibrations(path: Path) -> list[Calibration]:
    """Reads the records of a file, the newest of every key; none if there is no file. Raises UsageError for a line that is no record."""
    if not path.exists():
        return []
    try:
        records = (Calibration.model_validate_json(line) for line in whole_lines(path) if line.strip())
        return list({item.key: item for item in records}.values())
    except ValidationError as error:
        raise UsageError(
            f"{path} holds a line that is no calibration of this version ({error.errors()[0]['msg']}); name another file with --out"
        ) from None


@dataclass(frozen=True)
class Job:
    """One record to make: the cases of one preset, in order."""

    problem: Problem
    variant: str
    preset: str
    world_size: int
    cases: tuple[Case, ...]


def jobs_of(plan: CalibrationPlan, world_size: int) -> list[Job]:
    """Returns all records of the plan at a world size; problems that do not run on so many ranks have none. Raises :class:`UsageError`."""
    selected = problems.select(plan.problems)
    must_have_presets(selected, plan.presets)
    jobs = [
        Job(problem, variant, preset, world_size, tuple(case for case in problem.cases(preset, world_size, variant)))
        for problem in selected
        if world_size in problem.world_sizes
        for preset in presets_of(problem, plan.presets, world_size)
        for variant in problem.variants
    ]
    return [job for job in jobs if job.cases]


def job_key(job: Job, device: str) -> tuple[str, ...]:
    """Returns the key that a job's record will have."""
    return (__version__, device, str(job.problem.id), job.variant, job.preset, str(job.world_size))


def calibrate(plan: CalibrationPlan, tell: Callable[[str], None] = lambda _: None) -> Iterator[Calibration]:
    """Calibrates what the plan names and its file does not hold yet; records are appended as they come.

    A case that cannot be calibrated (out of memory, a defect) leaves a complaint that says so. Raises :class:`UsageError` if the machine
    has too few GPUs, a world size has no case, or the file is not one of records.
    """
    device = device_name(plan)
    for world_size in plan.world_sizes:
        if not jobs_of(plan, world_size):
            raise UsageError(
                f"nothing to calibrate on {counted(world_size, 'rank')}: expected world sizes for which a chosen problem and preset "
                "have cases, as "
                "`peerlane show NUMBER --world-size W` lists them"
            )
    if plan.out is not None:
        make_appendable(plan.out)
    done = set() if plan.out is None else {item.key for item in read_calibrations(plan.out) if item.finished}
    for world_size in plan.world_sizes:
        jobs = [job for job in jobs_of(plan, world_size) if job_key(job, device) not in done]
        if not jobs:
            continue
        with Session(plan.device, world_size, plan.deadlines, node=_shared_node(plan, world_size)) as session:
            for number, job in enumerate(jobs, 1):
                tell(f"[{number}/{len(jobs)}] {job.problem.id} {job.problem.slug} {job.preset} W={world_size}")
                record = _record(job, device, [_margins(session, case) for case in job.cases])
                if plan.out is not None:
                    append_lines(plan.out, record.model_dump_json().encode())
                yield record


def device_name(plan: CalibrationPlan) -> str:
    """Returns the name of the device in records; raises UsageError if the machine has too few GPUs."""
    if not Place.of(plan.device).has_gpus:
        return plan.device
    name, node = str(record_environment()["gpus"][0]["name"]), _shared_node(plan, max(plan.world_sizes))
    return name if node is None else f"{name}, {counted(node.ranks_per_gpu, 'rank')} on each"


def _shared_node(plan: CalibrationPlan, world_size: int) -> VirtualNode | None:
    """The virtual node where ranks share GPUs; raises UsageError if the machine has too few GPUs for them."""
    if not Place.of(plan.device).has_gpus:
        return None
    node = share_gpus(world_size, torch.cuda.device_count(), plan.ranks_per_gpu or None)
    if node is None:
        raise UsageError(f"{counted(world_size, 'rank')} on {counted(torch.cuda.device_count(), 'GPU')}: use --ranks-per-gpu auto")
    return node if node.ranks_per_gpu > 1 else None


def _margins(session: Session, case: Case) -> Margins | str:
    try:
        answers = session.trusted.ask(Request(TrustedInterface.measure_margins, case_id(case)), "correctness", session.deadlines.trusted)
    except GroupFailure as failure:
        session.drop_trusted()
        return str(failure).strip().splitlines()[-1]
    margins = worst(list(map(_parsed, answers)))
    problem = problems.get(case.problem)
    margins.faults += cost_faults([problem.cost(case, rank) for rank in range(case.world_size)], margins.counts)
    return margins


def _parsed(message: dict[str, Any]) -> Margins:
    counts = [Count([Step(**step) for step in count["steps"]], count["output_bytes"]) for count in message["counts"]]
    return Margins(**{**message, "counts": counts})


def _record(job: Job, device: str, of_cases: Sequence[Margins | str]) -> Calibration:
    complaints: list[str] = []
    variants: dict[str, Ratios] = {}
    wrong_answers: dict[str, Reach] = {}
    reference: Ratios = {}
    faults: dict[str, Reach] = {}
    for case, margins in zip(job.cases, of_cases, strict=True):
        if isinstance(margins, str):
            complaints.append(f"{case.label}: {_NOT_CALIBRATED}: {margins}")
            continue
        complaints += [f"{case.label}: {line}" for line in margins.complaints()]
        _enlarge(reference, margins.reference)
        for name, ratios in margins.variants.items():
            _enlarge(variants.setdefault(name, {}), ratios)
        for name, ratio in margins.reach().items():
            if name not in wrong_answers or ratio < wrong_answers[name].ratio:
                wrong_answers[name] = Reach(ratio=_rounded(ratio), case=case.label)
        for name, ratios in margins.transport.items():
            if ratios and (ratio := _rounded(max(ratios.values()))) >= faults.get(name, Reach(ratio=0.0, case="")).ratio:
                faults[name] = Reach(ratio=ratio, case=case.label)
    weak = {name: reach.ratio for name, reach in faults.items() if reach.ratio < WRONG_LIMIT}
    complaints += [f"transport fault {name}: ratio {ratio:.3g} at most" for name, ratio in weak.items()]
    timed = of_cases[0]
    steps = () if isinstance(timed, str) or not timed.counts else tuple(timed.counts[0].steps)
    return Calibration(
        evaluator_version=__version__,
        torch_version=torch.__version__,
        device=device,
        problem=job.problem.id,
        slug=job.problem.slug,
        variant=job.variant,
        preset=job.preset,
        world_size=job.world_size,
        cases=tuple(case.label for case in job.cases),
        reference=reference,
        variants=variants,
        wrong_answers=wrong_answers | faults,
        steps=steps,
        complaints=tuple(complaints),
    )


def _enlarge(into: Ratios, ratios: Ratios) -> None:
    for name, ratio in ratios.items():
        into[name] = max(into.get(name, 0.0), _rounded(ratio))


def _rounded(ratio: float) -> float:
    """Rounds to four digits: more would be noise that fills the file."""
    return float(f"{ratio:.4g}")


def sound(records: Sequence[Calibration]) -> bool:
    """Tells whether nothing is wrong with any of these calibrations."""
    return not any(record.complaints for record in records)
