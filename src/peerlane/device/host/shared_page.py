"""A page of host memory that all ranks of a group map, where they can see one folder."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable

from peerlane.device.host.group import Small

FOLDER = "/dev/shm"


def share_page(exchange: Callable[[Small], list[Small]], rank: int, folder: str | None = None) -> mmap.mmap | None:
    """Collective: a page of zeroes that all ranks share; None on all of them if some can not map it."""
    name = exchange(_make_page(folder or FOLDER) if rank == 0 else None)[0]
    page = _map_page(name)
    shared = all(exchange(page is not None))
    if rank == 0 and name is not None:
        os.unlink(name)
    return page if shared else None


def _make_page(folder: str) -> str | None:
    try:
        file, name = tempfile.mkstemp(prefix="peerlane-page-", dir=folder)
        with open(file, "r+b") as page:
            page.truncate(mmap.PAGESIZE)
    except OSError:
        return None
    return name


def _map_page(name: str | None) -> mmap.mmap | None:
    try:
        with open(name or "", "r+b") as page:
            return mmap.mmap(page.fileno(), mmap.PAGESIZE)
    except OSError:
        return None
