"""C40: rewrites the problem, its oracle and its judge in its own process."""

from peerlane import problems
from peerlane.problems import _judge
from peerlane.problems._spec import Tolerance

problem = problems.get(1)
object.__setattr__(problem, "oracle", lambda case, inputs, rank: inputs[rank][0])
object.__setattr__(problem, "tolerance", lambda case: {"sum": Tolerance(relative=1e30, rms=1e30)})
_judge.score = lambda *args: []


def solution(tensor):
    return tensor.clone()
