"""Caches of compiled code, one for each candidate's source: a candidate cannot leave anything in another one's cache.

A rank group is confined, before it is known whose it will be, to a slot: an empty folder. The candidate's cache is moved into the slot
before the candidate is loaded, and moved back when the group has ended. Moving does not look at what the candidate left there. The ranks
reach it through a link whose path is always the same, because build tools compile anew what they find elsewhere.
"""

import contextlib
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from peerlane.errors import HarnessError, UsageError
from peerlane.sandbox.untrusted_folders import give_tree, remove_tree
from peerlane.settings import candidate_caches

_KEPT, _LINKS, _RUNS = "kept", "links", "runs"  # below the folder of all candidates' caches
_PASSABLE = 0o711  # what lies inside may belong to another user


class RunFolders:
    """The folders of a run: ``scratch`` for its groups, and ``caches`` for their slots (None where candidates are not confined).

    Raises :class:`UsageError` if they cannot be made.
    """

    def __init__(self, confined: bool) -> None:
        self.caches: Path | None = None
        self._root = candidate_caches()
        if confined:
            self.caches = _prepare(self._root)
        self.scratch = Path(tempfile.mkdtemp(prefix="peerlane-"))
        self.scratch.chmod(_PASSABLE)

    @property
    def writable(self) -> list[Path]:
        """Those that the processes of the run write to."""
        return [self.scratch] if self.caches is None else [self.scratch, self.caches]

    @property
    def readable(self) -> list[Path]:
        """Those that they read."""
        return [] if self.caches is None else [self._root / _LINKS]

    def slot(self) -> "CacheSlot | None":
        """A slot for one more group of a candidate's processes, where candidates are confined."""
        return None if self.caches is None else CacheSlot(self._root, self.caches)

    def remove(self) -> None:
        """Removes them; all processes of the run must have ended."""
        for folder in self.writable:
            remove_tree(folder)


def _prepare(root: Path) -> Path:
    """Makes what is needed below ``root``; the new run's own folder."""
    try:
        for name in (_KEPT, _LINKS, _RUNS):
            (root / name).mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=root / _RUNS))
    except OSError as error:
        raise UsageError(
            f"cannot make a folder in {root} for what candidates compile: {error.strerror}; set PEERLANE_CACHE_DIR to a folder that can "
            "be written"
        ) from None
    folder.chmod(_PASSABLE)
    return folder


class CacheSlot:
    """The folder, below ``run``, in which one rank group may keep what it compiles; ``root`` is that of all candidates' caches."""

    def __init__(self, root: Path, run: Path) -> None:
        self._root = root
        self.folder = Path(tempfile.mkdtemp(dir=run))
        self._inside: Path | None = None

    def admit(self, sha256: str) -> Path:
        """The cache of the candidate with this source: what was kept of it, or an empty folder if that is nothing or in use elsewhere.

        Raises :class:`HarnessError` if it cannot be made.
        """
        inside = self._inside = self.folder / sha256
        owner = self.folder.stat()
        try:
            os.rename(self._root / _KEPT / sha256, inside)
            if _status(inside).st_uid != owner.st_uid:
                give_tree(inside, owner.st_uid, owner.st_gid)
        except OSError:
            self._make(inside, owner)
        link = self._root / _LINKS / sha256
        if not link.exists():
            with contextlib.suppress(FileNotFoundError):
                link.unlink()  # a run that was killed left it
            with contextlib.suppress(FileExistsError):
                link.symlink_to(inside)
        return link if self._linked(link) else inside

    @staticmethod
    def _make(inside: Path, owner: os.stat_result) -> None:
        remove_tree(inside)
        try:
            inside.mkdir()
            os.chown(inside, owner.st_uid, owner.st_gid)
        except OSError as error:
            raise HarnessError(f"cannot make the folder {inside} for what a candidate compiles: {error.strerror}") from None

    def _linked(self, link: Path) -> bool:
        return link.is_symlink() and os.readlink(link) == str(self._inside)

    def release(self) -> None:
        """Puts the cache back, if anything is in it, and removes the slot. All processes of the group must have ended."""
        if (inside := self._inside) is not None:
            link = self._root / _LINKS / inside.name
            if self._linked(link):
                link.unlink()
            with contextlib.suppress(OSError):
                inside.rmdir()
            with contextlib.suppress(OSError):  # empty; or another group kept one first; or the candidate made it immovable
                _status(inside)
                os.rename(inside, self._root / _KEPT / inside.name)
        remove_tree(self.folder)


def _status(folder: Path) -> os.stat_result:
    """Returns the status of a folder, and follows no link. Raises OSError for anything else that a candidate put in its place."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(f"{folder} is no folder")
    return status


def cache_variables(folder: Path) -> Mapping[str, str]:
    """Environment variables that send what a candidate compiles to a folder."""
    names = {
        "PEERLANE_CACHE_DIR": "peerlane",
        "TRITON_CACHE_DIR": "triton",
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "XDG_CACHE_HOME": "other",
    }
    return {variable: str(folder / name) for variable, name in names.items()}
