"""Candidates that take too much of the machine, and limits at which they are stopped before anybody notices."""

from pathlib import Path

from peerlane.sandbox.limits import Limits

LIMITS = Limits(memory_bytes=900 << 20, processes=400, disk_bytes=64 << 20, files=3000)
MEMORY = ("out_of_memory", "its limit is 900 MiB")
BOMBS = {  # the body of a solution; its verdict; what the feedback says
    "recursion": (
        "import sys; sys.setrecursionlimit(1 << 30)\n    def deeper(n):\n        return deeper(n + 1)\n    deeper(0)",
        *MEMORY,
    ),
    "lists": ("kept = []\n    while True: kept.append(bytearray(1 << 20))", *MEMORY),
    "processes": (
        "import os, time\n    while True:\n        try:\n            if os.fork() == 0: os.setsid()\n"
        "        except OSError: pass\n        time.sleep(0.01)",
        "runtime_error",
        "its limit is 400",
    ),
    "disk": (
        "import os, tempfile, time\n    with tempfile.TemporaryFile() as file:\n"
        "        while True:\n            os.write(file.fileno(), bytes(1 << 20)); time.sleep(0.005)",
        "runtime_error",
        "to disk; its limit is 64 MiB",
    ),
    "memory file": (
        "import os, time\n    fd = os.memfd_create('x')\n    for _ in range(800): os.write(fd, bytes(1 << 20))\n    time.sleep(60)",
        *MEMORY,
    ),
    "arena": (
        "import os, time\n    opened = {os.readlink(f'/dev/fd/{fd}'): int(fd) for fd in range(256) if os.path.exists(f'/dev/fd/{fd}')}\n"
        "    fd = next(fd for name, fd in opened.items() if 'arena' in name)\n    os.lseek(fd, 1 << 40, 0)\n"
        "    for _ in range(800): os.write(fd, bytes(1 << 20))\n    time.sleep(60)",
        *MEMORY,
    ),
    "shared mapping": (
        "import mmap, os, time\n    m = mmap.mmap(-1, 800 << 20)\n    for place in range(0, 800 << 20, 16 << 20):\n"
        "        m.seek(place)\n        if os.fork() == 0: os._exit(m.write(bytes(16 << 20)) * 0)\n        os.wait()\n    time.sleep(60)",
        *MEMORY,
    ),
    "small processes": (
        "import subprocess, sys, time\n    hold = 'x = bytes(range(256)) * (320 << 10); import time; time.sleep(60)'\n"
        "    kept = [subprocess.Popen([sys.executable, '-S', '-c', hold]) for _ in range(12)]\n    time.sleep(60)",
        *MEMORY,
    ),
    "page tables": (
        "import mmap, time\n    m = mmap.mmap(-1, 400 << 30, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, mmap.PROT_READ)\n"
        "    m.madvise(mmap.MADV_NOHUGEPAGE)\n    for place in range(0, 400 << 30, 2 << 20): m[place]\n    time.sleep(60)",
        *MEMORY,
    ),
    "lists under a strange name": (
        "import ctypes, time\n    ctypes.CDLL(None).prctl(15, bytes([255]), 0, 0, 0)\n"
        "    kept = [bytearray(1 << 20) for _ in range(800)]\n    time.sleep(60)",
        *MEMORY,
    ),
    "reserved blocks": (
        "import os, tempfile, time\n    with tempfile.TemporaryFile() as file:\n"
        "        os.posix_fallocate(file.fileno(), 0, 96 << 20)\n        time.sleep(60)",
        "runtime_error",
        "on disk; its limit is 64 MiB",
    ),
    "writers nobody waits for": (
        "import os, signal, time\n    signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n    for number in range(100):\n"
        "        if os.fork() == 0:\n            open(f'{os.getppid()}-{number}', 'wb').write(bytes(2 << 20))\n            os._exit(0)\n"
        "        time.sleep(0.01)\n    time.sleep(60)",
        "runtime_error",
        "on disk; its limit is 64 MiB",
    ),
    "many files": (
        "import os, tempfile, time\n    folder = tempfile.mkdtemp()\n"
        "    for number in range(4000): os.mknod(f'{folder}/{number}')\n    time.sleep(60)",
        "runtime_error",
        "files; its limit is 3000",
    ),
    "shared memory": (
        "import os, time\n    with open(f'/dev/shm/peerlane-{os.getpid()}', 'wb', 0) as file:\n"
        "        os.unlink(file.name)\n        while True:\n            file.write(bytes(4 << 20)); time.sleep(0.005)",
        *MEMORY,
    ),
}


def write_bomb(name: str, folder: Path) -> Path:
    """Writes one of them into a folder, as a candidate; returns its path."""
    path = folder / f"1_{name.replace(' ', '_')}_pytorch.py"
    path.write_text(f"def solution(tensor):\n    {BOMBS[name][0]}\n")
    return path
