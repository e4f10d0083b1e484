"""Reads what a page shows: runs, bundles, files of results and folders of them, as one list of samples, each with author and result."""

import hashlib
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from peerlane.common.files import find_files, read_regular
from peerlane.common.version import PACKAGE
from peerlane.errors import FileRefused, UsageError
from peerlane.evaluate.candidates import REFERENCE
from peerlane.generate.run_folder import MOST_CODE_BYTES, RUN_FILE, RunFolder, is_run
from peerlane.generate.samples import Names, Sample, Setting, Standing
from peerlane.publish.bundle import is_bundle, read_bundle
from peerlane.publish.signature import read_signer
from peerlane.publish.verify import read_verification
from peerlane.results.json_lines import MOST_BYTES
from peerlane.results.reader import FILE, newest, read_results
from peerlane.results.result import Result

UNNAMED = "candidates"
TRACES = "trace"
_MOST_TRACES, _MOST_TRACE_BYTES = 4, 16 << 20

WHOSE: Mapping[Standing, str] = {
    "own": "",
    "verified": "figures measured by the keeper of this page",
    "unverified": "figures claimed by the author, not verified",
    "differs": "figures claimed by the author; the keeper found others",
}
"""Sentences that name who vouches for the figures of a sample."""
_SUFFIXES: Mapping[Standing, str] = {"own": "", "verified": "", "unverified": ", not verified", "differs": ", differs"}


@dataclass
class Gathered:
    """Samples in the order of their files, the files with their hashes, lines that were left out of them, and files without results."""

    samples: list[Sample] = field(default_factory=list)
    files: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def gather(paths: Sequence[Path]) -> Gathered:
    """Collects the samples under these paths; a folder gives the runs and the files of results in and below it, not its bundles.

    Raises UsageError for a path that does not exist, and if nothing was judged.
    """
    gathered = Gathered()
    for path in paths:
        if not path.exists():
            raise UsageError(f"there is no {path}: expected a run, a bundle, a {FILE}, or a folder of them")
    bundles = [path for path in paths if is_bundle(path)]
    runs, files = _below((path for path in paths if path not in bundles), gathered.skipped)
    names = Names()
    for run in map(RunFolder.open, runs):
        try:
            gathered.samples += list(_samples_of_run(run, _read(run.path / FILE, gathered), names.new(run.settings.model)))
        except FileRefused as error:
            gathered.skipped.append(f"{run.path} is left out: {error}")
    for bundle in map(read_bundle, bundles):
        checked, signer = read_verification(bundle), read_signer(bundle.path)
        standing: Standing = "unverified" if checked is None else checked.standing
        gathered.files.append((str(bundle.path), bundle.sha256))
        with tempfile.TemporaryDirectory(prefix="peerlane-bundle-") as scratch:
            run = bundle.unpack(Path(scratch))
            author = names.new(f"{run.settings.model}{_SUFFIXES[standing]}")
            results = bundle.claims(run)
            verified = checked is not None and standing == "verified"
            if checked is not None and verified:
                results = checked.keepers_results()
            more: dict[str, Any] = {"standing": standing, "signer": signer}
            if verified:  # nobody has judged the steps of an agent again
                more["steps"] = ()
            gathered.samples += [replace(sample, **more) for sample in _samples_of_run(run, results, author)]
    gathered.samples += _samples_of_results(newest(result for file in files for result in _read(file, gathered, follow=file in paths)))
    if not gathered.samples:
        where = ", ".join(map(str, paths))
        raise UsageError("\n".join([f"nothing in {where} was judged: expected results of `peerlane eval`", *gathered.skipped]))
    return gathered


def _below(paths: Iterable[Path], skipped: list[str]) -> tuple[list[Path], list[Path]]:
    """Runs, and files of results that are in no run."""
    runs: dict[Path, None] = {}
    files: dict[Path, None] = {}
    for path in paths:
        if path.is_file():
            files[path] = None
            continue
        inside, refused = find_files(path, lambda name: name == RUN_FILE or name.endswith(".jsonl"))
        skipped += refused
        for folder in [path, *(file.parent for file in inside if file.name == RUN_FILE)]:
            if is_run(folder):
                runs[folder] = None
        results = [path / FILE] if (path / FILE).is_file() else [file for file in inside if file.suffix == ".jsonl"]
        files |= dict.fromkeys(file for file in results if not any(run in file.parents for run in runs))
    return list(runs), list(files)


def _read(path: Path, gathered: Gathered, *, follow: bool = False) -> list[Result]:
    """The results in a file. A file of something else, such as calibrations, is left out with a message."""
    if not os.path.lexists(path):
        return []
    try:
        results = read_results(path, gathered.notes, follow=follow)
    except UsageError as error:
        gathered.skipped.append(str(error))
        return []
    if results:
        gathered.files.append((str(path), hashlib.sha256(read_regular(path, MOST_BYTES, follow=follow)).hexdigest()))
    return results


def _samples_of_run(run: RunFolder, results: Sequence[Result], author: str) -> Iterator[Sample]:
    files = {key.folder: path for key, path in run.candidates()}
    for setting in run.settings_judged(results):
        for sample in run.samples(results, setting):
            folder = f"{sample.problem:03d}/{sample.number}"
            result = None if sample.result is None else _named(sample.result, folder)
            pictures = sorted((run.path / folder / TRACES).glob("*.svg"))[:_MOST_TRACES]
            traces = tuple((path.stem, run.read(path, _MOST_TRACE_BYTES)) for path in pictures)
            code = run.read(files[folder]) if folder in files else None
            yield replace(sample, author=author, result=result, code=code, traces=traces)


def _named(result: Result, name: str) -> Result:
    """Returns the result by the name of this sample: equal candidates share one."""
    return result.model_copy(update={"candidate": result.candidate.model_copy(update={"name": name})})


def _samples_of_results(results: Iterable[Result]) -> Iterator[Sample]:
    """Yields the samples of results. Of several of one name and setting, such as those of an edited file, the last counts."""
    last = {(author_of(result), Setting.of(result), result.problem.id, result.candidate.name): result for result in results}
    numbers: Counter[tuple[object, ...]] = Counter()
    for (author, setting, problem, _), result in last.items():
        yield Sample.of(result, numbers[author, setting, problem], author=author, code=_code(result))
        numbers[author, setting, problem] += 1


def _code(result: Result) -> bytes | None:
    """Returns the code of the judged file, or of the package's own solution of that name, whichever has the result's hash."""
    if result.candidate.path is None:
        return None
    packaged = PACKAGE / "solutions" / Path(result.candidate.path).name
    for path in (Path(result.candidate.path), packaged):
        try:
            data = read_regular(path, MOST_CODE_BYTES)
        except FileRefused:
            continue
        if hashlib.sha256(data).hexdigest() == result.candidate.sha256:
            return data
    return None


def author_of(result: Result) -> str:
    """The model that a result names; else the folder of the candidate's file."""
    if result.candidate.backend == REFERENCE:
        return REFERENCE
    if (model := result.candidate.labels.get("model")) is not None:
        return str(model)
    return (Path(result.candidate.path).parent.name if result.candidate.path else "") or UNNAMED
