"""A fork server and the first rank groups, which come up while the supervisor imports torch itself. No torch here.

The first session that would start the same takes them over.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from peerlane.evaluate.processes.fork_client import ForkServer, RankPlaces, fork_server_environment, start_ranks
from peerlane.evaluate.sandbox.isolation import Isolation, Tier, choose
from peerlane.hardware.topology import discover
from peerlane.settings import Deadlines

_waiting: list[ForkServer] = []  # one, or none


@contextlib.contextmanager
def early_start(device: str, tier: Tier | None, world_size: int, *, shared: bool = False) -> Iterator[None]:
    """Starts the fork server, the trusted ranks and a warm group for an evaluation with these; ends them if nobody takes them in the block.

    Where ranks are ``shared`` out among fewer GPUs it is the fork server alone: the session has the daemon that such ranks need.

    Raises nothing: what cannot be started here is started by the session, which says why not. L2 depends on the candidates, and waits.
    """
    try:
        if tier != "L2":
            with contextlib.suppress(Exception):
                shared = shared or (device == "cuda" and len(discover().gpus) < world_size)
                _start(device, choose(tier, device), 0 if shared else world_size, Deadlines().spawn)
        yield
    finally:
        while _waiting:
            _waiting.pop().close()


def _start(device: str, isolation: Isolation, world_size: int, deadline_s: float) -> None:
    fork_server = ForkServer(fork_server_environment(device), deadline_s, isolation)
    _waiting.append(fork_server)
    if not world_size:
        return
    places = RankPlaces(device, world_size)
    trusted = start_ranks(fork_server, "trusted", places, deadline_s)
    if device != "emulated":  # one process, which is forked in milliseconds
        start_ranks(fork_server, "candidate", places, deadline_s, trusted)


def take(environment: dict[str, str], isolation: Isolation, world_size: int) -> ForkServer | None:
    """The fork server that waits, with the groups that come up in it, if what is started with these now would be no different: it is the
    caller's to close. Else it is ended: it would hold cores and GPUs. A ``world_size`` of 0 stands for no groups."""
    if not _waiting:
        return None
    fork_server = _waiting.pop()
    if fork_server.serves(environment, isolation) and {group.world_size for group in fork_server.groups} == ({world_size} - {0}):
        return fork_server
    fork_server.close()
    return None
