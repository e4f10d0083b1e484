"""Timed blocks without a GPU: what is called, swapped and copied, in which order."""

import contextlib
from typing import Any

import pytest
import torch

from peerlane.errors import UsageError
from peerlane.evaluate.memory.slots import ArgumentSlots, OutputRegions, place_slots
from peerlane.evaluate.ranks import timed_block
from peerlane.evaluate.ranks.trusted import TrustedRank
from peerlane.evaluate.wire import BlockPlan
from peerlane.problems.contract.tree import describe

CPU = torch.device("cpu")
LOG: list[Any] = []


class FakeGraph:
    """Replays what was enqueued while it was captured."""

    def __init__(self) -> None:
        self.number = len([item for item in LOG if item == "graph"])
        LOG.append("graph")


@contextlib.contextmanager
def capturing(graph: FakeGraph, **_: Any) -> Any:
    yield


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    LOG.clear()
    for name, stand_in in {
        "_Event": lambda **_: object(),
        "_record": lambda event: LOG.append("event"),
        "_elapsed": lambda start, end: 0.25,
        "_current_stream": lambda: None,
        "_set_stream": lambda stream: None,
        "_synchronize": lambda: None,
        "_all_reduce": lambda tensor: LOG.append("barrier"),
        "quiesce": lambda: LOG.append("quiesce"),
        "evict": lambda: LOG.append("evict"),
        "synchronize_all": lambda: LOG.append("idle"),
        "_replay": lambda graph: LOG.append(("replay", graph.number)),
    }.items():
        monkeypatch.setattr(timed_block, name, stand_in)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: 0)


def slots_of(count: int) -> tuple[ArgumentSlots, OutputRegions]:
    slots = [(torch.full((3,), float(slot)),) for slot in range(count)]
    layout, size = place_slots(map(describe, slots))
    inputs = ArgumentSlots(torch.zeros(size, dtype=torch.uint8), layout, str)
    inputs.fill(slots)
    regions, room = place_slots([describe(torch.empty(3))] * count)
    return inputs, OutputRegions(torch.zeros(room, dtype=torch.uint8), regions, CPU)


def solution(tensor: torch.Tensor) -> torch.Tensor:
    LOG.append(int(tensor[0]))
    return tensor + 100


PLAN = BlockPlan(5, ((1, 1, 3), (2, 2, 4)))


def test_an_eager_block_swaps_right_before_calls_and_copies_every_output() -> None:
    inputs, outputs = slots_of(6)
    block = timed_block.make_block("eager", solution, inputs, outputs, CPU, PLAN)
    block.ready()
    answer = block.run()
    assert LOG == ["quiesce", "evict", "idle", "barrier", "event", 0, 3, 4, 1, 2, "event", "idle"]
    assert answer.events_us == 250.0
    assert [int(views[0][0]) for views in outputs.views] == [100, 103, 104, 101, 102, 0]
    assert [bool(described) for described in outputs.descriptions] == [True, True, True, True, True, False]
    block.latest()[0].fill_(7.0)
    outputs.copy(4, block.latest())
    assert int(outputs.views[4][0][0]) == 7, "a result that changes after its end must be seen when it is copied again"


def test_what_worked_ahead_is_wrong_in_a_swapped_slot() -> None:
    inputs, outputs = slots_of(6)
    ahead = [args[0] + 100 for args in inputs.args]
    calls = iter(ahead)
    timed_block.make_block("eager", lambda tensor: next(calls), inputs, outputs, CPU, PLAN).run()
    assert any(not torch.equal(outputs.views[slot][0], inputs.args[slot][0] + 100) for slot in range(PLAN.calls))


def test_graphs_hold_the_calls_in_order_between_two_events() -> None:
    inputs, outputs = slots_of(40)
    block = timed_block.make_block("graph", solution, inputs, outputs, CPU, BlockPlan(40, ((20, 20, 30),)))
    begins = [position for position, item in enumerate(LOG) if item == "graph"]
    events = [position for position, item in enumerate(LOG) if item == "event"]
    assert [item for item in LOG if isinstance(item, int)] == [*range(20), 30, *range(21, 30), 20, *range(31, 40)]
    assert len(begins) == 3 and events == [begins[0] + 1, len(LOG) - 1]
    LOG.clear()
    assert block.run().events_us == 250.0
    assert LOG == ["barrier", ("replay", 0), ("replay", 1), ("replay", 2), "idle"]
    assert int(block.latest()[0][0]) == 139


def test_a_graph_that_lacks_messages_is_a_failed_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the capture ended well or not, the messages left are reported once: the eager calls that follow must not raise for them."""
    left: list[str] = []
    rank = object.__new__(TrustedRank)
    rank.device, rank.give_back = CPU, lambda: None  # type: ignore[method-assign]

    def check_capture() -> None:
        if left:
            raise UsageError(left.pop())

    def posts(tensor: torch.Tensor) -> torch.Tensor:
        left[:] = ["messages were not launched"]
        return tensor

    def fails(tensor: torch.Tensor) -> torch.Tensor:
        posts(tensor)
        raise RuntimeError("not while capturing")

    rank._check_capture = check_capture
    for candidate, reason in ((posts, "UsageError: messages were not launched"), (fails, "RuntimeError: not while capturing")):
        assert rank.build_block("graph", PLAN, candidate, *slots_of(6)) == reason
        assert rank.block is None and not left
    assert rank.build_block("graph", PLAN, solution, *slots_of(6)) is None
    assert isinstance(rank.block, timed_block.GraphBlock)


def copies_of(mode: str, inputs: ArgumentSlots, outputs: OutputRegions, device: torch.device = CPU) -> tuple[float, float]:
    block = timed_block.make_block(mode, solution, inputs, outputs, device, PLAN)
    LOG.clear()

    def undo() -> None:
        for _, slot, other in reversed(PLAN.swaps):
            inputs.swapper(slot, other)()

    return timed_block.copies_time(block, undo)


def test_swaps_and_copies_alone_call_one_of_alike_slots_and_undo_their_swaps() -> None:
    inputs, outputs = slots_of(6)
    device_us, launch_us = copies_of("eager", inputs, outputs)
    assert device_us == 250.0 and 0 < launch_us < 1e6
    assert [item for item in LOG if isinstance(item, int)] == [0]
    assert [int(args[0][0]) for args in inputs.args] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(("mode", "shortest"), [("graph", 250.0), ("eager", 100.0)])
def test_on_a_gpu_copies_take_what_a_graph_takes_and_in_eager_mode_no_more_than_single_launches(
    mode: str, shortest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, outputs = slots_of(6)
    monkeypatch.setattr(timed_block, "zeros", {4 << 20: "eager", 64 << 20: "graph"}.__getitem__)  # of the barrier
    monkeypatch.setattr(timed_block, "OutputCopies", lambda outputs, _: outputs)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(timed_block, "Unowned", lambda tensor: tensor)
    monkeypatch.setattr(timed_block, "_elapsed", lambda *_: 0.25 if isinstance(LOG[-2], tuple) else 0.1)  # replayed, or launched one by one
    assert copies_of(mode, inputs, outputs, torch.device("cuda"))[0] == shortest
    assert "graph" in LOG


def test_a_block_of_the_public_protocol_uses_all_slots_in_turn_and_copies_nothing() -> None:
    inputs, outputs = slots_of(3)
    block = timed_block.make_block("eager", solution, inputs, outputs, CPU, BlockPlan(5, (), warm_up=4))
    block.ready()
    block.warm()
    assert [item for item in LOG if isinstance(item, int)] == [0, 1, 2, 0]
    LOG.clear()
    assert block.run().events_us == 250.0
    assert LOG == ["barrier", "event", 0, 1, 2, 0, 1, "event", "idle"], "the warm-up is outside of both clocks"
    assert not any(outputs.descriptions) and block.latest() == []
