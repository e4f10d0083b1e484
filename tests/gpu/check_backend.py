"""The torch.distributed backend ``peerlane`` on GPUs: every operation and dtype against exact answers, then times beside NCCL and torch.

    PYTHONPATH=src python tests/gpu/check_backend.py --ranks 4 --ranks-per-gpu 4 --out FILE [--limit 540]
    python tests/gpu/check_backend.py --ranks 3 --cpu              try the script itself, on gloo

Ranks share GPUs through an MPS daemon of the script's own where the machine has one, else (or with --no-mps) in time slices. Every
operation runs blocking, asynchronously and as a replayed CUDA graph, with new contents each time; graphs take three dtypes: one that the
kit sums, one that NCCL sums, one that is only moved. ``--reductions`` checks only what reduces: SUM, AVG, PREMUL_SUM, MAX and MIN. Then
FSDP2 and DDP take three steps each, whose gradients must have been reduced by the kit alone. The table gives the time of a call on the
slowest rank: median and quartiles of ``STRETCHES`` stretches, in microseconds. ``bytes`` is what every rank has at first; an
``asynchronous`` call is waited for at once. Exits with 1 if an answer was wrong, with 3 at the time limit, which ends all ranks.
"""

import argparse
import faulthandler
import functools
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
from harness import FP8, Row, device_us, in_symmetric_memory, meet, replay, run_on_shared_gpus, script, sharing
from torch.distributed.distributed_c10d import _coalescing_manager

from peerlane.device import backend

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
    """This rank's place, and a half of the ranks that has a group of its own."""

    rank: int
    world: int
    device: torch.device
    deadline: float
    reductions: bool = False
    half: Any = None
    members: tuple[int, ...] = ()

    def agree(self, value: Any) -> list[Any]:
        """Every rank's value, by the CPU."""
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def time_left(self) -> bool:
        return bool(self.agree(time.monotonic() < self.deadline)[0])


def contents(rank: int, seed: int, like: torch.Tensor) -> torch.Tensor:
    """-1, 0 and 1, so that sums of eight ranks are exact in every dtype; 0 and 1 where there is no sign. The same on all ranks' devices."""
    generator = torch.Generator(like.device).manual_seed(1000 * seed + rank)
    lowest = 0 if like.dtype in (torch.uint8, torch.bool) else -1
    return torch.randint(lowest, 2, like.shape, generator=generator, device=like.device).float().to(like.dtype)


def finish(work: Any) -> None:
    if work is not None:
        work.wait()


def in_place(source: torch.Tensor, target: torch.Tensor, run: Callable[[torch.Tensor, bool], Any]) -> Call:
    """Returns an operation on ``target``, with the contents of ``source``."""

    def call(later: bool) -> None:
        target.copy_(source)
        finish(run(target, later))

    return call


def reductions(at: Ranks, count: int, dtype: torch.dtype) -> Iterator[Operation]:
    """All-reduce, reduce and reduce-scatter by every reduction. Means are exact in every dtype where a power of two divides."""
    rank, world, root = at.rank, at.world, at.world - 1
    one, other = (torch.zeros(count, dtype=dtype, device=at.device) for _ in range(2))
    wide = torch.zeros(count * world, dtype=dtype, device=at.device)
    cases: list[tuple[str, Any, Callable[[torch.Tensor], torch.Tensor]]] = [("sum", dist.ReduceOp.SUM, lambda x: x.sum(0))]
    if dtype not in FP8:  # NCCL has these without, too
        cases += [("max", dist.ReduceOp.MAX, lambda x: x.amax(0)), ("min", dist.ReduceOp.MIN, lambda x: x.amin(0))]
    if dtype in (torch.bfloat16, torch.float16, torch.float32):
        cases += [("avg", dist.ReduceOp.AVG, lambda x: x.sum(0) / world)]
    if at.device.type == "cuda" and dtype in (torch.bfloat16, torch.float16, torch.float32):  # gloo has none
        cases += [("premul_sum", dist.__dict__["_make_nccl_premul_sum"](0.25), lambda x: x.sum(0) / 4)]

    for name, op, answer in cases:

        def scatter(later: bool, op: Any = op) -> None:
            finish(dist.reduce_scatter_tensor(other, wide, op, async_op=later))

        def whole(given: list[torch.Tensor], answer: Any = answer) -> torch.Tensor:
            return answer(torch.stack([item.double() for item in given]))  # type: ignore[no-any-return]

        all_reduce = in_place(one, other, lambda t, later, op=op: dist.all_reduce(t, op, async_op=later))  # type: ignore[misc]
        reduce = in_place(one, other, lambda t, later, op=op: dist.reduce(t, root, op, async_op=later))  # type: ignore[misc]
        yield Operation(f"all_reduce {name}", one, other, all_reduce, whole)
        yield Operation(f"reduce {name}", one, other, reduce, lambda given, whole=whole: whole(given) if rank == root else None)  # type: ignore[misc]
        own = lambda given, whole=whole: whole(given).view(world, -1)[rank]  # noqa: E731
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

    if sums:
        yield from reductions(at, count, dtype)
        yield Operation("all_reduce misaligned", one, odd, in_place(one, odd, lambda t, later: dist.all_reduce(t, async_op=later)), total)

        def reduce_scatter_list(later: bool) -> None:
            finish(dist.reduce_scatter(other, [piece.clone() for piece in wide.chunk(world)], async_op=later))

        yield Operation("reduce_scatter", wide, other, reduce_scatter_list, lambda given: part(total(given), rank))

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
            half = in_place(one, other, lambda t, later: dist.all_reduce(t, group=at.half, async_op=later))
            yield Operation("all_reduce of a sub-group", one, other, half, lambda given: total([given[r] for r in at.members]))
        return

    broadcast = in_place(one, other, lambda t, later: dist.broadcast(t, root, async_op=later))
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


def check_all(at: Ranks) -> Iterator[Row]:
    """A row for each dtype, of every operation and size. Graphs of messages come last: NCCL can not capture them everywhere."""
    cuda = at.device.type == "cuda"
    for messages, graph in itertools.product((False,) if at.reductions else (False, True), (False, True) if cuda else (False,)):
        for dtype in IN_GRAPHS if graph else (*MOVED, *FP8) if cuda else MOVED:  # gloo moves no fp8
            yield {"check": "messages" if messages else "collectives", "graph": graph, **check_dtype(at, dtype, messages, graph)}
            if not at.time_left():
                raise TimeoutError("the checks did not end before the time limit")


def check_dtype(at: Ranks, dtype: torch.dtype, messages: bool, graph: bool) -> Row:
    """How many elements of this rank were wrong, and where."""
    cases, places, kinds = 0, dict[str, int](), (True,) if at.reductions else (False, True)
    for sums, count in itertools.product(kinds if dtype in (*SUMMED, *FP8, torch.uint8) else (False,) if not at.reductions else (), COUNTS):
        for operation in operations(at, count, dtype, sums=sums):
            if operation.message == messages:
                cases += 1
                if wrong := check(at, operation, graph=graph):
                    places[f"{operation.name} of {count}"] = wrong
    return {"dtype": str(dtype), "cases": cases, "at": places, "wrong": sum(places.values())}


def check_training(at: Ranks) -> Iterator[Row]:
    """FSDP2 and DDP: wrong are kinds of gradient traffic that ran elsewhere than on the kit."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    def layers() -> torch.nn.Sequential:
        torch.manual_seed(1)
        return torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4))).to(at.device)

    sharded = layers()
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
        torch.cuda.synchronize()
        moved = [entry for entry in backend.counts() if "reduce" in entry.operation or "gather" in entry.operation]
        elsewhere = [entry for entry in moved if entry.device == "cuda" and entry.ran_on != "kit"]
        yield {"training": name, "calls": [vars(entry) for entry in backend.counts()], "wrong": len(elsewhere) + (not moved)}


def bench_calls(at: Ranks, group: Any, nbytes: int) -> dict[str, Call]:
    """The eight collectives on ``group``."""
    world, count = at.world, max(at.world, nbytes // 2)
    mine, whole = (
        torch.ones(count, device=at.device, dtype=torch.bfloat16),
        torch.ones(count * world, device=at.device, dtype=torch.bfloat16),
    )
    shard, other = mine.new_zeros(count // world), torch.zeros_like(mine)
    parts, wholes = (list(mine.chunk(world)), list(whole.chunk(world))) if at.rank == 0 else (None, None)
    return {
        "all_reduce": lambda later: finish(dist.all_reduce(other, group=group, async_op=later)),
        "all_gather": lambda later: finish(dist.all_gather_into_tensor(whole, mine, group=group, async_op=later)),
        "reduce_scatter": lambda later: finish(dist.reduce_scatter_tensor(shard, mine, group=group, async_op=later)),
        "all_to_all": lambda later: finish(dist.all_to_all_single(other, mine, group=group, async_op=later)),
        "broadcast": lambda later: finish(dist.broadcast(other, 0, group=group, async_op=later)),
        "reduce": lambda later: finish(dist.reduce(other, 0, group=group, async_op=later)),
        "gather": lambda later: finish(dist.gather(mine, wholes, 0, group=group, async_op=later)),
        "scatter": lambda later: finish(dist.scatter(shard, parts, 0, group=group, async_op=later)),
    }


def symmetric_calls(at: Ranks, nbytes: int) -> dict[str, dict[str, Callable[[], Any]]]:
    """torch's symmetric-memory operators, by collective and name; none of them uses multicast."""
    operators = torch.ops.symm_mem
    buffer, name = in_symmetric_memory(torch.zeros(nbytes // 2, dtype=torch.bfloat16, device=at.device))
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
    run = call

    def failed(step: Callable[[], Any], what: str) -> str:
        problem = ""
        try:
            step()
        except Exception as error:  # of an operator that this machine or this PyTorch lacks, or that uses a stream of its own
            problem = f"{what}{type(error).__name__}: {error}".splitlines()[0][:200]
        return next(filter(None, at.agree(problem)), "")

    def several() -> None:
        for _ in range(calls):
            call()

    def captured() -> None:
        nonlocal run
        run = replay(several)

    calls = 3
    if problem := failed(several, ""):
        return {"not_run": problem}
    meet()
    begin = time.perf_counter()
    call()
    meet()
    once = max(at.agree(time.perf_counter() - begin))
    calls, run = max(1, min(MOST_CALLS, int(STRETCH_S / max(once, 1e-6)))), several
    if mode == "graph" and (problem := failed(captured, "no capture: ")):
        return {"not_run": problem}
    times = []
    for _ in range(STRETCHES + 1):
        dist.barrier()
        times.append(stretch(at, run) / calls)
    slowest = [max(row) for row in zip(*at.agree(times[1:]), strict=True)]  # the first one is a warm-up
    low, middle, high = statistics.quantiles(slowest, n=4)
    return {"n": len(slowest), "median_us": round(middle, 2), "low_us": round(low, 2), "high_us": round(high, 2), "calls": calls}


def stretch(at: Ranks, run: Callable[[], Any]) -> float:
    """Microseconds that the device takes for ``run``."""
    if at.device.type == "cuda":
        return device_us(run)
    begin = time.perf_counter()
    run()
    return (time.perf_counter() - begin) * 1e6


def bench(at: Ranks, plain: Any) -> Iterator[Row]:
    """The table; ends early where there is no time for another size."""
    cuda = at.device.type == "cuda"
    for nbytes in SIZES:
        kit, library = bench_calls(at, dist.group.WORLD, nbytes), bench_calls(at, plain, nbytes)
        symmetric: dict[str, dict[str, Callable[[], Any]]] = {}
        if cuda:
            problem = ""
            try:
                symmetric = symmetric_calls(at, nbytes)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}".splitlines()[0]
            if problem := next(filter(None, at.agree(problem)), ""):
                symmetric = {}
                yield {"note": f"no symmetric memory of {nbytes} bytes: {problem}"}
        for collective, call in kit.items():
            for mode in ("eager", "asynchronous", "graph") if cuda else ("eager", "asynchronous"):
                if not at.time_left():
                    yield {"note": f"not run from {collective} of {nbytes} bytes on: the time limit"}
                    return
                later = mode == "asynchronous"
                sides = {
                    "peerlane": functools.partial(call, later),
                    "nccl" if cuda else "gloo": functools.partial(library[collective], later),
                }
                sides |= {} if later else symmetric.get(collective, {})
                times = {side: microseconds(at, run, mode) for side, run in sides.items()}
                yield {"operation": collective, "bytes": nbytes, "mode": mode, **times}


def rows_of(options: argparse.Namespace, rank: int, ranks: int) -> Iterator[Row]:
    deadline = time.monotonic() + options.limit - 30
    faulthandler.dump_traceback_later(max(1.0, options.limit - 20), exit=True)
    device = torch.device("cpu") if options.cpu else torch.device("cuda", torch.cuda.current_device())
    if options.cpu:
        torch.set_num_threads(1)
    at = Ranks(rank, ranks, device, deadline, options.reductions)
    if ranks >= 4:
        halves = [tuple(range(ranks // 2)), tuple(range(ranks // 2, ranks))]
        groups = [dist.new_group(list(half), timeout=GROUP_TIMEOUT) for half in halves]
        mine = rank >= ranks // 2
        at.half, at.members = groups[mine], halves[mine]
    if not options.no_checks:
        yield from check_all(at)
    if rank == 0:
        print(backend.report(), flush=True)
    if not options.cpu and not options.no_checks:
        yield from check_training(at)
    if not options.no_table:
        yield from bench(at, dist.new_group(list(range(ranks)), backend="gloo" if options.cpu else "nccl", timeout=GROUP_TIMEOUT))


if __name__ == "__main__":
    parser = script(__doc__, ranks=4, limit_s=540.0)
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument("--reductions", action="store_true", help="check only what reduces")
    parser.add_argument("--no-table", action="store_true")
    parser.add_argument("--cpu", action="store_true", help="gloo and CPU tensors, to try this script")
    options = parser.parse_args()
    how = {"backend": "peerlane", "timeout_s": GROUP_TIMEOUT.total_seconds(), "cpu": options.cpu, **sharing(options)}
    run_on_shared_gpus(options.ranks, options.out, rows_of, options, **how)
