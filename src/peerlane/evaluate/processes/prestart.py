"""A fork server that comes up while the supervisor imports torch itself; the first session that would start the same takes it. No torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from peerlane.evaluate.processes.fork_client import ForkServer, fork_server_environment
from peerlane.sandbox.isolation import Isolation, Tier, choose
from peerlane.settings import Deadlines

_waiting: list[ForkServer] = []  # one, or none


@contextlib.contextmanager
def early_start(device: str, tier: Tier | None) -> Iterator[None]:
    """Starts the fork server for evaluations with these, and ends it if nobody takes it in the block.

    Raises nothing: what cannot be started here is started by the session, which says why not. L2 depends on the candidates, and waits.
    """
    try:
        if tier != "L2":
            with contextlib.suppress(Exception):
                _waiting.append(ForkServer(fork_server_environment(device), Deadlines().spawn, choose(tier, device)))
        yield
    finally:
        while _waiting:
            _waiting.pop().close()


def take(environment: dict[str, str], isolation: Isolation) -> ForkServer | None:
    """The fork server that waits, if one that is started with these now would be no different: it is the caller's to close. Else it is
    ended: it would hold cores."""
    fork_server = _waiting.pop() if _waiting else None
    if fork_server is None or fork_server.serves(environment, isolation):
        return fork_server
    fork_server.close()
    return None
