"""Scenarios of matrix products for the emulator: operands of small integers, so that every sum is exact and any order gives the same
bits."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from device.runs import equal, run_calls
from peerlane.device import group_of
from peerlane.device.host.layout import LINE_BYTES
from peerlane.device.host.tensor_map import TensorPlace
from peerlane.device.products import all_gather_gemm, gathering, gemm
from peerlane.device.products.gemm import Tiling
from peerlane.device.products.gemm_reduce_scatter import GemmReduceScatter
from peerlane.emulator import Buffer, Scenario

GUARD = -7.0
"""What lies where nothing may be written: between the end of a row and the next one."""


def integers(rows: int, columns: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A matrix of -2 to 2, with rows as far apart as the kernels want them."""
    generator = torch.Generator().manual_seed(seed)
    return padded(torch.randint(-2, 3, (rows, columns), generator=generator).to(dtype))


def padded(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix with GUARD behind each row, up to the next row; as a flat tensor, for a buffer."""
    rows, columns = matrix.shape
    whole = matrix.new_full((rows, gemm.row_stride(columns)), GUARD)
    whole[:, :columns] = matrix
    return whole


def place(buffer: Buffer, rank: int, rows: int, columns: int) -> TensorPlace:
    return TensorPlace(buffer.addresses[rank], buffer.dtype, (rows, columns), (gemm.row_stride(columns), 1))


def result(scenario: Scenario, expected: Sequence[torch.Tensor]) -> Buffer:
    """A buffer for results that are to be ``expected``; what is beside them must stay as it is."""
    blank = [padded(torch.zeros_like(matrix)) for matrix in expected]
    return scenario.buffer("out", blank, expected=[padded(matrix) for matrix in expected])


def plain_product(
    m: int,
    n: int,
    k: int,
    tiling: Tiling,
    *,
    grid: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    majors: tuple[gemm.Major, gemm.Major] = ("k", "mn"),
) -> Scenario:
    """One rank, ``out = a @ b``."""
    a, b = integers(m, k, 1, dtype)[:, :k], integers(k, n, 2, dtype)[:, :n]
    a_stored, b_stored = (a if majors[0] == "k" else a.T), (b if majors[1] == "mn" else b.T)
    scenario = Scenario("gemm", gemm.GEMM.source, 1, defines=tiling.defines(dtype, *majors))
    a_buffer, b_buffer = scenario.buffer("a", [padded(a_stored)]), scenario.buffer("b", [padded(b_stored)])
    out = result(scenario, [(a.float() @ b.float()).to(dtype)])
    places = place(a_buffer, 0, *a_stored.shape), place(b_buffer, 0, *b_stored.shape), place(out, 0, m, n)
    maps = {name: spec.emulated() for name, spec in gemm.specs(*places, tiling, *majors).items()}
    arguments = gemm.GEMM.arguments(**maps, tiles=tiling.grouped(m, n), n=n, k=k)
    scenario.launch("gemm", grid, tiling.threads, (arguments,), shared_bytes=tiling.shared_bytes, cluster=tiling.blocks)
    return scenario


def products(rows: int, depths: Sequence[int], columns: int, call: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The operands of every rank, (rows, depth) and (depth, columns), other ones in every call."""
    a = [integers(rows, depth, 1000 * call + rank)[:, :depth] for rank, depth in enumerate(depths)]
    b = [integers(depth, columns, 1000 * call + 500 + rank)[:, :columns] for rank, depth in enumerate(depths)]
    return a, b


@dataclass(frozen=True)
class SumCalls:
    """Calls of a product that is summed over ranks, behind each other, on emulated ranks of ``sm_count`` SMs."""

    product: type
    m: int
    n: int
    depths: tuple[int, ...]
    tiling: Tiling
    sm_count: int = 2
    calls: int = 2
    schedules: int = 2
    epilogue: gemm.Epilogue = gemm.PLAIN

    def found(self) -> set[str]:
        """The kinds of the emulator's findings, and ``wrong_result`` if a result is not exact. Raises what host code raised."""

        def make(rank: int) -> Callable[..., Any]:
            kernel = self.product(self.m, self.n, torch.bfloat16, group_of(), tiling=self.tiling, epilogue=self.epilogue)
            return lambda a, b: kernel(gemm.aligned(a), gemm.aligned(b))

        drawn = [products(self.m, self.depths, self.n, call) for call in range(self.calls)]
        calls = [list(zip(a, b, strict=True)) for a, b in drawn]
        run = run_calls(make, calls, schedules=self.schedules, sm_count=self.sm_count)
        return run.faults(all(map(equal, run.outputs, map(self.expected, calls))))

    def expected(self, operands: list[tuple[torch.Tensor, torch.Tensor]]) -> Sequence[torch.Tensor]:
        total = torch.stack([a.float() @ b.float() for a, b in operands]).sum(0).bfloat16()
        return total.chunk(len(operands)) if self.product is GemmReduceScatter else [total] * len(operands)


def all_gather_gemm_calls(space: gathering.Workspace, n: int, plan: gathering.Plan, *, calls: int) -> Scenario:
    """``calls`` calls, one behind the other, with nothing between them."""
    world, tiling, m, local_k, declared = space.world_size, plan.tiling, space.m, space.local_k, all_gather_gemm.ALL_GATHER_GEMM
    defines = {**tiling.defines(space.dtype, "k", "mn"), "WORLD_SIZE": world, "SCATTERS": 0}
    scenario = Scenario("all_gather_gemm", declared.source, world, defines=defines)
    gathered_bytes, flag_bytes = 2 * world * space.slot_bytes, space.pieces.count * world * LINE_BYTES
    arena = scenario.arena(gathered_bytes + flag_bytes + 4096)
    offsets = {"gathered_memory": arena.take(gathered_bytes, align=1024), "flags": arena.take(flag_bytes), "epochs": arena.take(4 * 256)}
    for call in range(calls):
        a, _ = products(m, [local_k] * world, n, call)
        _, b = products(m, [world * local_k] * world, n, call)
        whole = torch.cat(a, dim=1).float()
        out = result(scenario, [(whole @ own.float()).bfloat16() for own in b])
        a_buffer = scenario.buffer(f"a of call {call}", [padded(matrix) for matrix in a])
        b_buffer = scenario.buffer(f"b of call {call}", [padded(matrix) for matrix in b])

        def arguments(rank: int, a_buffer: Buffer = a_buffer, b_buffer: Buffer = b_buffer, out: Buffer = out) -> ctypes.Structure:
            places = place(a_buffer, rank, m, local_k), place(b_buffer, rank, world * local_k, n), place(out, rank, m, n)
            specs = space.specs(*places, arena.memory.addresses[rank] + offsets["gathered_memory"], tiling)
            maps = {name: spec.emulated() for name, spec in specs.items()}
            return declared.arguments(**maps, **space.fields(plan), **offsets, n=n, local=a_buffer.addresses[rank])

        scenario.launch(
            "all_gather_gemm", plan.grid, tiling.threads, (arena, arguments), shared_bytes=tiling.shared_bytes, cluster=tiling.blocks
        )
    return scenario
