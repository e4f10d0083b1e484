"""Files of records, one JSON object a line: a line is appended whole or not at all, and nothing that is there is changed."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from peerlane.common.files import lock, open_appendable, open_regular, read_regular, shown_path
from peerlane.errors import FileRefused, HarnessError, UsageError

_PATIENCE_S = 5.0  # with other runs that append to the file, which takes milliseconds; any other holder of its lock is ignored
_BEGINNING = b'{"schema_version"'  # of every record
_CONTROL = re.compile(rb"[\x00-\x1f]")
MOST_BYTES = 4 << 30
"""The most bytes of a file: some hundred thousand results."""
MOST_LINE_BYTES = 16 << 20


def is_torn(line: bytes) -> bool:
    """True for what a killed run may have left of a record, at the end of a file; a record holds no control characters."""
    return (line.startswith(_BEGINNING) and not _CONTROL.search(line)) or _BEGINNING.startswith(line)


def is_json(line: bytes) -> bool:
    """True for a whole value, such as a record that lacks its line end alone."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def read_lines(path: Path, *, follow: bool = False) -> Iterator[bytes]:
    """Yields the lines of a file with their ends; of a line of more than MOST_LINE_BYTES a longer beginning alone. Raises FileRefused."""
    with open_regular(path, follow=follow) as file:
        if (size := os.fstat(file.fileno()).st_size) > MOST_BYTES:
            raise FileRefused(f"{shown_path(path)} has {size} bytes: expected at most {MOST_BYTES}")
        while line := file.readline(MOST_LINE_BYTES + 1):
            yield line
            while len(line) > MOST_LINE_BYTES and not line.endswith(b"\n"):  # what is left of it
                line = file.readline(MOST_LINE_BYTES + 1) or b"\n"


def whole_lines(path: Path) -> list[bytes]:
    """The lines of a file, without one at the end that a killed run left unfinished."""
    return read_regular(path, MOST_BYTES).split(b"\n")[:-1]


def make_appendable(path: Path) -> None:
    """Makes the file if there is none; raises UsageError if it cannot be written, or holds something and not one record."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_appendable(path):
            pass
        first, ours = b"", False
        for line in read_lines(path):
            first = first or line.rstrip(b"\n")
            if ours := line.startswith(_BEGINNING) or (not line.endswith(b"\n") and is_torn(line)):
                break
    except FileRefused as error:
        raise UsageError(f"cannot write results: {error}; name a folder that can be written with --out") from None
    except OSError as error:
        raise UsageError(
            f"cannot write results to {shown_path(path)}: {error.strerror}; name a folder that can be written with --out"
        ) from None
    if first and not ours:
        found = first[:40].decode(errors="replace")
        raise UsageError(f"{path} begins with {found!a}: expected records, one a line; move the file away or choose another with --out")


def append_lines(path: Path, *lines: bytes) -> None:
    """Adds lines by one write, flushed to the disk before this returns: all of them, or none and a HarnessError.

    What a killed run left of a line is replaced. Other runs may append at the same time.
    """
    data = b"".join(line + b"\n" for line in lines)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_appendable(path) as file:
            lock(file, _PATIENCE_S)
            end = _end_of_lines(file.fileno())
            if end is None:  # what is whole, or not ours, stays on a line of its own
                data, end = b"\n" + data, os.fstat(file.fileno()).st_size
            try:
                file.truncate(end)
                left = memoryview(data)
                while left:  # once, unless the disk is full
                    left = left[file.write(left) :]
                os.fsync(file.fileno())
            except OSError:
                file.truncate(end)
                raise
    except FileRefused as error:
        raise HarnessError(f"{error}; the result was not stored") from None
    except OSError as error:
        raise HarnessError(f"cannot append to {path}: {error.strerror}; the result was not stored") from None


def _end_of_lines(descriptor: int) -> int | None:
    """Returns the offset of the next line: the end, or that of an unfinished record. None behind something else that has no line end."""
    size = os.fstat(descriptor).st_size
    for length in (1, 1 << 16, MOST_LINE_BYTES):  # one byte says it nearly always
        tail = os.pread(descriptor, min(length, size), max(0, size - length))
        if b"\n" in tail or length >= size:
            break
    else:
        return None
    unfinished = tail[tail.rfind(b"\n") + 1 :]
    return size - len(unfinished) if is_torn(unfinished) and not is_json(unfinished) else None
