"""The matrix products compile within their register budget, and host and device agree on every structure and size. No GPU is needed."""

import contextlib
import re
from dataclasses import replace

import pytest
import torch

from peerlane.device.host.jit import compiler_report
from peerlane.device.host.roles import SHARED_LIMIT_BYTES, BlockNeeds, require_resident
from peerlane.device.products import all_gather_gemm, gathering, gemm
from peerlane.device.products.gemm import TILINGS, Tiling, choose_tiling
from peerlane.device.products.gemm_all_gather import GEMM_ALL_GATHER
from peerlane.device.products.gemm_all_reduce import GEMM_ALL_REDUCE
from peerlane.device.products.gemm_reduce_scatter import GEMM_REDUCE_SCATTER
from peerlane.errors import LaunchError, UsageError
from representatives import every_second

FUSED = {
    "GemmReduceScatterRoles<Shape, WORLD_SIZE, GemmReduceScatter>": GEMM_REDUCE_SCATTER.source,
    "GemmAllReduceRoles<Shape, WORLD_SIZE, GemmAllReduce>": GEMM_ALL_REDUCE.source,
    "GemmAllGatherRoles<Shape, WORLD_SIZE, GemmAllGather>": GEMM_ALL_GATHER.source,
    "AllGatherGemmRoles<Shape, WORLD_SIZE, SCATTERS, AllGatherGemm>": all_gather_gemm.ALL_GATHER_GEMM.source,
    "GemmRoles<Shape, Gemm>": gemm.GEMM.source,
}
EVERYTHING = gemm.Epilogue("silu", bias=True, residual=True, scale=True)


@pytest.mark.parametrize(("kernel", "tiling"), every_second(FUSED, TILINGS))
def test_kernels_keep_to_their_registers_and_their_shared_memory(kernel: str, tiling: Tiling) -> None:
    layout = f"using namespace peerlane;\nstatic_assert(sizeof(RoleMemory<{kernel}>) == {tiling.shared_bytes});\n"
    layout += f"static_assert(Shape::roles.threads() == {tiling.threads});\n"
    report = compiler_report(FUSED[kernel] + layout, defines={**tiling.defines(torch.bfloat16, "k", "mn"), "WORLD_SIZE": 4, "SCATTERS": 0})
    assert "0 bytes spill stores, 0 bytes spill loads" in report
    # C7510 and its kin: matrix instructions that wait for each other, register moves that are left out.
    assert "Potential Performance Loss" not in report
    (used,) = re.findall(r"Used (\d+) registers", report)
    assert BlockNeeds(tiling.threads, int(used), tiling.shared_bytes).per_sm() >= 1


@pytest.mark.parametrize(
    "tiling", [*(pytest.param(tiling, marks=pytest.mark.slow) for tiling in (TILINGS[0], gemm.BATCH_INVARIANT)), TILINGS[-1]]
)
def test_an_epilogue_of_every_part_spills_next_to_nothing(tiling: Tiling) -> None:
    last = replace(EVERYTHING, batch_invariant=tiling == gemm.BATCH_INVARIANT)
    report = compiler_report(GEMM_ALL_REDUCE.source, defines={**tiling.defines(torch.float16, "k", "mn", last), "WORLD_SIZE": 8})
    (spilled,) = map(int, re.findall(r"(\d+) bytes spill stores", report))
    assert spilled <= 64 and "Potential Performance Loss" not in report  # a few words, once a tile


def test_a_product_compiles_for_operands_either_way_round() -> None:
    report = compiler_report(gemm.GEMM.source, defines=TILINGS[0].defines(torch.float16, "mn", "k"))
    assert "0 bytes spill stores" in report and "Potential Performance Loss" not in report


def test_large_products_get_large_tiles_and_small_ones_fill_the_gpu() -> None:
    assert choose_tiling(8192, 8192, 8192, 132) == Tiling(2, 256, 4, blocks=2)
    small = choose_tiling(128, 4096, 7168, 116)
    rows, columns = small.grid(128, 4096)
    assert rows * columns > 32
    for m, n, k in [(1, 8, 8), (64, 64, 64), (1000, 1000, 1000), (32768, 8192, 512)]:
        assert choose_tiling(m, n, k, 132) in TILINGS


@pytest.mark.parametrize(
    ("a", "b", "refused"),
    [
        ((64, 128), (128, 32), False),
        ((64, 128), (136, 32), True),  # would be read beyond its end
        ((64, 128), (120, 32), True),
        ((64, 128), (64, 128), True),
        ((0, 128), (128, 32), True),
        ((64, 0), (0, 32), True),
        ((64, 128), (128, 0), True),
        ((2, 64, 128), (128, 32), True),
        ((128,), (128, 32), True),
    ],
)
def test_operands_must_fit_each_other(a: tuple[int, ...], b: tuple[int, ...], refused: bool) -> None:
    with pytest.raises(UsageError, match=r"expected \(m, k\) and \(k, n\)") if refused else contextlib.nullcontext():
        gemm.check_operands(torch.empty(a, dtype=torch.bfloat16), torch.empty(b, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float16), (torch.float32, torch.float32), (torch.float16, torch.float32)])
def test_operands_have_one_type_that_kernels_know(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    with pytest.raises(UsageError, match="expected both bfloat16 or both float16"):
        gemm.check_operands(*(torch.empty(8, 8, dtype=dtype) for dtype in dtypes))


def test_every_tiling_fits_a_block() -> None:
    for tiling in TILINGS:
        assert tiling.shared_bytes <= SHARED_LIMIT_BYTES
        # A piece of another rank's product takes the place of a step's operands.
        assert tiling.block_rows * min(tiling.columns, 128) <= (tiling.block_rows + tiling.columns) * gemm.PANEL


def test_a_grid_that_can_not_be_resident_is_refused() -> None:
    needs = BlockNeeds(threads=384, registers=168, shared_bytes=TILINGS[0].shared_bytes)
    assert needs.per_sm() == 1
    require_resident("fused", 132, needs, 132)
    with pytest.raises(LaunchError, match=r"133 blocks .* only 132 can be resident .* launch at most 132"):
        require_resident("fused", 133, needs, 132)
    assert BlockNeeds(threads=256, registers=64, shared_bytes=40 << 10).per_sm() == 4
    assert BlockNeeds(threads=1024, registers=33, shared_bytes=0).per_sm() == 1
    assert BlockNeeds(threads=128, registers=32, shared_bytes=SHARED_LIMIT_BYTES + 1).per_sm() == 0


@pytest.mark.parametrize("communicator_blocks", [0, 16])
@pytest.mark.parametrize("m", [1, 8, 33, 128, 4093, 8192])
@pytest.mark.parametrize("local_k", [8, 128, 1792, 2048])
def test_pieces_suit_every_tiling_and_plans_suit_the_gpu(m: int, local_k: int, communicator_blocks: int) -> None:
    pieces = gathering.choose_pieces(m, local_k, 4, communicator_blocks)
    assert all(tiling.block_rows % pieces.rows == 0 for tiling in TILINGS)
    assert pieces.columns == local_k or (pieces.columns % gemm.PANEL == 0 and not communicator_blocks)
    chosen = gathering.plan(pieces, 4096, 4 * local_k, 132, communicator_blocks)
    assert (chosen.communicator_blocks > 0) == (communicator_blocks > 0) and chosen.communicator_blocks < chosen.grid <= 132
    assert chosen.communicator_blocks % chosen.tiling.blocks == 0 and chosen.grid % chosen.tiling.blocks == 0
    assert chosen.tiles.rows * chosen.tiling.rows >= m


@pytest.mark.parametrize("n", [1024, 4096, 25600])
def test_a_wide_result_does_not_read_b_again_for_every_few_rows(n: int) -> None:
    chosen = gathering.plan(gathering.choose_pieces(8192, 2560, 2), n, 5120, 132)
    busy = chosen.tiles.group_rows * chosen.tiles.columns * chosen.tiling.blocks >= 132 - chosen.tiling.blocks
    assert busy and chosen.tiles.group_rows * chosen.tiling.rows >= 1024
