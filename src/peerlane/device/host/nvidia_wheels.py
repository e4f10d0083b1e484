"""NVIDIA's wheels: where they lie, the version that a header says, and nvcc for headers that NVRTC cannot read."""

import importlib.util
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from peerlane import settings
from peerlane.common.toolkit import find_nvcc
from peerlane.device.host.jit import Compiled
from peerlane.errors import CompileError, MissingDependency

_NVCC_S = 240.0


@dataclass(frozen=True)
class Installation:
    """A folder with ``include`` and ``lib``: of a wheel, or one that the user names."""

    root: Path
    version: tuple[int, int, int]

    @property
    def include(self) -> Path:
        return self.root / "include"

    def library(self, name: str) -> Path:
        """Returns where the library of this name lies."""
        return self.root / "lib" / name

    def __str__(self) -> str:
        return ".".join(map(str, self.version))


@dataclass(frozen=True)
class Library:
    """What candidates for a library of NVIDIA's need of it, and where it is looked for."""

    name: str
    oldest: tuple[int, int]
    header: str
    """The one with the version."""
    affixes: tuple[str, str]
    """What the names of the version's numbers begin and end with in this header."""
    files: Sequence[str]
    lacks: str
    """Which of these an absent one lacks, in words: "whose headers are not"."""

    @property
    def install(self) -> str:
        """The command that brings it."""
        return f"pip install 'peerlane[{self.name.lower()}]'"

    def find(self) -> Installation | None:
        """Returns the library of the folder that NAME_HOME names, else of NVIDIA's wheel; None if there is none, or only a part of one."""
        if (named := settings.library_home(self.name)) is not None:
            roots = [named]
        else:
            spec = importlib.util.find_spec("nvidia")
            roots = [Path(folder) / self.name.lower() for folder in spec.submodule_search_locations or ()] if spec else []
        for root in roots:
            found = Installation(root, self._version(root / self.header))
            if found.version >= self.oldest and all((root / file).is_file() for file in self.files):
                return found
        return None

    def found(self) -> Installation:
        """Returns the library; raises MissingDependency if it is not here."""
        found = self.find()
        if found is None:
            raise MissingDependency(self.missing() or "")
        return found

    def missing(self) -> str | None:
        """Returns what candidates for it lack here, with the command that brings it; None if nothing is missing."""
        if self.find() is not None:
            return None
        named, oldest = settings.library_home(self.name), ".".join(map(str, self.oldest))
        where = f"in {named}, which {self.name}_HOME names" if named is not None else "among the installed packages"
        return f"{self.name} {oldest} or newer, {self.lacks} {where}: run {self.install}"

    def _version(self, header: Path) -> tuple[int, int, int]:
        """Returns the version that a header defines; zeros without the header."""
        try:
            text = header.read_text()
        except OSError:
            return 0, 0, 0
        prefix, suffix = self.affixes
        numbers = {part: int(number) for part, number in re.findall(rf"#define {prefix}(MAJOR|MINOR|PATCH){suffix} (\d+)", text)}
        return numbers.get("MAJOR", 0), numbers.get("MINOR", 0), numbers.get("PATCH", 0)


def nvcc_identity() -> str:
    """Returns what tells this nvcc from others, as a part of cache keys."""
    nvcc = find_nvcc()
    return "no nvcc" if nvcc is None else f"{Path(nvcc).resolve()} of {Path(nvcc).stat().st_mtime_ns}"


def compile_by_nvcc(name: str, text: str, options: Sequence[str], *, instead: str, library: Path | None = None) -> Compiled:
    """Returns what nvcc makes of a source, linked with a library for devices if one is given.

    ``instead`` says what to install where nvcc is missing, which raises MissingDependency. Raises CompileError with nvcc's log.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        raise MissingDependency(f"nvcc is not here: expected it on PATH or in /usr/local/cuda/bin, to compile {name}; {instead}")
    arch = next(option for option in options if option.startswith("--gpu-architecture="))
    # NVRTC's alone: in a file of nvcc, functions are for the host unless they say otherwise.
    kept = [option for option in options if option != "--device-as-default-execution-space"]
    with tempfile.TemporaryDirectory() as folder:
        source, ptx, code, linked = (Path(folder) / f"program.{ending}" for ending in ("cu", "ptx", "cubin", "linked"))
        source.write_text(text, encoding="utf-8")
        _run(name, [nvcc, *kept, "-ptx", str(source), "-o", str(ptx)])
        _run(name, [nvcc, arch, *(["-rdc=true"] if library else []), "-cubin", str(ptx), "-o", str(code)])
        if library is not None:
            _run(name, [nvcc, arch, "-dlink", "-cubin", str(code), str(library), "-o", str(linked)])
        return Compiled((linked if library else code).read_bytes(), ptx.read_bytes(), "")


def _run(name: str, command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_NVCC_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"{name} was not compiled: {error}") from None
    if done.returncode:
        raise CompileError(f"{name} does not compile for a GPU:\n{(done.stderr or done.stdout).strip()}\n({' '.join(command)})")
