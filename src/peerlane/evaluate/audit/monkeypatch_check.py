"""Finds functions of the evaluator that are not what they were before a candidate was loaded into its rank.

A candidate shares the process and can hide what it did. What must hold against that is decided elsewhere, by the outer clock and by other
processes; this is for what one line of Python does.
"""

import inspect
import sys
from types import FunctionType, ModuleType
from typing import Any

_PACKAGE = "peerlane.evaluate."
_originals: dict[str, tuple[Any, str, Any, Any]] = {}


def remember_originals() -> None:
    """Takes what the evaluator's modules hold now for its own."""
    _originals.clear()
    _originals.update(functions_of(*[module for name, module in sys.modules.items() if name.startswith(_PACKAGE)]))


def functions_of(*modules: ModuleType) -> dict[str, tuple[Any, str, Any, Any]]:
    """Returns the functions and members of classes in these modules by name: who holds each and by what name, itself, and its code."""
    found: dict[str, tuple[Any, str, Any, Any]] = {}

    def note(place: str, owner: Any, name: str, value: Any) -> None:
        if callable(value) or isinstance(value, (property, staticmethod, classmethod)):
            found[f"{place}.{name}"] = owner, name, value, _code(value)

    for module in modules:
        for name, value in list(vars(module).items()):
            if inspect.isclass(value) and value.__module__ == module.__name__:
                for member, own in list(vars(value).items()):
                    note(f"{module.__name__}.{name}", value, member, own)
            note(module.__name__, module, name, value)
    return found


def remembered() -> int:
    """Returns how many functions :func:`replaced` compares. The supervisor judges whether they are enough: a candidate may forget some."""
    return len(_originals)


def _code(value: Any) -> Any:
    return value.__code__ if isinstance(value, FunctionType) else None


def replaced() -> list[str]:
    """The names that hold something else now."""
    now = {label: vars(owner).get(name) for label, (owner, name, _, _) in _originals.items()}
    return [label for label, (_, _, value, code) in _originals.items() if now[label] is not value or _code(now[label]) is not code]
