"""Builds on CPU cores, ahead of their candidates' turn, while the ranks judge others. See builder.py for the process that compiles."""

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from peerlane.errors import HarnessError
from peerlane.evaluate import wire
from peerlane.evaluate.candidates import CandidateFile
from peerlane.evaluate.messages import Request
from peerlane.evaluate.processes.limit import Cancelled, Limit
from peerlane.evaluate.processes.rank_group import BuildTime, GroupFailure, RankGroup
from peerlane.evaluate.processes.session import Session
from peerlane.evaluate.rank_interface import BuilderInterface, RankInterface
from peerlane.evaluate.timing.cores import cores_beside
from peerlane.sandbox.hidden_files import family_sources
from peerlane.sandbox.holdings import available_memory
from peerlane.settings import cache_dir

_FULL_BYTES = 64 << 20  # a disk with less than this is full, as far as a compiler is concerned
_COMPILER_BYTES = 3 << 30  # that a compiler of CUDA may need for torch's headers
_PATIENCE_S = 5.0  # an import that compiles nothing for so long is no build, and makes room for one
_LOOK_S = 0.1


def builds_at_a_time(session: Session) -> int:
    """Returns how many candidates compile at a time: what the settings say, else as many as cores and memory allow."""
    if session.pool_settings.builds is not None:
        return session.pool_settings.builds
    cores = cores_beside(session.world_size) if session.place.has_gpus else os.sched_getaffinity(0)
    return max(1, min(len(cores), available_memory() // _COMPILER_BYTES))


class Ended(NamedTuple):
    """A build that has succeeded: its seconds, and what the builder says of the import (see :class:`wire.Built`)."""

    seconds: float
    raised: str
    by_nvcc: bool


@dataclass
class _Build:
    candidate: CandidateFile
    wanted: int = 0
    begun: float | None = None
    builder: RankGroup | None = None
    limit: Limit = field(default_factory=Limit)
    ended: threading.Event = field(default_factory=threading.Event)
    failure: Exception | None = None
    seconds: float = 0.0
    said: wire.Built = field(default_factory=lambda: wire.Built(None, False))

    @property
    def stuck(self) -> bool:
        """It has not begun to compile, long after its start."""
        late = self.begun is not None and time.monotonic() - self.begun > _PATIENCE_S
        return late and (self.builder is None or not self.builder.building.ranks)


class Builds:
    """The builds of a session, in the order in which they are ordered, each in a thread that waits for its builder.

    What several evaluations want is built once. Safe to use from several threads. ``changed`` is called when a build has ended.
    """

    def __init__(self, session: Session, at_a_time: int, changed: Callable[[], None] = lambda: None) -> None:
        self._session, self.at_a_time, self._changed = session, at_a_time, changed
        self._lock = threading.Lock()
        self._builds: dict[str, _Build] = {}
        self._waiting: list[_Build] = []
        self._running: list[_Build] = []

    def order(self, candidates: Iterable[CandidateFile]) -> None:
        """Has these compiled ahead of their turn; :meth:`drop` takes the order back."""
        for candidate in candidates:
            if candidate.compiles and self.at_a_time:
                self._want(candidate)

    def ready(self, candidate: CandidateFile) -> bool:
        """Tells whether it need not be waited for: nothing is compiled, or that is done, or begins only when it is the candidate's turn."""
        build = self._builds.get(candidate.sha256)
        if build is not None and not build.ended.is_set():
            self._start()  # one that is stuck may have made room meanwhile
        return build is None or build.ended.is_set()

    def finish(self, candidate: CandidateFile, limit: Limit | None = None) -> Ended:
        """Waits until the candidate is built; returns the seconds that it took, and what the builder said.

        Raises GroupFailure if it does not compile, HarnessError if the builder fails, CandidateChanged if it is not what it was; and what
        ``limit`` raises.
        """
        build = self._want(candidate, at_once=not self.at_a_time)
        try:
            while not build.ended.wait(_LOOK_S):
                if limit is not None:
                    limit.check("build")
                self._start()
            if build.failure is not None:
                raise build.failure
            return Ended(build.seconds, build.said.raised or "", build.said.by_nvcc)
        finally:
            self.drop([candidate])

    def drop(self, candidates: Iterable[CandidateFile]) -> None:
        """Takes back an order for each of these; ends builds that nobody wants any more."""
        with self._lock:
            for candidate in candidates:
                if (build := self._builds.get(candidate.sha256)) is not None:
                    build.wanted -= 1
                    if build.wanted <= 0:
                        del self._builds[candidate.sha256]
                        if build in self._waiting:
                            self._waiting.remove(build)
                        build.limit.cancel()

    def close(self) -> None:
        """Ends all builds, and waits for their threads."""
        with self._lock:
            builds, self._waiting = [*self._running], []
            self._builds.clear()
        for build in builds:
            build.limit.cancel()
        for build in builds:
            build.ended.wait()

    def _want(self, candidate: CandidateFile, *, at_once: bool = False) -> _Build:
        with self._lock:
            if (build := self._builds.get(candidate.sha256)) is None:
                build = self._builds[candidate.sha256] = _Build(candidate)
                self._waiting.append(build)
            build.wanted += 1
            if at_once and build in self._waiting:
                self._waiting.remove(build)
                self._launch(build)
        self._start()
        return build

    def _start(self) -> None:
        """Starts those that there is room for. What is stuck takes none, up to twice as many."""
        with self._lock:
            while self._waiting and len(self._running) < 2 * self.at_a_time:
                if sum(not build.stuck for build in self._running) >= self.at_a_time:
                    break
                self._launch(self._waiting.pop(0))

    def _launch(self, build: _Build) -> None:
        self._running.append(build)
        build.begun = time.monotonic()
        threading.Thread(target=self._run, args=(build,), name="peerlane-build", daemon=True).start()

    def _run(self, build: _Build) -> None:
        try:
            self._compile(build)
        except Exception as error:  # whatever it is, it is raised in the candidate's own turn
            build.failure = error
        finally:
            assert build.begun is not None
            build.seconds = time.monotonic() - build.begun
            with self._lock:
                self._running.remove(build)
            build.limit.close()
            build.ended.set()
            self._start()
            self._changed()

    def _compile(self, build: _Build) -> None:
        """Builds; raises what :meth:`finish` does, and Cancelled."""
        candidate, deadlines = build.candidate, self._session.deadlines
        source = candidate.source() or ""
        builder = self._session.builder()
        try:
            try:
                builder.limit = build.limit
                builder.ask(Request(RankInterface.initialize), "build", deadlines.spawn)
            except GroupFailure as failure:
                raise HarnessError(f"the process that compiles did not start: {failure}") from None
            cache = builder.admit(candidate.sha256)
            on_cpu = not self._session.place.runs_cuda
            gpu_only, emulated = on_cpu and candidate.is_cuda, self._session.place.emulated
            granted = family_sources(candidate.path)
            request = Request(BuilderInterface.build_candidate, str(candidate.path), source, cache, granted, on_cpu, gpu_only, emulated)
            builder.building = BuildTime(deadlines.build)
            build.builder = builder
            build.said = builder.ask(request, "build", deadlines.load)[0]
        except Cancelled:
            raise
        except GroupFailure as failure:
            free_bytes = shutil.disk_usage(next(item for item in (cache_dir(), *cache_dir().parents) if item.exists())).free
            if failure.kind != "hang" and free_bytes < _FULL_BYTES:
                raise HarnessError(
                    f"cannot build: the disk of {cache_dir()} is full ({free_bytes >> 20} MiB free); free some, or set PEERLANE_CACHE_DIR"
                ) from None
            failure.phase = "import" if failure.kind == "import_error" else failure.phase
            raise
        finally:
            with contextlib.suppress(HarnessError):
                builder.kill()
