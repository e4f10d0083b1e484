"""NVIDIA's wheels: where they lie, the version that a header says, and nvcc for headers that NVRTC cannot read."""

import importlib.util
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from peerlane.common.toolkit import find_nvcc
from peerlane.device.host.jit import Compiled
from peerlane.errors import CompileError, MissingDependency

_NVCC_S = 240.0


def wheel_folders(name: str) -> list[Path]:
    """Returns the folders in which a wheel of NVIDIA's, such as ``nccl``, has its ``include`` and ``lib``."""
    spec = importlib.util.find_spec("nvidia")
    return [] if spec is None else [Path(folder) / name for folder in spec.submodule_search_locations or ()]


def header_version(header: Path, prefix: str, suffix: str = "") -> tuple[int, int, int]:
    """Returns the version that a header defines by ``prefix`` MAJOR, MINOR or PATCH ``suffix``; zeros without the header."""
    try:
        text = header.read_text()
    except OSError:
        return 0, 0, 0
    numbers = {part: int(number) for part, number in re.findall(rf"#define {prefix}(MAJOR|MINOR|PATCH){suffix} (\d+)", text)}
    return numbers.get("MAJOR", 0), numbers.get("MINOR", 0), numbers.get("PATCH", 0)


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
