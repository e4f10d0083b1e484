"""What PyTorch calls besides collectives: every method of ProcessGroup, splits, profilers, sparse tensors, and the way to the backend."""

import contextlib
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup
from torch._subclasses.fake_tensor import FakeTensorMode

from peerlane import ops
from peerlane.device import backend
from peerlane.errors import UsageError
from peerlane.ops import collectives
from ranks.pool import RankPool
from ranks.stand_in_kit import ranks_with_the_kit

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
RANKS = 2
SECONDS = timedelta(seconds=20)
CPU = torch.device("cpu")
KINDS = ProcessGroup.BackendType


def one() -> torch.Tensor:
    return torch.ones(2)


Call = Callable[[Any], Any]
SERVED: dict[str, Call] = {
    "allreduce": lambda g: g.allreduce([one()]),
    "allreduce_coalesced": lambda g: g.allreduce_coalesced([one(), one()]),
    "reduce": lambda g: g.reduce([one()]),
    "reduce_scatter": lambda g: g.reduce_scatter([one()], [[one()] * RANKS]),
    "broadcast": lambda g: g.broadcast([one()]),
    "allgather": lambda g: g.allgather([[one() for _ in range(RANKS)]], [one()]),
    "allgather_coalesced": lambda g: g.allgather_coalesced([[one()] for _ in range(RANKS)], [one()]),
    "gather": lambda g: g.gather([[one() for _ in range(RANKS)]] if g.rank() == 0 else [], [one()]),
    "scatter": lambda g: g.scatter([one()], [[one() for _ in range(RANKS)]] if g.rank() == 0 else []),
    "alltoall": lambda g: g.alltoall([one() for _ in range(RANKS)], [one() for _ in range(RANKS)]),
    **{name: lambda g, name=name: getattr(g, name)(one(), one(), [1, 1], [1, 1]) for name in ("all_to_all_single", "alltoall_base")},
    **{name: lambda g, name=name: getattr(g, name)(torch.ones(4), one()) for name in ("all_gather_single", "_allgather_base")},
    **{name: lambda g, name=name: getattr(g, name)(one(), torch.ones(4)) for name in ("reduce_scatter_single", "_reduce_scatter_base")},
    **{
        name: lambda g, name=name: getattr(g, name)([torch.ones(4)], [one()])
        for name in ("all_gather_single_coalesced", "allgather_into_tensor_coalesced")
    },
    **{
        name: lambda g, name=name: getattr(g, name)([one()], [torch.ones(4)])
        for name in ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
    },
    "send": lambda g: (g.send([one()], 1) if g.rank() == 0 else g.recv([one()], 0)).wait(),
    "recv": lambda g: (g.send([one()], 0) if g.rank() == 1 else g.recv([one()], 1)).wait(),
    "recv_anysource": lambda g: (g.send([one()], 1) if g.rank() == 0 else g.recv_anysource([one()], 0)).wait(),
    "barrier": lambda g: g.barrier(),
    "_start_coalescing": lambda g: (g._start_coalescing(CPU), g._end_coalescing(CPU)),
    "_end_coalescing": lambda g: g._end_coalescing(CPU),
    "split_group": lambda g: g.split_group([0, 1], SECONDS, None, "split", "mine").allreduce([one()]),
    "get_group_store": lambda g: g.get_group_store().set("a key", "a value"),
    "set_timeout": lambda g: g.set_timeout(SECONDS),
    "_get_backend": lambda g: g._get_backend(CPU),
}
"""Methods of the backend's own, with a call of each."""
ROUTED: dict[str, Call] = {
    "merge_remote_group": lambda g: g.merge_remote_group(dist.PrefixStore("merged", g.get_group_store()), RANKS).allreduce([one()]),
    "monitored_barrier": lambda g: g.monitored_barrier(SECONDS),
    "_get_sequence_number_for_group": lambda g: g._get_sequence_number_for_group(),
    "_set_sequence_number_for_group": lambda g: g._set_sequence_number_for_group(),
    "_enable_collectives_timing": lambda g: g._enable_collectives_timing(),
    "_backend_id": lambda g: g._backend_id(KINDS.GLOO),
    "_has_hooks": lambda g: g._has_hooks(),
}
"""Methods that PyTorch's class hands to the children, gloo here."""
REFUSED: dict[str, Call] = {
    "_register_on_completion_hook": lambda g: g._register_on_completion_hook(print),
    "_wait_for_pending_works": lambda g: g._wait_for_pending_works(),
}
"""Methods that only NCCL's groups have."""
PYTORCHS = {
    "BackendType", "CUSTOM", "GLOO", "MPI", "NCCL", "UCC", "UNDEFINED", "XCCL", "_device_types", "_get_backend_name", "_id",
    "_pybind11_conduit_v1_", "_register_backend", "_set_default_backend", "_set_group_desc", "_set_group_name", "bound_device_id", "boxed",
    "group_desc", "group_name", "name", "rank", "size", "unbox", "use_pg_for_symm_mem_rendezvous",
}  # fmt: skip
"""Names, numbers and kinds, which its class holds by itself."""
ENDS = {"abort", "shutdown"}
"""The ends of a group, of which test_backend.py has tests."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with ranks_with_the_kit(RANKS) as pool:
        yield pool


def call_all(rank: int, world: int) -> None:
    group = dist.new_group()
    for name, call in {**SERVED, **ROUTED}.items():
        found = call(group)
        if isinstance(found, dist.Work):
            assert found.wait(), name
    for call in REFUSED.values():
        with pytest.raises(RuntimeError, match="ProcessGroup"):
            call(group)
    for name in PYTORCHS:
        getattr(group, name)
    assert ProcessGroup.unbox(group.boxed()) is group  # type: ignore[attr-defined, union-attr]
    for wrong in (lambda: group.allreduce(one()), lambda: group.allreduce([one()], dist.ReduceOp.SUM), lambda: group.barrier(SECONDS)):  # type: ignore[union-attr]
        with pytest.raises(UsageError, match="expected"):
            wrong()


def test_every_method_of_a_process_group_ends_without_a_crash(ranks: RankPool) -> None:
    listed = {*SERVED, *ROUTED, *REFUSED, *PYTORCHS, *ENDS}
    assert {name for name in dir(ProcessGroup) if not name.startswith("__")} == listed, "PyTorch has other methods: list and try them"
    ranks.run(call_all)


def splits(rank: int, world: int) -> None:
    whole: Any = dist.group.WORLD
    alone = whole.split_group([1])
    assert (alone is None) == (rank == 0)
    for bad in ([], [0, 0], [2], [-1]):
        with pytest.raises(UsageError, match="expected different numbers within this group of 2"):
            whole.split_group(bad)
    whole.split_group([0, 1], SECONDS, None, f"name on rank {rank}").allreduce([tensor := one()]).wait()
    assert tensor.tolist() == [2, 2]
    device = torch.device("cuda", 0)
    with mock.patch.object(backend.PeerlaneGroup, "_get_backend", return_value=SimpleNamespace(supports_splitting=False)):
        bound: Any = dist.new_group(device_id=device)  # PyTorch asks whether it should connect at once, and there is no NCCL here
    assert bound.bound_device_id == device and bound.split_group([rank]).bound_device_id == device
    whole.bound_device_id = device
    with mock.patch.multiple(torch.accelerator, is_available=lambda: True, current_accelerator=lambda: CPU):
        assert dist.distributed_c10d._get_split_source(whole) is None  # new groups make communicators of their own
        half: Any = dist.split_group(whole, [[0], [1]], pg_options="as NCCL's")
    assert isinstance(half, backend.PeerlaneGroup) and half.size() == 1 and half.bound_device_id == device
    dist.all_reduce(tensor := one(), group=half)
    assert tensor.tolist() == [1, 1]
    dist.destroy_process_group(half)


def test_groups_split_into_groups_of_the_backend(ranks: RankPool) -> None:
    ranks.run(splits)


def sparse_sum(rank: int, world: int) -> list[backend.Count]:
    backend.reset_counts()
    dist.all_reduce(tensor := torch.eye(3).to_sparse() * (rank + 1))
    assert torch.equal(tensor.to_dense(), torch.eye(3) * 3)
    return backend.counts()


def test_a_sparse_tensor_goes_to_the_child_with_a_reason(ranks: RankPool) -> None:
    for counts in ranks.run(sparse_sum):
        assert counts == [backend.Count("all_reduce", "cpu", "gloo", "a sparse tensor; the kit serves dense ones", 1)]


def profiled(rank: int, world: int) -> list[tuple[str, bool, Any]]:
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(torch.ones(3), async_op=True).wait()
        dist.reduce_scatter_tensor(torch.ones(2), torch.ones(4))
        dist.all_reduce_coalesced([torch.ones(2), torch.ones(5)])
    return [(event.name, event.is_async, event.input_shapes) for event in profile.function_events if event.name.startswith("peerlane:")]


def test_profilers_see_calls_with_shapes_to_their_ends(ranks: RankPool) -> None:
    for events in ranks.run(profiled):
        names = ["all_reduce", "reduce_scatter_single", "all_reduce"]
        assert [name for name, is_async, _ in events if is_async] == [f"peerlane:{name}" for name in names]
        launches = [(name, shapes) for name, is_async, shapes in events if not is_async]
        assert launches == [(f"peerlane::launch_{name}", shapes) for name, shapes in zip(names, ([[3]], [[4]], [[2], [5]]), strict=True)]


def as_the_kit(rank: int, world: int) -> None:
    """What the kit refuses before it launches, and what its kernels write like any memory."""
    for call in (
        lambda: dist.all_gather_into_tensor(torch.ones(8), torch.ones(2, 2).t()),
        lambda: dist.reduce_scatter_tensor(torch.ones(2), torch.ones(2, 2).t()),
        lambda: dist.all_gather_into_tensor(torch.ones(8, dtype=torch.float64), torch.ones(4)),
        lambda: dist.group.WORLD.broadcast([torch.ones(1)], _root(7)),  # type: ignore[union-attr]
        lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3)),
    ):
        with pytest.raises(UsageError):
            call()
        with pytest.raises(ValueError):  # noqa: PT011
            call()
    dist.all_reduce(parameter := torch.nn.Parameter(torch.ones(2)))
    with torch.inference_mode():
        inferred = torch.ones(2)
    dist.all_reduce(inferred)
    assert parameter.tolist() == inferred.tolist() == [2, 2]


def _root(rank: int) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank, options.asyncOp = rank, False
    return options


def test_the_stand_in_takes_what_the_kit_takes(ranks: RankPool) -> None:
    ranks.run(as_the_kit)


def watched_operators(rank: int, world: int) -> list[int]:
    """How often PyTorch's dispatcher was asked, call by call."""
    x, asked = torch.ones(2), []
    with mock.patch.object(collectives._all_reduce, "operator", wraps=collectives._all_reduce.operator) as operator:
        wanted = torch.ones(2, requires_grad=True)
        watchers: tuple[tuple[Any, torch.Tensor], ...] = (
            (contextlib.nullcontext(), x), (torch.no_grad(), wanted), (contextlib.nullcontext(), wanted),
            (torch.autograd.profiler.profile(), x), (FakeTensorMode(allow_non_fake_inputs=True), x),
        )  # fmt: skip
        for watcher, tensor in watchers:
            operator.reset_mock()
            with watcher:
                assert ops.all_reduce(tensor).shape == (2,)
            asked.append(operator.call_count)
    return asked


def test_operators_leave_out_the_dispatcher_unless_it_is_watched(ranks: RankPool) -> None:
    assert ranks.run(watched_operators) == [[0, 0, 1, 1, 1]] * RANKS


def test_importing_torch_is_enough_and_imports_nothing_heavy(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    points = tomllib.loads((root / "pyproject.toml").read_text())["project"]["entry-points"]
    installed = tmp_path / "with_entry_points-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: with-entry-points\nVersion: 1\n")
    groups = ("torch.backends", "torch.distributed.backends")
    (installed / "entry_points.txt").write_text("".join(f"[{group}]\npeerlane = {points[group]['peerlane']}\n" for group in groups))
    code = f"""
import sys, torch, torch.distributed as dist
print(sorted(name for name in sys.modules if name.startswith("peerlane.")), dist.is_backend_available("peerlane"))
dist.init_process_group("peerlane", init_method="file://{tmp_path}/store", rank=0, world_size=1)
print(type(dist.group.WORLD).__name__)
"""
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{root}/src"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    light = "['peerlane.autoload', 'peerlane.common', 'peerlane.common.version']"
    assert ran.stdout.splitlines() == [f"{light} True", "PeerlaneGroup"], ran.stderr
