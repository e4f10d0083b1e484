"""C51: answers in its rank's stead, in a valid frame, with a failure that only the supervisor can find."""

import json
import os
import socket
import struct


def send(message):
    body = json.dumps(message).encode()
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            with socket.socket(fileno=os.dup(fd)) as found:
                if found.family == socket.AF_UNIX:
                    found.send(struct.pack("<I", len(body)) + body)
        except OSError:
            continue


def solution(tensor):
    send({"ok": False, "error": {"kind": "hang", "message": " "}})
    return tensor.clone()
