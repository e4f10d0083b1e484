"""Accesses of torch's operators to symmetric memory on emulated ranks. They take part in races as those of kernels do.

An operator is a kernel on its rank's stream. Views and shapes read nothing. Where an operator picks elements, those that it picks count.
"""

import contextlib
import re
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from peerlane.device.host.group import current_group
from peerlane.emulator.cuda_graphs import capturing
from peerlane.emulator.emulated_rank import EmulatedRank
from peerlane.emulator.host_memory import Runs

_OWN_CODE = ("peerlane.", "torch.")
_SHAPES_ALONE = re.compile(
    r"(empty|zeros|ones|full|rand|randn|randint)_like|new_\w+|_unsafe_view|is_same_size|result_type|_assert_tensor_metadata|record_stream"
)
"""operators of tensors whose contents do not count, though their schemas do not say so"""
_PICKS = frozenset(("index", "index_select", "gather", "take", "embedding", "masked_select"))
_PUTS = re.compile(r"_?(index_put|index_put_impl|scatter|scatter_(add|reduce)|index_(copy|add|fill|reduce)|put|masked_(fill|scatter))_")
_MOST_RUNS = 2048
"""Pieces of one access. Of more the first count."""
_state = threading.local()


@contextlib.contextmanager
def unnoted() -> Iterator[None]:
    """While this lasts, operators of this thread are the emulator's own."""
    _state.off, before = True, getattr(_state, "off", False)
    try:
        yield
    finally:
        _state.off = before


def note_read(tensor: torch.Tensor, name: str) -> None:
    """Notes that the rank whose host code runs reads a tensor, by something that is no operator."""
    group = current_group()
    if isinstance(group, EmulatedRank) and (place := _place(group, tensor)) is not None:
        group.team.world.note(group.member, place[0], _runs(tensor, place[1]), False, f"{_line()} {name}")


class OperatorsNoted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While this lasts, accesses of operators of torch to symmetric memory are noted for the rank whose host code runs."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        group = current_group()
        if not isinstance(group, EmulatedRank) or capturing() or getattr(_state, "off", False):
            return function(*args, **kwargs)
        if not isinstance(function, torch._ops.OpOverload):
            return function(*args, **kwargs)
        if function.namespace != "aten":  # its code's own operators and launches count
            with self:
                return function.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)
        found = list(_accesses(group, function, args, kwargs))
        result = function(*args, **kwargs)
        if found:
            said = f"{_line()} {function.overloadpacket.__name__}"
            for part, runs, writes in found:
                group.team.world.note(group.member, part, runs, writes, said)
        return result


def _accesses(group: EmulatedRank, function: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Runs, bool]]:
    """Yields parts of symmetric memory, the bytes of them that an operator is going to use, and whether it writes them."""
    name = function.overloadpacket.__name__
    if torch.Tag.inplace_view in function.tags or _SHAPES_ALONE.fullmatch(name):
        return
    for number, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and not argument.is_write:
            continue
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        for tensor in _tensors(value):
            place = _place(group, tensor)
            if place is None:
                continue
            part, begin = place
            elements = None
            with torch._C.DisableTorchFunction(), torch.no_grad():
                if number == 0 and name in _PICKS:
                    numbers = _numbers(tensor)
                    elements = function(numbers, *args[1:], **kwargs)
                elif number == 0 and _PUTS.fullmatch(name):
                    elements = _numbers(tensor)[_marked(name, tensor.shape, args)]
            runs = _runs(tensor, begin) if elements is None else _runs_of(elements, begin, tensor.itemsize)
            if len(runs):
                yield part, runs, argument.is_write


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return (value,)
    return [item for item in value if isinstance(item, torch.Tensor)] if isinstance(value, list | tuple) else ()


def _place(group: EmulatedRank, tensor: torch.Tensor) -> tuple[Any, int] | None:
    """Returns the part of memory that other ranks can use in which a tensor lies, and where in it; None where it lies elsewhere."""
    with torch._C.DisableTorchFunction():
        if tensor.layout is not torch.strided or tensor.device.type != "cpu":
            return None
        place = group.team.world.space.place_of(tensor)
    return place if place is not None and place[0].symmetric and place[0].shown and place[0].is_shared else None


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor like this one, each of whose elements is its place, counted in elements."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return torch.arange(last + 1 if tensor.numel() else 0).as_strided(tensor.shape, tensor.stride())


def _marked(name: str, shape: torch.Size, args: Any) -> torch.Tensor:
    """Returns where an operator puts elements into its first argument."""
    marked = torch.zeros(shape, dtype=torch.bool)
    if name.startswith("masked_"):
        return torch.logical_or(marked, args[1])
    if "index_put" in name:
        return marked.index_put_(args[1], torch.tensor(True))
    if name == "put_":
        return marked.put_(args[1], torch.ones_like(args[1], dtype=torch.bool))
    put = marked.scatter_ if name.startswith("scatter") else marked.index_fill_
    return put(args[1], args[2], True)


def _runs(tensor: torch.Tensor, begin: int) -> Runs:
    """Returns the bytes of a tensor that begins here, as rows of where a piece begins and how long it is."""
    with torch._C.DisableTorchFunction():
        size, strides = tensor.itemsize, zip(tensor.stride(), tensor.shape, strict=True)
        if not tensor.numel():
            return np.empty((0, 2), dtype=np.int64)
        dims = sorted((stride, count) for stride, count in strides if stride and count > 1)
    width = 1
    while dims and dims[0][0] == width:
        width *= dims.pop(0)[1]
    places = np.zeros(1, dtype=np.int64)
    for stride, count in reversed(dims):
        places = (places[:, None] + stride * np.arange(count)).ravel()[:_MOST_RUNS]
    return np.stack([begin + size * places, np.full_like(places, size * width)], axis=1)


def _runs_of(elements: torch.Tensor, begin: int, size: int) -> Runs:
    """Returns the bytes of elements of these numbers, in a tensor that begins here."""
    places = np.unique(elements.numpy())
    firsts = np.flatnonzero(np.diff(places, prepend=-2) != 1)
    counts = np.diff(firsts, append=len(places))
    return np.stack([begin + size * places[firsts], size * counts], axis=1)[:_MOST_RUNS]


def _line() -> str:
    """Returns the line of the candidate that called torch, or the kit."""
    frame: Any = sys._getframe(2)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith(_OWN_CODE):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
