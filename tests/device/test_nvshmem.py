"""NVSHMEM without a GPU and without its wheel: a made folder stands for the installation, and headers with the names that kernels call."""

import ctypes
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from device.nvshmem_candidates import EXAMPLES, PROMPT, TWINS
from peerlane import problems
from peerlane.device import nvshmem
from peerlane.device.nvshmem import host_library, program
from peerlane.device.nvshmem.installation import find_installation, what_is_missing
from peerlane.device.nvshmem.world import NEEDS_MPS, NO_TRANSPORT, Seat, environment
from peerlane.errors import CompileError, MissingDependency, UsageError
from peerlane.evaluate.audit.activity import activity, kernel_kind
from peerlane.evaluate.audit.device_code import in_ptx
from peerlane.evaluate.audit.library import team_collectives
from peerlane.evaluate.candidates import candidate_file, candidate_text, runs_emulated
from peerlane.evaluate.requirements import missing_before, missing_on_virtual_node
from peerlane.hardware.doctor import check_nvshmem
from peerlane.problems.scaffolds import scaffold

HEADER = """
#pragma once
static_assert(cuda::std::is_same_v<uint64_t, unsigned long>, "the library's functions take the uint64_t of Linux");
enum { NVSHMEM_SIGNAL_SET, NVSHMEM_SIGNAL_ADD, NVSHMEM_CMP_GE };
struct nvshmemi_state_t { int pe, pes; uint64_t heap; };
__device__ nvshmemi_state_t nvshmemi_device_state_d;
__device__ inline int nvshmem_my_pe() { return nvshmemi_device_state_d.pe; }
__device__ inline int nvshmem_n_pes() { return nvshmemi_device_state_d.pes; }
__device__ inline uint64_t nvshmem_signal_fetch(uint64_t* signal) { return *(volatile uint64_t*)signal; }
__device__ inline void nvshmem_signal_wait_until(uint64_t* signal, int, uint64_t value) { while (*(volatile uint64_t*)signal < value); }
__device__ __noinline__ void nvshmemi_quiet() { __threadfence_system(); }
__device__ inline void nvshmem_quiet() { nvshmemi_quiet(); }
__device__ inline void nvshmemx_signal_op(uint64_t* signal, uint64_t value, int, int pe) {
    signal[nvshmemi_device_state_d.heap * pe] = value;
}
__device__ inline void nvshmemx_putmem_nbi_block(void* to, const void* from, size_t bytes, int pe) {
    for (size_t i = threadIdx.x; i < bytes; i += blockDim.x) ((char*)to)[i + nvshmemi_device_state_d.heap * pe] = ((const char*)from)[i];
}
__device__ inline void nvshmemx_putmem_signal_nbi_block(
    void* to, const void* from, size_t bytes, uint64_t* signal, uint64_t value, int how, int pe) {
    nvshmemx_putmem_nbi_block(to, from, bytes, pe);
    nvshmemx_signal_op(signal, value, how, pe);
}
"""
VERSION = "#define NVSHMEM_VENDOR_MAJOR_VERSION {}\n#define NVSHMEM_VENDOR_MINOR_VERSION {}\n#define NVSHMEM_VENDOR_PATCH_VERSION 2\n"


class UnchangedLinker:
    """Stands for nvJitLink: the linked code is the code that was added."""

    class InputType:
        CUBIN, LIBRARY = "cubin", "library"

    class nvJitLinkError(Exception):
        pass

    def __init__(self) -> None:
        self.inputs: list[tuple[str, str]] = []
        self.code = b""

    def create(self, count: int, options: list[str]) -> int:
        self.options = options
        return 7

    def add_data(self, handle: int, kind: str, data: bytes, size: int, name: str) -> None:
        self.inputs.append((kind, name))
        self.code = data[:size]

    def add_file(self, handle: int, kind: str, path: str) -> None:
        self.inputs.append((kind, Path(path).name))

    def complete(self, handle: int) -> None: ...
    def destroy(self, handle: int) -> None: ...

    def get_linked_cubin_size(self, handle: int) -> int:
        return len(self.code)

    def get_linked_cubin(self, handle: int, into: bytearray) -> None:
        into[:] = self.code


def install(root: Path, version: tuple[int, int] = (3, 8)) -> Path:
    """Makes what find_installation looks for."""
    for folder in ("include/non_abi", "lib"):
        (root / folder).mkdir(parents=True)
    (root / "include" / "non_abi" / "nvshmem_version.h").write_text(VERSION.format(*version))
    (root / "include" / "nvshmem.h").write_text(HEADER)
    (root / "include" / "nvshmemx.h").write_text("")
    for name in ("libnvshmem_device.a", "libnvshmem_host.so.3"):
        (root / "lib" / name).write_bytes(b"")
    return root


@pytest.fixture(scope="module")
def linker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UnchangedLinker]:
    """An installation, a linker, and a cache of this module's own."""
    made = UnchangedLinker()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NVSHMEM_HOME", str(install(tmp_path_factory.mktemp("nvshmem"))))
        patch.setenv("PEERLANE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(program, "nvjitlink", lambda: made)
        yield made


@pytest.mark.parametrize("path", [*sorted(EXAMPLES.glob("*.py")), PROMPT], ids=lambda path: path.stem)
def test_an_example_compiles_at_import(path: Path, linker: UnchangedLinker) -> None:
    module = runpy.run_path(str(path))
    cubin = module["PROGRAM"] if "PROGRAM" in module else next(iter(module["PROGRAMS"].values()))
    (found,) = in_ptx(cubin.ptx()).values()
    assert cubin.arch == "sm_90a" and "nvshmem" in found and linker.options == ["-arch=sm_90a"]
    assert linker.inputs[-1] == ("library", "libnvshmem_device.a")
    candidate = candidate_file(path)
    assert candidate.is_cuda and candidate.compiles and not runs_emulated(path.read_text())


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.name)
def test_a_broken_twin_differs_by_one_line_and_compiles(twin: Any, linker: UnchangedLinker, tmp_path: Path) -> None:
    path = tmp_path / "twin.py"
    path.write_text(twin.source())
    assert runpy.run_path(str(path))["PROGRAM"].path.exists()


def test_a_new_candidate_compiles(linker: UnchangedLinker, tmp_path: Path) -> None:
    path = tmp_path / "new.py"
    path.write_text(scaffold(problems.get(36), "nvshmem"))
    assert runpy.run_path(str(path))["PROGRAM"].path.exists()


def test_an_error_names_the_line_of_the_source(linker: UnchangedLinker) -> None:
    with pytest.raises(CompileError, match=r'source.cu\(2\): error: identifier "missing"'):
        nvshmem.compile('extern "C" __global__ void k(int* x) {\n  *x = missing; }')


def test_only_kernels_that_call_the_library_are_said_to(linker: UnchangedLinker) -> None:
    """The functions that NVSHMEM's headers bring into every module are no evidence."""
    cubin = nvshmem.compile(
        'extern "C" __global__ void calls(int* x) { nvshmem_quiet(); *x = 1; }\nextern "C" __global__ void local(int* x) { *x = 1; }\n'
        "struct ncclDevComm { int rank; };\n__global__ void talks(ncclDevComm with, int* x) { *x = with.rank; }"
    )
    found = {name: set(words) for name, words in in_ptx(cubin.ptx()).items()}
    assert found == {"calls": {"nvshmem"}, "local": set(), "_Z5talks11ncclDevCommPi": {"nccl_device"}}


def test_an_installation_is_whole_and_new_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVSHMEM_HOME", str(install(tmp_path / "new")))
    assert str(find_installation()) == "3.8.2" and what_is_missing() is None
    monkeypatch.setenv("NVSHMEM_HOME", str(install(tmp_path / "old", (3, 3))))
    assert find_installation() is None
    monkeypatch.setenv("NVSHMEM_HOME", str(tmp_path / "new"))
    (tmp_path / "new" / "lib" / "libnvshmem_host.so.3").unlink()
    assert find_installation() is None


def test_nvidia_s_python_package_is_asked_for_by_name(linker: UnchangedLinker, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import nvshmem.core\ndef solution(x): ..."
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "nvshmem4py" in str(missing_before(source)) and candidate_text(source, 1).is_cuda
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert missing_before(source) is None


def test_candidates_are_not_run_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVSHMEM_HOME", str(tmp_path))
    said = missing_before((EXAMPLES / "2_allgather_nvshmem.py").read_text())
    assert said is not None and f"not in {tmp_path}" in said and "pip install 'peerlane[nvshmem]'" in said
    assert (
        missing_before("from peerlane.device import group_of, nvshmem") and missing_before("from peerlane.device import group_of") is None
    )
    row = check_nvshmem()
    assert row.status == "absent" and row.remedy == "pip install 'peerlane[nvshmem]'" and str(tmp_path) in row.detail
    with pytest.raises(MissingDependency, match=r"NVSHMEM 3\.4 or newer"):
        nvshmem.compile("")


def test_all_pes_get_the_same_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVSHMEM_DISABLE_NVLS", "0")
    alone = environment([Seat("a", "0", True), Seat("a", "1", True)])
    assert alone["NVSHMEM_REMOTE_TRANSPORT"] == "none" and alone["NVSHMEM_DISABLE_NVLS"] == "1" and "NVSHMEM_DISABLE_CUDA_VMM" not in alone
    shared = environment([Seat("a", "0", True), Seat("a", "0", False)])
    assert shared["NVSHMEM_IGNORE_CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "1" and shared["NVSHMEM_DISABLE_CUDA_VMM"] == "1"
    hosts = environment([Seat("a", "0", True), Seat("b", "0", True)])
    assert hosts == {"NVSHMEM_DISABLE_NCCL": "1", "NVSHMEM_DISABLE_NVLS": "1"}
    monkeypatch.setenv("NVSHMEM_REMOTE_TRANSPORT", "ibrc")
    assert environment([Seat("a", "0", True)])["NVSHMEM_REMOTE_TRANSPORT"] == "ibrc"


def test_nodes_of_a_virtual_cluster_are_refused() -> None:
    with pytest.raises(UsageError, match=NO_TRANSPORT) as refused:
        environment([Seat("a/0", "0", True, True), Seat("a/1", "0", True, True)])
    assert "network" in str(missing_on_virtual_node(str(refused.value)))
    assert environment([Seat("a/0", "0", True, True)])["NVSHMEM_REMOTE_TRANSPORT"] == "none"


def test_structures_have_the_library_s_sizes() -> None:
    attributes = host_library.start_attributes()
    sizes = [ctypes.sizeof(item) for item in (attributes, attributes.arguments, attributes.arguments.unique_id)]
    assert sizes == [144, 128, 24]
    assert [item.version - (1 << 16) for item in (attributes, attributes.arguments, attributes.arguments.unique_id)] == sizes


def test_a_world_needs_a_process_group() -> None:
    with pytest.raises(UsageError, match="init_process_group"):
        nvshmem.world()


def test_ranks_that_share_a_gpu_need_mps() -> None:
    assert "MPS" in str(missing_on_virtual_node(f"DeviceError: {NEEDS_MPS}, and it found none"))


@pytest.mark.parametrize(
    ("source", "called"),
    [
        ("nvshmemx_float_sum_reduce_block(team, a, b, 4);", ["nvshmemx_float_sum_reduce_block"]),
        (
            "nvshmem_fcollectmem(team, a, b, 4); nvshmemx_alltoallmem_warp (team, a, b, 4);",
            ["nvshmem_fcollectmem", "nvshmemx_alltoallmem_warp"],
        ),
        ("nvshmem_float_broadcast(team, a, b, 4, 0);", ["nvshmem_float_broadcast"]),
        ("nvshmemx_putmem_signal_nbi_block(a, b, 4, s, 1, 0, 1); nvshmemx_barrier_all_block(); nvshmem_sync_all();", []),
        ("// nvshmem_float_broadcast(team, a, b, 4, 0);", []),
    ],
)
def test_collectives_of_teams_are_a_library(source: str, called: list[str]) -> None:
    assert team_collectives(f"SOURCE = r'''{source}'''") == called
    assert team_collectives(f"'''Not by {source}'''") == [] and team_collectives(f"# {source}") == []


def test_kernels_of_the_host_s_collectives_are_a_library() -> None:
    reduce = "void rdxn_on_stream_kernel<float, (rdxn_ops)5>(int, float*, float const*, unsigned long, int)"
    names = {reduce: 1, "barrier_on_stream_kernel(int, int)": 1, "push_on_stream_kernel(float*)": 1}
    assert [kernel_kind(name) for name in names] == ["library", "library", "own"]
    assert activity({}, names).forbidden() == (reduce,)
