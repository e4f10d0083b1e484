"""Matrix products, alone and fused with communication, on the CPU: right numbers, nothing unordered, and twins with one line wrong are
caught."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from device import emulated
from device.emulated import SumCalls
from device.judged import judge_case, require_correct
from device.runs import require_clean, run_calls
from device.twins import use_header, write_header
from peerlane import solutions
from peerlane.device.host.declare import LocalKernel
from peerlane.device.products import gathering, gemm
from peerlane.device.products.gemm import Tiling
from peerlane.device.products.gemm_all_reduce import GemmAllReduce
from peerlane.device.products.gemm_reduce_scatter import GemmReduceScatter
from peerlane.emulator import Scenario, check
from representatives import first

SMALL = Tiling(groups=1, columns=64, slots=2)


def plain() -> Scenario:
    """Tiles that are ragged along every dimension, more than blocks, with more steps than slots."""
    return emulated.plain_product(72, 136, 136, SMALL, grid=2)


PAIR = Tiling(groups=1, columns=128, slots=2, blocks=2)
"""A cluster of two blocks."""


def plain_of_pairs() -> Scenario:
    """The same by two clusters of two blocks."""
    return emulated.plain_product(136, 136, 136, PAIR, grid=4)


def reduce_scatter(world_size: int = 2) -> SumCalls:
    """Ranks of unequal depth, rows that end within a tile."""
    return SumCalls(GemmReduceScatter, 40 * world_size, 72, (72, 13, 64, 8)[:world_size], SMALL, sm_count=1)


def reduce_scatter_of_pairs(world_size: int = 2) -> SumCalls:
    """One cluster of two blocks; of the second of two tiles' rows the first block has some and the second none."""
    return SumCalls(GemmReduceScatter, 140 * world_size, 136, (72, 13, 64)[:world_size], PAIR)


def lagging(world_size: int = 2) -> SumCalls:
    """Own tiles one number behind the others'."""
    return SumCalls(GemmReduceScatter, 136 * world_size, 72, (72, 13, 64)[:world_size], SMALL)


def all_reduce(world_size: int = 2) -> SumCalls:
    """Three tiles by six: the last round lacks some. Two blocks."""
    return SumCalls(GemmAllReduce, 136, 72, (72, 13, 64, 8)[:world_size], SMALL, calls=3)


def all_reduce_of_pairs(world_size: int = 3) -> SumCalls:
    """Four tiles of three ranks, by one cluster of two blocks."""
    return SumCalls(GemmAllReduce, 140, 136, (72, 13, 64)[:world_size], PAIR)


def in_rank_order(world_size: int = 3) -> SumCalls:
    """Sums that do not depend on a tile's owner."""
    return SumCalls(GemmAllReduce, 136, 72, (72, 13, 64)[:world_size], SMALL, epilogue=gemm.Epilogue(batch_invariant=True))


def all_gather(world_size: int = 2, calls: int = 3, communicator_blocks: int = 0) -> Scenario:
    """Pieces of rows, of which the last is short, and of columns, whose last ends within a step; a block that only communicates, or two."""
    pieces = gathering.Pieces(40, 72, rows=16, columns=72 if communicator_blocks else 64)
    space = gathering.Workspace(pieces, pieces.m, torch.bfloat16, world_size)
    plan = gathering.Plan(SMALL, SMALL.grouped(40, 72), grid=3, communicator_blocks=communicator_blocks)
    return emulated.all_gather_gemm_calls(space, 72, plan, calls=calls)


def all_gather_of_pairs(world_size: int = 2, communicator_blocks: int = 0) -> Scenario:
    """Two clusters, one of which may communicate; rows as above."""
    pieces = gathering.Pieces(140, 72, rows=16, columns=72 if communicator_blocks else 64)
    space = gathering.Workspace(pieces, pieces.m, torch.bfloat16, world_size)
    plan = gathering.Plan(PAIR, PAIR.grouped(140, 136), grid=4, communicator_blocks=communicator_blocks)
    return emulated.all_gather_gemm_calls(space, 136, plan, calls=2)


def test_a_product_is_right_and_nothing_in_it_is_unordered() -> None:
    require_clean(plain(), schedules=4)


@pytest.mark.parametrize("b_major", first(["k", "mn"]))
def test_blocks_of_a_cluster_share_an_operand(b_major: gemm.Major) -> None:
    require_clean(emulated.plain_product(136, 136, 136, PAIR, grid=4, majors=("k", b_major)), schedules=4)


@pytest.mark.parametrize(
    "scenario",
    [all_gather_of_pairs, pytest.param(lambda: all_gather_of_pairs(3, communicator_blocks=2), marks=pytest.mark.long)],
    ids=["all_gather by warps", "all_gather by blocks"],
)
def test_clusters_communicate_as_blocks_do(scenario: Callable[[], Scenario]) -> None:
    require_clean(scenario(), schedules=2)


def test_two_groups_take_their_halves_of_transposed_operands() -> None:
    require_clean(emulated.plain_product(136, 200, 72, Tiling(2, 128, 2), dtype=torch.float16, majors=("mn", "k")), schedules=1)


@pytest.mark.parametrize(
    ("calls", "world_size"),
    [
        (reduce_scatter, 2),
        (all_reduce, 2),
        (in_rank_order, 3),
        *(pytest.param(calls, size, marks=pytest.mark.long) for calls, size in ((reduce_scatter, 4), (lagging, 3), (all_reduce, 4))),
        *(pytest.param(calls, size, marks=pytest.mark.long) for calls, size in ((reduce_scatter_of_pairs, 2), (all_reduce_of_pairs, 3))),
    ],
)
def test_a_sum_of_products_is_right_call_after_call(calls: Callable[[int], SumCalls], world_size: int) -> None:
    assert not calls(world_size).found()


@pytest.mark.parametrize("communicator_blocks", [0, 2], ids=["warps", "blocks"])
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_a_product_with_all_gather_is_right_call_after_call(world_size: int, communicator_blocks: int) -> None:
    require_clean(all_gather(world_size, communicator_blocks=communicator_blocks), schedules=2)


@pytest.mark.parametrize(
    ("number", "label", "world_size"),
    [(14, "ragged_bf16", 2), *(pytest.param(n, "tile_bf16", 4, marks=pytest.mark.long) for n in (11, 13, 14, 15))],
)
def test_solutions_with_products_are_right(number: int, label: str, world_size: int) -> None:
    require_correct(judge_case(number, label, world_size, schedules=2))


def test_a_rank_may_change_its_k_alone() -> None:
    """Else one rank would make a kernel, which all have to do together, while another uses the one that it has."""
    drawn = [emulated.products(33, depths, 17, call) for call, depths in enumerate([(24, 7), (24, 24)])]
    run_calls(lambda rank: solutions.load(13), [list(zip(a, b, strict=True)) for a, b in drawn]).clean()


TWINS = {
    "slot given back to one block of the cluster": (
        "plain_of_pairs",
        "tiles/pipeline.cuh",
        "for (u32 block = 0; block < blocks; ++block)",
        "for (u32 block = 0; block < 1; ++block)",
        {"deadlock", "trap", "misuse"},
    ),
    "block ends before its neighbour": (
        "plain_of_pairs",
        "tiles/roles.cuh",
        "            if constexpr (blocks > 1) in.drain();\n",
        "",
        {"misuse"},
    ),
    "both blocks load the same part": (
        "plain_of_pairs",
        "tiles/tile.cuh",
        "static_cast<int>(ptx::cluster_rank()) * part;",
        "0;",
        {"race", "wrong_result"},
    ),
    "operand steps too short": ("plain", "tiles/tile.cuh", "step * (mma_depth * 128)", "step * (mma_depth * 64)", {"wrong_result"}),
    "slot given back before it is read": ("plain", "products/gemm.cuh", "ptx::wgmma_wait<1>();", "ptx::wgmma_wait<2>();", {"race"}),
    "no proxy fence before a store": (
        "reduce_scatter",
        "tiles/pipeline.cuh",
        "        ptx::fence_proxy_async_shared();\n",
        "",
        {"proxy_fence"},
    ),
    "no signal": (
        "reduce_scatter",
        "products/owner_sum.cuh",
        "peers(storer).signal(tile.owner, flag_of(tile, group), epoch);",
        "",
        {"deadlock", "trap"},
    ),
    "wrong slot": (
        "reduce_scatter",
        "products/owner_sum.cuh",
        "Shape::first_row(group), slot_of(arena.rank)}",
        "Shape::first_row(group), slot_of(tile.owner)}",
        {"wrong_result"},
    ),
    "no wait": (
        "all_gather",
        "products/all_gather_gemm.cuh",
        "this->wait_for_rows(row, piece, rank_after<W>(arena.rank, W - before));",
        "",
        {"race", "wrong_result"},
    ),
    "wait without acquire": ("all_gather", "peers/peers.cuh", "        ptx::load_acquire_system(place);\n", "", {"race"}),
    "rows told of too early": (
        "all_gather",
        "products/gathered_pieces.cuh",
        "            for (u32 i = 0; i < now; ++i) {\n",
        "            peers(communicator).signal_all_slots(now, [&](u32 i) { return flag_of_piece(index + i * parts); }, epoch);\n"
        "            for (u32 i = 0; i < now; ++i) {\n",
        {"race"},
    ),
    "own tile before the others'": (
        "reduce_scatter",
        "products/owner_sum.cuh",
        "distance = 1 + index % (W - 1);",
        "distance = W - index % (W - 1);",
        {"deadlock", "trap"},
    ),
    "tile told of before it is stored": (
        "all_reduce",
        "products/gemm_all_reduce.cuh",
        "        store_sum<Shape>(out, {tile.column",
        "        this->peers(storer).signal_all(finished() + Base::flag_of(tile, group), this->epoch);\n"
        "        store_sum<Shape>(out, {tile.column",
        {"race"},
    ),
    "tile stored before its rank is ready": (
        "columns_to_all",
        "products/gemm_all_gather.cuh",
        "        if (tile.index < gridDim.x / Shape::cluster_blocks) peers.wait_all(0, epoch);\n",
        "",
        {"race"},
    ),
    "columns that are waited for too early": (
        "columns_to_all",
        "products/gemm_all_gather.cuh",
        "        peers.signal_all(1 + tile.index * tile_flags + Shape::group_of_tile(group), epoch);\n",
        "        peers.acknowledge_all(1 + tile.index * tile_flags + Shape::group_of_tile(group), epoch);\n",
        {"race"},
    ),
    "end before all tiles have come": (
        "all_reduce",
        "products/gemm_all_reduce.cuh",
        "            this->peers(storer).wait_slots(owner, finished() + first, end - first, this->epoch);\n",
        "",
        {"race"},
    ),
    "parts in another order than they are waited for": (
        "in_rank_order",
        "products/owner_sum.cuh",
        "Shape::first_row(), slot_of(source)});",
        "Shape::first_row(), slot_of(rank_after<W>(arena.rank, W - before))});",
        {"race"},
    ),
    "one buffer of slots": ("reduce_scatter", "products/owner_sum.cuh", "epoch % buffers * W + source", "source", {"race", "wrong_result"}),
    "one buffer for all calls": (
        "all_gather",
        "products/gathered_pieces.cuh",
        "(epoch & 1) * W + source",
        "source",
        {"race", "wrong_result"},
    ),
}
"""The scenario, the header, a line of it, what stands there instead, and the kinds of findings that are right."""


SCENARIOS: dict[str, Callable[[], Scenario]] = {"plain": plain, "plain_of_pairs": plain_of_pairs, "all_gather": all_gather}
SUMS: dict[str, Callable[[], SumCalls]] = {"reduce_scatter": reduce_scatter, "all_reduce": all_reduce, "in_rank_order": in_rank_order}


@pytest.mark.long
@pytest.mark.parametrize("name", TWINS)
def test_a_twin_with_one_line_wrong_is_caught(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where, *change, kinds = TWINS[name]
    if where in SCENARIOS:
        scenario = SCENARIOS[where]()
        scenario.include_dirs = (write_header(tmp_path, *change),)
        found = {finding.kind for finding in check(scenario, schedules=3).findings}
    else:
        use_header(monkeypatch, tmp_path, *change)
        found = SUMS[where]().found() if where in SUMS else {finding.kind for finding in judge_case(14, "tile_bf16").outcome.findings}
    assert found & kinds, found


CLAIMING = r"""
#include <peerlane/peers/arena.cuh>
#include <peerlane/products/gemm.cuh>
using namespace peerlane;
using Shape = SHAPE;

struct Claiming : GemmRoles<Shape, Gemm> {
    TileClaims claims;
    __device__ Claiming(const Gemm& p, u32* counters, u32 epoch) : GemmRoles(p), claims(counters, epoch) {}
    __device__ u32 claim() const { return claims.next(); }
};

extern "C" __global__ void __launch_bounds__(Shape::roles.threads(), 1)
    gemm(const __grid_constant__ Gemm args, u32* counters, u32* epochs) {
    run_roles(Claiming(args, counters, next_epoch(epochs)));
}
"""


def test_tiles_may_be_claimed_instead_of_dealt() -> None:
    scenario = emulated.plain_product(136, 136, 72, SMALL)
    scenario.source = LocalKernel("gemm", CLAIMING, **gemm.GEMM.fields).source
    (dealt,) = scenario.launches
    scenario.launches.clear()
    counters = scenario.buffer("counters", [torch.zeros(2, dtype=torch.int32)])
    epochs = scenario.buffer("epochs", [torch.zeros(256, dtype=torch.int32)])
    arguments = gemm.GEMM.arguments.from_buffer_copy(dealt.arguments[0])
    for _ in range(2):
        scenario.launch("gemm", 2, SMALL.threads, (arguments, counters, epochs), shared_bytes=SMALL.shared_bytes)
    require_clean(scenario, schedules=2)
