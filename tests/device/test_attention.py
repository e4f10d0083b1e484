"""Attention on one rank: within its registers and shared memory, right numbers in the emulator, and broken twins are caught."""

import itertools
import math
from functools import partial

import pytest
import torch

from device.runs import Run, run_calls
from device.twins import use_twin
from peerlane.device.attention import forward as kit
from peerlane.device.attention.forward import MAX_DEPTH, TILINGS, AttentionTiling, attention, choose_tiling
from peerlane.device.attention.shards import PARCEL_BYTES, PARCELS
from peerlane.device.host.jit import compiler_report
from peerlane.device.host.roles import SHARED_LIMIT_BYTES, BlockNeeds
from peerlane.errors import UsageError
from representatives import first

BF16, FP16 = torch.bfloat16, torch.float16


def operands(
    queries: int, keys: int, *, heads: int = 1, key_heads: int = 1, depth: int = 64, value_depth: int = 64, dtype: torch.dtype = BF16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(queries + keys)
    shapes = (queries, heads, depth), (keys, key_heads, depth), (keys, key_heads, value_depth)
    q, k, v = (torch.randn(1, *shape, generator=generator).to(dtype) for shape in shapes)
    return 2 * q, k, v


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 attention and logarithms of sums of exponentials."""
    heads = q.shape[2]
    q, k, v = (tensor.transpose(1, 2).double() for tensor in (q, k, v))
    k, v = (tensor.repeat_interleave(heads // tensor.shape[1], 1) for tensor in (k, v))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        scores.masked_fill_(torch.ones_like(scores[0, 0], dtype=torch.bool).triu_(1 + k.shape[2] - q.shape[2]), -math.inf)
    logarithms = scores.logsumexp(-1)
    return (torch.exp(scores - logarithms.unsqueeze(-1)).nan_to_num(0.0) @ v).transpose(1, 2), logarithms


def run(tensors: tuple[torch.Tensor, ...], *, scale: float | None = None, causal: bool, tiling: AttentionTiling | None = None) -> Run:
    return run_calls(lambda rank: partial(attention, scale=scale, causal=causal, tiling=tiling), [[tensors]])


def error(run: Run, tensors: tuple[torch.Tensor, ...], *, scale: float | None = None, causal: bool) -> float:
    """Of the results, relative to their norm, and of logarithms, whichever is larger."""
    if run.failure is not None:
        raise run.failure
    out, logarithms = run.outputs[0][0]
    wanted, wanted_logarithms = expected(*tensors, scale, causal)
    finite = wanted_logarithms.isfinite()
    assert torch.equal(finite, logarithms.isfinite())
    return max(float((out - wanted).norm() / wanted.norm()), float((logarithms - wanted_logarithms)[finite].abs().max()))


CASES = {
    "causal, heads share keys, both ends ragged": (operands(70, 130, heads=2), True, None),
    "a block that all of a tile's queries miss": (operands(72, 40), True, None),
    "narrow heads of two depths, scaled": (operands(20, 70, depth=16, value_depth=8), False, 0.3),
}
SLOW = {
    "two groups in turns": (operands(130, 200, depth=128, value_depth=128, dtype=FP16), True, None),
    "deep heads": (operands(70, 130, depth=96, value_depth=128), False, None),
    "one query": (operands(1, 1), True, None),
}


@pytest.mark.parametrize("name", [*CASES, *SLOW])
def test_attention_is_right_and_nothing_in_it_is_unordered(name: str) -> None:
    tensors, causal, scale = {**CASES, **SLOW}[name]
    tiling = None if name in SLOW else AttentionTiling(1, 64, 64, 3)
    found = run(tensors, scale=scale, causal=causal, tiling=tiling)
    found.clean()
    assert error(found, tensors, scale=scale, causal=causal) < 3e-3


TWINS = {
    "sum is not rescaled": ("            state.rescale();\n", "", "wrong"),
    "mask off by one": ("query + row(r) + step.diagonal + 1)", "query + row(r) + step.diagonal)", "wrong"),
    "values given back before they are read": (
        "            ptx::wgmma_wait<0>();\n            ptx::wgmma_hold(state.sum.value);\n",
        "",
        "race",
    ),
}


@pytest.mark.parametrize("name", TWINS)
def test_a_twin_with_one_thing_wrong_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    line, instead, kind = TWINS[name]
    use_twin(monkeypatch, kit, "ATTENTION", line, instead, "attention/attention.cuh")
    tensors = operands(70, 200)
    found = run(tensors, causal=True, tiling=AttentionTiling(1, 64, 64, 2))
    if kind == "wrong":
        assert error(found, tensors, causal=True) > 0.01
    else:
        assert kind in found.kinds


@pytest.mark.parametrize("tiling", first(TILINGS, 5), ids=str)
def test_kernels_keep_to_their_registers_and_their_shared_memory(tiling: AttentionTiling) -> None:
    causal = tiling.groups == 3 or tiling.keys == 128  # each with what it is chosen for
    layout = f"static_assert(sizeof(RoleMemory<AttentionRoles<Shape, CAUSAL, Attention>>) == {tiling.shared_bytes});\n"
    layout += f"static_assert(Shape::roles.threads() == {tiling.threads});\n"
    report = compiler_report(kit.ATTENTION.source + layout, defines=kit.defines(tiling, BF16, causal))
    spilled = int(report.split(" bytes spill stores")[0].split()[-1])
    assert spilled <= (16 if tiling.groups == 3 else 0) and "Potential Performance Loss" not in report  # three groups: 160 registers each
    registers = int(report.split("Used ")[1].split()[0])
    assert BlockNeeds(tiling.threads, registers, tiling.shared_bytes).per_sm() >= 1


@pytest.mark.parametrize("depth", range(8, MAX_DEPTH + 1, 8))
def test_every_depth_has_tiles(depth: int) -> None:
    for queries, keys, parcels in itertools.product((1, 64, 65, 4096), (1, 4096), (False, True)):
        for causal in (False, True):
            tiling = choose_tiling(queries, keys, depth, causal, parcels=parcels)
            assert tiling.depth >= depth and (tiling.groups == 1) == (queries <= 64)
            assert tiling.shared_bytes + parcels * PARCELS * PARCEL_BYTES <= SHARED_LIMIT_BYTES and tiling.groups <= 3 - parcels


@pytest.mark.parametrize(
    ("tensors", "scale", "says"),
    [
        (operands(4, 4, depth=256), None, r"expected depths that are multiples of 8 up to 128"),
        (operands(4, 4, depth=12), None, r"pad them with zeros"),
        (operands(4, 4, dtype=torch.float32), None, r"convert the tensors"),
        (operands(4, 4, heads=3, key_heads=2), None, r"heads of q a multiple of k's"),
        (operands(4, 4), -1.0, r"a softmax scale of -1.0"),
    ],
)
def test_what_there_is_no_kernel_for_is_said(tensors: tuple[torch.Tensor, ...], scale: float | None, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        run(tensors, scale=scale, causal=False).clean()
