"""C56: answers in its rank's stead with a failure whose kind is a list, which no set can be asked for."""

import os
import socket
import struct


def answer_for_the_rank(body):
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            with socket.socket(fileno=os.dup(fd)) as found:
                if found.family == socket.AF_UNIX:
                    found.send(struct.pack("<I", len(body)) + body)
        except OSError:
            continue


def solution(tensor):
    answer_for_the_rank(b'{"ok": false, "error": {"kind": [], "message": "x"}}')
    return tensor.clone()
