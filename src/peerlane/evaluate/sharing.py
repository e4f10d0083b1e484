"""Whether trusted and candidate ranks can share memory under an isolation: tried once, with one rank of each, before anything is judged.

Which of the kernel's boundaries the CUDA driver's sharing passes depends on driver and kernel, and is documented nowhere.
"""

from __future__ import annotations

import functools
from typing import Literal

from peerlane.errors import HarnessError
from peerlane.evaluate.groups import GroupFailure
from peerlane.evaluate.isolation import Isolation
from peerlane.evaluate.session import Session
from peerlane.settings import Deadlines, Supply

_ONE_ATTEMPT = Supply(spares=0, start_attempts=1)


@functools.cache
def sharing_failure(isolation: Isolation, device: Literal["cuda", "cpu"], deadlines: Deadlines) -> str:
    """Why a candidate rank could not start, or could not map an arena of a trusted rank; empty if it could."""
    try:
        with Session(device, 1, deadlines, _ONE_ATTEMPT, isolation) as session:
            (lent,) = session.trusted.ask({"op": "lend"}, "spawn", deadlines.spawn)
            group = session.take_group()
            (borrowed,) = group.ask({"op": "borrow", "arena": lent["arena"]}, "spawn", deadlines.spawn)
            return "" if borrowed["byte"] == lent["byte"] else "what one rank wrote, the other could not read"
    except (GroupFailure, HarnessError) as error:
        return str(error).strip()
