"""Attention on this machine's first GPU: right numbers for many shapes, then its speed beside torch's attention.

    PYTHONPATH=src python tests/gpu/check_attention.py [--seconds 60] [--depths 64] [--ring 4] [--out FILE]

Results are compared with float32 attention of the same inputs. A speed is the median of stretches that take turns, in TFLOP/s of products
that the mask leaves. Torch's is that of its flash or its cuDNN back end, whichever is faster. Exits with 1 if a result was wrong.

``--ring`` checks and times ring attention instead, of ranks that share the GPU.
"""

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # queues, so that ranks that share a GPU do not wait for each other

import torch
from harness import BF16, STRETCHES, Row, device_us, median_in_turn, report, script
from local_ranks import LocalRanks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from peerlane.device.attention import forward as kit
from peerlane.device.attention.forward import TILINGS, AttentionTiling, Sizes
from peerlane.device.attention.ring import RingAttention, Shape
from peerlane.device.attention.ulysses import UlyssesAttention, UlyssesPlan

FP16 = torch.float16
# batch, queries, keys, heads, key heads, depth, depth of values, causal, dtype
SHAPES = (
    (2, 256, 256, 4, 4, 128, 128, False, BF16),
    (2, 256, 256, 4, 4, 64, 64, True, FP16),
    (1, 1000, 1000, 8, 2, 128, 128, True, BF16),
    (3, 333, 777, 6, 1, 64, 64, True, BF16),
    (2, 777, 333, 2, 2, 128, 128, False, FP16),
    (16, 4, 16, 8, 8, 64, 64, False, BF16),
    (2, 5, 10, 3, 3, 16, 8, True, BF16),
    (1, 130, 4100, 5, 5, 96, 128, False, BF16),
    (1, 4096, 4096, 16, 4, 128, 128, True, BF16),
    (2, 200, 130, 2, 1, 128, 128, True, FP16),
)
SPEEDS = tuple((depth, length, causal) for depth in (128, 64) for length in (4096, 8192, 16384, 32768) for causal in (False, True))
TOKENS, HIDDEN = 32768, 2048
TORCH = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and logarithms of sums of exponentials, in float32, or in float64 of such operands."""
    q, k, v = (tensor.transpose(1, 2).to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in (q, k, v))
    k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], 1) for tensor in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    if causal:
        scores.masked_fill_(torch.ones_like(scores[0, 0], dtype=torch.bool).triu_(1 + k.shape[2] - q.shape[2]), -math.inf)
    logarithms = scores.logsumexp(-1)
    weights = torch.exp(scores - logarithms.unsqueeze(-1)).nan_to_num(0.0)
    return (weights @ v).transpose(1, 2), logarithms


def check(group: Any, shape: tuple[Any, ...], tiling: AttentionTiling | None) -> str:
    """What is wrong, or nothing."""
    batch, queries, keys, heads, key_heads, depth, value_depth, causal, dtype = shape
    q = torch.randn(batch, queries, heads, depth, device="cuda").to(dtype) * 2
    k, v = (torch.randn(batch, keys, key_heads, d, device="cuda").to(dtype) for d in (depth, value_depth))
    out, logarithms = kit.attention(q, k, v, causal=causal, group=group, tiling=tiling)
    torch.cuda.synchronize()
    wanted, wanted_logarithms = expected(q, k, v, causal, depth**-0.5)
    error = float((out.float() - wanted).norm() / wanted.norm())
    finite = wanted_logarithms.isfinite()
    off = float((logarithms - wanted_logarithms)[finite].abs().max())
    same = torch.equal(finite, logarithms.isfinite())
    limit = 5e-3 if dtype == BF16 else 1e-3
    wrong = not (error < limit and off < 1e-4 * max(1, float(wanted_logarithms[finite].abs().max())) and same)
    return f"{shape} by {tiling}: error {error:.2e} of {limit}, logarithms off by {off:.2e}, same finite {same}" if wrong else ""


def flops(batch: int, length: int, heads: int, depth: int, causal: bool) -> float:
    return 4 * batch * heads * depth * length**2 / (2 if causal else 1)


def milliseconds(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Medians of stretches of about 30 ms; kinds of calls take turns."""
    counts: dict[str, int] = {}
    for name, call in calls.items():
        for _ in range(2):
            call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        counts[name] = max(2, min(50, int(0.03 / (time.perf_counter() - start))))

    def stretch(call: Callable[[], Any], count: int) -> float:
        call()
        return device_us(call, count) / 1e3

    return median_in_turn({name: lambda name=name: stretch(calls[name], counts[name]) for name in calls})


def speed(group: Any, depth: int, length: int, causal: bool, tilings: list[AttentionTiling]) -> dict[str, Any]:
    batch, heads = TOKENS // length, HIDDEN // depth
    q, k, v = (torch.randn(batch, length, heads, depth, device="cuda").to(BF16) for _ in range(3))
    out, sizes, scale = torch.empty_like(q), Sizes.of(q, k, causal, None), kit.check_scale(None, depth)
    tensors = {"q": q, "k": k, "v": v, "out": out, "claims": torch.zeros(1, dtype=torch.int32, device="cuda")}
    calls: dict[str, Callable[[], Any]] = {str(tiling): kit.bind(group, tensors, sizes, scale, tiling) for tiling in tilings}
    ours = list(calls)
    flat = [tensor.transpose(1, 2).contiguous() for tensor in (q, k, v)]
    for name, backend in TORCH.items():

        def torch_call(backend: SDPBackend = backend) -> None:
            with sdpa_kernel(backend):
                scaled_dot_product_attention(*flat, is_causal=causal)

        try:
            torch_call()
            calls[name] = torch_call
        except RuntimeError as error:
            print(f"{name} does not take this: {error}", file=sys.stderr)
    work = flops(batch, length, heads, depth, causal)
    rates = {name: round(work / ms / 1e9, 1) for name, ms in milliseconds(calls).items()}
    best = max((rate for name, rate in rates.items() if name in TORCH), default=math.nan)
    kit_best = max(rates[name] for name in ours)
    return {"depth": depth, "length": length, "causal": causal, "tflops": rates, "share_of_best_torch": round(kit_best / best, 3)}


# batch, length of a shard, heads, key heads, depth, depth of values, causal, whether ranks compute each other's tiles, dtype
RINGS = (
    (2, 5, 3, 3, 16, 8, False, None, BF16),
    (16, 4, 8, 8, 64, 64, True, None, BF16),
    (1, 1000, 4, 2, 128, 128, False, None, BF16),
    (2, 1000, 4, 4, 64, 64, True, True, FP16),
    (1, 1024, 8, 1, 128, 128, True, False, BF16),
    (1, 1024, 8, 8, 128, 128, True, True, BF16),
)
RING_SPEEDS = ((1, 2048, 16, 16, 128), (1, 4096, 16, 16, 128))


def rings(ranks: LocalRanks, shape: Shape, balanced: bool | None) -> list[RingAttention]:
    return [RingAttention(shape, balanced=balanced) for _ in ranks.each()]


def check_shards(
    ranks: LocalRanks,
    name: str,
    attends: list[Any],
    widths: tuple[tuple[int, int], ...],
    batch: int,
    length: int,
    causal: bool,
    dtype: torch.dtype,
) -> str:
    """What is wrong in four calls behind each other, or nothing. ``widths``: heads and depth of q, k and v."""
    world, rings = len(ranks.groups), isinstance(attends[0], RingAttention)  # others give no logarithms
    drawn, got = [], []
    for _ in range(4):
        whole = [torch.randn(batch, world * length, heads, depth, device="cuda").to(dtype) for heads, depth in widths]
        drawn.append((whole, [[tensor[:, r * length : (r + 1) * length].contiguous() for tensor in whole] for r in range(world)]))
    torch.cuda.synchronize()
    for _, shards in drawn:
        for group in ranks.each():
            attends[group.rank](*shards[group.rank])
        results = [
            (attend.out.clone(), attend.logarithms.clone() if rings else None) for attend, _ in zip(attends, ranks.each(), strict=True)
        ]
        got.append(results)
    ranks.synchronize()
    worst = off = 0.0
    for (whole, _), results in zip(drawn, got, strict=True):
        wanted, wanted_logarithms = expected(*whole, causal, widths[0][1] ** -0.5)
        out = torch.cat([result for result, _ in results], 1).float()
        worst = max(worst, float((out - wanted).norm() / wanted.norm()) if out.isfinite().all() else math.inf)
        if rings:
            off = max(off, float((torch.cat([item for _, item in results], 2) - wanted_logarithms).abs().max()))
    for attend in attends:
        attend.close()
    limit = 5e-3 if dtype == BF16 else 1e-3
    return "" if worst < limit and off < 1e-3 else f"{name} on {world}: error {worst:.2e} of {limit}, logarithms off by {off:.2e}"


def check_ring(ranks: LocalRanks, case: tuple[Any, ...]) -> str:
    batch, length, heads, key_heads, depth, value_depth, causal, balanced, dtype = case
    attends = rings(ranks, Shape(batch, length, heads, key_heads, depth, value_depth, dtype, causal), balanced)
    widths = (heads, depth), (key_heads, depth), (key_heads, value_depth)
    return check_shards(ranks, f"ring {case}", attends, widths, batch, length, causal, dtype)


def ring_speed(ranks: LocalRanks, sizes: tuple[int, ...], causal: bool, balanced: bool) -> dict[str, Any]:
    """Milliseconds of all ranks together, and of attention over the whole sequence in one launch that has all SMs."""
    batch, length, heads, key_heads, depth = sizes
    world = len(ranks.groups)
    attends = rings(ranks, Shape(batch, length, heads, key_heads, depth, depth, BF16, causal), balanced)
    shards = [[torch.randn(batch, length, h, depth, device="cuda").to(BF16) for h in (heads, key_heads, key_heads)] for _ in range(world)]
    torch.cuda.synchronize()
    launches = [attends[group.rank].bind(*shards[group.rank]) for group in ranks.each()]

    def together(count: int) -> float:
        ranks.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            for launch, _ in zip(launches, ranks.each(), strict=True):
                launch()
        ranks.synchronize()
        return (time.perf_counter() - start) / count * 1e3

    together(2)
    ring_ms = statistics.median(together(10) for _ in range(STRETCHES))
    q, k, v = (torch.cat([own[i] for own in shards], 1) for i in range(3))
    (alone,) = LocalRanks(1).groups
    tensors = {"q": q, "k": k, "v": v, "out": torch.empty_like(q), "claims": torch.zeros(1, dtype=torch.int32, device="cuda")}
    whole = kit.bind(alone, tensors, Sizes.of(q, k, causal, None), kit.check_scale(None, depth))
    whole_ms = milliseconds({"whole": whole})["whole"]
    for attend in attends:
        attend.close()
    times = {"ms": round(ring_ms, 3), "one_launch_ms": round(whole_ms, 3)}
    return {"ring": sizes, "ranks": world, "causal": causal, "balanced": balanced, **times}


# batch, length of a shard, all heads, depth, causal, dtype
ULYSSES = ((2, 5, 4, 32, False, BF16), (1, 1000, 8, 128, False, BF16), (2, 500, 8, 64, True, FP16), (1, 1024, 8, 128, True, BF16))


def check_ulysses(ranks: LocalRanks, case: tuple[Any, ...]) -> str:
    batch, length, heads, depth, causal, dtype = case
    world = len(ranks.groups)
    tiling = kit.choose_tiling(length, length, depth, causal, parcels=True)
    plan = UlyssesPlan(batch, length, heads // world, depth, dtype, causal, world, tiling)
    attends = [UlyssesAttention(plan) for _ in ranks.each()]
    return check_shards(ranks, f"Ulysses {case}", attends, ((heads, depth),) * 3, batch, length, causal, dtype)


def ring_steps(count: int) -> Iterator[Iterable[Row]]:
    ranks, failures = LocalRanks(count), list[str]()

    def checked(kind: Callable[[LocalRanks, Any], str], case: tuple[Any, ...]) -> Iterator[Row]:
        failures.append(str(case))
        if said := kind(ranks, case):
            yield {"check": said, "wrong": 1}
        else:
            failures.pop()

    yield from (checked(kind, case) for kind, cases in ((check_ring, RINGS), (check_ulysses, ULYSSES)) for case in cases)
    for sizes in RING_SPEEDS if not failures else ():
        yield (ring_speed(ranks, sizes, *how) for how in ((False, False), (True, False), (True, True)))


def steps(options: argparse.Namespace) -> Iterator[Iterable[Row]]:
    (group,) = LocalRanks(1).groups
    begin, broken = time.perf_counter(), set[AttentionTiling | None]()
    variants = [tiling for tiling in TILINGS if tiling.groups > 1]
    fastest: dict[tuple[int, bool], dict[str, float]] = {}

    def checked(shape: tuple[Any, ...], tiling: AttentionTiling | None) -> Iterator[Row]:
        known = tiling in broken
        broken.add(tiling)
        if said := check(group, shape, tiling):
            yield {"check": said, "wrong": 1}
        elif not known:
            broken.remove(tiling)

    def measured(depth: int, length: int, causal: bool) -> Iterator[Row]:
        rates = fastest.get((depth, causal), {})  # all tilings once, then the two fastest
        usable = [item for item in variants if item.depth == depth and item not in broken]
        usable.sort(key=lambda item: -rates.get(str(item), 0))
        if usable:
            row = speed(group, depth, length, causal, usable[:2] if rates else usable)
            fastest.setdefault((depth, causal), row["tflops"])
            yield row

    for shape in SHAPES:
        depth = max(shape[5:7])
        if depth in (options.depths or (depth,)):
            tilings = [None, *(item for item in variants if item.depth >= depth > item.depth - 64 and shape[1] > 64)]
            yield from (checked(shape, tiling) for tiling in tilings)
    for depth, length, causal in SPEEDS:
        wanted = length in (options.lengths or (length,)) and depth in (options.depths or (depth,))
        if wanted and time.perf_counter() - begin < options.seconds:
            yield measured(depth, length, causal)


if __name__ == "__main__":
    parser = script(__doc__)
    parser.add_argument("--seconds", type=float, default=70.0, help="speeds that would begin later are left out")
    parser.add_argument("--lengths", type=int, nargs="*", help="tokens of the speeds; all by default")
    parser.add_argument("--depths", type=int, nargs="*", help="depths of the speeds and of the checked shapes; all by default")
    parser.add_argument("--ring", type=int, default=0, help="ranks of ring attention, 0 for none; nothing else is done then")
    options = parser.parse_args()
    torch.manual_seed(1)
    report(ring_steps(options.ring) if options.ring else steps(options), options.out)
