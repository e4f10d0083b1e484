"""Host code of others on emulated ranks: the names of torch and cuda.core, also of those imported at the top of a file."""

# cuda.core has no types here.
# mypy: disable-error-code="attr-defined,no-untyped-call,import-untyped"

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch
from torch._C._distributed_c10d import _SymmetricMemory
from torch.distributed import all_gather_object

import peerlane
from peerlane.device.host.group import current_group
from peerlane.errors import UsageError
from peerlane.testing import RaceFound

SOURCE = """
extern "C" __global__ void add_one(int* x, int n) { if (threadIdx.x < n) x[threadIdx.x] += 1; }
extern "C" __global__ void take(int* x, const int* flag) {
    if (threadIdx.x == 0) while (*(volatile const int*)flag == 0) {}
    __threadfence_system();
    __syncthreads();
    x[threadIdx.x] = flag[1 + threadIdx.x];
}
"""


def _kernel(name: str) -> Any:
    return Program(SOURCE, "c++", ProgramOptions(arch=f"sm_{Device().arch}")).compile("cubin").get_kernel(name)


@peerlane.race(schedules=3)
def test_cuda_devices_and_graphs_run_as_written() -> None:
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    assert torch.cuda.is_available() and torch.cuda.device_count() == 2 and torch.cuda.current_device() == rank
    assert torch.cuda.get_device_properties(rank).multi_processor_count == 2 and torch.cuda.get_device_capability() == (9, 0)
    stream = Device(rank).create_stream()
    x = torch.arange(8, dtype=torch.int32, device=f"cuda:{rank}")
    assert x.is_cuda and x.device == torch.device("cuda", rank) and x.get_device() == rank
    config, add_one = LaunchConfig(grid=1, block=32), _kernel("add_one")
    launch(stream, config, add_one, x.data_ptr(), 8)
    assert x.tolist() == list(range(1, 9)) and x.cuda() is x
    x.record_stream(torch.cuda.current_stream())
    before, graph = x.cpu(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(stream, config, add_one, x.data_ptr(), 8)
        y = x * 2
        y += 1
        z = ~x
        with pytest.raises(UsageError, match="read it after the replay"):
            x.tolist()
    assert torch.equal(x, before)
    for _ in range(2):
        graph.replay()
    assert torch.equal(x.cpu(), before + 2) and torch.equal(y, 2 * x + 1) and torch.equal(z, ~x)
    assert torch.nn.Linear(2, 2, device="cuda").to("cuda").weight.is_cuda
    assert torch.rand(3, generator=torch.Generator(device="cuda").manual_seed(1), device="cuda").shape == (3,)


@peerlane.race(world_size=3, schedules=3)
def test_groups_objects_and_operators_run_as_written() -> None:
    rank, objects = dist.get_rank(), [None] * 3
    all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    group = dist.new_group([0, 2])
    if rank == 1:
        assert group is dist.GroupMember.NON_GROUP_MEMBER
    else:
        assert (group.rank(), group.size(), dist.get_process_group_ranks(group)) == (rank // 2, 2, [0, 2])
        ones = torch.ones(2, device="cuda")
        dist.all_reduce(ones, group=group)
        assert ones.tolist() == [2, 2]
    workspace = symm_mem.get_symm_mem_workspace(dist.group.WORLD.group_name, 256)
    assert symm_mem.get_symm_mem_workspace("0", 128) is workspace
    own = _SymmetricMemory.empty_strided_p2p((4,), (1,), torch.float32, torch.device("cuda", rank), "0").fill_(rank + 1)
    argument = current_group()  # as a group that is an argument
    assert argument.size() == symm_mem.rendezvous(own, argument.group_name).world_size == 3
    assert torch.ops.symm_mem.one_shot_all_reduce(own, "sum", "0").tolist() == [6] * 4 and own.tolist() == [rank + 1] * 4
    assert torch.ops.symm_mem.two_shot_all_reduce_(own, "sum", "0") is own and own.tolist() == [6] * 4


@pytest.mark.parametrize("writer", ["stream_write_value32", "memset32"])
def test_stream_write_value_hands_on_and_a_memset_does_not(writer: str) -> None:
    def exchange() -> None:
        rank, out = dist.get_rank(), torch.zeros(2, dtype=torch.int32, device="cuda")
        handle = symm_mem.rendezvous(symm_mem.empty(3, dtype=torch.int32, device="cuda").zero_(), dist.group.WORLD)
        handle.barrier()
        peer = handle.get_buffer(1 - rank, (3,), torch.int32)
        torch.ops.symm_mem.memset32_(peer, 1, 5, 2)
        getattr(_SymmetricMemory, writer)(peer, 0, 1)
        launch(Device().default_stream, LaunchConfig(grid=1, block=2), _kernel("take"), out.data_ptr(), handle.buffer_ptrs[rank])

    if writer == "stream_write_value32":
        peerlane.race(schedules=5)(exchange)()
        return
    with pytest.raises(RaceFound, match="nothing orders the two"):
        peerlane.race(schedules=5)(exchange)()


REFUSED = {
    "torch.distributed.send is not on emulated ranks: use symmetric memory": lambda: dist.send(torch.zeros(1), 1),
    "torch.compile is not on emulated ranks: use the function as it is": lambda: torch.compile(abs),
    "Event.elapsed_time is not on emulated ranks": lambda: torch.cuda.Event(enable_timing=True).elapsed_time(torch.cuda.Event()),
    "device cuda:5 on rank 0": lambda: torch.empty(2, device="cuda:5"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_other_names_say_what_to_use(message: str) -> None:
    with pytest.raises(UsageError, match=message):
        peerlane.race(world_size=1, schedules=1)(REFUSED[message])()


@peerlane.race(world_size=1, schedules=1)
def test_torch_s_own_modules_are_imported_by_a_rank_as_ever() -> None:
    torch.testing.assert_close(torch.ones(2, device="cuda"), torch.ones(2))  # imports DTensor
