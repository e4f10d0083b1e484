"""Cores for timed threads: whose they are, and which is chosen."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from peerlane.evaluate.timing import cores
from peerlane.evaluate.timing.cores import TimedCore, cores_beside, cores_of_rank, pace_us, parts, physical_cores


@pytest.fixture
def sixteen(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPUs 0 to 15; 0 and 8 are one core, and so on."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(cores, "_siblings", lambda cpu: f"{cpu % 8},{cpu % 8 + 8}")


@pytest.mark.usefixtures("sixteen")
def test_builders_stay_off_the_cores_of_timed_ranks() -> None:
    assert physical_cores(set(range(16))) == list(range(8))
    left = cores_beside(4)
    assert left and all((cpu + 8) % 16 in left for cpu in left) and len(left) == 8
    assert cores_beside(8) == set(range(16))  # none to warm group


@pytest.mark.parametrize(("machine", "world_size", "each"), [(64, 4, 7), (64, 2, 8), (256, 8, 8), (9, 8, 1), (8, 8, 0), (2, 4, 0)])
def test_ranks_choose_from_cores_of_their_own(monkeypatch: pytest.MonkeyPatch, machine: int, world_size: int, each: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(machine)))
    monkeypatch.setattr(cores, "_siblings", str)
    shares = [cores_of_rank(rank, world_size) for rank in range(world_size)]
    assert [len(share) for share in shares] == [each] * world_size
    assert len({core for share in shares for core in share}) == each * world_size and all(0 not in share for share in shares)


class Machine:
    """Cores with given paces, on which the calling thread goes about."""

    def __init__(self, paces: dict[int, float]) -> None:
        self.paces, self.here, self.asked, self.moves = paces, -1, [], 0

    def move(self, _: int, to: set[int]) -> None:
        self.here = next(iter(to)) if len(to) == 1 else -1
        self.moves += 1

    def pace(self) -> float:
        self.asked.append(self.here)
        return self.paces[self.here]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine({1: 20.0, 2: 19.0, 3: 10.0, 4: 11.0})
    monkeypatch.setattr(cores, "_get_affinity", lambda _: {1, 2, 3, 4})
    monkeypatch.setattr(cores, "_set_affinity", made.move)
    monkeypatch.setattr(cores, "pace_us", made.pace)
    with TimedCore([]).taken():
        yield made
    assert made.here == -1, "the thread was left on one core"


def test_at_first_all_cores_are_tried_and_the_fastest_is_taken(machine: Machine) -> None:
    core = TimedCore([1, 2, 3, 4])
    assert core.settle(0.0) == 10.0 and machine.here == 3 and machine.asked == [1, 2, 3, 4]
    assert machine.moves == 5


def test_a_core_at_full_speed_is_kept_and_a_slow_one_left_for_the_first_that_is_not(machine: Machine) -> None:
    core = TimedCore([1, 2, 3, 4])
    core.settle(10.0)
    assert machine.here == 3 and machine.asked == [1, 2, 3]
    core.settle(10.0)
    assert machine.here == 3 and machine.asked == [1, 2, 3, 3] and machine.moves == 4
    machine.paces[3] = 18.0
    core.settle(10.0)
    assert machine.here == 4 and machine.asked[4:] == [3, 4]
    machine.paces[4] = 18.0
    assert core.settle(10.0) == 18.0 and machine.asked[6:] == [4, 1, 2, 3]


def test_threads_that_begin_at_the_same_place_find_the_same_core(machine: Machine) -> None:
    mine, theirs = TimedCore([1, 2, 3, 4]), TimedCore([1, 2, 3, 4])
    mine.settle(10.0)
    for first, tried, number in ((1, [2, 3], 3), (3, [4], 4), (4, [1, 2, 3], 3), (10, [3], 3)):
        for core in (mine, theirs):
            machine.asked.clear()
            core.settle(10.0, first)
            assert (machine.asked, machine.here) == (tried, number)


def test_what_a_core_at_full_speed_does_is_remembered(machine: Machine) -> None:
    core = TimedCore([1, 2, 3, 4])
    core.settle()
    machine.paces[3] = 18.0
    core.settle()
    assert machine.here == 4 and machine.asked[4:] == [3, 4]


def test_untimed_work_looks_for_a_core_only_where_nobody_has_lately(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(cores, "_clock", lambda: now)
    core = TimedCore([1, 2, 3, 4])
    core.settle_anew()
    assert machine.here == 3 and machine.asked == [1, 2, 3, 4]
    machine.paces[3] = 18.0
    now += 0.04
    machine.here = -1
    core.settle_anew()
    assert machine.here == 3 and len(machine.asked) == 4
    now += 0.02
    core.settle_anew()
    assert machine.here == 4 and machine.asked[4:] == [3, 4]
    now += 0.04
    core.settle(10.0)
    now += 0.04
    core.settle_anew()
    assert machine.asked[6:] == [4]


def test_where_all_are_slow_the_least_slow_is_taken(machine: Machine) -> None:
    machine.paces |= {3: 21.0, 4: 18.0}
    core = TimedCore([1, 2, 3, 4])
    assert core.settle(10.0) == 18.0 and machine.here == 4


def test_without_cores_of_its_own_a_thread_stays_where_it_is() -> None:
    everywhere = os.sched_getaffinity(0)
    assert TimedCore([]).settle(0.0) > 0 and os.sched_getaffinity(0) == everywhere


def test_a_thread_is_on_the_core_and_free_again_behind_it() -> None:
    everywhere = os.sched_getaffinity(0)
    core = TimedCore([min(everywhere)])

    def fail() -> None:
        with core.taken():
            core.settle()
            assert os.sched_getaffinity(0) == {min(everywhere)}
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert os.sched_getaffinity(0) == everywhere
    with TimedCore([]).taken():
        TimedCore([]).settle_anew()
        assert os.sched_getaffinity(0) == everywhere


def test_pace_is_a_time() -> None:
    assert 0.1 < pace_us() < 10_000


@pytest.mark.parametrize("calls", [1, 2, 3, 4, 5, 11, 12, 160])
@pytest.mark.parametrize("most", [1, 4, 7])
def test_a_block_has_up_to_so_many_parts_of_nearly_the_same_size(calls: int, most: int) -> None:
    found = parts(calls, most)
    assert [position for part in found for position in part] == list(range(calls))
    sizes = [len(part) for part in found]
    assert len(found) == min(most, (calls + 1) // 2) and max(sizes) - min(sizes) <= 1
