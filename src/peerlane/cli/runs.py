"""Run folders as candidates of ``peerlane eval``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from peerlane.errors import CandidateNotFound, UsageError

if TYPE_CHECKING:
    from peerlane.evaluate import CandidateFile
    from peerlane.generate.run_folder import RunFolder
    from peerlane.results.record import Track


@dataclass(frozen=True)
class RunToJudge:
    """The candidates of a run, the folder of its results, the track that it was made for, files that cannot be judged, and remarks."""

    candidates: list[CandidateFile]
    folder: Path
    track: str
    refused: list[str]
    notes: list[str]


def run_to_judge(arguments: Sequence[str], model: str | None, track: Track | None = None) -> RunToJudge | None:
    """Returns the run that is to be judged, or None if the arguments name other candidates.

    ``model`` makes a run of a folder PROBLEM/SAMPLE/candidate.py from elsewhere, or of numbered files such as ``13_gemm_allreduce_cuda.py``
    in and below it, for this ``track`` or ``custom``. Equal candidates of a problem are judged once. Raises UsageError for a run beside
    other candidates, and for one without any.
    """
    folders = [Path(argument) for argument in arguments]
    if model is None and not any((folder / "run.json").is_file() for folder in folders):
        return None
    from peerlane.evaluate.candidates import candidate_file
    from peerlane.generate.run_folder import RunFolder, RunSettings, is_run

    if len(folders) != 1 or not folders[0].is_dir():
        raise UsageError(f"got {' '.join(arguments)}: expected one folder of a run; judge other candidates by another command")
    path = folders[0]
    if model is None or is_run(path):
        run = RunFolder.open(path)
        if model is not None and model != run.settings.model:
            raise UsageError(f"--model got {model!r}: {path} is a run of {run.settings.model!r}")
    else:
        run = RunFolder(path, RunSettings(kind="candidates", model=model, track=track or "custom"))
    refused: list[str] = []
    notes: list[str] = []
    if run.settings.kind == "candidates":
        _take_in(run, notes, refused)
        refused += [f"{text}; it is skipped" for text in run.misnamed()]
        if any(run.candidates()):
            run = RunFolder.open_or_create(path, run.settings)
    candidate_files: dict[tuple[int, str], CandidateFile] = {}
    for key, file in run.candidates():
        labels = (("model", run.settings.model), ("sample", key.sample))
        try:
            candidate = replace(candidate_file(file, path), name=key.folder, problem=key.problem, labels=labels)
        except CandidateNotFound as error:
            refused.append(f"{error}; it is skipped")
            continue
        candidate_files.setdefault((key.problem, candidate.sha256), candidate)
    if not candidate_files and refused:
        raise UsageError(refused[0])
    if not candidate_files:
        raise UsageError(f"{path} holds no candidates: expected PROBLEM/SAMPLE/candidate.py, such as 013/0/candidate.py, or numbered files")
    return RunToJudge(list(candidate_files.values()), path, run.settings.track, refused, notes)


def _take_in(run: RunFolder, notes: list[str], refused: list[str]) -> None:
    """Copies the numbered files of a folder to where samples lie: those of a problem, in the order of their names, are its samples."""
    from peerlane.evaluate.candidates import discover
    from peerlane.generate.run_folder import SampleKey

    try:
        found = discover([str(run.path)], notes.append, refused.append)
    except CandidateNotFound:
        return  # nothing numbered
    counts: Counter[int] = Counter()
    files: dict[SampleKey, tuple[str, bytes]] = {}
    for candidate in found:
        source = candidate.source()
        if candidate.problem is None or source is None:
            continue
        key = SampleKey(candidate.problem, counts[candidate.problem])
        counts[candidate.problem] += 1
        files[key] = f"{candidate.name}.py", source.encode("latin-1")
    run.copy_numbered_files(files)
