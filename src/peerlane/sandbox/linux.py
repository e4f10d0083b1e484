"""System calls that confine a process and that the standard library lacks, one wrapper each. A call that fails raises OSError.

All but :func:`become` act on the calling thread and what it starts from then on, so they are for processes with a single thread.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import socket
import struct
import threading
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_GET_DUMPABLE, PR_SET_DUMPABLE = 3, 4
PR_SET_KEEPCAPS = 8
PR_CAPBSET_READ, PR_CAPBSET_DROP = 23, 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE = 47, 2

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000

CAP_DAC_READ_SEARCH = 2

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 2, 4, 8, 0x20, 0x1000, 0x4000, 0x40000
_CAPABILITY_VERSION = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def prctl(option: int, value: int = 0, more: int = 0) -> int:
    arguments = [ctypes.c_ulong(item) for item in (value, more, 0, 0)]
    return _checked(_libc.prctl(option, *arguments), f"prctl({option}, {value})")


def syscall(name: str, number: int, *arguments: object) -> int:
    """A system call by its number; ``name`` is for the error."""
    return _checked(_libc.syscall(ctypes.c_long(number), *arguments), name)


def empty_file(fd: int) -> None:
    """Gives back the memory of a memory file, whose size stays: all of it reads as zeros."""
    keep_size, punch_hole = 1, 2
    _checked(_libc.fallocate(fd, keep_size | punch_hole, ctypes.c_long(0), ctypes.c_long(os.fstat(fd).st_size)), "fallocate")


# --- privileges ---


def no_new_privileges() -> None:
    """Keeps every program that is executed from now on from gaining privileges. Cannot be undone; seccomp and Landlock need it."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def set_dumpable(dumpable: bool) -> bool:
    """Lets others of the same user trace the process and open its memory, or forbids it; returns what was so before."""
    before = prctl(PR_GET_DUMPABLE) == 1
    prctl(PR_SET_DUMPABLE, int(dumpable))
    return before


_hiding = threading.Lock()
_hidden: list[bool] = []  # one entry for every block that hides the process; the first says what was so before


@contextlib.contextmanager
def not_dumpable() -> Iterator[None]:
    """Others of the same user can neither trace the process nor open its memory in here; blocks may overlap in any order."""
    with _hiding:
        _hidden.append(set_dumpable(False) if not _hidden else False)
    try:
        yield
    finally:
        with _hiding:
            before = _hidden.pop(0)
            if _hidden:
                _hidden[0] = before
            else:
                set_dumpable(before)


def permitted_capabilities() -> set[int]:
    """The numbers of the capabilities that this process has, or may take."""
    state = ctypes.create_string_buffer(24)  # twice (effective, permitted, inheritable), low words first
    _checked(_libc.capget(struct.pack("Ii", _CAPABILITY_VERSION, 0), state), "capget")
    _, low, _, _, high, _ = struct.unpack("6I", state.raw)
    return {number for number in range(64) if (low | high << 32) >> number & 1}


def retain_capabilities(kept: Collection[int]) -> None:
    """Gives up all capabilities but these, of which none is gained; programs that are executed keep them."""
    mask = sum(1 << number for number in kept if number in permitted_capabilities())
    for number in range(64):
        try:
            if not mask >> number & 1 and prctl(PR_CAPBSET_READ, number):
                prctl(PR_CAPBSET_DROP, number)
        except OSError as error:
            if error.errno == errno.EINVAL:
                break  # behind the last capability that this kernel knows
            if error.errno != errno.EPERM:  # without CAP_SETPCAP the set bounds nothing that no_new_privileges allows
                raise
    low, high = mask & 0xFFFFFFFF, mask >> 32
    header = struct.pack("Ii", _CAPABILITY_VERSION, 0)
    _checked(_libc.capset(header, struct.pack("6I", low, low, low, high, high, high)), "capset")
    for number in kept:
        if mask >> number & 1:
            prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, number)


def become(uid: int, kept: Collection[int]) -> None:
    """Changes to this user and group, of no other group, and to these capabilities. For root; clears the signal at the parent's death."""
    prctl(PR_SET_KEEPCAPS, 1)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    retain_capabilities(kept)


# --- namespaces ---


def enter_namespaces(flags: int) -> None:
    """New namespaces for this process and its children. Who is not root gets them within a new user namespace of this one user."""
    uid, gid = os.geteuid(), os.getegid()
    if _libc.unshare(flags) == 0:
        return
    if ctypes.get_errno() != errno.EPERM or uid == 0:  # root would lose all other users, one of which it may want to become
        _checked(-1, f"unshare({flags:#x})")
    _checked(_libc.unshare(flags | CLONE_NEWUSER), f"unshare({flags | CLONE_NEWUSER:#x})")
    dumpable = set_dumpable(True)  # else the files below belong to root
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    set_dumpable(dumpable)


def enter_own_network() -> None:
    """A new network namespace, whose loopback interface is up."""
    enter_namespaces(CLONE_NEWNET)
    request, up_and_running = 0x8914, 0x41
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, request, struct.pack("16sH14x", b"lo", up_and_running))


def mount_private_tmpfs(target: str) -> None:
    """An empty file system in memory over a folder, seen in this mount namespace only."""
    _make_mounts_private()
    _mount("tmpfs", target, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=1777,nr_inodes=100000")  # an empty file takes memory too


def mount_guarded_proc() -> None:
    """A ``/proc``, seen in this mount namespace only, that has just the processes that the reader may trace. The kernel and its drivers can
    be read there, and not written to."""
    _make_mounts_private()
    _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, "hidepid=ptraceable")
    for entry in os.scandir("/proc"):
        of_a_process = entry.is_symlink() or entry.name.isdigit()
        if not of_a_process and (entry.is_dir() or entry.stat().st_mode & 0o222):
            _mount(entry.path, entry.path, None, _MS_BIND | _MS_REC)
            _mount(None, entry.path, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)


def _make_mounts_private() -> None:
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind, options)]
    _checked(_libc.mount(*texts[:3], ctypes.c_ulong(flags), texts[3]), f"mount {source or ''} at {target}")


# --- Landlock: https://docs.kernel.org/userspace-api/landlock.html ---

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_RULE_PATH_BENEATH, _SCOPE_SIGNAL = 1, 1 << 1
_WRITE_FILE, _READ_FILE, _TRUNCATE = 1 << 1, 1 << 2, 1 << 14
_MOVE = 1 << 13  # files from one folder to another
_CHANGE_FOLDER = sum(1 << bit for bit in range(4, 14))  # remove, make and move entries of all kinds
LANDLOCK_WITH_TRUNCATE, LANDLOCK_WITH_SIGNALS = 3, 6  # versions of the interface


def landlock_version() -> int:
    """The version of the kernel's Landlock; raises OSError where there is none, or it is switched off."""
    return syscall("landlock_create_ruleset", _CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1))


def landlock(writable: Sequence[str] | None, *, readable: Sequence[str] | None = None, keep_signals: bool) -> None:
    """Puts this process and its children into a domain of its own.

    Inside, only ``writable`` files and what lies below ``writable`` folders can be changed (None: anything). Only they and what is
    ``readable`` likewise can be read (None: anything). With ``keep_signals``, processes outside cannot be sent signals. They can never be
    traced. Needs no_new_privileges.
    """
    handled = _MOVE if writable is None else _WRITE_FILE | _TRUNCATE | _CHANGE_FOLDER
    reading = 0 if readable is None else _READ_FILE
    handled |= reading
    rules = [(path, handled) for path in writable or ()] + [(path, reading) for path in readable or ()]
    if writable is None:
        rules.append(("/", _MOVE))  # a domain that does not allow it refuses it, even one that handles nothing
    attributes = struct.pack("QQQ", handled, 0, _SCOPE_SIGNAL if keep_signals else 0)
    size = len(attributes) if keep_signals else 8  # older kernels know less of it
    ruleset = syscall("landlock_create_ruleset", _CREATE_RULESET, attributes, ctypes.c_size_t(size), ctypes.c_uint32(0))
    try:
        for path, rights in rules:
            try:
                beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                if rights != reading:
                    raise
                continue  # it has gone, or nobody here can read it anyway
            try:
                access = rights if os.path.isdir(path) else rights & (_WRITE_FILE | _TRUNCATE | _READ_FILE)
                rule = struct.pack("=Qi", access, beneath)
                syscall("landlock_add_rule", _ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, ctypes.c_uint32(0))
            finally:
                os.close(beneath)
        syscall("landlock_restrict_self", _RESTRICT_SELF, ruleset, ctypes.c_uint32(0))
    finally:
        os.close(ruleset)


def lower_priority(pid: int, niceness: int) -> None:
    """Lowers the priority of a process's threads, and of its session where the kernel shares cores by sessions."""
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.setpriority(os.PRIO_PROCESS, int(thread), niceness)
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text(str(niceness))
