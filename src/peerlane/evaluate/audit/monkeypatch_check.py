"""Finds functions of the evaluator that are not what they were before a candidate was loaded into its rank.

A candidate shares the process and can hide what it did. What must hold against that is decided elsewhere, by the outer clock and by other
processes; this is for what one line of Python does.
"""

from __future__ import annotations

import inspect
import sys
from types import FunctionType
from typing import Any

_PACKAGE = "peerlane.evaluate."
_originals: dict[str, tuple[Any, str, Any, Any]] = {}


def remember_originals() -> None:
    """Takes what the evaluator's modules hold now for its own."""
    _originals.clear()
    for module in [module for name, module in sys.modules.items() if name.startswith(_PACKAGE)]:
        for name, value in list(vars(module).items()):
            if inspect.isclass(value) and value.__module__ == module.__name__:
                for member, own in list(vars(value).items()):
                    _note(f"{module.__name__}.{name}", value, member, own)
            _note(module.__name__, module, name, value)


def _note(place: str, owner: Any, name: str, value: Any) -> None:
    if callable(value) or isinstance(value, (property, staticmethod, classmethod)):
        _originals[f"{place}.{name}"] = owner, name, value, _code(value)


def _code(value: Any) -> Any:
    return value.__code__ if isinstance(value, FunctionType) else None


def replaced() -> list[str]:
    """The names that hold something else now."""
    now = {label: vars(owner).get(name) for label, (owner, name, _, _) in _originals.items()}
    return [label for label, (_, _, value, code) in _originals.items() if now[label] is not value or _code(now[label]) is not code]
