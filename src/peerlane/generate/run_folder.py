"""A run as a folder that people can read, and that a killed run goes on from.

RUN/run.json                     settings, prompt version, node
RUN/013/prompt.md                what the model got for problem 13
RUN/013/0/reply.md               sample 0 of it: what the model answered
RUN/013/0/candidate.py           the code in it; missing if there was none
RUN/013/0/copied_from.txt        the numbered file in the run's folder that candidate.py is a copy of
RUN/013/0/sample.json            verdict-free facts: status, tokens, cost, time; written last, so it marks the sample as done
RUN/013/0/steps/3/candidate.py   of an agent: what it had judged in its third step, with step.json
RUN/results.jsonl                the evaluator's results
RUN/logs/*.eval                  transcripts
"""

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from peerlane.common.files import read_regular, write_atomically
from peerlane.common.version import __version__
from peerlane.errors import FileRefused, HarnessError, UsageError
from peerlane.generate.machine import Machine
from peerlane.generate.reply import Status
from peerlane.generate.samples import NO_REPLY, NOT_JUDGED, Sample, Setting, Speedup, Usage, speedups_of
from peerlane.results.record import Mode, first_fault
from peerlane.results.result import Result
from peerlane.results.sanitize import sanitize

FORMAT = 1
RUN_FILE = "run.json"
ORIGIN_FILE = "copied_from.txt"
MOST_CODE_BYTES, MOST_FACTS_BYTES = 2 << 20, 1 << 20
"""The most bytes of a candidate; and of ``run.json``, ``sample.json`` and ``step.json``. Samples may be by strangers."""
_SAMPLE_FOLDER = re.compile(r"(\d{1,4})/(\d{1,6})", re.ASCII)

Kind = Literal["generate", "agent", "candidates"]

_OF_SEVERAL_LINES = ("error", "feedback")
Count = Annotated[int, Field(ge=0, le=10**15)]
Amount = Annotated[float, Field(ge=0, le=1e9)]
Factor = Annotated[float, Field(gt=0, le=1e9)]
"""Numbers whose sums and products stay finite, whoever wrote them."""


class _Record(BaseModel):
    """Base of all records of a run. Readers ignore fields that they do not know. Texts are made printable."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _readable(cls, value: Any, info: ValidationInfo) -> Any:
        return sanitize(value, lines=info.field_name in _OF_SEVERAL_LINES)


_AnyRecord = TypeVar("_AnyRecord", bound=_Record)


class RunSettings(_Record):
    """The settings that all samples of a run have in common. ``None``: the provider's default, or not known."""

    format: int = FORMAT
    kind: Kind
    model: str = Field(min_length=1)
    backend: str | None = None
    track: Literal["custom", "open"] = "custom"
    preset: str = "pkb"
    variant: str = "default"
    world_size: int | None = None
    shots: int | None = None
    prompt_version: str | None = None
    machine: Machine | None = None
    temperature: float | None = None
    top_p: float | None = None
    effort: str | None = None
    max_tokens: int | None = None
    steps: int | None = Field(default=None, description="of an agent: how many calls of tools it may make")

    @property
    def asked(self) -> str:
        """Returns how the model was asked: ``prompt 4-1c2d3e4f, 2 shots, effort high``."""
        parts = [
            f"prompt {self.prompt_version or 'version not recorded'}",
            f"{self.shots} shots" if self.shots is not None else "",
            *(f"{name} {value}" for name in ("temperature", "top_p", "effort") if (value := getattr(self, name)) is not None),
            f"{self.steps} steps" if self.steps is not None else "",
        ]
        return ", ".join(filter(None, parts))

    def identity(self) -> dict[str, Any]:
        """Returns the settings that must not change within a run."""
        return self.model_dump(mode="json", exclude={"format"})


class SampleRecord(_Record):
    """The contents of ``sample.json``."""

    problem: int
    sample: int
    status: Status
    sha256: str | None = Field(default=None, description="of candidate.py's bytes")
    stop_reason: str = ""
    limit: str | None = Field(default=None, description="which limit ended an agent's episode")
    error: str | None = None
    input_tokens: Count = 0
    output_tokens: Count = 0
    reasoning_tokens: Count = 0
    cached_tokens: Count = 0
    cost_usd: Amount | None = None
    calls: Count = 0
    seconds: Amount = 0.0
    finished_at: datetime = Field(default_factory=lambda: datetime.now(UTC))

    @classmethod
    def of(cls, key: "SampleKey", status: Status, usage: Usage, *, seconds: float, stop_reason: str, limit: str | None = None) -> Self:
        """Returns a sample that ended like this."""
        return cls(
            problem=key.problem, sample=key.sample, status=status, stop_reason=stop_reason, limit=limit, seconds=seconds, **asdict(usage)
        )

    @property
    def usage(self) -> Usage:
        """Tokens, cost and calls."""
        return Usage(self.input_tokens, self.output_tokens, self.reasoning_tokens, self.cached_tokens, self.cost_usd, self.calls)


class StepRecord(_Record):
    """The contents of ``step.json``: one candidate that an agent had judged."""

    step: int = Field(ge=1)
    tool: str
    verdict: str
    sha256: str
    speedups: dict[Mode, tuple[Factor, Factor, Factor]] = Field(default_factory=dict, description="by mode: low, median, high")
    feedback: str = ""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        for mode, values in self.speedups.items():
            if list(values) != sorted(values):
                raise ValueError(f"a speedup needs low <= median <= high, got {', '.join(map(str, values))} in {mode} mode")
        return self

    def as_sample(self, key: "SampleKey", setting: Setting | None = None) -> Sample:
        """Returns the step as metrics count it."""
        speedups: dict[str, Speedup] = {mode: Speedup(*values) for mode, values in self.speedups.items()}
        return Sample(key.problem, key.sample, self.verdict, speedups, setting=setting)


class SampleKey(NamedTuple):
    """The name of a sample within a run."""

    problem: int
    sample: int

    @property
    def folder(self) -> str:
        """Its path within the run: ``013/0``."""
        return f"{self.problem:03d}/{self.sample}"


class RunFolder:
    """An existing run. Samples are written whole or not at all, so that a run that was killed lacks nothing but what it was about to do."""

    def __init__(self, path: Path, settings: RunSettings) -> None:
        self.path, self.settings = path, settings

    @classmethod
    def open(cls, path: Path) -> Self:
        """Opens the run in a folder; raises UsageError if there is none, or one of another format."""
        file = path / RUN_FILE
        try:
            data = json.loads(read_regular(file, MOST_FACTS_BYTES))
        except FileRefused as error:
            raise UsageError(f"{path} is no run: {error}; make one with `peerlane generate`") from None
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{file} is not JSON: {error}; restore it, or use another --out") from None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            got = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise UsageError(f"{file} has format {got!r}: this peerlane ({__version__}) reads {FORMAT}; use the one that wrote it")
        try:
            return cls(path, RunSettings.model_validate(data))
        except ValidationError as error:
            raise UsageError(f"{file}: {first_fault(error)}; restore it, or use another --out") from None

    @classmethod
    def open_or_create(cls, path: Path, settings: RunSettings) -> Self:
        """Opens the run in a folder with these settings, or makes it; raises UsageError if the folder holds a run with others."""
        if is_run(path):
            run = cls.open(path)
            mine, theirs = settings.identity(), run.settings.identity()
            different = [name for name in mine if mine[name] != theirs.get(name)]
            if different:
                changes = ", ".join(f"{name} {theirs.get(name)!r} (now {mine[name]!r})" for name in different if name != "machine")
                raise UsageError(f"{path} holds a run with {changes or 'another machine'}: repeat its settings, or use another --out")
            return run
        path.mkdir(parents=True, exist_ok=True)
        text = {"peerlane": __version__, "created_at": datetime.now(UTC).isoformat(), **settings.model_dump(mode="json")}
        write_atomically(path / RUN_FILE, (json.dumps(text, indent=2) + "\n").encode())
        return cls(path, settings)

    def sample_keys(self) -> list[SampleKey]:
        """Returns the samples that are done or hold a candidate, in order. Links count: reading them is refused."""
        return sorted(key for key, name in self._sample_folders() if key.folder == name)

    def misnamed(self) -> list[str]:
        """Returns a line for each folder that holds a sample under a wrong name, such as ``13/0`` or ``013/00`` for ``013/0``."""
        folders = sorted(self._sample_folders())
        return [f"{self.path / name} is no name of a sample: expected {key.folder}" for key, name in folders if key.folder != name]

    def _sample_folders(self) -> Iterator[tuple[SampleKey, str]]:
        for folder in self.path.glob("*/*"):
            name = folder.relative_to(self.path).as_posix()
            match = _SAMPLE_FOLDER.fullmatch(name)
            if match and any(os.path.lexists(folder / file) for file in ("sample.json", "candidate.py")):
                yield SampleKey(int(match[1]), int(match[2])), name

    def is_done(self, key: SampleKey) -> bool:
        """Tells whether the sample was finished."""
        return (self.path / key.folder / "sample.json").is_file()

    def missing(self, problems: Sequence[int], samples: int) -> list[SampleKey]:
        """Returns the samples still to be asked for, sample by sample over all problems, so that a run that ends early has whole rounds."""
        wanted = (SampleKey(problem, sample) for sample in range(samples) for problem in problems)
        return [key for key in wanted if not self.is_done(key)]

    def write_prompt(self, problem: int, text: str) -> None:
        _write(make_folder(self.path, f"{problem:03d}") / "prompt.md", text.encode())

    def write_sample(self, record: SampleRecord, reply: str, source: str | None) -> None:
        """Keeps a finished sample; ``sha256`` is filled in."""
        folder = make_folder(self.path, SampleKey(record.problem, record.sample).folder)
        _write(folder / "reply.md", reply.encode(errors="replace"))
        candidate = folder / "candidate.py"
        if source is None:
            candidate.unlink(missing_ok=True)
        else:
            data = source.encode(errors="replace")
            _write(candidate, data)
            record = record.model_copy(update={"sha256": hashlib.sha256(data).hexdigest()})
        _write(folder / "sample.json", (record.model_dump_json(indent=2) + "\n").encode())

    def copy_numbered_files(self, files: Mapping[SampleKey, tuple[str, bytes]]) -> None:
        """Makes samples of numbered files, given by name and bytes, and removes copies of files that are gone.

        Raises UsageError if a sample is there that is not such a copy; no sample has changed then.
        """
        copies = {key for key in self.sample_keys() if self._is_copy(key)}
        changed = {key: file for key, file in files.items() if key not in copies or self._code(key) != file[1]}
        for key, (name, data) in changed.items():
            if self.is_done(key) or (key not in copies and self._code(key) not in (None, data)):
                taken = self.path / key.folder / "candidate.py"
                raise UsageError(f"{taken} is a sample already, and {name} would replace it: put numbered files in another folder")
        for key, (name, data) in changed.items():
            folder = make_folder(self.path, key.folder)
            _write(folder / ORIGIN_FILE, name.encode())
            _write(folder / "candidate.py", data)
        for key in copies - files.keys():
            for file in ("candidate.py", ORIGIN_FILE):
                (self.path / key.folder / file).unlink(missing_ok=True)

    def _code(self, key: SampleKey) -> bytes | None:
        """The candidate of a sample, or None; raises UsageError if strangers made it something else than a file."""
        candidate = self.path / key.folder / "candidate.py"
        try:
            return self.read(candidate) if os.path.lexists(candidate) else None
        except FileRefused as error:
            raise UsageError(f"{error}; put numbered files in another folder") from None

    def _is_copy(self, key: SampleKey) -> bool:
        try:
            self.read(self.path / key.folder / ORIGIN_FILE, MOST_FACTS_BYTES)
        except FileRefused:
            return False
        return True

    def write_step(self, key: SampleKey, record: StepRecord, source: str) -> None:
        """Keeps a candidate that an agent had judged."""
        folder = make_folder(self.path, f"{key.folder}/steps/{record.step}")
        _write(folder / "candidate.py", source.encode(errors="replace"))
        _write(folder / "step.json", (record.model_dump_json(indent=2) + "\n").encode())

    def read(self, path: Path, limit: int = MOST_CODE_BYTES) -> bytes:
        """Reads a file in the run, which strangers may have made; raises FileRefused, see :mod:`peerlane.common.files`."""
        return read_regular(path, limit, self.path)

    def sample(self, key: SampleKey) -> SampleRecord:
        """Reads a sample's facts; one without ``sample.json`` is a candidate from elsewhere. Raises UsageError for a damaged file."""
        folder = self.path / key.folder
        file, candidate = folder / "sample.json", folder / "candidate.py"
        sha256 = hashlib.sha256(self.read(candidate)).hexdigest() if os.path.lexists(candidate) else None
        if not os.path.lexists(file):
            return SampleRecord(problem=key.problem, sample=key.sample, status="code", sha256=sha256)
        # An edited candidate is another candidate: what counts is the file as it is.
        return self._record(file, SampleRecord).model_copy(update={"sha256": sha256})

    def steps(self, key: SampleKey) -> list[StepRecord]:
        """Returns what an agent had judged, in order; raises UsageError for a damaged file."""
        files = (self.path / key.folder / "steps").glob("*/step.json")
        return sorted((self._record(file, StepRecord) for file in files), key=lambda record: record.step)

    def _record(self, file: Path, kind: type[_AnyRecord]) -> _AnyRecord:
        try:
            return kind.model_validate_json(self.read(file, MOST_FACTS_BYTES))
        except ValidationError as error:
            raise UsageError(f"{file} is damaged: {first_fault(error)}; delete it, and run the same command again") from None

    def candidates(self) -> Iterator[tuple[SampleKey, Path]]:
        """Yields the candidate files, in order, of whatever kind they are: read them by :meth:`read`."""
        for key in self.sample_keys():
            path = self.path / key.folder / "candidate.py"
            if os.path.lexists(path):
                yield key, path

    def settings_judged(self, results: Iterable[Result]) -> list[Setting]:
        """Returns the settings under which candidates of the run were judged, the most frequent first."""
        local = {(key.problem, self.sample(key).sha256) for key in self.sample_keys()}
        counts = Counter(Setting.of(result) for result in results if (result.problem.id, result.candidate.sha256) in local)
        return [setting for setting, _ in counts.most_common()]

    def samples(self, results: Iterable[Result], setting: Setting | None) -> list[Sample]:
        """Joins every sample with the result of its candidate's hash under one setting; with None, as if nothing had been judged.

        Equal candidates share a result. Of several results the one with most speeds counts, then the last.
        """
        ordered = sorted((result for result in results if Setting.of(result) == setting), key=lambda result: len(speedups_of(result)))
        by_hash = {(result.problem.id, result.candidate.sha256): result for result in ordered}
        samples = []
        for key in self.sample_keys():
            record = self.sample(key)
            if record.sha256 is None:
                sample = Sample(key.problem, key.sample, record.status if record.error is None else NO_REPLY)
            elif (result := by_hash.get((key.problem, record.sha256))) is None:
                sample = Sample(key.problem, key.sample, NOT_JUDGED)
            else:
                sample = Sample.of(result, key.sample)
            steps = tuple(step.as_sample(key, setting) for step in self.steps(key))
            more: dict[str, Any] = {"setting": setting, "steps": steps, "author": self.settings.model, "asked": self.settings.asked}
            samples.append(replace(sample, usage=record.usage, seconds=record.seconds, **more))
        return samples


def make_folder(run: Path, name: str) -> Path:
    """Makes a folder in a run and returns its path; raises UsageError if a part of it is a link, or cannot be made."""
    folder = run
    folder.mkdir(parents=True, exist_ok=True)
    for part in name.split("/"):
        folder /= part
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot make the folder {folder}: {error.strerror}; use another folder for the run") from None
        if folder.is_symlink():
            raise UsageError(f"{folder} is a link: expected a folder, not a link to one; remove it, or use another folder for the run")
    return folder


def _write(path: Path, data: bytes) -> None:
    try:
        write_atomically(path, data)
    except OSError as error:
        raise HarnessError(f"cannot write {path}: {error.strerror}; the same command goes on once it can be written") from None


def is_run(path: Path) -> bool:
    """Tells whether a folder holds a run."""
    return (path / RUN_FILE).is_file()
