"""`peerlane.ops`: results, gradients and shapes, on emulated ranks and on one CPU rank."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from device.runs import run_call
from device.test_attention import expected
from peerlane import ops
from peerlane.errors import UsageError
from representatives import first

SCHEDULES = 4
Tensors = tuple[torch.Tensor, ...]


def of_leaves(*values: torch.Tensor) -> list[torch.Tensor]:
    return [value.clone().requires_grad_() for value in values]


def two_products(up: Callable[..., torch.Tensor], down: Callable[..., torch.Tensor], *given: torch.Tensor) -> list[Any]:
    """The result of a layer, and the gradients of what is ``given``: x, w1 and w2."""
    x, w1, w2 = of_leaves(*given)
    y = down(up(x, w1).relu(), w2)
    y.float().square().sum().backward()
    return [y, x.grad, w1.grad, w2.grad]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, weight: torch.Tensor, name: str) -> list[Any]:
    q, k, v = of_leaves(q, k, v)
    out = getattr(ops, name)(q, k, v, causal=True)
    (out.float() * weight).sum().backward()
    return [out, q.grad, k.grad, v.grad]


def ask_experts(x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, layers: Tensors, grad: torch.Tensor, capacity: Any) -> Any:
    values = of_leaves(x, weights, *layers)
    y = ops.gated_experts(values[0], experts, *values[1:], capacity=capacity)
    y.backward(grad)
    return [y, *(value.grad for value in values)]


def move(x: torch.Tensor, weight: torch.Tensor) -> list[Any]:
    found: list[Any] = []
    for operator in (ops.all_reduce, ops.all_gather, ops.reduce_scatter, ops.all_to_all):
        own = x.clone().requires_grad_()
        y = operator(own)
        (y * weight[: y.numel()].view_as(y)).sum().backward()
        found += [y, own.grad]
    return found


def fold(x: torch.Tensor, w: torch.Tensor, whole: torch.Tensor) -> list[Any]:
    with torch.autocast("cpu", torch.bfloat16):
        cast = ops.gemm_all_reduce(x, w).dtype
    a, b, c = of_leaves(x, w, x)
    total = ops.gemm_all_reduce(a, b, gradient="replicated")
    (total * whole).sum().backward()
    part = ops.gemm_reduce_scatter(c, w)
    return [total, a.grad, b.grad, part, list(part.shape), cast]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_parallel_layer_equals_the_whole_layer(dtype: torch.dtype) -> None:
    world_size, m, k, n = 2, 32, 32, 64
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=generator).to(dtype) / 4

    x, w1, w2 = draw(m, k), draw(k, n), draw(n, k)
    parts = [(x.chunk(2, 1)[r].contiguous(), w1.chunk(2, 1)[r].contiguous(), w2.chunk(2, 0)[r].contiguous()) for r in range(world_size)]
    whole = [value.float().clone().requires_grad_() for value in (x, w1, w2)]
    y = (whole[0] @ whole[1]).relu() @ whole[2]
    y.square().sum().backward()
    x_grad, w1_grad, w2_grad = (value.grad for value in whole)
    assert x_grad is not None and w1_grad is not None and w2_grad is not None
    for rank, found in enumerate(run_call(partial(two_products, ops.all_gather_gemm, ops.gemm_reduce_scatter), parts, schedules=SCHEDULES)):
        wanted = [y.detach().chunk(2, 0)[rank], x_grad.chunk(2, 1)[rank], w1_grad.chunk(2, 1)[rank], w2_grad.chunk(2, 0)[rank]]
        for got, want in zip(found, wanted, strict=True):
            assert got.dtype == dtype
            torch.testing.assert_close(
                got.float(), want, rtol=0.05, atol=0.05 * float(want.abs().max()) if dtype == torch.bfloat16 else 1e-3
            )


@pytest.mark.parametrize("dtype", first([torch.float32, torch.bfloat16]))
def test_replicated_products_equal_those_of_one_place(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = (32, 16), (16, 24), (48, 40)
    parts = [tuple(torch.randint(-2, 3, shape, generator=generator).to(dtype) / 4 for shape in shapes) for _ in range(2)]
    wide = [[value.double().requires_grad_() for value in part] for part in parts]
    hidden = torch.cat([x @ w1 for x, w1, _ in wide], 1).relu()
    y = sum(hidden @ w2 for *_, w2 in wide)
    (2 * y.square().sum()).backward()  # type: ignore[union-attr]
    outputs = run_call(partial(two_products, ops.gemm_all_gather, ops.gemm_all_reduce), parts, schedules=SCHEDULES)
    for found, values in zip(outputs, wide, strict=True):
        for got, want in zip(found, (y.detach(), *(value.grad for value in values)), strict=True):  # type: ignore[union-attr]
            assert want is not None and got.dtype == dtype
            assert float((got - want).norm()) <= (1e-2 if dtype == torch.bfloat16 else 1e-6) * float(want.norm())


@pytest.mark.parametrize(
    ("name", "dtype", "heads", "depths"),
    [
        ("ring_attention", torch.bfloat16, (2, 2, 2, 2), (16, 16, 16, 16)),
        ("ring_attention", torch.float32, (4, 2, 2, 4), (16, 16, 8, 8)),  # heads share keys
        ("ulysses_attention", torch.bfloat16, (2, 2, 2, 2), (16, 16, 16, 16)),
        ("ulysses_attention", torch.float32, (2, 2, 2, 2), (16, 16, 16, 16)),
    ],
)
def test_attention_over_ranks_equals_attention_in_one_place(
    name: str, dtype: torch.dtype, heads: tuple[int, ...], depths: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(1)
    whole = [torch.randn(1, 12, h, depth, generator=generator).to(dtype) for h, depth in zip(heads, depths, strict=True)]
    parts = [(*(value.chunk(2, 1)[rank].contiguous() for value in whole), name) for rank in range(2)]
    wide = [value.double().requires_grad_() for value in whole[:3]]
    out, _ = expected(wide[0], wide[1], wide[2], None, True)
    gradients = torch.autograd.grad((out * whole[3]).sum(), wide)
    for rank, found in enumerate(run_call(attend, parts, schedules=SCHEDULES)):
        for got, want in zip(found, (out.detach(), *gradients), strict=True):
            part = want.chunk(2, 1)[rank]
            assert got.dtype == dtype
            assert float((got - part).norm() / part.norm()) < (1e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.usefixtures("one_rank")
def test_gradients_of_local_experts_match_finite_differences() -> None:
    generator = torch.Generator().manual_seed(1)
    experts = torch.rand(4, 3, generator=generator).topk(2).indices
    shapes = (4, 5), (4, 2), (3, 2, 5), (3, 2, 5), (3, 5, 2)
    values = tuple(torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes)
    assert torch.autograd.gradcheck(lambda x, *others: ops.gated_experts(x, experts, *others), values, fast_mode=True)
    with pytest.raises(UsageError, match=r"expected \(T, H\), \(T, k\)"):
        ops.gated_experts(values[0], experts[:3], *values[1:])
    with pytest.raises(UsageError, match="got expert 4: expected 0 to 2"):
        ops.gated_experts(values[0], (experts + 2).clamp(max=4), *values[1:])
    x = values[0].detach()[:1].expand(20, -1).clone().requires_grad_()
    weights = torch.ones(20, 1, dtype=torch.float64)
    y = ops.gated_experts(x, torch.zeros(20, 1, dtype=torch.int64), weights, *values[2:], capacity=16)
    grad = torch.autograd.grad(y.sum(), x)[0]
    assert (y[:16] == y[0]).all() and y[0].any() and not y[16:].any()  # above the capacity
    assert (grad[:16] == grad[0]).all() and grad[0].any() and not grad[16:].any()
    with pytest.raises(UsageError, match="capacity=0: expected 1 row or more"):
        ops.gated_experts(values[0], experts, *values[1:], capacity=0)
    with pytest.raises(UsageError, match="repeat shared key heads"):
        ops.ulysses_attention(torch.ones(1, 8, 4, 16), *[torch.ones(1, 8, 2, 16)] * 2)
    with pytest.raises(UsageError, match="batch, tokens, heads, depth"):
        ops.ring_attention(*[torch.ones(8, 4, 16)] * 3)


@pytest.mark.parametrize(
    ("dtype", "capacity"),
    [
        (torch.float32, None),
        pytest.param(torch.bfloat16, None, marks=pytest.mark.long),
        (torch.bfloat16, 48),
    ],
)
def test_experts_on_ranks_equal_experts_in_one_place(dtype: torch.dtype, capacity: int | None) -> None:
    own, inner, h, k, counts = 2, 8, 16, 2, (5, 3)
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    experts = [torch.rand(count, 2 * own - 1, generator=generator).topk(k).indices for count in counts]  # the last one has no token
    tokens = [(draw(count, h), draw(count, k).abs()) for count in counts]
    layers = [(draw(own, inner, h), draw(own, inner, h), draw(own, h, inner) / 4) for _ in counts]
    grads = [draw(count, h) for count in counts]
    given = [(tokens[r][0], experts[r], tokens[r][1], layers[r], grads[r], capacity) for r in range(2)]
    found = run_call(ask_experts, given, schedules=SCHEDULES)
    wide = [[value.double().requires_grad_() for value in (*tokens[r], *layers[r])] for r in range(2)]
    gate, up, down = (torch.cat([wide[0][i], wide[1][i]]) for i in (2, 3, 4))
    wanted = []
    for (x, weights, *_), chosen, grad in zip(wide, experts, grads, strict=True):
        rows = [torch.einsum("th,tkih->tki", x, layer[chosen]) for layer in (gate, up)]
        hidden = torch.nn.functional.silu(rows[0]) * rows[1]
        y = torch.einsum("tki,tkhi,tk->th", hidden, down[chosen], weights)
        y.backward(grad.double())
        wanted.append(y.detach())
    for got, result, values in zip(found, wanted, wide, strict=True):
        for value, want in zip(got, (result, *(value.grad for value in values)), strict=True):
            assert want is not None and value.dtype == dtype
            assert float((value - want).norm()) <= (3e-2 if dtype == torch.bfloat16 else 1e-5) * float(want.norm())


@pytest.mark.parametrize("capacity", [32, pytest.param(None, marks=pytest.mark.long)])
def test_gradients_of_experts_read_no_counts(capacity: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that would make the host wait for a GPU is called in the backward pass."""
    backward = threading.local()

    def guarded(plain: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            assert not hasattr(backward, "runs"), f"{plain.__name__} in the backward pass"
            return plain(*args, **kwargs)

        return called

    for name in ("nonzero", "tolist", "item", "cpu", "__bool__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, guarded(getattr(torch.Tensor, name)))

    def step(x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, *layers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        own = x.clone().requires_grad_()
        loss = ops.gated_experts(own, experts, weights, *layers, capacity=capacity).sum()
        backward.runs = True
        loss.backward()
        del backward.runs
        assert own.grad is not None
        return loss.detach(), own.grad

    generator = torch.Generator().manual_seed(1)
    shapes = (4, 16), (4, 1), (1, 8, 16), (1, 8, 16), (1, 16, 8)
    x, weights, *layers = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    given = x, torch.tensor([[0], [1], [1], [0]]), weights, *layers
    for loss, grad in run_call(step, [tuple(value.clone() for value in given) for _ in range(2)]):
        assert loss.isfinite() and grad.abs().sum() > 0


def test_collectives_have_the_gradients_of_the_summed_losses() -> None:
    x = [torch.arange(4.0).view(4, 1) * (rank + 1) for rank in range(2)]
    weight = [torch.arange(8.0) + 10 * rank for rank in range(2)]
    for rank, found in enumerate(run_call(move, list(zip(x, weight, strict=True)), schedules=SCHEDULES)):
        total, total_weight = x[0] + x[1], weight[0] + weight[1]
        wanted = [
            (total, total_weight[:4]),
            (torch.cat(x), total_weight[4 * rank :][:4]),
            (total[2 * rank :][:2], torch.cat([weight[0][:2], weight[1][:2]])),
            (torch.cat([x[0][2 * rank :][:2], x[1][2 * rank :][:2]]), torch.cat([weight[0][2 * rank :][:2], weight[1][2 * rank :][:2]])),
        ]
        for (got, grad), (want, want_grad) in zip(zip(found[::2], found[1::2], strict=True), wanted, strict=True):
            assert torch.equal(got, want) and torch.equal(grad.flatten(), want_grad.flatten())


def test_leading_axes_are_rows_and_a_loss_may_be_replicated() -> None:
    generator = torch.Generator().manual_seed(1)
    parts = [tuple(torch.randint(-2, 3, shape, generator=generator).float() for shape in ((4, 3, 8), (8, 16))) for _ in range(2)]
    weight = torch.randint(-2, 3, (4, 3, 16), generator=generator).float()
    wide = [[value.clone().requires_grad_() for value in part] for part in parts]
    total = sum(x @ w for x, w in wide)
    (total * weight).sum().backward()  # type: ignore[union-attr]
    for rank, found in enumerate(run_call(fold, [(*part, weight) for part in parts], schedules=SCHEDULES)):
        whole = total.detach()  # type: ignore[union-attr]
        for got, want in zip(found, (whole, *(value.grad for value in wide[rank]), whole.chunk(2)[rank]), strict=False):
            assert want is not None and torch.equal(got, want)
        assert found[4:] == [[2, 3, 16], torch.bfloat16]


def test_different_shapes_on_the_ranks_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEERLANE_CHECK", "1")
    run_call(ops.all_reduce, [(torch.ones(4),), (torch.ones(4),)])

    def step(x: torch.Tensor) -> torch.Tensor:
        return ops.all_reduce(x)

    at = rf"test_ops.py:{step.__code__.co_firstlineno + 1}"
    with pytest.raises(UsageError, match=rf"rank 0: all_reduce sum\(\(4,\) float32\) at .*{at}\n  rank 1: all_reduce sum\(\(6,\)"):
        run_call(step, [(torch.ones(4),), (torch.ones(6),)])


def test_shapes_are_known_without_running() -> None:
    def shapes() -> list[list[int]]:
        with FakeTensorMode():
            a, b, wide = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((8, 4), (4, 6), (8, 6)))
            found = [ops.all_reduce(a), ops.all_gather(a), ops.reduce_scatter(a), ops.all_to_all(a), ops.all_gather_gemm(a, wide)]
            found += [ops.gemm_reduce_scatter(a, b), ops.gemm_all_reduce(a, b), ops.gemm_all_gather(a, b)]
        return [list(value.shape) for value in found]

    assert run_call(shapes, [(), ()]) == [[[8, 4], [16, 4], [4, 4], [8, 4], [8, 6], [4, 6], [8, 6], [8, 12]]] * 2


def test_the_training_example_has_the_losses_of_torch() -> None:
    example = Path(__file__).parents[2] / "examples" / "training" / "tensor_parallel_mlp.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(example)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    ours, theirs = (line.split()[1:] for line in done.stdout.strip().splitlines()[-2:])
    assert len(ours) == 10 and ours == theirs
