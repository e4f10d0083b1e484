"""``peerlane compile``: a file's kernels as the GPU's compiler makes them, without a GPU."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peerlane.cli.exit_codes import ExitCode
from peerlane.cli.options import ProblemFolders
from peerlane.cli.output import print_error, print_json
from peerlane.cli.race import imported, scenarios
from peerlane.common.version import own_example
from peerlane.errors import CompileError, UsageError

if TYPE_CHECKING:
    from peerlane.emulator.gpu_code import EmulatedGpu

_SM_THREADS = 2048


@dataclass(frozen=True)
class _Source:
    """A source with its macros, and the threads and dynamic shared memory of each kernel's largest launch, if they are known."""

    source: str | Path
    defines: dict[str, str | int]
    launched: dict[str, tuple[int, int]]
    include_dirs: Sequence[Path] = ()


def compile_kernels(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A .cu file, a solution of a problem, or a file with race(world_size).")],
    kernel: Annotated[str | None, typer.Option(help="Only this kernel.")] = None,
    gpu: Annotated[str, typer.Option(help="h100, h200 or b200.")] = "h100",
    world_size: Annotated[int, typer.Option(min=1, max=8, help="The number of ranks that host code is run for.")] = 2,
    define: Annotated[list[str] | None, typer.Option("--define", "-D", metavar="NAME=VALUE", help="A macro of a .cu file.")] = None,
    include: Annotated[list[Path] | None, typer.Option("--include", "-I", metavar="FOLDER", help="A folder of headers.")] = None,
    ptx: Annotated[bool, typer.Option("--ptx", help="Print the PTX under its source lines.")] = False,
    sass: Annotated[bool, typer.Option("--sass", help="Print the machine code, if a disassembler is found.")] = False,
    problems_folders: ProblemFolders = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compile a file's kernels with NVRTC; say registers, shared memory and occupancy. Needs no GPU.

    The kernels of a solution are those that it launches in the first small case of its problem, on emulated ranks. Those of a file with a
    function race(world_size) are the ones of its scenarios.

    Exit codes: 0 all compile, 2 usage, 3 one does not.
    """
    from peerlane.common.toolkit import find_disassembler
    from peerlane.device.host.jit import compile_cubin
    from peerlane.device.host.resources import resources
    from peerlane.device.tools.listing import ptx_listing, sass_listing
    from peerlane.emulator.gpu_code import KernelNeeds, gpu_named

    file, chosen = own_example(file), gpu_named(gpu)
    disassembler = find_disassembler() if sass else None
    if sass and disassembler is None:
        raise UsageError("--sass needs nvdisasm, which is not here: install the CUDA toolkit, or pip install 'peerlane[triton]'")
    rows, seen = [], set()
    try:
        for source in _sources(file, chosen, world_size, define or []):
            cubin = compile_cubin(
                source.source, arch=chosen.arch, defines=source.defines, include_dirs=[*source.include_dirs, *(include or [])]
            )
            for name, found in resources(cubin).items():
                if kernel not in (None, name) or (source.launched and name not in source.launched) or (name, cubin.path) in seen:
                    continue
                seen.add((name, cubin.path))
                needs = KernelNeeds(name, chosen.arch, found, *source.launched.get(name, ()))
                rows.append(asdict(needs) | {"blocks_per_sm": needs.per_sm() if needs.threads else None})
                if not as_json:
                    occupancy = f", {100 * needs.per_sm() * needs.threads // _SM_THREADS} % of an SM's threads" if needs.threads else ""
                    print(f"{needs}{occupancy}")
                    for listing in (
                        ptx_listing(cubin, name) if ptx else "",
                        sass_listing(cubin, disassembler, name) if disassembler else "",
                    ):
                        if listing:
                            print(listing)
    except CompileError as error:
        print_error(f"build error: {error}")
        raise typer.Exit(ExitCode.NOT_CORRECT) from None
    if not rows:
        raise UsageError(f'{file} has no kernel{f" {kernel}" if kernel else ""}; expected one or more that are declared extern "C"')
    if as_json:
        print_json({"gpu": chosen.name, "kernels": rows})


def _sources(file: Path, gpu: EmulatedGpu, world_size: int, defines: Iterable[str]) -> list[_Source]:
    """Returns the sources of a file; raises CompileError where its host code meets one."""
    if file.suffix in (".cu", ".cuh"):
        pairs = [item.partition("=") for item in defines]
        return [_Source(file, {name: value or "1" for name, _, value in pairs}, {})]
    from peerlane.emulator import Ptx

    module = imported(file)
    if callable(getattr(module, "race", None)) or not callable(getattr(module, "solution", None)):
        return [
            _Source(
                item.source, dict(item.defines), {one.kernel: (one.threads, one.shared_bytes) for one in item.launches}, item.include_dirs
            )
            for item in scenarios(file, module, world_size)
            if not isinstance(item.source, Ptx)  # which a compiler has made already
        ]
    from peerlane import problems
    from peerlane.evaluate.candidates import candidate_file
    from peerlane.evaluate.correctness.emulated import judge_emulated

    number = candidate_file(file).problem
    if number is None:
        raise UsageError(f"{file.name} says no problem; name the file like 18_mine_cuda.py, or give a .cu file")
    problem = problems.get(number)
    cases = problem.cases("small", world_size)
    if not cases:
        raise UsageError(f"problem {number} has no small case for {world_size} ranks; choose another --world-size")
    with contextlib.redirect_stdout(sys.stderr):
        outcome = judge_emulated(file, problem, cases[0], schedules=0, gpu=None).outcome
    if outcome.failure is not None and isinstance(outcome.failure[1], CompileError):
        raise outcome.failure[1]
    launched = {item.name: (item.threads, item.dynamic_shared_bytes) for item in outcome.kernels or ()}
    sources = [(code.source, dict(code.defines)) for code in outcome.codes]
    if not sources:
        why = f": {outcome.failure[1]}" if outcome.failure is not None else ""
        raise UsageError(f"{file.name} launched no kernel of the device kit in case {cases[0].label}{why}")
    return [_Source(source, defines, launched) for source, defines in sources if not isinstance(source, Ptx)]
