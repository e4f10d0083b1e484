"""Finds candidates: files, folders of files, or the words ``reference`` and ``solutions``."""

import ast
import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from peerlane.common.files import find_files, read_regular, shown_path
from peerlane.common.problem_files import slugs
from peerlane.common.syntax import UNREADABLE, parse
from peerlane.common.version import PACKAGE, __version__, own_example
from peerlane.errors import CandidateChanged, CandidateNotFound, FileRefused, UsageError
from peerlane.evaluate.problem_names import resolve
from peerlane.results.record import Track
from peerlane.results.result import CandidateInfo

Backend = Literal["pytorch", "cuda", "triton", "reference"]

REFERENCE = "reference"
SOLUTIONS = "solutions"
MOST_BYTES = 2 << 20  # of a file: a message carries it, in which a byte may take six
_MOST_NAMED = 20  # files, in one error
_NUMBERED = re.compile(r"p?\d.*\.py", re.DOTALL | re.IGNORECASE)  # of a candidate, or meant to be that
_CUDA_MARKS = ("cpp_extension", "load_inline", "compile_cuda_extension", "peerlane.device", "cuda.core", "cuda.bindings", "cupy")
_CUDA_NAMES = (
    *("torch.utils.cpp_extension", "cpp_extension", "load_inline", "utils.cuda_helpers", "compile_cuda_extension", "_compile_kernel"),
    *("peerlane.device", "cuda.core", "cuda.bindings", "cupy", "pycuda", "numba.cuda", "nvshmem"),
)
"""modules and functions that only sources with CUDA kernels import or call"""
_CPP_NAMES = {"torch.utils.cpp_extension", "torch.utils.cpp_extension.load_inline", "cpp_extension", "load_inline"}
"""Those of the names above that sources with C++ extensions alone have too."""
_CUDA_HEADER = re.compile(r"#include\s*[<\"][^>\"]*(cuda|nccl|nvshmem)", re.IGNORECASE)
_TRITON_NAMES = ("triton", "peerlane.device.triton")
KIT = "peerlane.device"
_NCCL = re.compile(r"\bpeerlane\.device(\.nccl\b| import [^\n]*\bnccl\b)")
_NVSHMEM = re.compile(r"\bpeerlane\.device(\.nvshmem\b| import [^\n]*\bnvshmem\b)|^\s*(import|from) nvshmem\b", re.MULTILINE)


@dataclass(frozen=True)
class CandidateFile:
    """One thing to judge.

    Attributes:
        name: the file's path below the folder that was asked for, without ``.py``; or ``reference``.
        path: None for the reference.
        sha256: of the file's bytes (of name and version for the reference).
        backend: by what the source imports, wherever it comes from; the name says nothing about it.
        compiles: its source names something that compiles device code.
        problem: that the file's name means (``13_gemm_allreduce_cuda.py``, ``p013_gemm_allreduce.py``), if it begins with a number.
        track: in which it is judged; None: that of the plan.
        note: a sentence, where the file's name means no problem or its number is another problem's.
        labels: who wrote it, as records say: pairs such as ``("model", "m")`` and ``("sample", 3)``.
        text: the source, of a candidate that was given as text; its ``path`` is then but a name.
    """

    name: str
    path: Path | None
    sha256: str
    backend: Backend
    problem: int | None
    compiles: bool = False
    track: Track | None = None
    note: str = ""
    labels: tuple[tuple[str, str | int], ...] = ()
    text: bytes | None = field(default=None, repr=False)

    @property
    def is_reference(self) -> bool:
        return self.path is None

    @property
    def is_cuda(self) -> bool:
        """True if its kernels are CUDA, which only GPUs and the emulator run."""
        return self.backend == "cuda"

    def source(self) -> str | None:
        """The file's bytes, one character each, as a message carries them; None for the reference. Raises :class:`CandidateChanged`."""
        if self.path is None:
            return None
        if self.text is not None:
            return self.text.decode("latin-1")
        try:
            data = read_regular(self.path, MOST_BYTES)
        except FileRefused as error:
            raise CandidateChanged(f"the candidate cannot be read any more: {error}; put it back and run again") from None
        if (digest := hashlib.sha256(data).hexdigest()) != self.sha256:
            raise CandidateChanged(
                f"{self.path} has changed since the run began: got sha256 {digest[:12]}, expected {self.sha256[:12]}; run again to judge it"
            )
        return data.decode("latin-1")


def uses_nvshmem(source: str) -> bool:
    """Tells whether a candidate of this source imports the kit's module for NVSHMEM, or NVIDIA's."""
    return _NVSHMEM.search(source) is not None


def uses_nccl(source: str) -> bool:
    """Tells whether a candidate of this source imports the kit's module for NCCL's device API."""
    return _NCCL.search(source) is not None


def runs_emulated(source: str) -> bool:
    """Tells whether emulated ranks may run a candidate of this source: its kernels are the device kit's, and call no NVSHMEM."""
    return KIT in source and not uses_nvshmem(source)


def reference_candidate(version: str = __version__) -> CandidateFile:
    """Returns the references of a version as one candidate, which has no file."""
    digest = hashlib.sha256(f"{REFERENCE} {version}".encode()).hexdigest()
    return CandidateFile(REFERENCE, None, digest, "reference", None)


def candidate_file(path: Path, below: Path | None = None) -> CandidateFile:
    """The candidate in a regular file; raises :class:`CandidateNotFound` for any other, and for one that no record and message can hold.

    ``below``: a folder that strangers may have filled, below which no link is followed.
    """
    try:
        data = read_regular(path, MOST_BYTES, below)
    except FileRefused as error:
        raise CandidateNotFound(str(error)) from None
    whole = path.resolve()
    if not str(whole).isprintable():
        raise CandidateNotFound(f"the path of the candidate {shown_path(path)} has characters that cannot be printed: rename it")
    named = resolve(path.stem, slugs())
    found = _candidate(path.stem, whole, data, named.problem if named else None)
    return replace(found, note=named.note if named else "")


def candidate_text(source: str | bytes, problem: int | None = None, name: str = "candidate") -> CandidateFile:
    """The candidate in a text; ``name`` is what results and tracebacks call it."""
    if not isinstance(source, (str, bytes)):
        raise CandidateNotFound(f"source={source!r}: expected the text of a Python module that defines `solution`")
    if not name.isprintable() or "/" in name or not name:
        raise CandidateNotFound(f"name={name!r}: expected a printable name without slashes, such as 'sample7_cuda'")
    try:
        data = source.encode() if isinstance(source, str) else source
    except UnicodeEncodeError as error:
        raise CandidateNotFound(f"source= cannot be encoded as UTF-8: {error.reason} at character {error.start}") from None
    return replace(_candidate(name, Path(f"{name}.py"), data, problem), text=data)


def one_candidate(
    problem: int | None, source: str | bytes | None, path: str | Path | None, candidate: CandidateFile | None, name: str
) -> CandidateFile:
    """The candidate that a call gives in one of three ways, for this problem if it names one; raises :class:`UsageError` for any other."""
    if sum(item is not None for item in (source, path, candidate)) != 1:
        raise UsageError("expected one of source=TEXT, path=FILE and candidate=CANDIDATE")
    if source is not None:
        return candidate_text(source, problem, name)
    found = candidate if candidate is not None else candidate_file(Path(path or ""))
    return found if problem is None else replace(found, problem=problem)


def _candidate(name: str, path: Path, data: bytes, problem: int | None) -> CandidateFile:
    if len(data) > MOST_BYTES:
        raise CandidateNotFound(f"the candidate {path} has {len(data)} bytes: expected at most {MOST_BYTES}")
    source = data.decode(errors="replace")
    backend = _backend(source)
    return CandidateFile(
        name, path, hashlib.sha256(data).hexdigest(), backend, problem, backend == "cuda" or any(mark in source for mark in _CUDA_MARKS)
    )


def _backend(source: str) -> Backend:
    """Returns what a source's kernels are, from what it imports and calls. What Python cannot read is searched for the same words."""
    try:
        tree = parse(source)
        names = set(_names(tree))
    except UNREADABLE:
        if any(mark in source for mark in _CUDA_MARKS):
            return "cuda"
        return "triton" if re.search(r"^\s*(import|from) triton\b", source, re.MULTILINE) else "pytorch"
    triton = {name for name in names if _below(name, _TRITON_NAMES)}
    cuda = {name for name in names - triton if _below(name, _CUDA_NAMES)}
    if cuda and not (cuda <= _CPP_NAMES and "load" not in names and _compiles_cpp_alone(tree)):
        return "cuda"
    return "triton" if triton else "pytorch"


def _compiles_cpp_alone(tree: ast.Module) -> bool:
    """Tells whether a module's extensions are all shown to be C++ for the host, by calls of ``load_inline`` without CUDA sources."""
    nodes = list(ast.walk(tree))
    uses = sum(getattr(node, "attr", getattr(node, "id", "")) == "load_inline" for node in nodes)
    calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "load_inline"]
    texts = (node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return 0 < uses == len(calls) and all(map(_is_cpp, calls)) and not any(map(_CUDA_HEADER.search, texts))


def _is_cpp(call: ast.Call) -> bool:
    """Tells whether a call of ``load_inline`` gives no source but ``cpp_sources``."""
    unknown = any(isinstance(argument, ast.Starred) for argument in call.args) or any(item.arg is None for item in call.keywords)
    given = [item.value for item in call.keywords if item.arg in ("cuda_sources", "sycl_sources", "with_cuda")]
    return not unknown and len(call.args) <= 2 and all(ast.unparse(value) in ("None", "''", "[]", "False") for value in given)


def _below(name: str, modules: Sequence[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _names(tree: ast.Module) -> Iterator[str]:
    """Yields the dotted names of everything that a module imports, and the plain names that it uses."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name):
            yield node.id


def discover(
    arguments: Sequence[str], note: Callable[[str], None] = lambda _: None, refuse: Callable[[str], None] | None = None
) -> list[CandidateFile]:
    """The candidates that the arguments name, in order. Folders give the numbered ``.py`` files in and below them, by number and name.

    ``note`` hears which problem a file means whose number is another's, and which files mean none and are skipped. ``refuse`` (by default
    ``note``) hears of files that are not judged because they are links, no regular files, too large or unreadable.

    ``reference`` stands for the problems' references and ``solutions`` for peerlane's own solutions; ``./solutions`` is a folder.
    Raises :class:`CandidateNotFound` for a path that does not exist or is empty, and if there is no candidate left.
    """
    found: list[CandidateFile] = []
    skipped: list[str] = []
    refused: list[str] = []
    for argument in arguments:
        if not argument:  # an unset variable of a shell, more likely than the working directory
            raise CandidateNotFound("got '' for a candidate: expected a .py file or a folder; '.' is the current one")
        path = PACKAGE / SOLUTIONS if argument == SOLUTIONS else own_example(argument)
        if argument == REFERENCE:
            found.append(reference_candidate())
        elif os.path.isdir(path):
            found += _in_folder(path, skipped, refused)
        elif os.path.lexists(path):
            found += _named(_readable([path], None, refused), skipped)
        else:
            raise CandidateNotFound(
                f"there is no candidate {argument!r}: expected a .py file, a folder, or the word {REFERENCE!r} or {SOLUTIONS!r}"
            )
    if not found and (refused or skipped):
        raise CandidateNotFound("; ".join([*refused, *skipped][:_MOST_NAMED]))
    for text in refused:
        (refuse or note)(f"{text}; it is skipped")
    for text in (*(f"{text}; it is skipped" for text in skipped), *(f"{item.path}: {item.note}" for item in found if item.note)):
        note(text)
    return found


def _in_folder(folder: Path, skipped: list[str], refused: list[str]) -> list[CandidateFile]:
    """The candidates below a folder, each named by its path there: samples of one problem have the same file name."""
    known = slugs()
    numbered, unread = find_files(folder, lambda name: _NUMBERED.fullmatch(name) is not None)
    files = [file for file in numbered if file.suffix == ".py" and resolve(file.stem, known) is not None]
    inside = _readable(files, folder, refused)
    skipped += [f"{shown_path(file)}: expected a name like <id>_<name>_<backend>.py" for file in sorted({*numbered} - {*files})]
    refused += unread
    if not inside and not skipped and not refused:
        raise CandidateNotFound(f"no candidates in {folder}: expected files named <id>_<name>_<backend>.py, in it or below it")
    return _named(sorted(inside, key=lambda item: (item.problem or 0, item.name)), skipped)


def _readable(files: Sequence[Path], folder: Path | None, refused: list[str]) -> list[CandidateFile]:
    """The candidates in those files that can be read."""
    found = []
    for file in files:
        try:
            candidate = candidate_file(file, folder)
        except CandidateNotFound as error:
            refused.append(str(error))
        else:
            name = file.stem if folder is None else "/".join(file.relative_to(folder).with_suffix("").parts)
            found.append(replace(candidate, name=name))
    return found


def _named(candidates: list[CandidateFile], skipped: list[str]) -> list[CandidateFile]:
    """Those whose names mean a problem, or say nothing of one."""
    skipped += [f"{item.path}: {item.note}" for item in candidates if item.problem is None and item.note]
    return [item for item in candidates if item.problem is not None or not item.note]


def candidate_info(candidate: CandidateFile) -> CandidateInfo:
    path = None if candidate.text is not None else _shown(candidate.path)
    return CandidateInfo(name=candidate.name, labels=dict(candidate.labels), path=path, sha256=candidate.sha256, backend=candidate.backend)


def _shown(path: Path | None) -> str | None:
    """The path below the working directory, else the file's name: results travel to other machines."""
    if path is None:
        return None
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return path.name
