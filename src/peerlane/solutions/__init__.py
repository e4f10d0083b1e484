"""Expert solutions: one file per problem, numbered and named like the problems, each with a ``solution`` of the problem's signature.

    from peerlane.solutions import load
    all_reduce = load(1)

They need CUDA and 2 to 8 ranks of one node, and say so where they find none: nothing falls back on another library. Those of problems
between nodes, in ``internode``, run on CPU ranks too, by torch.distributed. As candidates they are named by the word ``solutions``:
``peerlane eval solutions --problem 1-8``.
"""

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peerlane.errors import UnknownProblem

__all__ = ["files", "load"]


def files() -> dict[int, Path]:
    """Returns the file of every problem that has a solution, by the problem's number."""
    folder = Path(__file__).parent
    paths = sorted([*folder.glob("p[0-9][0-9][0-9]_*.py"), *folder.glob("internode/p[0-9][0-9][0-9]_*.py")], key=lambda path: path.name)
    return {int(match[1]): path for path in paths if (match := re.match(r"p(\d+)_", path.name))}


def load(problem: int) -> Callable[..., Any]:
    """Returns the ``solution`` of a problem; raises UnknownProblem where there is none."""
    path = files().get(problem)
    if path is None:
        raise UnknownProblem(f"problem {problem} has no solution here; those with one: {', '.join(map(str, files()))}")
    module = ".".join((__name__, *path.relative_to(Path(__file__).parent).with_suffix("").parts))
    solution: Callable[..., Any] = importlib.import_module(module).solution
    return solution
