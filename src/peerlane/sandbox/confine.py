"""The measures of a tier of isolation, taken inside the processes of a run: the fork server, the leader of a group, a rank.

The ranks of a group must reach each other's memory (symmetric memory duplicates file descriptors, which needs the right to trace), so what
makes a domain is entered once, by their leader, while it has one thread. A measure that cannot be taken raises: the group does not start.
"""

import glob
import os
import secrets
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from peerlane.common.place import Place
from peerlane.sandbox import linux, seccomp
from peerlane.sandbox.hidden_files import everything_but
from peerlane.sandbox.process_tree import kill_user, kill_within_reach

NO_NEW_PRIVILEGES = "no_new_privileges"
NOT_DUMPABLE = "not_dumpable"
NO_CAPABILITIES = "no_capabilities"
OWN_UID = "own_uid"
SECCOMP = "seccomp"
LANDLOCK_FILES = "landlock_files"
LANDLOCK_SIGNALS = "landlock_signals"
LOOPBACK_ONLY = "loopback_only"
PRIVATE_SHM = "private_shm"
GUARDED_PROC = "guarded_proc"
CLEAN_ENVIRONMENT = "clean_environment"
BUBBLEWRAP = "bubblewrap"

SHARED_MEMORY = "/dev/shm"
_DEVICES = ("null", "zero", "full", "random", "urandom")
_GPUS = ("nvidia*", "nvidia-caps/*", "nvidia-caps-imex-channels/*", "dri/render*")
_ALL_DEVICES = "/dev"  # hidden but for those above: a disk's node holds every file
_UNTRUSTED = ("candidate", "builder")
_KEPT = (linux.CAP_DAC_READ_SEARCH,)  # of root: a candidate of another user can be read, and Python below /root


def device_nodes(gpus: bool = True) -> list[str]:
    """The devices that ranks may open for writing; builders none of the GPUs', which others are timed on."""
    patterns = (*_DEVICES, *(_GPUS if gpus else ()))
    return sorted(path for pattern in patterns for path in glob.glob(f"/dev/{pattern}") if not os.path.isdir(path))


@dataclass(frozen=True)
class Confinement:
    """The isolation of a run as its processes have to know it; travels as JSON.

    Attributes:
        measures: names, of those above, that are in force.
        uid: of the group's processes, under ``own_uid``.
        hidden: files and folders that untrusted ranks cannot read, under ``landlock_files``.
    """

    measures: tuple[str, ...] = ()
    uid: int = 0
    hidden: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Confinement":
        """Returns the confinement whose ``dataclasses.asdict`` is ``data``."""
        return cls(tuple(data["measures"]), int(data["uid"]), tuple(data["hidden"]))

    @property
    def shared_memory(self) -> str | None:
        """The folder of shared memory, if the group has one of its own."""
        return SHARED_MEMORY if PRIVATE_SHM in self.measures else None

    def enter_fork_server(self) -> None:
        """Confines the process that starts all ranks. Call it before anything that starts threads is imported."""
        if LOOPBACK_ONLY in self.measures and BUBBLEWRAP not in self.measures:
            linux.enter_own_network()
        if NOT_DUMPABLE in self.measures:
            linux.set_dumpable(False)

    def enter_group(self, role: str, device: str, folder: str, writable: Sequence[str]) -> None:
        """Confines the leader of a group, before it starts ranks.

        Args:
            role: ``trusted`` groups are not confined.
            device: on ``cuda`` all groups share one network: the CUDA driver finds memory of other processes through named sockets.
            folder: the group's scratch folder, where its ranks start.
            writable: folders of the group, the scratch folder included.
        """
        if role not in _UNTRUSTED:
            return
        if OWN_UID in self.measures:
            for path in writable:
                os.chown(path, self.uid, self.uid)
        if self.measures:
            os.chdir(folder)
        if LOOPBACK_ONLY in self.measures and not Place.of(device).has_gpus:
            linux.enter_own_network()
        if {PRIVATE_SHM, GUARDED_PROC} & set(self.measures):
            linux.enter_namespaces(linux.CLONE_NEWNS)
        if PRIVATE_SHM in self.measures:
            linux.mount_private_tmpfs(SHARED_MEMORY)
        if GUARDED_PROC in self.measures:
            linux.mount_guarded_proc()
        if NO_NEW_PRIVILEGES in self.measures:
            linux.no_new_privileges()
        files, signals = LANDLOCK_FILES in self.measures, LANDLOCK_SIGNALS in self.measures
        if files or signals:
            shared = [path for path in (SHARED_MEMORY, *device_nodes(gpus=role != "builder")) if os.path.exists(path)]
            linux.landlock(
                [*writable, *shared, *self._named_threads(device)] if files else None,
                readable=list(everything_but((*self.hidden, _ALL_DEVICES))) if files else None,
                keep_signals=signals,
            )
        if SECCOMP in self.measures:
            seccomp.install()

    def _named_threads(self, device: str) -> list[str]:
        """Returns the files by which the CUDA driver names its threads; where it cannot, it does not start (CUDA_ERROR_OPERATING_SYSTEM).

        Which processes the ranks will be is not known yet, so it is all of /proc; for root only where that is guarded."""
        return ["/proc"] if Place.of(device).has_gpus and (GUARDED_PROC in self.measures or os.geteuid() != 0) else []

    def enter_ranks(self, role: str) -> None:
        """Before a group's ranks are started: a domain within the leader's, which they share and from which it is out of reach."""
        if role in _UNTRUSTED and LANDLOCK_SIGNALS in self.measures:
            linux.landlock(None, keep_signals=True)

    def kill_group(self, role: str) -> None:
        """Kills all other processes of the leader's group at once, where a measure tells them from everybody else's."""
        if role not in _UNTRUSTED:
            return
        if LANDLOCK_SIGNALS in self.measures:
            kill_within_reach()
        elif OWN_UID in self.measures:
            kill_user(self.uid)

    def enter_rank(self, role: str, folder: str) -> None:
        """Confines a rank, before anything in it starts a thread."""
        if role not in _UNTRUSTED:
            return
        if OWN_UID in self.measures:
            linux.become(self.uid, _KEPT)
        elif NO_CAPABILITIES in self.measures:
            linux.retain_capabilities(_KEPT if os.geteuid() == 0 else ())
        if NOT_DUMPABLE in self.measures:
            linux.set_dumpable(True)  # for the other ranks of the group
        if self.measures:
            # The CUDA driver reads its variable when it starts, before the candidate and its cache are known.
            os.environ.update(TMPDIR=folder, CUDA_CACHE_PATH=os.path.join(folder, "cuda-cache"))
            tempfile.tempdir = None  # a module that the fork server imported may have asked for the former one


# --- trying the measures ---


def _in_child(action: Any) -> str:
    """Runs a function in a forked process; what it raised, or nothing."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            action()
            os._exit(0)
        except BaseException as error:
            os.write(writing, f"{error}"[:500].encode() or b"failed")
        os._exit(1)
    os.close(writing)
    with open(reading, errors="replace") as text:
        reason = text.read()
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return reason or (f"the attempt ended with status {ended}" if ended else "")


def _refused(action: Any, what: str) -> None:
    try:
        action()
    except OSError:
        return
    raise OSError(f"{what} is possible in spite of it")


def _try_own_uid(uid: int) -> None:
    if os.geteuid() != 0:
        raise OSError("peerlane was not started as root")
    if not linux.permitted_capabilities().issuperset(_KEPT):
        raise OSError("root lacks CAP_DAC_READ_SEARCH here (docker run --cap-add DAC_READ_SEARCH), so candidates might not be readable")
    parent = os.getppid()
    linux.become(uid, _KEPT)
    os.listdir(sys.prefix)
    _refused(lambda: os.kill(parent, 0), "a signal to the parent")


def _try_seccomp() -> None:
    linux.no_new_privileges()
    seccomp.install()
    _refused(lambda: linux.syscall("ptrace", 101 if os.uname().machine == "x86_64" else 117, 0, 0, 0, 0), "tracing")


def _try_landlock(*, files: bool) -> None:
    needed = linux.LANDLOCK_WITH_TRUNCATE if files else linux.LANDLOCK_WITH_SIGNALS
    if (version := linux.landlock_version()) < needed:
        raise OSError(f"the kernel's Landlock has version {version}: expected {needed} or later")
    parent = os.getppid()
    linux.no_new_privileges()
    linux.landlock([] if files else None, keep_signals=not files)
    if files:
        _refused(lambda: open("/dev/null", "w").close(), "writing")
    else:
        _refused(lambda: os.kill(parent, 0), "a signal to the parent")


def _try_private_shm() -> None:
    linux.enter_namespaces(linux.CLONE_NEWNS)
    linux.mount_private_tmpfs(SHARED_MEMORY)
    name = f"{SHARED_MEMORY}/peerlane-{secrets.token_hex(8)}"
    with open(name, "wb") as file:
        file.write(b"x")


def _try_guarded_proc() -> None:
    linux.enter_namespaces(linux.CLONE_NEWNS)
    linux.mount_guarded_proc()
    linux.retain_capabilities(())
    _refused(lambda: open("/proc/sys/kernel/core_pattern", "a").close(), "changing the kernel")


def try_measures(uid: int) -> dict[str, str]:
    """Every measure, and why it cannot be taken here; nothing where it can. Each is tried in a process of its own."""
    runners = {
        NO_NEW_PRIVILEGES: linux.no_new_privileges,
        NOT_DUMPABLE: lambda: linux.set_dumpable(False),
        NO_CAPABILITIES: lambda: linux.retain_capabilities(()),
        OWN_UID: lambda: _try_own_uid(uid),
        SECCOMP: _try_seccomp,
        LANDLOCK_FILES: lambda: _try_landlock(files=True),
        LANDLOCK_SIGNALS: lambda: _try_landlock(files=False),
        LOOPBACK_ONLY: linux.enter_own_network,
        PRIVATE_SHM: _try_private_shm,
        GUARDED_PROC: _try_guarded_proc,
    }
    return {name: _in_child(runner) for name, runner in runners.items()}
