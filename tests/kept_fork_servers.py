"""Fork servers that outlive a test, so that the next one does not import torch anew."""

import os
import tempfile
from collections.abc import Iterator

import pytest

from peerlane.evaluate.processes import prestart
from peerlane.evaluate.processes.fork_client import ForkServer
from peerlane.sandbox.isolation import NO_ISOLATION, Isolation
from peerlane.settings import cache_dir

MARK = "PEERLANE_TEST_MARK"
"""An environment variable of processes whose end a test looks at: they are not kept."""


class KeptForkServer(ForkServer):
    """Serves the sessions of other tests, too, if they are in the same process, folders and environment."""

    def __init__(self, environment: dict[str, str], start_deadline_s: float = 120.0, isolation: Isolation = NO_ISOLATION) -> None:
        self.place = _place()
        super().__init__(environment, start_deadline_s, isolation)

    def serves(self, environment: dict[str, str], isolation: Isolation) -> bool:
        if self.place != _place() or self._isolation != isolation or not self.alive:
            return False
        wanted = isolation.environment() | environment
        return all(self._variables.get(name) == wanted.get(name) for name in {*self._variables, *wanted} - {"PYTEST_CURRENT_TEST"})

    def clear(self) -> bool:
        return self.place[0] == os.getpid() and MARK not in self._variables and super().clear()


def _place() -> tuple[int, str, str, str]:
    return os.getpid(), os.getcwd(), tempfile.gettempdir(), str(cache_dir())


_waiting: list[ForkServer] = []


@pytest.fixture(scope="session")
def waiting_fork_servers() -> Iterator[None]:
    """Ends those that wait when the tests are over."""
    yield
    while _waiting:
        _waiting.pop().close()


@pytest.fixture(autouse=True)
def kept_fork_servers(waiting_fork_servers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions of the test take the fork servers of earlier ones. Not for tests about how these processes start and end."""
    monkeypatch.setattr(prestart, "_blocks", 1)
    monkeypatch.setattr(prestart, "_waiting", _waiting)
    for module in ("session", "prestart"):
        monkeypatch.setattr(f"peerlane.evaluate.processes.{module}.ForkServer", KeptForkServer)
