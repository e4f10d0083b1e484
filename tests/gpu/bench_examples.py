"""Check and time the CUDA examples of problems 1 and 13 on the GPUs of this machine.

    PYTHONPATH=src python tests/gpu/bench_examples.py [--world 4] [--check-only] [--tune]

Starts one process per GPU. Results are compared with exact integer sums or with fp64, over many sizes and dtypes, with new contents in
every call, ranks delayed at random, eager calls and graph replays mixed; then the same calls are timed beside NCCL. Exits with a non-zero
status if anything is wrong. Everything ends within --budget seconds, by force if need be.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from peerlane.device import Kernel, compile_cubin
from peerlane.device import all_reduce as host_side
from peerlane.errors import DeviceTimeout, LaunchError, UsageError

EXAMPLES = Path(__file__).parents[2] / "examples" / "cuda"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROUNDOFF = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2.0**-24}
MIB = 1 << 20


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name.split('_')[0]}", EXAMPLES / name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Ranks:
    """This process's place in the group, and what all ranks do together."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world

    def say(self, *words: Any) -> None:
        if self.rank == 0:
            print(*words, flush=True)

    def all_equal(self, value: int) -> bool:
        own = torch.tensor([value], device="cuda")
        seen = [torch.empty_like(own) for _ in range(self.world)]
        dist.all_gather(seen, own)
        return all(int(other) == value for other in seen)

    def slowest(self, value: float) -> float:
        own = torch.tensor([value], device="cuda")
        dist.all_reduce(own, dist.ReduceOp.MAX)
        return float(own)


def fingerprint(tensor: torch.Tensor) -> int:
    """Depends on every bit and on its place."""
    bits = tensor.contiguous().view(-1).view(torch.int16 if tensor.element_size() == 2 else torch.int32).long()
    return int(((bits + 1) * (torch.arange(bits.numel(), device=bits.device) * 2654435761 % 1000003 + 1)).sum())


def require(condition: bool, *what: Any) -> None:
    if not condition:
        raise AssertionError(" ".join(map(str, what)))


# ---- correctness -----------------------------------------------------------------------------------------------------------------------


def draw(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(tuple(shape), device="cuda", generator=generator).to(dtype)


def check_sum(ranks: Ranks, solution: Callable[[torch.Tensor], torch.Tensor], shape: Sequence[int], dtype: torch.dtype, seed: int) -> None:
    """Against fp64, with the ranks' inputs made anew on every rank."""
    inputs = [draw(shape, dtype, seed * 100 + q) for q in range(ranks.world)]
    own = inputs[ranks.rank].clone()
    out = solution(own)
    require(out.shape == own.shape and out.dtype == dtype, "shape or dtype", out.shape, out.dtype)
    require(torch.equal(own, inputs[ranks.rank]), "input changed", shape, dtype)
    require(out.numel() == 0 or out.data_ptr() != own.data_ptr(), "not fresh storage", shape, dtype)
    truth = torch.stack([x.double() for x in inputs]).sum(0) if own.numel() < 4 * MIB else sum(x.double() for x in inputs)
    bound = (ranks.world + 1) * ROUNDOFF[dtype] * sum(x.double().abs() for x in inputs)
    excess = ((out.double() - truth).abs() - bound).max() if out.numel() else torch.zeros(())
    require(float(excess) <= 0, "wrong sum", shape, dtype, "excess", float(excess))
    require(ranks.all_equal(fingerprint(out)), "ranks differ", shape, dtype)


def check_all_reduce(ranks: Ranks, module: ModuleType) -> None:
    sizes = [
        0,
        1,
        2,
        5,
        6,
        7,
        13,
        255,
        37 * 53,
        4097,
        65537,
        131_071,
        200_001,
        524_291,
        1 << 20,
        1_500_003,
        2_097_149,
        2_097_163,
        3_333_333,
        9_000_001,
    ]
    for seed, size in enumerate(sizes):
        for dtype in (BF16, FP16, FP32):
            check_sum(ranks, module.solution, (size,), dtype, seed)
    check_sum(ranks, module.solution, (0, 8), BF16, 40)
    check_sum(ranks, module.solution, (33_554_433,), BF16, 41)
    base = draw((100_001,), BF16, ranks.rank)
    both = [draw((100_001,), BF16, q) for q in range(ranks.world)]
    shifted = module.solution(base[1:])
    require(torch.allclose(shifted.double(), sum(x[1:].double() for x in both), atol=0.1), "a view that starts off alignment")
    turned = module.solution(base[:100_000].view(250, 400).t())
    require(torch.allclose(turned.double(), sum(x[:100_000].view(250, 400).t().double() for x in both), atol=0.1), "a transposed view")
    special = torch.ones(67, device="cuda")
    special[7 * ranks.rank + 1], special[7 * ranks.rank + 4] = float("nan"), float("inf")
    out = module.solution(special)
    places = torch.arange(67, device="cuda")
    seeded = places < 7 * ranks.world
    require(
        torch.equal(out.isnan(), seeded & (places % 7 == 1)) and torch.equal(out.isinf(), seeded & (places % 7 == 4)), "NaN or inf moved"
    )


def pattern(size: int, call: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Integers in [-16, 16], different in every call, rank and place; sums over 8 ranks are exact in every dtype."""
    index = torch.arange(size, device="cuda", dtype=torch.int64)
    return ((index * 7919 + call * 104_729 + rank * 15_485_863 + index // 33 * (call + rank)) % 33 - 16).to(dtype)


def expected_pattern(size: int, call: int, world: int, dtype: torch.dtype) -> torch.Tensor:
    return sum(pattern(size, call, q, FP32) for q in range(world)).to(dtype)


def stress(ranks: Ranks, module: ModuleType, calls: int) -> None:
    """Back-to-back calls of all three kernels in random order, no synchronisation between them, ranks delayed on host and device."""
    shared, own = random.Random(5), random.Random(ranks.rank)
    sizes = (1, 7, 640, 5000, 70_000, 131_072, 400_001, 1 << 20, 2_500_001)
    for batch in range(0, calls, 50):
        plan = [(batch + i, shared.choice(sizes), shared.choice((BF16, FP16, FP32))) for i in range(50)]
        inputs = [pattern(size, call, ranks.rank, dtype) for call, size, dtype in plan]
        outputs = []
        for tensor in inputs:
            if own.random() < 0.1:
                torch.cuda._sleep(own.randrange(200_000))
            if own.random() < 0.05:
                time.sleep(own.random() * 0.003)
            outputs.append(module.solution(tensor))
        for (call, size, dtype), out in zip(plan, outputs, strict=True):
            require(torch.equal(out, expected_pattern(size, call, ranks.world, dtype)), "stress: wrong sum in call", call, size, dtype)


def replay(ranks: Ranks, module: ModuleType, replays: int) -> None:
    """A graph of several calls, replayed with new contents, between eager calls."""
    sizes = (1000, 70_000, 1 << 20, 2_500_001, 640)
    tensors = [pattern(size, 0, ranks.rank, BF16) for size in sizes]
    for tensor in tensors:
        module.solution(tensor)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outputs = [module.solution(tensor) for tensor in tensors]
    for call in range(1, replays + 1):
        for tensor in tensors:
            tensor.copy_(pattern(tensor.numel(), call, ranks.rank, BF16))
        graph.replay()
        if call % 5 == 0:
            eager = module.solution(pattern(3333, call, ranks.rank, BF16))
            require(torch.equal(eager, expected_pattern(3333, call, ranks.world, BF16)), "eager call between replays", call)
        for tensor, out in zip(tensors, outputs, strict=True):
            require(torch.equal(out, expected_pattern(tensor.numel(), call, ranks.world, BF16)), "replay", call, tensor.numel())


def check_gemm(ranks: Ranks, module: ModuleType) -> None:
    depths = {"ragged": (3, 8, 1, 5, 2, 4, 6, 7), "zero": (16, 0, 8, 24, 8, 8, 8, 8)}
    cases = [
        (5, 7, depths["ragged"], BF16),
        (5, 7, depths["ragged"], FP32),
        (33, 129, depths["zero"], FP16),
        (1, 1, (64,) * 8, BF16),
        (0, 16, (8,) * 8, BF16),
        (1024, 1024, (512,) * 8, BF16),
        (1024, 1024, (512,) * 8, FP16),
        (1000, 1001, (300, 512, 77, 40, 8, 8, 8, 8), FP32),
        (1000, 1000, (300, 512, 77, 40, 8, 8, 8, 8), BF16),
        (777, 712, (16, 0, 8, 1032, 8, 8, 8, 8), FP16),
        (1024, 1024, (512, 1000, 520, 24, 8, 8, 8, 8), BF16),
        (64, 8192, (2048,) * 8, BF16),
        (4096, 4096, (1024,) * 8, BF16),
    ]
    for seed, (m, n, k, dtype) in enumerate(cases):
        pairs = [(draw((m, k[q]), dtype, 7000 + seed * 20 + q), draw((k[q], n), dtype, 9000 + seed * 20 + q)) for q in range(ranks.world)]
        a, b = pairs[ranks.rank]
        if seed % 2:
            a = a.t().contiguous().t()
        out = module.solution(a, b)
        require(out.shape == (m, n) and out.dtype == dtype, "shape or dtype", out.shape, out.dtype)
        if out.numel() == 0:
            continue
        partials = [x.double() @ y.double() for x, y in pairs]
        scale = sum(x.double().abs() @ y.double().abs() for x, y in pairs)
        bound = (ranks.world + 1) * ROUNDOFF[dtype] * sum(p.abs() for p in partials) + 1e-5 * scale
        excess = float(((out.double() - sum(partials)).abs() - bound).max())
        require(excess <= 0, "wrong product", (m, n, k, dtype), "excess", excess)
        require(ranks.all_equal(fingerprint(out)), "ranks differ", (m, n, k, dtype))
    for n in (64, 1024):
        check_products_in_a_row(ranks, module, m=520, n=n)


def check_products_in_a_row(ranks: Ranks, module: ModuleType, m: int, n: int) -> None:
    """Times the identity, so that sums are exact: back to back with delays, then replayed with new contents."""
    unit = torch.eye(n, device="cuda", dtype=BF16)
    own = random.Random(ranks.rank)
    inputs = [pattern(m * n, call, ranks.rank, BF16).view(m, n) for call in range(60)]
    outputs = []
    for a in inputs:
        if own.random() < 0.2:
            torch.cuda._sleep(own.randrange(200_000))
        outputs.append(module.solution(a, unit))
    for call, out in enumerate(outputs):
        require(torch.equal(out.view(-1), expected_pattern(m * n, call, ranks.world, BF16)), "products in a row", m, n, "call", call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outputs = [module.solution(a, unit) for a in inputs[:3]]
    for call in range(20):
        for i, a in enumerate(inputs[:3]):
            a.copy_(pattern(m * n, call + i, ranks.rank, BF16).view(m, n))
        graph.replay()
        for i, out in enumerate(outputs):
            expected = expected_pattern(m * n, call + i, ranks.world, BF16)
            require(torch.equal(out.view(-1), expected), "replayed product", m, n, call)


FILL = r"""
extern "C" __global__ void fill(int* out, int value, int words) {
    extern __shared__ int shared[];
    if (threadIdx.x == 0) shared[words - 1] = value;
    __syncthreads();
    out[blockIdx.x * blockDim.x + threadIdx.x] = shared[words - 1];
}
"""


def refused(kind: type[Exception], attempt: Callable[[], Any]) -> bool:
    try:
        attempt()
    except kind:
        return True
    return False


def check_launch_options() -> None:
    """Large dynamic shared memory, another stream, cooperative launches, and what is refused."""
    cubin = compile_cubin(FILL)
    kernel = Kernel(cubin, "fill")
    shared_bytes = 100 << 10

    def args(value: int) -> tuple[Any, ...]:
        return out, ctypes.c_int32(value), ctypes.c_int32(shared_bytes // 4)

    out = torch.zeros(256, dtype=torch.int32, device="cuda")
    kernel.launch(2, 128, args(7), shared_bytes=shared_bytes)
    require(bool((out == 7).all()), "dynamic shared memory", out)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    kernel.launch((2, 1), (128,), args(8), shared_bytes=shared_bytes, stream=side)
    torch.cuda.current_stream().wait_stream(side)
    require(bool((out == 8).all()), "another stream", out)
    kernel.launch(2, 128, args(9), shared_bytes=shared_bytes, cooperative=True)
    require(bool((out == 9).all()), "cooperative launch", out)
    attributes = kernel.attributes()
    require(attributes["registers"] > 0 and attributes["local_bytes"] == 0, "attributes", attributes)
    too_large = 10_000
    require(
        refused(LaunchError, lambda: kernel.launch(too_large, 128, args(1), shared_bytes=shared_bytes, cooperative=True)),
        "a cooperative grid that does not fit was taken",
    )
    require(refused(LaunchError, lambda: kernel.bind(1, 32, args(1), shared_bytes=1 << 20)), "a MiB of shared memory was taken")
    require(refused(LaunchError, lambda: Kernel(cubin, "absent")), "a kernel that does not exist was found")
    require(refused(UsageError, lambda: kernel.bind(1, 32, (out, 1, 2))), "an argument without a width was taken")
    require(bool((out == 9).all()), "a refused launch has written", out)


# ---- timing ----------------------------------------------------------------------------------------------------------------------------


def per_call_us(ranks: Ranks, run: Callable[[], Any], calls: int, rounds: int = 7) -> float:
    """Median over rounds of the slowest rank's time per call, back to back."""
    run()
    times = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        dist.barrier()
        start.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return ranks.slowest(statistics.median(times))


def eager_us(ranks: Ranks, call: Callable[[int], Any]) -> float:
    turn = iter(range(1 << 30))
    return per_call_us(ranks, lambda: call(next(turn)), calls=60)


def graph_us(ranks: Ranks, call: Callable[[int], Any], calls: int = 20) -> float:
    for i in range(3):
        call(i)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for i in range(calls):
            call(i)
    graph.replay()
    return per_call_us(ranks, graph.replay, calls=3, rounds=9) / calls


def rotating(size: int, dtype: torch.dtype, ranks: Ranks) -> list[torch.Tensor]:
    return [draw((size,), dtype, 50 + ranks.rank + 10 * i) for i in range(4 if size < 16 * MIB else 2)]


def nccl_all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    total = tensor.clone()
    dist.all_reduce(total)
    return total


def time_all_reduce(ranks: Ranks, module: ModuleType) -> None:
    ranks.say("\nall-reduce, bf16, us per call     eager: ours    NCCL   ratio |  graph: ours    NCCL   ratio   kernel")
    for nbytes in (4 << 10, 64 << 10, 256 << 10, 512 << 10, MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, 64 * MIB, 256 * MIB):
        tensors = rotating(nbytes // 2, BF16, ranks)

        def ours(i: int, tensors: list[torch.Tensor] = tensors) -> None:
            module.solution(tensors[i % len(tensors)])

        def theirs(i: int, tensors: list[torch.Tensor] = tensors) -> None:
            nccl_all_reduce(tensors[i % len(tensors)])

        a, b, c, d = eager_us(ranks, ours), eager_us(ranks, theirs), graph_us(ranks, ours), graph_us(ranks, theirs)
        name = host_side.plan(nbytes, ranks.world, module.all_reduce.arena.sm_count).kernel
        ranks.say(f"{nbytes >> 10:>10} KiB {' ' * 22}{a:8.1f}{b:8.1f}{b / a:8.2f} | {' ' * 7}{c:8.1f}{d:8.1f}{d / c:8.2f}   {name}")


def time_gemm(ranks: Ranks, module: ModuleType) -> None:
    ranks.say("\nproduct + all-reduce, bf16        eager: ours    NCCL   ratio |  graph: ours    NCCL   ratio   product alone (graph)")
    for m, n, k in ((1024, 1024, 512), (64, 8192, 2048), (4096, 8192, 7168)):
        pairs = [(draw((m, k), BF16, ranks.rank + i), draw((k, n), BF16, 90 + ranks.rank + i)) for i in range(2)]

        def ours(i: int, pairs: list[Any] = pairs) -> None:
            module.solution(*pairs[i % 2])

        def theirs(i: int, pairs: list[Any] = pairs) -> None:
            nccl_all_reduce(torch.matmul(*pairs[i % 2]))

        def alone(i: int, pairs: list[Any] = pairs) -> None:
            torch.matmul(*pairs[i % 2])

        a, b = eager_us(ranks, ours), eager_us(ranks, theirs)
        c, d, e = graph_us(ranks, ours), graph_us(ranks, theirs), graph_us(ranks, alone)
        shape = f"{m} x {n} x {k}"
        ranks.say(f"{shape:>20} {' ' * 16}{a:8.1f}{b:8.1f}{b / a:8.2f} | {' ' * 7}{c:8.1f}{d:8.1f}{d / c:8.2f}   {e:8.1f}")


def time_host(ranks: Ranks, module: ModuleType, product: ModuleType) -> None:
    """Host time per call while the device is behind."""
    tensor = draw((64,), BF16, 1)
    a, b = draw((1024, 512), BF16, 1), draw((512, 1024), BF16, 2)
    product.solution(a, b)
    out = module.solution(tensor)
    launch = module.all_reduce.launches[(out.numel(), out.dtype)]
    runs = {
        "all-reduce": lambda: module.solution(tensor),
        "its launch alone": launch,
        "product + all-reduce": lambda: product.solution(a, b),
        "torch.mm": lambda: torch.mm(a, b),
    }
    for name, run in runs.items():
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda._sleep(20_000_000)
        start = time.perf_counter()
        for _ in range(300):
            run()
        ranks.say(f"host time per call, {name}: {(time.perf_counter() - start) / 300 * 1e6:.1f} us")
        torch.cuda.synchronize()


def tune(ranks: Ranks) -> None:
    """Graph times of every kernel and launch shape, at the sizes where the choice is close."""
    host_side.PACKET_LIMIT_BYTES = 8 * MIB
    module = load("1_allreduce_cuda.py")
    plans = [host_side.Plan(name, *shape) for name in ("one_shot", "two_shot") for shape in ((64, 512), (128, 512), (128, 256))]
    plans += [host_side.Plan("two_shot_ring", grid, 512) for grid in (32, 64, 128)]
    limits = {"one_shot": (0, MIB), "two_shot": (0, 8 * MIB), "two_shot_ring": (MIB, 1 << 40)}
    for nbytes in (128 << 10, 512 << 10, MIB, 2 * MIB, 4 * MIB, 8 * MIB, 32 * MIB, 256 * MIB):
        tensors = rotating(nbytes // 2, BF16, ranks)
        found = []
        for chosen in plans:
            smallest, largest = limits[chosen.kernel]
            if smallest <= nbytes <= largest:
                module.plan = lambda *_, chosen=chosen: chosen
                if module.all_reduce is not None:
                    module.all_reduce.launches.clear()
                us = graph_us(ranks, lambda i, tensors=tensors: module.solution(tensors[i % len(tensors)]), calls=8)
                found.append((us, f"{us:.1f} {chosen.kernel} {chosen.grid}x{chosen.block}"))
        ranks.say(f"tune {nbytes >> 10} KiB: " + "; ".join(words for _, words in sorted(found)))


def check_deadline(ranks: Ranks, module: ModuleType, folder: str) -> None:
    """The last thing a process does: one rank calls alone, and must be stopped with the reason. Its context is lost by that."""
    done = Path(folder) / "deadline_done"
    module.all_reduce.arena.view.timeout_ns = 500_000_000
    module.all_reduce.launches.clear()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    if ranks.rank == ranks.world - 1:
        started = time.monotonic()
        try:
            module.solution(torch.ones(64, device="cuda"))
            torch.cuda.synchronize()
            raise AssertionError("a call that no other rank joined has ended")
        except RuntimeError as error:
            first = str(error).splitlines()[0]
        try:
            module.all_reduce.arena.raise_fault()
            raise AssertionError(f"no fault record; CUDA said: {first}")
        except DeviceTimeout as fault:
            print(f"deadline kept after {time.monotonic() - started:.1f} s: {fault}\n  (CUDA said: {first})", flush=True)
        done.touch()
        os._exit(0)
    give_up = time.monotonic() + 10
    while not done.exists() and time.monotonic() < give_up:
        time.sleep(0.02)
    os._exit(0 if done.exists() else 3)


def steps(ranks: Ranks, options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], None]]]:
    first, thirteenth = load("1_allreduce_cuda.py"), load("13_gemm_allreduce_cuda.py")
    yield "all-reduce against fp64", lambda: check_all_reduce(ranks, first)
    yield "all-reduce, back to back with delays", lambda: stress(ranks, first, calls=2000)
    yield "all-reduce, graph replays", lambda: replay(ranks, first, replays=200)
    yield "product + all-reduce against fp64", lambda: check_gemm(ranks, thirteenth)
    if not options.check_only:
        yield "time all-reduce", lambda: time_all_reduce(ranks, first)
        yield "time product + all-reduce", lambda: time_gemm(ranks, thirteenth)
        yield "time host", lambda: time_host(ranks, first, thirteenth)
    if options.tune:
        yield "tune", lambda: tune(ranks)
    yield "launch options", check_launch_options
    yield "deadline", lambda: check_deadline(ranks, first, options.folder)


def work(rank: int, options: argparse.Namespace) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{options.folder}/store",
        rank=rank,
        world_size=options.world,
        timeout=timedelta(seconds=40),
        device_id=torch.device("cuda", rank),
    )
    ranks = Ranks(rank, options.world)
    for name, step in steps(ranks, options):
        started = time.monotonic()
        step()
        torch.cuda.synchronize()
        dist.barrier()
        ranks.say(f"[{time.monotonic() - started:5.1f} s] {name}: done")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--tune", action="store_true", help="also time every kernel and launch shape")
    parser.add_argument("--budget", type=float, default=90.0, help="seconds until everything is killed")
    options = parser.parse_args()
    end = time.monotonic() + options.budget
    with tempfile.TemporaryDirectory() as options.folder:
        group = mp.spawn(work, args=(options,), nprocs=options.world, join=False)
        try:
            while not group.join(timeout=1.0):
                if time.monotonic() > end:
                    print(f"not done within {options.budget:g} s", flush=True)
                    return 2
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            print(error, flush=True)
            return 1
        finally:
            for process in group.processes:
                process.kill()
    return 0


if __name__ == "__main__":
    sys.exit(main())
