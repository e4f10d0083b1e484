"""The host side of the collectives: layouts, messages and plans. No GPU is needed."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from peerlane.device.collectives import messages, plans, workspace
from peerlane.device.collectives.communicator import Communicator
from peerlane.device.collectives.kernels import KERNELS, ROUNDS
from peerlane.device.collectives.messages import Member
from peerlane.device.collectives.plans import Machine
from peerlane.device.collectives.workspace import RINGS, Messages, Workspace
from peerlane.device.host.layout import Layout, check_layouts
from peerlane.device.host.waits import describe_fault
from peerlane.errors import UsageError

SIZES = (1, 2, 12, 4096, 65536, 1 << 20, (4 << 20) - 1, 4 << 20, (4 << 20) + 1, 12 << 20, 1 << 28, (1 << 33) + 2)


def test_ranks_that_take_alike_get_the_same_places() -> None:
    first, second = Layout(4096, reserved=128), Layout(4096, reserved=128)
    assert [layout.take(size, align=align) for layout in (first, second) for size, align in ((3, 128), (40, 256), (0, 1))] == [
        128,
        256,
        296,
    ] * 2
    check_layouts([first.record(), second.record()])


@pytest.mark.parametrize("sizes", [(256, 128), (128, 128, 128), (128, 512)], ids=["order", "number", "size"])
def test_ranks_that_take_different_parts_are_told(sizes: tuple[int, ...]) -> None:
    layouts = [Layout(1 << 20), Layout(1 << 20)]
    for layout, wanted in zip(layouts, ((128, 256), sizes), strict=True):
        for size in wanted:
            layout.take(size)
    with pytest.raises(UsageError, match=r"rank 0: 2 of 384 bytes together, rank 1: "):
        check_layouts([layout.record() for layout in layouts])


def test_a_full_layout_says_what_is_left() -> None:
    layout = Layout(1024)
    layout.take(1000)
    with pytest.raises(UsageError, match="100 bytes asked for, 0 left of 1024"):
        layout.take(100)
    with pytest.raises(UsageError, match="a power of two"):
        layout.take(8, align=3)


def test_a_fault_says_who_waited_for_whom() -> None:
    assert describe_fault([0] * 8) == ""
    message = describe_fault([1, 3, 2, 0, 17, 5, 41, 40, 2 * 10**9])
    assert "rank 3 (consumer) waited for rank 0 longer than 2 s (block 17, slot 5, expected 41, seen 40)" in message
    assert describe_fault([1] + [0] * 7, "moe_up").startswith("moe_up: rank 0")


def rows(table: Messages, world_size: int) -> dict[str, list[int]]:
    return {name: list(getattr(table, name))[:world_size] for name, _ in table._fields_}


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_both_ends_of_a_message_agree_on_its_length(world_size: int) -> None:
    members = [Member(rank, world_size) for rank in range(world_size)]
    root, size = world_size - 1, 1000
    splits = [[(7 * r + 3 * q) % 5 for q in range(world_size)] for r in range(world_size)]
    tables = {
        "all_gather": [messages.all_gather(member, size) for member in members],
        "broadcast": [messages.broadcast(member, size, root) for member in members],
        "gather": [messages.gather(member, size, root) for member in members],
        "scatter": [messages.scatter(member, size, root) for member in members],
        "reduce_scatter": [messages.reduce_scatter(member, size) for member in members],
        "all_gather_parts": [messages.all_gather_parts(member, splits[1]) for member in members],
        "reduce_scatter_parts": [messages.reduce_scatter_parts(member, splits[1]) for member in members],
        "all_to_all": [messages.all_to_all(splits[r], [splits[q][r] for q in range(world_size)]) for r in range(world_size)],
    }
    for name, by_rank in tables.items():
        for sender, receiver in itertools.product(range(world_size), repeat=2):
            assert by_rank[sender].send_bytes[receiver] == by_rank[receiver].receive_bytes[sender], (name, sender, receiver)
    assert sum(rows(tables["scatter"][root], world_size)["send_bytes"]) == world_size * size
    assert rows(tables["gather"][root], world_size)["receive_at"] == [q * size for q in range(world_size)]
    assert rows(tables["all_to_all"][0], world_size)["send_at"] == [sum(splits[0][:q]) for q in range(world_size)]


def test_who_gets_no_sum_keeps_its_own() -> None:
    root, other = (rows(messages.reduce(Member(rank, 3), 96, 1), 3) for rank in (1, 2))
    assert root["send_bytes"] == [0, 96, 0] and root["receive_bytes"] == [96, 96, 96]
    assert other["send_bytes"] == [0, 96, 96] and other["receive_bytes"] == [0, 0, 0]


def packets_per_source(kernel: str, nbytes: int, world_size: int) -> int:
    """Places for each source in a packet buffer that would hold all that a kernel sends."""
    packets = -(-nbytes // workspace.PACKET_DATA_BYTES)
    return {
        "all_reduce_two_shot": 2 * -(-packets // world_size),
        "reduce_two_shot": -(-packets // (world_size - 1)),
        "broadcast_two_shot": -(-packets // (world_size - 1)),
    }.get(kernel.removesuffix(ROUNDS), 0 if kernel.endswith(("_ring", "_relay", "_staged")) else packets)


PLANS = (plans.all_reduce, plans.broadcast, plans.reduce, plans.exchange, plans.rooted_exchange, plans.reduce_scatter)


def around_limits(world_size: int) -> set[int]:
    """The last size, in bytes, before a plan takes another kernel, and the first one behind it; and sizes far from any limit."""
    machine = Machine(world_size, 132)
    found = set(SIZES)
    for plan in PLANS:
        for low, high in itertools.pairwise(1 << power for power in range(29)):
            while high - low > 1 and plan(low, machine).kernel != plan(high, machine).kernel:
                middle = (low + high) // 2
                low, high = (middle, high) if plan(middle, machine).kernel == plan(low, machine).kernel else (low, middle)
            found |= {low, high}
    return found


@pytest.mark.parametrize("world_size", range(2, 9))
def test_plans_fit_the_workspace_and_the_device(world_size: int) -> None:
    machine = Machine(world_size, sm_count=132)
    room = workspace.packet_message_bytes(world_size) // workspace.PACKET_DATA_BYTES
    for nbytes in around_limits(world_size):
        for plan in (*(make(nbytes, machine) for make in PLANS), plans.uneven_exchange(machine)):
            assert plan.kernel in KERNELS and 1 <= plan.grid <= 132
            wanted = packets_per_source(plan.kernel, nbytes, world_size)
            assert (room < wanted <= 6 * room) if plan.kernel.endswith(ROUNDS) else wanted <= room, (plan, nbytes)
            if plan.kernel.endswith(("_ring", "_relay")):
                assert plan.grid <= RINGS.exchange_blocks(world_size)
                assert plan.block <= 1024 and 0 < plan.shared_bytes <= 226 << 10
            else:
                assert plan.block in (128, 256, 512) and plan.shared_bytes == 0 and plan.grid <= workspace.MAX_EPOCH_BLOCKS


@pytest.mark.parametrize("world_size", range(2, 9))
def test_packets_carry_more_than_the_buffers_hold_in_rounds(world_size: int) -> None:
    machine, held = Machine(world_size, 132), workspace.packet_message_bytes(world_size)
    most = plans.PORT_PACKET_LIMIT_BYTES // (world_size - 1)
    for plan, name in ((plans.exchange, "exchange"), (plans.reduce_scatter, "reduce")):
        if world_size == 2:
            assert [plan(size, machine).kernel for size in (held, held + 1)] == [f"{name}_packets", f"{name}_ring"]
            continue
        kernels = [plan(size, machine).kernel for size in (held, held + 1, most, most + 1)]
        assert kernels == [f"{name}_packets", f"{name}_packets_rounds", f"{name}_packets_rounds", f"{name}_ring"]
    in_two_trips = [
        (plans.all_reduce, "all_reduce", workspace.PACKET_BUFFER_TENSOR_BYTES),
        (plans.reduce, "reduce", held * (world_size - 1)),
        (plans.broadcast, "broadcast", held * (world_size - 1)),
    ]
    for plan, name, most_at_once in in_two_trips if world_size > 2 else []:
        # A packet buffer holds whole packets of every share: a few more than the tensor that it is made for.
        assert plan(most_at_once, machine).kernel == f"{name}_two_shot"
        assert plan(most_at_once + 12 * world_size, machine).kernel == f"{name}_two_shot_rounds"
        most = plans.TWO_SHOT_LIMIT_BYTES
        assert [plan(size, machine).kernel for size in (most, most + 1)] == [f"{name}_two_shot_rounds", f"{name}_relay"]


@pytest.mark.parametrize("world_size", range(2, 9))
def test_all_ranks_plan_alike(world_size: int) -> None:
    """What each rank's communicator plans for a call, with its own tensors and its own part of the messages."""

    class Planner(Communicator):
        def __init__(self, rank: int) -> None:
            self.member, self.machine = Member(rank, world_size), Machine(world_size, 132)
            self.arena = SimpleNamespace(device=torch.device("meta"))  # type: ignore[assignment]
            self.planned: list[plans.Plan] = []
            self.longest: list[int] = []

        def _run(self, key: object, source: object, target: object, make: Callable[[], Any], reduction: object = None) -> None:
            plan, table, _ = make()
            self.planned.append(plan)
            longest = max(*table.send_bytes, *table.receive_bytes)
            if plan.kernel.endswith("_packets"):
                assert longest <= workspace.packet_message_bytes(world_size)
            if plan.kernel.endswith("_packets_rounds"):
                self.longest.append(longest)

    planners = [Planner(rank) for rank in range(world_size)]
    for planner, nbytes in itertools.product(planners, sorted(around_limits(world_size))):
        part, whole = (torch.empty(size, dtype=torch.uint8, device="meta") for size in (nbytes, nbytes * world_size))
        at_root = planner.member.rank == world_size - 1
        planner.all_reduce(part)
        planner.reduce(part, world_size - 1)
        planner.broadcast(part, world_size - 1)
        planner.reduce_scatter_tensor(part, whole)
        planner.all_gather_into_tensor(whole, part)
        planner.gather(part, whole if at_root else None, world_size - 1)
        planner.scatter(part, whole if at_root else None, world_size - 1)
        planner.all_to_all_single(whole, whole)
    assert planners[0].planned and all(planner.planned == planners[0].planned for planner in planners)
    # From it each rank finds by itself how many rounds there are.
    assert bool(planners[0].longest) == (world_size > 2) and all(planner.longest == planners[0].longest for planner in planners)


def test_small_tensors_take_packets_and_large_ones_rings() -> None:
    machine = Machine(4, 132)
    assert [plans.all_reduce(size, machine).kernel for size in (4 << 10, 2 << 20, 64 << 20)] == [
        "all_reduce_one_shot",
        "all_reduce_two_shot",
        "all_reduce_relay",
    ]
    staged = [plans.all_reduce(size, Machine(2, 132)).kernel for size in (4 << 20, (4 << 20) + 1, 16 << 20, (16 << 20) + 1)]
    assert staged == ["all_reduce_one_shot", plans.STAGED, plans.STAGED, "all_reduce_relay"]
    assert plans.all_reduce(2 << 20, Machine(2, 132)).kernel == "all_reduce_one_shot"
    assert [plans.exchange(size, machine).kernel for size in (2048, 2 << 20, 4 << 20, 9 << 20)] == [
        "exchange_packets",
        "exchange_packets",
        "exchange_packets_rounds",
        "exchange_ring",
    ]
    assert [plans.rooted_exchange(size, machine).kernel for size in (2048, 2 << 20, (2 << 20) + 1)] == [
        "exchange_packets",
        "exchange_packets",
        "exchange_ring",
    ]
    assert [plans.reduce(size, machine).kernel for size in (4096, 2 << 20, 8 << 20, 17 << 20)] == [
        "reduce_packets",
        "reduce_two_shot",
        "reduce_two_shot_rounds",
        "reduce_relay",
    ]
    two = Machine(2, 132)
    assert [plan(25 << 20, two).kernel for plan in (plans.reduce, plans.broadcast)] == ["reduce_ring", "exchange_ring"]


def test_rings_stay_within_bounds_and_four_ranks_reach_every_sm() -> None:
    for world_size in range(2, 9):
        assert RINGS.exchange_blocks(world_size) >= 57
        assert workspace.workspace_bytes(world_size) <= 424 << 20
    assert [plans.all_reduce(64 << 20, Machine(world_size, 132)).grid for world_size in (2, 4, 8)] == [132, 132, 57]


@pytest.mark.parametrize(
    ("setting", "rule"),
    [
        ({"depth": 12}, "depth is a power of two"),
        ({"depth": 2}, r"depth is at least stages \+ 2"),
        ({"tile_bytes": 1000}, "tile_bytes is a multiple of 128"),
        ({"in_flight": 2}, "in_flight is at least 1 and less than stages"),
    ],
)
def test_rings_that_break_a_rule_are_refused_with_it(setting: dict[str, int], rule: str) -> None:
    with pytest.raises(UsageError, match=f"{rule}$"):
        replace(RINGS, **setting)
    assert replace(RINGS, tile_bytes=48 << 10, stages=2).exchange_blocks(4) == 88


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_a_workspace_takes_what_it_says(world_size: int) -> None:
    layout = Layout(1 << 30)
    space = Workspace.take(layout, world_size)
    assert layout.taken == workspace.workspace_bytes(world_size)
    places = [space.epochs, space.packets, space.copies.tiles, space.copies.flags, space.sums.tiles]
    assert places == sorted(places) and all(place % workspace.LINE_BYTES == 0 for place in places)
