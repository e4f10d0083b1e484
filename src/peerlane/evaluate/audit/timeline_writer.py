"""Writes timelines of a candidate's calls to files: of one call at rest, and of a timed block of each launch mode."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from peerlane.evaluate import wire
from peerlane.evaluate.audit.audit import Auditor
from peerlane.evaluate.audit.timeline import timeline_of
from peerlane.evaluate.correctness.case_runner import CaseRunner
from peerlane.evaluate.plan import Job
from peerlane.evaluate.timing.benchmark import Benchmark
from peerlane.results.speed_record import ModeSpeed, Speed


@dataclass(frozen=True)
class TimelineWriter:
    """Writes into ``folder``. ``device`` is the name that results have for it."""

    folder: Path
    job: Job
    device: str

    def write_call(self, runner: CaseRunner) -> None:
        """Records one call on new contents; raises Rejected if its outputs are wrong."""
        runner.refresh_inputs(1)
        answers = runner.check("audit", runner.session.deadlines.first_call, [0], marker=secrets.token_hex(16), timeline=True)
        self._write([answer.recordings[0] for answer in answers], 1, {"case": runner.case.label, "mode": "call"})

    def write_blocks(self, speed: Benchmark, speeds: Sequence[Speed], auditor: Auditor | None) -> None:
        """Records a block of each mode that was measured."""
        for item in speeds:
            if isinstance(item, ModeSpeed):
                recordings = speed.profile_block(item.mode, secrets.token_hex(16), timeline=True)
                labels: dict[str, object] = {"case": speed.runner.case.label, "mode": item.mode, "measured_us": item.candidate_us.median}
                labels |= {"bound_us": item.utilisation[0].bound_us, "bound_by": item.utilisation[0].bound_by} if item.utilisation else {}
                self._write(recordings, speed.calls[item.mode], labels, auditor)

    def _write(self, recordings: list[wire.Recording], calls: int, labels: dict[str, object], auditor: Auditor | None = None) -> None:
        job, moving = self.job, {kernel.name: kernel.mechanisms for kernel in auditor.loaded} if auditor else {}
        asked: dict[str, object] = {"candidate": job.candidate.name, "problem": job.problem.id, "slug": job.problem.slug}
        asked |= {"preset": job.preset, "world_size": job.world_size, "device": self.device, **labels}
        timeline_of(recordings, calls, moving, asked).write(self.folder / f"{job.candidate.name}.{labels['mode']}.json")
