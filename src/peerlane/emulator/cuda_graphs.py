"""CUDA graphs of torch on emulated ranks: launches and operations are recorded, not run, and every replay runs them.

As in a capture on a GPU, what the captured code computes is there after a replay. Arguments of launches are those at the capture.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from peerlane.errors import UsageError

_state = threading.local()
_READS = frozenset(
    (
        "item",
        "_local_scalar_dense",
        "tolist",
        "numpy",
        "cpu",
        "nonzero",
        "equal",
        "allclose",
        "__bool__",
        "__float__",
        "__int__",
        "__index__",
    )
)
_UNDEFINED = ("empty", "new_empty")
_METADATA = ("requires_grad_", "__set__", "__delete__")


def recorded(act: Callable[[], Any]) -> bool:
    """Tells whether the thread captures a graph, and adds ``act`` to it."""
    acts = getattr(_state, "acts", None)
    if acts is not None:
        acts.append(act)
    return acts is not None


def capturing() -> bool:
    """Tells whether the thread captures a graph."""
    return getattr(_state, "acts", None) is not None


def record_operation(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns an operation's result, or the tensor that it would change, and adds the operation to the graph that the thread captures.

    Raises UsageError if the host would read what is not computed yet."""
    name = getattr(function, "__name__", "").partition(".")[0]  # of an operator without its overload
    if name in _READS:
        raise UsageError(f"{name} reads a tensor while a CUDA graph is captured; read it after the replay")
    target = kwargs.get("out")
    if target is None and _changes_its_first(name):
        target = args[0]
    if target is not None:
        recorded(lambda: function(*args, **kwargs))
        return target
    result = function(*args, **kwargs)
    taken = {tensor.untyped_storage().data_ptr() for tensor in _tensors((*args, *kwargs.values()))}
    made = [tensor for tensor in _tensors([result]) if tensor.untyped_storage().data_ptr() not in taken]
    if made and not name.startswith(_UNDEFINED):

        def again() -> None:
            for to, new in zip(_tensors([result]), _tensors([function(*args, **kwargs)]), strict=True):
                if to.untyped_storage().data_ptr() not in taken:
                    to.copy_(new)

        recorded(again)
    return result


class OperatorsRecorded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While this lasts, operators of torch that C++ code calls are added to the graph that the thread captures, when it does."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not capturing():
            return function(*args, **kwargs)
        named = dict(zip((argument.name for argument in function._schema.arguments), args, strict=False)) | kwargs
        written = [named[argument.name] for argument in function._schema.arguments if argument.is_write and argument.name in named]
        if not written or torch.Tag.inplace_view in function.tags:
            return record_operation(function, args, kwargs)
        if not all(tensor.numel() for tensor in _tensors(written)):
            function(*args, **kwargs)  # it may resize what it writes
        recorded(lambda: function(*args, **kwargs))
        made = function._schema.returns
        return None if not made else written[0] if len(made) == 1 else tuple(written[: len(made)])


def _changes_its_first(name: str) -> bool:
    return name not in _METADATA and (name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and not name.endswith("__")))


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


class CUDAGraph:
    """Stands for ``torch.cuda.CUDAGraph``."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._acts: list[Callable[[], Any]] = []

    def capture_begin(self, *_: Any, **__: Any) -> None:
        if capturing():
            raise UsageError("a CUDA graph is captured already; end its capture first")
        self._acts = _state.acts = []

    def capture_end(self) -> None:
        _state.acts = None

    def replay(self) -> None:
        if not recorded(self._run):
            self._run()

    def _run(self) -> None:
        for act in self._acts:
            act()

    def reset(self) -> None:
        self._acts = []

    def pool(self) -> tuple[int, int]:
        return 0, 0


class graph:
    """Stands for ``torch.cuda.graph``."""

    def __init__(self, cuda_graph: CUDAGraph, *_: Any, **__: Any) -> None:
        self._graph = cuda_graph

    def __enter__(self) -> None:
        self._graph.capture_begin()

    def __exit__(self, *_: Any) -> None:
        self._graph.capture_end()
