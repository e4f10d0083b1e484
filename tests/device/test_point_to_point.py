"""Messages between two ranks under the emulator: no race, no deadlock, every byte right; with one line broken, caught."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from device.runs import require_clean
from device.twins import write_header
from peerlane.device import compile_cubin
from peerlane.device.collectives.point_to_point import SOURCE, Slots, Space, Transfer, space_bytes, table
from peerlane.device.tools.lint import lint
from peerlane.emulator import Scenario, check

SLOTS = Slots(count=4, tile_bytes=64, parts=2)
THREADS = 32
HEADER = "collectives/point_to_point.cuh"


@dataclass(frozen=True)
class Message:
    """``nbytes`` from one rank to another under a tag."""

    source: int
    receiver: int
    nbytes: int
    tag: int = 0


class Messages:
    """A scenario of messages; ``send`` and ``receive`` give the streams and the batches in which each end posts them."""

    def __init__(self, messages: Sequence[Message], world_size: int = 2, headers: Sequence[Path] = ()) -> None:
        self.scenario = Scenario("messages", SOURCE, world_size, defines=SLOTS.defines(), include_dirs=headers)
        self.arena = self.scenario.arena(space_bytes(world_size, SLOTS))
        self.space = Space.take(self.arena, world_size, SLOTS)
        self.messages, self.world_size = messages, world_size
        generator = torch.Generator().manual_seed(1)
        size = max(message.nbytes for message in messages) + 3
        self.buffers = []
        for number, message in enumerate(messages):
            sent = torch.randint(1, 256, (size,), dtype=torch.uint8, generator=generator)
            untouched = torch.zeros(size, dtype=torch.uint8)
            got = untouched.clone()
            got[1 : 1 + message.nbytes] = sent[2 : 2 + message.nbytes]
            self.buffers.append(
                (
                    self.scenario.buffer(f"sent {number}", [sent] * world_size),
                    self.scenario.buffer(
                        f"got {number}",
                        [untouched] * world_size,
                        [got if rank == message.receiver else untouched for rank in range(world_size)],
                    ),
                )
            )

    def post(self, sends: Sequence[int], receives: Sequence[int], stream: int = 0) -> None:
        """One launch on every rank: of these messages, the sends and receives that are the rank's own."""

        def own(rank: int) -> list[Transfer]:
            out = [(self.messages[i], self.buffers[i][0].addresses[rank] + 2, False) for i in sends]
            into = [(self.messages[i], self.buffers[i][1].addresses[rank] + 1, True) for i in receives]
            return [
                Transfer(at, message.nbytes, message.source if comes else message.receiver, comes, f"tag {message.tag}")
                for message, at, comes in (*out, *into)
                if rank == (message.receiver if comes else message.source)
            ]

        tables = [table(own(rank), SLOTS) for rank in range(self.world_size)]
        self.scenario.launch(
            "point_to_point",
            lambda rank: max(1, tables[rank][1]),
            THREADS,
            (self.arena, self.space, lambda rank: tables[rank][0]),
            stream=stream,
        )


def in_one_batch() -> Messages:
    """Between all pairs, each to itself too: empty, odd, several tiles, several messages of one key."""
    sizes = (0, 1, 63, 129, 300)
    found = [Message(a, b, sizes[(2 * a + b + k) % 5], k % 2) for a in range(2) for b in range(2) for k in range(3)]
    work = Messages([*found, Message(0, 1, 70, 5), Message(0, 1, 70, 5), Message(0, 1, 70, 5)])
    every = range(len(work.messages))
    work.post(every, every)
    return work


def receives_first() -> Messages:
    """Every rank posts its receive before its send, on a stream of its own."""
    work = Messages([Message(0, 1, 200), Message(1, 0, 200)])
    work.post([], [0, 1], stream=1)
    work.post([0, 1], [], stream=2)
    return work


def received_in_the_other_order() -> Messages:
    """Short messages wait in slots while their sender goes on."""
    work = Messages([Message(0, 1, 60, tag) for tag in range(3)])
    for number in range(3):
        work.post([number], [], stream=1)
    for number in reversed(range(3)):
        work.post([], [number], stream=2)
    return work


def long_ones_in_the_other_order() -> Messages:
    """Each send and each receive on a stream of its own."""
    work = Messages([Message(0, 1, 300, tag) for tag in range(2)])
    for number in range(2):
        work.post([number], [], stream=1 + number)
        work.post([], [1 - number], stream=3 + number)
    return work


def round_and_round() -> Messages:
    """More messages of one key than slots, one behind the other."""
    work = Messages([Message(rank, (rank + 1) % 3, 100, 0) for _ in range(6) for rank in range(3)], world_size=3)
    for turn in range(6):
        own = range(3 * turn, 3 * turn + 3)
        work.post(own, [], stream=1)
        work.post([], own, stream=2)
    return work


CASES = [in_one_batch, receives_first, received_in_the_other_order, long_ones_in_the_other_order, round_and_round]


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_messages_arrive_whole_in_every_schedule(make: object) -> None:
    require_clean(make().scenario, schedules=60)  # type: ignore[operator]


def test_long_sends_ahead_of_receives_in_one_queue_deadlock() -> None:
    """Why the backend launches the messages of a captured graph together: its branches may share a queue."""
    messages = [Message(0, 1, 300), Message(1, 0, 300)]
    apart, together = Messages(messages), Messages(messages)
    apart.post([0, 1], [])
    apart.post([], [0, 1])
    together.post([0, 1], [0, 1])
    assert "deadlock" in {finding.kind for finding in check(apart.scenario, schedules=3).findings}
    require_clean(together.scenario, schedules=30)


@dataclass(frozen=True)
class Twin:
    """One line of the header changed so that the protocol is wrong."""

    right: str
    wrong: str
    found: str = "race"


FOUND = """            ptx::fence_system();
            if (!fits(post)) continue;
            ptx::fence_system();
"""
POSTED = "ptx::exchange_relaxed_system(&there->full"
READ, GIVEN = "tiles_.length(number));\n", "            if (threadIdx.x == 0) give_back("
CLEARED = "        __syncthreads();  // thread 0 has cleared the post of the message before\n"
MORE = "threadIdx.x == 0 && number > 0 && !await_leave"
TAKEN = "if (ptx::exchange_relaxed_system(taken, 1) == 0) {"
EARLIER = "!reached(full, earliest))) found = other"
TWINS = {
    "latest_first": Twin(EARLIER, EARLIER.removeprefix("!"), found="wrong_result"),
    "posted_without_release": Twin(f"        ptx::fence_system();\n        {POSTED}", f"        {POSTED}"),
    "found_without_acquire": Twin(FOUND, "if (!fits(post)) continue;\n"),
    "given_back_unread": Twin(f"{READ}            __syncthreads();\n{GIVEN}", READ + GIVEN),
    "found_before_the_last_is_cleared": Twin(CLEARED, "", found="wrong_result"),
    "next_tile_without_leave": Twin(MORE, MORE.replace("number > 0", "number > 9")),
    "slot_of_another": Twin(TAKEN, TAKEN.replace("== 0", "< 2")),
}


@pytest.mark.parametrize("name", TWINS)
def test_a_broken_twin_is_caught(name: str, tmp_path: Path) -> None:
    twin = TWINS[name]
    folder = write_header(tmp_path, HEADER, twin.right, twin.wrong)
    several = [
        *(Message(0, 1, 70) for _ in range(3)),
        *(Message(1, 0, 50) for _ in range(3)),
        *(Message(r, 1 - r, 400, 1) for r in range(2)),
    ]
    work = Messages(several, headers=(folder,))
    work.post([0, 1, 2, 6, 7], [0, 1, 2, 6, 7])
    for number in range(3, 6):
        work.post([number], [], stream=1)
        work.post([], [number], stream=2)
    report = check(work.scenario, schedules=20)
    assert twin.found in {finding.kind for finding in report.findings}, report


def test_a_table_chains_what_has_one_key_and_sends_first() -> None:
    """Blocks of the first carry the others; other sizes, tags, peers and directions have blocks of their own."""
    one = Transfer(8, 100, 1, True, "tag 0")
    rows, blocks = table(
        [one, Transfer(16, 100, 1, False, "tag 0"), Transfer(24, 100, 1, True, "tag 0"), Transfer(32, 0, 1, True, "tag 0")], SLOTS
    )
    assert (rows.count, blocks) == (4, 5)
    assert [(row.at, row.first_block, row.next) for row in rows.list[:4]] == [(16, 0, 0), (8, 2, 2), (24, 0xFFFFFFFF, 0), (32, 4, 0)]


def test_the_kernel_compiles_for_gpus() -> None:
    assert lint(compile_cubin(SOURCE, defines=Slots().defines()).ptx()) == []
