"""The processes of a run: the nursery, one trusted group, one warm spare for the next candidate. No CUDA context here."""

from __future__ import annotations

import contextlib
import secrets
from types import TracebackType
from typing import Any, Self

from peerlane.errors import HarnessError
from peerlane.evaluate.extensions import ARCHITECTURE
from peerlane.evaluate.groups import GroupFailure, Nursery, RankGroup
from peerlane.problems._spec import Case
from peerlane.settings import Deadlines


class Session:
    """Everything that runs for one world size. Use as a context manager: leaving it ends every process."""

    def __init__(self, device: str, world_size: int, deadlines: Deadlines) -> None:
        self.device, self.world_size, self.deadlines = device, world_size, deadlines
        self._nursery: Nursery | None = None
        self._trusted: RankGroup | None = None
        self._spare: RankGroup | None = None
        self._block = 0

    def __enter__(self) -> Self:
        environment = {
            "OMP_NUM_THREADS": "1",  # the nursery must have one thread when it forks
            "OPENBLAS_NUM_THREADS": "1",
            "KINETO_LOG_LEVEL": "99",  # audits would print a line for each end of every record
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking how many GPUs there are must not initialise CUDA
        }
        if self.device == "cpu":
            environment |= {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
        self._nursery = Nursery(environment, self.deadlines.spawn)
        try:
            self._spare = self._spawn_candidate()
            self.trusted  # noqa: B018  (started side by side with the first spare)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._nursery is not None:
            self._nursery.close()
            self._nursery = None

    @property
    def nursery(self) -> Nursery:
        """The running nursery."""
        assert self._nursery is not None, "use the session as a context manager"
        return self._nursery

    def _config(self, **more: Any) -> dict[str, Any]:
        return {"device": self.device, **more}

    @property
    def trusted(self) -> RankGroup:
        """The trusted group; started anew if it died."""
        if self._trusted is None:
            group = self.nursery.spawn("trusted", self.world_size, self._config())
            try:
                group.ask({"op": "init"}, "spawn", self.deadlines.spawn)
                group.ask({"op": "secret", "secret": secrets.token_hex(16)}, "spawn", self.deadlines.spawn)
            except GroupFailure as failure:
                tail = group.log_tail()
                group.kill()
                raise HarnessError(f"the trusted ranks did not start: {failure}\n{tail}") from None
            self._trusted = group
        return self._trusted

    def drop_trusted(self) -> None:
        """Kills the trusted group after a failure of its own, and the spare, which may share its memory; the next use starts others."""
        for group in (self._trusted, self._spare):
            if group is not None:
                with contextlib.suppress(HarnessError):
                    group.kill()
        self._trusted = self._spare = None

    def _spawn_candidate(self) -> RankGroup:
        environment = {"TORCH_CUDA_ARCH_LIST": ARCHITECTURE} if self.device == "cuda" else {}
        share = self.trusted if self.device == "cpu" else None  # on CPU the two sides share memory files, on GPUs CUDA IPC
        group = self.nursery.spawn("candidate", self.world_size, self._config(environment=environment), share)
        group.begin({"op": "init"}, "spawn", self.deadlines.spawn)
        return group

    def take_group(self) -> RankGroup:
        """A fresh candidate group, ready; the next spare starts at once behind it."""
        group, self._spare = self._spare or self._spawn_candidate(), None
        try:
            group.finish()
        except GroupFailure as failure:
            tail = group.log_tail()
            group.kill()
            raise HarnessError(f"candidate ranks did not start: {failure}\n{tail}") from None
        return group

    def start_spare(self) -> None:
        """Starts the next spare, if there is none. It uses the GPUs while it starts: see :meth:`settle`."""
        if self._spare is None:
            self._spare = self._spawn_candidate()

    def settle(self) -> None:
        """Waits until the spare is up, so that its start does not disturb what is timed next."""
        if self._spare is not None and self._spare.busy:
            group = self._spare
            try:
                group.wait()
            except GroupFailure as failure:
                self._spare = None
                tail = group.log_tail()
                group.kill()
                raise HarnessError(f"candidate ranks did not start: {failure}\n{tail}") from None

    def builder(self) -> RankGroup:
        """A process that compiles; no GPU is visible to it."""
        environment = {"CUDA_VISIBLE_DEVICES": "", "TORCH_CUDA_ARCH_LIST": ARCHITECTURE}
        return self.nursery.spawn("builder", 1, {"device": "cpu", "environment": environment})

    def next_block(self) -> int:
        """A number that no earlier minting of this session has had."""
        self._block += 1
        return self._block


def case_request(case: Case, **more: Any) -> dict[str, Any]:
    """The part of a request that names a case."""
    return {"problem": case.problem, "preset": case.preset, "label": case.label, "world_size": case.world_size, **more}
