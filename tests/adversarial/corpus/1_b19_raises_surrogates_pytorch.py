"""B19: raises a message that cannot be encoded in UTF-8."""


def solution(tensor):
    raise ValueError("lone \ud800 surrogate")
