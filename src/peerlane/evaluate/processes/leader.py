"""The supervisor's side of a leader: the process that starts the ranks of a group, watches them and kills them."""

import contextlib
import selectors
import time
from collections.abc import Callable
from pathlib import Path

from peerlane.errors import ProtocolError
from peerlane.evaluate.processes.group_failure import GroupFailure
from peerlane.evaluate.processes.protocol import Channel
from peerlane.sandbox.core_time import CoreTime

_ANSWER_S = 5.0  # seconds within which a leader reports what its ranks had of the cores


def out_of_memory_kills() -> int:
    """Returns how many processes the kernel has killed for memory since the machine's start; 0 where it does not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


class Leader:
    """Reports of a leader over ``channel``. ``sweep`` kills all that is left of its ranks where the leader cannot.

    Attributes:
        alive: it has not ended, as far as it is known.
        exits: the status of ranks that have ended.
        ending: ranks that the kernel ends; they may hold the device for long.
        exceeded: the kind of failure and its message, if the candidate took more of the machine than it may.
        still_s: for how many seconds its processes have made no progress, as it saw last.
    """

    def __init__(self, channel: Channel, sweep: Callable[[], None] | None = None) -> None:
        self.channel, self._sweep = channel, sweep
        self.alive = True
        self.exits: dict[int, int] = {}
        self.ending: set[int] = set()
        self.exceeded: tuple[str, str] | None = None
        self.still_s = 0
        self._core_time: CoreTime | None = None
        self._kills = out_of_memory_kills()

    def read(self, phase: str) -> GroupFailure | None:
        """Takes in what it has reported by now; returns the failure that this shows."""
        if not self.channel.feed():
            self.alive = False
            if out_of_memory_kills() > self._kills:
                what = "this machine ran out of memory, and the kernel killed the process that guards the ranks"
                return GroupFailure("machine", phase, what)
            return GroupFailure("garbage", phase, "the process that guards the ranks was killed")
        while (message := self.channel.pop()) is not None:
            if "exceeded" in message:
                kind, what = message["exceeded"]
                self.exceeded = kind, f"the candidate took too much of the machine: {what}"
                return GroupFailure(kind, phase, self.exceeded[1])
            if "still_s" in message:
                self.still_s = int(message["still_s"])
            if "core_time" in message:
                self._core_time = CoreTime(*map(float, message["core_time"]))
            if "ending" in message:
                self.ending.add(int(message["ending"]))
            if "exited" in message:
                self.exits[int(message["exited"])] = int(message["status"])
        return None

    def await_exit(self, rank: int, phase: str) -> GroupFailure | None:
        """Waits until it has reported how a rank ended; returns the failure if it has ended itself."""
        return self._await(lambda: rank in self.exits, 1.0, phase)

    def await_exits(self, number: int, deadline_s: float) -> None:
        """Waits until so many ranks have ended, or it has ended itself."""
        self._await(lambda: len(self.exits) >= number, deadline_s, "exit")

    def _await(self, has_told: Callable[[], bool], deadline_s: float, phase: str) -> GroupFailure | None:
        """Reads its reports until it has told what is waited for; returns the failure if it has ended itself."""
        end = time.monotonic() + deadline_s
        with selectors.DefaultSelector() as selector:
            selector.register(self.channel, selectors.EVENT_READ)
            while not has_told() and (left := end - time.monotonic()) > 0:
                if selector.select(left) and (failure := self.read(phase)) is not None:
                    return failure
        return None

    def mark_core_time(self) -> None:
        """Begins the time that :meth:`core_time` is about."""
        with contextlib.suppress(OSError):
            self.channel.send({"core_time": "mark"})

    def core_time(self) -> CoreTime | None:
        """Returns what its processes had of the cores since the mark; None if the leader does not tell."""
        self._core_time = None
        with contextlib.suppress(OSError, ProtocolError):
            self.channel.send({"core_time": "tell"})
            self._await(lambda: self._core_time is not None, _ANSWER_S, "exit")
        return self._core_time

    def end(self, deadline_s: float) -> list[int]:
        """Kills all processes, the leader too; returns those that are still there."""
        led, self.alive = self.alive, False
        survivors = self._end_by_itself(deadline_s) if led else None
        if survivors is None and self._sweep is not None:  # it was killed, or stopped, or is stuck
            with contextlib.suppress(OSError):
                self._sweep()
        self._sweep = None
        return survivors or []

    def _end_by_itself(self, deadline_s: float) -> list[int] | None:
        """Has it kill everything, itself last; returns the processes that are still there, None if it did not say."""
        with contextlib.suppress(OSError):
            self.channel.send({"end": True})
        end = time.monotonic() + deadline_s
        with contextlib.suppress(ProtocolError), selectors.DefaultSelector() as selector:
            selector.register(self.channel, selectors.EVENT_READ)
            open_ = True
            while open_ and (left := end - time.monotonic()) > 0 and selector.select(left):
                open_ = self.channel.feed()
                while (message := self.channel.pop()) is not None:
                    if message.get("ended"):
                        return list(message.get("survivors", []))
        return None
