"""The version of peerlane, and where its files lie. Imports nothing of peerlane."""

import os
from pathlib import Path

__version__ = "0.2.0"

PACKAGE = Path(__file__).resolve().parents[1]
EXAMPLES = next((home / "examples" for home in (PACKAGE, PACKAGE.parents[1]) if (home / "examples").is_dir()), PACKAGE / "examples")
"""in the package, as wheels have it, or else in the checkout"""


def own_example(path: str | Path) -> Path:
    """Returns the path; where nothing is there, peerlane's own example of this name, such as ``examples/cuda/1_allreduce_cuda.py``."""
    own = EXAMPLES.parent / path
    return own if Path(path).parts[:1] == ("examples",) and not os.path.lexists(path) and own.exists() else Path(path)
