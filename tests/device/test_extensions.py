"""CUDA extensions of candidates on emulated ranks: host code that nvcc compiled, whose launches are the emulator's."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from peerlane import problems
from peerlane.emulator import Scenario, cuda_extensions, cuda_runtime
from peerlane.emulator.build import compile_program
from peerlane.emulator.cuda_extensions import SOURCES, build, start_runtime
from peerlane.emulator.cuda_runtime import Runtime
from peerlane.emulator.host_memory import AddressSpace
from peerlane.emulator.job import run_job
from peerlane.emulator.solution_run import Outcome, run
from peerlane.errors import CompileError
from peerlane.evaluate.correctness.emulated import judge_emulated
from peerlane.problems.contract.spec import Case

FILES = Path(__file__).with_name("extensions")
EXAMPLE = Path(__file__).parents[2] / "examples" / "extension" / "1_allreduce_one_shot_cuda.py"
LIGHT = FILES / "light_cuda.py"


_started: list[Runtime | None] = [None]


@pytest.fixture(autouse=True)
def runtime_of_these_tests() -> Iterator[None]:
    """The runtime serves all of its process once it has started: what C++ may have written counts as written. Other tests do without."""
    cuda_runtime._runtime = _started[0]
    yield
    _started[0], cuda_runtime._runtime = cuda_runtime._runtime, None


def light(*calls: tuple[object, ...], ranks: int = 2) -> Outcome:
    return run(LIGHT, [[(torch.tensor([float(10 * call + rank)]), *what) for rank in range(ranks)] for call, what in enumerate(calls)])


def test_statics_and_device_variables_are_a_ranks_own() -> None:
    outcome = light(("total", True), ("total", True))
    assert outcome.failure is None and not outcome.findings
    assert [[counts for _, counts in call] for call in outcome.outputs] == [[(1, 41), (1, 41)], [(2, 42), (2, 42)]]
    assert [[float(total) for total, _ in call] for call in outcome.outputs] == [[1.0, 1.0], [1.0, 1.0]]


def test_processes_may_fork_and_compute_gradients_afterwards() -> None:
    """As the ranks of a training run are forked: autograd has no threads for the devices of the runtime."""
    assert start_runtime() is not None
    torch.ones(1, requires_grad=True).sum().backward()
    child = os.fork()
    if not child:
        try:
            torch.ones(1, requires_grad=True).sum().backward()
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_without_a_barrier_the_ranks_race() -> None:
    assert ["host code" in str(finding) for finding in light(("total", False)).findings if finding.kind == "race"] == [True]


def test_too_much_shared_memory_is_an_error_of_the_launch() -> None:
    outcome = light(("shared_bytes", 64 << 10))
    assert outcome.outputs == [[("cudaErrorInvalidValue", "cudaSuccess")] * 2]


def test_products_of_cublas_are_those_of_torch() -> None:
    outcome = light(("products",), ranks=1)
    assert outcome.outputs == [[[(0, True)] * 4]] and not outcome.findings


def test_what_a_product_reads_takes_part_in_races() -> None:
    right = light(("product_of_peer", True))
    assert [out.tolist() for out in right.outputs[0]] == [[[1.0, 2.0], [3.0, 4.0]], [[0.0, 1.0], [2.0, 3.0]]] and not right.findings
    race = light(("product_of_peer", False)).findings[0]
    assert race.kind == "race" and "cublasSgemm" in str(race) and "host code" in str(race)


def test_a_graph_of_the_runtime_is_replayed() -> None:
    outcome = light(("replayed",))
    assert [[float(x) for x in pair] for pair in outcome.outputs[0]] == [[6.0, 5.0], [7.0, 6.0]] and not outcome.findings


def test_a_streams_wait_for_a_word_orders_earlier_writes() -> None:
    right = light(("signalled", 1))
    assert right.failure is None and not right.findings and [float(out) for out in right.outputs[0]] == [3.0, 3.0]
    assert "race" in [finding.kind for finding in light(("signalled", 0)).findings]


@pytest.mark.parametrize("what", ["broadcast", "all_to_all_single", "barrier", "symm_mem.barrier"])
def test_what_some_ranks_do_together_orders_these_ranks(what: str) -> None:
    right, twin = (light(("read_behind", what, ranks), ranks=3) for ranks in ([0, 1], [1, 2]))
    assert right.failure is None and not right.findings and [float(out) for out in right.outputs[0]] == [0.0, 1.0, 0.0]
    assert "race" in [finding.kind for finding in twin.findings]


def test_what_a_collective_reads_takes_part_in_races() -> None:
    right, twin = (light(("broadcast_of_peer", barrier)) for barrier in (True, False))
    assert [float(out) for out in right.outputs[0]] == [2.0, 2.0] and not right.findings
    assert ["host code" in str(finding) for finding in twin.findings if finding.kind == "race"] == [True]


def test_a_dependent_launch_knows_the_one_before_once_it_waited() -> None:
    right, twin = (light(("followed", waits), ranks=1) for waits in (1, 0))
    assert [float(out) for out in right.outputs[0]] == [1.0] and not right.findings
    assert "race" in [finding.kind for finding in twin.findings]


def test_blocks_of_a_cluster_reach_each_others_shared_memory() -> None:
    right, early, late = (light(("swapped", broken), ranks=1) for broken in range(3))
    assert right.outputs == [[True]] and not right.findings
    assert "race" in [finding.kind for finding in early.findings]
    assert [finding.kind for finding in late.findings] == ["misuse"]


def test_kernels_tell_their_attributes() -> None:
    assert light(("known",)).outputs == [[(1024, 1, 1024)] * 2]


@pytest.mark.parametrize("numbered", [0, 1])
def test_the_order_of_atomics_is_a_note(numbered: int) -> None:
    outcome = light(("summed", numbered), ranks=1)
    assert outcome.failure is None and not outcome.findings
    assert [note.kind for note in outcome.notes] == ["order_of_atomics"]


def test_a_multicast_address_is_no_memory_of_the_runtime() -> None:
    assert start_runtime() is not None
    space = AddressSpace()
    assert space.at(space.reserve(1200)) is None


def test_a_function_that_is_not_there_is_named() -> None:
    outcome = light(("linked",))
    assert outcome.failure is not None
    assert str(outcome.failure[1]) == "cudaGraphAddDependencies is not known to the emulator; nothing was run"


def test_lines_are_those_of_the_python_file() -> None:
    text = LIGHT.read_text(encoding="utf-8")
    source = SOURCES["load_inline"](str(LIGHT), "light", "", text.split('"""')[3], no_implicit_headers=True)
    number = int(source.text.split()[1])
    assert source.text.startswith(f'#line {number} "light_cuda.py"\n') and text.splitlines()[number].startswith("#include <Python.h>")


def test_options_are_taken_by_place_as_torch_takes_them(tmp_path: Path) -> None:
    inline = SOURCES["load_inline"](
        "x.py", "x", "int f();", "", None, ["f"], ["-DA", "-O1"], ["-lineinfo -DB", ""], [], ["-lz -lcuda", "", "-lcublasLt"], ["/include"]
    )
    assert (inline.flags, inline.include_dirs, inline.libraries) == (("-DA", "-lineinfo", "-DB"), ("/include",), ("-lz",))
    assert "<torch/extension.h>" in inline.text.partition("int f();")[0]
    assert 'm.def("f", torch::wrap_pybind_function(f), "f");' in inline.text
    (tmp_path / "a.cu").write_text("int a;")
    files = SOURCES["load"]("x.py", "x", [str(tmp_path / "a.cu")], None, ["-O2"])
    assert (files.text, files.flags, files.include_dirs) == ('#line 1 "a.cu"\nint a;', ("-O2",), (str(tmp_path),))


@pytest.mark.parametrize(
    ("header", "refusal", "used"),
    [
        ("torch/torch.h", "", ["all"]),
        ("torch/extension.h", 'variable "torch::kUInt8" has already been defined', ["light", "all"]),
        ("torch/extension.h", "expected a ;", ["light"]),
    ],
)
def test_a_source_that_needs_all_of_torch_s_headers_gets_them(
    header: str, refusal: str, used: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def compile_nothing(nvcc: str, source: cuda_extensions.Source, scratch: Path, headers: list[Path]) -> None:
        seen.append("light" if headers else "all")
        if headers:
            raise CompileError(refusal)
        for name in ("device.ptx", "device.cubin", "x.so"):
            (scratch / name).write_text("")

    monkeypatch.setattr(cuda_extensions, "_compile", compile_nothing)
    monkeypatch.setattr(cuda_extensions, "folder", lambda: tmp_path)
    monkeypatch.setattr(cuda_extensions, "_headers_digest", str)
    with contextlib.nullcontext() if used[-1] == "all" else pytest.raises(CompileError):
        build(cuda_extensions.Source("x", f"#include <{header}>"))
    assert seen == used


FRAGMENTS = r"""
#include <cuda_bf16.h>
#include <mma.h>
#include <type_traits>
using namespace nvcuda::wmma;
template <class T, class S, int m, int n, int k, class A, class B>
__device__ void product(const float* in, float* out, layout_t layout) {
    __shared__ __align__(32) T a[512], b[512];
    __shared__ __align__(32) S sums[256];
    for (int i = threadIdx.x; i < m * k; i += 32) a[i] = T(in[i]);
    for (int i = threadIdx.x; i < k * n; i += 32) b[i] = T(in[i + 512]);
    for (int i = threadIdx.x; i < 256; i += 32) sums[i] = S(in[i]);
    __syncwarp();
    constexpr int k_of = k == 8 ? 8 : 16;
    using Held = std::conditional_t<k == 8, precision::tf32, T>;
    fragment<matrix_a, m, n, k_of, Held, A> left;
    fragment<matrix_b, m, n, k_of, Held, B> right;
    fragment<accumulator, m, n, k_of, S> sum;
    load_matrix_sync(left, a, std::is_same_v<A, row_major> ? k : m);
    load_matrix_sync(right, b, std::is_same_v<B, row_major> ? n : k);
    load_matrix_sync(sum, sums, layout == mem_row_major ? n : m, layout);
    for (int i = 0; i < sum.num_elements; ++i) sum.x[i] *= S(2);
    mma_sync(sum, left, right, sum);
    store_matrix_sync(sums, sum, layout == mem_row_major ? n : m, layout);
    __syncwarp();
    for (int i = threadIdx.x; i < 256; i += 32) out[i] = float(sums[i]);
}
extern "C" __global__ void products(const float* in, float* out) {
    product<__half, float, 16, 16, 16, row_major, row_major>(in, out, mem_row_major);
    product<__nv_bfloat16, float, 32, 8, 16, row_major, col_major>(in, out + 256, mem_row_major);
    product<__half, __half, 8, 32, 16, col_major, row_major>(in, out + 512, mem_col_major);
    product<float, float, 16, 16, 8, col_major, col_major>(in, out + 768, mem_col_major);
}
"""


@pytest.mark.slow
def test_fragments_of_matrices_multiply() -> None:
    flags = ["-U__CUDA_NO_HALF_CONVERSIONS__", "-U__CUDA_NO_HALF_OPERATORS__", "-U__CUDA_NO_BFLOAT16_CONVERSIONS__"]
    source = SOURCES["load_inline"](__file__, "fragments", "", FRAGMENTS, extra_cuda_cflags=flags, no_implicit_headers=True)
    ptx = build(source).ptx
    scenario = Scenario("products", ptx, 1)
    numbers = torch.randint(-4, 5, (1024,), generator=torch.Generator().manual_seed(0)).float()
    given = scenario.buffer("in", [numbers])
    expected = []
    for (m, n, k), columns_of_a, columns_of_b, columns_of_sums in (
        ((16, 16, 16), False, False, False),
        ((32, 8, 16), False, True, False),
        ((8, 32, 16), True, False, True),
        ((16, 16, 8), True, True, True),
    ):
        a, b, sums = (
            values.view(columns, rows).t() if by_columns else values.view(rows, columns)
            for values, rows, columns, by_columns in (
                (numbers[: m * k], m, k, columns_of_a),
                (numbers[512 : 512 + k * n], k, n, columns_of_b),
                (numbers[:256], m, n, columns_of_sums),
            )
        )
        product = a @ b + 2 * sums
        expected.append((product.t() if columns_of_sums else product).reshape(-1))
    out = scenario.buffer("out", [torch.zeros(1024)], expected=[torch.cat(expected)])
    scenario.launch("products", 1, 32, [given, out])
    program = compile_program(ptx)
    assert not run_job(scenario.job(program.globals), program, schedules=1).findings


@pytest.mark.slow
def test_torchs_cuda_side_in_cpp_is_served() -> None:
    x, a, b = torch.arange(20.0), torch.randn(3, 4), torch.randn(4, 5)
    outcome = run(FILES / "torch_cpp_cuda.py", [[(x.clone(), a.clone(), b.clone()) for _ in range(2)]])
    assert outcome.failure is None and not outcome.findings
    for doubled, product, replayed, squared, out, largest in outcome.outputs[0]:
        x = torch.arange(1.0, 21.0)
        assert torch.equal(squared, x * x) and torch.equal(out, 2 * (x + 1) + x) and float(largest) == 62
        assert torch.equal(doubled, 2 * x) and torch.allclose(product, 3 * a @ b, atol=1e-5)
        assert torch.allclose(replayed, 6 * a @ b, atol=1e-5)


# A candidate, and the change that makes its twin, which is right at rest and races.
TWINS = {
    EXAMPLE: ("    meet(pads, rank, world);  // nobody writes", "    // nobody writes"),
    FILES / "1_allreduce_two_shot_cuda.py": ("atom.global.release.sys.cas", "atom.global.relaxed.sys.cas"),
    FILES / "1_allreduce_triton_signals.py": ("    signals.wait(pads, 0, rank, world, step)\n", ""),
    FILES / "2_allgather_cuda.py": ("        __threadfence_system();\n        *reinterpret", "        *reinterpret"),
    FILES / "7_reducescatter_ring_cuda.py": ("memory_order_release", "memory_order_relaxed"),
    FILES / "8_alltoall_cuda.py": ("< 2 * call) {}", "< 1) {}"),
    FILES / "13_gemm_allreduce_cuda.py": ("        wait_for_all<<<1, 32, 0, stream>>>(tables, rank, world);\n    }));", "    }));"),
    FILES / "27_alltoall_parts_cuda.py": ("while (load_acquire(taken + threadIdx.x) < call - 1) {}", "{}"),
    FILES / "28_moe_push_cuda.py": ("red.release.sys", "red.relaxed.sys"),
    FILES / "45_reducescatter_rmsnorm_cuda.py": ("{}\n            __threadfence_system();\n", "{}\n"),
    FILES / "79_knn_topk_cuda.py": (
        "        __threadfence_system();\n        *reinterpret",
        "        __threadfence();\n        *reinterpret",
    ),
    FILES / "87_conv2d_halo_cuda.py": ("call % 2 * 2", "0 * 2"),
}


def first_case(file: Path) -> Case:
    return problems.get(int(file.name.partition("_")[0])).cases("small", 2)[0]


@pytest.mark.slow
@pytest.mark.parametrize("file", TWINS, ids=lambda file: file.stem)
def test_a_right_candidate_is_clean(file: Path) -> None:
    case = first_case(file)
    assert str(judge_emulated(file, problems.get(case.problem), case)) == "correct, nothing found"


@pytest.mark.slow
@pytest.mark.parametrize("file", TWINS, ids=lambda file: file.stem)
def test_a_twin_races_with_both_lines(file: Path, tmp_path: Path) -> None:
    text, (found, instead) = file.read_text(encoding="utf-8"), TWINS[file]
    twin = tmp_path / file.name
    twin.write_text(text.replace(found, instead), encoding="utf-8")
    case = first_case(file)
    judged = judge_emulated(twin, problems.get(case.problem), case)
    races = [finding for finding in judged.outcome.findings if finding.kind == "race"]
    assert judged.outcome.failure is None and judged.wrong is None and races, str(judged)
    assert all(file.name in str(side) or "cudaMemcpyAsync" in str(side) for side in races[0].sides), races[0]
