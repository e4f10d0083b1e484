"""Ends an MPS daemon after its owner has ended, for any reason. Run as a program: ``mps_watcher.py OWNER FOLDER CONTROL``.

It uses the standard library alone, lives in a session of its own, and ends when standard input closes or its parent is no longer OWNER.
"""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

QUIT_LIMIT_S, KILL_LIMIT_S, POLL_S = 4.0, 2.0, 0.2
PID_FILE = "nvidia-cuda-mps-control.pid"
"""Written by the daemon into its pipe folder."""


def owner_lives(owner: int) -> bool:
    """Waits a moment; tells whether the owner lives. A fork of it can keep the other end of the pipe open, so the parent counts too."""
    ready, _, _ = select.select([0], [], [], POLL_S)
    return os.getppid() == owner and not (ready and os.read(0, 1) == b"")


def daemon_pid(folder: Path) -> int | None:
    try:
        return int((folder / "pipe" / PID_FILE).read_text())
    except (OSError, ValueError):
        return None


def is_alive(pid: int) -> bool:
    """Tells whether a process is alive. One that has ended and was not waited for yet is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def processes(folder: Path) -> set[int]:
    """Returns the living processes of the daemon: itself, and its servers, which bear its folder in their environment."""
    mark, marked = os.fsencode(f"CUDA_MPS_PIPE_DIRECTORY={folder}/pipe"), set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (entry / "comm").read_text().startswith("nvidia-cuda-mps") and mark in (entry / "environ").read_bytes():
                marked.add(int(entry.name))
    own = daemon_pid(folder)
    return {pid for pid in (marked if own is None else {own, *marked}) if is_alive(pid)}


def wait_for_end(folder: Path, limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while processes(folder) and time.monotonic() < end:
        time.sleep(POLL_S / 4)


def end_daemon(folder: Path, control: str) -> None:
    """Asks the daemon to quit, then kills what is left of it and of its servers."""
    environment = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        subprocess.run([control], env=environment, input=b"quit\n", capture_output=True, timeout=QUIT_LIMIT_S)
    wait_for_end(folder, KILL_LIMIT_S)
    for pid in processes(folder):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    wait_for_end(folder, 1.0)


def main() -> None:
    owner, folder, control = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while owner_lives(owner):
        pass
    end_daemon(folder, control)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
