"""One evaluation on emulated ranks: import, correctness and races in every case, exit. No GPU is needed, and nothing is timed."""

import math
from dataclasses import dataclass, field

from peerlane.device.nccl.installation import what_is_missing as nccl_is_missing
from peerlane.emulator.cuda_extensions import NO_TOOLKIT
from peerlane.emulator.findings import NOTES, ORDER
from peerlane.emulator.host_libraries import DIFFERENT_LAUNCHES, launches_differ, runs_here, wants_extension
from peerlane.emulator.job import AT_MOST
from peerlane.emulator.ptx_front_end import NOT_KNOWN
from peerlane.emulator.solution_run import wants_distributed
from peerlane.emulator.torch_cuda import NOT_EMULATED
from peerlane.emulator.triton_launches import NO_TRITON, triton_is_here, wants_triton
from peerlane.evaluate.audit.audit import library_violation
from peerlane.evaluate.audit.library import library_kernels
from peerlane.evaluate.candidates import KIT, uses_nccl, uses_nvshmem
from peerlane.evaluate.correctness.case_runner import CaseRunner, Rejected
from peerlane.evaluate.messages import Request
from peerlane.evaluate.pipeline import CHECKED_SLOTS, EvaluationPipeline
from peerlane.evaluate.processes.rank_group import GroupFailure
from peerlane.evaluate.processes.session import EMULATED_SCHEDULES
from peerlane.evaluate.rank_interface import EmulatedInterface
from peerlane.evaluate.ranks.builds import Builds
from peerlane.evaluate.ranks.rank import wants_gpu
from peerlane.problems.contract.spec import Case
from peerlane.results.result import Audit
from peerlane.results.sanitize import sanitize, several_lines
from peerlane.results.verdict import Correct, NotRun, Unstable, Verdict, WrongResult
from peerlane.sandbox.hidden_files import is_answer_file

_NO_KIT = f"emulated ranks run candidates of {KIT}, Triton, cuda.core or CUDA extensions, and this is none: use --device cpu or cuda"
_SET_UP = "calls {names}, which the custom track allows in set-up only: emulated ranks cannot tell; use --device cpu or cuda"
_REFERENCE = "emulated ranks do not run the reference: use --device cpu or cuda"
_NVSHMEM = "a GPU: emulated ranks have no NVSHMEM; protocols for it can be checked by `peerlane race`, with <peerlane/peers/remote.cuh>"
_MOST_KERNELS = 32


@dataclass
class EmulatedPipeline(EvaluationPipeline):
    """Judges a candidate of the device kit whose ranks are threads, and whose kernels run in the emulator."""

    calls: int = 0
    """The candidate's calls on every rank."""
    launches: dict[str, int] = field(default_factory=dict)
    """by kernel, of all ranks together"""
    library: set[str] = field(default_factory=set)
    """kernels of the kit's library that were launched"""
    collectives: dict[str, int] = field(default_factory=dict)
    """The number of calls of torch.distributed, by name, of all ranks together."""
    compiled: list[str] | None = None
    """what the launched kernels need of a GPU; None: not compiled for one"""

    def _run_stages(self) -> Verdict:
        job = self.job
        cases = self._cases()
        self.source = job.candidate.source()
        if self.source is None or uses_nvshmem(self.source) or not (KIT in self.source or runs_here(self.source)):
            return NotRun(missing=_REFERENCE if self.source is None else _NVSHMEM if uses_nvshmem(self.source) else _NO_KIT)
        if uses_nccl(self.source) and (missing := nccl_is_missing()) is not None:
            return NotRun(missing=missing)
        if wants_triton(self.source) and not triton_is_here():
            return NotRun(missing=NO_TRITON)
        if wants_extension(self.source):
            self.flags.add("native_host_code")
            with self._in("build"):
                (self.builds or Builds(self.session, 0)).finish(job.candidate, self.limit)
        self._spawn()
        self._load()
        for number, case in enumerate(cases):
            self._check_and_race(case, first=number == 0)
        if self.library and self.job.track == "custom" and not is_answer_file(self.job.candidate.path):
            raise Rejected(library_violation(self.library))
        if self.collectives and self.job.track == "custom":
            raise Rejected(NotRun(missing=_SET_UP.format(names=", ".join(sorted(self.collectives)))))
        self._leave_untimed(self.node.place.untimed)
        self._leave()
        return Correct()

    def _check_and_race(self, case: Case, *, first: bool) -> None:
        """Judges the results of a case, then what its launches do under other schedules, which may explain a wrong result."""
        try:
            runner = self._check(case, first=first)
        except Rejected as rejected:
            if isinstance(rejected.verdict, WrongResult):
                self._race(case)
            raise
        notes = self._race(case)
        runner.evidence.stressed_calls += CHECKED_SLOTS * EMULATED_SCHEDULES
        if ORDER in notes:
            self._judge_other_orders(runner)

    def _judge_other_orders(self, runner: CaseRunner) -> None:
        """Judges results of as many schedules as launches had: where the order of atomics decides what is written, only an oracle can."""
        slots = range(min(CHECKED_SLOTS, runner.slots))
        with self._in("stress"):
            for _ in range(EMULATED_SCHEDULES - 1):
                runner.refresh_inputs(len(slots), mixed=True)
                runner.check("stress", self.session.deadlines.calls, slots)
        self._race(runner.case, calls=(EMULATED_SCHEDULES - 1) * len(slots))

    def _race(self, case: Case, calls: int = CHECKED_SLOTS) -> frozenset[str]:
        """Raises Rejected for what the emulator has found in the latest ``calls``; returns the kinds of its notes."""
        with self._in("stress"):
            report = self.group.present.ask(Request(EmulatedInterface.report_races), "stress", self.session.deadlines.calls, calls=False)[0]
        self.calls += calls
        notes = NOTES & set(report.notes)
        self.flags |= notes
        self.launches, self.collectives = sanitize(report.launches), sanitize(report.collectives)
        self.compiled = None if report.kernels is None else sanitize(report.kernels)
        if report.kernels is None:
            self.flags.add("not_compiled")
        self.library |= {name for tokens in report.sources if (name := library_kernels().get(tokens)) is not None}
        if report.findings:
            first = report.findings[0]
            raise Rejected(
                Unstable(
                    case=case.key,
                    rank=first.rank,
                    output=f"{first.kind}{' at ' + first.memory if first.memory else ''}",
                    detail=first.summary,
                    wrong_slots=max(1, first.schedules),
                    compared_slots=max(EMULATED_SCHEDULES, first.schedules),
                    findings=tuple(several_lines(item.text) for item in report.findings),
                )
            )
        return notes

    def _blame(self, failure: GroupFailure) -> Verdict:
        line = "".join(failure.message.strip().splitlines()[-1:])
        if failure.kind in ("runtime_error", "import_error"):
            if wants_distributed(line):
                return NotRun(missing=f"uses torch.distributed in a way that emulated ranks do not have ({line}): use --device cpu or cuda")
            if any(said in line for said in (NOT_KNOWN, AT_MOST, NOT_EMULATED, NO_TOOLKIT)):
                return NotRun(missing=line)
            if launches_differ(line, self.source or ""):
                return NotRun(missing=f"{line}; {DIFFERENT_LAUNCHES}")
            if wants_gpu(line):
                return NotRun(missing=f"needs a GPU: {line}; emulated ranks have the kernels of the device kit alone")
        return super()._blame(failure)

    def _audit_record(self) -> Audit | None:
        """Every launch is the candidate's or the kit's: beside torch.distributed, nothing else in its process communicates."""
        if not self.calls:
            return None
        everywhere = self.calls * self.job.world_size
        own = math.ceil(sum(self.launches.values()) / everywhere)
        names = sorted(self.launches, key=lambda name: -self.launches[name])[:_MOST_KERNELS]
        return Audit(
            calls=self.calls,
            block_modes=(),
            kernels={"own": own},
            copies={},
            memsets=0,
            operators={name: math.ceil(count / everywhere) for name, count in self.collectives.items()},
            other=0,
            kernel_names=tuple(names),
            compiled=tuple((self.compiled or [])[:_MOST_KERNELS]),
            unrecorded_collectives=0,
            complete=True,
        )
