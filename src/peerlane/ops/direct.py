"""Operators without PyTorch's dispatcher where nobody watches: it enters Python again for autograd, for views and for the device."""

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch

_PLAIN = (torch.Tensor, torch.nn.Parameter)
Result = TypeVar("Result")


class Direct(Generic[Result]):
    """An operator of ``torch.library.custom_op`` that calls its function at once, in a third of the time, unless something needs to see it.

    That is a gradient, a compiler, a tracer, a profiler, a transform such as ``vmap``, a mode or a tensor of another class."""

    def __init__(self, operator: Any) -> None:
        self.operator, self._function = operator, operator._init_fn
        self.register_fake: Callable[[Callable[..., Any]], Callable[..., Any]] = operator.register_fake
        self.register_autograd: Callable[..., None] = operator.register_autograd

    def __call__(self, *args: Any) -> Result:
        seen = torch.compiler.is_compiling() or _watched() or _seen(args, torch.is_grad_enabled())
        result: Result = self.operator(*args) if seen else self._function(*args)
        return result


def _watched() -> bool:
    """Tells whether a mode, a profiler, a transform or a tracer is on."""
    modes = torch._C._len_torch_dispatch_stack() or torch._C._autograd._profiler_enabled()
    return bool(modes) or torch._C._functorch.peek_interpreter_stack() is not None or torch._C._get_tracing_state() is not None


def _seen(args: Sequence[Any], with_gradients: bool) -> bool:
    """Tells whether a tensor among ``args`` is of another class, or wants a gradient."""
    for value in args:
        if isinstance(value, torch.Tensor):
            if type(value) not in _PLAIN or (with_gradients and value.requires_grad):
                return True
        elif isinstance(value, list | tuple) and _seen(value, with_gradients):
            return True
    return False


def operator(name: str, schema: str | None = None) -> Callable[[Callable[..., Result]], Direct[Result]]:
    """Returns a decorator that makes a function the operator ``peerlane::NAME``, which changes none of its arguments. Without a ``schema``
    the function's annotations give it."""
    return lambda function: Direct(torch.library.custom_op(f"peerlane::{name}", function, mutates_args=(), schema=schema))
