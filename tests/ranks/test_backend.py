"""torch.distributed on the backend ``peerlane``: on gloo alone, and with a stand-in for the kit that serves CPU tensors."""

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric_memory
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _coalescing_manager

from peerlane.device import backend
from peerlane.device.backend import symmetric
from peerlane.errors import UsageError
from ranks.pool import RankPool
from ranks.stand_in_kit import StandInProvider, provided, ranks_with_the_kit

# PyTorch 2.13 says that all_gather_into_tensor and reduce_scatter_tensor have newer names; programs use these.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

GLOO_RANKS, KIT_RANKS = 3, 4
c10d: Any = distributed_c10d
premul_sum: Any = dist.__dict__["_make_nccl_premul_sum"]


@pytest.fixture(scope="module")
def gloo_ranks() -> Iterator[RankPool]:
    with RankPool(GLOO_RANKS, "peerlane") as pool:
        yield pool


@pytest.fixture(scope="module")
def kit_ranks() -> Iterator[RankPool]:
    with ranks_with_the_kit(KIT_RANKS) as pool:
        yield pool


def numbers(rank: int, count: int = 6, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(count) + 10 * rank).to(dtype)


def total(world: int, count: int = 6) -> torch.Tensor:
    return torch.stack([numbers(rank, count) for rank in range(world)]).sum(0)


def check(operation: str, got: Any, want: Any) -> None:
    """That they are equal; lists of tensors one by one."""
    for one, other in zip([got] if isinstance(got, torch.Tensor) else got, [want] if isinstance(want, torch.Tensor) else want, strict=True):
        assert torch.equal(one, other.to(one.dtype)), f"{operation}: got {one}, expected {other}"


def every_operation(rank: int, world: int) -> None:
    """Each operation of torch.distributed once, on tensors that tell ranks and places apart."""
    mine, everybody = numbers(rank), [numbers(other) for other in range(world)]
    root = world - 1

    tensor = mine.clone()
    dist.all_reduce(tensor)
    check("all_reduce", tensor, total(world))
    tensor = mine.clone()
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    check("all_reduce max", tensor, everybody[-1])
    tensor = torch.arange(24.0).view(1, 2, 3, 4).add(rank).to(memory_format=torch.channels_last)
    dist.all_reduce(tensor)
    check("all_reduce channels_last", tensor, sum(torch.arange(24.0).view(1, 2, 3, 4) + other for other in range(world)))

    tensor = mine.clone()
    dist.reduce(tensor, root)
    if rank == root:
        check("reduce", tensor, total(world))
    tensor = mine.clone() if rank == root else torch.empty(6)
    dist.broadcast(tensor, root)
    check("broadcast", tensor, everybody[root])

    wide = torch.empty(6 * world)
    dist.all_gather_into_tensor(wide, mine)
    check("all_gather_into_tensor", wide, torch.cat(everybody))
    parts = [torch.empty(6) for _ in range(world)]
    dist.all_gather(parts, mine)
    check("all_gather", parts, everybody)
    parts = list(torch.empty(world, 6).unbind())
    dist.all_gather(parts, mine[::1])
    check("all_gather to rows of a tensor", parts, everybody)

    terms = torch.cat([numbers(rank, 2) + 100 * part for part in range(world)])
    expected = total(world, 2) + 100 * rank * world
    short = torch.empty(2)
    dist.reduce_scatter_tensor(short, terms)
    check("reduce_scatter_tensor", short, expected)
    short = torch.empty(2)
    dist.reduce_scatter(short, [part.clone() for part in terms.chunk(world)])
    check("reduce_scatter", short, expected)

    gathered = [torch.empty(6) for _ in range(world)] if rank == root else None
    dist.gather(mine, gathered, root)
    if gathered is not None:
        check("gather", gathered, everybody)
    received = torch.empty(6)
    dist.scatter(received, [item + 1 for item in everybody] if rank == root else None, root)
    check("scatter", received, mine + 1)

    sent, got = torch.arange(float(world)) + 10 * rank, torch.empty(world)
    dist.all_to_all_single(got, sent)
    check("all_to_all_single", got, torch.arange(float(world)) * 10 + rank)
    give, take = [(rank + other) % 3 for other in range(world)], [(other + rank) % 3 for other in range(world)]
    got = torch.empty(sum(take), 2)
    dist.all_to_all_single(got, torch.full((sum(give), 2), float(rank)), take, give)
    check("all_to_all_single with splits", got, torch.cat([torch.full((take[other], 2), float(other)) for other in range(world)]))
    lengths = [1] * world if world == GLOO_RANKS else [other + 1 for other in range(world)]  # gloo takes equal ones only
    got_list = [torch.empty(lengths[rank]) for _ in range(world)]
    dist.all_to_all(got_list, [torch.full((length,), float(rank)) for length in lengths])
    check("all_to_all", got_list, [torch.full((lengths[rank],), float(other)) for other in range(world)])

    following, previous = (rank + 1) % world, (rank - 1) % world
    got = torch.empty(6)
    batch = [dist.P2POp(dist.isend, mine, following), dist.P2POp(dist.irecv, got, previous)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    check("batch_isend_irecv", got, everybody[previous])
    if rank == 0:
        dist.send(mine, 1)
    elif rank == 1:
        got = torch.empty(6)
        assert dist.recv(got) == 0  # from whoever sends
        check("send, recv", got, everybody[0])

    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": other} for other in range(world)]
    dist.barrier()


def coalesced_operations(rank: int, world: int) -> None:
    tensors = [numbers(rank, count) for count in (2, 5)]
    with _coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    check("coalesced all_reduce", tensors, [total(world, 2), total(world, 5)])
    mine = [numbers(rank, count) for count in (2, 3)]
    gathered = [torch.empty(2 * world), torch.empty(3 * world)]
    with _coalescing_manager(async_ops=True) as manager:
        for output, input in zip(gathered, mine, strict=True):
            dist.all_gather_into_tensor(output, input)
    manager.wait()
    check("coalesced all_gather", gathered, [torch.cat([numbers(other, count) for other in range(world)]) for count in (2, 3)])
    short = [torch.empty(2), torch.empty(1)]
    with _coalescing_manager():
        for output in short:
            dist.reduce_scatter_tensor(output, torch.arange(float(len(output) * world)))
    check("coalesced reduce_scatter", short, [(torch.arange(2.0) + 2 * rank) * world, torch.tensor([float(rank)]) * world])
    seen = torch.empty(6)
    with _coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        dist.isend(numbers(rank), (rank + 1) % world)
        dist.irecv(seen, (rank - 1) % world)
        tensor = numbers(rank)
        dist.broadcast(tensor, 0, async_op=True)
    manager.wait()
    check("messages", seen, numbers((rank - 1) % world))
    check("a broadcast beside them", tensor, numbers(0))
    future = dist.all_reduce_coalesced(tensors := [torch.ones(2), torch.ones(3)], async_op=True)
    check("the value of a future", future.wait(), [torch.full((2,), float(world)), torch.full((3,), float(world))])
    check("its tensors", tensors, future.value())


def functional_operations(rank: int, world: int) -> None:
    """What compiled programs and DTensor call: it comes through C++, by the name of the group."""
    group = dist.group.WORLD
    assert group is not None
    calls, name, mine, terms = torch.ops._c10d_functional, group.group_name, numbers(rank), torch.arange(float(2 * world))

    def result(tensor: torch.Tensor) -> torch.Tensor:
        waited: torch.Tensor = calls.wait_tensor(tensor)
        return waited

    check("all_reduce", result(calls.all_reduce(mine, "sum", name)), total(world))
    check("all_reduce max", result(calls.all_reduce(mine, "max", name)), numbers(world - 1))
    everybody = torch.cat([numbers(other) for other in range(world)])
    check("all_gather", result(calls.all_gather_into_tensor(mine, world, name)), everybody)
    check("reduce_scatter", result(calls.reduce_scatter_tensor(terms, "sum", world, name)), terms[2 * rank : 2 * rank + 2] * world)
    splits = [2] * world
    check("all_to_all", result(calls.all_to_all_single(terms, splits, splits, name)), torch.arange(2.0).add(2 * rank).repeat(world))
    check("broadcast", result(calls.broadcast(mine, 1, name)), numbers(1))
    check("the input", mine, numbers(rank))
    several = calls.all_reduce_coalesced([mine, terms], "sum", name)
    check("coalesced", [result(tensor) for tensor in several], [total(world), terms * world])


def calls_from_cpp(rank: int, world: int) -> None:
    """The way of DistributedDataParallel's reducer: a virtual call of the C++ class, and a future of what it returns."""
    group = dist.group.WORLD
    assert group is not None
    tensor = numbers(rank)
    future = dist.ProcessGroup.allreduce(group, [tensor]).get_future()
    check("a future's value", future.wait(), [total(world)])
    tensors = [numbers(rank), numbers(rank, 3)]
    dist._broadcast_coalesced(group, tensors, 1 << 20, 1)
    check("broadcast of parameters", tensors, [numbers(1), numbers(1, 3)])
    work = dist.ProcessGroup.barrier(group)
    assert work.wait()


def sub_groups(rank: int, world: int) -> None:
    """Roots and peers are ranks of the whole, results those of the group; groups that are destroyed leave the others alone."""
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    mine = groups[rank % 2]
    if rank < 3:
        assert isinstance(mine, backend.PeerlaneGroup)
        tensor = numbers(rank)
        dist.all_reduce(tensor, group=mine)
        check("all_reduce", tensor, numbers(0) + numbers(2) if rank != 1 else numbers(1))
        tensor = numbers(rank)
        dist.broadcast(tensor, 2 if rank != 1 else 1, group=mine)
        check("broadcast", tensor, numbers(2) if rank != 1 else numbers(1))
    dist.barrier()
    for group in groups:
        dist.destroy_process_group(group) if group != dist.GroupMember.NON_GROUP_MEMBER else None
    tensor = numbers(rank)
    dist.all_reduce(tensor)
    check("all_reduce of all", tensor, total(world))


def mesh_dimensions(rank: int, world: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=mesh.get_group("columns"))
    check("a row's sum", tensor, torch.tensor([1.0 if rank < 2 else 5.0]))


def rendezvous_of_symmetric_memory(rank: int, world: int) -> None:
    """torch's own function, replaced here for it wants a GPU, finds groups with stores in the places of all groups and of a half."""
    halves = [dist.new_group(list(members)) for members in (range(world // 2), range(world // 2, world))]
    half, whole = halves[rank >= world // 2], dist.group.WORLD
    assert whole is not None
    found = []

    def look(tensor: torch.Tensor, name: str) -> None:
        group = c10d._resolve_process_group(c10d.GroupName(name))
        group.get_group_store().set(f"{group.rank()}", f"rank {rank}")
        found.append([group.get_group_store().get(f"{other}").decode() for other in range(group.size())])

    before, symmetric._rendezvous = symmetric._rendezvous, look
    try:
        for group in (whole, half):
            symmetric_memory.rendezvous(torch.zeros(1), group)
            assert c10d._resolve_process_group(group.group_name) is group
    finally:
        symmetric._rendezvous = before
    own = range(world // 2) if rank < world // 2 else range(world // 2, world)
    assert found == [[f"rank {other}" for other in range(world)], [f"rank {other}" for other in own]]
    name = half.group_name
    dist.destroy_process_group(half)
    assert whole.group_name in symmetric._stand_ins and name not in symmetric._stand_ins


def bad_calls(rank: int, world: int) -> list[str]:
    """What a rank is told; the others have not called."""
    said = []
    group = dist.group.WORLD
    assert isinstance(group, backend.PeerlaneGroup)
    for call in (lambda: group.allreduce([torch.ones(1), torch.ones(1)]), lambda: group.allreduce([torch.ones(1, device="meta")])):
        try:
            call()
        except UsageError as error:
            said.append(str(error))
    return said


def counted(rank: int, world: int, function: Callable[[int, int], None]) -> list[backend.Count]:
    backend.reset_counts()
    function(rank, world)
    return backend.counts()


OPERATIONS = {
    "all_gather", "all_gather_single", "all_reduce", "all_to_all", "all_to_all_single", "broadcast", "gather", "reduce", "reduce_scatter",
    "reduce_scatter_single", "scatter",
}  # fmt: skip


def test_cpu_tensors_go_to_gloo(gloo_ranks: RankPool) -> None:
    for counts in gloo_ranks.run(counted, every_operation):
        assert {(count.ran_on, count.reason) for count in counts} == {("gloo", "")}
        assert {count.operation for count in counts} >= OPERATIONS


def test_what_the_kit_serves_goes_to_the_kit_and_the_rest_is_counted(kit_ranks: RankPool) -> None:
    for rank, counts in enumerate(kit_ranks.run(counted, every_operation)):
        assert {count.operation for count in counts if count.ran_on == "kit"} == OPERATIONS
        alone = {("send", "the kit serves messages of groups whose ranks share GPUs")} if rank == 0 else set()
        assert {(count.operation, count.reason) for count in counts if count.ran_on != "kit"} >= {("barrier", ""), *alone}, rank


@pytest.mark.parametrize("work", [coalesced_operations, functional_operations, calls_from_cpp, sub_groups], ids=lambda work: work.__name__)
@pytest.mark.parametrize("ranks", ["gloo_ranks", "kit_ranks"])
def test_torch_distributed_works(work: Callable[[int, int], None], ranks: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(ranks).run(work)


@pytest.mark.parametrize("work", [rendezvous_of_symmetric_memory, mesh_dimensions], ids=lambda work: work.__name__)
def test_symmetric_memory_and_device_meshes_take_its_groups(work: Callable[[int, int], None], kit_ranks: RankPool) -> None:
    kit_ranks.run(work)


def test_bad_calls_are_told_what_was_expected(gloo_ranks: RankPool) -> None:
    for several, device in gloo_ranks.run(bad_calls):
        assert several == "all_reduce of 2 tensors at once; pass one, or use a coalesced operation"
        assert device.startswith("a tensor on meta: this process group serves cpu tensors")


def moved_dtypes(rank: int, world: int) -> list[tuple[str, str]]:
    """Any dtype can be moved by the kit; reductions of what it does not reduce go to the child."""
    backend.reset_counts()
    for dtype in (torch.float64, torch.int64, torch.uint8, torch.bool, torch.bfloat16, torch.complex64):
        output = torch.empty(world, 2, dtype=dtype)
        dist.all_gather_into_tensor(output, torch.tensor([rank, 1]).to(dtype))
        check(
            str(dtype),
            output.to(torch.complex64).real,
            torch.tensor([[float(bool(r) if dtype == torch.bool else r), 1.0] for r in range(world)]),
        )
    for dtype in (torch.float64, torch.int64, torch.bfloat16, torch.int32):
        tensor = numbers(rank, 3, dtype)
        dist.all_reduce(tensor)
        check(str(dtype), tensor.float(), total(world, 3))
    return [(count.ran_on, count.reason) for count in backend.counts() if count.operation == "all_reduce"]


def test_a_dtype_that_the_kit_does_not_reduce_goes_to_the_child(kit_ranks: RankPool) -> None:
    for found in kit_ranks.run(moved_dtypes):
        (place, reason), *others = found
        assert place == "gloo" and reason.startswith("a reduction of torch.float64; the kit reduces bfloat16, "), reason
        assert others == [("kit", "")]


def reductions(rank: int, world: int) -> None:
    """What FSDP2 and Megatron ask for, of each operation that reduces."""
    everybody, kind = [numbers(other, 2 * world) for other in range(world)], dist.ReduceOp
    whole = torch.stack(everybody)
    wanted = {kind.SUM: whole.sum(0), kind.AVG: whole.mean(0), kind.MAX: whole.amax(0), kind.MIN: whole.amin(0)}
    cases: list[tuple[Any, torch.Tensor]] = [*wanted.items(), (premul_sum(0.5), whole.sum(0) / 2)]
    for (op, want), dtype in itertools.product(cases, (torch.float32, torch.bfloat16, torch.float16)):
        want = want.to(dtype)
        dist.all_reduce(tensor := numbers(rank, 2 * world, dtype), op)
        check("all_reduce", tensor, want)
        dist.reduce(tensor := numbers(rank, 2 * world, dtype), 1, op)
        check("reduce", tensor, want if rank == 1 else numbers(rank, 2 * world, dtype))
        dist.reduce_scatter_tensor(part := torch.empty(2, dtype=dtype), numbers(rank, 2 * world, dtype), op)
        check("reduce_scatter_tensor", part, want.view(world, 2)[rank])
        dist.reduce_scatter(part, list(numbers(rank, 2 * world, dtype).chunk(world)), op)
        check("reduce_scatter", part, want.view(world, 2)[rank])
    with _coalescing_manager():
        for tensor in (tensors := [numbers(rank), numbers(rank, 3)]):
            dist.all_reduce(tensor, premul_sum(0.25))
    check("coalesced", tensors, [total(world) / 4, total(world, 3) / 4])
    for op, dtype in itertools.product((kind.SUM, kind.MAX, kind.MIN), (torch.uint8, torch.int8, torch.int32, torch.int64)):
        dist.all_reduce(tensor := numbers(rank, 2 * world, dtype), op)
        check("all_reduce of integers", tensor, wanted[op].to(dtype))


def test_reductions_of_training_run_on_the_kit(kit_ranks: RankPool) -> None:
    for counts in kit_ranks.run(counted, reductions):
        assert {(count.ran_on, count.reason) for count in counts} == {("kit", "")}


def unequal_lists(rank: int, world: int) -> None:
    """Parts of different sizes, one of them empty: into memory that adjoins, and into tensors of their own."""
    sizes = [3 * ((q + 1) % world) for q in range(world)]
    whole = [torch.arange(sum(sizes), dtype=torch.float32) + 100 * q for q in range(world)]
    for adjoins in (True, False):
        parts = list(torch.zeros(sum(sizes)).split(sizes)) if adjoins else [torch.zeros(size) for size in sizes]
        dist.all_gather(parts, whole[rank].split(sizes)[rank].clone())
        check("all_gather", torch.cat(parts), torch.cat([whole[q].split(sizes)[q] for q in range(world)]))
        output = torch.zeros(sizes[rank])
        dist.reduce_scatter(output, list(whole[rank].split(sizes)))
        check("reduce_scatter", output, sum(whole).split(sizes)[rank])  # type: ignore[attr-defined]


def test_lists_of_unequal_parts_run_on_the_kit(kit_ranks: RankPool) -> None:
    for counts in kit_ranks.run(counted, unequal_lists):
        assert {(count.operation, count.calls, count.ran_on) for count in counts} == {
            ("all_gather", 2, "kit"),
            ("reduce_scatter", 2, "kit"),
        }


def tensor_factor(rank: int, world: int) -> None:
    with pytest.raises(RuntimeError, match="ReduceOp"):  # gloo has no such reduction at all
        dist.all_reduce(torch.ones(1), premul_sum(torch.ones(1)))


def test_reductions_that_the_kit_does_not_have_say_why(kit_ranks: RankPool) -> None:
    reason = "ReduceOp.PREMUL_SUM with a tensor as its factor; the kit takes a number"
    for counts in kit_ranks.run(counted, tensor_factor):
        assert counts == [backend.Count("all_reduce", "cpu", "gloo", reason, 1)]


def trains_with_fsdp(rank: int, world: int, factor: float | None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model, whole = (torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8)) for _ in range(2))
    whole.load_state_dict(model.state_dict())
    mesh = init_device_mesh("cpu", (world,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
        if factor is not None:
            layer.set_gradient_divide_factor(factor)
    inputs = torch.arange(float(world * 8)).view(world, 8) / 10
    model(inputs[rank : rank + 1]).sum().backward()
    (whole(inputs).sum() / (world if factor is None else factor)).backward()
    for own, want in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(own.grad.full_tensor(), want.grad)


def trains_with_ddp(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    replicated = torch.nn.parallel.DistributedDataParallel(model)
    replicated(torch.full((1, 8), float(rank))).sum().backward()


@pytest.mark.parametrize(
    "train", [functools.partial(trains_with_fsdp, factor=None), functools.partial(trains_with_fsdp, factor=6.0), trains_with_ddp],
    ids=["FSDP2", "FSDP2 with a factor", "DDP"],
)  # fmt: skip
def test_gradients_of_fsdp_and_ddp_stay_on_the_kit(kit_ranks: RankPool, train: Callable[[int, int], None]) -> None:
    for counts in kit_ranks.run(counted, train):
        moved = {count.operation: count.ran_on for count in counts if "reduce" in count.operation or "gather_single" in count.operation}
        assert moved and set(moved.values()) == {"kit"}, counts


def asynchronous_calls(rank: int, world: int) -> tuple[bool, float]:
    """A handle returns before the other ranks have come; later calls see what earlier ones did, whichever way they were called."""
    first, begin = numbers(rank), time.monotonic()
    dist.barrier()
    if rank == world - 1:
        time.sleep(0.3)
    work = dist.all_reduce(first, async_op=True)
    done, took = work.is_completed(), time.monotonic() - begin
    second = dist.all_gather_into_tensor(wide := torch.empty(6 * world), first, async_op=True)  # of sums
    short = torch.empty(6)
    dist.reduce_scatter_tensor(short, wide)
    check("a blocking call behind asynchronous ones", short, total(world) * world)
    for handle in (work, second):
        assert handle.wait() and handle.is_completed() and handle.is_success()
    check("the first result", work.get_future().value(), [total(world)])
    wide = first.double()
    dist.all_reduce(wide)  # goes to the child
    check("a child's call behind the kit's", wide, total(world) * world)
    return done, took


def test_asynchronous_calls_return_at_once_and_keep_their_order(kit_ranks: RankPool) -> None:
    results = kit_ranks.run(asynchronous_calls)
    for done, took in results[:-1]:
        assert not done and took < 0.25


def opens_nowhere(rank: int, world: int, folder: str) -> list[backend.Count]:
    with provided(StandInProvider(Path(folder), broken_ranks=[1])):
        group = dist.new_group(list(range(world)))
    backend.reset_counts()
    for _ in range(2):
        tensor = numbers(rank)
        dist.all_reduce(tensor, group=group)
        check("all_reduce", tensor, total(world))
    return backend.counts()


def test_no_rank_uses_a_kit_that_one_could_not_open(gloo_ranks: RankPool, tmp_path: Path) -> None:
    reason = "the kit could not be opened on rank 1: DeviceError: no such memory"
    for counts in gloo_ranks.run(opens_nowhere, str(tmp_path)):
        assert counts == [backend.Count("all_reduce", "cpu", "gloo", reason, 2)]


class CoalescingChild:
    """Stands for NCCL: it must get the messages of a batch between a start and an end."""

    supports_coalescing = True

    def __init__(self, refuses: int = -1) -> None:
        self.log: list[str] = []
        self._refuses = refuses

    def _start_coalescing(self) -> None:
        self.log.append("start")

    def _end_coalescing(self) -> dist.Work:
        self.log.append("end")
        return backend.ordering.FinishedWork()

    def send(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> None:
        if len(self.log) == self._refuses:
            raise RuntimeError("no route")
        self.log.append(f"send {peer}")

    def recv(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> None:
        self.log.append(f"recv {peer}")


def batches(rank: int, world: int) -> None:
    group = dist.new_group(list(range(world)))
    assert isinstance(group, backend.PeerlaneGroup)
    tensor, peer = torch.ones(1), (rank + 1) % world
    operations = [dist.P2POp(operation, tensor, peer, group) for operation in (dist.isend, dist.irecv, dist.isend)]
    one_batch = ["start", f"send {peer}", f"recv {peer}", f"send {peer}", "end"]
    real, child = group._children["cpu"], CoalescingChild()
    group._children["cpu"] = child
    for _ in range(2):
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    dist.isend(tensor, peer, group)
    assert child.log == [*one_batch, *one_batch, f"send {peer}"]
    group._children["cpu"] = broken = CoalescingChild(refuses=3)
    with pytest.raises(RuntimeError, match="no route"):
        dist.batch_isend_irecv(operations)
    dist.isend(tensor, peer, group)
    assert broken.log == ["start", f"send {peer}", f"recv {peer}", "end", f"send {peer}"]  # the broken batch is over
    group._children["cpu"] = real


def test_the_messages_of_a_batch_reach_nccl_as_one_group(gloo_ranks: RankPool) -> None:
    gloo_ranks.run(batches)


def frees_its_memory(rank: int, world: int, folder: str) -> bool:
    provider = StandInProvider(Path(folder))
    with provided(provider):
        group = dist.new_group(list(range(world)))
    assert group is not None
    dist.all_reduce(torch.ones(1), group=group)
    (kit,) = provider.opened.values()
    dist.destroy_process_group(group)
    return kit.closed


def test_a_destroyed_group_frees_the_kits_memory(gloo_ranks: RankPool, tmp_path: Path) -> None:
    assert gloo_ranks.run(frees_its_memory, str(tmp_path)) == [True] * GLOO_RANKS


def fill_with(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source)


def test_lists_that_adjoin_are_not_copied() -> None:
    from peerlane.device.backend import kit

    whole = torch.arange(12.0)
    rows = list(whole.view(3, 4).unbind())
    assert (own := kit.adjoining(rows)) is not None and own.data_ptr() == whole.data_ptr() and own.shape == (12,)
    for tensors in ([rows[1], rows[0]], [rows[0], rows[2]], [rows[0], rows[1].clone()], [whole[:4:2], whole[4:6]]):
        assert kit.adjoining(tensors) is None
        filled, source = [tensor.clone() for tensor in tensors], kit.joined(tensors)
        kit.fill_parts(filled, functools.partial(fill_with, source))
        for got, want in itertools.zip_longest(filled, tensors):
            check("part", got, want)
    with pytest.raises(UsageError, match=r"shape \(2, 3\) and strides \(1, 2\) is not contiguous"):
        kit.flat(torch.ones(3, 2).t())


def stops(rank: int, world: int) -> None:
    """Rank 0 hears that the kit's waits have ended; each of its calls says so from then on, and nobody's end of the group hangs."""
    group = dist.new_group()
    dist.all_reduce(torch.ones(3), group=group)
    group.set_timeout(timedelta(seconds=40))
    assert group.waits.limit_s == 40.0
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=30), group)
    assert group.current_timeout() == timedelta(seconds=30)
    if rank == 0:
        group.waits.stop("rank 1 has died")
        with pytest.raises(dist.DistBackendError, match="rank 1 has died; this group can not be used any more"):
            dist.all_reduce(torch.ones(3), group=group)
    dist.destroy_process_group(group)


def test_a_group_that_has_stopped_raises_and_ends(kit_ranks: RankPool) -> None:
    kit_ranks.run(stops)
