"""Every kernel of the kit on this machine's GPUs, against exact answers, from one process.

    PYTHONPATH=src python tests/gpu/check_kernels.py [--ranks 2] [--launches 20000] [--small] [--fused] [--out FILE]
    compute-sanitizer --tool memcheck python tests/gpu/check_kernels.py --small

A rank is a stream on a GPU of its own; where there are fewer GPUs than ranks, ranks share one, each with its part of the SMs. Contents are
small integers, so that every sum is exact, or rounded once where 8 bits do not hold it. First each kernel for many sizes and dtypes, then
soaks: replayed graphs with contents that change from launch to launch, random ranks delayed, and every word of every result compared.
``--small`` leaves soaks and what is large out, ``--fused`` the collectives.
Prints a line per kernel; exits with 1 if a word was wrong.
"""

import itertools
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # queues, so that ranks that share a GPU do not wait for each other

import torch
from harness import BF16, FP8, Row, captured, integers, report, script, wrong_words
from local_ranks import LocalRanks

from peerlane.device.collectives.communicator import Communicator
from peerlane.device.products import all_gather_gemm, gemm, gemm_all_reduce, gemm_reduce_scatter

POOL = 6
DELAYED_SHARE, LONGEST_DELAY_CYCLES = 1 / 8, 400_000

Tensors = list[torch.Tensor]
"""One for each rank."""


def spread(ranks: LocalRanks, tensor: torch.Tensor) -> Tensors:
    return [tensor.to(ranks.groups[rank].device) for rank in range(len(ranks.groups))]


@dataclass
class Workload:
    """``call(rank, *inputs) -> output`` for each rank, ``draw()`` for inputs of all ranks, and the exact ``answer(*inputs)`` on each."""

    name: str
    draw: Callable[[], tuple[Tensors, ...]]
    call: Callable[..., torch.Tensor | None]
    answer: Callable[..., list[torch.Tensor | None]]


def collective_workloads(ranks: LocalRanks, communicators: list[Communicator], nbytes: int, dtype: torch.dtype) -> Iterator[Workload]:
    """The eight collectives on tensors of ``nbytes`` (of the largest tensor of a rank), rounded down to whole elements per part."""
    count = len(ranks.groups)
    part = max(1, nbytes // dtype.itemsize // count)
    total = part * count

    def draw(elements: int) -> Callable[[], tuple[Tensors]]:
        return lambda: ([integers((elements,), dtype, ranks.groups[rank].device) for rank in range(count)],)

    def summed(inputs: Tensors) -> torch.Tensor:
        return torch.stack([tensor.to(ranks.groups[0].device).double() for tensor in inputs]).sum(0).to(dtype)

    def joined(inputs: Tensors) -> torch.Tensor:
        return torch.cat([tensor.to(ranks.groups[0].device).view(torch.uint8) for tensor in inputs]).view(dtype)

    def only(rank: int, tensor: torch.Tensor) -> list[torch.Tensor | None]:
        return [tensor.to(ranks.groups[rank].device) if other == rank else None for other in range(count)]

    root = count - 1

    def transposed(inputs: Tensors) -> list[torch.Tensor | None]:
        return [
            joined([tensor[rank * part : (rank + 1) * part] for tensor in inputs]).to(ranks.groups[rank].device) for rank in range(count)
        ]

    def parts(tensor: torch.Tensor) -> list[torch.Tensor | None]:
        return [tensor[rank * part : (rank + 1) * part].to(ranks.groups[rank].device) for rank in range(count)]

    def at_root(rank: int, tensor: torch.Tensor) -> torch.Tensor | None:
        return tensor if rank == root else None

    def everywhere(tensor: torch.Tensor) -> list[torch.Tensor | None]:
        return list(spread(ranks, tensor))

    # name, elements that a rank gives and gets, whether the root alone gets them, the call, the answer
    sums: list[tuple[Any, ...]] = [
        ("all_reduce", total, total, False, lambda kit, rank, x, out: kit.all_reduce(x, out), lambda x: everywhere(summed(x))),
        ("reduce", total, total, True, lambda kit, rank, x, out: kit.reduce(x, root, out), lambda x: only(root, summed(x))),
        ("reduce_scatter", total, part, False, lambda kit, rank, x, out: kit.reduce_scatter_tensor(out, x), lambda x: parts(summed(x))),
    ]
    moves: list[tuple[Any, ...]] = [
        ("all_gather", part, total, False, lambda kit, rank, x, out: kit.all_gather_into_tensor(out, x), lambda x: everywhere(joined(x))),
        ("gather", part, total, True, lambda kit, rank, x, out: kit.gather(x, at_root(rank, out), root), lambda x: only(root, joined(x))),
        ("scatter", total, part, False, lambda kit, rank, x, out: kit.scatter(out, at_root(rank, x), root), lambda x: parts(x[root])),
        ("broadcast", total, total, False, lambda kit, rank, x, out: kit.broadcast(x, root, out), lambda x: everywhere(x[root])),
        ("all_to_all", total, total, False, lambda kit, rank, x, out: kit.all_to_all_single(out, x), transposed),
    ]
    label = f"{total * dtype.itemsize} B {str(dtype).removeprefix('torch.')}"
    for name, given, gets, root_alone, run, answer in [*(sums if dtype in collectives_sum_dtypes() else ()), *moves]:

        def call(rank: int, x: torch.Tensor, gets: int = gets, alone: bool = root_alone, run: Any = run) -> torch.Tensor | None:
            out = x.new_empty(gets)
            run(communicators[rank], rank, x, out)
            return at_root(rank, out) if alone else out

        yield Workload(f"{name} {label}", draw(given), call, answer)


def collectives_sum_dtypes() -> tuple[torch.dtype, ...]:
    return (BF16, torch.float16, torch.float32, torch.int32, *FP8)


def fused_workloads(ranks: LocalRanks, m: int, n: int, k: int) -> Iterator[Workload]:
    """GEMM + reduce-scatter, GEMM + all-reduce and all-gather + GEMM; (m, n) is the size of the product, k the depth on each rank."""
    count = len(ranks.groups)
    multiply, reduced, gathered = {}, {}, {}
    for group in ranks.each():
        multiply[group.rank] = gemm_reduce_scatter.GemmReduceScatter(m, n, BF16)
    for group in ranks.each():
        reduced[group.rank] = gemm_all_reduce.GemmAllReduce(m, n, BF16)
    for group in ranks.each():
        gathered[group.rank] = all_gather_gemm.AllGatherGemm(m, k, BF16)

    def matrices(rows: int, columns: int) -> Tensors:
        # Sums of so many products of -1, 0 and 1 stay far below 256, up to which bfloat16 holds every integer: partial ones travel in it.
        return [gemm.aligned(integers((rows, columns), BF16, ranks.groups[rank].device, largest=1)) for rank in range(count)]

    first = ranks.groups[0].device

    def summed(lefts: Tensors, rights: Tensors) -> torch.Tensor:
        return torch.stack([a.to(first).float() @ b.to(first).float() for a, b in zip(lefts, rights, strict=True)]).sum(0).to(BF16)

    def rows_of_sum(lefts: Tensors, rights: Tensors) -> list[torch.Tensor | None]:
        return [part.to(ranks.groups[rank].device) for rank, part in enumerate(summed(lefts, rights).chunk(count))]

    def product_of_all(lefts: Tensors, rights: Tensors) -> list[torch.Tensor | None]:
        whole = torch.cat([a.to(first) for a in lefts], dim=1).float()
        return [(whole @ b.to(first).float()).to(BF16).to(b.device) for b in rights]

    yield Workload(
        f"gemm_reduce_scatter {m}x{n}x{k}", lambda: (matrices(m, k), matrices(k, n)), lambda rank, a, b: multiply[rank](a, b), rows_of_sum
    )
    yield Workload(
        f"gemm_all_reduce {m}x{n}x{k}",
        lambda: (matrices(m, k), matrices(k, n)),
        lambda rank, a, b: reduced[rank](a, b),
        lambda lefts, rights: list(spread(ranks, summed(lefts, rights))),
    )
    yield Workload(
        f"all_gather_gemm {m}x{n}x{k}",
        lambda: (matrices(m, k), matrices(count * k, n)),
        lambda rank, a, b: gathered[rank](a, b),
        product_of_all,
    )


def arguments(drawn: tuple[Tensors, ...], rank: int) -> list[torch.Tensor]:
    return [tensors[rank] for tensors in drawn]


def check(ranks: LocalRanks, work: Workload, calls: int = 3) -> int:
    """Wrong words in some calls behind each other."""
    wrong = 0
    for _ in range(calls):
        drawn = work.draw()
        expected = work.answer(*drawn)
        ranks.synchronize_gpus()
        got = [work.call(group.rank, *arguments(drawn, group.rank)) for group in ranks.each()]
        ranks.synchronize()
        wrong += sum(int(wrong_words(got[group.rank], expected[group.rank])) for group in ranks.each())
    return wrong


def soak(ranks: LocalRanks, work: Workload, launches: int) -> int:
    """Wrong words in so many launches, replayed with nothing between them but delays of random ranks."""
    drawn = [work.draw() for _ in range(POOL)]
    expected = [work.answer(*item) for item in drawn]
    wrong = [torch.zeros((), dtype=torch.int64, device=ranks.groups[rank].device) for rank in range(len(ranks.groups))]
    ranks.synchronize_gpus()
    for number in range(POOL):
        for group in ranks.each():
            work.call(group.rank, *arguments(drawn[number], group.rank))
        ranks.synchronize()
    got: dict[tuple[int, int], torch.Tensor | None] = {}
    every = list(itertools.product(range(POOL), range(len(ranks.groups))))

    def launch(number: int, rank: int) -> None:
        got[number, rank] = work.call(rank, *arguments(drawn[number], rank))

    def compare(number: int, rank: int) -> None:
        wrong[rank].add_(wrong_words(got[number, rank], expected[number][rank]))

    launches_of = {item: captured(ranks, launch, *item) for item in every}
    comparisons_of = {item: captured(ranks, compare, *item) for item in every}
    for _ in range(launches):
        number = random.randrange(POOL)
        late = random.randrange(len(ranks.groups)) if random.random() < DELAYED_SHARE else -1
        for group in ranks.each():
            if group.rank == late:
                torch.cuda._sleep(random.randrange(LONGEST_DELAY_CYCLES))  # type: ignore[no-untyped-call]
            launches_of[number, group.rank].replay()
        for group in ranks.each():  # behind the launches of all: streams may share a queue, in which nothing may wait for a later launch
            comparisons_of[number, group.rank].replay()
    ranks.synchronize()
    return sum(int(total) for total in wrong)


def workloads(ranks: LocalRanks, communicators: list[Communicator], small: bool, fused: bool, soaks: bool) -> Iterator[Workload]:
    """What is checked, or what is soaked."""
    count = len(ranks.groups)
    sizes = (4, 100, 4096, 50_000) if small else (4, 100, 4096, 300_001, 2 << 20, 9_000_003, 12 << 20, 20_000_003, 48 << 20)
    moved = [(nbytes, BF16) for nbytes in ((4096, 1 << 20, 12 << 20) if soaks else sizes)]
    moved += [] if soaks else [(50_000, dtype) for dtype in (*collectives_sum_dtypes(), torch.uint8)]
    for nbytes, dtype in [] if fused else moved:
        yield from collective_workloads(ranks, communicators, nbytes, dtype)
    shapes = [(64 * count, 72, 40), (1000 * count, 520, 264), (1024, 1024, 512), (4096, 4096, 1024)]
    for shape in [(256 * count, 512, 256)] if soaks else shapes[:1] if small else shapes:
        yield from fused_workloads(ranks, *shape)


def rows_of(ranks: LocalRanks, small: bool, fused: bool, launches: int) -> Iterator[Row]:
    communicators = [Communicator() for _ in ranks.each()]
    for what in ("check",) if small else ("check", "soak"):
        for work in workloads(ranks, communicators, small, fused, what == "soak"):
            begin, count = time.time(), 3 if what == "check" else launches // 10 if "12582912" in work.name else launches
            wrong = check(ranks, work, count) if what == "check" else soak(ranks, work, count)
            yield {"what": what, "name": work.name, "launches": count, "wrong": wrong, "seconds": round(time.time() - begin, 1)}


if __name__ == "__main__":
    parser = script(__doc__, ranks=2)
    parser.add_argument("--launches", type=int, default=20_000, help="of each kernel, while it is soaked")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--fused", action="store_true")
    options = parser.parse_args()
    ranks = LocalRanks(options.ranks)
    rows = rows_of(ranks, options.small, options.fused, options.launches)
    report([rows], options.out, ranks=options.ranks, gpus=ranks.gpus)
