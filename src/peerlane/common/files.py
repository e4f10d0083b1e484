"""Files that several processes write, and files that strangers wrote.

Shared files: locks with a time limit, and contents that are there whole or not at all. Files of strangers: only regular files are opened,
and only those of a limited size are read. No link is followed below a folder, nor at the end of a path; links in front of a folder that
the user names are. What is below the folder of a run is opened here, for writing too: a test forbids other ways.
"""

import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import BufferedReader, FileIO
from pathlib import Path, PurePath
from typing import IO, Any

from peerlane.errors import FileRefused

_LOOK_S = 0.01
_FILE = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC  # a pipe without a writer would be waited for
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_KINDS = {
    stat.S_IFLNK: "a link",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
MOST_LEVELS, MOST_ENTRIES = 32, 200_000
"""The most levels and entries of a folder that is searched."""


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
    with open_appendable(path) as file:
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


def read_regular(path: Path, limit: int, below: Path | None = None, *, follow: bool = False) -> bytes:
    """The contents of a regular file of at most ``limit`` bytes; raises FileRefused, which names the file and the reason.

    Args:
        path: of the file. A link is refused, also one to a file in the same folder.
        below: a folder in front of ``path``: below it no folder may be a link either.
        follow: whether ``path`` may be a link, as for a file that only its owner can put there.
    """
    with open_regular(path, below, follow=follow) as file:
        if (size := os.fstat(file.fileno()).st_size) > limit:
            raise FileRefused(f"{shown_path(path)} has {size} bytes: expected at most {limit}")
        return file.read(size)  # what another program adds meanwhile is left for the next reader


@contextmanager
def open_regular(path: Path, below: Path | None = None, *, follow: bool = False) -> Iterator[BufferedReader]:
    """Opens a regular file as :func:`read_regular` does. Neither a pipe nor a lease makes it wait."""
    with ExitStack() as stack:
        with _refusals("read", path):
            beside = None if below is None else stack.enter_context(_opened_folder(below, path.relative_to(below).parts[:-1]))
            name = path if beside is None else path.name
            _must_be_regular(path, os.stat(name, dir_fd=beside, follow_symlinks=follow))
            descriptor = os.open(name, _FILE | os.O_RDONLY | (0 if follow else os.O_NOFOLLOW), dir_fd=beside)
            file = stack.enter_context(os.fdopen(descriptor, "rb"))
            _must_be_regular(path, os.fstat(descriptor))  # another file may have taken the name in the meantime
        yield file


@contextmanager
def open_appendable(path: Path, mode: int = 0o666) -> Iterator[FileIO]:
    """Opens a regular file to read it, to append to it and to lock it; makes it if there is none. No link is followed, nothing is cut."""
    with ExitStack() as stack:
        with _refusals("write", path):
            with suppress(FileNotFoundError):
                _must_be_regular(path, os.stat(path, follow_symlinks=False))
            descriptor = os.open(path, _FILE | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, mode)
            file = stack.enter_context(FileIO(descriptor, "a+"))
            _must_be_regular(path, os.fstat(descriptor))
        yield file


@contextmanager
def _refusals(verb: str, path: Path) -> Iterator[None]:
    """Raises FileRefused for errors of the system."""
    try:
        yield
    except FileRefused:
        raise
    except (OSError, ValueError) as error:  # ValueError: a name that holds a zero byte
        raise FileRefused(f"cannot {verb} {shown_path(path)}: {getattr(error, 'strerror', None) or error}") from None


def _must_be_regular(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "no regular file")
        raise FileRefused(f"{shown_path(path)} is {kind}: expected a regular file" + (", not a link to one" if kind == "a link" else ""))


@contextmanager
def _opened_folder(folder: Path, names: tuple[str, ...]) -> Iterator[int]:
    """A descriptor of the folder that these names lead to from ``folder``. Raises OSError, and FileRefused for a link among them."""
    descriptor = os.open(folder, _FOLDER)
    try:
        for number, name in enumerate(names, 1):
            if stat.S_ISLNK(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode):
                raise FileRefused(f"{shown_path(folder.joinpath(*names[:number]))} is a link: expected a folder, not a link to one")
            outer, descriptor = descriptor, os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(outer)
        yield descriptor
    finally:
        os.close(descriptor)


def find_files(folder: Path, wanted: Callable[[str], bool]) -> tuple[list[Path], list[str]]:
    """Finds what has a wanted name in and below a folder, of whatever kind it is, and says which folders it did not enter and why.

    Read what was found by ``read_regular(path, limit, below=folder)``. Names that begin with a dot or two underscores are left out.
    """
    found: list[Path] = []
    refused: list[str] = []
    waiting, seen = [PurePath()], 0
    while waiting:
        inner = waiting.pop()
        try:
            with _opened_folder(folder, inner.parts) as descriptor, os.scandir(descriptor) as entries:
                for entry in entries:
                    seen += 1
                    path = folder / inner / entry.name
                    if seen > MOST_ENTRIES:
                        refused.append(f"{shown_path(folder)} holds more than {MOST_ENTRIES:,} files: the rest was not looked at")
                        return sorted(found), refused
                    if entry.name.startswith((".", "__")):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        if len(inner.parts) < MOST_LEVELS:
                            waiting.append(inner / entry.name)
                        else:
                            refused.append(f"{shown_path(path)} is more than {MOST_LEVELS} folders deep")
                    elif wanted(entry.name):
                        found.append(path)
                    elif entry.is_symlink() and entry.is_dir():
                        refused.append(f"{shown_path(path)} is a link: expected a folder, not a link to one")
        except FileRefused as error:
            refused.append(str(error))
        except OSError as error:
            refused.append(f"cannot read the folder {shown_path(folder / inner)}: {error.strerror}")
    return sorted(found), refused


def shown_path(path: Path) -> str:
    """The path as a message shows it: characters that a terminal would obey, or that cannot be printed, are escaped."""
    return str(path) if str(path).isprintable() else ascii(str(path))
