"""C34: calls the reference. Right, and not the candidate's own work: a track that asks for that forbids it."""

from peerlane import problems

reference = problems.get(1).reference


def solution(tensor):
    return reference(tensor)
