# expect: integrity_failure
"""Finds the socket on which its rank answers the evaluator, and answers in its stead."""

import os
import socket


def answer_everything():
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            with socket.socket(fileno=os.dup(fd)) as found:
                if found.family == socket.AF_UNIX:
                    found.send(b'{"ok": true, "verdict": "correct"}')
        except OSError:
            continue


def solution(tensor):
    answer_everything()
    return tensor.clone()
