"""The declarations behind docs/ops-support.md name what the checks of the operators see."""

import pytest
import torch

from docs.build.operators import SUPPORT, operators_table
from ops.whole import CASES, Case
from peerlane import ops
from peerlane.errors import UsageError
from peerlane.ops.sharding import SHARDINGS

NO_OPERATORS = {"DispatchConfig", "DispatchHandle", "ExpertLayers", "close", "memory_report", "prepare", "replicate", "set_batch_invariant"}
OF_PRODUCTS_IN_FP8 = {
    "quantize_fp8", "quantize_transposed_fp8", "grouped_gemm_fp8", "row_gather_gemm_fp8", "gemm_reduce_scatter_fp8", "gemm_all_reduce_fp8",
}  # fmt: skip
OF_NORMS_IN_FP8 = {"all_reduce_rms_norm_fp8", "reduce_scatter_rms_norm_fp8"}
TESTED_BY_THEMSELVES = {"dispatch", "dispatch_fp8", "combine", "all_gatherv", "reduce_scatterv"} | OF_NORMS_IN_FP8 | OF_PRODUCTS_IN_FP8


def test_every_operator_is_declared_and_checked() -> None:
    operators = set(ops.__all__) - NO_OPERATORS
    assert operators == set(SUPPORT) == {case.operator for case in CASES} | TESTED_BY_THEMSELVES
    assert set(SHARDINGS) == operators - TESTED_BY_THEMSELVES - {"all_reduce_rms_norm", "reduce_scatter_rms_norm"}
    assert operators_table().count("\n") == len(operators) + 2


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_declared_casts_are_those_that_checks_see(case: Case) -> None:
    assert SUPPORT[case.operator].casts == case.casts


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", ["gemm_all_reduce", "all_gather_gemm"])
def test_products_refuse_integers(name: str) -> None:
    with pytest.raises(UsageError, match="floating-point"):
        getattr(ops, name)(torch.ones(2, 2, dtype=torch.int64), torch.ones(2, 2, dtype=torch.int64))
