"""C02: returns its own input, without communication. It has the right shape, dtype and scale, and the wrong contents."""


def solution(tensor):
    return tensor.clone()
