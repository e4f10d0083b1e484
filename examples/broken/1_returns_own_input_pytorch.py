# expect: wrong_result
"""No communication: every rank returns what it was given."""


def solution(tensor):
    return tensor.clone()
