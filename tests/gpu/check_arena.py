"""The pool of arenas on GPUs: growth, reuse, and fused products of 1,000 random sizes, by virtual memory management and by CUDA IPC.

    PYTHONPATH=src python tests/gpu/check_arena.py --ranks 4 --ranks-per-gpu 4 --out FILE [--limit 85] [--sizes 1000] [--no-mps]

Ranks share GPUs through an MPS daemon of the script's own where the machine has one, else (or with --no-mps) in time slices. For each kind
of memory every rank runs three parts:

    growth     a captured all-reduce and a captured product are replayed right behind each growth of the pool
    reuse      arenas that were full of ones, written by peers until they were closed, are zero when they come again, and kernels run there
    sizes      GEMM + reduce-scatter and all-gather + GEMM of random m, each result compared in every word with torch's
    mixed      behind ``ops.prepare``, operators of all kinds with 0 to 8,192 tokens at random, each word compared; then ``ops.close``

Contents are -1, 0 and 1, so that every result is exact. The table has a line for each kind; FILE has all figures. Exits with 1 if a result
was wrong, or if memory was asked for behind the largest m, with 3 at the time limit, which ends all ranks.
"""

import argparse
import faulthandler
import json
import os
import random
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from harness import BF16, end_ranks, script

from peerlane import ops
from peerlane.device import Arena, Communicator, Group, group_of
from peerlane.device.host.device_memory import bytes_at
from peerlane.device.host.launch import loaded_cubins
from peerlane.device.host.pool import LEASE_BYTES
from peerlane.device.products.all_gather_gemm import all_gather_gemm
from peerlane.device.products.gemm_reduce_scatter import GemmReduceScatter, gemm_reduce_scatter
from peerlane.errors import UsageError
from peerlane.hardware.environment import record
from peerlane.hardware.virtual_node import VirtualNode, available_sharing
from peerlane.settings import ARENA_MEMORY

KINDS = ("vmm", "ipc")
NAMES = {"vmm": "virtual memory", "ipc": "CUDA IPC"}
N, K, LARGEST_M = 512, 512, 8192
ALLOWED_BEHIND_LARGEST = 0
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


def rank_main(
    rank: int, options: argparse.Namespace, environments: list[dict[str, str]], kind: str, port: int, deadline: float, out: str
) -> None:
    os.environ.update(environments[rank])
    os.environ[ARENA_MEMORY] = kind
    faulthandler.dump_traceback_later(max(1.0, deadline + 5 - time.monotonic()), exit=True)
    torch.cuda.set_device(rank // options.per_gpu)
    limit = timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks, timeout=limit)
    group = group_of()
    products = Products(group)
    torch.cuda.synchronize(group.device)
    parts = {"growth": check_growth(group, products), "reuse": check_reuse(group, products)}
    parts["kind"] = group.memory_report().kind
    parts["sizes"] = check_sizes(group, products, options.sizes, deadline - 0.5 * (deadline - time.monotonic()))
    parts["mixed"] = check_mixed(group, products, options.calls, deadline)
    parts["wrong_words"] = int(products.wrong)
    parts["open_files"] = len(os.listdir("/proc/self/fd"))
    everyone = group.exchange(parts)
    if rank == 0:
        Path(out).write_text(json.dumps(everyone))
    sys.stdout.flush()
    os._exit(0)


def run_kind(options: argparse.Namespace, kind: str, deadline: float, folder: Path) -> list[dict[str, Any]] | str:
    """What every rank has found, or what went wrong."""
    sharing = available_sharing() if options.per_gpu > 1 and not options.no_mps else "time_slices"
    node = VirtualNode(options.ranks, options.ranks // options.per_gpu, sharing)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    out = folder / f"{kind}.json"
    with node.daemon() as daemon:
        environments = [node.rank_environment(rank, daemon) for rank in range(options.ranks)]
        context = mp.spawn(rank_main, (options, environments, kind, store.port, deadline, str(out)), nprocs=options.ranks, join=False)
        stuck, codes, texts = end_ranks(context, deadline + 8, at_failure=True)
    if stuck or codes:
        return "\n".join([f"ranks that were killed: {stuck}; exit codes: {codes}", *texts])
    found: list[dict[str, Any]] = json.loads(out.read_text())
    return found


def line(kind: str, ranks: list[dict[str, Any]]) -> str:
    one, sizes = ranks[0], ranks[0]["sizes"]
    cells = (
        kind,
        one["kind"],
        one["growth"]["growth_ms"],
        one["reuse"]["lease_ms"],
        sizes["sizes"],
        sizes["allocations_behind_largest"],
        sizes["most_reserved_bytes"] / (1 << 20),
        sizes["ms_for_each_size"],
        wrong_words(ranks),
        *(one["mixed"][name] for name in ("calls", "ms_for_each_call")),
        *(one["mixed"][f"{name}_behind_largest"] for name in ("allocations", "exchanges", "cubins")),
        one["mixed"]["left_bytes"],
    )
    mixed = "{:>6} {:>8.2f} {:>6} {:>5} {:>7} {:>5}"
    return ("{:<5} {:<15} {:>9.1f} {:>8.2f} {:>6} {:>7} {:>12.0f} {:>8.2f} {:>6} " + mixed).format(*cells)


def wrong_words(ranks: list[dict[str, Any]]) -> int:
    return sum(int(rank["growth"]["wrong"] + rank["growth"]["moved"] + rank["reuse"]["wrong"] + rank["wrong_words"]) for rank in ranks)


def good(kind: str, ranks: list[dict[str, Any]]) -> bool:
    behind = max(rank["sizes"]["allocations_behind_largest"] for rank in ranks)
    reused = all(rank["reuse"]["places"] < REUSES for rank in ranks)
    quiet = all(
        rank["mixed"]["allocations_behind_largest"] == 0 == rank["mixed"]["exchanges_behind_largest"] and rank["mixed"]["left_bytes"] == 0
        for rank in ranks
    )
    kinds = all(rank["kind"] == NAMES[kind] for rank in ranks)
    return not wrong_words(ranks) and behind <= ALLOWED_BEHIND_LARGEST and reused and quiet and kinds


def main() -> int:
    parser = script(__doc__, ranks=4)
    parser.add_argument("--ranks-per-gpu", type=int, default=0, help="by default as many as share a GPU where all GPUs are used")
    parser.add_argument("--limit", type=float, default=85.0, help="seconds, after which all ranks are killed")
    parser.add_argument("--sizes", type=int, default=1000, help="random m of each kind of memory")
    parser.add_argument("--calls", type=int, default=10_000, help="of operators with random numbers of tokens")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--no-mps", action="store_true")
    options = parser.parse_args()
    gpus = torch.cuda.device_count()
    if not gpus:
        parser.error("there is no GPU here; tests/ranks/test_arena_memory.py runs on CPUs")
    options.per_gpu = options.ranks_per_gpu or -(-options.ranks // gpus)
    begin, status = time.monotonic(), 0
    found: dict[str, Any] = {"environment": record(), "ranks": options.ranks, "ranks_per_gpu": options.per_gpu}
    print(
        "kind  memory          growth ms lease ms  sizes  behind reserved MiB  ms/size  wrong  calls  ms/call  alloc  exch  cubins  left",
        flush=True,
    )
    for number, kind in enumerate(options.kinds):
        left = options.limit - (time.monotonic() - begin)
        share = 1.0 if number + 1 == len(options.kinds) else 0.6  # the first compiles
        deadline = time.monotonic() + left * share - 10
        try:
            with tempfile.TemporaryDirectory() as folder:
                result = run_kind(options, kind, deadline, Path(folder))
        except UsageError as error:
            parser.error(str(error))
        found[kind] = result
        if isinstance(result, str):
            print(f"{kind}: {result}", flush=True)
            status = 3 if time.monotonic() > deadline + 8 else 1
        else:
            print(line(kind, result), flush=True)
            status = status or int(not good(kind, result))
        if options.out is not None:
            options.out.write_text(json.dumps(found, indent=1))
    print(f"{time.monotonic() - begin:.0f} s; {'all is right' if not status else 'see above'}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
