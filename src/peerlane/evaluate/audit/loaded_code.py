"""The device code that a candidate's rank has loaded: which kernels there are, and which mechanisms they have instructions for.

Looks at what ``peerlane.device`` loaded, at what Triton compiled, and at shared libraries that were mapped since the candidate's import.
Runs in the candidate's process: evidence for reports, not for verdicts.
"""

import gc
import mmap
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from peerlane.common.toolkit import find_disassembler
from peerlane.device.host import launch, tune
from peerlane.evaluate import wire
from peerlane.evaluate.audit.device_code import in_ptx, in_sass
from peerlane.evaluate.wire import MOST_NAMES, NAME_CHARACTERS, KernelOrigin

_demangle = torch._C._demangle
_MOST_LIBRARY_BYTES = 512 << 20
_DISASSEMBLY_S = 60.0
_FATBIN = b".nv_fatbin"


def mapped_libraries() -> frozenset[str]:
    """The shared libraries that this process has mapped; none where it may not know."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:  # forbidden by a sandbox
        return frozenset()
    paths = (line.split(maxsplit=5)[-1] for line in lines if "/" in line)
    return frozenset(path for path in paths if path.endswith(".so") or ".so." in path)


def loaded_code(before: frozenset[str], *, libraries: bool) -> wire.LoadedCode:
    """Lists the kernels that are loaded, and what could not be read.

    ``before``: what was mapped before the candidate; ``libraries``: whether to disassemble those it added, which takes seconds.
    """
    kernels: list[wire.LoadedKernel] = []
    unknown: list[str] = []

    def add(origin: KernelOrigin, found: Mapping[str, frozenset[str]]) -> None:
        for name, words in found.items():
            kernels.append(wire.LoadedKernel(_demangle(name)[:NAME_CHARACTERS], origin, sorted(words)))

    for path in launch.loaded_cubins():
        try:
            add("peerlane.device", in_ptx(path.with_suffix(".ptx").read_text()))
        except OSError as error:
            unknown.append(f"{path.name}: its PTX cannot be read ({error.strerror})")
    for ptx in _triton_ptx():
        add("triton", in_ptx(ptx))
    for library in sorted(mapped_libraries() - before) if libraries else ():
        try:
            if _has_device_code(Path(library)):
                add("library", disassembled(Path(library)))
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            unknown.append(f"{Path(library).name}: {error}"[:300])
    kernels.sort(key=lambda kernel: not kernel.mechanisms)  # those without any are the first to be left out
    return wire.LoadedCode(kernels[:MOST_NAMES], unknown, _choices(), launch.loaded_sources()[:MOST_NAMES])


def _choices() -> list[str]:
    """Returns the choices of the kit's tuner in this process."""
    return [str(choice)[:NAME_CHARACTERS] for choice in tune.report()]


def _triton_ptx() -> Iterator[str]:
    """Yields the PTX of every living kernel that Triton has compiled, or found in its cache, in this process."""
    compiler = sys.modules.get("triton.compiler.compiler")
    if compiler is None:
        return
    gc.unfreeze()  # what is exempt from collection is not listed
    for item in gc.get_objects():
        if type(item) is compiler.CompiledKernel and isinstance(ptx := item.asm.get("ptx"), str):
            yield ptx


def _has_device_code(library: Path) -> bool:
    with open(library, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return data.find(_FATBIN) >= 0


def disassembled(file: Path) -> dict[str, frozenset[str]]:
    """The kernels of a library or cubin: from the PTX in it if there is any, which shows more, else from its machine code.

    Raises OSError where cuobjdump is missing or cannot read the file, ValueError for a file that is too large to disassemble here, and
    subprocess.TimeoutExpired.
    """
    if file.stat().st_size > _MOST_LIBRARY_BYTES:
        raise ValueError(f"larger than {_MOST_LIBRARY_BYTES >> 20} MiB, not disassembled")
    tool = find_disassembler("cuobjdump")
    if tool is None:
        raise OSError("cuobjdump is not installed: pip install 'peerlane[triton]', or the CUDA toolkit")

    def dump(option: str) -> str:
        done = subprocess.run([tool, option, str(file)], capture_output=True, text=True, errors="replace", timeout=_DISASSEMBLY_S)
        if done.returncode:
            raise OSError(f"cuobjdump {option}: {done.stderr.strip() or done.returncode}")
        return done.stdout

    return dict(in_ptx(dump("-ptx")) or in_sass(dump("-sass")))
