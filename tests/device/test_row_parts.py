"""Parts of rows between ranks: right on emulated ranks, compiled for GPUs, and caught with one line lost."""

import pytest

from device.judged import judge_case, require_correct
from device.twins import use_twin
from peerlane.device import DeclaredKernel, compile_cubin
from peerlane.solutions.families import row_parts


@pytest.mark.parametrize(("number", "label"), [(65, "uneven_bf16"), (66, "hot"), (66, "uneven"), (67, "uneven_fp32"), (20, "fp8")])
def test_rows_come_where_they_are_wanted(number: int, label: str) -> None:
    require_correct(judge_case(number, label, schedules=2))


@pytest.mark.long
@pytest.mark.parametrize(("number", "label"), [(65, "strided_group_fp32"), (66, "strided_group"), (67, "uneven_bf16"), (20, "fp8")])
def test_four_ranks_exchange_rows(number: int, label: str) -> None:
    require_correct(judge_case(number, label, 4, schedules=2))


@pytest.mark.parametrize("kernel", [row_parts.GATHER_ROWS, row_parts.ADD_ROWS], ids=lambda kernel: kernel.name)
def test_the_kernels_compile(kernel: DeclaredKernel) -> None:
    compile_cubin(kernel.source, defines={"WORLD_SIZE": 8, "ROUNDS": row_parts.ROUNDS})


LOST = {
    "rows to where nobody has told": ("GATHER_ROWS", 65, "uneven_bf16", "        peers.wait_all(0, epoch);\n"),
    "an end before all rows have come": ("GATHER_ROWS", 65, "uneven_bf16", "        peers.wait_all_slots(1 + blockIdx.x, 1, epoch);\n"),
    "sums before they are zeros": ("ADD_ROWS", 66, "uneven", "    meet_blocks(peers, arena, 1, epoch);\n"),
    "sums of rows that have not come": ("ADD_ROWS", 66, "uneven", "        peers.wait_all_slots(slot_of(round), 1, epoch);\n"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", LOST)
def test_a_kernel_that_has_lost_a_line_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, number, label, line = LOST[name]
    use_twin(monkeypatch, row_parts, kernel, line, "")
    found = judge_case(number, label, schedules=12)
    assert "race" in {finding.kind for finding in found.outcome.findings} or found.wrong is not None
