"""Products of groups of rows, and the products' core for Blackwell."""

import re

import pytest
import torch

from device.runs import run_call
from peerlane.device import compile_cubin, group_of
from peerlane.device.host.resources import resources
from peerlane.device.host.roles import SHARED_LIMIT_BYTES
from peerlane.device.moe import layer
from peerlane.device.products import gemm, grouped_gemm
from peerlane.device.products.gemm_all_reduce import GEMM_ALL_REDUCE
from peerlane.device.products.grouped_gemm import GroupedProduct
from peerlane.errors import UsageError

RESERVED_BYTES = 1024  # of a block's shared memory, which resources() counts


@pytest.mark.parametrize(
    ("tiling", "major"),
    [(None, "k"), (None, "mn"), pytest.param(gemm.TILINGS[1], "k", marks=pytest.mark.long)],
    ids=["chosen", "n contiguous", "clusters"],
)
def test_each_group_of_rows_meets_its_own_matrix(tiling: gemm.Tiling | None, major: str) -> None:
    counts, n, k = (67, 0, 9), 72, 72
    draw, rows = torch.Generator().manual_seed(0), sum(counts) + 5
    a, b = (torch.randn(shape, generator=draw).to(torch.bfloat16) for shape in ((rows, k), (len(counts), n, k)))
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    matrices = [b.clone() if major == "k" else b.transpose(1, 2).contiguous().transpose(1, 2) for _ in range(2)]

    def multiply(*given: torch.Tensor) -> torch.Tensor:
        return GroupedProduct(group_of(), rows, (len(counts), n, k), torch.bfloat16, tiling)(*given)

    for out in run_call(multiply, [(a.clone(), own, ends.clone()) for own in matrices]):
        for part, rows_of, matrix in zip(out.split([*counts, 5]), a.split([*counts, 5]), b, strict=False):
            torch.testing.assert_close(part.float(), rows_of.float() @ matrix.float().T, rtol=0.01, atol=0.01)


def test_matrices_of_odd_sizes_are_refused() -> None:
    with pytest.raises(UsageError, match=r"2 products with matrices \(12, 16\) in torch.bfloat16: expected"):
        GroupedProduct(None, 8, (2, 12, 16), torch.bfloat16)  # type: ignore[arg-type]


@pytest.mark.parametrize("tiling", [gemm.TILINGS[0], gemm.TILINGS[3]], ids=str)
def test_a_grouped_product_fits_a_block(tiling: gemm.Tiling) -> None:
    cubin = compile_cubin(grouped_gemm.GROUPED_GEMM.source, arch="sm_90a", defines=tiling.defines(torch.bfloat16, "k", "k"))
    found = resources(cubin)["grouped_gemm"]
    assert found.shared_bytes - RESERVED_BYTES + tiling.shared_bytes <= SHARED_LIMIT_BYTES
    assert found.frame_bytes == 0


BLACKWELL = {
    "product": (gemm.GEMM.source, gemm.TILINGS[2], "mn"),
    "all-reduce": (GEMM_ALL_REDUCE.source, gemm.TILINGS[3], "mn"),
    "experts": (layer.MOE_UP.source, layer.TILINGS[1], "k"),
}


@pytest.mark.parametrize("name", BLACKWELL)
def test_products_compile_for_blackwell_with_sums_in_tensor_memory(name: str) -> None:
    """They have never run: there the PTX is what can be said."""
    source, tiling, b_major = BLACKWELL[name]
    defines = {**tiling.defines(torch.bfloat16, "k", b_major), "WORLD_SIZE": 4}  # type: ignore[arg-type]
    cubin = compile_cubin(source, arch="sm_100a", defines=defines)
    ptx = cubin.ptx()
    assert "wgmma" not in ptx
    (used,) = resources(cubin).values()
    assert used.shared_bytes - RESERVED_BYTES + tiling.shared_bytes <= SHARED_LIMIT_BYTES
    taken = {int(columns) for columns in re.findall(r"tcgen05\.alloc\S+ \[\S+\], (\d+)", ptx)}
    assert taken == {tiling.columns} and tiling.columns * tiling.groups <= 512
    # The PTX manual's instruction descriptor: fp32 sums, bf16 operands, B transposed if n is contiguous, N / 8, 64 rows / 16.
    wanted = 1 << 4 | 1 << 7 | 1 << 10 | (b_major == "mn") << 16 | tiling.columns // 8 << 17 | 4 << 24
    assert len(re.findall(r"tcgen05\.mma\.cta_group::1\.kind::f16", ptx)) == 4 and re.search(rf"\b{wanted}\b", ptx)
    assert len(re.findall(r"tcgen05\.ld\.sync\.aligned\.16x256b\.x2", ptx)) == tiling.columns // 16
    for once in ("tcgen05.commit", "tcgen05.wait::ld", "tcgen05.dealloc"):
        assert ptx.count(once) == 1
