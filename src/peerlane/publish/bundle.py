"""A judged run in one file, which others can read and verify: candidates, facts of samples, results, and a manifest with all hashes.

Equal runs give equal bytes. Prompts, replies and transcripts stay out.
"""

import hashlib
import json
import os
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

from pydantic import Field, ValidationError

from peerlane.common.files import read_regular, write_atomically
from peerlane.common.version import __version__
from peerlane.errors import UsageError
from peerlane.evaluate.candidates import REFERENCE
from peerlane.generate.run_folder import MOST_CODE_BYTES, MOST_FACTS_BYTES, RUN_FILE, RunFolder, make_folder
from peerlane.publish.archive import opened, read_member
from peerlane.results.reader import FILE, newest, read_results
from peerlane.results.record import Record, first_fault
from peerlane.results.result import EnvironmentLine, Result

FORMAT: Final = 1
MANIFEST = "manifest.json"
ENDING = ".peerlane.zip"
_MEMBER = re.compile(r"run\.json|results\.jsonl|\d{1,4}/\d{1,6}/(candidate\.py|sample\.json|steps/\d{1,4}/step\.json)", re.ASCII)
_MOST_MEMBERS, _MOST_BYTES = 50_000, 1 << 30
_LIMITS: Mapping[str, int] = {
    MANIFEST: 16 << 20,
    FILE: 64 << 20,
    RUN_FILE: MOST_FACTS_BYTES,
    "candidate.py": MOST_CODE_BYTES,
    "sample.json": MOST_FACTS_BYTES,
    "step.json": MOST_FACTS_BYTES,
}
"""Bytes of a file of each name."""
_MOST_LINES, _MOST_LINE_BYTES = 100_000, 1 << 20  # of results.jsonl: the largest known line has 60 KiB
_MOST_RANKS = 72  # of a claim, whose check starts as many processes
_LARGEST = 1e15  # of a figure of speed: microseconds of thirty years
_JSON_KINDS = {list: "a list", type(None): "null", str: "a string", bool: "true or false"}
_EPOCH = (1980, 1, 1, 0, 0, 0)


class Manifest(Record):
    """The description of a bundle, in the bundle."""

    format: Literal[1] = FORMAT
    peerlane: str
    author: str = Field(min_length=1, description="the run's model")
    kind: str
    settings: tuple[str, ...] = Field(description="track, preset, ranks and class of machine of its results")
    node_classes: tuple[str, ...]
    suite: dict[str, str] = Field(description="problem number -> hash of its source, as it was judged")
    candidates: int = Field(ge=1)
    results: int = Field(ge=1)
    files: dict[str, str] = Field(description="path -> sha256")


@dataclass(frozen=True)
class Bundle:
    """A bundle that was read: every file has the hash that its manifest names."""

    path: Path
    sha256: str
    manifest: Manifest

    def unpack(self, folder: Path) -> RunFolder:
        """Writes the run to a folder; files that are there already stay if they have the same contents.

        Raises UsageError if a file there has other contents, or if the bundle is no longer the one that was read.
        """
        with opened(self.path) as (_, archive):
            for name, data in _contents(archive, self.path, self.manifest):
                file = folder / name
                if os.path.lexists(file) and read_regular(file, _LIMITS[file.name], folder) != data:
                    raise UsageError(f"{file} differs from the file in {self.path}: name another folder, or delete this one")
                if "/" in name:
                    make_folder(folder, name.rpartition("/")[0])
                folder.mkdir(parents=True, exist_ok=True)
                write_atomically(file, data)
        with _named(self.path, folder):
            run = RunFolder.open(folder)
        if run.settings.model != self.manifest.author:
            raise UsageError(
                f"{MANIFEST} in {self.path} names the author {self.manifest.author!r}, and {RUN_FILE} the model {run.settings.model!r}: "
                "ask its author for another copy"
            )
        return run

    def claims(self, run: RunFolder) -> list[Result]:
        """The results in the unpacked bundle, all of which can be checked. Raises UsageError for a file or line that is something else."""
        notes: list[str] = []
        with _named(self.path, run.path):
            results = newest(read_results(run.path / FILE, notes))
            if notes:
                raise UsageError("\n".join(notes))
            samples = {(key.problem, run.sample(key).sha256) for key in run.sample_keys()}
            for key in run.sample_keys():
                run.steps(key)
        if len(results) != self.manifest.results:
            raise UsageError(f"{FILE} in {self.path} holds {len(results)} results: {MANIFEST} says {self.manifest.results}")
        for result in results:
            where = f"{FILE} in {self.path}: the result of {result.candidate.name} on problem {result.problem.id}"
            if (result.problem.id, result.candidate.sha256) not in samples:
                raise UsageError(f"{where} is of code that the bundle lacks: ask its author for another copy")
            if result.candidate.backend == REFERENCE:
                raise UsageError(f"{where} is called the reference: expected candidates alone; the keeper's own results have references")
            if result.world_size > _MOST_RANKS:
                raise UsageError(f"{where} claims {result.world_size} ranks: expected at most {_MOST_RANKS}")
            if (largest := max(map(abs, _numbers(result.model_dump(include={"speed"}))), default=0.0)) > _LARGEST:
                raise UsageError(f"{where} has a speed that holds {largest:g}: expected at most {_LARGEST:g}")
        return results


@contextmanager
def _named(path: Path, folder: Path) -> Iterator[None]:
    """Errors about files of the unpacked bundle name the bundle, not the folder."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{path}: {str(error).replace(f'{folder}{os.sep}', '')}") from None


def _numbers(value: Any) -> Iterator[float]:
    """All numbers in nested lists and dicts."""
    if isinstance(value, (int, float)):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _numbers(item)


def write_bundle(run_folder: Path, out: Path) -> Manifest:
    """Packs a judged run; raises UsageError if it holds no results of its candidates, or the file cannot be written."""
    run = RunFolder.open(run_folder)
    file = run_folder / FILE
    results = newest(read_results(file)) if file.is_file() else []
    hashes = {(key.problem, hashlib.sha256(run.read(path)).hexdigest()) for key, path in run.candidates()}
    own = [result for result in results if (result.problem.id, result.candidate.sha256) in hashes]
    if not own:
        raise UsageError(f"{run_folder} holds no results of its candidates: run `peerlane eval {run_folder}` first")
    members = dict(_members(run, own))
    manifest = Manifest(
        peerlane=__version__,
        author=run.settings.model,
        kind=run.settings.kind,
        settings=tuple(map(str, run.settings_judged(own))),
        node_classes=tuple(dict.fromkeys(str(result.node) for result in own)),
        suite={str(result.problem.id): result.problem.source_hash or "" for result in sorted(own, key=lambda item: item.problem.id)},
        candidates=len({sha256 for _, sha256 in hashes}),
        results=len(own),
        files={name: hashlib.sha256(data).hexdigest() for name, data in members.items()},
    )
    text = json.dumps(manifest.model_dump(mode="json"), indent=2) + "\n"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(out, "w") as archive:
            for name, data in ((MANIFEST, text.encode()), *members.items()):
                archive.writestr(zipfile.ZipInfo(name, _EPOCH), data, zipfile.ZIP_DEFLATED)
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}; name a file that can be written") from None
    return manifest


def _members(run: RunFolder, results: list[Result]) -> Iterator[tuple[str, bytes]]:
    yield RUN_FILE, run.read(run.path / RUN_FILE, MOST_FACTS_BYTES)
    environments = {result.environment_hash: result.environment for result in results}
    lines = [EnvironmentLine(environment_hash=name, environment=environment) for name, environment in environments.items()]
    yield FILE, "".join(f"{line.model_dump_json()}\n" for line in (*lines, *results)).encode()
    for key in run.sample_keys():
        folder = run.path / key.folder
        for file in [folder / "candidate.py", folder / "sample.json", *sorted(folder.glob("steps/*/step.json"))]:
            if os.path.lexists(file):
                yield file.relative_to(run.path).as_posix(), run.read(file, _LIMITS[file.name])


def is_bundle(path: Path) -> bool:
    """Tells whether a path names a bundle: any zip file, or a link of that name."""
    return path.suffix == ".zip" and (path.is_file() or path.is_symlink())


def read_bundle(path: Path) -> Bundle:
    """Reads and checks a bundle, whoever wrote it: names, sizes and hashes. Raises UsageError if anything is not as it must be."""
    with opened(path) as (file, archive):
        manifest = _read_manifest(archive, path)
        for _ in _contents(archive, path, manifest):
            pass
        file.seek(0)
        return Bundle(path, hashlib.file_digest(file, "sha256").hexdigest(), manifest)


def _read_manifest(archive: zipfile.ZipFile, path: Path) -> Manifest:
    infos = archive.infolist()
    if len(infos) > _MOST_MEMBERS or sum(info.file_size for info in infos) > _MOST_BYTES:
        raise UsageError(f"{path} is too large for a bundle: expected at most {_MOST_MEMBERS:,} files and {_MOST_BYTES >> 20:,} MiB")
    names = [info.filename for info in infos]
    if names.count(MANIFEST) != 1:
        raise UsageError(f"{path} is no bundle (it holds no {MANIFEST}, or several): expected a file of `peerlane bundle`")
    where = f"{path}: {MANIFEST}"
    try:
        found = json.loads(_member(archive, path, MANIFEST), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not JSON ({str(error)[:200]}): expected a file of `peerlane bundle`") from None
    if not isinstance(found, dict):
        raise UsageError(f"{where} is {_JSON_KINDS.get(type(found), 'a number')}: expected an object")
    if (version := found.get("format")) != FORMAT or version is True:
        raise UsageError(f"{path} has format {version!r}: this peerlane ({__version__}) reads {FORMAT}")
    try:
        manifest = Manifest.model_validate(found)
    except ValidationError as error:
        raise UsageError(f"{where}: {first_fault(error)}: expected a file of `peerlane bundle`") from None
    for name in manifest.files:
        if not _MEMBER.fullmatch(name):
            raise UsageError(f"{path} holds {name!r}: expected {RUN_FILE}, {FILE} and files of samples alone")
    if sorted(name for name in names if name != MANIFEST) != sorted(manifest.files):
        raise UsageError(f"{path} does not hold the files that its manifest names; ask its author for another copy")
    return manifest


def _no_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _contents(archive: zipfile.ZipFile, path: Path, manifest: Manifest) -> Iterator[tuple[str, bytes]]:
    """The members that the manifest names; raises UsageError for one that is missing or has another hash."""
    for name, digest in manifest.files.items():
        data = _member(archive, path, name)
        if hashlib.sha256(data).hexdigest() != digest:
            raise UsageError(f"{name} in {path} has another hash than the manifest says; ask its author for another copy")
        if name == FILE and (data.count(b"\n") > _MOST_LINES or max(map(len, data.split(b"\n"))) > _MOST_LINE_BYTES):
            raise UsageError(f"{name} in {path} is too large: expected at most {_MOST_LINES:,} lines of {_MOST_LINE_BYTES:,} bytes")
        yield name, data


def _member(archive: zipfile.ZipFile, path: Path, name: str) -> bytes:
    return read_member(archive, path, name, _LIMITS[name.rsplit("/", 1)[-1]])
