"""C02: the local product, without its communication."""


def solution(A_local, B_local):
    return A_local @ B_local
