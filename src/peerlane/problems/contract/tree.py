"""Arguments and outputs as trees: flatten to tensors, describe as JSON, rebuild.

A tree is a tensor, a plain value (None, bool, int, float, str, torch.Size), a :class:`GroupRef`, or a list, tuple or dict of trees. Among
arguments there may also be torch.nn.Linear modules (their leaves: weight and bias) and coalesced sparse COO tensors (indices and values).
Descriptions cross process borders as JSON, so nothing is ever unpickled.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Tree = Any
Description = dict[str, Any]

_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
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
    dtype = _DTYPES.get(name)
    if dtype is None:
        raise ValueError(f"unknown dtype {name!r}: expected the name of a torch dtype such as 'bfloat16'")
    return dtype


def _is_sparse(tree: Tree) -> bool:
    return isinstance(tree, torch.Tensor) and tree.layout == torch.sparse_coo


def _sparse(indices: torch.Tensor, values: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A sparse COO tensor over this very storage; the indices are taken to be sorted and unique."""
    return torch.sparse_coo_tensor(indices, values, tuple(shape), is_coalesced=True, check_invariants=False)


def linear_over(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.nn.Linear:
    """A Linear over this very storage, made without its constructor, which draws parameters first."""
    module = torch.nn.Linear.__new__(torch.nn.Linear)
    torch.nn.Module.__init__(module)
    module.out_features, module.in_features = weight.shape
    module.weight = torch.nn.Parameter(weight.detach())
    module.register_parameter("bias", None if bias is None else torch.nn.Parameter(bias.detach()))
    return module


def leaves(tree: Tree) -> Iterator[torch.Tensor]:
    """The tensors of a tree, depth first, dict entries in insertion order."""
    if _is_sparse(tree):
        yield tree._indices()
        yield tree._values()
    elif isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, torch.nn.Linear):
        yield tree.weight.detach()
        if tree.bias is not None:
            yield tree.bias.detach()
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from leaves(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from leaves(item)


def map_leaves(tree: Tree, function: Callable[[torch.Tensor], Any]) -> Tree:
    """The same tree with every tensor replaced by ``function(tensor)``."""
    if _is_sparse(tree):
        return _sparse(function(tree._indices()), function(tree._values()), tree.shape)
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, torch.nn.Linear):
        return linear_over(function(tree.weight.detach()), None if tree.bias is None else function(tree.bias.detach()))
    if isinstance(tree, torch.Size):
        return tree
    if isinstance(tree, list):
        return [map_leaves(item, function) for item in tree]
    if isinstance(tree, tuple):
        return tuple(map_leaves(item, function) for item in tree)
    if isinstance(tree, dict):
        return {key: map_leaves(item, function) for key, item in tree.items()}
    return tree


def describe(tree: Tree) -> Description:
    """A JSON-able description of the tree: structure, and shape, strides and dtype of every tensor (not its contents)."""
    if _is_sparse(tree):
        return {"kind": "sparse", "shape": list(tree.shape), "items": [describe(item) for item in leaves(tree)]}
    if isinstance(tree, torch.nn.Linear):
        return {"kind": "linear", "items": [describe(item) for item in leaves(tree)]}
    if isinstance(tree, torch.Size):
        return {"kind": "size", "value": list(tree)}
    if isinstance(tree, torch.Tensor):
        return {"kind": "tensor", "shape": list(tree.shape), "stride": list(tree.stride()), "dtype": dtype_name(tree.dtype)}
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


def rebuild(description: Description, tensors: Iterator[torch.Tensor], group_of: Callable[[str], Any]) -> Tree:
    """The tree of a description, its tensors taken from ``tensors`` in order and its groups from ``group_of(name)``."""
    kind = description["kind"]
    if kind == "tensor":
        return next(tensors)
    if kind == "group":
        return group_of(description["name"])
    if kind == "value":
        return description["value"]
    if kind == "size":
        return torch.Size(description["value"])
    if kind == "sparse":
        return _sparse(next(tensors), next(tensors), description["shape"])
    if kind == "linear":
        return linear_over(next(tensors), next(tensors) if len(description["items"]) == 2 else None)
    if kind == "list":
        return [rebuild(item, tensors, group_of) for item in description["items"]]
    if kind == "tuple":
        return tuple(rebuild(item, tensors, group_of) for item in description["items"])
    if kind == "dict":
        values = [rebuild(item, tensors, group_of) for item in description["items"]]
        return dict(zip(description["keys"], values, strict=True))
    raise ValueError(f"cannot rebuild a {kind!r}: expected tensor, sparse, linear, group, value, size, list, tuple or dict")


def resolve_groups(tree: Tree, group_of: Callable[[str], Any]) -> Tree:
    """The same tree with every :class:`GroupRef` replaced by ``group_of(name)``."""
    if isinstance(tree, GroupRef):
        return group_of(tree.name)
    if isinstance(tree, torch.Size):
        return tree
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
