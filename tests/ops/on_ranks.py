"""Checks of ``peerlane.ops``: forks four ranks, on CPUs or on GPUs that they may share, and runs every check on groups of 1 to 3 of them,
or on all.

    python tests/ops/on_ranks.py [--thorough] [--cuda] [CHECK ...]       prints a JSON object: check -> null, or what failed on which rank

Every rank draws all ranks' inputs, so results are compared with the whole computation in one place.
"""

import contextlib
import copy
import functools
import json
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from ops import layers
from ops.llama import Llama
from ops.whole import CASES, Case
from peerlane import ops
from peerlane.device.products.quantised import Quantised
from peerlane.errors import UsageError
from peerlane.hardware.virtual_node import share_gpus
from peerlane.ops import groups
from peerlane.ops.parallel import ColwiseParallel, RowwiseParallel
from peerlane.ops.sharding import SHARDINGS, placed

RANKS = 4
ONE_EACH = tuple({(case.operator, case.keywords): case for case in CASES}.values())
"""One case of each operator and its options, of three axes where it takes them."""
DEVICE = torch.device("cuda" if "--cuda" in sys.argv else "cpu")
Check = Callable[[dist.ProcessGroup], None]
CHECKS: dict[str, tuple[Check, Sequence[int], Sequence[int]]] = {}
"""By name: the check, the sizes of groups, and those that only a thorough run has."""


def check(*sizes: int, thorough: Sequence[int] = ()) -> Callable[[Check], Check]:
    """Registers a check of groups of these sizes."""

    def register(function: Check) -> Check:
        CHECKS[function.__name__] = function, sizes, thorough
        return function

    return register


def gradients(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], seeds: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    wanted = [value for value in inputs if value.requires_grad]
    return list(torch.autograd.grad(list(outputs), wanted, list(seeds), allow_unused=True))


def drawn(case: Case, world_size: int, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [
        [value.detach().to(DEVICE).requires_grad_(value.requires_grad) for value in case.draw(generator, rank, world_size, dtype)]
        for rank in range(world_size)
    ]


def seed_like(value: torch.Tensor, number: int) -> torch.Tensor:
    """Returns numbers of the value's shape, the same on all ranks."""
    return torch.randn(value.shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64).to(DEVICE)


def compared(
    case: Case, group: dist.ProcessGroup, call: Callable[..., torch.Tensor], limit: float, dtype: torch.dtype = torch.float32
) -> None:
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    wide = drawn(case, world_size, torch.float64)
    results = case.whole(wide)
    seeds = [seed_like(result, number) for number, result in enumerate(results)]
    expected = gradients(results, wide[rank], seeds)
    own = [value.detach().to(dtype).requires_grad_() if value.is_floating_point() else value for value in wide[rank]]
    y = call(*own)
    assert y.shape == results[rank].shape, f"{case.name}: got {tuple(y.shape)}, expected {tuple(results[rank].shape)}"
    found = gradients([y], own, [seeds[rank].to(y.dtype)])
    for got, want in zip((y, *found), (results[rank], *expected), strict=True):
        assert got is not None and want is not None
        error = float((got.detach().double() - want.detach()).norm() / want.detach().norm().clamp(min=1e-12))
        assert error < limit, f"{case.name} on {world_size} ranks: error {error}"


@check(1, 2, 3, thorough=(1, 2, 3, 4))
def results_and_gradients(group: dist.ProcessGroup) -> None:
    for case in CASES:
        compared(case, group, case.call(group), 1e-5)


@check(2, thorough=(1, 3, 4))
def in_bfloat16(group: dist.ProcessGroup) -> None:
    for case in CASES:
        compared(case, group, case.call(group), 3e-2, torch.bfloat16)


@check(2, thorough=(1, 3, 4))
def in_graphs(group: dist.ProcessGroup) -> None:
    """On GPUs: a replay of a captured call gives the bits of the call, of other inputs too."""
    for case in CASES:
        call = case.call(group)
        first, second = (
            [value.detach() for value in drawn(case, group.size(), torch.bfloat16)[rank % group.size()]]
            for rank in (group.rank(), group.rank() + 1)
        )
        with torch.no_grad():
            wanted = [call(*first).clone(), call(*second).clone()]
            held = [value.clone() for value in first]
            call(*held)
            torch.cuda.synchronize()
            dist.barrier(group)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = call(*held)
            for inputs, want in zip((first, second, first), (*wanted, wanted[0]), strict=True):
                for value, given in zip(held, inputs, strict=True):
                    value.copy_(given)
                graph.replay()
                assert torch.equal(y, want), f"{case.name} on {group.size()} ranks"


@check(2, thorough=(1, 3))
def compiled(group: dist.ProcessGroup) -> None:
    for case in ONE_EACH:
        torch._dynamo.reset()
        compared(case, group, torch.compile(case.call(group), fullgraph=True, backend="aot_eager"), 1e-5)


@check(1, 2, 3, thorough=(2, 4))
def autocast(group: dist.ProcessGroup) -> None:
    for case in CASES:
        compared_under_autocast(case, group, under_autocast(case.call(group)))


def compared_under_autocast(case: Case, group: dist.ProcessGroup, call: Callable[..., torch.Tensor]) -> None:
    own = [value.float() if value.is_floating_point() else value for value in drawn(case, group.size(), torch.float64)[group.rank()]]
    assert call(*own).dtype == (torch.bfloat16 if case.casts else torch.float32), case.name
    compared(case, group, call, 3e-2)


def under_autocast(call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def called(*values: torch.Tensor) -> torch.Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return call(*values)

    return called


@check(2, thorough=(1, 3))
def compiled_autocast(group: dist.ProcessGroup) -> None:
    for case in (case for case in ONE_EACH if case.casts):
        torch._dynamo.reset()
        compared_under_autocast(case, group, torch.compile(under_autocast(case.call(group)), fullgraph=True, backend="aot_eager"))


@check(2, thorough=(1, 3))
def hidden_keys_are_no_part_of_attention(group: dist.ProcessGroup) -> None:
    """What stands in later keys and values, NaN too, changes neither earlier results nor their queries' gradients."""
    length, last = 3, group.rank() == group.size() - 1
    draw = torch.Generator().manual_seed(group.rank())
    q, k, v, seed = (torch.randn(1, length, 2, 4, generator=draw) for _ in range(4))
    found = []
    for poison in (0.0, float("nan"), float("inf")):
        keys, values, queries = k.clone(), v.clone(), q.clone().requires_grad_()
        if last:
            keys[:, -1], values[:, -1] = poison, poison
        y = ops.ring_attention(queries, keys, values, causal=True, group=group)
        rows = slice(0, length - 1 if last else length)
        (y * seed)[:, rows].sum().backward()
        found.append((y.detach()[:, rows], queries.grad[:, rows]))  # type: ignore[index]
        assert not last or not poison or not y[:, -1].isfinite().any()
    for got in found[1:]:
        torch.testing.assert_close(got, found[0])


@check(2, thorough=(1, 3))
def opcheck(group: dist.ProcessGroup) -> None:
    for case in {case.operator: case for case in reversed(CASES)}.values():  # the first one of each
        own = drawn(case, group.size(), torch.float32)[group.rank()]
        torch.library.opcheck(getattr(torch.ops.peerlane, case.operator).default, (*case.schema(own), *case.settings, group.group_name))


def sharded_loss(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a loss of a DTensor, and the gradient of this rank's part of it."""
    assert isinstance(y, DTensor)
    whole = torch.randn(y.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    seed = distribute_tensor(whole, y.device_mesh, y.placements, src_data_rank=None)
    return (y * seed).sum(), seed.to_local()


@check(1, 2, 3)
def dtensors(group: dist.ProcessGroup) -> None:
    mesh, rank = DeviceMesh.from_group(group, "cpu"), group.rank()
    for case in CASES:
        if case.operator not in SHARDINGS:
            continue
        sharding = SHARDINGS[case.operator]
        values = drawn(case, group.size(), torch.float64)
        terms = case.keywords or tuple(sharding.terms)  # those of one case are all that there are
        placements = [*sharding.inputs, *(sharding.terms[name] for name in terms)][: len(values[0])]
        for number, placement in enumerate(placements):
            if isinstance(placement, Replicate):
                for other in values[1:]:
                    other[number] = values[0][number]
        results = case.whole(values)
        own = [value.detach().requires_grad_() if value.is_floating_point() else value for value in values[rank]]
        shards = [
            DTensor.from_local(value, mesh, [placed(placement, value.ndim)]) for value, placement in zip(own, placements, strict=True)
        ]
        call = case.call(None if group.size() == dist.get_world_size() else group)
        y = call(*shards)
        assert isinstance(y, DTensor) and y.placements == (placed(sharding.result, y.ndim),), (case.name, y.placements)
        torch.testing.assert_close(y.to_local(), results[rank])
        loss, seed = sharded_loss(y)
        loss.backward()
        seeds = [torch.empty_like(seed) for _ in results]
        dist.all_gather(seeds, seed.contiguous(), group=group)
        if isinstance(sharding.result, Replicate):  # one loss
            seeds = [seeds[0], *(torch.zeros_like(other) for other in seeds[1:])]
        expected = gradients(results, values[rank], seeds)
        for got, want in zip([value.grad for value in own if value.requires_grad], expected, strict=True):
            torch.testing.assert_close(got, want, msg=lambda text, name=case.name: f"{name}: {text}")
        if isinstance(sharding.inputs[0], Shard):  # an input that lies otherwise is redistributed
            other = call(shards[0].redistribute(placements=[Replicate()]), *shards[1:])
            torch.testing.assert_close(other.to_local(), results[rank])


@check(4)
def two_dimensional_mesh(group: dist.ProcessGroup) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    generator = torch.Generator().manual_seed(5)
    a, b = (torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in ((8, 3, 4), (4, 6)))
    for name in ("gemm_reduce_scatter", "gemm_all_reduce"):
        for rows in (Shard(0), Shard(1), Replicate()):
            if name == "gemm_reduce_scatter" and rows == Shard(1):
                continue
            left, right = (value.detach().requires_grad_() for value in (a.transpose(0, 1)[:2] if rows == Shard(1) else a, b))
            shards = (
                distribute_tensor(left, mesh, [rows, Shard(2)]).requires_grad_(),
                distribute_tensor(right, mesh, [Replicate(), Shard(0)]).requires_grad_(),
            )
            y, plain = getattr(ops, name)(*shards, mesh["tp"]), torch.matmul(left, right)
            assert isinstance(y, DTensor) and y.placements[0] == rows
            torch.testing.assert_close(y.full_tensor(), plain)
            loss, _ = sharded_loss(y)
            seed = torch.randn(y.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
            expected = torch.autograd.grad(plain, (left, right), seed)
            for got, want in zip(torch.autograd.grad(loss, shards), expected, strict=True):
                torch.testing.assert_close(got.full_tensor(), want)


@check(1, 2, 3)
def styles(group: dist.ProcessGroup) -> None:
    mesh, width = DeviceMesh.from_group(group, "cpu"), 6
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(width, 12), torch.nn.GELU(), torch.nn.Linear(12, width)).double()
    x = torch.randn(2, 6, width, dtype=torch.float64)
    seed = torch.randn(2, 6, width, dtype=torch.float64)
    for layout in (Replicate(), Shard(0) if group.size() < 3 else Shard(1), Shard(1)):
        for compiles in (False, True) if group.size() == 2 and layout == Shard(1) else (False,):
            model = parallelize_module(
                copy.deepcopy(plain), mesh, {"0": ColwiseParallel(input_layouts=layout), "2": RowwiseParallel(output_layouts=layout)}
            )
            torch._dynamo.reset()
            call = torch.compile(model, fullgraph=True, backend="aot_eager") if compiles else model
            own, part = (distribute_tensor(value, mesh, [layout], src_data_rank=None).to_local() for value in (x, seed))
            own = own.clone().requires_grad_()
            y = call(own)
            (y * part).sum().backward()
            whole = x.clone().requires_grad_()
            plain.zero_grad()
            (plain(whole) * seed).sum().backward()
            expected = distribute_tensor(whole.grad, mesh, [layout], src_data_rank=None).to_local()
            torch.testing.assert_close(own.grad, expected)
            for (name, got), want in zip(model.named_parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(got.grad.full_tensor(), want.grad, msg=lambda text, name=name: f"{name}: {text}")
    gathered = parallelize_module(copy.deepcopy(plain), mesh, {"0": ColwiseParallel(output_layouts=Replicate())})
    torch.testing.assert_close(gathered(x), plain(x))


check(2, thorough=(1, 3, 4))(layers.layers_train_as_whole_ones)
check(4)(layers.layers_are_drawn_again_and_load_whole_ones)
check(4)(layers.layers_are_saved)
check(2)(layers.layers_compile_and_take_no_tokens)


@check(1, 3)
def unequal_parts(group: dist.ProcessGroup) -> None:
    """On torch.distributed: results and gradients, in bfloat16 too, and what is refused on all ranks."""
    rank, sizes = group.rank(), [2, 0, 3][: group.size()]
    wide, own = torch.arange(4.0 * sum(sizes), device=DEVICE).view(-1, 4), sizes[rank]
    for dtype in (torch.float32, torch.bfloat16):
        whole = wide.to(dtype).clone().requires_grad_()
        x = whole.detach().split(sizes)[rank].clone().requires_grad_()
        gathered = ops.all_gatherv(x, sizes, group)
        gathered.backward(whole.detach() + rank)
        assert torch.equal(gathered, whole) and x.grad is not None
        assert torch.equal(x.grad, (group.size() * whole.split(sizes)[rank] + sum(range(group.size()))).to(dtype))
        for op, share in (("sum", 1), ("avg", group.size())):
            whole.grad = None
            part = ops.reduce_scatterv(whole, sizes, group, reduce_op=op)
            part.backward(torch.full_like(part, 3.0))
            assert torch.equal(part, (whole.split(sizes)[rank] * group.size() / share).to(dtype)) and whole.grad is not None
            assert torch.equal(whole.grad, torch.full_like(whole, 3.0 / share))
        assert torch.equal(ops.reduce_scatterv(wide + rank, sizes, group, reduce_op="max"), wide.split(sizes)[rank] + group.size() - 1)
    for call in (lambda: ops.all_gatherv(wide.new_ones(own + 1, 4), sizes, group), lambda: ops.reduce_scatterv(wide, [*sizes, 1], group)):
        with pytest.raises(UsageError, match="from 0 on, the same on all ranks"):
            call()


@check(thorough=(2,))
def compiled_with_fused_sums(group: dist.ProcessGroup) -> None:
    """By the compiler itself: a Llama of two layers has the losses of the eager one."""
    from peerlane.ops.fusion import AllReduceFusion  # which imports the compiler

    fuse, tokens = AllReduceFusion(), torch.arange(12, device=DEVICE).view(2, 6) % 7
    model = Llama(group.rank(), group.size(), lambda x: functional.all_reduce(x, "sum", group)).to(DEVICE)
    with torch.no_grad():
        eager = model(tokens)
        loss = torch.compile(model, fullgraph=True, options={"post_grad_custom_post_pass": fuse})(tokens)
    assert fuse.found == {"all_reduce_rms_norm": 4, "gemm_all_reduce": 0}
    assert abs(float(loss - eager)) < 0.02 * float(eager)


@check(1, 2, 3, thorough=(2, 4))
def replicated_losses(group: dist.ProcessGroup) -> None:
    """Of one loss that all ranks compute, gradients are those of one place."""
    for case in CASES:
        if case.operator not in ("all_reduce", "all_gather", "gemm_all_reduce", "gemm_all_gather") or case.keywords:
            continue
        values = drawn(case, group.size(), torch.float64)
        results = case.whole(values)
        own = [value.detach().requires_grad_() for value in values[group.rank()]]
        y = case.call(group)(*own, gradient="replicated")
        seed = seed_like(y, 3)
        expected = torch.autograd.grad(results[0], values[group.rank()], seed)
        for got, want in zip(torch.autograd.grad(y, own, seed), expected, strict=True):
            torch.testing.assert_close(got, want, msg=lambda text, name=case.name: f"{name}: {text}")
    x = torch.full((2,), 3.0, requires_grad=True, device=DEVICE)
    (ops.replicate(x, group) * (group.rank() + 1)).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [sum(range(1, group.size() + 1))] * 2


@check(1, 2, 3)
def dispatch_and_combine(group: dist.ProcessGroup) -> None:
    """Every token's rows are changed by its experts' factors, added with weights, and come home; gradients are those of one place."""
    ranks, rank, own, tokens, k, width = group.size(), group.rank(), 2, (5, 3, 0), 2, 8
    for dtype, limit, alignment in ((torch.float64, 1e-12, 1), (torch.float32, 1e-5, 4), (torch.bfloat16, 3e-2, 1)):
        generator = torch.Generator().manual_seed(4)
        given = []
        for count in tokens[:ranks]:
            topk_idx = torch.rand(count, ranks * own, generator=generator).topk(k).indices
            topk_idx[:1, 0] = -1
            drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((count, width), (count, k), (count, width))]
            given.append((topk_idx.to(DEVICE), *(value.to(DEVICE) for value in drawn)))
        factor = torch.randn(ranks * own, generator=generator, dtype=torch.float64).to(DEVICE)
        config = ops.DispatchConfig(ranks * own, 6, expert_alignment=alignment, num_sms=2)

        def call(x: torch.Tensor, topk_idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            rows, of_rows, handle = ops.dispatch(x, topk_idx, weights, config, group=group)  # noqa: B023
            assert of_rows is not None
            expert = (torch.arange(len(rows), device=x.device).unsqueeze(1) >= handle.ends).sum(1).clamp(max=own - 1)
            again, _, _ = ops.dispatch(x, handle=handle)
            factors = factor[rank * own + expert].unsqueeze(1).to(x.dtype)  # noqa: B023
            return ops.combine((rows + again) * factors, handle, of_rows)

        compiles = dtype == torch.float32 and ranks == 2
        for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")) if compiles else (call,):
            topk_idx, x, weights, seed = given[rank]
            wide = [value.requires_grad_() for value in (x.clone(), weights.clone())]
            mine = [value.detach().to(dtype).requires_grad_() for value in wide]
            slots = torch.where(topk_idx >= 0, factor[topk_idx.clamp(min=0)], 0)
            want = 2 * wide[0] * (wide[1] * slots).sum(1, keepdim=True)
            y = function(mine[0], topk_idx, mine[1])
            found = (y, *torch.autograd.grad(y, mine, seed.to(dtype)))
            for got, wanted in zip(found, (want, *torch.autograd.grad(want, wide, seed)), strict=True):
                error, size = (float(value.detach().norm()) for value in (got.double() - wanted, wanted))
                assert error <= limit * size, (dtype, alignment)


@check(1, 2)
def dispatch_in_fp8(group: dist.ProcessGroup) -> None:
    topk_idx = torch.tensor([[0, 1], [1, -1], [2 * group.size() - 1, 0]], device=DEVICE)
    config = ops.DispatchConfig(2 * group.size(), 3)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(group.rank())).bfloat16().to(DEVICE)
    wanted, _, plain = ops.dispatch(x, topk_idx, None, config, group=group)
    rows, scales, none, handle = ops.dispatch_fp8(x, topk_idx, None, config, group=group)
    assert none is None and torch.equal(handle.sources, plain.sources) and rows.dtype == torch.float8_e4m3fn
    end = int(handle.ends[-1])
    got = rows[:end].float().view(end, 2, 128) * scales[:end].unsqueeze(2)
    largest = wanted[:end].float().view(end, 2, 128).abs().amax(2)
    torch.testing.assert_close(scales[:end], largest / 448)
    torch.testing.assert_close(got.view(end, 256), wanted[:end].float(), rtol=2**-4, atol=float(largest.max()) / 448 * 2**-9)


@check(1, 2)
def products_in_fp8(group: dist.ProcessGroup) -> None:
    rank, world, name, of_torch = group.rank(), group.size(), group.group_name, torch.ops.peerlane

    def drawn(*shape: int, seed: int) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)

    for left, right in (("tensor", "row"), ("block", "square")):
        x, w = (
            [ops.quantize_fp8(drawn(rows, 144, seed=seed + q), by) for q in range(world)]
            for rows, by, seed in ((2 * world, left, 0), (24, right, 9))
        )
        decoded = [[Quantised(*pair).float() for pair in pairs] for pairs in (x, w)]
        (a, a_scales), (b, b_scales) = x[rank], w[rank]
        whole, total = torch.cat(decoded[0]), sum(one @ other.t() for one, other in zip(*decoded, strict=True))
        given, bias = (b.t(), b_scales.t()), torch.ones(24, device=DEVICE, dtype=torch.bfloat16)
        outs = ops.row_gather_gemm_fp8(a, a_scales, [given[0]] * 2, [given[1]] * 2, [bias, -bias], scale=0.5, group=group)
        found = [(outs[1], 0.5 * whole @ decoded[1][rank].t() - 1)]
        found += [(ops.gemm_reduce_scatter_fp8(a, a_scales, *given, group, activation="relu"), total.chunk(world)[rank].relu())]
        found += [(ops.gemm_all_reduce_fp8(a, a_scales, *given, group, dtype=torch.float16, promoted=True), total)]
        for got, wanted in found:
            torch.testing.assert_close(got.float(), wanted, rtol=2**-7, atol=2**-7 * float(wanted.abs().max()))
        call = (a, a_scales, *given, None, None, "none", 1.0, False, torch.bfloat16, name)
        for operator, arguments in (
            (of_torch.gemm_reduce_scatter_fp8, call),
            (of_torch.gemm_all_reduce_fp8, call),
            (of_torch.row_gather_gemm_fp8, (*call[:2], [given[0]], [given[1]], [], *call[6:])),
            (of_torch.quantize_fp8, (drawn(3, 4, 16, seed=0), left, True, name)),
            (of_torch.quantize_rows_fp8, (drawn(4, 32, seed=0), "row", True, name)),
            (of_torch.grouped_gemm_fp8, (*call[:2], given[0][None], given[1][None], torch.tensor([2], dtype=torch.int32), *call[8:])),
        ):  # its other checks compare tensors, which torch cannot in e4m3
            torch.library.opcheck(operator.default, arguments, test_utils="test_faketensor")
        with pytest.raises(UsageError, match=r"with scales .* expected \(m, k\) and \(k, n\) in torch.float8_e4m3fn"):
            ops.gemm_all_reduce_fp8(a, a_scales[:1, :0], *given, group)


@check(1, 2)
def experts_in_fp8(group: dist.ProcessGroup) -> None:
    """A layer of experts as docs/ops.md has it, beside the same layer in float32."""
    hidden, inner, own, topk_idx = 256, 128, 2, torch.tensor([[0, 1], [1, -1], [2 * group.size() - 1, 0]], device=DEVICE)
    weights, config = torch.full((3, 2), 0.5, device=DEVICE), ops.DispatchConfig(2 * group.size(), 3)
    generator = torch.Generator().manual_seed(0)
    up, down = (torch.randn(own * group.size(), *shape, generator=generator) / 16 for shape in ((2 * inner, hidden), (hidden, inner)))
    x = torch.randn(3, hidden, generator=generator).bfloat16().to(DEVICE)
    up, down, first = up.to(DEVICE), down.to(DEVICE), own * group.rank()
    (up8, up_scales), (down8, down_scales) = (ops.quantize_fp8(w[first : first + own], "square", group=group) for w in (up, down))

    rows, scales, of_rows, handle = ops.dispatch_fp8(x, topk_idx, weights, config, group=group)
    both = ops.grouped_gemm_fp8(rows, scales, up8.mT, up_scales.mT, handle.ends, group=group)
    middle, middle_scales = ops.quantize_fp8(both, "block", gated=True, group=group)
    y = ops.combine(ops.grouped_gemm_fp8(middle, middle_scales, down8.mT, down_scales.mT, handle.ends, group=group), handle, of_rows)

    wanted = torch.zeros(3, hidden, device=DEVICE)
    for token, expert in topk_idx.ge(0).nonzero().tolist():
        gate, linear = (up[topk_idx[token, expert]] @ x[token].float()).chunk(2)
        wanted[token] += 0.5 * (down[topk_idx[token, expert]] @ (torch.nn.functional.silu(gate) * linear))
    assert float((y.float() - wanted).norm()) <= 0.08 * float(wanted.norm())  # three roundings to e4m3, 2^-5 of a number on average


@check(1, 2, 3)
def norms_of_sharded_rows(group: dist.ProcessGroup) -> None:
    """The example of docs/ops.md, and the same in e4m3, beside all of it in one place."""
    page = (Path(__file__).parents[2] / "docs" / "ops.md").read_text()
    example = page.split("## Norms of sharded rows")[1].split("```python")[1].split("```")[0]
    ranks, rank, hidden = group.size(), group.rank(), 128
    draw = torch.Generator().manual_seed(0)
    inner, down, own = (
        torch.randn(ranks, *shape, generator=draw, dtype=torch.float64) for shape in ((3 * ranks, 5), (5, hidden), (3, hidden))
    )
    gain, up = (torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in ((hidden,), (hidden, 7)))
    of_group = {name: functools.partial(getattr(ops, name), group=group) for name in ("reduce_scatter_rms_norm",)}
    given = {"inner": inner[rank], "down": down[rank], "residual": own[rank], "gain": gain, "up": up, "ops": SimpleNamespace(**of_group)}
    exec(example, given)
    total = (inner @ down).sum(0) + own.flatten(0, 1)
    norm = F.rms_norm(total, (hidden,), gain, 1e-6)
    mine = slice(3 * rank, 3 * rank + 3)
    torch.testing.assert_close(given["z"], norm @ up)
    torch.testing.assert_close(given["residual"], total[mine])
    for gathers in (False, True):
        for by in ("row", "block"):
            y, part, scales = ops.reduce_scatter_rms_norm_fp8(
                inner[rank] @ down[rank], gain, own[rank], gathers=gathers, by=by, group=group
            )
            want = norm if gathers else norm[mine]
            torch.testing.assert_close(part, total[mine])
            torch.testing.assert_close(scales.double(), want.abs().amax(1, keepdim=True) / 448, rtol=1e-5, atol=0)
            assert ((y.double() * scales - want).abs() <= 0.07 * want.abs() + 2**-9 * scales).all()
    with pytest.raises(UsageError, match=r"reduce_scatter_rms_norm got x .* residual .* expected"):
        ops.reduce_scatter_rms_norm(inner[rank] @ down[rank], gain, own[rank][:1], group=group)
    half = torch.ones(2 * ranks, 128)
    own_op = torch.ops.peerlane.reduce_scatter_rms_norm.default
    torch.library.opcheck(own_op, (half, half[0].clone(), None, True, 1e-6, "block", group.group_name))


@check(2, thorough=(1, 3))
def dispatch_and_combine_obey_torch(group: dist.ProcessGroup) -> None:
    sizes, x, weights = (2, 3, 16, 4, 0), torch.randn(3, 8, requires_grad=True), torch.rand(3, 2, requires_grad=True)
    topk_idx = torch.tensor([[0, 1], [1, -1], [2 * group.size() - 1, 0]])
    of_torch, name = torch.ops.peerlane, group.group_name
    torch.library.opcheck(of_torch.dispatch.default, (x, topk_idx, weights, sizes, name))
    torch.library.opcheck(of_torch.dispatch_fp8.default, (torch.randn(3, 256), topk_idx, weights.detach(), sizes, name))
    *_, sources = of_torch.dispatch(x, topk_idx, weights, sizes, name)
    torch.library.opcheck(of_torch.dispatch_again.default, (x, topk_idx, sources, sizes, name))
    rows, of_rows = torch.randn(16, 8, requires_grad=True), torch.rand(16, requires_grad=True)
    torch.library.opcheck(of_torch.combine.default, (rows, of_rows, None, topk_idx, sources, sizes, name))
    torch.library.opcheck(of_torch.combine.default, (rows, None, of_rows.detach(), topk_idx, sources, sizes, name))


@check(2)
def different_calls_are_told(group: dist.ProcessGroup) -> None:
    os.environ["PEERLANE_CHECK"] = "1"
    try:
        ops.all_reduce(torch.ones(3), group)
        with pytest.raises(
            UsageError, match=r"rank 0: all_reduce sum\(\(4,\) float32\) at .*on_ranks.py:\d+\n  rank 1: all_reduce sum\(\(5,\)"
        ):
            ops.all_reduce(torch.ones(4 + group.rank()), group)
        with pytest.raises(UsageError, match=r"rank 0: all_gather.*\n  rank 1: all_reduce"):
            (ops.all_reduce if group.rank() else ops.all_gather)(torch.ones(4), group)
    finally:
        del os.environ["PEERLANE_CHECK"]


@check(2, 4)
def forgotten_groups_are_told_once(group: dist.ProcessGroup) -> None:
    """Of group=None where this process is in smaller groups; a group of all ranks is no forgotten one."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    groups._log.addHandler(handler)
    groups._groups_seen = 0
    ops.all_reduce(torch.ones(3), group)
    assert not told
    if group.size() == RANKS:
        for _ in range(2):
            ops.all_reduce(torch.ones(3))
        smaller = [known for known in dist.distributed_c10d._world.pg_map if 1 < known.size() < RANKS]
        assert len(told) == bool(smaller)  # the last rank is in none but those of meshes that other checks made
        assert all("on_ranks.py:" in line and "all 4 ranks; this process has groups of" in line for line in told)
        gone = dist.new_group()
        dist.destroy_process_group(gone)
        with pytest.raises(UsageError, match="expected a group that is not destroyed"):
            ops.all_reduce(torch.ones(3), gone)
    groups._log.removeHandler(handler)


@check(2)
def wrong_shapes_are_told_alike(group: dist.ProcessGroup) -> None:
    """Before anything is exchanged, and by the compiler too."""
    x = torch.ones(3, 4)
    for message, call in {
        "tensor without axes": lambda: ops.all_gather(torch.tensor(1.0), group),
        "expected rows that 2 ranks share equally": lambda: ops.reduce_scatter(x, group),
        "all_to_all got shape": lambda: ops.all_to_all(torch.tensor(1.0), group),
        "share equally; pad it": lambda: ops.gemm_reduce_scatter(x, torch.ones(4, 2), group),
        "k / 2": lambda: ops.all_gather_gemm(x, torch.ones(4, 2), group),
        "two or more axes": lambda: ops.gemm_all_reduce(torch.ones(4), torch.ones(4, 2), group),
        "one floating-point dtype": lambda: ops.gemm_all_reduce(x, torch.ones(4, 2).double(), group),
        "'summed' or 'replicated'": lambda: ops.all_reduce(x, group, gradient="other"),  # type: ignore[arg-type]
        "got 3 tokens: expected at most num_max_tokens_per_rank=2": lambda: ops.dispatch(
            x, torch.zeros(3, 1, dtype=torch.int64), None, ops.DispatchConfig(2, 2), group=group
        ),
        "expected a multiple of 2 experts": lambda: ops.dispatch(
            x, torch.zeros(3, 1, dtype=torch.int64), None, ops.DispatchConfig(3, 3), group=group
        ),
        "gated_experts got x": lambda: ops.gated_experts(*[torch.ones(2)] * 6, group),
        "axes of": lambda: ops.ring_attention(*[x] * 3, group=group),
    }.items():
        pattern = "batch, tokens" if message == "axes of" else message
        with pytest.raises(UsageError, match=pattern):
            call()
        with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(UsageError, match=pattern):
            call()
    with pytest.raises(UsageError, match="expected a dense one"):
        ops.all_reduce(x.to_sparse(), group)


def main(names: Sequence[str], thorough: bool) -> None:
    folder, children = tempfile.mkdtemp(), []
    node = share_gpus(RANKS, torch.cuda.device_count()) if DEVICE.type == "cuda" else None
    with contextlib.nullcontext() if node is None else node.daemon() as daemon:
        for rank in range(RANKS):
            if (child := os.fork()) == 0:
                code = 1
                try:
                    os.environ |= {} if node is None else node.rank_environment(rank, daemon)
                    code = run_rank(rank, folder, names, thorough)
                finally:
                    os._exit(code)
            children.append(child)
        wait_for(children)
    found: dict[str, str | None] = dict.fromkeys(names, "did not run")
    for rank in range(RANKS):
        file = Path(folder, f"{rank}.json")
        for name, failure in json.loads(file.read_text() if file.exists() else "{}").items():
            if found[name] in (None, "did not run"):
                found[name] = failure and f"rank {rank}: {failure}"
    print(json.dumps(found))


def wait_for(children: list[int]) -> None:
    """Waits for all ranks; ends the others soon after one has failed, for they would wait for it."""
    while children:
        child, status = os.wait()
        if child not in children:  # the daemon's
            continue
        children.remove(child)
        if status:
            time.sleep(1)
            for other in children:
                os.kill(other, signal.SIGKILL)


def run_rank(rank: int, folder: str, names: Sequence[str], thorough: bool) -> int:
    torch.set_num_threads(1)
    if DEVICE.type == "cuda":
        torch.cuda.set_device(rank * torch.cuda.device_count() // RANKS)
    warnings.simplefilter("ignore", FutureWarning)  # of torch.distributed, about names of its next version
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    groups = {size: dist.new_group(list(range(size))) for size in range(1, RANKS + 1)}
    found: dict[str, str | None] = {}
    file = Path(folder, f"{rank}.json")
    for name in names:
        start = time.monotonic()
        try:
            checked, sizes, more = CHECKS[name]
            for size in more if thorough else sizes:
                if rank < size:
                    checked(groups[size])
        except BaseException:
            found[name] = traceback.format_exc()
            file.write_text(json.dumps(found))
            return 1  # the other ranks cannot go on either
        found[name] = None
        if rank == 0:
            print(f"{name}: {time.monotonic() - start:.1f} s", file=sys.stderr)
    file.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    asked = [name for name in sys.argv[1:] if not name.startswith("--")]
    main(asked or [name for name in CHECKS if name != "in_graphs" or DEVICE.type == "cuda"], "--thorough" in sys.argv)
