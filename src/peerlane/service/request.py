"""Messages between clients and the service: the request for one evaluation, and the job that the service makes of it."""

import hashlib
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from peerlane.errors import CandidateNotFound, UnknownProblem, UsageError
from peerlane.evaluate.candidates import candidate_text
from peerlane.evaluate.plan import Cases, EvaluationPlan, Job, make_jobs
from peerlane.results.record import Mode, Track

State = Literal["queued", "running", "done", "failed", "cancelled"]
DEFAULT_NAME = "candidate"
ENDED: tuple[State, ...] = ("done", "failed", "cancelled")


class JobRequest(BaseModel):
    """One evaluation that is asked for."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    problem: int = Field(ge=1, description="number of the problem")
    source: str = Field(min_length=1, description="the candidate: a Python module that defines solution")
    name: str = Field(
        default=DEFAULT_NAME, min_length=1, max_length=200, description="what the result calls the candidate; no part of the job"
    )
    preset: str = Field(default="pkb", description="one preset of the problem")
    modes: tuple[Mode, ...] = Field(default=("eager", "graph"), description="launch modes to time; none: correctness alone")
    cases: Cases = "all"
    track: Track = "custom"
    variant: Literal["default", "pkb"] = "default"
    world_size: int | None = Field(default=None, ge=1, description="number of ranks; must be the service's, if given")
    timeout: float = Field(default=600.0, gt=0, le=7200, description="seconds that the evaluation may take, waiting apart")
    priority: int = Field(default=0, ge=-10, le=10, description="larger ones go first among the jobs of one token")
    rerun: bool = Field(default=False, description="judge again what is done; only for the token that asked first")


class JobDocument(BaseModel):
    """A job, as the service tells of it."""

    id: str = Field(description="hash of everything that the result depends on: equal requests are one job")
    state: State
    stage: str | None = Field(default=None, description="what a running evaluation is doing")
    ahead: int | None = Field(default=None, description="queued jobs that came before, all tokens together; None once it runs")
    tries: int = Field(description="how often it was started; a job whose service was killed is started again")
    submitted: float = Field(description="seconds since 1970")
    started: float | None = None
    finished: float | None = None
    result: dict[str, Any] | None = Field(default=None, description="a record as results.jsonl has them, of a job that is done")
    environment: dict[str, Any] | None = Field(default=None, description="what the record's environment_hash names")
    error: str | None = Field(default=None, description="why a job failed or was cancelled; says nothing about the candidate")


class FieldFault(BaseModel):
    """A field of a request, and what is wrong with it."""

    field: str
    message: str


class Refusal(BaseModel):
    """The reason why a request was not carried out."""

    error: str
    fields: list[FieldFault] = []


class RequestFault(UsageError):
    """A request that cannot be, and which of its fields say so."""

    def __init__(self, faults: list[FieldFault]) -> None:
        super().__init__("; ".join(f"{fault.field}: {fault.message}" for fault in faults))
        self.faults = faults


def parse_request(body: bytes) -> JobRequest:
    """The request in a body; raises :class:`RequestFault`."""
    try:
        return JobRequest.model_validate_json(body)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        faults = [FieldFault(field=".".join(map(str, item["loc"])) or "body", message=item["msg"]) for item in found]
        raise RequestFault(faults) from None


def job_of(request: JobRequest, world_size: int) -> Job:
    """The evaluation that a request asks for, on a node with so many ranks; raises :class:`RequestFault`, which names the field."""
    if request.world_size not in (None, world_size):
        raise _fault("world_size", f"got {request.world_size}: this service judges on {world_size} ranks")
    try:
        candidate = candidate_text(request.source, request.problem, request.name)
        plan = EvaluationPlan(
            (candidate,),
            presets=(request.preset,),
            world_sizes=(world_size,),
            modes=request.modes,
            cases=request.cases,
            track=request.track,
            variant=request.variant,
            timeout=request.timeout,
        )
        jobs = make_jobs(plan)
    except CandidateNotFound as error:
        raise _fault("name" if str(error).startswith("name=") else "source", str(error)) from None
    except UnknownProblem as error:
        raise _fault("problem", str(error)) from None
    except UsageError as error:
        raise _fault("preset", str(error)) from None
    if len(jobs) != 1:
        raise _fault("preset", f"{request.preset!r} stands for {', '.join(job.preset for job in jobs)}: expected one preset")
    return jobs[0]


def job_key(identity: bytes, timeout: float) -> str:
    """Names the job: from the digest of an :class:`.Identity` and the time limit, which a verdict may depend on."""
    return hashlib.sha256(identity + repr(float(timeout)).encode()).hexdigest()[:32]


def _fault(field: str, message: str) -> RequestFault:
    return RequestFault([FieldFault(field=field, message=message)])


def call_options(request: JobRequest) -> dict[str, Any]:
    """Keyword arguments of :meth:`.Evaluator.evaluate_async` for a request."""
    same = {name: getattr(request, name) for name in ("name", "modes", "cases", "track", "variant", "timeout", "rerun")}
    return {"presets": (request.preset,), **same}
