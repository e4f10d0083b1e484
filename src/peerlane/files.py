"""Files that several processes write: locks with a timeout, and contents that are there whole or not at all."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

_LOOK_S = 0.01


def lock(file: IO[Any], patience_s: float) -> bool:
    """Locks an open file until it is closed; the kernel unlocks it when a holder dies. False if others held it for so long: whoever may
    read a file can lock it, and need not mean well."""
    give_up = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > give_up:
                return False
            time.sleep(_LOOK_S)


@contextmanager
def one_process(path: Path, patience_s: float = 60.0) -> Iterator[bool]:
    """Admits one process of the node at a time, by a lock on the file ``path``; gives False to one that has waited for so long."""
    with path.open("w") as file:
        yield lock(file, patience_s)


def write_atomically(path: Path, data: bytes) -> None:
    """Writes or replaces a file, whose content is never in between."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem[:16], suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
