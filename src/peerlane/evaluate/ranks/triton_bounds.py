"""Bounds of Triton kernels in Triton's interpreter: an access outside a launch's tensors raises, instead of ending the process.

The interpreter reads and writes wherever a pointer points. So a store behind the end of a tensor damages the heap, and the process dies of
it later, by a signal that says nothing.
"""

import functools
import sys
from typing import Any

import numpy as np
import torch

Range = tuple[int, int, str]
"""first address, the end, and the argument that lies there"""
_PLAIN = (torch.Tensor, int, float, str, torch.dtype, type(None))


class _Checked:
    """The interpreter's accesses, each within the tensors of the present launch."""

    def __init__(self, accesses: Any, builder: Any) -> None:
        self._accesses, self._builder = accesses, builder
        self.ranges: list[Range] = []
        """The ranges of the present launch; empty if nothing is known."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accesses, name)

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self._check("loads", pointers, mask, np.dtype(dtype).itemsize)
        return self._accesses.load(pointers, mask, other, dtype)

    def store(self, pointers: Any, value: Any, mask: Any) -> Any:
        self._check("stores", pointers, mask, value.itemsize)
        return self._accesses.store(pointers, value, mask)

    def atomic_rmw(self, operation: Any, pointers: Any, value: Any, mask: Any, order: Any) -> Any:
        self._check("updates", pointers, mask, value.itemsize)
        return self._accesses.atomic_rmw(operation, pointers, value, mask, order)

    def atomic_cas(self, pointers: Any, compare: Any, value: Any, order: Any) -> Any:
        self._check("updates", pointers, True, value.itemsize)
        return self._accesses.atomic_cas(pointers, compare, value, order)

    def _check(self, act: str, pointers: Any, mask: Any, nbytes: int) -> None:
        if not self.ranges:
            return
        pointers = np.asarray(pointers).astype(np.uint64)
        wrong = np.broadcast_to(np.asarray(mask, dtype=bool), pointers.shape).copy()
        for begin, end, _ in self.ranges:
            wrong &= ~((pointers >= begin) & (pointers + np.uint64(nbytes) <= end))
        if not wrong.any():
            return
        address = int(pointers[wrong].flat[0])
        far, name = min((max(begin - address, address + nbytes - end), name) for begin, end, name in self.ranges)
        raise IndexError(
            f"program {tuple(self._builder.grid_idx)} {act} {nbytes} bytes out of bounds, {far} bytes outside the memory of its nearest "
            f"argument {name!r} ({int(wrong.sum())} of {pointers.size} elements); mask the access, or check the grid and the strides"
        )


def check_bounds() -> None:
    """Has the interpreter check its accesses from now on, if it is loaded. Launches with tables of addresses are not checked."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or isinstance(interpreter._interpreter, _Checked):
        return
    checked = interpreter._interpreter = _Checked(interpreter._interpreter, interpreter.interpreter_builder)
    to_host = interpreter.GridExecutor._init_args_hst

    @functools.wraps(to_host)
    def noted(executor: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = to_host(executor, args, kwargs)
        named = [*zip(executor.arg_names, args, strict=False), *kwargs.items()]
        plain = all(isinstance(value, _PLAIN) or callable(value) for _, value in named)
        tensors = [(name, value) for name, value in named if isinstance(value, torch.Tensor)]
        known = plain and not any(value.dtype in (torch.int64, torch.uint64) for _, value in tensors)
        checked.ranges = [_range(name, value) for name, value in tensors] if known else []
        return args, kwargs

    interpreter.GridExecutor._init_args_hst = noted


def compute_bfloat16() -> None:
    """Has the interpreter, if it is loaded, compute on bfloat16 in float32 and round. By itself it computes on the bits, as integers."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or hasattr(interpreter.InterpreterBuilder.binary_op, "__wrapped__"):
        return
    language, truncate = interpreter.tl, interpreter._convert_float

    def convert(values: Any, source: Any, target: Any, mode: Any) -> Any:
        """Converts as the interpreter does, but rounds float32 to the nearest bfloat16, as a GPU does."""
        if (source, target, mode) != (language.float32, language.bfloat16, None):
            return truncate(values, source, target, mode)
        wide = np.frombuffer(values.tobytes(), np.float32).reshape(values.shape).copy()
        return torch.from_numpy(wide).bfloat16().view(torch.uint16).numpy()

    def constant(_: Any, value: float) -> Any:
        bits = convert(np.array([value], np.float32), language.float32, language.bfloat16, None)
        return interpreter.TensorHandle(bits, language.bfloat16)

    interpreter._convert_float, interpreter.InterpreterBuilder.get_bf16 = convert, constant

    def with_operands(evaluate: Any) -> Any:
        @functools.wraps(evaluate)
        def evaluated(builder: Any, *operands: Any) -> Any:
            *handles, operation = operands
            narrow = [handle.dtype.scalar == language.bfloat16 for handle in handles]
            if not any(narrow):
                return evaluate(builder, *operands)

            def in_float32(*data: Any) -> Any:
                wide = (
                    convert(values, language.bfloat16, language.float32, None).view(np.float32) if is_narrow else values
                    for is_narrow, values in zip(narrow, data, strict=True)
                )
                result = np.asarray(operation(*wide))
                if result.dtype != np.float32:
                    return result
                return convert(result, language.float32, language.bfloat16, None).view(np.uint16)

            return evaluate(builder, *handles, in_float32)

        return evaluated

    for name in ("unary_op", "binary_op", "ternary_op"):
        setattr(interpreter.InterpreterBuilder, name, with_operands(getattr(interpreter.InterpreterBuilder, name)))


def skip_autotuning() -> None:
    """Has the autotuner take its first configuration from now on, if it is loaded: it times kernels with a driver, which needs a GPU."""
    if (autotuner := sys.modules.get("triton.runtime.autotuner")) is not None:
        autotuner.Autotuner._bench = lambda tuner, *_, config, **__: tuner.configs.index(config)


def _range(name: str, tensor: torch.Tensor) -> Range:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes(), name
