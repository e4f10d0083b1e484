"""Runs a solution's own host code on emulated ranks.

    outcome = run(Path("18_mine_cuda.py"), calls)        calls[i][rank]: the arguments of a rank's call number i
    outcome.outputs[i][rank]                             what it returned
    outcome.findings                                     races, deadlocks and what else the emulator saw

Every rank imports the file for itself, so module variables are a rank's own.
"""

import importlib.util
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from peerlane.device.host.group import Group
from peerlane.emulator.check import Report
from peerlane.emulator.findings import Finding
from peerlane.emulator.gpu_code import EmulatedGpu, KernelNeeds
from peerlane.emulator.host_libraries import prepare
from peerlane.emulator.ranks import Arguments, EmulatedRanks, RankFailure, tensors_of
from peerlane.emulator.sequence import Code, candidate_findings
from peerlane.errors import UsageError

_DISTRIBUTED = re.compile(r"process group has not been initialized|init_process_group|ProcessGroup|torch\.distributed")


@dataclass
class Outcome:
    """The outcome of a run."""

    outputs: list[list[Any]]
    """by call, then by rank; of the calls that all ranks returned from"""
    reports: list[Report]
    """The reports of every sequence of launches, and of launches that failed by themselves."""
    failure: tuple[int, BaseException] | None
    """the first rank that failed, and its error"""
    aliased: bool = False
    """whether an output of some call lies where one of the call before lay, which it has overwritten"""
    kernels: list[KernelNeeds] | None = None
    """what the launched kernels need of a GPU; None: there is no compiler for it, hence nothing is known to compile"""
    codes: list[Code] = field(default_factory=list)
    """the sources of the launched kernels"""

    @property
    def findings(self) -> list[Finding]:
        """The findings that show an error."""
        return candidate_findings(self.reports)[0]

    @property
    def notes(self) -> list[Finding]:
        """Findings that are right on GPUs of today, though PTX does not promise it, and copies of what nobody has written."""
        return candidate_findings(self.reports)[1]


def run(
    solution: Path,
    calls: Sequence[Sequence[Arguments]],
    *,
    layouts: Mapping[str, Sequence[Sequence[int]]] | None = None,
    resolve: Callable[[Arguments, Mapping[str, Group]], Arguments] = lambda arguments, groups: arguments,
    schedules: int = 4,
    seed: int = 0,
    sm_count: int | None = None,
    gpu: EmulatedGpu | None = None,
    from_ptx: bool = False,
    nodes: int = 1,
) -> Outcome:
    """Calls the ``solution`` of a file on emulated ranks: ``calls[i][rank]`` are the arguments of call i, CPU tensors among them.

    ``nodes``: as in :class:`EmulatedRanks`. ``layouts`` names sets of groups by their ranks; ``resolve`` puts a rank's groups, by name,
    into its arguments. Outputs are copies.
    """
    ranks = EmulatedRanks(len(calls[0]), schedules=schedules, seed=seed, sm_count=sm_count, gpu=gpu, from_ptx=from_ptx, nodes=nodes)
    groups, outputs, failure = ranks.groups(layouts or {}), [], None
    latest: dict[int, Any] = {}
    reused: list[int] = []

    def keep(rank: int, output: Any) -> Any:
        if _places(latest.get(rank)) & _places(output):
            reused.append(rank)
        latest[rank] = output  # kept until the next call is over: the same place again is the solution's own reuse
        return _copied(output)

    prepare(solution.read_text(encoding="utf-8", errors="replace"))
    try:
        ranks.load(lambda rank: load(solution, rank))
        for call in calls:
            arguments = [resolve(own, named) for own, named in zip(call, groups, strict=True)]
            outputs.append(ranks.call(arguments, keep))
    except RankFailure as failed:
        failure = (failed.rank, failed.error)
    return Outcome(outputs, ranks.reports(), failure, bool(reused), ranks.kernels, ranks.codes)


def wants_distributed(message: str) -> bool:
    """Tells whether an error says that the solution used a part of torch.distributed that emulated ranks do not have."""
    return _DISTRIBUTED.search(message) is not None


def load(file: Path, rank: int) -> Callable[..., Any]:
    """Imports the ``solution`` of a file for one rank alone."""
    name = f"peerlane_emulated_rank_{rank}_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UsageError(f"{file} is not a Python file; expected one with a function solution")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    solution = getattr(module, "solution", None)
    if not callable(solution):
        raise UsageError(f"{file} has no function solution; define one with the problem's parameters")
    return solution  # type: ignore[no-any-return]


def _places(output: Any) -> set[int]:
    """Returns the addresses of an output's tensors that are not empty."""
    return {tensor.data_ptr() for tensor in tensors_of(output)} - {0}


def _copied(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output.detach().clone()
    if isinstance(output, list | tuple):
        return type(output)(map(_copied, output))
    if isinstance(output, dict):
        return {key: _copied(value) for key, value in output.items()}
    return output
