"""Triton kernels on CPU ranks: an access out of bounds says so."""

from collections.abc import Iterator

import pytest

import peerlane as pl
from peerlane.results.verdict import RuntimeFailure

SCALE = """
import torch
import torch.distributed as dist
import triton
import triton.language as tl

@triton.jit
def copy(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n), mask=at < n)

def solution(tensor):
    x = tensor.clone().contiguous()
    y = torch.empty_like(x)
    copy[(triton.cdiv(x.numel(), 64),)](x, y, x.numel(), BLOCK=64)
    dist.all_reduce(y)
    return y
"""


@pytest.fixture(scope="module")
def evaluator() -> Iterator[pl.Evaluator]:
    with pl.Evaluator(2, "cpu", presets=("small",), modes=()) as evaluator:
        yield evaluator


LOADED = "tl.load(x_ptr + at, mask=at < n)"
TUNED = "@triton.autotune([triton.Config({'BLOCK': 64}, num_warps=warps) for warps in (2, 4)], key=['n'])\n@triton.jit"
RIGHT = {
    "within_its_bounds": pytest.param(SCALE, marks=pytest.mark.slow),
    "arithmetic_on_bfloat16": SCALE.replace(LOADED, f"tl.where({LOADED} > 0, {LOADED} + {LOADED}, -(-{LOADED} + -{LOADED})) * 0.5"),
    "autotuned": SCALE.replace("@triton.jit", TUNED).replace(", BLOCK=64)", ")"),
}


@pytest.mark.parametrize("source", RIGHT.values(), ids=RIGHT)
def test_a_kernel_within_its_bounds_is_correct(evaluator: pl.Evaluator, source: str) -> None:
    result = evaluator.evaluate(1, source, name="1_copy_triton", cases="timed")
    assert result.correct, result.verdict


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("(x_ptr + at, mask=at < n), mask=at < n)", "(x_ptr + at, mask=at < n))", "stores"),
        (LOADED, "tl.load(x_ptr + at + 100000)", "loads"),
    ],
    ids=["store", "load"],
)
def test_an_access_out_of_bounds_is_told_with_its_argument(evaluator: pl.Evaluator, old: str, new: str, says: str) -> None:
    assert old in SCALE
    source = SCALE.replace(old, new).replace("BLOCK=64", "BLOCK=4096")
    verdict = evaluator.evaluate(1, source, name="1_copy_triton", cases="timed").verdict
    assert isinstance(verdict, RuntimeFailure) and says in verdict.message and "out of bounds" in verdict.message, verdict
    assert "argument 'y_ptr'" in verdict.message or "argument 'x_ptr'" in verdict.message
