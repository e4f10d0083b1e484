"""What a group keeps: bounded, least recently used first, the same on all ranks; and what is never evicted."""

import timeit
from collections.abc import Callable
from typing import Any

import pytest
import torch

from device.runs import run_calls
from peerlane.device import Arena, DeclaredKernel, Epochs, Flags, Group, group_of, per_group
from peerlane.device.host import group_cache
from peerlane.device.host.group_cache import GroupCache
from peerlane.errors import UsageError

RANKS, MOST = 2, 3


@pytest.fixture(autouse=True)
def few_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_cache, "MOST_COLLECTIVE", MOST)
    monkeypatch.setattr(group_cache, "MOST_LOCAL", MOST)


def on_ranks(solution: Callable[[Group], Any], calls: int = 1) -> list[Any]:
    """What the last call of ``solution(group)`` gives on every emulated rank."""
    return run_calls(lambda rank: lambda: solution(group_of()), [[()] * RANKS] * calls).clean()[-1]


@per_group
def with_arena(group: Group, number: int) -> Arena:
    arena = Arena(64, group, name=f"kernel {number}")
    arena.take(64)
    return arena


@per_group
def without_arena(group: Group, number: int) -> object:
    return object()


@per_group
def over_arena(group: Group, number: int) -> Arena:
    return with_arena(group, number)


@per_group
def over_two(group: Group, number: int) -> list[Arena]:
    return [with_arena(group, number), Arena(64, group)]


@per_group
def one_for_the_group(group: Group) -> Arena:
    return Arena(64, group)


def open_arenas(arenas: list[Arena]) -> list[int]:
    return [number for number, arena in enumerate(arenas) if not arena.closed]


def test_the_least_recently_used_memory_makes_room() -> None:
    def solution(group: Group) -> list[int]:
        arenas = [with_arena(group, number) for number in range(MOST)]
        assert with_arena(group, 0) is arenas[0]
        arenas.append(with_arena(group, 3))
        arenas.append(with_arena(group, 4))
        assert with_arena(group, 1) is not arenas[1]
        report = group.memory_report()
        assert list(report.by_kernel) == ["kernel 1", "kernel 3", "kernel 4"] and report.leased_bytes == sum(report.by_kernel.values())
        return open_arenas(arenas)

    assert on_ranks(solution) == [[3, 4]] * RANKS


def test_ranks_that_used_others_last_evict_the_same() -> None:
    def solution(group: Group) -> list[int]:
        arenas = [with_arena(group, number) for number in range(MOST)]
        with_arena(group, group.rank)  # 1, 2, 0 on rank 0; 0, 2, 1 on rank 1
        return open_arenas([*arenas, with_arena(group, 3)])

    assert on_ranks(solution) == [[0, 2, 3]] * RANKS


def test_what_a_graph_uses_stays() -> None:
    def solution(group: Group) -> list[int]:
        arenas = [with_arena(group, 0)]
        if group.rank == 1:
            group.cache.captures = lambda: True
        with_arena(group, 0)
        group.cache.captures = lambda: False
        return open_arenas([*arenas, *(with_arena(group, number) for number in range(1, 6))])

    assert on_ranks(solution) == [[0, 4, 5]] * RANKS


def test_a_captured_launch_of_a_kept_kernel_stays() -> None:
    def solution(group: Group) -> list[int]:
        arenas = [with_arena(group, 0)]
        group.cache.captures = lambda: True
        assert arenas[0].view.before_launch is not None
        arenas[0].view.before_launch()
        group.cache.captures = lambda: False
        return open_arenas([*arenas, *(with_arena(group, number) for number in range(1, 6))])

    assert on_ranks(solution) == [[0, 4, 5]] * RANKS


def test_memory_goes_together_with_what_was_made_over_it() -> None:
    def solution(group: Group) -> tuple[list[int], list[int], bool]:
        over = over_arena(group, 0)
        two = over_two(group, 1)
        arenas = [over, *two]
        with_arena(group, 2)
        first = open_arenas(arenas)
        with_arena(group, 3)
        with_arena(group, 4)
        return first, open_arenas(arenas), over_arena(group, 0) is over

    # Number 1 can not go before what was made with it, which was used later than number 0.
    assert on_ranks(solution) == [([1, 2], [], False)] * RANKS


def test_the_only_entry_of_a_function_stays() -> None:
    def solution(group: Group) -> bool:
        one = one_for_the_group(group)
        for number in range(5):
            with_arena(group, number)
        return one_for_the_group(group) is one and not one.closed

    assert on_ranks(solution) == [True] * RANKS


def test_a_rank_s_own_entries_are_bounded_apart() -> None:
    def solution(group: Group) -> tuple[int, bool, bool]:
        arena, first = with_arena(group, 0), without_arena(group, 0)
        for number in range(1, 10 + group.rank):
            without_arena(group, number)
        entries = len(group.cache.entries)
        return entries, with_arena(group, 0) is arena, without_arena(group, 0) is first

    assert on_ranks(solution) == [(MOST + 1, True, False)] * RANKS


def test_memory_of_a_make_that_failed_is_given_back() -> None:
    made: list[Arena] = []

    @per_group
    def fails(group: Group, number: int) -> None:
        made.append(Arena(64, group))
        raise UsageError("no")

    def solution(group: Group) -> int:
        with pytest.raises(UsageError, match="no"):
            fails(group, 1)
        return len(group.cache.entries)

    assert on_ranks(solution) == [0] * RANKS
    assert len(made) == RANKS and all(arena.closed for arena in made)


SOURCE = """
#include <peerlane/peers/peers.cuh>
using namespace peerlane;
extern "C" __global__ void meet_once(const __grid_constant__ Arena arena, const __grid_constant__ MeetOnce args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    Peers<WORLD_SIZE>(arena, args.flags).barrier(0, epoch);
}
"""
MEET_ONCE = DeclaredKernel("meet_once", SOURCE, flags=Flags(), epochs=Epochs())


def test_a_kept_launch_that_made_room_says_so() -> None:
    @per_group
    def meet(group: Group, number: int) -> Any:
        return MEET_ONCE.bind(group, grid=1, block=32, sizes={"flags": 1})

    def solution(group: Group) -> None:
        kept = meet(group, 0)
        kept()
        for number in range(1, 5):
            meet(group, number)()
        with pytest.raises(UsageError, match=r"meet_once made room .* look it up in each call"):
            kept()
        with pytest.raises(UsageError, match="look it up in each call"):
            kept.arena.tensor(0, (1,), torch.uint8)
        meet(group, 0)()

    on_ranks(solution)


def test_a_launch_with_a_closed_arena_is_refused() -> None:
    def solution(group: Group) -> None:
        kept = MEET_ONCE.bind(group, grid=1, block=32, sizes={"flags": 1})
        kept()
        kept.reserved.close()
        kept.reserved.close()
        with pytest.raises(UsageError, match="the arena of meet_once is closed"):
            kept()

    on_ranks(solution)


def test_a_look_up_costs_less_than_two_microseconds() -> None:
    cache = GroupCache()
    cache.get("key", lambda: 1)
    seconds = min(timeit.repeat(lambda: cache.get("key", lambda: 1), number=1000, repeat=20)) / 1000
    assert seconds < 2e-6
