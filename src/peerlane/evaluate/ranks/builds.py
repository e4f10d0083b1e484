"""Builds on CPU cores, ahead of their candidates' turn, while the ranks judge others. See builder.py for the process that compiles."""

from __future__ import annotations

import contextlib
import shutil
from collections import deque
from collections.abc import Iterable

from peerlane.errors import CandidateChanged, HarnessError
from peerlane.evaluate import wire
from peerlane.evaluate.candidates import CandidateFile
from peerlane.evaluate.processes.limit import Limit
from peerlane.evaluate.processes.rank_group import GroupFailure, RankGroup
from peerlane.evaluate.processes.session import Session
from peerlane.sandbox.hidden_files import family_sources
from peerlane.settings import cache_dir

_FULL_BYTES = 64 << 20  # a disk with less than this is full, as far as a compiler is concerned


class Builds:
    """The builds of a session, for its candidates in the order of their turns; see ``PoolSettings.builds``.

    Each file is built once; what failed fails again without being compiled again.
    """

    def __init__(self, session: Session, candidates: Iterable[CandidateFile]) -> None:
        self._session = session
        self._candidates = {item.sha256: item for item in candidates if item.compiles}
        self._upcoming = deque(self._candidates)
        self._running: dict[str, RankGroup] = {}
        self._done: dict[str, GroupFailure | wire.Built] = {}

    def ready(self, candidate: CandidateFile) -> bool:
        """Whether it need not be waited for: nothing is compiled, or that is done, or begins only when it is the candidate's turn."""
        return candidate.sha256 not in self._candidates or candidate.sha256 in self._done or self._session.pool_settings.builds == 0

    def poll(self) -> None:
        """Collects finished builds, ends those that take too long, and starts the next, as many at a time as the settings allow."""
        for sha256 in [sha256 for sha256, builder in self._running.items() if builder.overdue or builder.answering]:
            with contextlib.suppress(Exception):  # whatever it is, it comes again in the candidate's own turn, and is reported there
                self._done[sha256] = self._await(sha256)
        while self._upcoming and len(self._running) < self._session.pool_settings.builds:
            with contextlib.suppress(HarnessError, CandidateChanged):  # it is tried again when it is this candidate's turn
                self._begin(self._upcoming.popleft())

    def finish(self, candidate: CandidateFile, limit: Limit | None = None) -> wire.Built:
        """Waits until the candidate is built, and says how; raises GroupFailure if it does not compile, HarnessError if the builder fails,
        CandidateChanged if it is not what it was; and what ``limit`` raises."""
        sha256 = candidate.sha256
        self._candidates[sha256] = candidate
        if sha256 not in self._done:
            self._begin(sha256)
            self._running[sha256].limit = limit
            self._done[sha256] = self._await(sha256)
            self.poll()
        built = self._done[sha256]
        if isinstance(built, GroupFailure):
            raise built
        return built

    def close(self) -> None:
        for sha256 in list(self._running):
            self._end(sha256)

    def _begin(self, sha256: str) -> None:
        if sha256 not in self._running and sha256 not in self._done:
            candidate = self._candidates[sha256]
            source = candidate.source() or ""
            builder = self._running[sha256] = self._session.builder()
            try:
                builder.ask(wire.Initialize(), "build", self._session.deadlines.spawn)
            except GroupFailure as failure:
                self._end(sha256)
                raise HarnessError(f"the process that compiles did not start: {failure}") from None
            cache = builder.admit(sha256)
            on_cpu = not self._session.place.runs_cuda
            gpu_only = on_cpu and candidate.is_cuda
            request = wire.BuildCandidate(str(candidate.path), source, cache, family_sources(candidate.path), on_cpu, gpu_only)
            builder.begin(request, "build", self._session.deadlines.build)

    def _await(self, sha256: str) -> GroupFailure | wire.Built:
        try:
            built: wire.Built = self._running[sha256].finish()[0]
        except GroupFailure as failure:
            free_bytes = shutil.disk_usage(next(item for item in (cache_dir(), *cache_dir().parents) if item.exists())).free
            if failure.kind != "hang" and free_bytes < _FULL_BYTES:
                raise HarnessError(
                    f"cannot build: the disk of {cache_dir()} is full ({free_bytes >> 20} MiB free); free some, or set PEERLANE_CACHE_DIR"
                ) from None
            failure.phase = "import" if failure.kind == "import_error" else failure.phase
            return failure
        finally:
            self._end(sha256)
        return built

    def _end(self, sha256: str) -> None:
        with contextlib.suppress(HarnessError):
            self._running.pop(sha256).kill()
