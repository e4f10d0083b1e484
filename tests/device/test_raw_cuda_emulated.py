"""Plain CUDA with host code in Python on emulated ranks: right kernels are right and clean, and faults are found with both source lines."""

import contextlib
from pathlib import Path

import cuda.core as core
import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

import peerlane
from device import raw_cuda_kernels as kernels
from device.test_triton_emulated import slow_but
from peerlane.emulator.findings import Finding
from peerlane.emulator.ranks import EmulatedRanks, RankFailure
from peerlane.emulator.sequence import findings
from peerlane.errors import EmulatedFault
from peerlane.testing import RaceFound

NAMES = ("one_shot", "two_shot", "gather", "push", "ring")
RANKS = {"ring": 3}
"""with two, the ring has one step alone"""


def raced(name: str, broken: int) -> tuple[list[torch.Tensor], list[Finding]]:
    """Returns what the last of two calls gave on each rank, and what was found."""
    given = kernels.inputs(name, RANKS.get(name, 2))
    world = EmulatedRanks(len(given), schedules=8)
    world.load(lambda rank: kernels.solution(name, broken))
    outputs: list[torch.Tensor] = []
    try:
        for _ in range(2):
            outputs = world.call(given, lambda rank, output: output.clone())
    except RankFailure:
        outputs = []
    return outputs, findings(world.reports())


@pytest.mark.parametrize("name", slow_but(NAMES, "one_shot", "push"))
def test_a_right_cuda_kernel_is_right_and_clean(name: str) -> None:
    outputs, found = raced(name, 0)
    assert outputs and not found, "\n".join(map(str, found))
    for output, wanted in zip(outputs, kernels.expected(name, kernels.inputs(name, len(outputs))), strict=True):
        assert torch.equal(output, wanted)


@pytest.mark.parametrize("twin", slow_but([f"{name}-{broken}" for name in NAMES for broken in (1, 2)], "gather-2"))
def test_a_broken_twin_is_told_with_both_lines(twin: str) -> None:
    name, _, broken = twin.partition("-")
    _, found = raced(name, int(broken))
    told = [finding for finding in found if finding.kind in ("race", "lost_update")]
    assert told, [str(finding) for finding in found]
    file = Path(kernels.__file__).name
    assert any(str(finding).count(f"{file}:") >= 2 for finding in told), "\n".join(map(str, told))


HOST = r"""extern "C" __global__ void sum(const float* const* data, const float* x, float* out) {
    out[threadIdx.x] = x[threadIdx.x] + (data ? data[0][threadIdx.x] : 0.0f);
}"""


def launched(data: int, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    program = core.Program(HOST, "c++", core.ProgramOptions(arch="sm_90a")).compile("cubin")
    stream = core.Stream.from_handle(torch.cuda.current_stream().cuda_stream)
    core.launch(stream, core.LaunchConfig(grid=1, block=32), program.get_kernel("sum"), data, x.data_ptr(), out.data_ptr())
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

    with contextlib.nullcontext() if kept else pytest.raises(EmulatedFault, match="of rank 0, which is freed; keep the tensor"):
        uses()


def test_a_failed_assertion_shows_the_races_before_it() -> None:
    @peerlane.race(world_size=2, schedules=2)
    def fails() -> None:
        launched(0, torch.empty(32), torch.empty(32))
        raise AssertionError("this is wrong")

    with pytest.raises(AssertionError, match="this is wrong") as raised:
        fails()
    assert any("uninitialised_read: a tensor" in note for note in raised.value.__notes__), raised.value.__notes__
