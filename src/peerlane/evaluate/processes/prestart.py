"""Fork servers that wait for a session: one that comes up while the supervisor imports torch itself, and those that sessions have left.

A fork server imports torch, which takes seconds, and is the same for all numbers of ranks and for CPU and emulated ranks. No torch here.
"""

import contextlib
import threading
from collections.abc import Iterator

from peerlane.evaluate.processes.fork_client import ForkServer, fork_server_environment
from peerlane.sandbox.isolation import Isolation, Tier, choose
from peerlane.settings import Deadlines

_MOST = 2
_waiting: list[ForkServer] = []
_blocks = 0
_access = threading.Lock()


@contextlib.contextmanager
def kept_between_sessions() -> Iterator[None]:
    """Lets sessions in the block leave their fork server to the next one. The end of the block closes it. Blocks may be nested."""
    global _blocks
    with _access:
        _blocks += 1
    try:
        yield
    finally:
        with _access:
            _blocks -= 1
            ended = [] if _blocks else [_waiting.pop() for _ in range(len(_waiting))]
        for fork_server in ended:
            fork_server.close()


@contextlib.contextmanager
def early_start(device: str, tier: Tier | None) -> Iterator[None]:
    """Starts the fork server for evaluations with these; in the block it is kept between sessions.

    Raises nothing: what cannot be started here is started by the session, which says why not. L2 depends on the candidates, and waits.
    """
    with kept_between_sessions():
        if tier != "L2":
            with contextlib.suppress(Exception):
                _waiting.append(ForkServer(fork_server_environment(device), Deadlines().spawn, choose(tier, device)))
        yield


def take(environment: dict[str, str], isolation: Isolation) -> ForkServer | None:
    """The newest fork server that waits and is no different from one that is started with these now: it is the caller's to :func:`give`.

    Another one that is coming up is ended: it would hold cores.
    """
    with _access:
        chosen = next((item for item in reversed(_waiting) if item.serves(environment, isolation)), None)
        unwanted = [] if chosen is not None else [item for item in _waiting if not item.is_up]
        for item in (*unwanted, *([] if chosen is None else [chosen])):
            _waiting.remove(item)
    for item in unwanted:
        item.close()
    return chosen


def give(fork_server: ForkServer) -> None:
    """Keeps a session's fork server for the next session, or ends it."""
    surplus = fork_server
    if _blocks and fork_server.clear():
        with _access:
            _waiting.append(fork_server)
            if len(_waiting) <= _MOST:
                return
            surplus = _waiting.pop(0)
    surplus.close()
