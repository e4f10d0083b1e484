"""What ``group=`` of an operator takes, and where operators run without the kit, on CPU ranks."""

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from peerlane import ops
from peerlane.errors import UsageError
from peerlane.ops import groups
from ranks.pool import RankPool, logged

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture
def ranks(rank_pool: Any) -> RankPool:
    pool: RankPool = rank_pool(3)
    return pool


def names_and_meshes(rank: int, world: int) -> None:
    whole = dist.group.WORLD
    assert whole is not None
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    x = torch.full((2,), float(rank))
    for group in (None, whole, whole.group_name, mesh, mesh["tp"], mesh.get_group("tp").group_name):
        assert ops.all_reduce(x, group).tolist() == [3.0, 3.0]
    pair = dist.new_group([0, 2])
    if rank == 1:
        with pytest.raises(UsageError, match="a group that this rank is not in"):
            ops.all_reduce(x, pair)
    else:
        assert ops.all_reduce(x, pair, reduce_op="max").tolist() == [2.0, 2.0]
        assert ops.all_gather(x.view(2, 1), pair, axis=1).tolist() == [[0.0, 2.0]] * 2
    for wrong, told in (("tensor", "group= got 'tensor'"), (3, "got int"), (init_device_mesh("cpu", (1, world)), "of 2 dimensions")):
        with pytest.raises(UsageError, match=told):
            ops.all_reduce(x, wrong)  # type: ignore[arg-type]
    alone = [dist.new_group([other]) for other in range(world)][rank]
    assert torch.equal(ops.reduce_scatter(x, alone, reduce_op="avg"), x) and ops.all_reduce(x, alone) is not x


def test_groups_names_and_meshes_are_groups(ranks: RankPool) -> None:
    ranks.run(names_and_meshes)


def reductions(rank: int, world: int) -> None:
    x = torch.arange(6.0).view(3, 2) + rank
    every = torch.stack([torch.arange(6.0).view(3, 2) + other for other in range(world)])
    for op, want in (("sum", every.sum(0)), ("avg", every.mean(0)), ("max", every.amax(0)), (dist.ReduceOp.MIN, every.amin(0))):
        assert torch.equal(ops.all_reduce(x, reduce_op=op), want)
        assert torch.equal(ops.reduce_scatter(x, reduce_op=op), want[rank : rank + 1])
        out = torch.empty_like(x)
        assert ops.all_reduce(x, reduce_op=op, out=out) is out and torch.equal(out, want)
    assert torch.equal(ops.all_reduce(x.double()), every.sum(0).double()) and ops.all_reduce(x.long()).dtype == torch.int64
    own = x.clone().requires_grad_()
    ops.all_reduce(own, reduce_op="avg").mul(rank + 1).sum().backward()
    assert torch.equal(own.grad, torch.full_like(x, 2.0))  # the mean of 1, 2 and 3
    own.grad = None
    ops.reduce_scatter(own, reduce_op="avg").mul(rank + 1).sum().backward()
    torch.testing.assert_close(own.grad, (torch.arange(3.0).view(3, 1) + 1).expand(3, 2) / 3)
    with pytest.raises(UsageError, match="max has no gradient"):
        ops.all_reduce(own, reduce_op="max").sum().backward()
    for call, told in (
        (lambda: ops.all_reduce(x, reduce_op="product"), "expected 'sum', 'avg'"),
        (lambda: ops.all_reduce(x, out=torch.empty(3)), r"expected a contiguous tensor of shape \(3, 2\)"),
        (lambda: ops.all_reduce(own, out=torch.empty(3, 2)), "out= has no gradient"),
        (lambda: ops.all_gather(x, axis=2), "expected one of its 2 axes"),
    ):
        with pytest.raises(UsageError, match=told):
            call()


def test_reductions_axes_and_out_on_cpu_ranks(ranks: RankPool) -> None:
    ranks.run(reductions)


def compiled_with_out(rank: int, world: int) -> None:
    x = torch.full((2, 2), float(rank))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        ops.all_reduce(x, reduce_op="max", out=out)
        return out + ops.all_gather(x, axis=1).sum()

    assert torch.equal(step(x, torch.empty_like(x)), torch.full((2, 2), 2.0 + 12.0))


def test_out_and_axes_compile(ranks: RankPool) -> None:
    ranks.run(compiled_with_out)


def joins(rank: int, world: int, hosts: bool) -> list[str]:
    """The lines that are logged, of two attempts."""
    group = dist.new_group(list(range(world)))
    assert group is not None
    with logged("peerlane.ops", logging.INFO) as lines, pytest.MonkeyPatch.context() as patch:
        if hosts:
            patch.setattr(groups, "host_name", lambda: f"host {rank}")
        assert groups.joined(group) is None and groups.joined(group) is None
    return [line.replace(group.group_name, "NAME") for line in lines]


def test_groups_that_the_kit_can_not_join_say_so_once(ranks: RankPool) -> None:
    begin = "operators of group NAME run on torch.distributed: "
    for lines in ranks.run(joins, True):
        assert lines == [f"{begin}the group spans 3 hosts; the kit serves groups of one host"]
    for lines in ranks.run(joins, False):  # there is no GPU
        assert len(lines) == 1 and lines[0].startswith(f"{begin}the kit could not be opened on rank 0: ")


def test_more_ranks_than_the_kit_serves_run_without_it(caplog: pytest.LogCaptureFixture) -> None:
    class Large:
        group_name = "large"

        def size(self) -> int:
            return 9

    with caplog.at_level(logging.WARNING, "peerlane.ops"):
        large: Any = Large()
        assert groups.joined(large) is None and groups.joined(large) is None
    assert [record.message for record in caplog.records] == [
        "operators of group large run on torch.distributed: the group has 9 ranks; the kit serves up to 8"
    ]
