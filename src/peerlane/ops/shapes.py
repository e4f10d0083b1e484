"""The one rule of shapes, dtypes and autocast that all operators follow, on CPU ranks, on the kit, and for torch.compile.

* A product takes ``a`` of two or more axes. All but the last are rows; the result keeps them.
* What is cut into parts is cut along axis 0 into as many equal ones as there are ranks.
* Operands of one call have one dtype.
* Under autocast operands are cast as those of ``torch.mm``: floating-point tensors other than float64, to autocast's dtype.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from peerlane.errors import UsageError


def _described(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} in {tensor.dtype}"


def cast(*tensors: Any) -> tuple[Any, ...]:
    """Returns the tensors as autocast wants the operands of ``torch.mm``; outside autocast, as they are. None stays None."""
    device = tensors[0].device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(value.to(dtype) if value is not None and _is_cast(value) else value for value in tensors)


def _is_cast(x: torch.Tensor) -> bool:
    return x.is_floating_point() and x.dtype != torch.float64


def without_autocast(x: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Returns a context for code that chooses its dtypes itself: autocast is off in it."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else contextlib.nullcontext()


def rows(x: torch.Tensor, parts: int, name: str) -> int:
    """Returns the length of each of ``parts`` equal parts of axis 0. Raises UsageError if there are none."""
    if not x.dim() or x.shape[0] % parts:
        raise UsageError(f"{name} got shape {tuple(x.shape)}: expected rows that {parts} ranks share equally; pad axis 0")
    return x.shape[0] // parts


def require_dense(x: torch.Tensor, name: str) -> None:
    """Raises UsageError for a sparse tensor."""
    if x.layout is not torch.strided:
        raise UsageError(f"{name} got a tensor of layout {x.layout}: expected a dense one; call .to_dense()")


def require_axis(x: torch.Tensor, name: str) -> None:
    """Raises UsageError for a tensor without axes."""
    require_dense(x, name)
    if not x.dim():
        raise UsageError(f"{name} got a tensor without axes: expected one at least; call .reshape(1)")


def require_product(name: str, a: torch.Tensor, b: torch.Tensor, *, depth: int = 1, parts: int = 1) -> None:
    """Raises UsageError unless ``depth`` times the last axis of ``a`` is axis 0 of ``b``, and ``parts`` divide axis 0 of ``a``."""
    given = f"{name} got a {_described(a)} and b {_described(b)}"
    if a.dim() < 2 or b.dim() != 2:
        raise UsageError(f"{given}: expected a of two or more axes and b of two; call a.unsqueeze(0) for a single row")
    if depth * a.shape[-1] != b.shape[0]:
        wanted = "k" if depth == 1 else f"k / {depth}"
        raise UsageError(f"{given}: expected (..., {wanted}) and (k, n)")
    if a.shape[0] % parts:
        raise UsageError(f"{given}: expected an axis 0 of a that {parts} ranks share equally; pad it")
    if a.dtype != b.dtype or not a.is_floating_point():
        raise UsageError(f"{given}: expected one floating-point dtype; call .to(a.dtype) on b, or use torch.autocast")


Terms = torch.Tensor | None


def require_terms(name: str, bias: Terms, residual: Terms, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raises UsageError unless ``bias`` has the last axis of a result of this shape, ``residual`` all of them, and both its dtype."""
    for what, term, wanted in (("bias", bias, shape[-1:]), ("residual", residual, shape)):
        if term is not None and (tuple(term.shape) != wanted or term.dtype != dtype):
            raise UsageError(f"{name} got a {what} {_described(term)}: expected {wanted} in {dtype}")


def product(
    call: Callable[[torch.Tensor, torch.Tensor, Terms, Terms], torch.Tensor],
    name: str,
    operands: tuple[torch.Tensor, torch.Tensor],
    terms: tuple[Terms, Terms] = (None, None),
    *,
    depth: int = 1,
    parts: int = 1,
) -> torch.Tensor:
    """Returns ``call`` of the rows of a and of b, a bias and the rows of a residual, with the leading axes of a; axis 0 is that of one of
    ``parts``. ``terms``: the bias and the residual."""
    a, b, bias, residual = cast(*operands, *terms)
    require_product(name, a, b, depth=depth, parts=parts)
    if bias is not None or residual is not None:
        require_terms(name, bias, residual, (a.shape[0] // parts, *a.shape[1:-1], b.shape[1]), a.dtype)
    if a.dim() == 2:
        return call(a, b, bias, residual)
    result = call(a.flatten(0, -2), b, bias, None if residual is None else residual.flatten(0, -2))
    return result.view(a.shape[0] // parts, *a.shape[1:-1], result.shape[1])


def right_gradient(a: torch.Tensor, grad: torch.Tensor, b: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Returns the gradient of the right operand (k, n) of ``scale * (a @ b)``, laid out as the operand: that of a layer's weight is not
    copied."""
    product = a.T @ grad if b.stride(1) == 1 else (grad.T @ a).T
    return product * scale if scale != 1 else product
