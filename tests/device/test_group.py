"""Groups: exchange without a device, shares of devices that ranks share, and what a group keeps."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from device.pool_doubles import RANKS, Meeting
from peerlane.device.host import cuda_group, ipc
from peerlane.device.host.arena import Arena
from peerlane.device.host.cuda_group import CudaGroup
from peerlane.device.host.declare import U32, DeclaredKernel, compile_ahead
from peerlane.device.host.group import Group, per_group
from peerlane.device.host.group_cache import GroupCache
from peerlane.device.host.ipc import StoreExchange, shares
from peerlane.device.host.shared_page import HostBoard
from peerlane.device.host.waits import Waits
from peerlane.emulator.ranks import EmulatedRanks, RankFailure
from peerlane.errors import DeviceTimeout, UsageError


def test_an_exchange_gives_every_rank_every_value_in_rank_order() -> None:
    store, ranks = dist.HashStore(), range(3)

    def rounds(rank: int) -> list[object]:
        exchange = StoreExchange(store, rank, len(ranks))
        return [exchange([rank, number, "x" * rank]) for number in range(5)]

    with ThreadPoolExecutor(len(ranks)) as pool:
        found = list(pool.map(rounds, ranks))
    assert found == [[[[rank, number, "x" * rank] for rank in ranks] for number in range(5)]] * 3
    assert store.num_keys() <= 2 * len(ranks)


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(DeviceTimeout, match=r"ranks \[1\] did not come to exchange number 0"):
        StoreExchange(dist.HashStore(), 0, 2, Waits(0.1))("mine")


@pytest.mark.parametrize(("rank", "order"), [(0, ["first", "second"]), (1, ["second", "first"]), (2, ["first", "second"])])
def test_ranks_compile_several_kernels_in_turned_orders(rank: int, order: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[dict[str, str | int]] = []
    monkeypatch.setattr(cuda_group, "compile_cubin", lambda source, defines: compiled.append(defines))
    group: Any = SimpleNamespace(rank=rank, world_size=4)
    group.compile_ahead = partial(CudaGroup.compile_ahead, group)
    kernel = DeclaredKernel("named", "// source", count=U32)
    compile_ahead(group, [(kernel, {"NAME": "first"}), (kernel, {"NAME": "second"})])
    assert compiled == [{"WORLD_SIZE": 4, "NAME": name} for name in order]


@pytest.mark.parametrize(("ranks_per_device", "blocks"), [(1, 33), (4, 16)])
def test_blocks_that_wait_leave_half_of_a_shared_device_free(ranks_per_device: int, blocks: int) -> None:
    group: Any = SimpleNamespace(sm_count=33, ranks_per_device=ranks_per_device)
    assert Group.waiting_blocks.__get__(group) == blocks


def test_ranks_that_share_a_device_share_its_sms() -> None:
    assert shares([("a", "gpu0", 132), ("a", "gpu1", 114)]) == (1, 114)
    assert shares([("a", "gpu0", 132)] * 4) == (4, 33)
    assert shares([("a", "gpu0", 132)] * 2, at_least=4) == (4, 33), "two other ranks are in another group"
    with pytest.raises(UsageError, match=r"ranks \[2\] are on another host than rank 0"):
        shares([("a", "gpu0", 132), ("a", "gpu1", 132), ("b", "gpu0", 132)])


def test_emulated_memory_does_not_span_nodes() -> None:
    layout = {"node": [[0, 1], [2, 3]], "rail": [[0, 2], [1, 3]]}
    for name, refusal in (("node", None), ("rail", r"ranks \[1\] are on another host"), ("", r"ranks \[2, 3\] are on another host")):
        ranks = EmulatedRanks(4, schedules=1, nodes=2)
        groups = ranks.groups(layout)
        ranks.load(lambda rank: lambda group: Arena(64, group).rank)
        arguments = [(groups[rank].get(name),) for rank in range(4)]
        if refusal is None:
            assert ranks.call(arguments, lambda rank, output: output) == [0, 1, 0, 1]
        else:
            with pytest.raises(RankFailure, match=refusal):
                ranks.call(arguments, lambda rank, output: output)


def test_the_ranks_of_a_destroyed_process_group_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ranks:  # the real ones need a GPU
        def close(self) -> None: ...

    monkeypatch.setattr(ipc, "ProcessGroupRanks", lambda group: Ranks())
    group, other = dist.ProcessGroup(0, 1), dist.ProcessGroup(0, 1)
    assert ipc.process_group(group) is ipc.process_group(group) is not ipc.process_group(other)
    ranks, other_ranks = weakref.ref(ipc.process_group(group)), weakref.ref(ipc.process_group(other))
    del group
    gc.collect()
    assert ranks() is None and other_ranks() is ipc.process_group(other)


def test_a_group_keeps_one_object_for_each_set_of_arguments() -> None:
    from gpu.local_ranks import LocalRank

    class Kept(LocalRank):
        def __init__(self) -> None:
            self.cache, self.lock = GroupCache(), threading.RLock()

    made = []

    @per_group
    def launch(group: object, size: int, *, dtype: str = "bf16") -> object:
        made.append((size, dtype))
        return object()

    one, other = Kept(), Kept()
    assert launch(one, 3) is launch(one, 3)
    assert launch(one, 3) is not launch(other, 3)
    assert launch(one, 3, dtype="fp32") is not launch(one, 3)
    assert made == [(3, "bf16"), (3, "bf16"), (3, "fp32")]


@pytest.mark.parametrize("folder", ["/dev/shm", "/nonexistent"])
def test_ranks_agree_on_numbers_in_every_call(folder: str) -> None:
    count, calls, meeting = RANKS, 200, Meeting()

    def member(rank: int) -> list[list[int]]:
        board = HostBoard(partial(meeting.exchange, rank), rank, count, folder)
        assert board.shared == (folder == "/dev/shm")
        return [board(1000 * call + rank) for call in range(calls)]

    with ThreadPoolExecutor(count) as pool:
        found = list(pool.map(member, range(count)))
    assert found == [[[1000 * call + rank for rank in range(count)] for call in range(calls)]] * count
