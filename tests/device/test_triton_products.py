"""Products of Triton on an emulated rank: every path of the compiler to tensor cores gives the right numbers, without a race."""

# Device functions have no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

import pytest
import torch
import triton
import triton.language as tl

from device.runs import run_call


@triton.jit
def product(a, b, c, K, M: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, TURNED: tl.constexpr):
    rows, columns, ks = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, BLOCK)
    total = tl.zeros((M, N), tl.float32)
    for k in range(0, K, BLOCK):
        left = tl.load(a + rows * K + (k + ks)[None, :])
        right = tl.load(b + columns * K + (k + ks)[:, None]) if TURNED else tl.load(b + (k + ks)[:, None] * N + columns)
        total = tl.dot(left, right, total)
    tl.store(c + rows * N + columns, total)


CASES = {
    "mma_bf16": (torch.bfloat16, 16, 16, 32, 1, False),
    "mma_fp16_turned": (torch.float16, 32, 16, 32, 2, True),
    "mma_tf32": (torch.float32, 16, 16, 16, 1, False),
    "wgmma_fp16": (torch.float16, 64, 32, 64, 4, False),
    "wgmma_bf16_turned": (torch.bfloat16, 64, 64, 32, 4, True),
}


@pytest.mark.parametrize("name", [name if name == "wgmma_fp16" else pytest.param(name, marks=pytest.mark.slow) for name in CASES])
def test_products_of_triton_are_exact_on_whole_numbers(name: str) -> None:
    dtype, m, n, block, warps, turned = CASES[name]
    torch.manual_seed(0)
    a, b = (torch.randint(-3, 4, shape).to(dtype) for shape in ((m, 3 * block), (3 * block, n)))

    def solution(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        c = torch.zeros(m, n)
        product[(1,)](a, b.T.contiguous() if turned else b, c, a.shape[1], m, n, block, turned, num_warps=warps, num_stages=2)
        return c

    (c,) = run_call(solution, [(a, b)], schedules=3)
    assert torch.equal(c, a.float() @ b.float())
