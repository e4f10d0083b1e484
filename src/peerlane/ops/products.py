"""Products with all-gather of rows, reduce-scatter and all-reduce as operators, with what a layer does behind its sum: the operators behind
``ops.row_gather_gemm``, ``ops.gemm_reduce_scatter`` and ``ops.gemm_all_reduce``.

Right operands are (k, n) and may be contiguous along either dimension: ``weight.t()`` of a ``torch.nn.Linear`` is not copied. The kernels
apply a bias, an activation and a residual to a sum before they round it. Where a gradient is wanted the activation is an operation of its
own behind the kernel, because its gradient needs the sum."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from peerlane.device import Group
from peerlane.device.products import gemm
from peerlane.device.products.gemm import Activation, Epilogue
from peerlane.device.products.gemm_all_reduce import gemm_all_reduce as _fused_sum
from peerlane.device.products.gemm_reduce_scatter import gemm_reduce_scatter as _fused_scatter
from peerlane.device.products.row_gather_gemm import MAX_PRODUCTS
from peerlane.device.products.row_gather_gemm import row_gather_gemm as _fused_gather
from peerlane.errors import UsageError
from peerlane.ops import replicated
from peerlane.ops.check import no_kernel, same_call
from peerlane.ops.collectives import Gradient, replicates
from peerlane.ops.direct import Direct, operator
from peerlane.ops.groups import GroupLike, group_name, kit_group, world_size
from peerlane.ops.shapes import cast, product, require_product, require_terms, right_gradient, rows
from peerlane.ops.sharding import takes_dtensors
from peerlane.ops.transport import gathered, scattered, summed
from peerlane.settings import batch_invariant

Tensors = list[torch.Tensor]

_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def activate(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Returns the activation of x, by torch."""
    return _ACTIVATIONS[activation](x)


def fused(name: str, group: str, a: torch.Tensor, *bs: torch.Tensor) -> Group | None:
    """Returns the kit's group where there is a kernel for these operands. Raises UsageError for others in the batch-invariant mode."""
    fits = a.dtype in gemm.ELEMENT_TYPES and all(b.dtype == a.dtype and b.numel() for b in bs) and a.numel() > 0
    kit = kit_group(a, group) if fits and world_size(group) > 1 else None
    if kit is None:
        no_kernel(name, group, a, *bs)
    return kit


def _finish(
    total: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, activation: Activation, scale: float
) -> torch.Tensor:
    """Returns what the kernels make of a sum, by torch; it is rounded once more."""
    dtype = total.dtype
    total = total.to(torch.promote_types(dtype, torch.float32)) * scale
    total = activate(total if bias is None else total + bias, activation)
    return (total if residual is None else total + residual).to(dtype)


# --- all-gather of rows, and products ---


@operator("row_gather_gemm")
def _row_gather_gemm(
    a: torch.Tensor, bs: Sequence[torch.Tensor], biases: Sequence[torch.Tensor], activation: str, scale: float, keeps: bool, group: str
) -> Tensors:
    """Returns the products, and behind them all ranks' rows, or no rows unless it ``keeps`` them."""
    same_call("row_gather_gemm", group, a, *bs, *biases)
    kit = fused("row_gather_gemm", group, a, *bs)
    if kit is None:
        whole = gathered(a, group)
        terms = [*biases, *[None] * (len(bs) - len(biases))]
        products = [_finish(whole @ b, bias, None, activation, scale) for b, bias in zip(bs, terms, strict=True)]  # type: ignore[arg-type]
        return [*products, whole if keeps else a.new_empty((0, a.shape[1]))]
    epilogue = Epilogue(activation, bool(biases), scale=scale != 1, batch_invariant=batch_invariant())  # type: ignore[arg-type]
    multiply = _fused_gather(kit, a.shape[0], a.shape[1], a.dtype, epilogue, keeps)
    outs = multiply(gemm.aligned(a), bs, biases=biases, scale=scale)
    return [out.contiguous() for out in outs] if keeps else [*(out.contiguous() for out in outs), a.new_empty((0, a.shape[1]))]


@_row_gather_gemm.register_fake
def _(a: torch.Tensor, bs: Sequence[torch.Tensor], *others: Any) -> Tensors:
    *_, keeps, group = others
    rows = world_size(group) * a.shape[0]
    return [*(a.new_empty((rows, b.shape[1])) for b in bs), a.new_empty((rows if keeps else 0, a.shape[1]))]


def _remember_gather(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
    a, bs, biases, activation, ctx.scale, ctx.keeps, ctx.group = inputs
    ctx.activation, ctx.count, ctx.biases = activation, len(bs), len(biases)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*bs, output[-1] if ctx.keeps else a)


def _gather_gradients(ctx: Any, grads: list[torch.Tensor | None]) -> tuple[Any, ...]:
    _without_activation(ctx.activation)
    *bs, rows = ctx.saved_tensors
    needs_a, needs_b = ctx.needs_input_grad[0], any(_flat(ctx.needs_input_grad[1]))
    given = [(b, grad) for b, grad in zip(bs, grads, strict=False) if grad is not None]
    if not given:
        return (None, [None] * len(bs), [None] * ctx.biases, None, None, None, None)
    da = None
    if needs_a:  # products that are added: as one, of the operands side by side
        whole_b = given[0][0] if len(given) == 1 else torch.cat([b.T for b, _ in given]).T
        whole_grad = given[0][1] if len(given) == 1 else torch.cat([grad for _, grad in given], 1)
        da = _gemm_reduce_scatter(whole_grad, whole_b.T, None, None, "none", ctx.scale, ctx.group)
    whole = rows if ctx.keeps or not needs_b else _gathered_again(rows, ctx.group)
    dbs = [None if grad is None or not needs_b else right_gradient(whole, grad, b, ctx.scale) for b, grad in zip(bs, grads, strict=False)]
    dbiases = [None if grad is None else grad.sum(0) for grad in grads[: ctx.biases]]
    return (da, dbs, dbiases, None, None, None, None)


def _gathered_again(x: torch.Tensor, group: str) -> torch.Tensor:
    whole: torch.Tensor = torch.ops.peerlane.all_gather(x, group)  # an operator, so that it can be traced
    return whole


def _flat(needed: Any) -> Sequence[bool]:
    return needed if isinstance(needed, list | tuple) else [bool(needed)]


def _without_activation(activation: str) -> None:
    if activation != "none":
        raise UsageError(
            f"the gradient of a product with the activation {activation!r} in its kernel: expected 'none'; call ops, which splits it off"
        )


_row_gather_gemm.register_autograd(_gather_gradients, setup_context=_remember_gather)


# --- products that are summed over ranks ---


def _summing(name: str, sums: Callable[..., Any], by_torch: Callable[[torch.Tensor, str], torch.Tensor]) -> Direct[torch.Tensor]:
    """Returns the operator of a product that is summed over ranks, by ``sums`` of the kit or ``by_torch``."""

    def product(
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        activation: str,
        scale: float,
        group: str,
    ) -> torch.Tensor:
        same_call(name, group, a, b, *(term for term in (bias, residual) if term is not None))
        kit = fused(name, group, a, b)
        if kit is None:
            return _finish(by_torch(a @ b, group), bias, residual, activation, scale)  # type: ignore[arg-type]
        epilogue = Epilogue(activation, bias is not None, residual is not None, scale != 1, batch_invariant())  # type: ignore[arg-type]
        multiply = sums(kit, a.shape[0], b.shape[1], a.dtype, epilogue)
        found: torch.Tensor = multiply(gemm.aligned(a), b, bias=bias, residual=residual, scale=scale)
        return found.clone(memory_format=torch.contiguous_format) if by_torch is summed else found.contiguous()  # of the arena, a copy

    return operator(name)(product)


_gemm_reduce_scatter = _summing("gemm_reduce_scatter", _fused_scatter, scattered)
_gemm_all_reduce = _summing("gemm_all_reduce", _fused_sum, summed)
_gemm_reduce_scatter.register_fake(lambda a, b, *others: a.new_empty((rows(a, world_size(others[-1]), "gemm_reduce_scatter"), b.shape[1])))
_gemm_all_reduce.register_fake(lambda a, b, *others: a.new_empty((a.shape[0], b.shape[1])))


def _remember_sum(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    a, b, bias, residual, ctx.activation, ctx.scale, ctx.group = inputs
    ctx.has = bias is not None, residual is not None
    ctx.save_for_backward(a, b)


def _scatter_gradients(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """All-gather of the gradient's rows, times b transposed: by the kernel that is this one's partner, which keeps the rows for b's
    gradient."""
    _without_activation(ctx.activation)
    (a, b), needs = ctx.saved_tensors, ctx.needs_input_grad
    da = db = whole = None
    if needs[0]:
        da, whole = _row_gather_gemm(grad.contiguous(), [b.T], [], "none", ctx.scale, needs[1], ctx.group)
    elif needs[1]:
        whole = _gathered_again(grad, ctx.group)
    if needs[1]:
        assert whole is not None
        db = right_gradient(a, whole, b, ctx.scale)
    return (da, db, *_epilogue_gradients(ctx, grad), None, None, None)


def _sum_gradients(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    _without_activation(ctx.activation)
    (a, b), needs, whole = ctx.saved_tensors, ctx.needs_input_grad, torch.ops.peerlane.all_reduce(grad, ctx.group)
    da = (whole @ b.T) * ctx.scale if needs[0] else None
    db = right_gradient(a, whole, b, ctx.scale) if needs[1] else None
    return (da, db, *_epilogue_gradients(ctx, grad), None, None, None)


def _epilogue_gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    has_bias, has_residual = ctx.has
    return grad.sum(0) if has_bias else None, grad.clone() if has_residual else None


_gemm_reduce_scatter.register_autograd(_scatter_gradients, setup_context=_remember_sum)
_gemm_all_reduce.register_autograd(_sum_gradients, setup_context=_remember_sum)


# --- what users call ---


def _differentiated(*values: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(value is not None and value.requires_grad for value in values)


@takes_dtensors
def row_gather_gemm(
    a: torch.Tensor,
    bs: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor] = (),
    *,
    activation: Activation = "none",
    scale: float = 1.0,
    keeps_rows: bool = False,
    group: GroupLike = None,
) -> Tensors:
    """Returns ``activation(scale * cat(all ranks' a) @ b + bias)`` for each b, in one kernel: a (m/W, ..., k) and (k, n) give (m, ..., n).

    One to four b's; no biases, or one of (n,) for each. The gradient of the b's needs all ranks' rows: ``keeps_rows`` keeps them from the
    forward pass, m k elements; else they are gathered again. bfloat16 and float16 run as one kernel, other dtypes as a collective and
    products. Raises UsageError for other numbers of b's or biases."""
    if not 1 <= len(bs) <= MAX_PRODUCTS or len(biases) not in (0, len(bs)):
        raise UsageError(
            f"row_gather_gemm got {len(bs)} right operands and {len(biases)} biases: expected 1 to {MAX_PRODUCTS} operands, and no bias or "
            "one for each; join matrices side by side"
        )
    name, (a, *others) = group_name(group), cast(a, *bs, *biases)
    bs, biases = others[: len(bs)], others[len(bs) :]
    for number, b in enumerate(bs):
        require_product("row_gather_gemm", a, b)
        require_terms("row_gather_gemm", biases[number] if biases else None, None, (b.shape[1],), a.dtype)
    with_gradient = _differentiated(a, *bs, *biases)
    inside: Activation = "none" if with_gradient else activation
    keeps = keeps_rows and with_gradient
    *outs, _ = _row_gather_gemm(a if a.dim() == 2 else a.flatten(0, -2), bs, biases, inside, scale, keeps, name)
    outs = outs if inside == activation else [activate(out, activation) for out in outs]
    lead = (world_size(name) * a.shape[0], *a.shape[1:-1])
    return outs if a.dim() == 2 else [out.view(*lead, out.shape[1]) for out in outs]


@takes_dtensors
def gemm_reduce_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    group: GroupLike = None,
    *,
    bias: torch.Tensor | None = None,
    activation: Activation = "none",
    residual: torch.Tensor | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    """Returns this rank's part, along axis 0, of the summed ``a @ b``: (m, ..., k) and (k, n) give (m/W, ..., n). bfloat16 and float16 run
    as one kernel.

    The kernel finishes a sum as ``activation(scale * sum + bias) + residual``: bias (n), residual of the result's shape."""
    name = group_name(group)
    call = partial(_split, _gemm_reduce_scatter, activation, scale, name)
    return product(call, "gemm_reduce_scatter", (a, b), (bias, residual), parts=world_size(name))


@takes_dtensors
def gemm_all_reduce(
    a: torch.Tensor,
    b: torch.Tensor,
    group: GroupLike = None,
    *,
    bias: torch.Tensor | None = None,
    activation: Activation = "none",
    residual: torch.Tensor | None = None,
    scale: float = 1.0,
    gradient: Gradient = "summed",
) -> torch.Tensor:
    """Returns the sum of all ranks' ``a @ b``. a (..., k), b (k, n); (..., n). ``gradient="replicated"``: the backward pass is local.

    The kernel finishes a sum as ``activation(scale * sum + bias) + residual``: bias (n), residual of the result's shape."""
    name, operator = group_name(group), replicated.GemmAllReduce.apply if replicates(gradient) else _gemm_all_reduce
    call = partial(_split, operator, activation, scale, name)
    return product(call, "gemm_all_reduce", (a, b), (bias, residual))


def _split(
    operator: Callable[..., torch.Tensor],
    activation: Activation,
    scale: float,
    group: str,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """Calls the operator; with the activation, and what follows it, behind it where a gradient is wanted."""
    if activation == "none" or not _differentiated(a, b, bias, residual):
        return operator(a, b, bias, residual, activation, scale, group)
    found = activate(operator(a, b, bias, None, "none", scale, group), activation)
    return found if residual is None else found + residual
