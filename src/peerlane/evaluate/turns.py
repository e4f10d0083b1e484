"""Callers of an evaluator, in threads of their own: whose turn it is to begin, and what they share."""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

from peerlane.evaluate.processes.limit import Limit

_LOOK_S = 0.1


class SharedContext:
    """A context that several threads are in at a time: the first enters it, the last leaves it."""

    def __init__(self) -> None:
        self._lock, self._inside, self._stack = threading.Lock(), 0, contextlib.ExitStack()

    @contextlib.contextmanager
    def enter(self, context: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
        with self._lock:
            if self._inside == 0:
                self._stack.enter_context(context())
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if self._inside == 0:
                    self._stack.close()


class Turns:
    """Lets one caller after the other begin its evaluations, in the order of their arrival."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._callers: list[Limit] = []
        self._queue: deque[Limit] = deque()

    @contextlib.contextmanager
    def caller(self, limit: Limit) -> Iterator[None]:
        """Knows of a caller while it is in here, so that it can be cancelled."""
        with self._changed:
            self._callers.append(limit)
        try:
            yield
        finally:
            with self._changed:
                self._callers.remove(limit)
                self._changed.notify_all()

    @contextlib.contextmanager
    def turn(self, limit: Limit) -> Iterator[Callable[[], None]]:
        """Waits for the caller's turn, at whose begin the limit starts; raises :class:`Cancelled`. Yields what ends the turn early: the
        next caller may then begin, while this one waits for its results."""
        with self._changed:
            self._queue.append(limit)
        try:
            with self._changed:
                while self._queue[0] is not limit and not limit.cancelled:
                    self._changed.wait(_LOOK_S)
            limit.start()
            limit.check("spawn")
            yield partial(self._leave, limit)
        finally:
            self._leave(limit)

    def _leave(self, limit: Limit) -> None:
        with self._changed, contextlib.suppress(ValueError):  # it has left
            self._queue.remove(limit)
            self._changed.notify_all()

    def cancel_all(self) -> None:
        """Ends the evaluations at work and empties the queue."""
        with self._changed:
            for limit in self._callers:
                limit.cancel()

    def wait_for_all(self) -> None:
        """Waits until no caller is left."""
        with self._changed:
            self._changed.wait_for(lambda: not self._callers)
