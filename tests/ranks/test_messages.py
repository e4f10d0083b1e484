"""Messages of torch.distributed where the kit serves them: one by one and in batches, of every tag, order, dtype and size."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import peerlane.device.backend as backend
from peerlane.errors import UsageError
from ranks.pool import RankPool
from ranks.stand_in_kit import ranks_with_the_kit

RANKS = 3


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with ranks_with_the_kit(RANKS, messages=True) as pool:
        yield pool


def numbers(rank: int, count: int = 5, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(count) + 10 * rank).to(dtype)


def receives_before_sends(rank: int, world: int) -> None:
    got = torch.empty(5)
    receive = dist.irecv(got, (rank - 1) % world)
    send = dist.isend(numbers(rank), (rank + 1) % world)
    assert receive is not None and send is not None
    assert receive.wait() and send.wait()
    assert torch.equal(got, numbers((rank - 1) % world))


def tags_in_the_other_order(rank: int, world: int) -> None:
    """Of one tag, messages come in the order of their sends."""
    if rank == 0:
        for number, tag in enumerate((7, 8, 7, 9)):
            dist.send(numbers(number), 1, tag=tag)
    elif rank == 1:
        for number, tag in ((3, 9), (0, 7), (2, 7), (1, 8)):
            dist.recv(got := torch.empty(5), 0, tag=tag)
            assert torch.equal(got, numbers(number)), tag


def batches(rank: int, world: int) -> None:
    """All to all, to itself too, several to each, and twice the same list."""
    got = torch.zeros(2, world, 5)
    sends = [dist.P2POp(dist.isend, numbers(10 * rank + peer + 5 * turn), peer) for turn in range(2) for peer in range(world)]
    receives = [dist.P2POp(dist.irecv, got[turn, peer], peer) for turn in range(2) for peer in range(world)]
    for operations in [[*receives, *sends]] * 2:
        got.zero_()
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        for turn in range(2):
            for peer in range(world):
                assert torch.equal(got[turn, peer], numbers(10 * peer + rank + 5 * turn))


def any_dtype_and_size(rank: int, world: int) -> None:
    for dtype in (torch.bool, torch.uint8, torch.bfloat16, torch.int64, torch.complex64, torch.float8_e4m3fn):
        for size in (0, 1, 3, 70_000):
            mine, got = torch.ones(size).to(dtype), torch.zeros(size).to(dtype)
            dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, (rank + 1) % world), dist.P2POp(dist.irecv, got, (rank - 1) % world)])[
                0
            ].wait()
            assert torch.equal(got.view(torch.uint8), mine.view(torch.uint8)), (dtype, size)


def without_gaps(rank: int, world: int) -> None:
    """A tensor with gaps is refused; a batch with one sends nothing, and the next one is whole."""
    gaps = torch.zeros(4, 4).T[:, :2].T[:, ::2]
    with pytest.raises(UsageError, match="is not contiguous"):
        dist.isend(gaps, (rank + 1) % world)
    with pytest.raises(UsageError, match="is not contiguous"):
        dist.batch_isend_irecv([dist.P2POp(dist.isend, numbers(99), (rank + 1) % world), dist.P2POp(dist.irecv, gaps, (rank - 1) % world)])
    receives_before_sends(rank, world)


def sub_groups(rank: int, world: int) -> None:
    """The kit of all ranks is open, so two of three need nobody else for the first message of their group. Tags are the group's own."""
    dist.all_reduce(torch.zeros(1))
    group = dist.new_group([0, 2])
    if rank == 0:
        dist.send(numbers(1), 2)
        dist.send(numbers(2), 2, group=group)
    elif rank == 2:
        dist.recv(inner := torch.empty(5), 0, group=group)
        dist.recv(outer := torch.empty(5), 0)
        assert torch.equal(inner, numbers(2)) and torch.equal(outer, numbers(1))


def coalesced_by_hand(rank: int, world: int) -> None:
    got = torch.empty(5)
    with c10d._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        dist.isend(numbers(rank), (rank + 1) % world)
        dist.irecv(got, (rank - 1) % world)
    manager.wait()
    assert torch.equal(got, numbers((rank - 1) % world))


def counted(rank: int, world: int, work: Callable[[int, int], None]) -> set[tuple[str, str]]:
    backend.reset_counts()
    work(rank, world)
    return {(count.ran_on, count.reason) for count in backend.counts() if count.operation in ("send", "recv")}


WORKS = [
    receives_before_sends, tags_in_the_other_order, batches, any_dtype_and_size, without_gaps, sub_groups, coalesced_by_hand,
]  # fmt: skip


@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.__name__)
def test_messages_arrive_by_the_kit(ranks: RankPool, work: Callable[[int, int], None]) -> None:
    for places in ranks.run(counted, work):
        assert places <= {("kit", "")}


@contextlib.contextmanager
def capture(number: int) -> Iterator[None]:
    """The calls inside are in a capture, as far as the backend can tell."""
    lane = lane_of_all()
    lane.captured = number
    try:
        yield
    finally:
        lane.captured = 0


def lane_of_all() -> Any:
    assert isinstance(dist.group.WORLD, backend.PeerlaneGroup)
    return dist.group.WORLD._provider.lane(torch.device("cpu"))


def launches_since(before: int = 0) -> list[int]:
    """How many messages each launch had."""
    return list(lane_of_all().batches[before:])


def captured_one_by_one(rank: int, world: int) -> list[int]:
    """Three for each pair and a batch: what was posted before a wait, a batch or a collective is one launch, and every byte is right."""
    dist.all_reduce(torch.zeros(1))
    before = len(launches_since())
    right, left = (rank + 1) % world, (rank - 1) % world
    got = torch.zeros(3, 5)
    with capture(1):
        works = [dist.isend(numbers(10 * rank + turn), right) for turn in range(3)]
        works += [dist.irecv(got[turn], left) for turn in range(3)]
        assert launches_since(before) == []
        for work in reversed(works):
            assert work is not None and work.wait()
        assert torch.equal(got, torch.stack([numbers(10 * left + turn) for turn in range(3)]))
        for follow in (collective, batch, blocking):
            got.zero_()
            works = [dist.isend(numbers(rank), right), dist.irecv(got[0], left)]
            follow(rank, world)
            for work in works:
                assert work is not None and work.wait()
            assert torch.equal(got[0], numbers(left))
    return launches_since(before)


def collective(rank: int, world: int) -> None:
    before = len(launches_since())
    dist.all_reduce(torch.zeros(1))
    assert launches_since(before) == [2]


def batch(rank: int, world: int) -> None:
    got, right, left = torch.zeros(5), (rank + 1) % world, (rank - 1) % world
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, numbers(7), right, tag=1), dist.P2POp(dist.irecv, got, left, tag=1)]):
        work.wait()
    assert torch.equal(got, numbers(7))


def blocking(rank: int, world: int) -> None:
    dist.send(numbers(8), (rank + 1) % world, tag=2)
    dist.recv(got := torch.zeros(5), (rank - 1) % world, tag=2)
    assert torch.equal(got, numbers(8))


def test_messages_of_a_capture_are_launched_together(ranks: RankPool) -> None:
    assert ranks.run(captured_one_by_one) == [[6, 2, 2, 2, 3, 1]] * RANKS


def more_than_a_launch_has(rank: int, world: int) -> list[int]:
    dist.all_reduce(torch.zeros(1))
    before, got = len(launches_since()), torch.zeros(40, 5)
    with capture(1):
        works = []
        for turn in range(40):
            works += [dist.isend(numbers(rank + turn), (rank + 1) % world), dist.irecv(got[turn], (rank - 1) % world)]
        for work in works:
            assert work is not None and work.wait()
    assert torch.equal(got, torch.stack([numbers((rank - 1) % world + turn) for turn in range(40)]))
    return launches_since(before)


def test_many_captured_messages_are_several_launches(ranks: RankPool) -> None:
    assert ranks.run(more_than_a_launch_has) == [[64, 16]] * RANKS


def not_waited_for(rank: int, world: int) -> list[int]:
    """The next call raises, of whatever kind; the one after it works."""
    dist.all_reduce(torch.zeros(1))
    before, right, left = len(launches_since()), (rank + 1) % world, (rank - 1) % world
    calls: list[Callable[[], object]] = [
        lambda: dist.all_reduce(torch.zeros(1)),
        dist.barrier,
        lambda: dist.send(numbers(0), right),
        lambda: dist.recv(numbers(0), left),
    ]
    for call in calls:
        with capture(1):
            works = [dist.isend(numbers(rank), right), dist.irecv(torch.zeros(5), left)]
        with pytest.raises(UsageError, match=r"lacks messages \(2\)"):
            call()
        with pytest.raises(UsageError, match="lacks messages"):
            works[0].wait()  # type: ignore[union-attr]
    assert launches_since(before) == []
    receives_before_sends(rank, world)
    return launches_since(before)


def test_a_captured_message_without_a_wait_is_an_error(ranks: RankPool) -> None:
    assert ranks.run(not_waited_for) == [[1, 1]] * RANKS


def from_anybody(rank: int, world: int) -> None:
    """Goes where NCCL refuses it, as on other machines; gloo serves it."""
    if rank == 0:
        group = dist.group.WORLD
        assert isinstance(group, backend.PeerlaneGroup)
        group._children["cpu"].send([numbers(0)], 1, 0).wait()
    elif rank == 1:
        assert dist.recv(got := torch.empty(5)) == 0
        assert torch.equal(got, numbers(0))


def test_a_receive_from_anybody_says_why_the_kit_does_not_serve_it(ranks: RankPool) -> None:
    assert ranks.run(counted, from_anybody)[1] == {("gloo", "a receive from any rank; the kit serves those that name it")}
