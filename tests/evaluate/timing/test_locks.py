"""Locks: what lies in the arena before a locked call has its key, and after."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from peerlane.evaluate.memory.guards import GuardBands, argument_regions, output_regions
from peerlane.evaluate.memory.slots import ArgumentSlots, OutputRegions, end_of, place_slots, slot_range
from peerlane.evaluate.processes.fork_client import memory_file
from peerlane.evaluate.ranks.trusted import TrustedRank
from peerlane.evaluate.timing.locks import HostLocks
from peerlane.evaluate.timing.turnstile import KEY_BYTES, LockedCalls, Page, _Turnstile
from peerlane.problems import get
from peerlane.problems.contract import Draw, describe

CPU = torch.device("cpu")
KEY, OTHER = b"k" * KEY_BYTES, b"o" * KEY_BYTES


def locks() -> HostLocks:
    return HostLocks(Page.of(memory_file("test")))


@pytest.mark.parametrize("size", [0, 1, 63, 1000])
def test_what_is_locked_is_opened_by_its_key_alone(size: int) -> None:
    plain = torch.arange(size, dtype=torch.uint8)
    locked, opened, wrong = (torch.zeros_like(plain) for _ in range(3))
    locks().lock(plain, locked, KEY)
    locks().lock(locked, opened, KEY)
    locks().lock(locked, wrong, OTHER)
    assert torch.equal(opened, plain)
    if size > 1:
        assert not torch.equal(locked, plain) and not torch.equal(wrong, plain)
    locks().lock(locked, locked, KEY)
    assert torch.equal(locked, plain)


def test_digests_depend_on_every_byte_and_on_the_key() -> None:
    data = torch.arange(100, dtype=torch.uint8)
    changed = [data.clone() for _ in range(100)]
    for place, item in enumerate(changed):
        item[place] += 1
    found = locks().digests([data, data[:50], data, *changed], [KEY, KEY, OTHER, *[KEY] * 100])
    assert len(set(found)) == len(found)
    assert locks().digests([data], [KEY]) == found[:1]


def test_a_call_commits_to_its_answer_under_the_key_that_it_was_given() -> None:
    memory = memory_file("test")
    page, mine = Page.of(memory), HostLocks(Page.of(memory))
    data, answer = torch.arange(10, dtype=torch.uint8), torch.zeros(5, dtype=torch.uint8)
    locks().lock(data, data, KEY)
    layout, _ = place_slots([describe(torch.empty(10, dtype=torch.uint8))], 0)
    inputs = ArgumentSlots(data, layout, str)
    layout, _ = place_slots([describe(torch.empty(5, dtype=torch.uint8))], 0)
    before, behind = mine.hooks([(3, 0, 8)], inputs, OutputRegions(answer, layout, CPU), 5.0)
    assert set(before) == set(behind) == {3}
    page.released, page.key[:] = 8, KEY
    before[3]()
    assert torch.equal(data, torch.arange(10, dtype=torch.uint8)) and page.begun == 8 and page.committed == 0
    answer[:] = 7
    behind[3]()
    assert page.committed == 8 and [(page.digest[0], page.digest[1])] == locks().digests([answer], [KEY])


def test_a_key_that_never_comes_is_not_waited_for_longer_than_is_said() -> None:
    enter, leave = locks().door(torch.zeros(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8), 0.01)
    enter(1)
    leave(1)


@pytest.mark.parametrize(("begun", "committed", "said_all"), [(1, 1, False), (2, 1, False), (1, 9, False), (2, 2, True), (9, 9, True)])
def test_a_rank_has_said_all_when_it_has_come_to_its_last_call_and_committed_itself(begun: int, committed: int, said_all: bool) -> None:
    memory = memory_file("test")
    turnstile = _Turnstile(Page.of(memory), 0, LockedCalls.draw([0, 1, 2], [0, 2], 1, 1))
    page = Page.of(memory)
    page.begun, page.committed = begun, committed
    assert turnstile.has_said_all == said_all


class Opened:
    """A case that is laid out by hand: three slots, of which the second has no tensors, and an output each."""

    def __init__(self) -> None:
        self.trees: list[tuple[Any, ...]] = [
            (torch.arange(40.0), torch.arange(7)),
            ("nothing", 1),
            (torch.ones(300), torch.full((3,), 5.0)),
        ]
        layout, _ = place_slots(map(describe, self.trees))
        self.input_bytes = end_of(layout)
        outputs, _ = place_slots([describe(torch.empty(6))] * 3)
        self.output_bytes = end_of(outputs)
        self.staging = torch.full((self.input_bytes,), 77, dtype=torch.uint8)
        self.private = ArgumentSlots(self.staging, layout, str)
        self.private.fill(self.trees)
        data = torch.zeros(self.input_bytes + self.output_bytes, dtype=torch.uint8)
        self.arena = types.SimpleNamespace(data=data)
        self.public = ArgumentSlots(data[: self.input_bytes], layout, str)
        regions = [*argument_regions(layout, ["first", "second"]), *output_regions(outputs, self.input_bytes)]
        case = get(1).cases("small", 2)[0]
        draw = Draw(secret="test", case_key=case.key, slot=0, block=0, rank=0, device=CPU)
        self.guards = GuardBands(data, regions, draw)

    def let_go(self) -> None:
        """Nothing is held."""

    def spans(self, slot: int) -> list[slice]:
        return [slot_range(self.private.layout[slot])]


@pytest.mark.parametrize("locked_slots", [(), (0,), (0, 1), (0, 1, 2), (2,)])
def test_locked_slots_are_never_in_the_arena_before_their_key_and_whole_after_it(locked_slots: tuple[int, ...]) -> None:
    current, rank = Opened(), TrustedRank({"world_size": 2, "device": "cpu"}, 0, memory_file("test"))
    rank._open["timed"] = current  # type: ignore[assignment]
    locked = LockedCalls.draw([0, 1, 2], locked_slots, 1, 2)
    data, seen = current.arena.data, list[bool]()

    class Watched:
        """Looks at the arena whenever something is written to a locked slot."""

        def lock(self, source: torch.Tensor, target: torch.Tensor, key: bytes) -> None:
            pairs = ((current.public.tensors[slot], current.private.tensors[slot]) for slot in locked_slots)
            seen.extend(torch.equal(theirs, mine) for pair in pairs for theirs, mine in zip(*pair, strict=True))
            HostLocks.lock(rank.locks, source, target, key)  # type: ignore[arg-type]

    locks_of_rank = rank.locks
    rank.__dict__["locks"] = Watched()
    rank.publish_inputs({"space": "timed", "slots": 3, "keys": locked.written_keys(0)})
    assert not any(seen), "not even for a moment"
    tensors = [list(zip(*pair, strict=True)) for pair in zip(current.private.tensors, current.public.tensors, strict=True)]
    for slot in (0, 2):
        assert [torch.equal(mine, theirs) for mine, theirs in tensors[slot]] == [slot not in locked_slots] * 2
        if slot in locked_slots:
            place = current.spans(slot)[0]
            locks_of_rank.lock(data[place], data[place], locked.keys[slot][0])
    assert all(torch.equal(mine, theirs) for pairs in tensors for mine, theirs in pairs)
    assert current.guards.out_of_bounds() is None, "bands that lie in a slot are unlocked with it"
    assert bool((data[current.input_bytes + 256 : current.input_bytes + 280] == 255).all())
