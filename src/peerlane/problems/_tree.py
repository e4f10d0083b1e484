"""Arguments and outputs as trees: flatten to tensors, describe as JSON, rebuild.

A tree is a tensor, a plain value (None, bool, int, float, str), a :class:`GroupRef`, or a list, tuple or dict of trees.
Descriptions cross process borders as JSON, so nothing is ever unpickled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

Tree = Any
Description = dict[str, Any]

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class GroupRef:
    """Stands for a process group in a problem's inputs; the harness passes the real group.

    ``name`` is a key of :meth:`Problem.process_groups`; every rank gets the group of that layout it belongs to.
    """

    name: str


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """``"bfloat16"`` -> ``torch.bfloat16``; raises ValueError for anything that is not a dtype."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {name!r}: expected the name of a torch dtype such as 'bfloat16'")
    return dtype


def leaves(tree: Tree) -> Iterator[torch.Tensor]:
    """The tensors of a tree, depth first, dict entries in insertion order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from leaves(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from leaves(item)


def map_leaves(tree: Tree, function: Callable[[torch.Tensor], Any]) -> Tree:
    """The same tree with every tensor replaced by ``function(tensor)``."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, list):
        return [map_leaves(item, function) for item in tree]
    if isinstance(tree, tuple):
        return tuple(map_leaves(item, function) for item in tree)
    if isinstance(tree, dict):
        return {key: map_leaves(item, function) for key, item in tree.items()}
    return tree


def describe(tree: Tree) -> Description:
    """A JSON-able description of the tree: structure, and shape, strides and dtype of every tensor (not its contents)."""
    if isinstance(tree, torch.Tensor):
        return {
            "kind": "tensor",
            "shape": list(tree.shape),
            "stride": list(tree.stride()),
            "dtype": dtype_name(tree.dtype),
        }
    if isinstance(tree, GroupRef):
        return {"kind": "group", "name": tree.name}
    if isinstance(tree, _PLAIN):
        return {"kind": "value", "value": tree}
    if isinstance(tree, (list, tuple)):
        kind = "list" if isinstance(tree, list) else "tuple"
        return {"kind": kind, "items": [describe(item) for item in tree]}
    if isinstance(tree, dict):
        return {"kind": "dict", "keys": list(tree.keys()), "items": [describe(item) for item in tree.values()]}
    return {"kind": "other", "type": type(tree).__name__}


def rebuild(
    description: Description,
    tensors: Iterator[torch.Tensor],
    group_of: Callable[[str], Any],
) -> Tree:
    """The tree of a description, its tensors taken from ``tensors`` in order and its groups from ``group_of(name)``."""
    kind = description["kind"]
    if kind == "tensor":
        return next(tensors)
    if kind == "group":
        return group_of(description["name"])
    if kind == "value":
        return description["value"]
    if kind == "list":
        return [rebuild(item, tensors, group_of) for item in description["items"]]
    if kind == "tuple":
        return tuple(rebuild(item, tensors, group_of) for item in description["items"])
    if kind == "dict":
        values = [rebuild(item, tensors, group_of) for item in description["items"]]
        return dict(zip(description["keys"], values, strict=True))
    raise ValueError(f"cannot rebuild a {kind!r}: expected tensor, group, value, list, tuple or dict")


def resolve_groups(tree: Tree, group_of: Callable[[str], Any]) -> Tree:
    """The same tree with every :class:`GroupRef` replaced by ``group_of(name)``."""
    if isinstance(tree, GroupRef):
        return group_of(tree.name)
    if isinstance(tree, list):
        return [resolve_groups(item, group_of) for item in tree]
    if isinstance(tree, tuple):
        return tuple(resolve_groups(item, group_of) for item in tree)
    if isinstance(tree, dict):
        return {key: resolve_groups(item, group_of) for key, item in tree.items()}
    return tree


def tensor_descriptions(description: Description) -> Iterator[Description]:
    """The tensor entries of a description, in the order of :func:`leaves`."""
    if description["kind"] == "tensor":
        yield description
    for item in description.get("items", ()):
        yield from tensor_descriptions(item)
