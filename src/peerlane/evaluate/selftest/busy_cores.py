"""Processes that keep cores busy, so that honest candidates are judged on a machine that has other work."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

from peerlane.sandbox.process_tree import die_with_parent


@contextlib.contextmanager
def busy_cores(count: int) -> Iterator[list[int]]:
    """Runs so many processes that never wait, and gives their ids. They end with the block, and with this process, however it ends."""
    spinning: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            command = [sys.executable, "-P", "-m", __name__, str(os.getpid())]
            # An interrupt from the terminal must not make each of them print a traceback.
            spinning.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True))
        yield [process.pid for process in spinning]
    finally:
        for process in spinning:
            process.kill()
        for process in spinning:
            process.wait()


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    while True:
        pass
