"""GPUs that do not come back after ranks on them were killed: found through the driver, and not used any more."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from peerlane.hardware.memory import GpuMemory
from peerlane.settings import PoolSettings

Probe = Callable[[], Sequence[GpuMemory]]

_LEAK_BYTES = 1 << 30  # what other programs may have taken meanwhile
_GIB = 1 << 30


class GpuHealth:
    """Watches the GPUs of a run by what is in use on each, compared with what was in use before the run's first process.

    ``probe`` gives the memory of every GPU in the order of the ranks; where it gives nothing, nothing is watched.
    ``before``: what it gave before that process, where that has been started already.
    """

    def __init__(
        self,
        probe: Probe,
        pool_settings: PoolSettings,
        before: Sequence[GpuMemory] = (),
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._probe, self._pool_settings, self._clock, self._sleep = probe, pool_settings, clock, sleep
        self._before = tuple(before or probe())
        self.reasons: dict[int, str] = {}
        """why a GPU is not used any more, by its number"""

    def check(self, end_all: Callable[[], None], *, survivors: bool) -> None:
        """After ranks were killed: quarantines every GPU that does not answer, or whose memory does not come back.

        What is in use says little while our own groups are up: where it is much, or a process survived, ``end_all`` is called to end them.
        """
        now = self._probe()
        share = self._pool_settings.gpu_slack_share
        much = any(gpu.used_bytes > before.used_bytes + share * gpu.total_bytes for gpu, before in self._pairs(now))
        if not (survivors or much or any(gpu.fault for gpu in now)):
            return
        end_all()
        end = self._clock() + self._pool_settings.gpu_return_s
        while (bad := self._not_back()) and self._clock() < end:
            self._sleep(0.5)
        self.reasons |= bad

    def _pairs(self, now: Sequence[GpuMemory]) -> list[tuple[GpuMemory, GpuMemory]]:
        return list(zip(now, self._before, strict=False))

    def _not_back(self) -> dict[int, str]:
        bad = {}
        for number, (gpu, before) in enumerate(self._pairs(self._probe())):
            if gpu.fault:
                bad[number] = f"the driver says: {gpu.fault}"
            elif gpu.used_bytes > before.used_bytes + _LEAK_BYTES:
                bad[number] = (
                    f"{gpu.used_bytes / _GIB:.1f} GiB are in use {self._pool_settings.gpu_return_s:g} s after all ranks were killed, "
                    f"{before.used_bytes / _GIB:.1f} GiB before the first"
                )
        return bad

    def missing(self, world_size: int) -> str | None:
        """Why so many ranks cannot be had any more, and what to do; None if they can."""
        found = {number: reason for number, reason in self.reasons.items() if number < world_size}
        if not found:
            return None
        which = "; ".join(f"GPU {number} did not come back after a candidate was killed: {reason}" for number, reason in found.items())
        return f"{which}. Reset it (nvidia-smi --gpu-reset), or leave it out with CUDA_VISIBLE_DEVICES, and run again"
