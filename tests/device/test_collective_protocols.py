"""The collectives under the emulator: no race, no deadlock and every word right, under many schedules; with one line broken, caught.

The device source is that of the GPU, but for rings of smaller tiles, so that a little data goes round them several times.
"""

import ctypes
import itertools
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from device.runs import require_clean
from device.twins import write_header
from peerlane.device import compile_cubin
from peerlane.device.collectives import messages, plans
from peerlane.device.collectives.kernels import KERNELS, ROUNDS
from peerlane.device.collectives.messages import Member
from peerlane.device.collectives.workspace import Channels, Messages, Rings, Workspace
from peerlane.device.host.element_types import ELEMENT_TYPES
from peerlane.device.tools.lint import lint
from peerlane.emulator import Scenario, check
from peerlane.emulator.build import compile_program

RINGS = Rings(tile_bytes=256, summing_warps=2, depth=8, stages=6, in_flight=3)  # so short that small messages go round
BLOCKS = 2
PACKET_BUFFER_BYTES = 16384
SIZES = (1500, 4, 2604)
"""Bytes of the tensor in successive launches: a ragged end, one word, several turns of a ring."""
BRIEF_SIZES = (4, 1604)
"""For rings at four ranks, where 352 threads a block make a schedule slow: one word, then more than one turn through a single block."""


ROOM, ROOM_THREADS = 16, 12
"""Packets of a rank in a buffer that is too small for most messages, and the threads of a block: less than that, of two blocks more."""


def take_workspace(scenario: Scenario, world_size: int, packet_buffer_bytes: int, rings: Rings) -> tuple[object, Workspace]:
    arena = scenario.arena(1 << 20)
    pairs = BLOCKS * world_size

    def channels() -> Channels:
        tiles = arena.take(BLOCKS * (world_size - 1) * rings.depth * rings.tile_bytes)
        return Channels(tiles, arena.take(2 * pairs * 128), arena.take(2 * pairs * 4), BLOCKS)

    return arena, Workspace(
        epochs=arena.take(1024),
        packets=arena.take(2 * packet_buffer_bytes),
        packet_buffer_bytes=packet_buffer_bytes,
        copies=channels(),
        sums=channels(),
    )


class Collectives:
    """A scenario to which launches of collectives are added, each with the result that it must have."""

    def __init__(
        self,
        world_size: int,
        kernels: tuple[str, ...],
        dtype: torch.dtype = torch.int32,
        headers: tuple[Path, ...] = (),
        source: str = "",
        packet_buffer_bytes: int = PACKET_BUFFER_BYTES,
        packet_threads: int = 64,
        rings: Rings = RINGS,
    ) -> None:
        defines = {"WORLD_SIZE": world_size, "ELEMENT": ELEMENT_TYPES[dtype], **rings.defines()}
        texts = (KERNELS[kernel].text(kernel) for kernel in kernels)
        self.scenario = Scenario("+".join(kernels), "".join((*texts, source)), world_size, defines=defines, include_dirs=headers)
        self.world_size, self.dtype, self.rings = world_size, dtype, rings
        self.arena, self.workspace = take_workspace(self.scenario, world_size, packet_buffer_bytes, rings)
        self.packet_threads = packet_threads
        self.generator = torch.Generator().manual_seed(1)
        self.number = self.exchanges = 0

    def add(self, kernel: str, nbytes: int, root: int | None = None, *, in_place: bool = False) -> None:
        """One launch; its sizes and, unless one is given, its root follow from ``nbytes`` and how many came before.

        ``in_place``: of kernels of one tensor; what goes in is what comes out."""
        self.number += 1
        world = self.world_size
        root = self.number % world if root is None else root
        if kernel.removesuffix(ROUNDS).endswith(("_one_shot", "_two_shot", "_relay", "_staged")):
            terms = self._tensors(nbytes // self.dtype.itemsize)
            total = self._sum(terms)
            expected = {
                "all": [total] * world,
                "reduce": [total if rank == root else terms[rank] for rank in range(world)],
                "broadcast": [terms[root]] * world,
            }[kernel.split("_")[0]]
            self._launch(kernel, terms, expected, [Messages()] * world, nbytes, root, in_place=in_place)
        elif kernel.startswith("reduce") and self.number % 2:
            terms = self._tensors(nbytes // self.dtype.itemsize)
            total = self._sum(terms)
            expected = [total if rank == root else terms[rank] for rank in range(world)]
            self._launch(kernel, terms, expected, [messages.reduce(member, nbytes, root) for member in self._members()], nbytes, root)
        elif kernel.startswith("reduce"):
            terms = self._tensors(world * (nbytes // self.dtype.itemsize))
            tables = [messages.reduce_scatter(member, nbytes) for member in self._members()]
            self._launch(kernel, terms, list(self._sum(terms).view(world, -1)), tables, nbytes, root)
        elif kernel.endswith(ROUNDS):
            self._exchange_evenly(kernel, nbytes, root)
        else:
            self._exchange(kernel, nbytes)

    def add_parts(self, kernel: str, rows: tuple[int, ...]) -> None:
        """One launch with unequal parts of so many elements, whose sizes all ranks know: an all-gather or a reduce-scatter."""
        self.number += 1
        parts = [size * self.dtype.itemsize for size in rows]
        if kernel.startswith("reduce"):
            terms = self._tensors(sum(rows))
            tables = [messages.reduce_scatter_parts(member, parts) for member in self._members()]
            self._launch(kernel, terms, _padded(self._sum(terms).split(rows)), tables, 0, 0)
        else:
            own = [self._tensors(size)[0] for size in rows]
            tables = [messages.all_gather_parts(member, parts) for member in self._members()]
            self._launch(kernel, _padded(own), [torch.cat(own)] * self.world_size, tables, 0, 0)

    def late(self, late_rank: int, pauses: int) -> None:
        """One rank passes time before its next launch."""
        self.scenario.launch("late", 1, 1, (lambda rank: ctypes.c_uint32(pauses if rank == late_rank else 0),))

    def _exchange(self, kernel: str, nbytes: int) -> None:
        """All-to-all with uneven parts at odd addresses; some are empty."""
        world = range(self.world_size)
        sizes = [[nbytes + 37 * r + 11 * q if (r + q + self.number) % 4 else 0 for q in world] for r in world]
        received = [[sizes[q][r] for q in world] for r in world]
        length = max(map(sum, (*sizes, *received)))
        sent = [torch.randint(0, 256, (length,), dtype=torch.uint8, generator=self.generator) for _ in world]
        expected = []
        for r in world:
            starts = [sum(sizes[q][:r]) for q in world]
            parts = [sent[q][starts[q] : starts[q] + sizes[q][r]] for q in world]
            expected.append(torch.cat([*parts, torch.zeros(length - sum(received[r]), dtype=torch.uint8)]))
        self._launch(kernel, sent, expected, [messages.all_to_all(sizes[r], received[r]) for r in world], 0, 0)

    def _exchange_evenly(self, kernel: str, nbytes: int, root: int) -> None:
        """Gather, scatter, all-gather and all-to-all in turn."""
        world = range(self.world_size)
        tables = [
            (
                messages.gather(member, nbytes, root),
                messages.scatter(member, nbytes, root),
                messages.all_gather(member, nbytes),
                messages.all_to_all([nbytes] * self.world_size, [nbytes] * self.world_size),
            )[self.exchanges % 4]
            for member in self._members()
        ]
        sent = [torch.randint(1, 256, (self.world_size * nbytes,), dtype=torch.uint8, generator=self.generator) for _ in world]
        expected = [torch.zeros_like(tensor) for tensor in sent]
        for r, q in itertools.product(world, world):
            at, source, length = tables[r].receive_at[q], tables[q].send_at[r], tables[r].receive_bytes[q]
            expected[r][at : at + length] = sent[q][source : source + length]
        self.exchanges += 1
        self._launch(kernel, sent, expected, tables, 0, root)

    def _launch(
        self,
        kernel: str,
        sent: list[torch.Tensor],
        expected: list[torch.Tensor],
        tables: list[Messages],
        nbytes: int,
        root: int,
        *,
        in_place: bool = False,
    ) -> None:
        right = [tensor.contiguous().view(torch.uint8) for tensor in expected]
        if in_place:
            source = target = self.scenario.buffer(f"in place {self.number}", [tensor.view(torch.uint8) for tensor in sent], right)
        else:
            source = self.scenario.buffer(f"in {self.number}", sent)
            target = self.scenario.buffer(f"out {self.number}", [torch.zeros_like(tensor) for tensor in right], right)
        rings = self.rings
        block, shared_bytes = {
            "exchange_ring": (rings.exchange_threads, rings.exchange_shared_bytes),
            "broadcast_relay": (rings.broadcast_threads, rings.broadcast_shared_bytes),
            "all_reduce_relay": (rings.relay_threads, rings.relay_shared_bytes),
            "reduce_relay": (rings.relay_threads, rings.relay_shared_bytes),
            "reduce_ring": (rings.reduce_threads, rings.reduce_shared_bytes),
        }.get(kernel, (self.packet_threads, 0))
        self.scenario.launch(
            kernel,
            1 + self.number % BLOCKS,
            block,
            (self.arena, self.workspace, tables.__getitem__, source, target, ctypes.c_uint64(nbytes), ctypes.c_int(root)),
            shared_bytes=shared_bytes,
        )

    def _tensors(self, length: int) -> list[torch.Tensor]:
        return [torch.randint(-8, 9, (length,), generator=self.generator).to(self.dtype) for _ in range(self.world_size)]

    def _sum(self, terms: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([term.to(torch.float32) for term in terms]).sum(0).to(self.dtype)

    def _members(self) -> list[Member]:
        return [Member(rank, self.world_size) for rank in range(self.world_size)]


def _padded(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the parts as long as the longest of them, with zeros behind."""
    longest = max(map(len, parts))
    return [torch.cat([part, part.new_zeros(longest - len(part))]) for part in parts]


ONE_ROUND_EACH = tuple(kernel for kernel in KERNELS if not kernel.endswith(ROUNDS))
SCHEDULES = 300
PROCESSES = 2  # halves of the schedules run side by side


@pytest.mark.parametrize(("world_size", "schedules"), [(2, 60), pytest.param(4, SCHEDULES, marks=pytest.mark.long)])
@pytest.mark.parametrize("kernel", ONE_ROUND_EACH)
def test_a_collective_is_clean_and_right_in_every_launch(kernel: str, world_size: int, schedules: int) -> None:
    work = Collectives(world_size, ONE_ROUND_EACH)
    for nbytes in BRIEF_SIZES if kernel.endswith(("_ring", "_relay")) and world_size == 4 else SIZES:
        work.add(kernel, nbytes)
    compile_program(work.scenario.source, defines=work.scenario.defines, include_dirs=work.scenario.include_dirs)
    share = schedules // PROCESSES
    with ThreadPoolExecutor(PROCESSES) as pool:
        reports = list(pool.map(lambda first: check(work.scenario, schedules=share, first_schedule=first), range(0, schedules, share)))
    assert sum(report.schedules for report in reports) == schedules
    for report in reports:
        assert report.clean, report


BY_PACKETS = [kernel for kernel in KERNELS if kernel.endswith(("_one_shot", "_two_shot", "_packets"))]
LATE = """
extern "C" __global__ void late(u32 pauses) {
    for (u32 i = 0; i < pauses; ++i) peerlane::ptx::sleep(1000);
}
"""


@pytest.mark.parametrize("late_rank", range(3))
def test_packet_kernels_take_turns_while_one_rank_is_late(late_rank: int) -> None:
    """The root stays. Kernels in which it might not wait for the others lie between two that write to the same places."""
    work = Collectives(3, tuple(BY_PACKETS), source=LATE)
    for kernel in BY_PACKETS:
        work.late(late_rank, 2000)
        for turn in (kernel, "broadcast_two_shot", kernel, "reduce_two_shot", kernel):
            work.add(turn, 340, root=0)
    require_clean(work.scenario, schedules=SCHEDULES // 5)


@pytest.mark.long
@pytest.mark.parametrize("rings", [RINGS, replace(RINGS, depth=4, stages=2, in_flight=1)], ids=["deep", "shallow"])
@pytest.mark.parametrize("kernel", ["exchange_ring", "reduce_ring", "all_reduce_relay", "reduce_relay", "broadcast_relay"])
def test_messages_that_end_in_different_rounds_do_not_deadlock(kernel: str, rings: Rings) -> None:
    """Rings just as deep as the rule wants them, gone round several times; the shallow ones have the stages of the default."""
    assert rings.depth == rings.stages + 2
    work = Collectives(3, (kernel,), rings=rings)
    for nbytes in (9004, 1500, 6000):
        work.add(kernel, nbytes)
    require_clean(work.scenario, schedules=12)


IN_ROUNDS = tuple(kernel for kernel in KERNELS if kernel.endswith(ROUNDS))


def in_rounds(kernel: str, rounds: int, world_size: int, itemsize: int = 1) -> int:
    """Bytes with which a kernel goes so many rounds through a buffer of ROOM packets. The last one has a single packet, not a whole one."""
    room, shares = {
        "all_reduce_two_shot": (ROOM // 2, world_size),
        "reduce_two_shot": (ROOM, world_size - 1),
        "broadcast_two_shot": (ROOM, world_size - 1),
    }.get(kernel.removesuffix(ROUNDS), (ROOM, 1))
    return (shares * ((rounds - 1) * room + 1) * 12 - 5) // itemsize * itemsize


def rounds_workload(world_size: int, kernels: tuple[str, ...], dtype: torch.dtype, headers: tuple[Path, ...] = ()) -> Collectives:
    buffer_bytes = world_size * ROOM * 16
    return Collectives(world_size, kernels, dtype, headers, LATE, packet_buffer_bytes=buffer_bytes, packet_threads=ROOM_THREADS)


@pytest.mark.parametrize(
    ("world_size", "dtype"), [(2, torch.int32), (3, torch.bfloat16), pytest.param(4, torch.float8_e4m3fn, marks=pytest.mark.long)], ids=str
)
def test_messages_that_no_packet_buffer_holds_go_in_rounds(world_size: int, dtype: torch.dtype) -> None:
    """On one block and on two, one behind the other and between kernels of one round, with a rank that is late."""
    work = rounds_workload(world_size, (*BY_PACKETS, *IN_ROUNDS), dtype)
    exchange, reduce = "exchange_packets_rounds", "reduce_packets_rounds"  # of these there are several kinds
    for number, kernel in enumerate((*IN_ROUNDS, exchange, reduce, exchange, exchange)):
        work.late(number % world_size, 300 * (number % 2))
        work.add(kernel, in_rounds(kernel, 3 + number % 3, world_size, dtype.itemsize))
        if number % 2:
            work.add(BY_PACKETS[number % len(BY_PACKETS)], 40)
    require_clean(work.scenario, schedules=SCHEDULES)


UNEQUAL = ("exchange_packets", "exchange_packets_rounds", "exchange_ring", "reduce_packets", "reduce_packets_rounds", "reduce_ring")


def unequal(world_size: int, kernels: tuple[str, ...], schedules: int, headers: tuple[Path, ...] = ()) -> set[str]:
    """Returns the kinds of findings for unequal parts, in turn: many, none, one element, on one block and on two."""
    work = rounds_workload(world_size, kernels, torch.bfloat16, headers)
    for number, kernel in enumerate(kernels * 2):
        brief = kernel in BY_PACKETS
        sizes = [(5 if brief else 700, 0, 1, 33 if brief else 97)[(number + q) % 4] for q in range(world_size)]
        work.late(number % world_size, 300 * (number % 2))
        work.add_parts(kernel, tuple(sizes))
    return {finding.kind for finding in check(work.scenario, schedules=schedules).findings}


@pytest.mark.parametrize(("world_size", "schedules"), [(2, 3), (3, 20), pytest.param(4, 20, marks=pytest.mark.long)])
def test_parts_may_be_unequal(world_size: int, schedules: int) -> None:
    assert not unequal(world_size, UNEQUAL, schedules)


def test_ranks_that_count_rounds_by_their_own_parts_are_caught(tmp_path: Path) -> None:
    """A rank whose part is short needs the rounds of the longest part of all."""
    right = "longest = send > longest ? send : longest;"
    folder = write_header(tmp_path, "collectives/exchange_packets.cuh", right, "")
    assert "deadlock" in unequal(2, ("reduce_packets_rounds",), 5, (folder,))


def test_what_goes_in_may_be_what_comes_out() -> None:
    of_one_tensor = [kernel for kernel in KERNELS if kernel.removesuffix(ROUNDS).endswith(("_one_shot", "_two_shot"))]
    work = rounds_workload(3, tuple(of_one_tensor), torch.bfloat16)
    for number, kernel in enumerate(of_one_tensor * 2):
        work.late(number % 3, 300 * (number % 2))
        work.add(kernel, in_rounds(kernel, 3, 3, 2) if kernel.endswith(ROUNDS) else 100, in_place=True)
    require_clean(work.scenario, schedules=60)


@pytest.mark.parametrize("last", [0, 1, 2, 7, 0xFFFFFFF9, 0xFFFFFFFA, 0xFFFFFFFD, 0xFFFFFFFE, 0xFFFFFFFF])
def test_epochs_alternate_across_the_wrap(last: int) -> None:
    source = """
    #include <peerlane/comm.cuh>
    using namespace peerlane;
    extern "C" __global__ void take(u32* counters, u32* taken, u32 count) {
        const u32 first = next_epoch(counters, count);
        if (blockIdx.x == 0 && threadIdx.x == 0) *taken = first;
    }
    """
    counts, previous = (3, 1, 2, 4, 1), last
    scenario = Scenario("epochs", source, 1)
    counters = scenario.buffer("counters", [torch.full((256,), last, dtype=torch.uint32)])
    for launch, count in enumerate(counts):
        first = previous + 1 if 0 < previous <= 0xFFFFFFFF - count else 2 if previous == 0 or previous % 2 else 3
        assert previous == 0 or (first - previous) % 2 == 1
        taken = scenario.buffer(f"taken {launch}", [torch.zeros(1, dtype=torch.uint32)], [torch.tensor([first], dtype=torch.uint32)])
        scenario.launch("take", 2, 32, (counters, taken, ctypes.c_uint32(count)))
        previous = first + count - 1
    require_clean(scenario, schedules=2)


def test_collectives_in_any_order_share_a_workspace() -> None:
    sharing = tuple(kernel for kernel in ONE_ROUND_EACH if kernel != plans.STAGED)  # which has an arena of its own
    work = Collectives(3, sharing)
    for kernel in (*sharing, *reversed(sharing)):
        work.add(kernel, 604)
    require_clean(work.scenario, schedules=10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_sums_of_every_dtype_are_right(dtype: torch.dtype) -> None:
    work = Collectives(2, ("all_reduce_one_shot", "reduce_relay"), dtype)
    for kernel in ("all_reduce_one_shot", "reduce_relay"):
        work.add(kernel, 1000 + dtype.itemsize)
    require_clean(work.scenario, schedules=3)


def test_the_kernel_of_the_documentation_is_right() -> None:
    text = (Path(__file__).parents[2] / "docs" / "device" / "primitives.md").read_text(encoding="utf-8")
    block = re.search(r"<!-- all-reduce:begin -->\n```cuda\n(.*?)```\n<!-- all-reduce:end -->", text, re.DOTALL)
    assert block
    scenario = Scenario("documentation", block[1], 2, defines={"WORLD_SIZE": 2})
    arena = scenario.arena(1 << 16)
    places = [ctypes.c_uint64(arena.take(nbytes)) for nbytes in (1024, BLOCKS * 2 * 128, 4096)]
    for launch, length in enumerate((301, 5, 64, 3)):  # of 3 elements the second block has no part
        terms = [torch.arange(length, dtype=torch.float32) * (rank + launch) for rank in range(2)]
        source = scenario.buffer(f"in {launch}", terms)
        target = scenario.buffer(f"out {launch}", [torch.zeros(length)] * 2, [terms[0] + terms[1]] * 2)
        scenario.launch("all_reduce", BLOCKS, 64, (arena, *places, source, target, ctypes.c_uint64(4 * length)))
    require_clean(scenario, schedules=100)
    assert lint(compile_cubin(block[1], defines={"WORLD_SIZE": 4}).ptx()) == []


@dataclass(frozen=True)
class Twin:
    """A kernel with one place of one header changed so that its protocol is wrong.

    What is found: a race in every schedule, or, where atomic packets are overwritten, that somebody waits for ever in some.
    """

    kernel: str
    header: str
    right: str
    wrong: str
    found: str = "race"
    world_size: int = 2
    nbytes: int = 2604
    root: int | None = None


RELAY, EXCHANGE, PEERS, QUEUE = "collectives/relay.cuh", "collectives/exchange.cuh", "peers/peers.cuh", "peers/store_queue.cuh"
PROGRESS = "peers/progress.cuh"
TWO_SHOT, STAGED = "collectives/two_shot.cuh", "collectives/staged.cuh"
CREDIT = "mover.wait(q, here.used_slot(), number + 1 - rings.depth)"
RELEASE = "            ptx::fence_proxy_async();\n            ptx::fence_system();\n"
ACQUIRE, RELAXED = "seen[q] = ptx::load_acquire_system(", "seen[q] = ptx::load_relaxed_system("
IS_THERE = "peers_.wait_load(state_.landed + turn % rings.stages, turn / rings.stages & 1);"
DELIVER = "deliver(tiles, stage(turn), queue_);"
LANDED, DELIVERED = f"{IS_THERE}\n            {DELIVER}", f"{DELIVER}\n            {IS_THERE}"
READS_DONE = "        team.sync();\n        ++done;"
BUFFERS = "packets + (epoch & 1) * packet_buffer_bytes"
TWINS = {
    "no_wait_for_tiles": Twin("all_reduce_relay", RELAY, "givers.wait_all(terms.arrived_slot(), number + 1, known_arrived)", "team.sync()"),
    "sums_sent_without_credit": Twin("all_reduce_relay", RELAY, "turn + 1 - rings.depth", "turn + 1 - 8 * rings.depth", nbytes=20832),
    "passed_on_without_credit": Twin(
        "broadcast_relay", RELAY, "number + 1 - rings.depth, seen", "number + 1 - 8 * rings.depth, seen", world_size=3, nbytes=20832
    ),
    "ring_without_credit": Twin("exchange_ring", EXCHANGE, CREDIT, "__syncwarp()"),
    "one_packet_buffer": Twin("all_reduce_one_shot", "collectives/workspace.cuh", BUFFERS, "packets", found="deadlock"),
    "root_waits_for_nobody": Twin(
        "broadcast_two_shot", TWO_SHOT, "others_begun(rounds[rounds.count() - 1]);", "", found="deadlock", world_size=3, root=0
    ),
    "signal_owed_for_a_step_too_few": Twin("exchange_ring", QUEUE, "ptx::bulk_wait<in_flight>()", "ptx::bulk_wait<in_flight + 1>()"),
    "signal_when_the_tile_was_read": Twin("exchange_ring", QUEUE, "ptx::bulk_wait<in_flight>()", "ptx::bulk_wait_read<in_flight>()"),
    "stage_filled_a_step_too_early": Twin("exchange_ring", EXCHANGE, "fetched < rings.stages - rings.in_flight", "fetched < rings.stages"),
    "place_acknowledged_before_it_is_read": Twin("exchange_ring", EXCHANGE, LANDED, DELIVERED),
    "sums_acknowledged_unread": Twin("reduce_ring", EXCHANGE, READS_DONE, "        ++done;"),
    "terms_added_before_they_come": Twin("all_reduce_staged", STAGED, "terms.wait_all(blockIdx.x, epoch + round);", ""),
    "sums_copied_before_they_come": Twin("all_reduce_staged", STAGED, "totals.wait_all(blockIdx.x, epoch + round);", ""),
    "sums_told_before_they_are_stored": Twin(
        "all_reduce_staged",
        STAGED,
        "totals.signal_all(blockIdx.x, epoch + round);",
        "totals.acknowledge_all(blockIdx.x, epoch + round + 1);",
    ),
    "progress_told_without_release": Twin("all_reduce_relay", PROGRESS, RELEASE, ""),
    "progress_posted_without_release": Twin("all_reduce_relay", PROGRESS, "ptx::store_release_block(", "ptx::store_relaxed_gpu("),
    "progress_of_a_tile_that_was_not_posted": Twin("exchange_ring", PROGRESS, "own.first[q] + done[line]", "own.first[q] + done[line] + 1"),
    "a_round_posted_with_its_first_tile": Twin(
        "exchange_ring", EXCHANGE, "{&sent, tiles.done()}", "{&sent, tiles.round() + 1}", world_size=3
    ),
    "wait_without_acquire": Twin("all_reduce_relay", PEERS, ACQUIRE, RELAXED, world_size=4),
}


LONG = (
    "stage_filled_a_step_too_early",
    "passed_on_without_credit",
    "sums_sent_without_credit",
    "wait_without_acquire",
    "a_round_posted_with_its_first_tile",
    "signal_when_the_tile_was_read",
    "sums_copied_before_they_come",
    "progress_posted_without_release",
    "progress_of_a_tile_that_was_not_posted",
)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in TWINS])
def test_a_broken_twin_is_caught(name: str, tmp_path: Path) -> None:
    twin = TWINS[name]
    folder = write_header(tmp_path, twin.header, twin.right, twin.wrong)
    work = Collectives(twin.world_size, (twin.kernel,), headers=(folder,))
    for _ in range(3):
        work.add(twin.kernel, twin.nbytes, twin.root)
    report = check(work.scenario, schedules=20)
    assert report.caught == 20 or twin.found != "race", report
    assert twin.found in {finding.kind for finding in report.findings}, report


ROUNDS_TWINS = {
    "rounds_without_padding": ("left > least ? left : least", "left > 1 ? left : 1"),
    "rounds_through_one_buffer": (BUFFERS, "packets"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", ROUNDS_TWINS)
def test_overwriting_unread_rounds_is_caught_in_every_schedule(name: str, tmp_path: Path) -> None:
    """A gather: nobody but the root needs what it gets."""
    folder = write_header(tmp_path, "collectives/workspace.cuh", *ROUNDS_TWINS[name])
    work = rounds_workload(3, ("exchange_packets_rounds",), torch.int32, (folder,))
    work.late(0, 2000)
    work.add("exchange_packets_rounds", in_rounds("exchange_packets_rounds", 4, 3), root=0)
    report = check(work.scenario, schedules=SCHEDULES)
    assert report.caught == SCHEDULES, report
    assert {finding.kind for finding in report.findings} <= {"deadlock", "wrong_result"}, report
