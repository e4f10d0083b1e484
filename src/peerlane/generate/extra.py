"""The optional part: inspect_ai and the providers' SDKs."""

import importlib.util
import os

from peerlane.errors import MissingDependency

INSTALL = "pip install 'peerlane[models]'"


def require_models_extra() -> None:
    """Raises MissingDependency, which names the command, unless inspect_ai is installed."""
    if importlib.util.find_spec("inspect_ai") is None:
        raise MissingDependency(f"asking models needs the package inspect_ai, which is not installed: {INSTALL}")
    os.environ.setdefault("INSPECT_DISABLE_MODEL_API_WARNINGS", "1")
