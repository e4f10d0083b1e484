"""Lets a long problem keep its wrong answers and its alternatives in a module beside it, which is imported when they are needed."""

import functools
import importlib
from collections.abc import Sequence
from typing import Any, overload


class FromProof(Sequence[Any]):
    """The tuple of one name in a module's proof, the module ``pNNN_slug_proof`` beside it; imports the proof at its first use."""

    def __init__(self, module: str, name: str) -> None:
        self._module, self._name = f"{module}_proof", name

    @functools.cached_property
    def _items(self) -> tuple[Any, ...]:
        items: tuple[Any, ...] = getattr(importlib.import_module(self._module), self._name)
        return items

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self._items[index]
