"""B20: ends by a signal that has no name."""

import os
import signal


def solution(tensor):
    os.kill(os.getpid(), signal.SIGRTMIN + 3)
    return tensor.clone()
