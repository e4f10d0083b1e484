"""C40: rewrites the problem, its oracle and its judge in its own process."""

from peerlane import problems
from peerlane.problems.contract import Tolerance, judge

problem = problems.get(1)
object.__setattr__(problem, "oracle", lambda case, inputs, rank: inputs[rank][0])
object.__setattr__(problem, "tolerance", lambda case: {"sum": Tolerance(relative=1e30, rms=1e30)})
judge.score = lambda *args: []


def solution(tensor):
    return tensor.clone()
