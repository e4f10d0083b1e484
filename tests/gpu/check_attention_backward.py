"""Gradients of attention on this machine's first GPU: right numbers for many shapes, then the speed beside torch's backward pass.

    PYTHONPATH=src python tests/gpu/check_attention_backward.py [--seconds 55] [--lengths 4096 ...] [--depths 128] [--only dq] [--out FILE]

Gradients are compared with those of float64 attention. A speed is the median of stretches that take turns, in TFLOP/s of the five
products of the mask's pairs that no algorithm can do without. ``kit`` is the whole backward pass by two kernels, ``kit
fused`` by one, whose sums have a fixed order or any; ``share`` is that of the faster one with a fixed order. The script prints every step
before it begins, and ends where a step takes longer than STEP_S. Exits with 1 if something is wrong.
"""

import argparse
import faulthandler
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from check_attention import FP16, HIDDEN, TOKENS, TORCH, expected, milliseconds
from harness import BF16, Row, report, script
from local_ranks import LocalRanks
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from peerlane.device import compile_cubin
from peerlane.device.attention import backward, forward, fused_backward
from peerlane.device.attention.backward import BackwardTiling, choose_tiling, query_numbers
from peerlane.device.attention.forward import Sizes

# batch, queries, keys, heads, key heads, depth, depth of values, causal, dtype; the simplest first
SHAPES = (
    (1, 64, 64, 1, 1, 64, 64, False, BF16),
    (1, 128, 128, 1, 1, 64, 64, False, BF16),
    (2, 256, 256, 4, 4, 128, 128, False, BF16),
    (1, 1000, 1000, 8, 2, 128, 128, True, BF16),
    (3, 333, 777, 6, 1, 64, 64, True, BF16),
    (16, 4, 16, 8, 8, 64, 64, False, BF16),
    (2, 5, 10, 3, 3, 16, 8, True, BF16),
    (1, 130, 2100, 5, 5, 96, 128, False, BF16),
    (1, 2048, 2048, 16, 4, 128, 128, True, BF16),
    (2, 256, 256, 4, 4, 64, 64, True, FP16),
    (2, 777, 333, 2, 2, 128, 128, False, FP16),
    (2, 200, 130, 2, 1, 128, 128, True, FP16),
)
POINTS = tuple((depth, length, causal) for length in (4096, 8192, 16384) for depth in (128, 64) for causal in (False, True))
BEGIN = time.perf_counter()
KERNELS = ("dq", "dkv", "fused")
STEP_S = 15
"""Of one launch and what it is compared with, and of one point of speed. A kernel that waits for itself gives up later."""


def say(text: str) -> None:
    print(f"{time.perf_counter() - BEGIN:6.1f} s  {text}", flush=True)


def compile_one(job: tuple[str, tuple[tuple[str, str | int], ...]]) -> None:
    source, defines = job
    compile_cubin(source, arch="sm_90a", defines=dict(defines))


def compile_ahead() -> None:
    """All kernels of both lists, before this process touches the GPU, by as many processes as there are cores."""
    tilings = set[tuple[BackwardTiling, torch.dtype]]()
    for _, queries, keys, _, _, depth, value_depth, _, dtype in SHAPES:
        tilings |= {(choose_tiling(of_keys, keys if of_keys else queries, max(depth, value_depth)), dtype) for of_keys in (False, True)}
    jobs = {(backward.ATTENTION_BACKWARD.source, tuple(tiling.defines(dtype).items())) for tiling, dtype in tilings}
    for tiling in fused_backward.TILINGS:
        for kernel, dtype in ((tiling, BF16), (tiling, FP16), (replace(tiling, ordered=False), BF16)):
            jobs.add((fused_backward.FUSED_ATTENTION_BACKWARD.source, tuple(kernel.defines(dtype).items())))
    for depth, length, causal in POINTS:
        chosen = forward.defines(forward.choose_tiling(length, length, depth, causal), BF16, causal)
        jobs.add((forward.ATTENTION.source, tuple(chosen.items())))
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), multiprocessing.get_context("fork")) as pool:
        list(pool.map(compile_one, jobs))
    say(f"{len(jobs)} kernels are compiled")


def check(group: Any, shape: tuple[Any, ...], kernels: Sequence[str]) -> list[str]:
    batch, queries, keys, heads, key_heads, depth, value_depth, causal, dtype = shape
    q = torch.randn(batch, queries, heads, depth, device="cuda").to(dtype) * 2
    k, v = (torch.randn(batch, keys, key_heads, d, device="cuda").to(dtype) for d in (depth, value_depth))
    dout = torch.randn(batch, queries, heads, value_depth, device="cuda").to(dtype)
    wide = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    full, logarithms = expected(*wide, causal, depth**-0.5)
    wanted = torch.autograd.grad(full, wide, dout.double())
    out, logarithms = full.detach().to(dtype), logarithms.detach().float().contiguous()
    say(f"{shape}: numbers")
    known = {"q": q, "k": k, "v": v, "dout": dout, "numbers": query_numbers(group, dout, out, logarithms)}
    deltas = (dout.float() * out.float()).sum(-1).transpose(1, 2)
    off = float((known["numbers"][1, :, :, :queries] - deltas).norm() / deltas.norm())
    sizes, limit = Sizes.of(q, k, causal, None), 1e-2 if dtype == BF16 else 2e-3
    told = [] if off < 1e-5 else [f"{shape}: error of deltas {off:.2e}"]
    for kernel, names, wants in (("dq", ("dq",), wanted[:1]), ("dkv", ("dk", "dv"), wanted[1:]), ("fused", ("dq", "dk", "dv"), wanted)):
        if kernel not in kernels:
            continue
        faulthandler.dump_traceback_later(STEP_S, exit=True)
        say(f"{shape}: {kernel}")
        if kernel == "fused":
            results, again = (fused_backward.fused_gradients(group, known, sizes, None) for _ in range(2))
        else:
            results, again = (backward.gradients(group, known, sizes, None, of_keys=kernel == "dkv") for _ in range(2))
        torch.cuda.synchronize()
        for name, got, other, want in zip(names, results, again, wants, strict=True):
            error = float((got.double() - want).norm() / want.norm())
            if not error < limit:
                told.append(f"{shape}: error of {name} {error:.2e}, limit {limit}")
            elif not torch.equal(got, other):
                told.append(f"{shape}: two calls of {name} differ")
    return told


def speed(group: Any, depth: int, length: int, causal: bool) -> dict[str, Any]:
    batch, heads = TOKENS // length, HIDDEN // depth
    q, k, v, dout = (torch.randn(batch, length, heads, depth, device="cuda").to(BF16) for _ in range(4))
    out, logarithms = forward.attention(q, k, v, causal=causal, group=group)

    def kit(**how: bool) -> Callable[[], Any]:
        return lambda: backward.attention_backward(dout, q, k, v, out, logarithms, causal=causal, group=group, **how)

    calls = {"kit": kit(fused=False), "kit fused": kit(), "kit fused unordered": kit(ordered=False)}
    flat = [tensor.transpose(1, 2).contiguous().requires_grad_() for tensor in (q, k, v)]
    flat_dout = dout.transpose(1, 2).contiguous()
    for name, backend in TORCH.items():
        try:
            with sdpa_kernel(backend):
                result = scaled_dot_product_attention(*flat, is_causal=causal)
            torch.autograd.grad(result, flat, flat_dout, retain_graph=True)
            calls[name] = lambda result=result: torch.autograd.grad(result, flat, flat_dout, retain_graph=True)
        except RuntimeError as error:
            print(f"{name} does not take this: {error}", file=sys.stderr)
    work = 10 * batch * heads * depth * length**2 / (2 if causal else 1)
    times = milliseconds(calls)
    rates = {name: round(work / ms / 1e9, 1) for name, ms in times.items()}
    best = max((rate for name, rate in rates.items() if name in TORCH), default=math.nan)
    share = round(max(rates["kit"], rates["kit fused"]) / best, 3)
    ms = {name: round(time, 3) for name, time in times.items()}
    return {"depth": depth, "length": length, "causal": causal, "tflops": rates, "ms": ms, "share_of_best_torch": share}


def steps(options: argparse.Namespace) -> Iterator[Iterable[Row]]:
    (group,) = LocalRanks(1).groups
    for shape in SHAPES:
        yield ({"check": said, "wrong": 1} for said in check(group, shape, options.only))
    for depth, length, causal in POINTS:
        wanted = length in (options.lengths or (length,)) and depth in (options.depths or (depth,))
        if wanted and time.perf_counter() - BEGIN < options.seconds:
            faulthandler.dump_traceback_later(STEP_S, exit=True)
            yield (speed(group, *point) for point in ((depth, length, causal),))
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    parser = script(__doc__)
    parser.add_argument("--seconds", type=float, default=55.0, help="speeds that would begin later are left out")
    parser.add_argument("--lengths", type=int, nargs="*", help="tokens of the speeds; all by default")
    parser.add_argument("--depths", type=int, nargs="*", help="of the speeds' heads; both by default")
    parser.add_argument("--only", nargs="*", choices=KERNELS, default=KERNELS, help="kernels to check; speeds are of both")
    options = parser.parse_args()
    faulthandler.enable()
    compile_ahead()
    torch.manual_seed(1)
    report(steps(options), options.out)
