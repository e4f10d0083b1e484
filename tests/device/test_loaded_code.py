"""Mechanisms by instruction, in the PTX that NVRTC and Triton really make, and in the machine code made from it. No GPU is needed."""

import gc
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from peerlane.device import compile_cubin
from peerlane.device.collectives import plans
from peerlane.device.collectives.plans import Machine
from peerlane.device.collectives.workspace import RINGS
from peerlane.device.host import launch, tune
from peerlane.evaluate.audit.device_code import in_ptx
from peerlane.evaluate.audit.loaded_code import disassembled, loaded_code, mapped_libraries

KERNELS = r"""
#define KERNEL extern "C" __global__ void
#define SHARED __shared__ alignas(128) char shared[1024]; unsigned address = __cvta_generic_to_shared(shared)

KERNEL reduces_by_multicast(float* x) {
    float a, b, c, d;
    asm volatile("multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(a), "=f"(b), "=f"(c), "=f"(d) : "l"(x));
    x[0] = a + b + c + d;
}
KERNEL stores_by_multicast(float* x) { asm volatile("multimem.st.relaxed.sys.global.f32 [%0], %1;" ::"l"(x), "f"(1.0f) : "memory"); }
KERNEL stores_in_bulk(char* x) {
    SHARED;
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 1024;\n"
                 "cp.async.bulk.commit_group;\n"
                 "cp.async.bulk.wait_group 0;" ::"l"(x), "r"(address) : "memory");
}
KERNEL reduces_in_bulk(float* x) {
    SHARED;
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], 1024;" ::"l"(x), "r"(address) : "memory");
}
KERNEL prefetches_in_bulk(char* x) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], 1024;\n"
                 "cp.async.bulk.commit_group;\n"
                 "cp.async.bulk.wait_group 0;" ::"l"(x));
}
KERNEL signals(unsigned* x) { asm volatile("st.release.sys.global.u32 [%0], 1;" ::"l"(x) : "memory"); }
KERNEL polls(volatile unsigned* x) { while (*x == 0); }
KERNEL fences(unsigned* x) { x[0] = 1; __threadfence_system(); x[1] = 2; }
KERNEL counts_across_the_system(unsigned* x) { atomicAdd_system(x, 1u); }
// st.relaxed.sys.global is only a comment here
KERNEL stays_on_its_gpu(unsigned* x) {
    __shared__ volatile unsigned staged;
    staged = x[1];
    __syncthreads();
    x[0] = staged;
    __threadfence();
    atomicAdd(x, 1u);
}
template <class T> __global__ void is_a_template(T* x) { __threadfence_system(); *x = 1; }
template __global__ void is_a_template<float>(float*);
"""
MECHANISMS = {
    "reduces_by_multicast": {"nvls"},
    "stores_by_multicast": {"nvls"},
    "stores_in_bulk": {"tma"},
    "reduces_in_bulk": {"tma"},
    "prefetches_in_bulk": set(),
    "signals": {"sm_load_store"},
    "polls": {"sm_load_store"},
    "fences": {"sm_load_store"},
    "counts_across_the_system": {"sm_load_store"},
    "stays_on_its_gpu": set(),
    "_Z13is_a_templateIfEvPT_": {"sm_load_store"},
}
CALLS_A_FUNCTION = r"""
__device__ __noinline__ void remote(unsigned* x) { asm volatile("st.relaxed.sys.global.u32 [%0], 1;" ::"l"(x) : "memory"); }
extern "C" __global__ void calls(unsigned* x) { remote(x); }
"""


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PEERLANE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


def test_ptx() -> None:
    found = in_ptx(compile_cubin(KERNELS).ptx())
    assert {name: set(words) for name, words in found.items()} == MECHANISMS


def test_machine_code() -> None:
    """A multicast store looks like an ordinary one there."""
    found = disassembled(compile_cubin(KERNELS).path)
    assert {name: set(words) for name, words in found.items()} == MECHANISMS | {"stores_by_multicast": {"sm_load_store"}}


def test_a_function_that_is_not_inlined_counts_for_the_kernels_of_its_module() -> None:
    assert in_ptx(compile_cubin(CALLS_A_FUNCTION).ptx()) == {"calls": {"sm_load_store"}}


def example(name: str) -> Mapping[str, set[str]]:
    path = Path(__file__).parents[2] / "examples" / "cuda" / name
    source = runpy.run_path(str(path))["SOURCE"]
    cubin = compile_cubin(source, defines={"ELEMENT": "peerlane::BFloat16", "WORLD_SIZE": 4, **RINGS.defines()})
    return {kernel: set(words) for kernel, words in in_ptx(cubin.ptx()).items()}


def test_example() -> None:
    """It has every kernel that a size may ask for. They store into the peers' memory; the one for large tensors also by bulk copies."""
    kernels = example("1_allreduce_cuda.py")
    assert kernels == {
        "all_reduce_one_shot": {"sm_load_store"},
        "all_reduce_two_shot": {"sm_load_store"},
        "all_reduce_two_shot_rounds": {"sm_load_store"},
        "all_reduce_relay": {"sm_load_store", "tma"},
    }
    sizes = [1 << power for power in range(31)]
    machines = [Machine(world_size, 132) for world_size in range(2, 9)]
    assert {plans.all_reduce(size, machine, staged=False).kernel for machine in machines for size in sizes} == kernels.keys()


def test_what_a_process_has_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    def adds_across_the_system(x, y):  # type: ignore[no-untyped-def]
        tl.atomic_add(x, tl.load(y), sem="release", scope="sys")

    source = ASTSource(triton.runtime.JITFunction(adds_across_the_system), signature={"x": "*fp32", "y": "*fp32"}, constexprs={})
    alive = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    gc.freeze()
    try:
        tune.choose(Mock(), "gemm_of_this_test", (64,), ["one tiling"], Mock())
        monkeypatch.setattr(launch, "_modules", {(str(compile_cubin(KERNELS).path), 0): object(), ("gone.cubin", 0): object()})
        report = loaded_code(mapped_libraries(), libraries=True)
    finally:
        gc.unfreeze()
    found = {(item.origin, item.name): item.mechanisms for item in report.kernels}
    assert alive is not None and found["triton", "adds_across_the_system"] == ["sm_load_store"]
    assert found["peerlane.device", "signals"] == ["sm_load_store"]
    assert found["peerlane.device", "void is_a_template<float>(float*)"] == ["sm_load_store"]
    assert len(report.unknown) == 1 and report.unknown[0].startswith("gone.cubin")
    assert "gemm_of_this_test (64,): one tiling, model" in report.choices


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    (tmp_path / "no.so").write_bytes(b"\x7fELF .nv_fatbin")
    with pytest.raises(OSError, match="cuobjdump"):
        disassembled(tmp_path / "no.so")
