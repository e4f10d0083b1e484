"""Rank groups that are started ahead of their use: kept warm, looked after, started again where they do not come up."""

import contextlib
import time
from collections import deque
from collections.abc import Callable

from peerlane.errors import HarnessError
from peerlane.evaluate.processes.rank_group import GroupFailure, RankGroup
from peerlane.sandbox.isolation import in_short
from peerlane.settings import PoolSettings


class NoRanks(HarnessError):
    """Rank groups do not come up on this machine."""


class WarmPool:
    """A queue of groups of one role that are up or coming up, oldest first.

    ``start`` begins a group's start and returns at once, or raises HarnessError; ``note`` hears of every attempt that failed.
    """

    def __init__(self, role: str, start: Callable[[], RankGroup], pool_settings: PoolSettings, note: Callable[[str], None]) -> None:
        self._role, self._start, self._pool_settings, self._note = role, start, pool_settings, note
        self._waiting: deque[RankGroup] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def refill(self, wanted: int) -> None:
        """Starts what is missing to ``wanted`` groups. They use cores and GPUs until :meth:`wait_for_starts`."""
        self._drop_lost()
        while len(self._waiting) < wanted:
            try:
                self._waiting.append(self._start())
            except HarnessError as error:  # nobody needs it yet; who does will try again
                self._note(f"a warm rank group could not be started: {error}")
                return

    def take(self) -> RankGroup:
        """A group whose ranks are up and have run no candidate code; raises :class:`NoRanks` after the last attempt."""
        self._drop_lost()
        attempts, reason = self._pool_settings.start_attempts, ""
        for attempt in range(attempts):
            if attempt:
                self._note(f"{self._role} ranks did not start, attempt {attempt} of {attempts}: {in_short(reason)}; trying again")
                time.sleep(self._pool_settings.back_off_s * 2 ** (attempt - 1))
            try:
                group = self._waiting.popleft() if self._waiting else self._start()
            except NoRanks:  # of the group that this one shares memory with: that has been tried often enough
                raise
            except HarnessError as error:
                reason = str(error)
                continue
            try:
                _await_start(group)
                return group
            except GroupFailure as failure:
                reason = _ended(group, failure)
        raise NoRanks(f"{self._role} ranks did not start in {attempts} attempts; the last one: {reason}")

    def wait_for_starts(self) -> bool:
        """Waits until all that are coming up are up, so that they do not disturb what is timed next; drops those that fail. False if none
        were."""
        coming = [group for group in self._waiting if group.busy]
        for group in coming:
            try:
                _await_start(group)
            except GroupFailure as failure:
                self._waiting.remove(group)
                self._note(f"a warm rank group did not start: {_ended(group, failure)}")
        return bool(coming)

    def drop_without_imports(self) -> None:
        """Ends groups whose ranks would have to import torch's slow part themselves."""
        for group in [group for group in self._waiting if not group.imported_ahead]:
            self._waiting.remove(group)
            _end(group)

    def clear(self) -> None:
        while self._waiting:
            _end(self._waiting.popleft())

    def _drop_lost(self) -> None:
        """Ends groups that an earlier candidate killed while they waited: the next candidate must not get them."""
        lost = [group for group in self._waiting if not group.busy and group.lost]  # of one that is coming up, its answer says more
        for group in lost:
            self._waiting.remove(group)
            _end(group)
            self._note("a warm rank group died while it waited; another takes its place")


def _await_start(group: RankGroup) -> None:
    if group.busy:
        group.pids = tuple(group.finish())


def _ended(group: RankGroup, failure: GroupFailure) -> str:
    """Ends a group that failed; what is known about the failure, with the end of its log."""
    _end(group)
    return f"{failure}\n{group.log_tail()}".strip()


def _end(group: RankGroup) -> None:
    with contextlib.suppress(HarnessError):
        group.kill()
