"""Gradients of attention on one rank: within registers and shared memory, right numbers in the emulator, and broken twins are caught."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from device.test_attention import BF16, FP16, expected, operands
from device.twins import twin
from peerlane.device.attention import backward as kit
from peerlane.device.attention.backward import TILINGS, BackwardTiling
from peerlane.device.emulator import solution_run
from peerlane.device.host.jit import compiler_report
from peerlane.device.host.roles import SHARED_LIMIT_BYTES, BlockNeeds

CALLER = """
from peerlane.device.attention.backward import attention_backward

def solution(dout, q, k, v, out, logarithms, causal, offset):
    return attention_backward(dout, q, k, v, out, logarithms, causal=causal, offset=offset)
"""


def run(folder: Path, tensors: tuple[torch.Tensor, ...], causal: bool) -> tuple[solution_run.Outcome, float]:
    """What came of it, and the largest error of a gradient, relative to its norm."""
    file = folder / "differentiates.py"
    file.write_text(CALLER)
    wide = [tensor.double().requires_grad_() for tensor in tensors]
    out, logarithms = expected(wide[0], wide[1], wide[2], None, causal)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(tensors[0].dtype)
    rounded = out.detach().to(dout.dtype)
    wanted = torch.autograd.grad(out, wide, dout.double())
    outcome = solution_run.run(file, [[(dout, *tensors, rounded, logarithms.detach().float(), causal, None)]], schedules=1)
    if outcome.failure is not None:
        raise outcome.failure[1]
    pairs = zip(outcome.outputs[0][0], wanted, strict=True)
    return outcome, max(float((got - want).norm() / want.norm()) for got, want in pairs)


CASES = {
    "causal, heads share keys, both ends ragged": (operands(40, 70, heads=2), True),
    "queries that see no key": (operands(40, 20), True),
    "narrow heads of two depths": (operands(20, 40, depth=16, value_depth=8), False),
}
SLOW = {
    "two groups, deep": (operands(130, 200, depth=128, value_depth=128, dtype=FP16), True),
    "two groups": (operands(130, 70), False),
    "deep heads": (operands(40, 40, depth=96, value_depth=128), False),
}


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_gradients_are_right_and_nothing_is_unordered(name: str, tmp_path: Path) -> None:
    tensors, causal = {**CASES, **SLOW}[name]
    outcome, worst = run(tmp_path, tensors, causal)
    assert worst < 6e-3 and not outcome.findings, outcome.findings


TWINS = {
    "delta is left out": ("p.value[i] * (ds.value[i] - ", "p.value[i] * (ds.value[i] + 0.0f * "),
    "mask off by one": ("at <= column + diagonal :", "at < column + diagonal :"),
    "a head less": ("of_keys ? share() * query_blocks(first)", "of_keys ? query_blocks(first)"),
    "blocks given back before they are read": ("            ptx::wgmma_wait<0>();  // products", "            // products"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TWINS)
def test_a_twin_with_one_thing_wrong_is_caught(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line, instead = TWINS[name]
    monkeypatch.setattr(kit, "ATTENTION_BACKWARD", twin(kit.ATTENTION_BACKWARD, line, instead, "attention_backward.cuh"))
    outcome, worst = run(tmp_path, operands(40, 70, heads=2), True)
    assert outcome.findings or worst > 0.01


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_kernels_keep_to_their_registers_and_their_shared_memory(tiling: BackwardTiling) -> None:
    layout = f"static_assert(sizeof(RoleMemory<AttentionBackwardRoles<Shape, AttentionBackward>>) == {tiling.shared_bytes});\n"
    report = compiler_report(kit.ATTENTION_BACKWARD.source + layout, defines=kit.defines(tiling, BF16))
    assert "0 bytes spill stores, 0 bytes spill loads" in report and "Potential Performance Loss" not in report
    registers = int(report.split("Used ")[1].split()[0])
    assert tiling.groups == 1 or registers == 168  # what the table of roles shares out, and all that the block will ever hold
    assert tiling.shared_bytes <= SHARED_LIMIT_BYTES and BlockNeeds(tiling.threads, registers, tiling.shared_bytes).per_sm() >= 1
