"""Process groups of a problem's case, for ranks that run tests."""

from __future__ import annotations

from typing import Any

_GROUPS: dict[tuple[tuple[int, ...], ...], Any] = {}


def groups_of(layout: tuple[tuple[str, tuple[tuple[int, ...], ...]], ...], rank: int) -> dict[str, Any]:
    """This rank's group of every layout; created once per process, on all ranks in the same order."""
    import torch.distributed as dist

    mine = {}
    for name, members_of in layout:
        if members_of not in _GROUPS:
            created = [dist.new_group(list(members)) for members in members_of]
            _GROUPS[members_of] = next((group for group, members in zip(created, members_of, strict=True) if rank in members), None)
        mine[name] = _GROUPS[members_of]
    return mine
