"""The torch.distributed backend ``peerlane`` on GPUs: every operation and dtype against exact answers, then times beside NCCL and torch.

    PYTHONPATH=src python tests/gpu/check_backend.py --ranks 4 --ranks-per-gpu 4 --out FILE [--limit 540]
    python tests/gpu/check_backend.py --ranks 3 --cpu              try the script itself, on gloo

Ranks share GPUs through an MPS daemon of the script's own where the machine has one, else (or with --no-mps) in time slices.
Every operation runs blocking, asynchronously and as a replayed CUDA graph, with new contents each time; graphs take three dtypes: one that
the kit sums, one that NCCL sums, one that is only moved. ``--reductions`` checks only what reduces: SUM, AVG, PREMUL_SUM, MAX and MIN.
Then FSDP2 and DDP take three steps each, whose gradients must have been reduced by the kit alone. The table gives the time of a call
on the slowest rank: median and quartiles of ``STRETCHES`` stretches, in microseconds. ``bytes`` is what every rank has at first. All that
was found is in FILE after every row. Exits with 1 if an answer was wrong, with 3 at the time limit, which ends all ranks.
"""

import argparse
import faulthandler
import functools
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from harness import FP8, device_us, end_ranks, replay, script
from torch.distributed.distributed_c10d import _coalescing_manager

from peerlane.device import backend
from peerlane.errors import UsageError
from peerlane.hardware.environment import record
from peerlane.hardware.virtual_node import MpsDaemon, VirtualNode, available_sharing

SUMMED = (torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.float64, torch.int64)
MOVED = (*SUMMED, torch.uint8, torch.bool)
COUNTS = (1, 7, 1000, 300_001)
SIZES = tuple(1 << power for power in (11, 14, 17, 20, 22, 24, 26, 29))
STRETCHES, STRETCH_S, MOST_CALLS = 7, 0.02, 50
ROUNDS = 2
IN_GRAPHS = (torch.bfloat16, torch.float64, torch.uint8)
GROUP_TIMEOUT = timedelta(seconds=120)

Call = Callable[[bool], None]
"""Does the operation; True: asynchronously."""


@dataclass
class Operation:
    """``call`` reads ``given`` and writes ``got``; ``answer`` gives what must be there from all ranks' ``given``, or None."""

    name: str
    given: torch.Tensor
    got: torch.Tensor
    call: Call
    answer: Callable[[list[torch.Tensor]], torch.Tensor | None]
    message: bool = False
    """True for point-to-point operations, which NCCL serves where every rank has a GPU of its own."""


@dataclass
class Ranks:
    """This rank's place, and what all ranks write down together."""

    rank: int
    world: int
    device: torch.device
    out: Path | None
    deadline: float
    found: dict[str, Any] = field(default_factory=dict)
    half: Any = None
    reductions: bool = False
    members: tuple[int, ...] = ()

    def agree(self, value: Any) -> list[Any]:
        """Every rank's value, by the CPU."""
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def time_left(self) -> bool:
        return bool(self.agree(time.monotonic() < self.deadline)[0])

    def write(self, part: str, row: dict[str, Any]) -> None:
        self.found.setdefault(part, []).append(row)
        if self.rank == 0:
            print(json.dumps(row), flush=True)
            self.save()

    def save(self) -> None:
        if self.rank == 0 and self.out is not None:
            self.out.write_text(json.dumps(self.found, indent=1))

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def contents(rank: int, seed: int, like: torch.Tensor) -> torch.Tensor:
    """-1, 0 and 1, so that sums of eight ranks are exact in every dtype; 0 and 1 where there is no sign. The same on all ranks' devices."""
    generator = torch.Generator(like.device).manual_seed(1000 * seed + rank)
    lowest = 0 if like.dtype in (torch.uint8, torch.bool) else -1
    return torch.randint(lowest, 2, like.shape, generator=generator, device=like.device).float().to(like.dtype)


def finish(work: Any) -> None:
    if work is not None:
        work.wait()


def reductions(at: Ranks, count: int, dtype: torch.dtype) -> Iterator[Operation]:
    """All-reduce, reduce and reduce-scatter by every reduction but the sum. Means are exact in every dtype where a power of two divides."""
    rank, world, root = at.rank, at.world, at.world - 1
    one, other = (torch.zeros(count, dtype=dtype, device=at.device) for _ in range(2))
    wide = torch.zeros(count * world, dtype=dtype, device=at.device)
    cases: list[tuple[str, Any, Callable[[torch.Tensor], torch.Tensor]]] = []
    if dtype not in FP8:  # NCCL has these without, too
        cases += [("max", dist.ReduceOp.MAX, lambda x: x.amax(0)), ("min", dist.ReduceOp.MIN, lambda x: x.amin(0))]
    if dtype in (torch.bfloat16, torch.float16, torch.float32):
        cases += [("avg", dist.ReduceOp.AVG, lambda x: x.sum(0) / world)]
    if at.device.type == "cuda" and dtype in (torch.bfloat16, torch.float16, torch.float32):  # gloo has none
        cases += [("premul_sum", dist.__dict__["_make_nccl_premul_sum"](0.25), lambda x: x.sum(0) / 4)]

    def stacked(given: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([item.double() for item in given])

    for name, op, answer in cases:

        def all_reduce(later: bool, op: Any = op) -> None:
            other.copy_(one)
            finish(dist.all_reduce(other, op, async_op=later))

        def reduce(later: bool, op: Any = op) -> None:
            other.copy_(one)
            finish(dist.reduce(other, root, op, async_op=later))

        def scatter(later: bool, op: Any = op) -> None:
            finish(dist.reduce_scatter_tensor(other, wide, op, async_op=later))

        def whole(given: list[torch.Tensor], answer: Any = answer) -> torch.Tensor:
            return answer(stacked(given))  # type: ignore[no-any-return]

        def at_root(given: list[torch.Tensor], answer: Any = answer) -> torch.Tensor | None:
            return answer(stacked(given)) if rank == root else None

        def own(given: list[torch.Tensor], answer: Any = answer) -> torch.Tensor:
            return answer(stacked(given)).view(world, -1)[rank]  # type: ignore[no-any-return]

        yield Operation(f"all_reduce {name}", one, other, all_reduce, whole)
        yield Operation(f"reduce {name}", one, other, reduce, at_root)
        yield Operation(f"reduce_scatter_tensor {name}", wide, other, scatter, own)


def operations(at: Ranks, count: int, dtype: torch.dtype, *, sums: bool) -> Iterator[Operation]:
    """Those that sum, or those that move, for ``count`` elements a part."""
    rank, world, root = at.rank, at.world, at.world - 1

    def new(parts: int = 1) -> torch.Tensor:
        return torch.zeros(count * parts, dtype=dtype, device=at.device)

    def total(given: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([item.double() for item in given]).sum(0)

    def part(tensor: torch.Tensor, number: int) -> torch.Tensor:
        return tensor.view(world, -1)[number]

    def apart(parts: int) -> list[torch.Tensor]:
        return [torch.empty(count, dtype=dtype, device=at.device) for _ in range(parts)]

    one, other, wide, wider, odd = new(), new(), new(world), new(world), torch.zeros(count + 1, dtype=dtype, device=at.device)[1:]

    def in_place(target: torch.Tensor, run: Callable[[torch.Tensor, bool], Any]) -> Call:
        def call(later: bool) -> None:
            target.copy_(one)
            finish(run(target, later))

        return call

    if sums:
        yield from reductions(at, count, dtype)
        yield Operation("all_reduce", one, other, in_place(other, lambda t, later: dist.all_reduce(t, async_op=later)), total)
        yield Operation("all_reduce misaligned", one, odd, in_place(odd, lambda t, later: dist.all_reduce(t, async_op=later)), total)
        reduce = in_place(other, lambda t, later: dist.reduce(t, root, async_op=later))
        yield Operation("reduce", one, other, reduce, lambda given: total(given) if rank == root else None)

        def scattered(given: list[torch.Tensor]) -> torch.Tensor:
            return part(total(given), rank)

        def reduce_scatter_list(later: bool) -> None:
            finish(dist.reduce_scatter(other, [piece.clone() for piece in wide.chunk(world)], async_op=later))

        single = lambda later: finish(dist.reduce_scatter_tensor(other, wide, async_op=later))  # noqa: E731
        yield Operation("reduce_scatter_tensor", wide, other, single, scattered)
        yield Operation("reduce_scatter", wide, other, reduce_scatter_list, scattered)

        def functional(later: bool) -> None:
            calls, name = torch.ops._c10d_functional, dist.group.WORLD.group_name  # type: ignore[union-attr]
            other.copy_(calls.wait_tensor(calls.all_reduce(one, "sum", name)))

        def coalesced(later: bool) -> None:
            other.copy_(one)
            with _coalescing_manager(async_ops=later) as manager:
                for piece in other.tensor_split(2):
                    dist.all_reduce(piece)
            if later:
                manager.wait()

        yield Operation("functional all_reduce", one, other, functional, total)
        yield Operation("coalesced all_reduce", one, other, coalesced, total)
        if at.half is not None:
            half = in_place(other, lambda t, later: dist.all_reduce(t, group=at.half, async_op=later))
            yield Operation("all_reduce of a sub-group", one, other, half, lambda given: total([given[r] for r in at.members]))
        return

    broadcast = in_place(other, lambda t, later: dist.broadcast(t, root, async_op=later))
    yield Operation("broadcast", one, other, broadcast, lambda given: given[root])
    gather_single = lambda later: finish(dist.all_gather_into_tensor(wide, one, async_op=later))  # noqa: E731
    yield Operation("all_gather_into_tensor", one, wide, gather_single, torch.cat)

    def all_gather(later: bool) -> None:
        parts = apart(world)
        finish(dist.all_gather(parts, one, async_op=later))
        wide.copy_(torch.cat(parts))

    def gather(later: bool) -> None:
        parts = apart(world) if rank == root else None
        finish(dist.gather(one, parts, root, async_op=later))
        if parts is not None:
            wide.copy_(torch.cat(parts))

    def scatter(later: bool) -> None:
        finish(dist.scatter(other, [piece.clone() for piece in wide.chunk(world)] if rank == root else None, root, async_op=later))

    yield Operation("all_gather", one, wide, all_gather, torch.cat)
    yield Operation("gather", one, wide, gather, lambda given: torch.cat(given) if rank == root else None)
    yield Operation("scatter", wide, other, scatter, lambda given: part(given[root], rank))

    def exchanged(given: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([part(item, rank) for item in given])

    def all_to_all(later: bool) -> None:
        parts = apart(world)
        finish(dist.all_to_all(parts, [piece.clone() for piece in wide.chunk(world)], async_op=later))
        wider.copy_(torch.cat(parts))

    single = lambda later: finish(dist.all_to_all_single(wider, wide, async_op=later))  # noqa: E731
    yield Operation("all_to_all_single", wide, wider, single, exchanged)
    yield Operation("all_to_all", wide, wider, all_to_all, exchanged)
    rows = [[count * ((sender + receiver) % 3) for receiver in range(world)] for sender in range(world)]
    most = torch.zeros(2 * count * world, dtype=dtype, device=at.device)
    into = torch.zeros(sum(row[rank] for row in rows), dtype=dtype, device=at.device)

    def uneven(later: bool) -> None:
        finish(dist.all_to_all_single(into, most[: sum(rows[rank])], [row[rank] for row in rows], rows[rank], async_op=later))

    def uneven_answer(given: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([item[: sum(row)].split(row)[rank] for item, row in zip(given, rows, strict=True)])  # type: ignore[no-untyped-call]

    yield Operation("all_to_all_single with splits", most, into, uneven, uneven_answer)
    if dtype in FP8:
        return

    def ring(later: bool) -> None:
        batch = [dist.P2POp(dist.isend, one, (rank + 1) % world), dist.P2POp(dist.irecv, other, (rank - 1) % world)]
        for work in dist.batch_isend_irecv(batch):
            work.wait()

    def pairs(later: bool) -> None:
        if rank % 2 == 0 and rank + 1 < world:
            dist.send(one, rank + 1)
        elif rank % 2:
            dist.recv(other, rank - 1)

    def tagged(later: bool) -> None:
        (first, second), (early, late) = one.tensor_split(2), other.tensor_split(2)
        following, previous = (rank + 1) % world, (rank - 1) % world
        works = [dist.irecv(late, previous, tag=2), dist.isend(first, following, tag=1), dist.isend(second, following, tag=2)]
        for work in [*works, dist.irecv(early, previous, tag=1)]:
            work.wait()

    if getattr(dist.group.WORLD, "_messages", None) is not None:  # NCCL has no tags, and gloo no empty messages
        yield Operation("isend, irecv with tags", one, other, tagged, lambda given: given[rank - 1], message=True)
    yield Operation("batch_isend_irecv", one, other, ring, lambda given: given[rank - 1], message=True)
    yield Operation("send, recv", one, other, pairs, lambda given: given[rank - 1] if rank % 2 else None, message=True)


def wrong_elements(at: Ranks, operation: Operation, seed: int, run: Callable[[], Any]) -> int:
    """How many elements of this rank's result are wrong after ``run``, with contents of their own for ``seed``."""
    given = [contents(rank, seed, operation.given) for rank in range(at.world)]
    operation.given.copy_(given[at.rank])
    operation.got.fill_(0)
    run()
    wanted = operation.answer(given)
    if wanted is None:
        return 0
    return int((operation.got.double() != wanted.to(operation.got.dtype).double()).sum())


def check(at: Ranks, operation: Operation, *, graph: bool) -> int:
    """Wrong elements of this rank: blocking and asynchronous calls, or replays of a graph and an eager call behind them."""
    blocking, asynchronous = (functools.partial(operation.call, later) for later in (False, True))
    runs = [replay(blocking)] * ROUNDS + [asynchronous] if graph else [blocking, asynchronous] * ROUNDS
    return sum(wrong_elements(at, operation, seed, run) for seed, run in enumerate(runs))


def check_all(at: Ranks) -> int:
    """How many checks failed, of every operation, dtype and size. Graphs of messages come last: NCCL can not capture them everywhere."""
    cuda, bad = at.device.type == "cuda", 0
    for messages, graph in itertools.product((False,) if at.reductions else (False, True), (False, True) if cuda else (False,)):
        begin = time.monotonic()
        for dtype in IN_GRAPHS if graph else (*MOVED, *FP8) if cuda else MOVED:  # gloo moves no fp8
            bad += check_dtype(at, dtype, messages=messages, graph=graph)
            if not at.time_left():
                raise TimeoutError("the checks did not end before the time limit")
        if at.rank == 0:
            what = f"{'messages' if messages else 'collectives'}, {'graphs' if graph else 'eager calls'}"
            print(f"checked {what} in {time.monotonic() - begin:.1f} s: {bad} wrong", flush=True)
        at.save()
    return bad


def check_dtype(at: Ranks, dtype: torch.dtype, *, messages: bool, graph: bool) -> int:
    """How many checks failed on any rank."""
    rows = []
    kinds = (True,) if at.reductions else (False, True)
    for sums, count in itertools.product(kinds if dtype in (*SUMMED, *FP8, torch.uint8) else (False,) if not at.reductions else (), COUNTS):
        for operation in operations(at, count, dtype, sums=sums):
            if operation.message == messages:
                wrong = check(at, operation, graph=graph)
                rows.append({"operation": operation.name, "dtype": str(dtype), "count": count, "graph": graph, "wrong": wrong})
    for row, wrongs in zip(rows, zip(*at.agree([row["wrong"] for row in rows]), strict=True), strict=True):
        row["wrong"] = sum(wrongs)
        if row["wrong"] and at.rank == 0:
            print(f"FAIL {row}", flush=True)
    at.found.setdefault("checks", []).extend(rows)
    return sum(row["wrong"] != 0 for row in rows)


def check_training(at: Ranks) -> int:
    """How many of FSDP2's and DDP's kinds of gradient traffic ran elsewhere than on the kit."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    def layers() -> torch.nn.Sequential:
        torch.manual_seed(1)
        return torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4))).to(at.device)

    sharded, bad = layers(), 0
    mesh, policy = init_device_mesh("cuda", (at.world,)), MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in (*sharded, sharded):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    replicated = torch.nn.parallel.DistributedDataParallel(layers(), device_ids=[at.device.index])
    for name, model in (("FSDP2", sharded), ("DDP", replicated)):
        backend.reset_counts()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for step in range(3):
            model(torch.full((8, 512), float(step + at.rank), device=at.device)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        at.synchronize()
        moved = [entry for entry in backend.counts() if "reduce" in entry.operation or "gather" in entry.operation]
        elsewhere = [entry for entry in moved if entry.device == "cuda" and entry.ran_on != "kit"]
        bad += len(elsewhere) + (not moved)
        at.found.setdefault("training", {})[name] = [vars(entry) for entry in backend.counts()]
        if at.rank == 0:
            print(f"{name}: {len(elsewhere)} kinds of gradient traffic ran elsewhere\n{backend.report()}", flush=True)
    at.save()
    return bad


def bench_calls(at: Ranks, group: Any, nbytes: int) -> dict[str, Callable[[], Any]]:
    """The eight collectives on ``group``."""
    world, count = at.world, max(at.world, nbytes // 2)
    mine, whole = (
        torch.ones(count, device=at.device, dtype=torch.bfloat16),
        torch.ones(count * world, device=at.device, dtype=torch.bfloat16),
    )
    shard, other = mine.new_zeros(count // world), torch.zeros_like(mine)
    parts, wholes = (list(mine.chunk(world)), list(whole.chunk(world))) if at.rank == 0 else (None, None)
    return {
        "all_reduce": lambda: dist.all_reduce(other, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, mine, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(shard, mine, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, mine, group=group),
        "broadcast": lambda: dist.broadcast(other, 0, group=group),
        "reduce": lambda: dist.reduce(other, 0, group=group),
        "gather": lambda: dist.gather(mine, wholes, 0, group=group),
        "scatter": lambda: dist.scatter(shard, parts, 0, group=group),
    }


def symmetric_calls(at: Ranks, group: Any, nbytes: int) -> dict[str, dict[str, Callable[[], Any]]]:
    """torch's symmetric-memory operators, by collective and name; none of them uses multicast."""
    import torch.distributed._symmetric_memory as symmetric

    name, operators = group.group_name, torch.ops.symm_mem
    buffer = symmetric.empty(nbytes // 2, dtype=torch.bfloat16, device=at.device)
    buffer.zero_()
    symmetric.rendezvous(buffer, name)
    waited = torch.ops._c10d_functional.wait_tensor  # they run on streams of their own
    return {
        "all_reduce": {
            "torch one_shot": lambda: operators.one_shot_all_reduce(buffer, "sum", name),
            "torch two_shot": lambda: operators.two_shot_all_reduce_(buffer, "sum", name),
        },
        "all_gather": {"torch low_contention": lambda: waited(operators._low_contention_all_gather(buffer, name))},
        "reduce_scatter": {"torch low_contention": lambda: waited(operators._low_contention_reduce_scatter(buffer, "sum", name))},
    }


def microseconds(at: Ranks, call: Callable[[], Any], mode: str) -> dict[str, Any]:
    """Time of one call on the slowest rank; what failed on any rank says why."""
    try:
        for _ in range(3):
            call()
        at.synchronize()
        problem = ""
    except Exception as error:  # of an operator that this machine or this PyTorch lacks
        problem = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    problems = at.agree(problem)
    if any(problems):
        return {"not_run": next(filter(None, problems))}
    begin = time.perf_counter()
    call()
    at.synchronize()
    once = max(at.agree(time.perf_counter() - begin))
    calls = max(1, min(MOST_CALLS, int(STRETCH_S / max(once, 1e-6))))
    run: Callable[[], Any] = lambda: [call() for _ in range(calls)]  # noqa: E731
    if mode == "graph":
        try:
            run = replay(run)
        except Exception as error:  # operators that use a stream of their own
            problem = f"no capture: {type(error).__name__}: {error}".splitlines()[0][:200]
        problems = at.agree(problem)
        if any(problems):
            return {"not_run": next(filter(None, problems))}
    times = []
    for number in range(STRETCHES + 1):
        dist.barrier()
        took = stretch(at, run) / calls
        if number:  # the first one is a warm-up
            times.append(took)
    slowest = [max(row) for row in zip(*at.agree(times), strict=True)]
    low, middle, high = statistics.quantiles(slowest, n=4)
    return {"n": len(slowest), "median_us": round(middle, 2), "low_us": round(low, 2), "high_us": round(high, 2), "calls": calls}


def stretch(at: Ranks, run: Callable[[], Any]) -> float:
    """Microseconds that the device takes for ``run``."""
    if at.device.type == "cpu":
        begin = time.perf_counter()
        run()
        return (time.perf_counter() - begin) * 1e6
    return device_us(run)


def bench(at: Ranks, plain: Any) -> None:
    """The table; ends early where there is no time for another size."""
    name = "nccl" if at.device.type == "cuda" else "gloo"
    for nbytes in SIZES:
        kit, library = bench_calls(at, dist.group.WORLD, nbytes), bench_calls(at, plain, nbytes)
        symmetric: dict[str, dict[str, Callable[[], Any]]] = {}
        if at.device.type == "cuda":
            try:
                symmetric = symmetric_calls(at, dist.group.WORLD, nbytes)
                problem = ""
            except Exception as error:
                problem = f"{type(error).__name__}: {error}".splitlines()[0]
            if any(at.agree(problem)):
                symmetric = {}
                at.write("notes", {"bytes": nbytes, "symmetric memory": next(filter(None, at.agree(problem)))})
        for collective, call in kit.items():
            for mode in ("eager",) if at.device.type == "cpu" else ("eager", "graph"):
                if not at.time_left():
                    at.write("notes", {"bytes": nbytes, "operation": collective, "table": "not run from here on: the time limit"})
                    return
                row: dict[str, Any] = {"operation": collective, "bytes": nbytes, "mode": mode, "peerlane": microseconds(at, call, mode)}
                row[name] = microseconds(at, library[collective], mode)
                for operator, run in symmetric.get(collective, {}).items():
                    row[operator] = microseconds(at, run, mode)
                at.write("table", row)


def rank_main(
    rank: int, options: argparse.Namespace, node: VirtualNode, environments: list[dict[str, str]], store: str, deadline: float
) -> None:
    os.environ.update(environments[rank])
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    faulthandler.dump_traceback_later(max(1.0, deadline + 10 - time.monotonic()), exit=True)
    if options.cpu:
        device = torch.device("cpu")
        torch.set_num_threads(1)
    else:
        device = torch.device("cuda", node.device_index(rank))
        torch.cuda.set_device(device)
    dist.init_process_group(
        "peerlane", store=dist.FileStore(store, options.ranks), rank=rank, world_size=options.ranks, timeout=GROUP_TIMEOUT
    )
    at = Ranks(rank, options.ranks, device, options.out, deadline, reductions=options.reductions)
    at.found = {"environment": record(), "ranks": options.ranks, "node": node.describe(), "cpu": options.cpu}
    halves = [tuple(range(options.ranks // 2)), tuple(range(options.ranks // 2, options.ranks))]
    if options.ranks >= 4:
        groups = [dist.new_group(list(half), timeout=GROUP_TIMEOUT) for half in halves]
        mine = rank >= options.ranks // 2
        at.half, at.members = groups[mine], halves[mine]
    bad = 0 if options.no_checks else check_all(at)
    at.found["calls"] = [vars(entry) for entry in backend.counts()]
    if rank == 0:
        print(backend.report(), flush=True)
    if not options.cpu and not options.no_checks:
        bad += check_training(at)
    if not options.no_table:
        plain = dist.new_group(list(range(options.ranks)), backend="gloo" if options.cpu else "nccl", timeout=GROUP_TIMEOUT)
        bench(at, plain)
    at.found["wrong"] = bad
    at.save()
    at.agree("end")
    sys.stdout.flush()
    os._exit(1 if bad else 0)  # communicators of two libraries have no order in which to be taken down


def main() -> int:
    parser = script(__doc__, ranks=4)
    parser.add_argument("--ranks-per-gpu", type=int, default=0, help="by default as many as share a GPU where all GPUs are used")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds, after which all ranks are killed")
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument("--no-mps", action="store_true")
    parser.add_argument("--reductions", action="store_true", help="check only what reduces")
    parser.add_argument("--no-table", action="store_true")
    parser.add_argument("--cpu", action="store_true", help="gloo and CPU tensors, to try this script")
    options = parser.parse_args()
    gpus = torch.cuda.device_count()
    if not options.cpu and not gpus:
        parser.error("there is no GPU here; --cpu tries the script")
    per_gpu = options.ranks_per_gpu or -(-options.ranks // max(1, gpus))
    shared = per_gpu > 1 and not options.cpu
    sharing = available_sharing() if shared and not options.no_mps else "time_slices"
    try:
        node = VirtualNode(options.ranks, -(-options.ranks // per_gpu), sharing)
    except UsageError as error:
        parser.error(str(error))
    deadline = time.monotonic() + options.limit - 30
    with tempfile.TemporaryDirectory() as folder, node.daemon() as daemon:
        return run(options, node, daemon, f"{folder}/store", deadline)


def run(options: argparse.Namespace, node: VirtualNode, daemon: MpsDaemon | None, store: str, deadline: float) -> int:
    """The exit status. Ends with the first rank that fails, and at the time limit."""
    environments = [node.rank_environment(rank, daemon) for rank in range(options.ranks)]
    context = mp.spawn(rank_main, (options, node, environments, store, deadline), nprocs=options.ranks, join=False)
    stuck, codes, texts = end_ranks(context, deadline + 30, at_failure=True)
    if stuck or codes:
        print(f"ranks that were killed: {stuck}; exit codes: {codes}", *texts, sep="\n", flush=True)
    return 3 if time.monotonic() > deadline + 30 else 1 if stuck or codes else 0


if __name__ == "__main__":
    sys.exit(main())
