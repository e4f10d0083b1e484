"""A judged run in one file, which others can read and verify: candidates, facts of samples, results, and a manifest with all hashes.

Equal runs give equal bytes. Prompts, replies and transcripts stay out.
"""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field, ValidationError

from peerlane.errors import UsageError
from peerlane.files import write_atomically
from peerlane.generate.judgements import settings_of
from peerlane.generate.run_folder import RUN_FILE, RunFolder
from peerlane.results.reader import FILE, newest, read_results
from peerlane.results.record import Record
from peerlane.results.result import EnvironmentLine, Result
from peerlane.version import __version__

FORMAT: Final = 1
MANIFEST = "manifest.json"
ENDING = ".peerlane.zip"
_MEMBER = re.compile(r"run\.json|results\.jsonl|\d{1,4}/\d{1,6}/(candidate\.py|sample\.json|steps/\d{1,4}/step\.json)", re.ASCII)
_MOST_MEMBERS, _MOST_BYTES = 50_000, 1 << 30
_EPOCH = (1980, 1, 1, 0, 0, 0)


class Manifest(Record):
    """What a bundle says of itself."""

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
        """The run, in a folder; files that are there already stay if they have the same contents. Raises UsageError for others."""
        with zipfile.ZipFile(self.path) as archive:
            for name in self.manifest.files:
                file, data = folder / name, archive.read(name)
                if file.is_file() and file.read_bytes() != data:
                    raise UsageError(f"{file} differs from the file in {self.path}: name another folder, or delete this one")
                file.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(file, data)
        return RunFolder.open(folder)


def write_bundle(run_folder: Path, out: Path) -> Manifest:
    """Packs a judged run; raises UsageError if it holds no results of its candidates, or the file cannot be written."""
    run = RunFolder.open(run_folder)
    file = run_folder / FILE
    results = newest(read_results(file)) if file.is_file() else []
    hashes = {hashlib.sha256(path.read_bytes()).hexdigest() for _, path in run.candidates()}
    own = [result for result in results if result.candidate.sha256 in hashes]
    if not own:
        raise UsageError(f"{run_folder} holds no results of its candidates: run `peerlane eval {run_folder}` first")
    members = dict(_members(run, own))
    manifest = Manifest(
        peerlane=__version__,
        author=run.settings.model,
        kind=run.settings.kind,
        settings=tuple(map(str, settings_of(run, own))),
        node_classes=tuple(dict.fromkeys(str(result.node) for result in own)),
        suite={str(result.problem.id): result.problem.source_hash or "" for result in sorted(own, key=lambda item: item.problem.id)},
        candidates=len(hashes),
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
    yield RUN_FILE, (run.path / RUN_FILE).read_bytes()
    environments = {result.environment_hash: result.environment for result in results}
    lines = [EnvironmentLine(environment_hash=name, environment=environment) for name, environment in environments.items()]
    yield FILE, "".join(f"{line.model_dump_json()}\n" for line in (*lines, *results)).encode()
    for key in run.sample_keys():
        folder = run.path / key.folder
        for file in [folder / "candidate.py", folder / "sample.json", *sorted(folder.glob("steps/*/step.json"))]:
            if file.is_file():
                yield file.relative_to(run.path).as_posix(), file.read_bytes()


def is_bundle(path: Path) -> bool:
    """Whether a path names a bundle: any zip file."""
    return path.is_file() and path.suffix == ".zip"


def read_bundle(path: Path) -> Bundle:
    """Reads and checks a bundle, whoever wrote it: names, sizes and hashes. Raises UsageError if anything is not as it must be."""
    try:
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        with zipfile.ZipFile(path) as archive:
            return Bundle(path, sha256, _checked(archive, path))
    except OSError as error:
        raise UsageError(f"cannot read the bundle {path}: {error.strerror}; expected a file of `peerlane bundle`") from None
    except (zipfile.BadZipFile, KeyError, NotImplementedError, RuntimeError, ValueError) as error:
        said = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise UsageError(f"{path} is no bundle ({said}): expected a file of `peerlane bundle`") from None


def _checked(archive: zipfile.ZipFile, path: Path) -> Manifest:
    infos = archive.infolist()
    if len(infos) > _MOST_MEMBERS or sum(info.file_size for info in infos) > _MOST_BYTES:
        raise UsageError(f"{path} is too large for a bundle: expected at most {_MOST_MEMBERS:,} files and {_MOST_BYTES >> 20:,} MiB")
    found: dict[str, Any] = json.loads(_limited(archive, MANIFEST))
    if found.get("format") != FORMAT:
        raise UsageError(f"{path} has format {found.get('format')!r}: this peerlane ({__version__}) reads {FORMAT}")
    manifest = Manifest.model_validate(found)
    names = [info.filename for info in infos if info.filename != MANIFEST]
    if sorted(names) != sorted(manifest.files):
        raise UsageError(f"{path} does not hold the files that its manifest names; ask its author for another copy")
    for name, digest in manifest.files.items():
        if not _MEMBER.fullmatch(name):
            raise UsageError(f"{path} holds {name!r}: expected run.json, results.jsonl and files of samples alone")
        if hashlib.sha256(_limited(archive, name)).hexdigest() != digest:
            raise UsageError(f"{name} in {path} has another hash than the manifest says; ask its author for another copy")
    return manifest


def _limited(archive: zipfile.ZipFile, name: str) -> bytes:
    """A member's bytes, never more than its header announced."""
    with archive.open(name) as member:
        return member.read(archive.getinfo(name).file_size)
