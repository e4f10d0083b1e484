"""Fork servers that outlive their session, so that the next one does not import torch anew."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator

import pytest

from peerlane.evaluate.processes.fork_client import ForkServer
from peerlane.sandbox.isolation import NO_ISOLATION, Isolation
from peerlane.settings import cache_dir

MARK = "PEERLANE_TEST_MARK"
"""An environment variable of processes whose end a test looks at: they are not kept."""
MOST_WAITING = 2


class KeptForkServer(ForkServer):
    """Ends its groups when a session leaves it, and waits for the next session."""

    def __init__(self, environment: dict[str, str], start_deadline_s: float = 120.0, isolation: Isolation = NO_ISOLATION) -> None:
        self.owner, self.place = os.getpid(), _place()
        super().__init__(environment, start_deadline_s, isolation)

    def serves(self, environment: dict[str, str], isolation: Isolation) -> bool:
        if (self.owner, self.place) != (os.getpid(), _place()) or self._isolation != isolation or not self.alive:
            return False
        wanted = isolation.environment() | environment
        return all(self._variables.get(name) == wanted.get(name) for name in {*self._variables, *wanted} - {"PYTEST_CURRENT_TEST"})

    def close(self) -> None:
        if self.owner != os.getpid() or not self._up or not self.alive or MARK in self._variables:
            return super().close()
        self.end_groups()
        with _access:
            _waiting.append(self)
            surplus = _waiting.pop(0) if len(_waiting) > MOST_WAITING else None
        if surplus is not None:
            surplus.end()

    def end(self) -> None:
        """Ends the process."""
        super().close()


def _place() -> tuple[str, str, str]:
    return os.getcwd(), tempfile.gettempdir(), str(cache_dir())


_waiting: list[KeptForkServer] = []
_access = threading.Lock()


def take_or_start(environment: dict[str, str], start_deadline_s: float = 120.0, isolation: Isolation = NO_ISOLATION) -> ForkServer:
    """Returns a fork server that waits, if one that is started now would be no different; else a new one."""
    with _access:
        for item in reversed(_waiting):
            if item.serves(environment, isolation):
                _waiting.remove(item)
                return item
    return KeptForkServer(environment, start_deadline_s, isolation)


@pytest.fixture(scope="session")
def waiting_fork_servers() -> Iterator[None]:
    """Ends those that wait when the tests are over."""
    yield
    while _waiting:
        _waiting.pop().end()


@pytest.fixture(autouse=True)
def kept_fork_servers(waiting_fork_servers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions of the test take the fork servers of earlier ones. Not for tests about how these processes start and end."""
    for module in ("session", "prestart"):
        monkeypatch.setattr(f"peerlane.evaluate.processes.{module}.ForkServer", take_or_start)
