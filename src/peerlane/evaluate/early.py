"""A nursery that comes up while the supervisor imports torch itself, for the first session that would start one like it. No torch here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from peerlane.evaluate.groups import Nursery, nursery_environment
from peerlane.evaluate.isolation import Isolation, Tier, choose
from peerlane.settings import Deadlines

_waiting: list[Nursery] = []  # one, or none


@contextlib.contextmanager
def early_nursery(device: str, tier: Tier | None) -> Iterator[None]:
    """Starts the nursery that an evaluation with this device and tier will want; ends it if nobody has taken it by the end of the block.

    Raises nothing: what cannot be started here is started by the session, which says why not. L2 depends on the candidates, and waits.
    """
    try:
        if tier != "L2":
            with contextlib.suppress(Exception):
                _waiting.append(Nursery(nursery_environment(device), Deadlines().spawn, choose(tier, device)))
        yield
    finally:
        while _waiting:
            _waiting.pop().close()


def take(environment: dict[str, str], isolation: Isolation) -> Nursery | None:
    """The nursery that waits, if one started with these would be no different. It is the caller's to close."""
    return _waiting.pop() if _waiting and _waiting[0].serves(environment, isolation) else None
