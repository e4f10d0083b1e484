"""CUDA C++ source to cubin, by NVRTC, through a cache.

Needs no GPU. A cubin is found again by the content of everything that went into it: source, headers (recursively), flags, architecture and
NVRTC's version. On one node it is compiled once, however many ranks ask at the same time.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from peerlane import settings
from peerlane.common.files import one_process, write_atomically
from peerlane.common.toolkit import find_nvcc
from peerlane.device.host import cuda_bindings
from peerlane.device.host.source_tokens import token_hash
from peerlane.device.host.standard_headers import HEADERS, hint
from peerlane.errors import CompileError, UsageError

DEFAULT_ARCH = "sm_90a"
"""What is compiled for where there is no GPU to ask."""
INCLUDE_DIR = Path(__file__).parents[1] / "include"

# Part of every key: raise it when the meaning of a cached file changes.
_CACHE_FORMAT = "3"
# Before the first line of every source.
_STANDARD_NAMES = "#include <peerlane/ptx/standard.cuh>\n"
# Of another process's compile, which takes seconds at most. Who has waited longer compiles too, which the atomic rename makes harmless.
_PATIENCE_S = 60.0
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"\n]+)"|<([^>\n]+)>)', re.MULTILINE)


@dataclass(frozen=True)
class Cubin:
    """Machine code for one architecture, in the cache."""

    path: Path
    arch: str
    compiled_here: bool
    """Whether this call compiled it, rather than finding it."""
    source_hash: str = ""
    """The hash of the source's tokens, see ``source_tokens``."""

    def ptx(self) -> str:
        """The PTX that it was assembled from."""
        return self.path.with_suffix(".ptx").read_text()


def compile_cubin(
    source: str | Path,
    *,
    arch: str | None = None,
    defines: Mapping[str, str | int] | None = None,
    flags: Sequence[str] = (),
    include_dirs: Sequence[Path] = (),
) -> Cubin:
    """Compile ``source`` (text, or the Path of a file) as C++20 for ``arch``: by default the current device's, else sm_90a.

    ``defines`` become macros. Headers are looked for beside a source file, in ``include_dirs``, in peerlane's own (``<peerlane/...>``) and
    in the CUDA wheels. Kernels that are to be found by name are declared ``extern "C"``. Raises CompileError with NVRTC's log, which quotes
    the source line.
    """
    arch = arch or device_arch()
    name, text, own_dir = read_source(source)
    tokens, text = token_hash(text), _with_standard_names(name, text)
    search = [*own_dir, *include_dirs, INCLUDE_DIR, *toolkit_dirs()]
    options = [*gpu_options(arch, defines or {}), *flags]
    key = cache_key(text, options, search)
    return cached_cubin(key, arch, tokens, lambda: compile_text(name, text, [*options, *(f"--include-path={folder}" for folder in search)]))


def cached_cubin(key: str, arch: str, source_hash: str, build: Callable[[], Compiled]) -> Cubin:
    """Returns the cubin of this key from the cache, which ``build`` fills on a miss, in one process at a time."""
    folder = settings.cache_dir() / "cubin" / key[:2]
    path = folder / f"{key}.cubin"
    if path.exists():
        return Cubin(path, arch, compiled_here=False, source_hash=source_hash)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"the cache folder {folder} can not be made ({error}); set PEERLANE_CACHE_DIR to a writable folder") from error
    with one_process(folder / f"{key}.lock", _PATIENCE_S):
        if path.exists():
            return Cubin(path, arch, compiled_here=False, source_hash=source_hash)
        compiled = build()
        write_atomically(path.with_suffix(".ptx"), compiled.ptx)
        write_atomically(path, compiled.cubin)  # last: where there is a cubin, there is its PTX
    return Cubin(path, arch, compiled_here=True, source_hash=source_hash)


def device_arch() -> str:
    """The architecture of the current device, with the instructions that only it has: ``sm_90a``, ``sm_120a``, but ``sm_89``."""
    if not torch.cuda.is_available():
        return DEFAULT_ARCH
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def compiler_report(source: str | Path, *, arch: str = DEFAULT_ARCH, defines: Mapping[str, str | int] | None = None) -> str:
    """What ptxas says about every kernel of ``source`` with ``-v``: registers, spills, and what keeps the matrix units waiting. Not
    cached."""
    name, text, own_dir = read_source(source)
    search = [*own_dir, INCLUDE_DIR, *toolkit_dirs()]
    options = [*gpu_options(arch, defines or {}), "--ptxas-options=-v", *(f"--include-path={folder}" for folder in search)]
    return compile_text(name, _with_standard_names(name, text), options).log


def _with_standard_names(name: str, text: str) -> str:
    return f'{_STANDARD_NAMES}#line 1 "{name}"\n{text}'


def gpu_options(arch: str, defines: Mapping[str, str | int]) -> list[str]:
    """Returns NVRTC's options for an architecture and macros."""
    return [
        f"--gpu-architecture={arch}",
        "--std=c++20",
        "--generate-line-info",
        "--device-as-default-execution-space",  # without it a generic lambda in a device function is an error
        *(f"--define-macro={macro}={value}" for macro, value in sorted(defines.items())),
    ]


def nvrtc_version() -> tuple[int, int]:
    _, major, minor = cuda_bindings.nvrtc().nvrtcVersion()
    return major, minor


def read_source(source: str | Path) -> tuple[str, str, list[Path]]:
    """Returns the name of a source, its text, and the folder of its own headers, if it is a file."""
    if isinstance(source, str):
        return "source.cu", source, []
    try:
        return str(source), source.read_text(encoding="utf-8"), [source.resolve().parent]
    except OSError as error:
        raise UsageError(
            f"device source {source} can not be read ({error}); pass the text itself or the path of a readable file"
        ) from error


@cache
def toolkit_dirs() -> tuple[Path, ...]:
    """Returns CUDA's include folder and that of CCCL: of NVIDIA's wheels, else of the toolkit that has nvcc. Leaves out what is nowhere."""
    spec = importlib.util.find_spec("nvidia")
    roots = [] if spec is None else [Path(root) / "cu13" for root in spec.submodule_search_locations or ()]
    if (nvcc := find_nvcc()) is not None:
        roots.append(Path(nvcc).resolve().parents[1])
    found = {part: [root / part for root in roots if (root / part).is_dir()] for part in ("include", "include/cccl")}
    return tuple(folders[0] for folders in found.values() if folders)


def cache_key(text: str, options: Sequence[str], search: Sequence[Path], compiler: str = "") -> str:
    """Returns the hash of everything that a cubin is made from: text, options, the compiler (by default NVRTC), and the headers found in
    ``search``."""
    digest = hashlib.sha256()
    standard = [HEADERS[name] for name in HEADERS if f"<{name}>" in text]
    for part in (_CACHE_FORMAT, compiler or str(nvrtc_version()), *options, "", text, *standard):
        digest.update(part.encode() + b"\0")
    for include, content in _headers(text, search):
        digest.update(include.encode() + b"\0" + hashlib.sha256(content).digest())
    return digest.hexdigest()


def _headers(text: str, search: Sequence[Path]) -> Iterator[tuple[str, bytes]]:
    """Every header reachable from ``text``, as (spelling, content), in a fixed order.

    Conditions are not evaluated, so it may be more than the compiler reads. Headers that are built into NVRTC are not found and belong to
    its version. A header named by a macro is not followed.
    """
    seen: set[Path] = set()
    pending = [(text, list(search))]
    while pending:
        content, folders = pending.pop()
        for quoted, angled in _INCLUDE.findall(content):
            include = quoted or angled
            path = next((folder / include for folder in folders if (folder / include).is_file()), None)
            if path is None or path.resolve() in seen:
                continue
            seen.add(path.resolve())
            data = path.read_bytes()
            yield include, data
            pending.append((data.decode(errors="replace"), [path.parent, *search]))


class Compiled(NamedTuple):
    """What NVRTC makes of a source."""

    cubin: bytes
    ptx: bytes
    log: str


def compile_text(name: str, text: str, options: Sequence[str]) -> Compiled:
    """Returns what NVRTC makes of a text; raises CompileError with its log."""
    nvrtc = cuda_bindings.nvrtc()
    headers = [content.encode() for content in HEADERS.values()]
    status, program = nvrtc.nvrtcCreateProgram(text.encode(), name.encode(), len(headers), headers, [header.encode() for header in HEADERS])
    if status:
        raise CompileError(f"NVRTC could not take {name}: {status.name}; expected source text without NUL bytes")
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = bytearray(size)
        nvrtc.nvrtcGetProgramLog(program, log)
        text_log = log.decode(errors="replace").rstrip("\0\n")
        if status:
            used = f"{status.name}; NVRTC {'.'.join(map(str, nvrtc_version()))}, {' '.join(options)}"
            raise CompileError(f"{name} does not compile for a GPU:\n{text_log}\n({used}){hint(text_log)}")
        _, size = nvrtc.nvrtcGetCUBINSize(program)
        cubin = bytearray(size)
        nvrtc.nvrtcGetCUBIN(program, cubin)
        _, size = nvrtc.nvrtcGetPTXSize(program)
        ptx = bytearray(size)
        nvrtc.nvrtcGetPTX(program, ptx)
        return Compiled(bytes(cubin), bytes(ptx).rstrip(b"\0"), text_log)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
