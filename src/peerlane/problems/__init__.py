"""The problem suite: see :class:`Problem` for the contract, ``all_problems()`` for the suite."""

import numpy  # noqa: F401  (before torch, which takes an interrupt in there for a missing numpy)

from peerlane.problems import contract
from peerlane.problems.contract import *  # noqa: F403
from peerlane.problems.contract.registry import all_problems, get, named, numbers, select, suite

__all__ = ["all_problems", "get", "named", "numbers", "select", "suite"]
__all__ += contract.__all__
