"""Declared kernels, rows and strided pushes: right as they are, and caught with one thing broken."""

import ctypes
from pathlib import Path

import pytest
import torch

from device.judged import judge, judge_case, require_correct
from device.runs import run_call
from device.twins import changed, use_twin, write_solution
from peerlane import problems, solutions
from peerlane.device import compile_cubin, group_of
from peerlane.device.collectives import strided
from peerlane.device.host.declare import F32, U32, DeclaredKernel, Epochs, Packets, Pointer, array, structure
from peerlane.errors import CompileError, UsageError
from peerlane.evaluate.correctness.emulated import EmulatedJudgement
from peerlane.solutions.families.clipping import Clipping, clip_gradients

INLINE = """
    if (blockIdx.x == 0) peers.acknowledge_all(0, epoch);
    for (int k = 0; k < WORLD_SIZE; ++k) {
        const int q = rank_after<WORLD_SIZE>(arena.rank, k);
        if (k > 0) peers.wait(q, 0, epoch);
        UNIT* target = reinterpret_cast<UNIT*>(arena.peer(q, args.out)) + arena.rank * args.block.of_rank;
        push_strided(target, args.x + q * args.block.for_rank, args.block);
    }
    peers.barrier(1 + blockIdx.x, epoch);
"""


def judged_with(monkeypatch: pytest.MonkeyPatch, body: str) -> EmulatedJudgement:
    """Problem 36 with this body in the kernel."""
    line = "exchange_strided(peers, arena, args.out + args.part, args.x, args.block, epoch);"
    use_twin(monkeypatch, strided, "AXIS_EXCHANGE", line, body)
    return judge_case(36, "padded_bf16", schedules=20)


@pytest.mark.parametrize(
    ("lost", "kind"),
    [
        ("if (k > 0) peers.wait(q, 0, epoch);", "race"),  # the caller of the peer may still read its result
        ("peers.barrier(1 + blockIdx.x, epoch);", "race"),
        ("if (blockIdx.x == 0) peers.acknowledge_all(0, epoch);", "deadlock"),
    ],
)
def test_a_strided_exchange_without_one_step_is_caught(monkeypatch: pytest.MonkeyPatch, lost: str, kind: str) -> None:
    outcome = judged_with(monkeypatch, changed(INLINE, lost, "")).outcome
    assert kind in {finding.kind for finding in outcome.findings}


def test_the_strided_exchange_written_out_is_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    require_correct(judged_with(monkeypatch, INLINE))


@pytest.mark.parametrize(("number", "label"), [(18, "ragged_bf16"), (36, "padded_bf16"), (37, "padded_bf16"), (38, "padded_split_bf16")])
def test_solutions_on_these_pieces_are_right(number: int, label: str) -> None:
    require_correct(judge_case(number, label))


@pytest.mark.parametrize(
    ("old", "new"),
    [("args.sums, epoch)", "args.sums, 2)"), ("sums.push(row, square_sum(row))", "sums.push(row, 0.0f)")],
    ids=["packets_that_are_never_new", "an_empty_sum"],
)
def test_a_small_exchange_with_one_thing_wrong_is_caught(tmp_path: Path, old: str, new: str) -> None:
    judged = judge_case(18, "ragged_bf16", file=write_solution(tmp_path, 18, old, new))
    assert judged.wrong or judged.outcome.findings


def test_a_row_reduction_of_a_real_shape_is_right() -> None:
    """The public benchmark's 1024 rows: many rows for every warp."""
    (case,) = problems.get(18).cases("pkb", 2)
    require_correct(judge(solutions.files()[18], 18, case, schedules=1))


# ---- declarations


class Twin(ctypes.Structure):
    _fields_ = (("at", ctypes.c_uint64), ("count", ctypes.c_uint32))


KERNEL = """
#include <peerlane/rows.cuh>
using namespace peerlane;
#define KERNEL extern "C" __global__ void
KERNEL two_parts(const __grid_constant__ Arena arena, const __grid_constant__ TwoParts args) { args.y[0] = args.n[1]; BROKEN }
"""


def test_a_declaration_adds_a_structure_and_keeps_line_numbers() -> None:
    declared = DeclaredKernel("two_parts", KERNEL, packets=Packets(), epochs=Epochs(), y=Pointer("float*"), n=array(U32, 3), scale=F32)
    compile_cubin(declared.source, defines={"BROKEN": ""})
    line = Path(__file__).read_text().split(" BROKEN }")[0].count("\n") + 1
    with pytest.raises(CompileError, match=rf"test_shared_pieces\.py\({line}\): error"):
        compile_cubin(declared.source, defines={"BROKEN": "nonsense;"})


def test_a_twin_that_differs_from_its_header_does_not_compile() -> None:
    declared = DeclaredKernel("two_parts", KERNEL, packets=structure("PacketSpace", Twin), y=Pointer("float*"), n=array(U32, 3))
    compile_cubin(declared.source, defines={"BROKEN": ""})  # 12 bytes and padding make 16 too

    class Short(ctypes.Structure):
        _fields_ = (("at", ctypes.c_uint64),)

    declared = DeclaredKernel("two_parts", KERNEL, packets=structure("PacketSpace", Short), y=Pointer("float*"), n=array(U32, 3))
    with pytest.raises(CompileError, match=r"TwoParts\.packets"):
        compile_cubin(declared.source, defines={"BROKEN": ""})


def test_wrong_sizes_and_fields_are_told() -> None:
    def refuse() -> None:
        two = DeclaredKernel("two_parts", KERNEL, packets=Packets(), epochs=Epochs(), y=Pointer(), n=U32)
        with pytest.raises(UsageError, match=r"sizes of \['flags'\]; expected \['packets'\]"):
            two.bind(group_of(), grid=1, block=32, sizes={"flags": 3})
        with pytest.raises(UsageError, match="has no field 'rows' to set; expected one of y, n"):
            two.bind(group_of(), grid=1, block=32, sizes={"packets": 3}, rows=2)

    run_call(refuse, [(), ()])


def test_an_exchange_of_axes_says_what_it_takes(tmp_path: Path) -> None:
    file = write_solution(tmp_path, 36, "cut=head_dim", "cut=seq_dim")
    failure = judge_case(36, "padded_bf16", file=file).outcome.failure
    assert failure is not None and "expected two axes" in str(failure[1])


def test_roles_share_the_registers_that_a_block_begins_with() -> None:
    """A group that asks for more waits for ever: 2 x 240 + 32 is all of an SM's registers, and 384 threads begin with fewer."""
    fits, waits = (
        "RoleTable{2, 40, 232}.fits() && RoleTable{3, 32, 160}.fits()",
        "RoleTable{2, 32, 240}.fits() || RoleTable{3, 40, 160}.fits()",
    )
    compile_cubin(f"#include <peerlane/tiles/roles.cuh>\nusing namespace peerlane;\nstatic_assert({fits} && !({waits}));\n")


def test_norms_may_change_their_ranks_from_call_to_call() -> None:
    def clip(gradient: torch.Tensor, *members: tuple[float, float]) -> list[torch.Tensor]:
        return [clip_gradients(group_of(), [gradient.clone()], [], Clipping(of, of, 100.0, 1.0)) for of in members]

    both, mine = (1.0, 1.0), ((1.0, 0.0), (0.0, 1.0))
    given = [(torch.full((8,), rank + 1.0), both, mine[rank], both if rank else mine[0]) for rank in range(2)]
    assert [[float(norm) for norm in norms] for norms in run_call(clip, given, schedules=4)] == [[24.0, 8.0, 8.0], [24.0, 16.0, 24.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_may_begin_anywhere(dtype: torch.dtype) -> None:
    def clip(flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flat = flat.clone()
        gradients = [flat[1:3], flat[5:12], flat[15:50015], flat[50017:90000]]
        return clip_gradients(group_of(), gradients[:3], gradients[3:], Clipping((1.0, 1.0), (1.0, 1.0), 1.0, 2.0)), flat

    given = [torch.randn(90001, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(2)]
    outputs = run_call(clip, [(flat,) for flat in given], schedules=4)
    inside = torch.ones(90001, dtype=torch.bool)
    inside[[0, 3, 4, 12, 13, 14, 50015, 50016, 90000]] = False
    norm = torch.cat([flat[inside] for flat in given]).double().norm()
    for flat, (found, clipped) in zip(given, outputs, strict=True):
        torch.testing.assert_close(found.double(), norm, rtol=1e-5, atol=0.0)
        torch.testing.assert_close(
            clipped, torch.where(inside, (flat.double() / norm).to(dtype), flat), rtol=2e-5 if dtype is torch.float32 else 0.01, atol=0.0
        )
