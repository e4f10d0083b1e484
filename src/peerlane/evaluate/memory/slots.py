"""Slots in an arena: the arguments of K calls laid out one behind the other, and a region for the outputs of each.

Both sides build their views from the same descriptions, which travel as JSON.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from peerlane.evaluate.memory.arena import GUARD_BYTES, POISON, DeviceMemory, aligned, extent, place, view
from peerlane.problems.contract.spec import Problem
from peerlane.problems.contract.tree import Description, Tree, describe, leaves, map_leaves, rebuild, tensor_descriptions

FRONT_BYTES = aligned(GUARD_BYTES)
"""Where the first tensor of a layout lies: behind a guard band of its own."""
_HELD_BYTES = 64 << 20
_SMALL_BYTES = 4 << 20
"""The most bytes of a tensor that is copied together with others. Launching a copy of its own would take longer than the copy."""


def strip_overlap(tree: Tree) -> Tree:
    """The tree with expanded tensors (stride 0) made contiguous, so that every tensor has storage of its own."""
    return map_leaves(tree, lambda t: t.contiguous() if 0 in t.stride() and t.numel() else t)


def place_all(description: Description, offset: int) -> tuple[Description, int]:
    """The description with an offset for every tensor, and the offset behind the last."""
    if description["kind"] == "tensor":
        return place(description, offset)
    if "items" in description:
        items = []
        for item in description["items"]:
            placed, offset = place_all(item, offset)
            items.append(placed)
        return {**description, "items": items}, offset
    return description, offset


def place_slots(descriptions: Iterable[Description]) -> tuple[list[Description], int]:
    """Placed descriptions of slots, one behind the other, and the offset behind the last."""
    layout, offset = [], FRONT_BYTES
    for description in descriptions:
        placed, offset = place_all(description, offset)
        layout.append(placed)
    return layout, offset


def place_in_one(layout: Iterable[Description]) -> tuple[list[Description], int]:
    """Placed descriptions of slots that all lie in the same place, and the offset behind the longest: for what nobody reads."""
    placed = [place_all(description, FRONT_BYTES) for description in layout]
    return [description for description, _ in placed], max((end for _, end in placed), default=FRONT_BYTES)


def unplaced(layout: Description) -> Description:
    """The description without offsets."""
    bare = {key: value for key, value in layout.items() if key != "offset"}
    return {**bare, "items": [unplaced(item) for item in bare["items"]]} if "items" in bare else bare


def slot_range(layout: Description) -> slice:
    """The bytes of an arena in which a placed slot lies: its tensors follow each other."""
    placed = list(tensor_descriptions(layout))
    return slice(placed[0]["offset"], extent(placed[-1])[1]) if placed else slice(0, 0)


class ArgumentSlots:
    """The arguments of K calls as views of an arena."""

    def __init__(self, data: torch.Tensor, layout: list[Description], group_of: Callable[[str], Any]) -> None:
        self._data, self.layout = data, layout
        self.tensors: list[list[torch.Tensor]] = []
        self.args: list[tuple[Any, ...]] = []
        for description in layout:
            tensors = [view(data, placed) for placed in tensor_descriptions(description)]
            self.tensors.append(tensors)
            self.args.append(rebuild(description, iter(tensors), group_of))
        self._ends: list[int] = list(itertools.accumulate((slot_range(description).stop for description in layout), max))

    def end(self, slots: int) -> int:
        """The byte behind the first ``slots`` slots."""
        return self._ends[slots - 1]

    def fill(self, trees: Iterable[Tree], first: int = 0) -> None:
        """Copies the trees' tensors into the slots from ``first`` on, one slot a tree. Overlapping ones (stride 0) are written out.

        Tensors are copied many at a time, for copying each takes the host longer than drawing it; little more than 64 MiB of them wait.
        """
        held: list[tuple[torch.Tensor, torch.Tensor]] = []
        held_bytes = 0
        for tree, slot in zip(trees, self.tensors[first:], strict=False):
            held += zip(slot, leaves(tree), strict=True)
            held_bytes += sum(target.nbytes for target in slot)
            if held_bytes > _HELD_BYTES:
                _copy_together(held)
                held, held_bytes = [], 0
        _copy_together(held)

    def poison(self, slot: int) -> None:
        """Overwrites the slot's tensors with NaN bits, in stream order, and no byte between them."""
        for region in self._regions(slot):
            _fill(region, POISON)

    def swapper(self, slot: int, other: int) -> Callable[[], None]:
        """Returns a function that exchanges the contents of two slots of one structure, in stream order and as quickly as it can."""
        pairs = list(zip(self._regions(slot), self._regions(other), strict=True))
        large = [pair for pair in pairs if pair[0].numel() > _SMALL_BYTES]
        small: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for one, another in pairs:
            if 0 < one.numel() <= _SMALL_BYTES:
                kind = torch.uint8 if one.numel() % 8 else torch.int64  # a kernel copies words faster than bytes
                for items, item in zip(small.setdefault(kind, ([], [])), (one, another), strict=True):
                    items.append(item.view(kind))

        def exchange() -> None:
            for one, another in large:
                kept = _clone(one)
                _copy(one, another)
                _copy(another, kept)
            for mine, theirs in small.values():
                sizes = [item.numel() for item in mine]
                held = _split(_new_empty(mine[0], (sum(sizes),)), sizes)
                _copy_many(held, mine)
                _copy_many(mine, theirs)
                _copy_many(theirs, held)

        return exchange

    def swappers(self, steps: Iterable[tuple[int, int, int]]) -> dict[int, Callable[[], None]]:
        """Returns functions that carry out the steps of :class:`SlotSwaps`, by position."""
        return {position: self.swapper(slot, other) for position, slot, other in steps}

    def _regions(self, slot: int) -> Iterator[torch.Tensor]:
        """The bytes of the slot's tensors, one region each."""
        for placed in tensor_descriptions(self.layout[slot]):
            begin, end = extent(placed)
            yield self._data[begin:end]


# Captured before any candidate code is loaded, so that replacing methods on torch.Tensor changes nothing here.
_copy, _clone = torch.Tensor.copy_, torch.Tensor.clone
_copy_many, _split = torch._foreach_copy_, torch.split_with_sizes
_new_empty = torch.Tensor.new_empty
_fill = torch.Tensor.fill_
_detach = torch.Tensor.detach
_data_ptr = torch.Tensor.data_ptr
_TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter)
_wrapped, _wait = AsyncCollectiveTensor.elem.__get__, torch.ops._c10d_functional.wait_tensor  # type: ignore[attr-defined]


def waited_for(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor inside an ``AsyncCollectiveTensor``, waited for in stream order; any other tensor as it is.

    Functional collectives return that class, and its owner's next operation would wait. Subclasses of it are left alone.
    """
    return _wait(_wrapped(tensor)) if type(tensor) is AsyncCollectiveTensor else tensor


def _describe_output(tree: Tree, device: torch.device, found: list[torch.Tensor]) -> Description:
    """Describes outputs as :func:`describe` does inputs: only plain tensors count, on the rank's device or (``host``) in host memory."""
    if isinstance(tree, torch.Tensor):
        tree = waited_for(tree)
    kind = type(tree)
    if kind in _TENSOR_TYPES:
        if tree.device != device and tree.device.type != "cpu":
            return {"kind": "other", "type": f"tensor on {tree.device}"}
        if tree.layout != torch.strided:
            return {"kind": "other", "type": f"{tree.layout} tensor"}
        found.append(_detach(tree))
        description = describe(found[-1])
        return description if tree.device == device else {**description, "host": True}
    if isinstance(tree, torch.Tensor):
        return {"kind": "other", "type": f"{kind.__name__} (a tensor subclass: return a plain tensor)"}
    if kind is list or kind is tuple:
        return {"kind": "list" if kind is list else "tuple", "items": [_describe_output(item, device, found) for item in tree]}
    if kind is dict:
        if odd := [type(key).__name__ for key in tree if type(key) is not str]:
            return {"kind": "other", "type": f"dict with a key of type {odd[0]}"}
        items = [_describe_output(item, device, found) for item in tree.values()]
        return {"kind": "dict", "keys": list(tree), "items": items}
    if kind in (bool, int, float, str, type(None)):
        return {"kind": "value", "value": tree}
    if kind is torch.Size:
        return describe(tree)
    return {"kind": "other", "type": kind.__name__}


def _copy_together(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copies to the first tensor of each pair from the second, with a kernel for each dtype, not one for each tensor."""
    by_dtype: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for pair in pairs:
        for items, item in zip(by_dtype.setdefault(pair[0].dtype, ([], [])), pair, strict=True):
            items.append(item)
    for targets, sources in by_dtype.values():
        _copy_many(targets, sources)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class OutputRegions:
    """The regions where the outputs of every slot are snapshot, in stream order, right after the call.

    ``updates``: the arguments that a call updates in place, which are part of its answer: names and positions.
    """

    def __init__(
        self, data: torch.Tensor, layout: list[Description], device: torch.device, updates: Mapping[str, int] | None = None
    ) -> None:
        self._data, self._device, self.updates = data, device, updates or {}
        self.layout = layout
        self.views = [[view(data, placed) for placed in tensor_descriptions(item)] for item in layout]
        self.descriptions: list[Description] = [{} for _ in layout]
        self.pointers: list[tuple[int, ...]] = [() for _ in layout]

    def fresh(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments for one call: what it updates gets lists of its own, for it may put other tensors in the place of those it got."""
        if not self.updates:
            return args
        return tuple(map_leaves(item, _same) if place in self.updates.values() else item for place, item in enumerate(args))

    def shapes(self, slot: int) -> list[tuple[torch.Size, torch.dtype]]:
        """Returns the shapes and dtypes of a slot's outputs."""
        return [(region.shape, region.dtype) for region in self.views[slot]]

    def take(self, slot: int, output: Tree, args: tuple[Any, ...]) -> list[torch.Tensor]:
        """Describes what a call with ``args`` returned, and copies every tensor that has the expected shape and dtype into its region.

        Returns the tensors that it found, for :meth:`copy` to look at once more.
        """
        found: list[torch.Tensor] = []
        self.descriptions[slot] = _describe_output(_in_order(output, self.layout[slot]), self._device, found)
        self.pointers[slot] = tuple(_data_ptr(tensor) for tensor in found)
        if self.updates:
            state = _describe_output({name: args[place] for name, place in self.updates.items()}, self._device, found)
            self.descriptions[slot] = {"kind": "tuple", "items": [self.descriptions[slot], state]}
        self.copy(slot, found)
        return found

    def copy(self, slot: int, found: list[torch.Tensor]) -> None:
        """Copies what a call returned into the slot's regions, in stream order."""
        regions = self.views[slot]
        if len(found) != len(regions):
            return
        same = [
            (region, tensor)
            for region, tensor in zip(regions, found, strict=True)
            if region.shape == tensor.shape and region.dtype == tensor.dtype and region.numel()
        ]
        together = [(region, tensor) for region, tensor in same if region.nbytes <= _SMALL_BYTES and region.device == tensor.device]
        for region, tensor in same:
            if region.nbytes > _SMALL_BYTES or region.device != tensor.device:
                _copy(region, tensor)
        _copy_together(together)

    def aliased(self, slots: Sequence[int]) -> bool:
        """Tells whether a call on one of these slots returned a tensor that lies where one of the call before it lay."""
        taken = [{pointer for pointer in self.pointers[slot] if pointer} for slot in slots]  # empty tensors lie nowhere
        return any(a & b for a, b in itertools.pairwise(taken))


def _in_order(output: Tree, layout: Description) -> Tree:
    """A dict with the expected keys, in the order of their regions: a candidate may build it in another."""
    keys = layout.get("keys", ())
    if type(output) is not dict or len(output) != len(keys) or not all(key in output for key in keys):
        return output
    return {key: output[key] for key in keys}


class Unowned:
    """Device memory that a captured call returned. Holding the tensor itself would keep the captures of a block from sharing memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._kept = None if tensor.is_cuda and tensor.numel() else tensor  # what lies in host memory is small
        self._pointer, self._bytes = _data_ptr(tensor), extent({**describe(tensor), "offset": 0})[1]
        self._shape, self._stride, self._dtype, self._device = tensor.shape, tensor.stride(), tensor.dtype, tensor.device

    def tensor(self) -> torch.Tensor:
        """The tensor, good until the next replay."""
        if self._kept is not None:
            return self._kept
        flat = torch.as_tensor(DeviceMemory(self._pointer, self._bytes), device=self._device)
        return flat.view(self._dtype).as_strided(self._shape, self._stride)


def updates_of(problem: Problem) -> dict[str, int]:
    """The parameters that a call updates in place, and their positions."""
    return {name: problem.parameters.index(name) for name in problem.updates}


def describe_answer(output: Tree) -> Description:
    """Describes what a region keeps of an output, as :func:`describe` does: row-major whatever its strides are."""
    return _row_major(describe(output))


def _row_major(description: Description) -> Description:
    if description["kind"] == "tensor":
        stride, steps = 1, []
        for size in reversed(description["shape"]):
            steps.append(stride)
            stride *= max(size, 1)
        return {**description, "stride": list(reversed(steps))}
    if "items" in description:
        return {**description, "items": [_row_major(item) for item in description["items"]]}
    return description
