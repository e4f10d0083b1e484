"""Host code of plain CUDA on emulated ranks: memory that nobody has written, or whose handle is gone, and assertions beside races."""

import contextlib

import cuda.core as core
import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

import peerlane
from peerlane.errors import EmulatedFault, LaunchError
from peerlane.testing import RaceFound

HOST = r"""template <class T> __global__ void sum(const T* const* data, const T* x, T* out) {
    out[threadIdx.x] = x[threadIdx.x] + (data ? data[0][threadIdx.x] : 0.0f);
}"""


def launched(data: int, x: torch.Tensor, out: torch.Tensor, shared_bytes: int = 0) -> torch.Tensor:
    major, minor = core.Device().compute_capability
    program = core.Program(HOST, "c++", core.ProgramOptions(arch=f"sm_{major}{minor}a")).compile("cubin", name_expressions=("sum<float>",))
    stream = core.Stream.from_handle(torch.cuda.current_stream().cuda_stream)
    config = core.LaunchConfig(grid=1, block=32, shmem_size=shared_bytes)
    core.launch(stream, config, program.get_kernel("sum<float>"), data, x.data_ptr(), out.data_ptr())
    return out


@pytest.mark.parametrize("written", [False, True])
def test_a_read_of_what_torch_empty_holds_is_told(written: bool) -> None:
    @peerlane.race(world_size=2, schedules=2)
    def reads() -> None:
        x = torch.empty(32)
        if written:
            x.zero_()
        launched(0, x, torch.empty_like(x))

    with contextlib.nullcontext() if written else pytest.raises(RaceFound, match="uninitialised_read: a tensor"):
        reads()


def test_more_shared_memory_than_a_gpu_allows_is_refused() -> None:
    @peerlane.race(world_size=2, schedules=1)
    def launches() -> None:
        x = torch.ones(32)
        launched(0, x, torch.empty_like(x), shared_bytes=48 << 10)
        with pytest.raises(LaunchError, match="49168 bytes of dynamic shared memory; expected at most 49152"):
            launched(0, x, torch.empty_like(x), shared_bytes=(48 << 10) + 16)

    launches()


@pytest.mark.parametrize("kept", [False, True])
def test_memory_whose_handle_is_gone_is_not_used(kept: bool) -> None:
    @peerlane.race(world_size=2, schedules=2)
    def uses() -> None:
        memory = symm_mem.empty(32).zero_()
        handle = symm_mem.rendezvous(memory, dist.group.WORLD)
        pointers = torch.tensor(handle.buffer_ptrs)
        handle.barrier()
        if not kept:
            del memory, handle
        launched(pointers.data_ptr(), torch.ones(32), torch.empty(32))

    told = r"in void sum<float>\(.*of rank 0, which is freed; keep the tensor"
    with contextlib.nullcontext() if kept else pytest.raises(EmulatedFault, match=told):
        uses()


def test_a_failed_assertion_shows_the_races_before_it() -> None:
    @peerlane.race(world_size=2, schedules=2)
    def fails() -> None:
        launched(0, torch.empty(32), torch.empty(32))
        raise AssertionError("this is wrong")

    with pytest.raises(AssertionError, match="this is wrong") as raised:
        fails()
    assert any("uninitialised_read: a tensor" in note for note in raised.value.__notes__), raised.value.__notes__
