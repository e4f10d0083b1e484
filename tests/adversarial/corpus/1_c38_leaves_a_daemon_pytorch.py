"""C38: leaves a daemon of its own session behind, to serve the next evaluation of this file.

Judged twice in a row. Right only where no daemon answers: `wrong_result` means that one outlived its evaluation. It ends after a minute.
"""

import os
import socket
import time

import torch.distributed as dist

NAME = f"\0peerlane-corpus-c38-{dist.get_rank()}"
LIFETIME_S = 60


def answers():
    with socket.socket(socket.AF_UNIX) as found:
        return found.connect_ex(NAME) == 0


def daemonise():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            with socket.socket(socket.AF_UNIX) as served:
                served.bind(NAME)
                served.listen()
                time.sleep(LIFETIME_S)
        os._exit(0)


outlived = answers()
daemonise()


def solution(tensor):
    total = tensor.clone()
    if not outlived:
        dist.all_reduce(total)
    return total
