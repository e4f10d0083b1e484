"""Gradients of attention on one rank: within registers and shared memory, right numbers in the emulator, and broken twins are caught."""

from functools import partial

import pytest
import torch

from device.runs import Run, run_calls
from device.test_attention import BF16, FP16, expected, operands
from device.twins import use_twin
from peerlane.device.attention import backward as kit
from peerlane.device.attention import fused_backward as fused
from peerlane.device.attention.backward import TILINGS, BackwardTiling, attention_backward
from peerlane.device.attention.fused_backward import FusedTiling
from peerlane.device.host.jit import compiler_report
from peerlane.device.host.roles import SHARED_LIMIT_BYTES, BlockNeeds
from representatives import first


def run(tensors: tuple[torch.Tensor, ...], causal: bool, schedules: int = 1, ordered: bool = True) -> tuple[Run, float]:
    """What came of it, and the largest error of a gradient, relative to its norm."""
    wide = [tensor.double().requires_grad_() for tensor in tensors]
    out, logarithms = expected(wide[0], wide[1], wide[2], None, causal)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(tensors[0].dtype)
    rounded = out.detach().to(dout.dtype)
    wanted = torch.autograd.grad(out, wide, dout.double())
    differentiate = partial(attention_backward, causal=causal, offset=None, fused=True, ordered=ordered)
    found = run_calls(lambda rank: differentiate, [[(dout, *tensors, rounded, logarithms.detach().float())]], schedules=schedules)
    if found.failure is not None:
        raise found.failure
    pairs = zip(found.outputs[0][0], wanted, strict=True)
    return found, max(float((got - want).norm() / want.norm()) for got, want in pairs)


def far_below_zero(queries: int, keys: int) -> tuple[torch.Tensor, ...]:
    """Operands whose scores are about -128: a key of zeros would weigh more than all others."""
    q, k, v = operands(queries, keys)
    return q / 8 + 16, k / 4 - 1, v


CASES = {
    "causal, heads share keys, both ends ragged": (operands(40, 70, heads=2), True),
    "queries that see no key": (operands(40, 20), True),
    "narrow heads of two depths": (operands(20, 40, depth=16, value_depth=8), False),
}
SLOW = {
    "fused, deep, two tiles of keys": (operands(130, 200, depth=128, value_depth=128, dtype=FP16), True),
    "fused, ragged": (operands(130, 70), False),
    "fused, heads share keys, queries that see no key": (operands(200, 130, heads=2), True),
    "deep heads": (operands(40, 40, depth=96, value_depth=128), False),
}


@pytest.mark.parametrize("name", first([*CASES, *SLOW], len(CASES) + 2))
def test_gradients_are_right_and_nothing_is_unordered(name: str) -> None:
    found, worst = run(*{**CASES, **SLOW}[name])
    found.clean(worst < 6e-3)


TWINS = {
    "delta is left out": ("p.value[i] * (ds.value[i] - ", "p.value[i] * (ds.value[i] + 0.0f * "),
    "mask off by one": ("at <= column + diagonal :", "at < column + diagonal :"),
    "a head less": ("of_keys ? share() * query_blocks(first)", "of_keys ? query_blocks(first)"),
    "blocks given back before they are read": ("            ptx::wgmma_wait<0>();  // products", "            // products"),
}


@pytest.mark.parametrize("name", first(TWINS))
def test_a_twin_with_one_thing_wrong_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_twin(monkeypatch, kit, "ATTENTION_BACKWARD", *TWINS[name], "attention/attention_backward.cuh")
    found, worst = run(operands(40, 70, heads=2), True)
    assert found.faults(worst <= 0.01)


def test_fused_sums_do_not_depend_on_the_schedule() -> None:
    found, worst = run(operands(130, 200), False, schedules=4)
    found.clean(worst < 6e-3)


def test_fused_sums_in_any_order_are_right() -> None:
    _, worst = run(operands(130, 200), False, ordered=False)
    assert worst < 6e-3


def test_keys_past_the_end_do_not_count() -> None:
    found, worst = run(far_below_zero(70, 70), False)
    found.clean(worst < 0.05)  # differences of scores this large lose digits


FUSED_TWINS = {
    "delta is left out": ("p.value[i] * (ds.value[i] - ", "p.value[i] * (ds.value[i] + 0.0f * "),
    "mask off by one": ("key <= column_of(i) + diagonal", "key < column_of(i) + diagonal"),
    "keys past the end count": (" && key < end)", ")"),
    "tiles do not wait for their turn": ("if (ptx::elect_one()) wait_turn(parameters.turns + at, turn);", ""),
    "groups do not wait for each other's ds": ("            ptx::barrier_sync(published, fused_groups * group_threads);\n", ""),
}


@pytest.mark.parametrize("name", first(FUSED_TWINS, 2))
def test_broken_twins_of_the_fused_kernel_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_twin(monkeypatch, fused, "FUSED_ATTENTION_BACKWARD", *FUSED_TWINS[name], "attention/fused_attention_backward.cuh")
    tensors = far_below_zero(70, 70) if "past the end" in name else operands(70, 200)
    found, worst = run(tensors, "past the end" not in name, schedules=4 if "turn" in name else 1)
    assert found.faults(worst < 0.01)


@pytest.mark.parametrize("tiling", first(TILINGS, 4), ids=str)
def test_kernels_keep_to_their_registers_and_their_shared_memory(tiling: BackwardTiling) -> None:
    layout = f"static_assert(sizeof(RoleMemory<AttentionBackwardRoles<Shape, AttentionBackward>>) == {tiling.shared_bytes});\n"
    report = compiler_report(kit.ATTENTION_BACKWARD.source + layout, defines=tiling.defines(BF16))
    assert "0 bytes spill stores, 0 bytes spill loads" in report and "Potential Performance Loss" not in report
    registers = int(report.split("Used ")[1].split()[0])
    assert tiling.groups == 1 or registers == 168  # what the table of roles shares out, and all that the block will ever hold
    assert tiling.shared_bytes <= SHARED_LIMIT_BYTES and BlockNeeds(tiling.threads, registers, tiling.shared_bytes).per_sm() >= 1


@pytest.mark.parametrize("tiling", fused.TILINGS, ids=str)
def test_products_of_the_fused_kernel_do_not_wait_for_each_other(tiling: FusedTiling) -> None:
    layout = f"static_assert(sizeof(RoleMemory<FusedBackwardRoles<Shape, FusedAttentionBackward>>) == {tiling.shared_bytes});\n"
    report = compiler_report(fused.FUSED_ATTENTION_BACKWARD.source + layout, defines=tiling.defines(BF16))
    assert "Potential Performance Loss" not in report and "Used 168 registers" in report
    # Some numbers of a tile, and of the warps that copy, which have few registers.
    assert int(report.split(" bytes spill stores")[0].split()[-1]) <= 120
    assert tiling.shared_bytes <= SHARED_LIMIT_BYTES and BlockNeeds(tiling.threads, 168, tiling.shared_bytes).per_sm() == 1
