"""The end of an evaluation that somebody else sets: a time limit for all of it, or a word from another thread."""

import math
import os
import threading
import time


class OutOfTime(Exception):
    """The time limit of an evaluation has passed. ``ranks``: those that had not returned from a call which alone took ``call_s``, half of
    the ``called_s`` of all calls or more."""

    def __init__(self, phase: str, seconds: float, called_s: float = 0.0, ranks: tuple[int, ...] = (), call_s: float = 0.0) -> None:
        super().__init__(f"the time limit of {seconds:g} s passed in {phase}")
        self.phase, self.seconds, self.called_s = phase, seconds, called_s
        self.ranks, self.call_s = (ranks, call_s) if 2 * call_s >= called_s else ((), 0.0)


class Cancelled(Exception):
    """The evaluation is not wanted any more."""


class Limit:
    """The limit of one evaluation; :meth:`start` begins its time. Any thread may :meth:`cancel` it, which ends a wait at once.

    Attributes:
        called_s: how long ranks have been waited for that ran the candidate's code.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds = math.inf if seconds is None else seconds
        self.end = math.inf
        self.called_s = 0.0
        self.cancelled = False
        self._lock = threading.Lock()
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def start(self, factor: float = 1.0) -> None:
        """Begins the time of the next evaluation, which is so many times as long."""
        self.seconds *= factor
        self.end, self.called_s = time.monotonic() + self.seconds, 0.0

    def cancel(self) -> None:
        """Ends the evaluation, or the wait for its turn."""
        with self._lock:
            self.cancelled = True
            if self._event >= 0:
                os.eventfd_write(self._event, 1)

    def check(self, phase: str, ranks: tuple[int, ...] = (), call_s: float = 0.0) -> None:
        """Raises :class:`Cancelled`, or :class:`OutOfTime`, if the evaluation is to go no further.

        ``ranks``: those that have not returned from the candidate's code for ``call_s``.
        """
        if self.cancelled:
            raise Cancelled
        if time.monotonic() >= self.end:
            raise OutOfTime(phase, self.seconds, self.called_s, ranks, call_s)

    def fileno(self) -> int:
        """Readable once the evaluation is cancelled."""
        return self._event

    def close(self) -> None:
        """Nobody may cancel it any more."""
        with self._lock:
            if self._event >= 0:
                os.close(self._event)
            self._event = -1
