"""Time the large collectives for many settings of their rings, on the GPUs of this machine.

    PYTHONPATH=src python tests/gpu/tune_rings.py [--ranks 2] [--out rings.json] [--budget 60] [--only depth=8,stages=3 ...]

Compiles every kernel of every setting first, in parallel. Then one process per GPU goes through the settings: each gets a communicator of
its own, with the memory that its blocks need; each operation is checked on exact data, captured in a graph and replayed. Prints GB/s that
the busiest port takes in, by setting and size; the best of each column last. --out writes the same as JSON. What cannot be timed is named:
a setting that breaks a rule of the rings or cannot be launched, a column for which blocks want more shared memory than there is ("-"), and
settings that are left when the budget is spent; the first one is always timed.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from harness import Row, replay, run_on_shared_gpus, script, slowest_in_turn

from peerlane.device.collectives import plans
from peerlane.device.collectives.communicator import Communicator
from peerlane.device.collectives.kernels import compile_kernel
from peerlane.device.collectives.plans import Machine, Plan
from peerlane.device.collectives.workspace import RINGS, Rings
from peerlane.errors import LaunchError, UsageError

SIZES = (16 << 20, 64 << 20, 256 << 20)
"""Bytes of the whole tensor: what is gathered, scattered, exchanged or summed."""
SETTINGS: tuple[dict[str, int], ...] = (
    {},
    {"depth": 8},
    {"stages": 3},
    {"stages": 3, "in_flight": 2},
    {"tile_bytes": 16 << 10},
    {"tile_bytes": 16 << 10, "stages": 3},
    {"tile_bytes": 16 << 10, "stages": 4, "in_flight": 2},
    {"tile_bytes": 24 << 10, "stages": 3},
    {"tile_bytes": 8 << 10, "stages": 8, "in_flight": 4},
    {"blocks": 64},
    {"blocks": 96},
    {"summing_warps": 4},
    {"summing_warps": 12},
)
"""What differs from the default."""
BLOCK_SHARED_BYTES, STATIC_SHARED_BYTES = 227 << 10, 2 << 10
"""Shared memory that a block can have, and the most of it that kernels have beside their stages (tests/device/test_kernels.py)."""
CALLS = 4


@dataclass(frozen=True)
class Operation:
    """A collective on int32 tensors of ``nbytes`` in all: its plan, elements that a rank gives and gets of ``count`` in all, its call, what
    a rank gets of all ranks' elements, and bytes into the busiest port."""

    name: str
    plan: Callable[[int, Machine], Plan]
    in_parts: tuple[bool, bool]
    call: Callable[[Communicator, torch.Tensor, torch.Tensor], object]
    answer: Callable[[list[torch.Tensor], int], torch.Tensor]
    port_share: Callable[[int], float]

    def prepare(self, kit: Communicator, nbytes: int) -> tuple[Callable[[], object], torch.Tensor, torch.Tensor]:
        """The call on this rank's tensors, its result and what that has to be. Rank r has r + 0, 1, ... 1020, 0, ..."""
        rank, world = kit.member.rank, kit.member.world_size
        whole = nbytes // 4 // world * world
        given, gets = (whole // world if part else whole for part in self.in_parts)
        each = [torch.arange(given, dtype=torch.int32, device="cuda") % 1021 + peer for peer in range(world)]
        out = torch.zeros(gets, dtype=torch.int32, device="cuda")
        return lambda: self.call(kit, out, each[rank]), out, self.answer(each, rank)


def exchange_of_parts(nbytes: int, machine: Machine) -> Plan:
    return plans.exchange(nbytes // machine.world_size, machine)


def scatter_of_parts(nbytes: int, machine: Machine) -> Plan:
    return plans.reduce_scatter(nbytes // machine.world_size, machine)


def summed(each: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(each).sum(0, dtype=torch.int32)


OPERATIONS = (
    Operation(
        "all_gather", exchange_of_parts, (True, False), lambda kit, out, x: kit.all_gather_into_tensor(out, x),
        lambda each, rank: torch.cat(each), lambda world: (world - 1) / world,
    ),
    Operation(
        "all_to_all", exchange_of_parts, (False, False), lambda kit, out, x: kit.all_to_all_single(out, x),
        lambda each, rank: torch.cat([x.chunk(len(each))[rank] for x in each]), lambda world: (world - 1) / world,
    ),
    Operation(
        "reduce_scatter", scatter_of_parts, (False, True), lambda kit, out, x: kit.reduce_scatter_tensor(out, x),
        lambda each, rank: summed(each).chunk(len(each))[rank], lambda world: (world - 1) / world,
    ),
    Operation(
        "all_reduce", plans.all_reduce, (False, False), lambda kit, out, x: kit.all_reduce(x, out),
        lambda each, rank: summed(each), lambda world: 2 * (world - 1) / world,
    ),
    Operation(
        "broadcast", plans.broadcast, (False, False), lambda kit, out, x: kit.broadcast(x, 0, out),
        lambda each, rank: each[0], lambda world: 1.0,
    ),
    Operation(
        "reduce", plans.reduce, (False, False), lambda kit, out, x: kit.reduce(x, 0, out),
        lambda each, rank: summed(each) if rank == 0 else each[rank], lambda world: 1.0,
    ),
)  # fmt: skip
COLUMNS = [(operation, nbytes) for operation in OPERATIONS for nbytes in SIZES]


def column_name(operation: Operation, nbytes: int) -> str:
    return f"{operation.name} {nbytes >> 20}M"


def rings_of(setting: dict[str, int], world: int) -> Rings:
    """The setting's rings, with the memory for as many blocks as it names. Raises UsageError for one that breaks a rule."""
    rings = replace(RINGS, **setting)
    needed = rings.blocks * (world - 1) * rings.depth * rings.tile_bytes
    return replace(rings, bytes_per_kind=setting.get("bytes_per_kind", max(RINGS.bytes_per_kind, needed)))


def fits(operation: Operation, nbytes: int, machine: Machine) -> bool:
    return operation.plan(nbytes, machine).shared_bytes + STATIC_SHARED_BYTES <= BLOCK_SHARED_BYTES


def measure(rings: Rings) -> dict[str, float]:
    """GB/s by column, of those that fit. Raises if a result is wrong."""
    group = Communicator(rings=rings, timeout_s=5.0)
    rates = {}
    try:
        for operation, nbytes in COLUMNS:
            if not fits(operation, nbytes, group.machine):
                continue
            call, out, expected = operation.prepare(group, nbytes)
            time_us = slowest_in_turn({"ring": replay(call)}, CALLS, warm_up=CALLS)["ring"]
            if not torch.equal(out, expected):
                raise SystemExit(f"{operation.name} of {nbytes} bytes with {rings} is wrong on rank {group.member.rank}")
            rates[column_name(operation, nbytes)] = operation.port_share(group.member.world_size) * nbytes / time_us / 1000
        torch.cuda.synchronize()
        dist.barrier()
    finally:
        group.close()
    return rates


def agreed(flag: bool) -> bool:
    """Whether it holds on any rank."""
    mine = torch.tensor(flag, device="cuda", dtype=torch.int32)
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return bool(mine.item())


def rows_of(settings: list[dict[str, int]], budget_s: float, rank: int, ranks: int) -> Iterator[Row]:
    """A row for each setting, then one with the best setting of each column."""
    deadline, rows = time.monotonic() + budget_s, list[Row]()
    for setting in settings:
        if agreed(time.monotonic() > deadline) and rows:
            yield {"setting": setting, "not_timed": "out of budget"}
            continue
        refusal = ""
        try:
            rates = measure(rings_of(setting, ranks))
        except (UsageError, LaunchError) as error:  # GPUs are alike: a launch that one refuses is refused by all, before any has begun
            refusal = str(error)
        if agreed(bool(refusal)):
            yield {"setting": setting, "not_timed": refusal or "another rank could not"}
            continue
        rows.append({"setting": setting, "gbps": rates})
        yield rows[-1]
    best = {}
    for name in (column_name(*column) for column in COLUMNS):
        if timed := [row for row in rows if name in row["gbps"]]:
            row = max(timed, key=lambda row: row["gbps"][name])
            best[name] = {"gbps": row["gbps"][name], "setting": row["setting"]}
    yield {"best": best}


def compile_one(job: tuple[str, int, Rings]) -> None:
    kernel, world, rings = job
    compile_kernel(kernel, world, torch.int32, "sm_90a", rings)


def parsed(text: str) -> dict[str, int]:
    return {name: int(value) for name, value in (item.split("=") for item in text.split(",") if item)}


def main() -> None:
    parser = script(__doc__, ranks=0)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for timing, which comes after compilation")
    parser.add_argument("--only", nargs="*", type=parsed, help="these settings in place of the list, each as name=value,name=value")
    options = parser.parse_args()
    began = time.monotonic()
    ranks = options.ranks or torch.cuda.device_count()
    settings = list(SETTINGS) if options.only is None else options.only
    jobs = []
    for setting in settings:
        with contextlib.suppress(UsageError):  # to be named when its turn comes
            rings = rings_of(setting, ranks)
            machine = Machine(ranks, torch.cuda.get_device_properties(0).multi_processor_count, rings)
            needed = {operation.plan(nbytes, machine).kernel for operation, nbytes in COLUMNS if fits(operation, nbytes, machine)}
            jobs += [(kernel, ranks, rings) for kernel in needed]
    unique = list({(kernel, rings.defines()["PEERLANE_RINGS"]): (kernel, ranks, rings) for kernel, ranks, rings in jobs}.values())
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1), mp_context=mp.get_context("spawn")) as pool:
        list(pool.map(compile_one, unique, chunksize=4))
    print(f"{len(unique)} kernels compiled in {time.monotonic() - began:.1f} s", flush=True)
    run_on_shared_gpus(ranks, options.out, rows_of, settings, options.budget)


if __name__ == "__main__":
    main()
