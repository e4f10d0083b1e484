"""C52: leaves a process that bears its successor and ends, over and over, and writes into the next candidate's memory.

Right itself; the candidates behind it are wrong where the process outlived its group. It ends after twenty seconds.
"""

import atexit
import os
import shutil
import subprocess
import tempfile
import time

import torch.distributed as dist

SOURCE = """
#include <stdlib.h>
#include <unistd.h>
int main(int count, char** words) {
    unsigned char junk[512];
    for (int i = 0; i < 512; i++) junk[i] = 37 * i;
    for (unsigned left = 40000, place = 1; left > 0; left--) {
        if (fork() > 0) _exit(0);
        for (int i = 0; i < 4; i++) {
            place = 1664525 * place + 1013904223;
            if (pwrite(atoi(words[1]), junk, sizeof junk, place >> 15) < 0) _exit(1);
        }
        usleep(300);
    }
}
"""


def shared_memory():
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            if "peerlane-arena" in os.readlink(f"/proc/self/fd/{fd}"):
                return fd
        except OSError:
            continue
    return -1


def leave():
    program, fd = os.path.join(tempfile.mkdtemp(), "program"), shared_memory()
    subprocess.run(["cc", "-O2", "-static", "-xc", "-", "-o", program], input=SOURCE.encode(), check=True)
    subprocess.Popen([program, str(fd)], pass_fds=[fd], start_new_session=True)
    time.sleep(0.1)


if dist.get_rank() == 0 and shutil.which("cc"):
    atexit.register(leave)


def solution(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total
