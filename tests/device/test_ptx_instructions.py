"""PTX instructions leave the numbers that PTX defines, and every public function of CUDA's device headers is known."""

import ctypes

import pytest
import torch

from device import instruction_kernels as kernels
from device import public_functions
from peerlane.device import compile_cubin
from peerlane.emulator import Ptx, Scenario, build, check
from peerlane.emulator.job import run_job
from peerlane.emulator.ptx_front_end import UnknownPtx, fidelity, translate


@pytest.mark.parametrize("kernel", kernels.KERNELS)
def test_instructions_leave_what_ptx_defines(kernel: str) -> None:
    ptx = Ptx(compile_cubin(kernels.SOURCE).ptx())
    scenario = Scenario(kernel, ptx, 1)
    given = scenario.buffer("in", [torch.tensor(kernels.inputs(kernel), dtype=torch.int64).to(torch.int32)])
    out = scenario.buffer("out", [torch.zeros(kernels.THREADS * kernels.RESULTS, dtype=torch.int32)])
    scenario.launch(kernel, 1, kernels.THREADS, [given, out])
    program = build.compile_program(ptx)
    answer = run_job(scenario.job(program.globals), program, schedules=1, keep=True)
    assert not answer.findings, answer.findings
    left = next(b"".join(page for _, page in pages) for region, pages in answer.written.items() if region.name == "out")
    words = torch.frombuffer(bytearray(left), dtype=torch.int32).view(-1)[: kernels.THREADS * kernels.RESULTS].view(kernels.THREADS, -1)
    for thread, row in enumerate(kernels.expected(kernel)):
        got = [word % 2**32 for word in words[thread].tolist()]
        wrong = {i: (hex(got[i]), hex(value)) for i, value in enumerate(row) if got[i] != value}
        assert not wrong, (thread, kernels.inputs(kernel)[thread::32], wrong)


PUBLIC = {
    "cuda_fp16.h": lambda: public_functions.small_floats("cuda_fp16.h", "FP16"),
    "cuda_bf16.h": lambda: public_functions.small_floats("cuda_bf16.h", "BF16"),
    "cuda_fp8.h": lambda: public_functions.small_floats("cuda_fp8.h", "FP8"),
    **{f"cuda/atomic, {scope}": lambda scope=scope: public_functions.atomics(scope) for scope in ("block", "device", "system")},
    "cuda/barrier": public_functions.barriers,
    "cooperative_groups": public_functions.groups,
    "mathematics, calls": public_functions.others,
}


@pytest.mark.slow
@pytest.mark.parametrize("header", PUBLIC)
def test_every_public_function_of_a_header_is_known(header: str) -> None:
    source = PUBLIC[header]()
    assert source.count(";") > 20  # the header's declarations were found
    assert build.compile_program(Ptx(compile_cubin(source).ptx())).kernels == ("calls",)


def _findings(source: str, grid: int, block: int, expected: list[int], ranks: int = 1, schedules: int = 20) -> set[str]:
    """Returns the kinds of findings of a kernel (arena, offset of words, out)."""
    scenario = Scenario("kernel", Ptx(compile_cubin(source).ptx()), ranks)
    arena = scenario.arena(4096)
    words = ctypes.c_uint64(arena.take(512))
    size = len(expected)
    out = scenario.buffer("out", [torch.zeros(size, dtype=torch.int32)] * ranks, [torch.tensor(expected, dtype=torch.int32)] * ranks)
    scenario.launch("kernel", grid, block, [arena, words, out])
    return {finding.kind for finding in check(scenario, schedules=schedules).findings}


FENCES = """
#include <peerlane/comm.cuh>
using namespace peerlane;
extern "C" __global__ void kernel(const __grid_constant__ Arena arena, u64 at, int* out) {
    volatile int* words = reinterpret_cast<volatile int*>(arena.peer(0, at));
    if (arena.rank == 0) {
        *const_cast<int*>(words) = 7;
        asm volatile("fence.RELEASE.sys;" ::: "memory");
        words[32] = 1;
        out[0] = 7;
    } else {
        while (words[32] == 0) {}
        asm volatile("fence.ACQUIRE.sys;" ::: "memory");
        out[0] = *const_cast<int*>(words);
    }
}
"""


@pytest.mark.parametrize(
    ("writer", "reader", "found"), [("release", "acquire", set()), ("acquire", "acquire", {"race"}), ("release", "release", {"race"})]
)
def test_half_a_fence_orders_one_side(writer: str, reader: str, found: set[str]) -> None:
    assert _findings(FENCES.replace("RELEASE", writer).replace("ACQUIRE", reader), 1, 1, [7], ranks=2) == found


EXCHANGE = """
HEAD
extern "C" __global__ void kernel(const __grid_constant__ Arena arena, u64 at, int* out) {
    PREPARE
    int* words = reinterpret_cast<int*>(arena.local(at)) + FIRST;
    words[threadIdx.x] = threadIdx.x;
    MEET
    out[FIRST + threadIdx.x] = words[threadIdx.x ^ FLIP];
}
"""
MEETINGS = {
    "cuda::barrier": (
        "#include <cuda/barrier>",
        "__shared__ cuda::barrier<cuda::thread_scope_block> b; if (threadIdx.x == 0) init(&b, 64); __syncthreads();",
        "b.arrive_and_wait();",
        "(void)b.arrive();",
    ),
    "cuda::barrier with a token": (
        "#include <cuda/barrier>",
        "__shared__ cuda::barrier<cuda::thread_scope_block> b; if (threadIdx.x == 0) init(&b, 64); __syncthreads();",
        "auto token = b.arrive(); b.wait(cuda::std::move(token));",
        "auto token = b.arrive(); (void)token;",
    ),
    "cooperative_groups::grid": ("#include <cooperative_groups.h>", "", "cooperative_groups::this_grid().sync();", "__syncthreads();"),
}


@pytest.mark.parametrize("meeting", [pytest.param(name, marks=() if "grid" in name else pytest.mark.slow) for name in MEETINGS])
def test_barriers_of_headers_order_and_their_lack_is_a_race(meeting: str) -> None:
    head, prepare, right, wrong = MEETINGS[meeting]
    grid = "grid" in meeting
    source = EXCHANGE.replace("HEAD", f"{head}\n#include <peerlane/comm.cuh>\nusing namespace peerlane;").replace("PREPARE", prepare)
    if grid:  # the other block's words
        source = source.replace("words[threadIdx.x ^ FLIP]", "words[int(threadIdx.x) + 32 - 64 * int(blockIdx.x)]")
        source = source.replace("FIRST", "32 * blockIdx.x")
        expected = list(range(32)) * 2
    else:
        source = source.replace("FLIP", "33").replace("FIRST", "0")
        expected = [i ^ 33 for i in range(64)]
    shape = (2, 32) if grid else (1, 64)
    assert _findings(source.replace("MEET", right), *shape, expected) == set()
    assert "race" in _findings(source.replace("MEET", wrong), *shape, expected)


def test_approximate_and_unknown_instructions_are_told() -> None:
    source = 'extern "C" __global__ void told(float* y) { y[0] = __expf(y[1]) + __fdividef(y[2], y[3]) * y[4]; }'
    text = compile_cubin(source).ptx()
    translate(Ptx(text))
    told = fidelity()["told"]
    assert told["approximate"] == {"div.approx.f32": 1, "ex2.approx.f32": 1} and told["exact"] >= 10
    strange = text.replace("ret;", "vset4.s32.s32.eq %r1, %r2, %r3, %r4; istypep.texref %p1, %rd1; ret;")
    with pytest.raises(UnknownPtx, match=r"'vset4.*is not known to the emulator, and neither is istypep\.texref"):
        translate(Ptx(strange))


def test_printf_from_ptx_prints_its_arguments(capfd: pytest.CaptureFixture[str]) -> None:
    source = """extern "C" __global__ void kernel(int* out) {
        printf("%d of %s: %5.2f, %lld%%\\n", 7 + int(threadIdx.x), "nine", 1.5, 1ll << 40);
        out[0] = 1;
    }"""
    scenario = Scenario("printing", Ptx(compile_cubin(source).ptx()), 1)
    scenario.launch("kernel", 1, 1, [scenario.buffer("out", [torch.zeros(1, dtype=torch.int32)])])
    assert not check(scenario, schedules=1).findings
    assert "7 of nine:  1.50, 1099511627776%" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("any_order", "blocks", "found"), [(True, 16, {"order_of_atomics"}), (False, 16, {"wrong_result"}), (True, 1, {"wrong_result"})]
)
def test_what_atomics_of_one_thread_leave_has_one_order(any_order: bool, blocks: int, found: set[str]) -> None:
    source = 'extern "C" __global__ void sum(const float* in, float* out) { atomicAdd(out, in[blockIdx.x]); }'
    ptx = Ptx(compile_cubin(source).ptx())
    numbers = torch.rand(16, generator=torch.Generator().manual_seed(1)) ** 4
    scenario = Scenario("sum", ptx, 1)
    given, out = scenario.buffer("in", [numbers]), scenario.buffer("out", [torch.zeros(1)], expected=[numbers.sum().reshape(1)])
    scenario.launch("sum", blocks, 1, [given, out])
    program = build.compile_program(ptx)
    job = scenario.job(program.globals)
    for region in job.regions:
        region.any_order = any_order
    assert {finding["kind"] for finding in run_job(job, program, schedules=8).findings} == found
