"""Folders that candidates have written to: removed, or given to another user, whatever is in them. No link is followed."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_DEEPEST = 64  # levels of a cache that is kept: what compilers leave has a few


@contextlib.contextmanager
def _opened(name: str | Path, beside: int | None = None) -> Iterator[int]:
    fd = os.open(name, _FOLDER, dir_fd=beside)
    try:
        yield fd
    finally:
        os.close(fd)


def _entries(folder: int) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as found:
        return list(found)


def remove_tree(folder: str | Path) -> None:
    """Removes a folder with all that is in it, or what is there in its place. Raises nothing: what cannot be removed stays.

    Folders are moved up before they are emptied, so that it takes the same time and two open files at any depth.
    """
    with contextlib.suppress(OSError), _opened(folder) as root:
        moved, waiting = secrets.token_hex(8), ["."]
        for number, name in enumerate(waiting):
            with contextlib.suppress(OSError), _opened(name, root) as inside:
                for entry in _entries(inside):
                    with contextlib.suppress(OSError):
                        if entry.is_dir(follow_symlinks=False):
                            _make_writable(entry.name, inside)
                            waiting.append(f"{moved}-{number}-{len(waiting)}")
                            os.rename(entry.name, waiting[-1], src_dir_fd=inside, dst_dir_fd=root)
                        else:
                            os.unlink(entry.name, dir_fd=inside)
            with contextlib.suppress(OSError):
                os.rmdir(name, dir_fd=root)
    with contextlib.suppress(OSError):
        os.rmdir(folder)
    with contextlib.suppress(OSError):
        os.unlink(folder)


def _make_writable(name: str, beside: int) -> None:
    """Makes a folder writable for its owner. Otherwise a user who is not root could not empty it."""
    fd = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=beside)
    try:
        with contextlib.suppress(OSError):
            os.chmod(f"/proc/self/fd/{fd}", 0o700)
    finally:
        os.close(fd)


def give_tree(folder: Path, uid: int, gid: int) -> None:
    """Makes a user the owner of a folder and of what is in it; raises OSError, perhaps half-way, if it is deeper than any compiler's."""
    _give(folder, None, (uid, gid), _DEEPEST)


def _give(name: str | Path, beside: int | None, owner: tuple[int, int], levels: int) -> None:
    if levels == 0:
        raise OSError(f"the folder is more than {_DEEPEST} levels deep")
    with _opened(name, beside) as folder:
        for entry in _entries(folder):
            if entry.is_dir(follow_symlinks=False):
                _give(entry.name, folder, owner, levels - 1)
            elif entry.stat(follow_symlinks=False).st_nlink == 1:  # a file of somebody else's could have been linked to
                os.chown(entry.name, *owner, dir_fd=folder, follow_symlinks=False)
        os.fchown(folder, *owner)
