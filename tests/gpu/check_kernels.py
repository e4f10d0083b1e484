"""Every kernel of the kit on this machine's GPUs, against exact answers, from one process.

    PYTHONPATH=src python tests/gpu/check_kernels.py [--ranks 2] [--launches 20000] [--small] [--out FILE]
    compute-sanitizer --tool memcheck python tests/gpu/check_kernels.py --small

A rank is a stream on a GPU of its own; where there are fewer GPUs than ranks, ranks share one, each with its part of the SMs. Contents are
small integers, so that every sum is exact, or rounded once where 8 bits do not hold it. First each kernel for many sizes and dtypes, then
soaks: replayed graphs with contents that change from launch to launch, random ranks delayed, and every word of every result compared.
``--small`` leaves soaks and what is large out.
Prints a line per kernel; exits with 1 if a word was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import sys
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # queues, so that ranks that share a GPU do not wait for each other

import torch

from peerlane.device import all_gather_gemm, collectives, gemm, gemm_reduce_scatter
from peerlane.device.arena import ROLES, ArenaView
from peerlane.device.layout import LINE_BYTES, Layout
from peerlane.device.mechanisms import _enable_peer_access
from peerlane.errors import DeviceTimeout
from peerlane.hardware.environment import record

BF16 = torch.bfloat16
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
POOL = 6
DELAYED_SHARE, LONGEST_DELAY_CYCLES = 1 / 8, 400_000
TIMEOUT_S = 10.0

Tensors = list[torch.Tensor]
"""One for each rank."""


@dataclass
class Ranks:
    """The ranks of this process, and the arenas that they have made so far: the n-th of each rank share one table."""

    count: int
    streams: list[torch.cuda.Stream] = field(default_factory=list)
    current: int = 0
    tables: dict[int, Tensors] = field(default_factory=dict)
    made: list[int] = field(default_factory=list)
    arenas: list[LocalArena] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gpus = torch.cuda.device_count() if torch.cuda.device_count() >= self.count else 1
        if self.gpus > 1:
            _enable_peer_access(self.count)
        self.streams = [torch.cuda.Stream(self.device(rank)) for rank in range(self.count)]
        self.made = [0] * self.count
        for _ in self.each():
            # Now: the driver loads a kernel at its first use, and waits for all that runs, which would be a rank that waits for others.
            torch.cuda._sleep(1)  # type: ignore[no-untyped-call]
        self.synchronize()

    def device(self, rank: int) -> torch.device:
        return torch.device("cuda", rank % self.gpus)

    @property
    def sm_count(self) -> int:
        return torch.cuda.get_device_properties(0).multi_processor_count * self.gpus // max(self.count, self.gpus)

    def each(self) -> Iterator[int]:
        """Every rank, with its stream as the current one."""
        for rank in range(self.count):
            self.current = rank
            with torch.cuda.device(self.device(rank)), torch.cuda.stream(self.streams[rank]):
                yield rank

    def size(self) -> int:
        return self.count

    def synchronize(self) -> None:
        for stream in self.streams:
            stream.synchronize()


class LocalArena:
    """Stands for an ``Arena`` among ranks of one process."""

    def __init__(self, nbytes: int, group: Ranks, *, timeout_s: float = TIMEOUT_S) -> None:
        self.rank, self.world_size, self.sm_count = group.current, group.count, group.sm_count
        self.device = group.device(self.rank)
        number, group.made[self.rank] = group.made[self.rank], group.made[self.rank] + 1
        if number not in group.tables:
            group.tables[number] = [
                torch.zeros(nbytes + LINE_BYTES, dtype=torch.uint8, device=group.device(rank)) for rank in range(group.count)
            ]
            for gpu in range(group.gpus):
                torch.cuda.synchronize(gpu)
        group.arenas.append(self)
        self.layout = Layout(nbytes + LINE_BYTES, reserved=LINE_BYTES)
        self.fault = torch.zeros(8, dtype=torch.int32, pin_memory=True)
        bases = [memory.data_ptr() for memory in group.tables[number]]
        self.view = ArenaView(
            base=(type(ArenaView().base))(*bases),
            rank=self.rank,
            world_size=self.world_size,
            timeout_ns=int(timeout_s * 1e9),
            fault=self.fault.data_ptr(),
        )

    def take(self, nbytes: int, *, align: int = LINE_BYTES) -> int:
        return self.layout.take(nbytes, align=align)

    def seal(self) -> None: ...

    def raise_fault(self) -> None:
        if any(self.fault.tolist()):
            raise DeviceTimeout(f"rank {self.rank} of {self.world_size}: {self.fault.tolist()} (roles: {', '.join(ROLES)})")


@contextlib.contextmanager
def in_one_process(ranks: Ranks) -> Iterator[None]:
    """What the kit makes, it makes for these ranks."""
    stand_in = types.SimpleNamespace(get_world_size=lambda group=None: ranks.count)
    with contextlib.ExitStack() as stack:
        for module in (collectives, all_gather_gemm, gemm_reduce_scatter):
            stack.enter_context(mock.patch.object(module, "Arena", LocalArena))
        for module in (all_gather_gemm, gemm_reduce_scatter):
            stack.enter_context(mock.patch.object(module, "dist", stand_in))
        stack.enter_context(mock.patch.object(collectives, "_group", lambda group: group))
        yield


def integers(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, largest: int = 3) -> torch.Tensor:
    return torch.randint(-largest, largest + 1, shape, device=device).to(dtype)


def spread(ranks: Ranks, tensor: torch.Tensor) -> Tensors:
    return [tensor.to(ranks.device(rank)) for rank in range(ranks.count)]


@dataclass
class Workload:
    """``call(rank, inputs) -> output`` for each rank, ``draw()`` for inputs of all ranks, and the exact ``answer`` to them on each."""

    name: str
    draw: Callable[[], Tensors | tuple[Tensors, ...]]
    call: Callable[..., torch.Tensor | None]
    answer: Callable[..., list[torch.Tensor | None]]


def collective_workloads(
    ranks: Ranks, communicators: list[collectives.Communicator], nbytes: int, dtype: torch.dtype
) -> Iterator[Workload]:
    """The eight collectives on tensors of ``nbytes`` (of the largest tensor of a rank), rounded down to whole elements per part."""
    count = ranks.count
    part = max(1, nbytes // dtype.itemsize // count)
    total = part * count

    def draw(elements: int) -> Callable[[], Tensors]:
        return lambda: [integers((elements,), dtype, ranks.device(rank)) for rank in range(count)]

    def summed(inputs: Tensors) -> torch.Tensor:
        return torch.stack([tensor.to(ranks.device(0)).double() for tensor in inputs]).sum(0).to(dtype)

    def joined(inputs: Tensors) -> torch.Tensor:
        return torch.cat([tensor.to(ranks.device(0)).view(torch.uint8) for tensor in inputs]).view(dtype)

    def only(rank: int, tensor: torch.Tensor) -> list[torch.Tensor | None]:
        return [tensor.to(ranks.device(rank)) if other == rank else None for other in range(count)]

    root = count - 1

    def all_reduce(rank: int, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        communicators[rank].all_reduce(x, out)
        return out

    def all_gather(rank: int, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(total)
        communicators[rank].all_gather_into_tensor(out, x)
        return out

    def reduce_scatter(rank: int, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(part)
        communicators[rank].reduce_scatter_tensor(out, x)
        return out

    def all_to_all(rank: int, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        communicators[rank].all_to_all_single(out, x)
        return out

    def broadcast(rank: int, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        communicators[rank].broadcast(x, root, out)
        return out

    def reduce(rank: int, x: torch.Tensor) -> torch.Tensor | None:
        out = torch.empty_like(x)
        communicators[rank].reduce(x, root, out)
        return out if rank == root else None

    def gather(rank: int, x: torch.Tensor) -> torch.Tensor | None:
        out = x.new_empty(total) if rank == root else None
        communicators[rank].gather(x, out, root)
        return out

    def scatter(rank: int, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(part)
        communicators[rank].scatter(out, x if rank == root else None, root)
        return out

    def transposed(inputs: Tensors) -> list[torch.Tensor | None]:
        return [joined([tensor[rank * part : (rank + 1) * part] for tensor in inputs]).to(ranks.device(rank)) for rank in range(count)]

    def parts(tensor: torch.Tensor) -> list[torch.Tensor | None]:
        return [tensor[rank * part : (rank + 1) * part].to(ranks.device(rank)) for rank in range(count)]

    sums = dtype in collectives_sum_dtypes()
    label = f"{total * dtype.itemsize} B {str(dtype).removeprefix('torch.')}"
    if sums:
        yield Workload(f"all_reduce {label}", draw(total), all_reduce, lambda x: list(spread(ranks, summed(x))))
        yield Workload(f"reduce {label}", draw(total), reduce, lambda x: only(root, summed(x)))
        yield Workload(f"reduce_scatter {label}", draw(total), reduce_scatter, lambda x: parts(summed(x)))
    yield Workload(f"all_gather {label}", draw(part), all_gather, lambda x: list(spread(ranks, joined(x))))
    yield Workload(f"gather {label}", draw(part), gather, lambda x: only(root, joined(x)))
    yield Workload(f"scatter {label}", draw(total), scatter, lambda x: parts(x[root]))
    yield Workload(f"broadcast {label}", draw(total), broadcast, lambda x: list(spread(ranks, x[root])))
    yield Workload(f"all_to_all {label}", draw(total), all_to_all, transposed)


def collectives_sum_dtypes() -> tuple[torch.dtype, ...]:
    return (BF16, torch.float16, torch.float32, torch.int32, *FP8)


def fused_workloads(ranks: Ranks, m: int, n: int, k: int) -> Iterator[Workload]:
    """GEMM + reduce-scatter and all-gather + GEMM; (m, n) is the size of the product, k the depth on each rank."""
    count = ranks.count
    multiply, gathered = {}, {}
    for rank in ranks.each():
        multiply[rank] = gemm_reduce_scatter.GemmReduceScatter(m, n, BF16, ranks)  # type: ignore[arg-type]
    for rank in ranks.each():
        gathered[rank] = all_gather_gemm.AllGatherGemm(m, k, BF16, ranks)  # type: ignore[arg-type]

    def matrices(rows: int, columns: int) -> Tensors:
        # Sums of so many products of -1, 0 and 1 stay far below 256, up to which bfloat16 holds every integer: partial ones travel in it.
        return [gemm.aligned(integers((rows, columns), BF16, ranks.device(rank), largest=1)) for rank in range(count)]

    def rows_of_sum(pairs: tuple[Tensors, Tensors]) -> list[torch.Tensor | None]:
        total = sum(a.to(ranks.device(0)).float() @ b.to(ranks.device(0)).float() for a, b in zip(*pairs, strict=True))
        return [part.to(BF16).to(ranks.device(rank)) for rank, part in enumerate(total.chunk(count))]  # type: ignore[union-attr]

    def product_of_all(pairs: tuple[Tensors, Tensors]) -> list[torch.Tensor | None]:
        whole = torch.cat([a.to(ranks.device(0)) for a in pairs[0]], dim=1).float()
        return [(whole @ b.to(ranks.device(0)).float()).to(BF16).to(b.device) for b in pairs[1]]

    yield Workload(
        f"gemm_reduce_scatter {m}x{n}x{k}",
        lambda: (matrices(m, k), matrices(k, n)),
        lambda rank, a, b: multiply[rank](a, b),
        rows_of_sum,
    )
    yield Workload(
        f"all_gather_gemm {m}x{n}x{k}",
        lambda: (matrices(m, k), matrices(count * k, n)),
        lambda rank, a, b: gathered[rank](a, b),
        product_of_all,
    )


def arguments(drawn: Tensors | tuple[Tensors, ...], rank: int) -> tuple[torch.Tensor, ...]:
    return tuple(tensors[rank] for tensors in drawn) if isinstance(drawn, tuple) else (drawn[rank],)


def wrong_words(got: torch.Tensor | None, expected: torch.Tensor | None) -> torch.Tensor | int:
    if got is None or expected is None:
        return 0
    if got.dtype in FP8:  # which cannot be compared as numbers
        got, expected = got.view(torch.uint8), expected.view(torch.uint8)
    return (got != expected).sum()


def check(ranks: Ranks, work: Workload, calls: int = 3) -> int:
    """Wrong words in some calls behind each other."""
    wrong = 0
    for _ in range(calls):
        drawn = work.draw()
        expected = work.answer(drawn)
        for gpu in range(ranks.gpus):
            torch.cuda.synchronize(gpu)
        got = [work.call(rank, *arguments(drawn, rank)) for rank in ranks.each()]
        ranks.synchronize()
        wrong += sum(int(wrong_words(got[rank], expected[rank])) for rank in ranks.each())
    return wrong


def soak(ranks: Ranks, work: Workload, launches: int) -> int:
    """Wrong words in so many launches, replayed with nothing between them but delays of random ranks."""
    drawn = [work.draw() for _ in range(POOL)]
    expected = [work.answer(item) for item in drawn]
    wrong = [torch.zeros((), dtype=torch.int64, device=ranks.device(rank)) for rank in range(ranks.count)]
    for gpu in range(ranks.gpus):
        torch.cuda.synchronize(gpu)
    for number in range(POOL):
        for rank in ranks.each():
            work.call(rank, *arguments(drawn[number], rank))
        ranks.synchronize()
    got: dict[tuple[int, int], torch.Tensor | None] = {}
    every = list(itertools.product(range(POOL), range(ranks.count)))

    def launch(number: int, rank: int) -> None:
        got[number, rank] = work.call(rank, *arguments(drawn[number], rank))

    def compare(number: int, rank: int) -> None:
        wrong[rank].add_(wrong_words(got[number, rank], expected[number][rank]))

    launches_of = {item: captured(ranks, launch, *item) for item in every}
    comparisons_of = {item: captured(ranks, compare, *item) for item in every}
    for _ in range(launches):
        number = random.randrange(POOL)
        late = random.randrange(ranks.count) if random.random() < DELAYED_SHARE else -1
        for rank in ranks.each():
            if rank == late:
                torch.cuda._sleep(random.randrange(LONGEST_DELAY_CYCLES))  # type: ignore[no-untyped-call]
            launches_of[number, rank].replay()
        for rank in ranks.each():  # behind the launches of all: streams may share a queue, in which nothing may wait for a later launch
            comparisons_of[number, rank].replay()
    ranks.synchronize()
    return sum(int(total) for total in wrong)


@contextlib.contextmanager
def faults_told(ranks: Ranks) -> Iterator[None]:
    """Says who waited for whom when a kernel has given up."""
    try:
        yield
    except (RuntimeError, DeviceTimeout):
        for arena in ranks.arenas:
            with contextlib.suppress(DeviceTimeout):
                arena.raise_fault()
                continue
            print(f"FAIL rank {arena.rank} gave up a wait: {arena.fault.tolist()}", flush=True)
        raise


def captured(ranks: Ranks, work: Callable[[int, int], None], number: int, rank: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with (
        torch.cuda.device(ranks.device(rank)),
        torch.cuda.graph(graph, stream=ranks.streams[rank], capture_error_mode="thread_local"),
    ):
        work(number, rank)
    return graph


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--launches", type=int, default=20_000, help="of each kernel, while it is soaked")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    ranks, rows = Ranks(options.ranks), []

    def note(what: str, name: str, launches: int, wrong: int, begin: float) -> None:
        rows.append({"what": what, "name": name, "launches": launches, "wrong_words": wrong})
        print(f"{'ok  ' if wrong == 0 else 'FAIL'} {what} {name}: {launches} launches, {wrong} wrong words, {time.time() - begin:.1f} s")

    with in_one_process(ranks), faults_told(ranks):
        communicators = [collectives.Communicator(ranks) for _ in ranks.each()]  # type: ignore[arg-type]
        sizes = (4, 100, 4096, 50_000) if options.small else (4, 100, 4096, 300_001, 2 << 20, 9_000_003, 12 << 20, 20_000_003, 48 << 20)
        for nbytes, dtype in [(nbytes, BF16) for nbytes in sizes] + [(50_000, dtype) for dtype in (*collectives_sum_dtypes(), torch.uint8)]:
            for work in collective_workloads(ranks, communicators, nbytes, dtype):
                begin = time.time()
                note("check", work.name, 3, check(ranks, work), begin)
        shapes = (
            [(64 * ranks.count, 72, 40)]
            if options.small
            else [(64 * ranks.count, 72, 40), (1000 * ranks.count, 520, 264), (4096, 4096, 1024)]
        )
        for shape in shapes:
            for work in fused_workloads(ranks, *shape):
                begin = time.time()
                note("check", work.name, 3, check(ranks, work), begin)
        if not options.small:
            soaked = [work for nbytes in (4096, 1 << 20, 12 << 20) for work in collective_workloads(ranks, communicators, nbytes, BF16)]
            for work in [*soaked, *fused_workloads(ranks, 256 * ranks.count, 512, 256)]:
                launches = options.launches if "12582912" not in work.name else options.launches // 10
                begin = time.time()
                note("soak", work.name, launches, soak(ranks, work, launches), begin)
    if options.out is not None:
        options.out.write_text(json.dumps({"environment": record(), "ranks": ranks.count, "gpus": ranks.gpus, "rows": rows}, indent=1))
    sys.exit(any(row["wrong_words"] for row in rows))


if __name__ == "__main__":
    main()
