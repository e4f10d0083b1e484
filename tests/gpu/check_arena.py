"""The pool of arenas on GPUs: growth, reuse, and fused products of 1,000 random sizes, by virtual memory management and by CUDA IPC.

    PYTHONPATH=src python tests/gpu/check_arena.py --ranks 4 --kind ipc --out FILE [--limit 85] [--sizes 1000] [--no-mps]

Ranks share GPUs through an MPS daemon of the script's own where the machine has one, else (or with --no-mps) in time slices. Every rank
runs four parts:

    growth     a captured all-reduce and a captured product are replayed right behind each growth of the pool
    reuse      arenas that were full of ones, written by peers until they were closed, are zero when they come again, and kernels run there
    sizes      GEMM + reduce-scatter and all-gather + GEMM of random m, each result compared in every word with torch's
    mixed      behind ``ops.prepare``, operators of all kinds with 0 to 8,192 tokens at random, each word compared; then ``ops.close``

Contents are -1, 0 and 1, so that every result is exact. A part is a row. Exits with 1 if a result was wrong, if memory was asked for
behind the largest m, or if memory of another kind was taken; with 3 at the time limit, which ends all ranks.
"""

import os
import random
import statistics
import time
from collections.abc import Iterator
from typing import Any

os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
from harness import BF16, Row, run_on_shared_gpus, script, sharing

from peerlane import ops
from peerlane.device import Arena, Communicator, Group, group_of
from peerlane.device.host.device_memory import bytes_at
from peerlane.device.host.launch import loaded_cubins
from peerlane.device.host.pool import LEASE_BYTES
from peerlane.device.products.all_gather_gemm import all_gather_gemm
from peerlane.device.products.gemm_reduce_scatter import GemmReduceScatter, gemm_reduce_scatter
from peerlane.settings import ARENA_MEMORY

NAMES = {"vmm": "virtual memory", "ipc": "CUDA IPC"}
N, K, LARGEST_M = 512, 512, 8192
GROWTHS, REUSES = 3, 40


def ones_and_zeroes(shape: tuple[int, ...], seed: int, device: torch.device) -> torch.Tensor:
    """-1, 0 and 1, the same on all ranks. Sums of 2,048 products of these stay below 256, up to which bfloat16 holds every integer."""
    return torch.randint(-1, 2, shape, generator=torch.Generator(device).manual_seed(seed), device=device).to(BF16)


class Products:
    """Operands of all ranks and the products of all rows; calls of any m take rows from a random place on."""

    def __init__(self, group: Group) -> None:
        self.group, world, device = group, group.world_size, group.device
        rows, local_k = 2 * LARGEST_M, K // world
        self.a = ones_and_zeroes((world, rows, K), 1, device)
        self.b = ones_and_zeroes((world, K, N), 2, device)
        self.summed = sum(a.float() @ b.float() for a, b in zip(self.a, self.b, strict=True))
        self.parts = ones_and_zeroes((world, rows, local_k), 3, device)
        self.own = ones_and_zeroes((world, K, N), 4, device)[group.rank].contiguous()
        self.gathered = torch.cat(list(self.parts), dim=1).float() @ self.own.float()
        self.local_k = local_k
        self.wrong = torch.zeros((), dtype=torch.int64, device=device)

    def scatter(self, kernel: Any, m: int, start: int) -> torch.Tensor:
        """The result of rank's rows; counts wrong words on the device."""
        share, rank = m // self.group.world_size, self.group.rank
        got = kernel(self.a[rank, start : start + m], self.b[rank])
        self.wrong += (got != self.summed[start + rank * share : start + (rank + 1) * share].to(BF16)).sum()
        return got

    def gather(self, kernel: Any, m: int, start: int) -> None:
        got = kernel(self.parts[self.group.rank, start : start + m], self.own)
        self.wrong += (got != self.gathered[start : start + m].to(BF16)).sum()


def milliseconds(run: Any) -> tuple[float, Any]:
    begin = time.perf_counter()
    value = run()
    return (time.perf_counter() - begin) * 1e3, value


def check_growth(group: Group, products: Products) -> dict[str, Any]:
    """Graphs that were captured before are right behind every growth."""
    device, world = group.device, group.world_size
    communicator = Communicator(group)
    x, y = (torch.zeros(1 << 18, device=device) for _ in range(2))
    start = torch.zeros((), device=device)
    operator = GemmReduceScatter(1024, N, BF16, group)
    a, b = products.a[group.rank, :1024].clone(), products.b[group.rank]
    out: list[torch.Tensor] = []

    def step() -> None:
        torch.add(start, float(group.rank), out=x[0])
        x[1:].copy_(x[0].expand_as(x[1:]))
        communicator.all_reduce(x, y)
        out[:] = [operator(a, b)]

    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize(device)
    group.exchange(None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        step()
    wrong, kept, times, moved = 0, [], [], 0
    share = 1024 // world
    expected = products.summed[group.rank * share : (group.rank + 1) * share].to(BF16)
    bases = list(communicator.arena.view.base)
    for growth in range(GROWTHS):
        before = group.memory_report()
        took, arena = milliseconds(lambda: Arena(before.reserved_bytes // 2 + (4 << 20), group))  # noqa: B023
        times.append(took)
        kept.append(arena)
        if group.memory_report().allocations == before.allocations:
            raise RuntimeError("the pool did not grow")
        for replay in range(5):
            start.fill_(10.0 * growth + replay)
            graph.replay()
            total = world * (10 * growth + replay) + world * (world - 1) / 2
            wrong += int((y != total).sum()) + int((out[0] != expected).sum())
        moved += list(communicator.arena.view.base) != bases
    report = group.memory_report()
    for closable in (*kept, operator, communicator):
        closable.close()
    return {"wrong": wrong, "moved": moved, "growth_ms": statistics.median(times), "reserved_bytes": report.reserved_bytes}


def check_reuse(group: Group, products: Products) -> dict[str, Any]:
    """Parts that peers were writing when they were closed are zero when they come again; kernels begin there with their first epoch."""
    draw, wrong, times, places = random.Random(5), 0, [], set()
    keeper = Arena(1, group)
    first = group.memory_report()
    for number in range(REUSES):
        nbytes = draw.randrange(1, 64) * LEASE_BYTES
        took, arena = milliseconds(lambda: Arena(nbytes, group))  # noqa: B023
        times.append(took)
        offset = arena.take(nbytes)
        words = arena.tensor(offset, (nbytes,), torch.uint8)
        wrong += int(words.count_nonzero())
        places.add(arena.view.base[group.rank])
        group.exchange(None)  # all have looked
        for peer in range(group.world_size):
            bytes_at(arena.view.base[peer] + offset, nbytes, group.device).fill_(255)
        arena.close()  # the stores are on their way
        if number % 4 == 0:
            operator = GemmReduceScatter(64 * group.world_size, N, BF16, group)
            for _ in range(3):
                products.scatter(operator, 64 * group.world_size, draw.randrange(LARGEST_M))
            operator.close()
    added = group.memory_report().allocations - first.allocations
    keeper.close()
    return {"wrong": wrong, "lease_ms": statistics.median(times), "places": len(places), "allocations": added}


def check_sizes(group: Group, products: Products, count: int, deadline: float) -> dict[str, Any]:
    """Random m, multiples of the ranks; how often memory was asked for behind the largest."""
    world, draw = group.world_size, random.Random(7)
    sizes = [world * draw.randrange(1, LARGEST_M // world + 1) for _ in range(count)]
    largest = sizes.index(max(sizes))
    keeper = Arena(1, group)
    begin, allocations, reserved, done = time.monotonic(), [], [], 0
    for m in sizes:
        start = draw.randrange(LARGEST_M)
        products.scatter(gemm_reduce_scatter(group, m, N, BF16), m, start)
        products.gather(all_gather_gemm(group, m, products.local_k, BF16), m, start)
        report = group.memory_report()
        allocations.append(report.allocations)
        reserved.append(report.reserved_bytes)
        done += 1
        if done % 20 == 0 and group.exchange(time.monotonic() > deadline)[0]:
            break
    torch.cuda.synchronize(group.device)
    seconds = time.monotonic() - begin
    behind = allocations[-1] - allocations[min(largest, done - 1)]
    report = group.memory_report()
    keeper.close()
    return {
        "sizes": done,
        "largest_came": largest,
        "allocations": allocations[-1],
        "allocations_behind_largest": behind,
        "reserved_bytes": report.reserved_bytes,
        "leased_bytes": report.leased_bytes,
        "most_reserved_bytes": max(reserved),
        "ms_for_each_size": seconds * 1e3 / done,
        "report": str(report),
    }


def check_mixed(group: Group, products: Products, count: int, deadline: float) -> dict[str, Any]:
    """Calls of operators in a random order; what they take and exchange behind ``ops.prepare``, and what is left behind ``ops.close``."""
    rank, world, draw, shard = group.rank, group.world_size, random.Random(11), N // group.world_size
    x = ones_and_zeroes((world, LARGEST_M, N), 5, group.device)
    summed, own = x.float().sum(0).to(BF16), x[rank]
    columns = [b[:, q * shard : (q + 1) * shard].contiguous() for q, b in enumerate(products.b)]
    sides = torch.cat([a[:LARGEST_M].float() @ b.float() for a, b in zip(products.a, columns, strict=True)], 1).to(BF16)
    a, b, parts = products.a[rank, :LARGEST_M], products.b[rank], products.parts[rank, :LARGEST_M]
    total, gathered = products.summed[:LARGEST_M].to(BF16), products.gathered[:LARGEST_M].to(BF16)
    calls: list[tuple[Any, Any]] = [
        (lambda t: ops.all_reduce(own[:t]), lambda t: summed[:t]),
        (lambda t: ops.all_reduce(own[:t], reduce_op="max"), lambda t: x[:, :t].amax(0)),
        (lambda t: ops.all_gather(own[:t]), lambda t: x[:, :t].flatten(0, 1)),
        (lambda t: ops.reduce_scatter(own[:t]), lambda t: summed[:t].view(world, -1, N)[rank]),
        (lambda t: ops.gemm_all_reduce(a[:t], b), lambda t: total[:t]),
        (lambda t: ops.gemm_reduce_scatter(a[:t], b), lambda t: total[:t].view(world, -1, N)[rank]),
        (lambda t: ops.gemm_all_gather(a[:t], columns[rank]), lambda t: sides[:t]),
        (lambda t: ops.all_gather_gemm(parts[:t], products.own), lambda t: gathered[:t]),
    ]

    def state() -> dict[str, int]:
        return {"allocations": group.memory_report().allocations, "exchanges": group._exchange._rounds, "cubins": len(loaded_cubins())}  # type: ignore[attr-defined]

    prepared = ops.prepare(max_tokens=LARGEST_M, hidden=N)
    for call, _ in calls:
        call(LARGEST_M)
    torch.cuda.synchronize(group.device)
    group.agree(0)  # whose first call makes the board
    begin, before, done = time.monotonic(), state(), 0
    for _ in range(count):
        call, answer = calls[draw.randrange(len(calls))]
        tokens = world * draw.randrange(LARGEST_M // world + 1)
        if tokens:
            products.wrong += (call(tokens) != answer(tokens)).sum()
        else:
            call(0)
        done += 1
        if done % 250 == 0 and group.agree(int(time.monotonic() > deadline))[0]:
            break
    torch.cuda.synchronize(group.device)
    seconds, after, report = time.monotonic() - begin, state(), ops.memory_report()
    ops.close()
    return {
        "calls": done,
        "ms_for_each_call": seconds * 1e3 / done,
        **{f"{name}_behind_largest": after[name] - before[name] for name in after},
        "prepared_bytes": prepared.reserved_bytes,
        "reserved_bytes": report.reserved_bytes,
        "left_bytes": group.memory_report().reserved_bytes,
        "report": str(report),
    }


def rows_of(kind: str, sizes: int, calls: int, limit_s: float, rank: int, ranks: int) -> Iterator[Row]:
    os.environ[ARENA_MEMORY] = kind
    begin, group = time.monotonic(), group_of()
    products = Products(group)
    torch.cuda.synchronize(group.device)

    def row(part: str, found: Row, *faults: bool) -> Row:
        wrong = found.pop("wrong", 0) + found.pop("moved", 0) + int(products.wrong) + sum(faults)
        products.wrong.zero_()
        return {"memory": group.memory_report().kind, "part": part, **found, "wrong": wrong, "open_files": len(os.listdir("/proc/self/fd"))}

    yield row("growth", check_growth(group, products), group.memory_report().kind != NAMES[kind])
    found = check_reuse(group, products)
    yield row("reuse", found, found["places"] >= REUSES)
    found = check_sizes(group, products, sizes, begin + limit_s / 2)
    yield row("sizes", found, found["allocations_behind_largest"] > 0)
    found = check_mixed(group, products, calls, begin + limit_s - 10)
    yield row("mixed", found, any(found[name] for name in ("allocations_behind_largest", "exchanges_behind_largest", "left_bytes")))


if __name__ == "__main__":
    parser = script(__doc__, ranks=4, limit_s=85.0)
    parser.add_argument("--sizes", type=int, default=1000, help="random m")
    parser.add_argument("--calls", type=int, default=10_000, help="of operators with random numbers of tokens")
    parser.add_argument("--kind", choices=NAMES, default="vmm", help="of memory")
    options = parser.parse_args()
    asked = options.kind, options.sizes, options.calls, options.limit
    run_on_shared_gpus(options.ranks, options.out, rows_of, *asked, backend="gloo", timeout_s=60.0, **sharing(options))
