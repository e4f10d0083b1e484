"""Small random kernels, the same for the same number on every machine."""

import hashlib
import json
import random
from pathlib import Path

KERNELS, KERNELS_OF_A_MODULE = 200, 20
THREADS, RESULTS = 32, 4
INPUTS = 2 * THREADS

_INTEGERS = (
    "{a} + {b}", "{a} - {b}", "{a} * {b}", "{a} ^ {b}", "{a} & ~{b}", "{a} | {b}", "{a} >> ({b} & 31)", "(int)((u32){a} >> ({b} & 31))",
    "{a} << ({b} & 31)", "min({a}, {b})", "(int)(max((u32){a}, (u32){b}))", "{a} / ({b} | 1)", "(int)((u32){a} % ((u32){b} | 1))",
    "__popc({a}) - __clz({b})", "({a} < {b} ? {a} : ~{b})", "(int)(((long long){a} * {b}) >> 17)", "(int)((u64)(u32){a} * (u32){b} >> 32)",
    "(short){a} * (signed char){b}", "int((unsigned char){a}) + (short){b}", "__shfl_xor_sync(~0u, {a}, {n})",
    "__shfl_sync(~0u, {b}, ({n} + 5) & 31)", "__shfl_up_sync(~0u, {a}, {n} & 7, 16)", "__shfl_down_sync(~0u, {b}, {n} & 3, 8)",
    "(int)(__ballot_sync(~0u, {a} > {b}))", "__any_sync(~0u, {a} == {b}) + 2 * __all_sync(~0u, {a} != {b})",
    "(int)(float({a} % 4096) * 0.125f)",
)  # fmt: skip
_FLOATS = (
    "__fadd_rn({x}, {y})", "__fmul_rn({x}, 0.75f)", "__fmaf_rn({x}, 0.5f, {y})", "fminf({x}, {y})", "fmaxf({x}, -{y})", "fabsf({x})",
    "__fsqrt_rn(fabsf({y}))", "__fdiv_rn({x}, fabsf({y}) + 1.0f)", "float({a} % 1000)", "({x} < {y} ? {x} : -{y})", "truncf({x})",
    "floorf({y})", "rintf({x})",
)  # fmt: skip


_DIGESTS = Path(__file__).with_suffix(".json")


def digest(left: bytes) -> str:
    """Returns a digest of what a kernel leaves in its output."""
    return hashlib.sha256(left).hexdigest()[:16]


def digests() -> list[str]:
    """Returns the committed digests of the emulator, by number of the kernel; tests/gpu/check_random_kernels.py compares a GPU's."""
    return list(json.loads(_DIGESTS.read_text()))


def source(module: int) -> str:
    """Returns the kernels ``random_<number>`` of a module: (const int* in, int* out), one block of 32 threads."""
    first = module * KERNELS_OF_A_MODULE
    kernels = "\n".join(_kernel(number) for number in range(first, first + KERNELS_OF_A_MODULE))
    return f"#include <peerlane/ptx/ptx.cuh>\nusing namespace peerlane;\n{kernels}\n"


def inputs(number: int) -> list[int]:
    """Returns the inputs of a kernel: large, small and equal numbers."""
    draw = random.Random(f"inputs {number}")
    kinds = (lambda: draw.randrange(-(2**31), 2**31), lambda: draw.randrange(-20, 20), lambda: draw.choice((0, 1, -1, 2**31 - 1, -(2**31))))
    return [draw.choices(kinds, (5, 3, 1))[0]() for _ in range(INPUTS)]


def _kernel(number: int) -> str:
    draw = random.Random(f"kernel {number}")
    lines = ["    __shared__ int shared[32], sums[4];", "    const int t = threadIdx.x;", "    int a = in[t], b = in[t + 32], c = t;"]
    lines += ["    float x = float(a % 500), y = float(b % 300) * 0.25f;", "    if (t < 4) sums[t] = 0;", "    __syncthreads();"]
    for _ in range(draw.randrange(4, 9)):
        lines += [f"    {line}" for line in _statement(draw, 0)]
    lines += ["    __syncthreads();", "    int* row = out + 4 * t;", "    row[0] = a;", "    row[1] = b ^ c;"]
    lines += ["    row[2] = __float_as_int(x + y);", "    row[3] = sums[t & 3];"]
    body = "\n".join(lines)
    return f'extern "C" __global__ void random_{number}(const int* in, int* out) {{\n{body}\n}}'


def _statement(draw: random.Random, depth: int) -> list[str]:
    kind = draw.choices(("integer", "float", "branch", "loop", "exchange", "sum"), (5, 3, 2, 1, 2 if depth == 0 else 0, 2))[0]
    if kind == "integer":
        return [f"{draw.choice('abc')} = {_integer(draw, depth)};"]
    if kind == "float":
        # Kept small, so that nothing becomes infinite: NaN has other bits on a CPU.
        return [f"{draw.choice('xy')} = fmaxf(-65536.0f, fminf(65536.0f, {_float(draw)}));"]
    if kind == "branch":
        inner = [f"    {line}" for line in _statement(draw, depth + 1)]
        other = [f"    {line}" for line in _statement(draw, depth + 1)]
        return [f"if ({_integer(draw, 1)} {draw.choice(('<', '==', '>='))} {draw.randrange(-50, 50)}) {{", *inner, "} else {", *other, "}"]
    if kind == "loop":
        inner = [f"    {line}" for line in _statement(draw, depth + 1)]
        return [
            f"for (int i = 0; i < int(u32({draw.choice('abc')}) % {draw.randrange(2, 6)}); ++i) {{",
            *inner,
            f"    c += i * {draw.randrange(9)};",
            "}",
        ]
    if kind == "exchange":
        names = (draw.choice("abc"), draw.randrange(1, 32), draw.choice("abc"))
        return ["__syncthreads();", f"shared[t] = {names[0]};", "__syncthreads();", f"{names[2]} += shared[(t * 5 + {names[1]}) & 31];"]
    return [f"atomicAdd(&sums[{draw.choice('abc')} & 3], {draw.choice('abc')});"]


def _integer(draw: random.Random, depth: int) -> str:
    usable = [text for text in _INTEGERS if depth == 0 or "_sync" not in text]  # all lanes take part in the others
    a, b = draw.choice("abct"), draw.choice("abct")
    return draw.choice(usable).format(a=a, b=b, n=draw.randrange(1, 32))


def _float(draw: random.Random) -> str:
    return draw.choice(_FLOATS).format(a=draw.choice("abc"), x=draw.choice("xy"), y=draw.choice("xy"))
