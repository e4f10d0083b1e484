"""The former place of ``peerlane.emulator``: both names stand for the same modules."""

import sys

import peerlane.emulator
from peerlane.emulator import *  # noqa: F403
from peerlane.emulator import ranks, solution_run

sys.modules[__name__] = peerlane.emulator
for _module in (ranks, solution_run):
    sys.modules[f"{__name__}.{_module.__name__.rpartition('.')[2]}"] = _module
