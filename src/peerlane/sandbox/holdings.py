"""Holdings of processes that their status does not tell: memory in files without a name, and space on disk."""

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

File = tuple[int, int]
"""device and number"""
_BLOCK_BYTES = 512  # of st_blocks, whatever the file system


def shared_memory_of_machine() -> int:
    """Returns the bytes of memory in files and shared mappings of all processes of the machine."""
    return _meminfo("Shmem")


def available_memory() -> int:
    """Returns the bytes of memory that the machine can still give out."""
    return _meminfo("MemAvailable") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _meminfo(name: str) -> int:
    return fields("/proc/meminfo", name).get(name, 0) << 10


def fields(file: str, *names: str) -> dict[str, int]:
    """Returns these fields of a file of /proc; nothing if it cannot be read. A process may have chosen bytes in it that are no text."""
    with contextlib.suppress(OSError, ValueError), open(file, errors="replace") as lines:
        return {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if name in names}
    return {}


def private_bytes(pid: int) -> int:
    """Returns the memory that no file backs, its page tables included. Of pages that several processes share, each has its part."""
    status = fields(f"/proc/{pid}/status", "RssAnon", "VmSwap", "VmPTE")
    if "Pss_Anon" in (shares := fields(f"/proc/{pid}/smaps_rollup", "Pss_Anon")):
        status["RssAnon"] = shares["Pss_Anon"]
    return sum(status.values()) << 10


def memory_device() -> int:
    """Returns the device on which the kernel keeps memory files and shared mappings."""
    with open(os.memfd_create("probe"), "rb") as probe:
        return os.fstat(probe.fileno()).st_dev


@dataclass(frozen=True)
class Memory:
    """The memory of a process: ``private`` bytes that no file backs, and the bytes of its memory ``files`` and shared mappings."""

    private: int
    files: dict[File, int]

    @classmethod
    def of(cls, pid: int, device: int) -> Self:
        """Looks at a process; ``device``: that of memory files."""
        return cls(private_bytes(pid), _open_files(pid, lambda status: status.st_dev == device))


def stored(folders: Sequence[str | Path], pids: Iterable[int]) -> tuple[int, int]:
    """Returns the bytes and the number of files in folders, with the bytes of the files there that processes have open and have unlinked.

    Raises OSError for a folder that cannot be looked into."""
    devices = {os.stat(folder).st_dev for folder in folders}
    unlinked: dict[File, int] = {}
    for pid in pids:
        unlinked |= _open_files(pid, lambda status: status.st_nlink == 0 and status.st_dev in devices)
    size, count = sum(unlinked.values()), 0

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # removed meanwhile
            raise error

    for top in folders:
        for folder, names, files in os.walk(top, onerror=refuse):
            count += len(names) + len(files)
            for name in files:
                with contextlib.suppress(FileNotFoundError):
                    size += os.lstat(os.path.join(folder, name)).st_blocks * _BLOCK_BYTES
    return size, count


def _open_files(pid: int, counts: Callable[[os.stat_result], bool]) -> dict[File, int]:
    """Returns those files that a process has open or mapped and that count, with what is stored in them."""
    found = {}
    for kind in ("fd", "map_files"):
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/{kind}"):
                with contextlib.suppress(OSError):  # map_files: for root only
                    status = os.stat(f"/proc/{pid}/{kind}/{name}")
                    if counts(status):
                        found[status.st_dev, status.st_ino] = status.st_blocks * _BLOCK_BYTES
    return found
