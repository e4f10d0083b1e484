"""The system calls that candidates do without: other processes' memory and limits, what outlives its process in the kernel, namespaces
and mounts, the kernel's own configuration.

A classic BPF program, because the filter is short and libseccomp is a library of the system that may be missing.
"""

import ctypes
import errno
import platform
import socket
import struct
from collections.abc import Mapping

from peerlane.sandbox import linux

# On both machines: io_uring_setup, _enter and _register, whose requests pass no filter; open_tree, move_mount, fsopen, fsconfig, fsmount,
# fspick; process_madvise; mount_setattr.
_COMMON = (*range(425, 434), 440, 442)
# Name, number on x86_64, number on aarch64. System V's objects and message queues would be there for the next candidate.
_DENIED = """
    ptrace=101,117 process_vm_readv=310,270 process_vm_writev=311,271 kcmp=312,272 unshare=272,97 setns=308,268 mount=165,40
    umount2=166,39 pivot_root=155,41 chroot=161,51 open_by_handle_at=304,265 bpf=321,280 perf_event_open=298,241 userfaultfd=323,282
    add_key=248,217 request_key=249,218 keyctl=250,219 init_module=175,105 finit_module=313,273 delete_module=176,106 kexec_load=246,104
    kexec_file_load=320,294 reboot=169,142 swapon=167,224 swapoff=168,225 acct=163,89 quotactl=179,60 syslog=103,116
    settimeofday=164,170 clock_settime=227,112 adjtimex=159,171 clock_adjtime=305,266 sethostname=170,161 setdomainname=171,162
    vhangup=153,58 shmget=29,194 shmat=30,196 semget=64,190 msgget=68,186 mq_open=240,180
"""
_BY_MACHINE = [tuple(map(int, row.partition("=")[2].split(","))) for row in _DENIED.split()]
_MACHINES: Mapping[str, tuple[int, int]] = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column, AUDIT_ARCH
_CLONE, _CLONE3 = (56, 220), 435
_SOCKET, _SECCOMP = (41, 198), (317, 277)
_PRLIMIT = (302, 261)
_X32 = 0x40000000

_NEW_NAMESPACES = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)  # no AF_VSOCK: it reaches a virtual machine's host

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in the kernel's struct seccomp_data
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_SET_MODE_FILTER = 1
_SPEC_ALLOW = 4  # without it some kernels switch speculation off in filtered processes, which would slow what is timed


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def _fail_if(test: int, value: int, error: int) -> bytes:
    return _instruction(test, value, 0, 1) + _instruction(_RETURN, _FAIL | error)


def program(machine: str) -> bytes:
    """The filter's instructions for a machine (``x86_64`` or ``aarch64``); raises OSError for any other."""
    if machine not in _MACHINES:
        raise OSError(errno.ENOSYS, f"no system call filter for {machine}: expected {' or '.join(_MACHINES)}")
    column, architecture = _MACHINES[machine]
    denied = [*_COMMON, *(numbers[column] for numbers in _BY_MACHINE)]
    filters = [
        _instruction(_LOAD, _ARCHITECTURE),
        _instruction(_EQUAL, architecture, 1, 0),
        _instruction(_RETURN, _FAIL | errno.ENOSYS),
        _instruction(_LOAD, _NUMBER),
        _fail_if(_AT_LEAST, _X32, errno.ENOSYS),
        _fail_if(_EQUAL, _CLONE3, errno.ENOSYS),  # its flags are out of a filter's sight; the C library falls back to clone
        *(_fail_if(_EQUAL, number, errno.EPERM) for number in denied),
        _instruction(_EQUAL, _CLONE[column], 0, 4),
        _instruction(_LOAD, _FIRST_ARGUMENT),
        _fail_if(_ANY_BIT, _NEW_NAMESPACES, errno.EPERM),
        _instruction(_RETURN, _ALLOW),
        _instruction(_EQUAL, _PRLIMIT[column], 0, 4),
        _instruction(_LOAD, _FIRST_ARGUMENT),  # the low word: the kernel looks at no more of a process number
        _instruction(_EQUAL, 0, 1, 0),  # nobody's but its own limits: one can kill, and Landlock has no say in it
        _instruction(_RETURN, _FAIL | errno.EPERM),
        _instruction(_RETURN, _ALLOW),
        _instruction(_EQUAL, _SOCKET[column], 0, 2 + len(_FAMILIES)),
        _instruction(_LOAD, _FIRST_ARGUMENT),
        *(_instruction(_EQUAL, family, len(_FAMILIES) - place, 0) for place, family in enumerate(_FAMILIES)),
        _instruction(_RETURN, _FAIL | errno.EAFNOSUPPORT),
        _instruction(_RETURN, _ALLOW),
    ]
    return b"".join(filters)


def install() -> None:
    """Filters this process's system calls and those of all that it starts; needs no_new_privileges. Denied calls fail with EPERM."""
    machine = platform.machine()
    instructions = program(machine)
    buffer = ctypes.create_string_buffer(instructions, len(instructions))
    header = struct.pack("HxxxxxxP", len(instructions) // 8, ctypes.addressof(buffer))
    linux.syscall("seccomp", _SECCOMP[_MACHINES[machine][0]], _SET_MODE_FILTER, _SPEC_ALLOW, header)
