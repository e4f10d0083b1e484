"""Sharded linear layers equal the whole ones, forward and backward, and copy no weight. On emulated ranks and on one CPU rank."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.nn.functional import linear, silu
from torch.utils._python_dispatch import TorchDispatchMode

from device.runs import run_call, run_calls
from peerlane import nn, ops
from peerlane.device import group_of
from peerlane.device.products import gemm
from peerlane.device.products.gemm_all_gather import gemm_all_gather
from peerlane.device.products.gemm_all_reduce import gemm_all_reduce
from peerlane.device.products.gemm_reduce_scatter import gemm_reduce_scatter
from peerlane.device.products.row_gather_gemm import row_gather_gemm
from peerlane.errors import UsageError


def perceptron(
    x: torch.Tensor, residual: torch.Tensor, layers: Sequence[torch.Tensor], grad: torch.Tensor, sequence_parallel: bool, keeps_rows: bool
) -> list[Any]:
    w1, b1, w2, b2 = layers
    inner, hidden = w1.shape
    kind: Any = {"sequence_parallel": sequence_parallel, "dtype": x.dtype}
    up = nn.ColumnParallelLinear(hidden, inner, activation="silu", keeps_rows=keeps_rows, **kind)
    down = nn.RowParallelLinear(inner, hidden, **kind)
    up.load_whole(w1, b1)
    down.load_whole(w2, b2)
    x, residual = x.clone().requires_grad_(), residual.clone().requires_grad_()
    y = down(up(x), residual)
    y.backward(grad)
    whole: list[Any] = [up.weight.grad, up.bias.grad, down.weight.grad, down.bias.grad]
    return [y, x.grad, residual.grad, *(value.to_local() for value in whole)]


@pytest.mark.parametrize(
    ("dtype", "world_size", "sequence_parallel", "keeps_rows"),
    [
        (torch.bfloat16, 2, True, True),
        pytest.param(torch.bfloat16, 3, True, False, marks=pytest.mark.long),
        (torch.bfloat16, 2, False, False),
        (torch.float32, 2, True, False),
        (torch.float32, 2, False, False),
    ],
)
def test_a_sharded_perceptron_equals_the_whole_one(dtype: torch.dtype, world_size: int, sequence_parallel: bool, keeps_rows: bool) -> None:
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) / shape[-1] ** 0.25).to(dtype)

    tokens, hidden, inner = (8 * world_size, 3), 24, 24 * world_size
    x, residual, grad = (draw(*tokens, hidden) for _ in range(3))
    layers = draw(inner, hidden), draw(inner), draw(hidden, inner), draw(hidden)
    own = [
        [(value.chunk(world_size)[rank] if sequence_parallel else value).clone() for value in (x, residual, grad)]
        for rank in range(world_size)
    ]
    calls = [(rows, added, [value.clone() for value in layers], upstream, sequence_parallel, keeps_rows) for rows, added, upstream in own]
    wide = [value.double().requires_grad_() for value in (x, residual, *layers)]
    y = linear(silu(linear(wide[0], wide[2], wide[3])), wide[4], wide[5]) + wide[1]
    y.backward(grad.double())
    gradients = [value.grad for value in wide]
    for rank, found in enumerate(run_call(perceptron, calls, schedules=4)):
        wanted = [y.detach(), *gradients]
        for place, axis in ((3, 0), (4, 0), (5, 1)):  # of both weights and the first bias a rank has a part
            wanted[place] = wanted[place].chunk(world_size, axis)[rank]  # type: ignore[union-attr]
        if sequence_parallel:
            wanted[:3] = [value.chunk(world_size)[rank] for value in wanted[:3]]  # type: ignore[union-attr]
        for got, want in zip(found, wanted, strict=True):
            assert want is not None and got.dtype == dtype and got.shape == want.shape
            assert float((got - want).norm()) <= (2e-2 if dtype == torch.bfloat16 else 1e-5) * float(want.norm())


class Allocated(TorchDispatchMode):
    """Counts the bytes of tensors that operators make."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (
            isinstance(result, torch.Tensor)
            and not func.is_view
            and result.data_ptr() not in {t.data_ptr() for t in args if isinstance(t, torch.Tensor)}
        ):
            self.nbytes += result.untyped_storage().nbytes()
        return result


def test_products_allocate_nothing_but_their_results() -> None:
    m, k, n = 32, 64, 72

    def make(rank: int) -> Any:
        group, dtype = group_of(), torch.bfloat16
        kernels = [
            (gemm.product(group, m, n, k, dtype), m * n),
            (gemm_reduce_scatter(group, m, n, dtype), m // 2 * n),
            (gemm_all_reduce(group, m, n, dtype), 0),
            (gemm_all_gather(group, m, n, dtype), 0),
            (row_gather_gemm(group, m, k, dtype), 2 * m * n),
        ]

        def each(a: torch.Tensor, weight: torch.Tensor) -> list[tuple[int, int]]:
            found = []
            for kernel, elements in kernels:
                with Allocated() as allocated:
                    kernel(a, [weight.t()] if elements == 2 * m * n else weight.t())
                found.append((allocated.nbytes, 2 * elements))
            return found

        return each

    given = [(torch.ones(m, k).bfloat16(), torch.ones(n, k).bfloat16()) for _ in range(2)]
    for found in run_calls(make, [given]).clean()[0]:
        assert all(counted == wanted for counted, wanted in found), found


def test_operands_are_taken_as_they_lie() -> None:
    weight = torch.zeros(24, 16, dtype=torch.bfloat16)
    for b, major in ((weight, "mn"), (weight.t(), "k"), (weight[:, :8], "mn"), (weight[:, 8:].t(), "k")):
        right, found = gemm.stored(b)
        assert found == major and right.data_ptr() == b.data_ptr()
    for b in (weight[:, 1:], weight[:, 1:].t(), torch.zeros(3, 5, dtype=torch.bfloat16).t()):
        right, found = gemm.stored(b)
        assert found == "mn" and torch.equal(right, b) and gemm.fits_map(right)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_sharded_layers_follow_autocast(sequence_parallel: bool) -> None:
    layers = (
        nn.ColumnParallelLinear(8, 16, activation="relu", sequence_parallel=sequence_parallel),
        nn.RowParallelLinear(16, 8, sequence_parallel=sequence_parallel),
    )
    x = torch.ones(4, 2, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = layers[0](x)
        y = layers[1](hidden, residual=x)
    assert hidden.dtype == y.dtype == torch.bfloat16 and y.shape == x.shape
    y.float().sum().backward()
    assert all(value.grad is not None and value.grad.dtype == torch.float32 for layer in layers for value in layer.parameters())
    with pytest.raises(UsageError, match="one floating-point dtype"):
        layers[1](torch.ones(4, 16).double())


@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_operators_of_layers_pass_opcheck_and_gradcheck() -> None:
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)  # noqa: E731
    a, b, c, bias, other, residual = draw(4, 6), draw(6, 5), draw(3, 6), draw(5), draw(3), draw(4, 5)
    names = ("row_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce")
    gather, scatter, total = (getattr(torch.ops.peerlane, name).default for name in names)
    c = c.detach().t().requires_grad_()  # as the transpose of a weight
    for keeps in (False, True):
        torch.library.opcheck(gather, (a, [b, c], [bias, other], "none", 0.5, keeps, ""))
    norm, weight = torch.ops.peerlane.all_reduce_rms_norm.default, draw(6)
    torch.library.opcheck(norm, (a, weight, None, None, 1e-6, 1.0, "none", ""))
    torch.library.opcheck(norm, (a.detach(), weight.detach(), a.detach(), None, 1e-6, 0.0, "token", ""))
    for operator in (scatter, total):
        torch.library.opcheck(operator, (a, b, bias, residual, "none", 0.5, ""))
    assert torch.autograd.gradcheck(
        lambda a, b, c, bias, other: tuple(ops.row_gather_gemm(a, [b, c], [bias, other], activation="gelu", keeps_rows=True)),
        (a, b, c, bias, other),
    )
    for product in (ops.gemm_reduce_scatter, ops.gemm_all_reduce):
        assert torch.autograd.gradcheck(
            lambda a, b, bias, residual, product=product: product(a, b, bias=bias, activation="silu", residual=residual, scale=0.5),
            (a, b, bias, residual),
        )
    added = draw(4, 6)
    assert torch.autograd.gradcheck(lambda *given: ops.all_reduce_rms_norm(*given, weight_offset=1.0), (a, weight, added))
    y, sums, scales = ops.all_reduce_rms_norm_fp8(a.detach(), weight.detach(), added.detach())
    assert torch.allclose(y.double() * scales.unsqueeze(1), ops.all_reduce_rms_norm(a, weight, added)[0], rtol=0.07, atol=1e-3)
    assert torch.equal(sums, (a + added).detach())
    wide, gain = draw(2, 256).detach().float(), draw(256).detach().float()
    y, _, scales = ops.all_reduce_rms_norm_fp8(wide, gain, by="block", weight_offset=1.0)
    blocks = ops.all_reduce_rms_norm(wide, gain + 1)[0].unflatten(1, (2, 128))
    assert torch.allclose(scales, blocks.abs().amax(-1) / 448)
    assert torch.allclose(y.float().unflatten(1, (2, 128)) * scales.unsqueeze(2), blocks, rtol=0.07, atol=1e-3)
    with pytest.raises(UsageError, match="for a multiple of 128 columns"):
        ops.all_reduce_rms_norm_fp8(wide[:, :100], gain[:100], by="block")
    with pytest.raises(UsageError, match="got 0 right operands"):
        ops.row_gather_gemm(a, [])
    with pytest.raises(RuntimeError, match=r"Missing key.*bias"):
        nn.ColumnParallelLinear(4, 4).load_whole(torch.zeros(4, 4))
    with pytest.raises(UsageError, match="expected a DTensor, or the whole one"):
        nn.ColumnParallelLinear(4, 4).load_whole(torch.zeros(2, 4), torch.zeros(4))
