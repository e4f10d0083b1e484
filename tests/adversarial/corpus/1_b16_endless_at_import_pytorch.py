"""B16: an endless loop while it is imported."""

import time

while True:
    time.sleep(1)


def solution(tensor):
    return tensor.clone()
