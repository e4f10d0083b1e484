"""Times the kit's collectives, fused kernels and matrix product beside NCCL, cuBLAS and torch's fused operators, as replayed CUDA graphs.

    PYTHONPATH=src python tests/gpu/bench_kernels.py collectives|ways|fused|product [--world 2] [--out FILE]

One process per GPU. A quick look for those who change a kernel: calls of one kind back to back on the same tensors, nothing judged but the
size of the error. What is published comes from `peerlane eval`, which generates inputs anew and compares every answer. Times are the
slowest rank's, in microseconds, the median of five stretches of calls, which take turns with those of what it is compared with.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import harness
import torch
import torch.distributed as dist
from harness import BF16, Call, in_symmetric_memory, run_on_shared_gpus, script

from peerlane.device import Communicator, communicator, group_of
from peerlane.device.collectives import plans
from peerlane.device.collectives.plans import Plan
from peerlane.device.products import gemm
from peerlane.solutions import p012_allgather_gemm, p013_gemm_allreduce, p014_gemm_allgather, p016_gemm_reducescatter

SIZES = tuple(1 << power for power in (11, 14, 16, 18, 19, 20, 21, 22, 23, 24, 26, 28))
"""Bytes of the tensor that every rank has at first."""
WAYS = ("all_reduce_one_shot", "all_reduce_two_shot", plans.STAGED, "all_reduce_relay")
WAYS_SIZES = tuple(1 << power for power in range(20, 27))
WIDTHS = (1024, 2048, 4096, 8192, 16384)
PORT_GBPS = 375.0
"""What a port takes in at most, by `peerlane doctor --measure` on 2x H200; for the bound of the fused kernels."""

os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # torch's fused operators use none


def microseconds(*calls: Call, count: int) -> list[float]:
    """Of each kind of call. They take turns, and each has as many calls again before those that count: a GPU's clocks follow its power, and
    with it what ran in the last milliseconds."""
    kinds = {str(number): call for number, call in enumerate(calls)}
    return list(harness.microseconds(kinds, count, warm_up=count, start_delay=400_000).values())


def collective_calls(kit: Communicator, rank: int, world: int, nbytes: int) -> dict[str, tuple[Call, Call]]:
    """The kit's call and NCCL's, by name."""
    count = nbytes // BF16.itemsize
    mine, whole = torch.randn(count, device="cuda", dtype=BF16), torch.empty(count * world, device="cuda", dtype=BF16)
    part, other = mine.new_empty(count // world), torch.zeros_like(mine)
    parts, wholes = (list(mine.chunk(world)), list(whole.chunk(world))) if rank == 0 else (None, None)
    return {
        "all_reduce": (lambda: kit.all_reduce(mine, other), lambda: dist.all_reduce(other)),
        "all_gather": (lambda: kit.all_gather_into_tensor(whole, mine), lambda: dist.all_gather_into_tensor(whole, mine)),
        "reduce_scatter": (lambda: kit.reduce_scatter_tensor(part, mine), lambda: dist.reduce_scatter_tensor(part, mine)),
        "all_to_all": (lambda: kit.all_to_all_single(other, mine), lambda: dist.all_to_all_single(other, mine)),
        "broadcast": (lambda: kit.broadcast(mine, 0, other), lambda: dist.broadcast(other, 0)),
        "reduce": (lambda: kit.reduce(mine, 0, other), lambda: dist.reduce(other, 0)),
        "gather": (lambda: kit.gather(mine, whole if rank == 0 else None, 0), lambda: dist.gather(mine, wholes, 0)),
        "scatter": (lambda: kit.scatter(part, mine if rank == 0 else None, 0), lambda: dist.scatter(part, parts, 0)),
    }


def collectives(rank: int, world: int) -> Iterator[dict[str, Any]]:
    kit = communicator()
    for size in SIZES:
        calls = 100 if size <= 1 << 20 else max(5, min(100, int(2e9 / (size * world))))
        for name, (ours, nccl) in collective_calls(kit, rank, world, size).items():
            ours_us, nccl_us = microseconds(ours, nccl, count=calls)
            yield {"op": name, "bytes": size, "ours_us": ours_us, "nccl_us": nccl_us, "ratio": round(nccl_us / ours_us, 2)}


def ways(rank: int, world: int) -> Iterator[dict[str, Any]]:
    """All-reduces by every kernel that can take the size, whatever the plan says, beside NCCL and torch's two trips."""
    planned, limit, plans.STAGED_LIMIT_BYTES = plans.all_reduce, plans.STAGED_LIMIT_BYTES, max(WAYS_SIZES)
    kits = {way: communicator() if way == WAYS[0] else Communicator() for way in WAYS}
    machine = kits[WAYS[0]].machine
    if machine.staged_bytes:
        kits[plans.STAGED]._stage()
    plans.STAGED_LIMIT_BYTES = limit
    room = plans._room(machine)

    def plan_of(way: str, nbytes: int) -> Plan | None:
        packets = plans._packets(nbytes)
        if way == "all_reduce_one_shot":
            return Plan(way, *plans._spread(packets, machine)) if packets <= room else None
        if way == "all_reduce_two_shot":
            return plans._by_packets(way, -(-packets // world), room // 2, machine)
        if way == plans.STAGED:
            return Plan(way, machine.sm_count, 512) if machine.staged_bytes else None
        return plans._ring(way, machine)

    for nbytes in WAYS_SIZES:
        x, out = (torch.ones(nbytes // BF16.itemsize, device="cuda", dtype=BF16) for _ in range(2))
        shared, name = in_symmetric_memory(torch.zeros_like(x))
        calls: dict[str, Call] = {"nccl": lambda: dist.all_reduce(out)}  # noqa: B023
        calls["torch two_shot"] = lambda: torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", name)  # noqa: B023
        wrong = 0
        for way, kit in kits.items():
            if (plan := plan_of(way, nbytes)) is not None:
                plans.all_reduce = lambda *_, plan=plan, **__: plan  # type: ignore[assignment]
                calls[way] = lambda kit=kit: kit.all_reduce(x, out)  # type: ignore[misc] # noqa: B023
                calls[way]()
                wrong += int((out != world).sum())
        plans.all_reduce = planned
        us = harness.microseconds(calls, max(10, min(100, (1 << 31) // nbytes)), start_delay=400_000)
        yield {"op": "all_reduce", "bytes": nbytes, "us": us, "plan": planned(nbytes, machine).kernel, "wrong": wrong}


@dataclass(frozen=True)
class Fused:
    """The product alone, the kit's kernel, cuBLAS and NCCL, torch's fused operator if any; and the bytes that a port must take in."""

    product: Call
    ours: Call
    nccl: Call
    operator: Call | None
    port_bytes: float


def gemm_and_reduce_scatter(width: int, world: int) -> Fused:
    a = torch.randn(width, width // 4, device="cuda", dtype=BF16)
    b = torch.randn(width // 4, width, device="cuda", dtype=BF16)
    rows = a.new_empty(width // world, width)

    def nccl() -> torch.Tensor:
        dist.reduce_scatter_tensor(rows, torch.mm(a, b))
        return rows

    def operator() -> torch.Tensor:
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(a, b, "sum", 0, dist.group.WORLD.group_name)

    ours = p016_gemm_reducescatter.solution
    return Fused(lambda: torch.mm(a, b), lambda: ours(a, b), nccl, operator, (world - 1) * rows.nbytes)


def all_gather_and_gemm(width: int, world: int) -> Fused:
    shard = torch.randn(width, width // world, device="cuda", dtype=BF16)
    b = torch.randn(width, width // 4, device="cuda", dtype=BF16)
    gathered, whole = shard.new_empty(world, *shard.shape), torch.randn(width, width, device="cuda", dtype=BF16)

    def nccl() -> torch.Tensor:
        dist.all_gather_into_tensor(gathered, shard)
        return torch.mm(gathered.transpose(0, 1).reshape(width, -1), b)

    def operator() -> torch.Tensor:
        return torch.ops.symm_mem.fused_all_gather_matmul(shard, [b], 1, dist.group.WORLD.group_name, return_A=False)[1][0]

    ours = p012_allgather_gemm.solution
    return Fused(lambda: torch.mm(whole, b), lambda: ours(shard, b), nccl, operator, (world - 1) * shard.nbytes)


def gemm_and_all_reduce(width: int, world: int) -> Fused:
    a = torch.randn(width, width // 4, device="cuda", dtype=BF16)
    b = torch.randn(width // 4, width, device="cuda", dtype=BF16)

    def nccl() -> torch.Tensor:
        total = torch.mm(a, b)
        dist.all_reduce(total)
        return total

    ours = p013_gemm_allreduce.solution
    return Fused(lambda: torch.mm(a, b), lambda: ours(a, b), nccl, None, 2 * (world - 1) / world * width * width * a.element_size())


def gemm_and_all_gather(width: int, world: int) -> Fused:
    a = torch.randn(width, width // 4, device="cuda", dtype=BF16)
    b = torch.randn(width // 4, width // world, device="cuda", dtype=BF16)
    blocks = a.new_empty(world, width, width // world)

    def nccl() -> torch.Tensor:
        dist.all_gather_into_tensor(blocks, torch.mm(a, b))
        return blocks.transpose(0, 1).reshape(width, -1)

    ours = p014_gemm_allgather.solution
    return Fused(lambda: torch.mm(a, b), lambda: ours(a, b), nccl, None, (world - 1) * blocks[0].nbytes)


FUSED = {"gemm_rs": gemm_and_reduce_scatter, "ag_gemm": all_gather_and_gemm, "gemm_ar": gemm_and_all_reduce, "gemm_ag": gemm_and_all_gather}


def fused(rank: int, world: int) -> Iterator[dict[str, Any]]:
    for width in WIDTHS:
        calls = max(4, min(100, int(4e13 / width**3)))
        for name, make in FUSED.items():
            work = make(width, world)
            operators = [work.operator] if work.operator else []
            product_us, ours_us, nccl_us, *operator_us = microseconds(work.product, work.ours, work.nccl, *operators, count=calls)
            got, want, port_us = work.ours().float(), work.nccl().float(), work.port_bytes / PORT_GBPS / 1e3
            yield {
                "op": name,
                "N": width,
                "mm_us": product_us,
                "comm_us": round(port_us, 1),
                "fused_us": ours_us,
                "nccl_us": nccl_us,
                **({"torch_us": operator_us[0]} if operator_us else {}),
                "ratio": round(nccl_us / ours_us, 2),
                "of_bound": round(max(product_us, port_us) / ours_us, 3),
                "err": f"{((got - want).abs().max() / want.abs().max()).item():.1e}",
            }
            del work, got, want
            torch.cuda.empty_cache()


def product(rank: int, world: int) -> Iterator[dict[str, Any]]:
    """The product alone, on every GPU at once: as each of them is when it computes and communicates."""
    for width in (4096, 8192, 16384):
        a, b = (torch.randn(width, width, device="cuda", dtype=BF16) for _ in range(2))
        out, want = torch.empty_like(a), torch.mm(a, b)
        calls = max(4, int(4e13 / width**3))
        ours_us, cublas_us = microseconds(gemm.bind(group_of(), a, b, out), lambda: torch.mm(a, b, out=want), count=calls)  # noqa: B023
        difference = (out.float() - want.float()).abs().max() / want.float().abs().max()
        yield {
            "op": "gemm",
            "N": width,
            "ours_us": ours_us,
            "cublas_us": cublas_us,
            "tflops": round(2 * width**3 / ours_us / 1e6),
            "of_cublas": round(cublas_us / ours_us, 3),
            "err": f"{difference.item():.1e}",
        }


BENCHES = {"collectives": collectives, "ways": ways, "fused": fused, "product": product}


if __name__ == "__main__":
    parser = script(__doc__, ranks=0)
    parser.add_argument("what", choices=BENCHES)
    options = parser.parse_args()
    run_on_shared_gpus(options.ranks, options.out, BENCHES[options.what])
