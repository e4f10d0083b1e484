"""The backend's order on a GPU, with stand-ins for streams; which ranks share GPUs; what the report says."""

import contextlib
import itertools
import logging
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from peerlane.device.backend import kit, ordering
from peerlane.device.backend.captured_messages import captured_messages
from peerlane.device.backend.neighbours import Seat, prepare_shared_gpus, share_gpus
from peerlane.device.collectives.point_to_point import Transfer
from peerlane.device.collectives.reductions import Reduction
from peerlane.device.host import cuda_bindings, lane, tally
from peerlane.errors import UsageError


class Stream:
    """A stream that knows which calls are ordered before its next one. ``capture`` is the graph that it is captured into, or 0."""

    def __init__(self, machine: "Machine") -> None:
        self.machine, self.before, self.device, self.cuda_stream = machine, set[str](), torch.device("cpu"), self
        self.stream_id, self.device_index, self.device_type = self, 0, 1
        self.capture = 0

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: Any = None) -> Any:
        event = event or SimpleNamespace(query=lambda: True)
        event.before, event.capture = set(self.before), self.capture
        return event

    def wait_event(self, event: Any) -> None:
        assert event.capture == self.capture or self.capture == 0, "an event of another capture"
        self.before |= event.before


class Machine:
    """torch.cuda as far as a lane uses it."""

    def __init__(self) -> None:
        self.current = Stream(self)
        self.side: Stream | None = None

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def new_stream(self) -> Stream:
        self.side = Stream(self)
        return self.side

    def call(self, name: str, seen: dict[str, set[str]]) -> Callable[[], None]:
        """A call of one kernel, as a bound launch makes it."""

        def launch() -> None:
            seen[name] = set(self.current.before)
            self.current.before.add(name)

        return lambda: lane.lane_of(torch.device("cpu")).run(self.current, launch)  # type: ignore[arg-type]


class Driver:
    """The driver's events, on stand-ins for streams."""

    CUevent_flags = SimpleNamespace(CU_EVENT_DISABLE_TIMING=2)

    def cuStreamGetCaptureInfo(self, stream: Stream) -> tuple[int, int, int]:
        return 0, int(stream.capture != 0), stream.capture

    def cuEventCreate(self, flags: int) -> tuple[int, Any]:
        return 0, SimpleNamespace(before=set(), capture=0)

    def cuEventRecord(self, event: Any, stream: Stream) -> tuple[int]:
        event.before, event.capture = set(stream.before), stream.capture
        return (0,)

    def cuStreamWaitEvent(self, stream: Stream, event: Any, flags: int) -> tuple[int]:
        stream.wait_event(event)
        return (0,)


class Tensor:
    def __init__(self) -> None:
        self.kept_for: list[Any] = []

    def record_stream(self, stream: Any) -> None:
        self.kept_for.append(stream)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    cuda = SimpleNamespace(
        device=lambda device: contextlib.nullcontext(),
        current_device=lambda: 0,
        current_stream=lambda device=None: machine.current,
        Stream=machine.new_stream,
        stream=machine.on,
        is_current_stream_capturing=lambda: machine.current.capture != 0,
    )
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(ordering, "_current", lambda device: machine.current)
    monkeypatch.setattr(torch._C, "_cuda_setStream", lambda **stream: setattr(machine, "current", stream["stream_id"]), raising=False)
    driver = Driver()
    monkeypatch.setattr(cuda_bindings, "driver", lambda: driver)
    monkeypatch.setattr(lane, "_lanes", {})
    return machine


def test_collectives_form_one_chain_whatever_their_streams(machine: Machine) -> None:
    order_of_calls, seen, tensor = ordering.CudaLane(torch.device("cpu")), dict[str, set[str]](), Tensor()
    streams = [machine.current, Stream(machine), Stream(machine)]
    plan = [(0, False), (1, False), (1, True), (2, True), (2, False), (0, True), (0, False)]
    for number, (stream, asynchronous) in enumerate(plan):
        with machine.on(streams[stream]):
            machine.current.before.add(f"producer {number}")
            work = order_of_calls.run(machine.call(f"call {number}", seen), [tensor], asynchronous=asynchronous)  # type: ignore[list-item]
            if asynchronous:
                assert f"call {number}" not in machine.current.before, "an asynchronous call holds its caller up"
            work.wait()
            assert f"call {number}" in machine.current.before
    for number in range(len(plan)):
        assert seen[f"call {number}"] >= {f"producer {number}", *(f"call {earlier}" for earlier in range(number))}
    assert tensor.kept_for == []  # the works hold it until a stream has waited


def test_memory_of_a_dropped_asynchronous_call_is_kept(machine: Machine) -> None:
    order_of_calls, dropped, waited = ordering.CudaLane(torch.device("cpu")), Tensor(), Tensor()
    order_of_calls.run(machine.call("dropped", {}), [dropped], asynchronous=True)  # type: ignore[list-item]
    order_of_calls.run_beside(machine.call("a message", {}), [dropped], ["key"])  # type: ignore[list-item]
    (end,) = order_of_calls._spare
    work = order_of_calls.run(machine.call("waited for", {}), [waited], asynchronous=True)  # type: ignore[list-item]
    assert work._end is end and not order_of_calls._spare, "an event serves again once its work is gone"  # type: ignore[attr-defined]
    work.wait()
    del work
    assert len(dropped.kept_for) == 2 and waited.kept_for == [] and [*order_of_calls._spare] == [end]


def test_the_kit_waits_for_nccl_and_nccl_for_the_kit(machine: Machine) -> None:
    order_of_calls, seen = ordering.CudaLane(torch.device("cpu")), dict[str, set[str]]()
    nccl, child = Stream(machine), object()

    class Work(dist.Work):
        def wait(self, timeout: Any = None) -> bool:
            machine.current.wait_stream(nccl)
            return True

    def nccl_call(name: str) -> Work:
        order_of_calls.before_child()
        nccl.wait_stream(machine.current)
        with machine.on(nccl):
            machine.call(name, seen)()
        work = Work()
        order_of_calls.after_child(child, work)
        return work

    order_of_calls.run(machine.call("kit 1", seen), [], asynchronous=True)
    nccl_call("nccl 1")
    nccl_call("nccl 2")
    order_of_calls.run(machine.call("kit 2", seen), [], asynchronous=True)
    order_of_calls.before_child()
    with machine.on(Stream(machine)):  # a blocking NCCL call has no work, and runs on its caller's stream
        order_of_calls.before_child()
        machine.call("nccl 3", seen)()
        order_of_calls.after_child(child, None)
    order_of_calls.run(machine.call("kit 3", seen), [], asynchronous=False)
    order = ["kit 1", "nccl 1", "nccl 2", "kit 2", "nccl 3", "kit 3"]
    for number, name in enumerate(order):
        assert seen[name] >= set(order[:number]), name


def test_a_captured_graph_and_calls_outside_do_not_wait(machine: Machine) -> None:
    order_of_calls, seen = ordering.CudaLane(torch.device("cpu")), dict[str, set[str]]()
    order_of_calls.run(machine.call("eager 1", seen), [], asynchronous=True)
    for capture in (1, 2):
        captured = Stream(machine)
        captured.capture = capture
        assert machine.side is not None
        with machine.on(captured):
            assert order_of_calls.capture() == capture
            machine.side.capture = capture  # it joins when it waits for the captured stream
            outside, machine.side.before = machine.side.before, set()
            order_of_calls.run(machine.call(f"captured {capture}", seen), [], asynchronous=True).wait()
            order_of_calls.run(machine.call(f"captured {capture} again", seen), [], asynchronous=False)
        captured.capture = machine.side.capture = 0
        machine.side.before = outside
        assert seen[f"captured {capture} again"] == {f"captured {capture}"}
    order_of_calls.run(machine.call("eager 2", seen), [], asynchronous=False)
    assert seen["eager 2"] == {"eager 1"}


def test_captured_messages_run_as_one_behind_their_calls(machine: Machine) -> None:
    """From two streams; what is captured between the calls and the first wait runs beside the messages."""
    order_of_calls, seen, tensors = ordering.CudaLane(torch.device("cpu")), dict[str, set[str]](), [Tensor(), Tensor()]
    messages, started, streams = captured_messages(order_of_calls), list[list[Any]](), [Stream(machine), Stream(machine)]

    def start(transfers: Any, tensors: Any, points: Any) -> dist.Work:
        started.append(transfers)
        assert machine.side is None
        machine.side = Stream(machine)
        machine.side.capture = 7  # it joins when it waits for a captured event
        order_of_calls._beside = [machine.side] * 32  # type: ignore[list-item]
        return order_of_calls.run_beside(machine.call("messages", seen), tensors, ["key"], points)

    for stream in streams:
        stream.capture = 7
    works = []
    for number, stream in enumerate(streams):
        with machine.on(stream):
            machine.current.before.add(f"producer {number}")
            works.append(messages.add(transfer(number), tensors[number], start))  # type: ignore[arg-type]
            machine.current.before.add(f"meanwhile {number}")
    with machine.on(streams[0]):
        assert not started and not works[0].is_completed()
        assert works[1].wait() and works[0].wait()
        assert machine.current.before == {"producer 0", "producer 1", "meanwhile 0", "messages"}
    assert started == [[transfer(0), transfer(1)]] and seen["messages"] == {"producer 0", "producer 1"}
    assert [tensor.kept_for for tensor in tensors] == [[]] * 2


def test_captured_messages_without_a_wait_are_an_error(machine: Machine) -> None:
    """Once, at the next call, and at every wait that comes too late. Captures that still run keep theirs."""
    messages, other = captured_messages(ordering.CudaLane(torch.device("cpu"))), Stream(machine)
    started = list[Any]()

    def start(transfers: Any, tensors: Any, points: Any) -> dist.Work:
        started.append(transfers)
        return ordering.FinishedWork(tensors)

    stream, other.capture = machine.current, 2
    stream.capture = 1
    lost = messages.add(transfer(0), Tensor(), start)  # type: ignore[arg-type]
    with machine.on(other):
        kept = messages.add(transfer(1), Tensor(), start)  # type: ignore[arg-type]
    stream.capture = 0
    with pytest.raises(UsageError, match=r"lacks messages \(1\): .* call wait\(\) on the work"):
        messages.launch()
    messages.launch()
    with pytest.raises(UsageError, match="lacks messages"):
        lost.wait()
    with machine.on(other):
        assert kept.wait()
    assert started == [[transfer(1)]]


def transfer(number: int) -> Transfer:
    return Transfer(address=number, nbytes=4, peer=1, receives=bool(number), label="tag 0")


def test_a_program_of_one_stream_pays_for_no_event(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    order_of_calls, seen, recorded = ordering.CudaLane(torch.device("cpu")), dict[str, set[str]](), list[Any]()
    record = Driver.cuEventRecord

    def noted(self: Driver, event: Any, stream: Stream) -> tuple[int]:
        recorded.append(event)
        return record(self, event, stream)

    monkeypatch.setattr(Driver, "cuEventRecord", noted)
    for number in range(4):
        order_of_calls.run(machine.call(f"call {number}", seen), [], asynchronous=False)
    assert not recorded
    with machine.on(Stream(machine)):
        machine.call("an operator's", seen)()
    assert seen["an operator's"] == {f"call {number}" for number in range(4)}
    machine.call("back", seen)()
    assert seen["back"] >= {"an operator's"} and len(recorded) == 3  # behind call 3, and behind each from then on
    for number in range(2 * lane.ONE_AGAIN):
        machine.call(f"again {number}", seen)()
    count = len(recorded)
    assert count < 3 + lane.ONE_AGAIN
    with machine.on(Stream(machine)):
        machine.call("another operator's", seen)()
    assert seen["another operator's"] >= {f"again {2 * lane.ONE_AGAIN - 1}", "an operator's"} and len(recorded) == count + 2


def seats(*hosts: list[list[str]]) -> list[Seat]:
    """Seats by host: for each rank of a host, the GPUs that it sees."""
    return [Seat(f"host{number}", tuple(gpus)) for number, ranks in enumerate(hosts) for gpus in ranks]


@pytest.mark.parametrize(
    ("members", "shared"),
    [
        (seats([["a", "b"]] * 2), False),
        (seats([["a"], ["b"]]), False),  # a mask for each rank
        (seats([["a"]] * 2), True),
        (seats([["a", "b"]] * 3), True),
        (seats([["a"]], [["a"]]), False),  # the same name on two hosts
        (seats([["a", "b"]] * 2, [["c"]] * 2), True),
        (seats([[]] * 4), False),  # no GPU at all
    ],
)
def test_ranks_share_gpus_where_a_host_has_fewer_than_ranks(members: list[Seat], shared: bool) -> None:
    assert share_gpus(members) is shared


def test_shared_gpus_set_the_variables_of_nccl_but_no_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"NCCL_IB_DISABLE": "0"})
    assert prepare_shared_gpus(seats([["a", "b"]] * 2), "rank1") == {}
    assert "NCCL_HOSTID" not in os.environ
    one_host = prepare_shared_gpus(seats([["a"]] * 2), "rank1")
    assert one_host["NCCL_HOSTID"] == os.environ["NCCL_HOSTID"] == "rank1" and one_host["NCCL_SOCKET_IFNAME"] == "lo"
    assert os.environ["NCCL_IB_DISABLE"] == "0"
    monkeypatch.setattr(os, "environ", {})
    several = prepare_shared_gpus(seats([["a"]] * 2, [["b"]] * 2), "rank1")
    assert several["NCCL_HOSTID"] == "rank1" and "NCCL_SOCKET_IFNAME" not in several  # the hosts need their network


@pytest.mark.parametrize(
    ("ranks", "hosts", "reason"),
    [
        (1, ["a"], ""),
        (9, ["a"] * 9, "the group has 9 ranks; the kit serves up to 8"),
        (4, ["a", "a", "b", "b"], "the group spans 2 hosts; the kit serves groups of one host"),
        (8, ["a"] * 8, ""),
    ],
)
def test_groups_that_the_kit_does_not_serve(ranks: int, hosts: list[str], reason: str) -> None:
    assert kit.refused_group(ranks, hosts) == reason


def test_reductions_that_the_kit_does_not_serve() -> None:
    assert kit.reduction(dist.ReduceOp.AVG, torch.bfloat16) == (Reduction("avg"), "")
    assert kit.reduction(dist.ReduceOp.PRODUCT, torch.bfloat16)[1].startswith("the reduction product; ")
    assert "float8_e4m3fn" in kit.reduction(dist.ReduceOp.SUM, torch.float64)[1]


def test_calls_are_counted_and_reasons_said_once(caplog: pytest.LogCaptureFixture) -> None:
    tally.reset_counts()
    assert tally.report() == "no collective has been called"
    with caplog.at_level(logging.WARNING, "peerlane.device.backend"):
        for operation, reason in itertools.product(("all_reduce", "reduce"), ("", "a reason", "a reason")):
            tally.count(operation, "cuda", "nccl" if reason else "kit", reason)
    assert [record.message for record in caplog.records] == ["all_reduce runs on nccl: a reason", "reduce runs on nccl: a reason"]
    assert tally.counts()[1] == tally.Count("all_reduce", "cuda", "nccl", "a reason", 2)
    assert tally.report().splitlines()[:3] == [
        "operation   tensors  ran on  calls  reason",
        "all_reduce  cuda     kit     1",
        "all_reduce  cuda     nccl    2      a reason",
    ]
    tally.reset_counts()
