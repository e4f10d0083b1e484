"""NCCL's device API without a GPU, its wheel or nvcc: a header of our own has the names that kernels use, and NVRTC reads it."""

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from device.judged import cases
from device.nccl_candidates import EXAMPLES, ON_GPUS, PROMPT, TWINS
from device.runs import equal, run_call, run_calls
from peerlane import problems, settings
from peerlane.device import nccl
from peerlane.device.host import jit, nvidia_wheels
from peerlane.device.nccl import installation, program
from peerlane.device.nccl.host_library import HostLibrary
from peerlane.device.nccl.installation import find_installation, what_is_missing
from peerlane.device.nccl.world import NO_LSA, GpuWorld, requirements, start
from peerlane.device.nvshmem.world import World as NvshmemWorld
from peerlane.emulator.turns import RankMismatch
from peerlane.errors import CompileError, DeviceError, MissingDependency, UsageError
from peerlane.evaluate.audit.device_code import in_ptx
from peerlane.evaluate.candidates import candidate_file, runs_emulated
from peerlane.evaluate.correctness.emulated import judge_emulated
from peerlane.evaluate.requirements import missing_before, missing_on_virtual_node
from peerlane.hardware import doctor
from peerlane.hardware.topology import Topology
from peerlane.problems.scaffolds import scaffold

PAGE = Path(__file__).parents[2] / "docs" / "device" / "nccl.md"
BARE = Topology((), {}, None, "a CPU", 2, 2**34, "none", "no NVIDIA driver")
VERSION = "#define NCCL_MAJOR 2\n#define NCCL_MINOR {}\n#define NCCL_PATCH 1\n"
# Other places of the fields than NCCL's, so that nothing but the header can have told them.
HEADER = """
#pragma once
typedef unsigned uint32_t;
namespace cuda { enum memory_order { memory_order_relaxed, memory_order_acquire, memory_order_release, memory_order_acq_rel }; }
struct ncclLsaBarrierHandle { int nBarriers; uint32_t bufHandle; };
struct ncclWindow_vidmem { uint32_t stride4G; int worldRank, lsaRank; char* lsaFlatBase; };
typedef ncclWindow_vidmem* ncclWindow_t;
struct ncclDevComm {
    int lsaSize, nRanks; uint32_t lsaSize_rcp32, nRanks_rcp32; int lsaRank, rank;
    ncclLsaBarrierHandle lsaBarrier; void* lsaMultimem; ncclWindow_t resourceWindow; ncclWindow_vidmem resourceWindow_inlined;
};
struct ncclDevCommRequirements { size_t size; unsigned magic, lsaBarrierCount; };
#define NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER {sizeof(ncclDevCommRequirements), 0xcafe, 0}
struct ncclCoopCta {};
struct ncclTeamTagLsa {};
__device__ inline char* at_rank(char* first, uint32_t stride, int rank) { return first + (size_t(stride) << 32) * rank; }
__device__ inline void* ncclGetLsaPointer(ncclWindow_t w, size_t at, int rank) { return at_rank(w->lsaFlatBase, w->stride4G, rank) + at; }
__device__ inline void* ncclGetLocalPointer(ncclWindow_t w, size_t at) { return ncclGetLsaPointer(w, at, w->lsaRank); }
// A word counts a barrier's epochs; behind the words of all barriers is one for each barrier and rank, which that rank writes.
template <class Coop> struct ncclLsaBarrierSession {
    const ncclDevComm& comm;
    const unsigned index;
    uint32_t epoch;
    __device__ uint32_t* words(int rank) const {
        return (uint32_t*)at_rank(comm.resourceWindow_inlined.lsaFlatBase, comm.resourceWindow_inlined.stride4G, rank);
    }
    __device__ uint32_t* inbox(int owner, int from) const {
        return words(owner) + 3 * comm.lsaBarrier.nBarriers + index * comm.lsaSize + from;
    }
    __device__ ncclLsaBarrierSession(Coop, const ncclDevComm& comm, ncclTeamTagLsa, unsigned index)
        : comm(comm), index(index), epoch(words(comm.lsaRank)[index]) {}
    __device__ ~ncclLsaBarrierSession() {
        if (threadIdx.x == 0) words(comm.lsaRank)[index] = epoch;
        __syncthreads();
    }
    __device__ void sync(Coop, cuda::memory_order order) {
        const bool orders = order != cuda::memory_order_relaxed;
        ++epoch;
        __syncthreads();
        for (int rank = threadIdx.x; rank < comm.lsaSize; rank += blockDim.x) {
            uint32_t* to = inbox(rank, comm.lsaRank);
            if (orders) asm volatile("st.release.sys.b32 [%0], %1;" ::"l"(to), "r"(epoch) : "memory");
            else asm volatile("st.relaxed.sys.b32 [%0], %1;" ::"l"(to), "r"(epoch) : "memory");
        }
        for (int rank = threadIdx.x; rank < comm.lsaSize; rank += blockDim.x) {
            const uint32_t* from = inbox(comm.lsaRank, rank);
            uint32_t seen;
            do {
                if (orders) asm volatile("ld.acquire.sys.b32 %0, [%1];" : "=r"(seen) : "l"(from) : "memory");
                else asm volatile("ld.relaxed.sys.b32 %0, [%1];" : "=r"(seen) : "l"(from) : "memory");
            } while (seen < epoch);
        }
        __syncthreads();
    }
};
"""


def install(root: Path, minor: int = 28) -> Path:
    """Makes what find_installation looks for."""
    (root / "include").mkdir(parents=True)
    (root / "include" / "nccl.h").write_text(VERSION.format(minor))
    (root / "include" / "nccl_device.h").write_text("#include <nccl_device/all.h>\n")
    (root / "include" / "nccl_device").mkdir()
    (root / "include" / "nccl_device" / "all.h").write_text(HEADER)
    return root


@pytest.fixture(autouse=True, scope="module")
def _installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An installation, NVRTC in place of nvcc, and a cache of this module's own."""

    def by_nvrtc(name: str, text: str, options: list[str], *, instead: str) -> Any:
        return jit.compile_text(name, text, [*options, *(f"--include-path={folder}" for folder in jit.toolkit_dirs())])

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NCCL_HOME", str(install(tmp_path_factory.mktemp("nccl"))))
        patch.setenv("PEERLANE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(program, "compile_by_nvcc", by_nvrtc)
        patch.setattr(installation, "find_nvcc", lambda: "nvcc")
        program.layout.cache_clear()
        yield
    program.layout.cache_clear()


def judged(path: Path, case: str = "") -> Any:
    number = int(path.name.partition("_")[0])
    found = [item for item in cases(problems.get(number), 2) if case in item.key]
    return judge_emulated(path, problems.get(number), found[0], schedules=4)


@pytest.mark.parametrize("world", [GpuWorld, NvshmemWorld])
def test_candidates_may_keep_their_memory_by_the_world(world: Any) -> None:
    a, b = (world.__new__(world) for _ in range(2))
    assert {a: 1}.get(b) is None


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_right_and_clean(path: Path) -> None:
    found = judged(path)
    assert found.outcome.failure is None, found.outcome.failure
    assert found.correct and not found.outcome.findings, str(found)
    text = path.read_text()
    assert candidate_file(path).is_cuda and candidate_file(path).compiles and runs_emulated(text)


@pytest.mark.parametrize(
    "twin", [pytest.param(twin, marks=[] if twin.name[:2] == "8_" else [pytest.mark.slow]) for twin in TWINS], ids=lambda twin: twin.name
)
def test_a_broken_twin_is_told_with_both_lines(twin: Any, tmp_path: Path) -> None:
    path = tmp_path / f"{twin.name}.py"
    path.write_text(twin.source())
    told = [finding for finding in judged(path).outcome.findings if finding.kind == "race"]
    assert told and any(str(finding).count(path.name) + str(finding).count("host code") >= 2 for finding in told)
    assert twin.verdicts[0] in ON_GPUS


@pytest.mark.slow
def test_programs_of_scaffold_page_and_prompt_are_right(tmp_path: Path) -> None:
    path = tmp_path / "36_new.py"
    path.write_text(scaffold(problems.get(36), "nccl"))
    assert judged(path).correct
    page = tmp_path / "page.py"
    page.write_text((PAGE.read_text().partition("```python\n")[2]).partition("```")[0])
    pushed = run_calls(
        lambda rank: runpy.run_path(str(page))["solution"], [[(torch.full((40,), float(rank)),) for rank in range(2)]], schedules=4
    )
    assert [float(out[3]) for out in pushed.clean()[0]] == [1, 0]
    given = [torch.randn(50).to(torch.bfloat16) for _ in range(3)]
    outputs = run_call(runpy.run_path(str(PROMPT))["solution"], [(x,) for x in given], schedules=4)
    assert equal(outputs, [(given[rank].float() - given[rank - 1].float()).to(torch.bfloat16) for rank in range(3)])


def test_the_header_says_where_fields_are() -> None:
    places = program.layout()
    assert places.offsets["ncclDevComm.lsaRank"] == 16 and places.offsets["ncclWindow_vidmem.lsaFlatBase"] == 16
    made = requirements(places, 7)
    assert (made[:8], made[8:12], made[12:]) == ((16).to_bytes(8, "little"), bytes.fromhex("feca0000"), (7).to_bytes(4, "little"))


def test_kernels_that_use_the_headers_are_said_to() -> None:
    source = """extern "C" __global__ void talks(ncclWindow_t w, int* x) { *x = *(int*)ncclGetLocalPointer(w, 0); }
    extern "C" __global__ void local(int* x) { *x = 1; }"""
    assert {name: "nccl_device" in words for name, words in in_ptx(nccl.compile(source).ptx()).items()} == {"talks": True, "local": False}
    with pytest.raises(CompileError, match=r"error: identifier \"missing\""):
        nccl.compile('extern "C" __global__ void k(int* x) { *x = missing; }')


def test_windows_are_zero_and_have_the_same_places() -> None:
    def solution() -> tuple[torch.Tensor, int]:
        windows = [nccl.world().window(3, 5, dtype=torch.int32) for _ in range(2)]
        assert nccl.world() is nccl.world() and windows[0].handle != windows[1].handle
        kept = windows[1].tensor.clone()
        before = nccl.world()
        before.close()
        assert nccl.world() is not before
        return kept, nccl.world().rank

    for rank, (tensor, said) in enumerate(run_call(solution, [(), ()], schedules=4)):
        assert tensor.shape == (3, 5) and not tensor.any() and said == rank


def test_a_window_of_other_size_on_a_rank_is_told() -> None:
    with pytest.raises(RankMismatch, match="all must make the same calls"):
        run_call(lambda numel: nccl.world().window(numel).tensor, [(4,), (5,)])


def test_candidates_are_not_run_without_headers_or_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = PROMPT.read_text()
    assert missing_before(source) is None
    monkeypatch.setattr(installation, "find_nvcc", lambda: None)
    assert "nvcc" in str(missing_before(source))
    monkeypatch.setenv("NCCL_HOME", str(install(tmp_path / "old", 27)))
    assert find_installation() is None and "NCCL 2.28 or newer" in str(missing_before(source))
    assert f"not in {tmp_path / 'old'}" in str(what_is_missing())
    with pytest.raises(MissingDependency, match=r"pip install 'peerlane\[nccl\]'"):
        nccl.compile("")


@pytest.mark.parametrize(
    "source",
    [
        "from peerlane.device import nccl",
        "SOURCE = 'ncclCommWindowRegister(comm, p, n, &w, 1);'",
        "library.ncclCommWindowRegister(comm)",
        "symm_mem.set_backend('NCCL')",
        "backend.register_mem_pool(pool, symm=True)",
    ],
)
def test_windows_are_refused_where_nccl_would_use_multicast(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PEERLANE_MULTICAST", "TORCH_SYMM_MEM_DISABLE_MULTICAST"):
        monkeypatch.delenv(name, raising=False)
    assert "PEERLANE_MULTICAST=forbid" in str(missing_before(source, nvls=True)) and missing_before(source, nvls=False) is None
    assert missing_before("# ncclCommWindowRegister\nsymm_mem.set_backend('NVSHMEM')", nvls=True) is None
    monkeypatch.setenv("PEERLANE_MULTICAST", "allow")
    assert missing_before(source, nvls=True) is None


def test_a_world_needs_a_process_group_and_no_multicast(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="init_process_group"):
        nccl.world()
    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
    monkeypatch.setenv("PEERLANE_MULTICAST", "forbid")
    with pytest.raises(UsageError, match="set it before"):
        start(None)
    assert settings.windows_refused(nvls=False) is None


def test_nvcc_makes_ptx_and_then_machine_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that stands for nvcc writes down how it was called."""
    calls, nvcc = tmp_path / "calls", tmp_path / "nvcc"
    nvcc.write_text(
        f'#!/bin/sh\necho "$@" >> {calls}\ngrep -q refused "$3" && {{ echo "error: refused"; exit 1; }}\neval echo made \\> \\${{$#}}\n'
    )
    nvcc.chmod(0o755)
    monkeypatch.setattr(nvidia_wheels, "find_nvcc", lambda: str(nvcc))
    options = ["--gpu-architecture=sm_90a", "--device-as-default-execution-space"]
    made = nvidia_wheels.compile_by_nvcc("mine.cu", "text", options, instead="")
    assert (made.cubin, made.ptx) == (b"made\n", b"made\n")
    first, second = calls.read_text().splitlines()
    assert first.startswith("--gpu-architecture=sm_90a -ptx /") and second.startswith("--gpu-architecture=sm_90a -cubin /")
    with pytest.raises(CompileError, match=r"mine\.cu does not compile for a GPU:\nerror: refused"):
        nvidia_wheels.compile_by_nvcc("mine.cu", "refused", options, instead="")
    monkeypatch.setattr(nvidia_wheels, "find_nvcc", lambda: None)
    with pytest.raises(MissingDependency, match=r"to compile mine\.cu; install the toolkit"):
        nvidia_wheels.compile_by_nvcc("mine.cu", "text", options, instead="install the toolkit")


def test_errors_of_the_library_are_said() -> None:
    class Refuses:
        def __getattr__(self, name: str) -> Any:
            return {"ncclGetErrorString": lambda status: b"invalid usage", "ncclGetLastError": lambda comm: b"no cuMem"}.get(
                name, lambda *_: 5
            )

    library = HostLibrary.__new__(HostLibrary)
    library._library = Refuses()  # type: ignore[assignment]
    with pytest.raises(DeviceError, match=r"ncclCommWindowRegister failed: invalid usage: no cuMem; NCCL_DEBUG=INFO"):
        library.register(1, 2, 3)
    assert "a GPU for every rank" in str(missing_on_virtual_node(f"DeviceError: {NO_LSA}: they reach 1 of 2 ranks"))


def test_doctor_says_when_gin_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "software_versions", lambda: {"nccl": "2.28.9"})
    row = doctor.check_nccl_device_api(BARE)
    assert "GIN) given an RDMA NIC" in row.detail and "sockets" not in row.detail
    monkeypatch.setattr(installation, "find_nvcc", lambda: None)
    row = doctor.check_nccl_device_api(BARE)
    assert row.status == "absent" and "nvcc" in row.detail and row.remedy
