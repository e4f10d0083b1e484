"""Kernels run from PTX as they do from C++: the same results, the same findings; what is not known is quoted."""

import ctypes

import pytest
import torch

from device import test_patterns as patterns
from device.judged import cases, require_correct
from device.runs import require_clean
from peerlane import problems, solutions
from peerlane.device import compile_cubin
from peerlane.emulator import Ptx, Report, Scenario, UnknownPtx, build, check
from peerlane.emulator.job import run_job
from peerlane.emulator.ptx_front_end import translate
from peerlane.evaluate.correctness.emulated import judge_emulated

# Arithmetic with values that come from memory, so that the compiler leaves it to the GPU. Results of the C++ and of the PTX are compared.
NUMBERS = r"""
#include <peerlane/ptx/ptx.cuh>
using namespace peerlane;
extern "C" __global__ void numbers(const int* in, int* out) {
    const int t = threadIdx.x, a = in[t], b = in[t + 32];
    const u32 ua = a, ub = b;
    const long long wide = (long long)a << 20 | ub;
    const float x = __int_as_float(a & 0x3fffffff), y = b * 0.37f;
    int* row = out + 24 * t;
    row[0] = a + b * 3 - (a ^ b);
    row[1] = b ? a / b : 7;
    row[2] = ub ? ua % ub : 7;
    row[3] = a >> (b & 31) | a << (ub % 9);
    row[4] = min(a, b) + (max(ua, ub) >> 3);
    row[5] = __popc(ua) * 100 + __clz(b);
    row[6] = int(wide * 3 >> 31);
    row[7] = int((u64)wide / (ub | 1));
    row[8] = __float_as_int(fmaf(x, 0.5f, y));
    row[9] = __float_as_int(sqrtf(fabsf(y)) + 1.0f / (fabsf(y) + 1.0f));
    row[10] = int(y) + 1000 * int(y * 0.01f);
    row[11] = __float_as_int(float(a) - float(ub));
    row[12] = x < y ? 1 : x == y ? 2 : 3;
    row[13] = (short)a * (signed char)b;
    row[14] = __shfl_xor_sync(0xffffffffu, a, 5) + __shfl_sync(0xffffffffu, b, 3);
    row[15] = __shfl_up_sync(0xffffffffu, a, 2, 8) - __shfl_down_sync(0xffffffffu, b, 3, 16);
    row[16] = __ballot_sync(0xffffffffu, a > b);
    row[17] = __any_sync(0xffffffffu, a == 12345) + 2 * __all_sync(0xffffffffu, t >= 0);
    row[18] = ptx::pack_bf16x2(y, x);
    row[19] = ptx::pack_f16x2(y, float(b));
    int steps = 0;
    for (u32 n = ua % 1000 + 1; n != 1; n = n % 2 ? 3 * n + 1 : n / 2) ++steps;
    row[20] = steps;
    __shared__ int turned[32];
    turned[31 - t] = a;
    __syncthreads();
    row[21] = turned[t];
    __syncthreads();
    row[22] = atomicAdd(&turned[0], 0) ? 1 : 2;
    row[23] = __float_as_int(ptx::exp2(y * 0.01f));
}
"""


def numbers(source: str | Ptx) -> list[torch.Tensor]:
    """Returns the columns that the kernel writes."""
    torch.manual_seed(1)
    given = torch.randint(-(2**31), 2**31 - 1, (64,), dtype=torch.int64).int()
    given[::7] = torch.arange(10).int()
    scenario = Scenario("numbers", source, 1)
    into = scenario.buffer("in", [given])
    out = scenario.buffer("out", [torch.zeros(24 * 32, dtype=torch.int32)])
    scenario.launch("numbers", 1, 32, [into, out])
    program = build.compile_program(source)
    job = scenario.job(program.globals)
    answer = run_job(job, program, schedules=1, keep=True)
    assert not answer.findings
    (pages,) = [pages for region, pages in answer.written.items() if region.name == "out"]
    return list(torch.frombuffer(bytearray(b"".join(page for _, page in pages)), dtype=torch.int32)[: 24 * 32].reshape(32, 24).T)


def test_arithmetic_branches_and_warps_give_the_same_bits() -> None:
    for number, (from_source, from_ptx) in enumerate(zip(numbers(NUMBERS), numbers(Ptx(compile_cubin(NUMBERS).ptx())), strict=True)):
        if number in (9, 23):  # approximate on a GPU: the compiler's choice of instructions shows in the last bits
            assert torch.allclose(from_source.view(torch.float32), from_ptx.view(torch.float32), rtol=1e-5), number
        else:
            assert torch.equal(from_source, from_ptx), (number, from_source, from_ptx)


@pytest.fixture(scope="module")
def modules() -> dict[int, str]:
    """The patterns, broken and repaired, as C++ from PTX: translated once."""
    return {broken: translate(Ptx(compile_cubin(patterns.SOURCE, defines={"BROKEN": broken}).ptx())) for broken in (0, 1)}


def of_ptx(name: str, broken: int, modules: dict[int, str], monkeypatch: pytest.MonkeyPatch) -> Report:
    with monkeypatch.context() as patched:
        patched.setattr(patterns, "Scenario", lambda name, _, ranks, defines: Scenario(name, Ptx(modules[defines["BROKEN"]]), ranks))
        patched.setattr("peerlane.emulator.build.translate", lambda ptx: ptx.text)
        return patterns.run(name, broken)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, _, _ in patterns.ROWS])
def test_faults_are_found_from_ptx_as_from_the_source(name: str, modules: dict[int, str], monkeypatch: pytest.MonkeyPatch) -> None:
    from_ptx, from_source = of_ptx(name, 1, modules, monkeypatch), patterns.run(name, 1)
    assert {item.kind for item in from_ptx.findings} == {item.kind for item in from_source.findings}
    assert from_ptx.caught == from_source.caught
    races = [{item.lines for item in report.findings if item.kind == "race"} for report in (from_ptx, from_source)]
    assert races[0] == races[1]
    assert of_ptx(name, 0, modules, monkeypatch).clean


@pytest.mark.two_compilers
@pytest.mark.parametrize(
    "number",
    [2, 18, *(pytest.param(number, marks=pytest.mark.slow) for number in (1, 8, 12, 17, 33, 44)),
     *(pytest.param(number, marks=pytest.mark.long) for number in (4, 7, 16, 20, 39, 73))],
)  # fmt: skip
def test_a_kit_kernel_is_right_and_clean_from_its_ptx(number: int) -> None:
    require_correct(judge_emulated(solutions.files()[number], problems.get(number), cases(problems.get(number), 2)[0], from_ptx=True))


MISSING = """
.version 9.0
.target sm_90a
.address_size 64
.file 1 "mine.cu"
.visible .entry odd(.param .u64 odd_param_0) {
    .reg .b32 %r<3>;
    .loc 1 17 5
    INSTRUCTION;
    ret;
}
"""


@pytest.mark.parametrize(
    "instruction",
    [
        "wmma.load.a.sync.aligned.row.m16n16k16.global.f16 {%r1}, [%r2]",
        "vadd2.u32.u32.u32 %r1, %r1, %r2, %r1",
        "ld.global.mmio.u32 %r1, [%r2]",
        "call (%r1), f, (%r2)",
        "multimem.ld_reduce.relaxed.sys.global.add.v4.e5m2x4 {%r1, %r1, %r1, %r1}, [%rd1]",
        "multimem.red.relaxed.sys.global.min.f16x2 [%rd1], %r1",
        "multimem.cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r1], 16",
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%rd1, {%r1, %r1}], [%r1]",
        "cp.async.bulk.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r1, %r1, %r1}], [%r1], {%rs1}",
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r1}], [%r1]",
    ],
)
def test_an_unknown_instruction_is_quoted_with_its_line(instruction: str) -> None:
    with pytest.raises(UnknownPtx) as raised:
        translate(Ptx(MISSING.replace("INSTRUCTION", instruction)))
    assert repr(instruction) in str(raised.value) and "(mine.cu:17)" in str(raised.value) and "nothing was run" in str(raised.value)


def test_a_bulk_prefetch_does_nothing() -> None:
    assert "odd" in translate(Ptx(MISSING.replace("INSTRUCTION", "cp.async.bulk.prefetch.L2.global [%r1], 64")))


def test_ptx_of_any_compiler_is_a_scenario() -> None:
    """As Triton writes it: names of its own, shared memory that the launch sizes, no line of the source."""
    text = """
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry turn(.param .u64 .ptr .global .align 1 turn_param_0, .param .u32 turn_param_1)
.reqntid 32 {
    .reg .pred %p<2>; .reg .b32 %r<9>; .reg .b64 %rd<4>;
    ld.param.b64 %rd1, [turn_param_0];
    ld.param.b32 %r1, [turn_param_1];
    mov.u32 %r2, %tid.x;
    shl.b32 %r3, %r2, 2;
    mov.b32 %r4, global_smem;
    add.s32 %r5, %r4, %r3;
    st.shared.b32 [ %r5 + 0 ], %r2;
    bar.sync 0;
    xor.b32 %r6, %r3, 124;
    add.s32 %r7, %r4, %r6;
    ld.shared.b32 %r8, [%r7];
    mad.wide.u32 %rd2, %r2, 4, %rd1;
    setp.lt.u32 %p1, %r2, %r1;
    @%p1 st.global.b32 [ %rd2 + 0 ], { %r8 };
    ret;
}
"""
    scenario = Scenario("turn", Ptx(text), 1)
    expected = torch.tensor([31 - i if i < 20 else 0 for i in range(32)], dtype=torch.int32)
    out = scenario.buffer("out", [torch.zeros(32, dtype=torch.int32)], [expected])
    scenario.launch("turn", 1, 32, [out, ctypes.c_uint32(20)], shared_bytes=128)
    require_clean(scenario, schedules=10)
    racy = Scenario("turn", Ptx(text.replace("    bar.sync 0;\n", "")), 1)
    out = racy.buffer("out", [torch.zeros(32, dtype=torch.int32)])
    racy.launch("turn", 1, 32, [out, ctypes.c_uint32(20)], shared_bytes=128)
    assert {finding.kind for finding in check(racy, schedules=10).findings} == {"race"}


def test_barriers_reduce_predicates() -> None:
    """As __syncthreads_count, _and and _or compile."""
    text = """
.version 8.7
.target sm_90a
.address_size 64
.visible .entry votes(.param .u64 votes_param_0) {
    .reg .pred %p<4>; .reg .b32 %r<6>; .reg .b64 %rd<3>;
    ld.param.b64 %rd1, [votes_param_0];
    mov.u32 %r1, %tid.x;
    setp.lt.u32 %p1, %r1, 20;
    bar.red.popc.u32 %r2, 0, %p1;
    barrier.cta.red.and.pred %p2, 0, 64, %p1;
    bar.red.or.pred %p3, 0, !%p1;
    selp.u32 %r3, 100, 200, %p2;
    selp.u32 %r4, 1000, 2000, %p3;
    add.s32 %r2, %r2, %r3;
    add.s32 %r2, %r2, %r4;
    mad.wide.u32 %rd2, %r1, 4, %rd1;
    st.global.b32 [%rd2], %r2;
    ret;
}
"""
    scenario = Scenario("votes", Ptx(text), 1)
    out = scenario.buffer("out", [torch.zeros(64, dtype=torch.int32)], [torch.full((64,), 1220, dtype=torch.int32)])
    scenario.launch("votes", 1, 64, [out])
    require_clean(scenario, schedules=3)
