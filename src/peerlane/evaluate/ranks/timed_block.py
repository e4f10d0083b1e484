"""Timed blocks: K calls back to back on one rank, on slots 0 to K-1, between two events of the caller's stream.

Functions used while candidate code is present are bound at import, which happens before.
"""

import abc
import gc
import itertools
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from peerlane.evaluate.audit.recorder import collectives
from peerlane.evaluate.memory.output_copies import OutputCopies
from peerlane.evaluate.memory.slots import ArgumentSlots, OutputRegions, Unowned, waited_for
from peerlane.evaluate.timing.cache_flush import evict, quiesce, synchronize_all, zeros
from peerlane.evaluate.wire import BlockPlan, BlockRun
from peerlane.problems.contract.tree import Tree, leaves, map_leaves

_Event = torch.cuda.Event
_record = torch.cuda.Event.record
_elapsed = torch.cuda.Event.elapsed_time
_synchronize = torch.cuda.synchronize
_current_stream, _set_stream = torch.cuda.current_stream, torch.cuda.set_stream
_replay = torch.cuda.CUDAGraph.replay
_all_reduce = dist.all_reduce
_collectives = collectives
_collect, _gc_enable, _gc_disable = gc.collect, gc.enable, gc.disable
_clock = time.perf_counter
COPIES_RUNS = 3
_NO_MARK: AbstractContextManager[Any] = nullcontext()

Solution = Callable[..., Tree]


class Block(abc.ABC):
    """The calls of one block on this rank, in one launch mode, with the events around them."""

    captured_collectives = 0
    """what process groups counted while the calls were captured"""
    in_graphs = False
    barrier_bytes = 4 << 20
    """Ranks meet in an all-reduce of this size. After a pause, small collectives of the first calls take 100 us longer, or a multiple of
    it, until every link has carried bytes (results/h200x2/first_calls.txt)."""

    def __init__(self, solution: Solution, inputs: ArgumentSlots, outputs: OutputRegions, device: torch.device, plan: BlockPlan) -> None:
        self._solution, self._inputs, self._outputs, self._device, self.plan = solution, inputs, outputs, device, plan
        self._swappers = inputs.swappers(plan.swaps)
        self._copies = OutputCopies(outputs, device)
        self._barrier = zeros(self.barrier_bytes) if device.type == "cuda" else torch.zeros(1)
        self._kept: list[Any] = []
        self._start, self._end = (_Event(enable_timing=True, external=self.in_graphs) for _ in range(2))  # type: ignore[no-untyped-call]

    def _enqueue(self, slots: Iterable[int], keep: Callable[[list[torch.Tensor]], list[Any]]) -> None:
        """Calls the slots in this order, with what belongs between the calls: the output of each is copied.

        No call is told whether its output will be compared: that is drawn after the block.
        """
        last = self.plan.calls - 1
        for slot in slots:
            if slot in self._swappers:
                self._swappers[slot]()
            self._kept = []
            args = self._outputs.fresh(self._inputs.args[slot])
            output = self._solution(*args)
            found = self._copies.take(slot, output, args)
            if slot == last:
                self._kept = keep(found)
            del output, found

    @abc.abstractmethod
    def _launch(self) -> None:
        """Enqueues all calls, and records the events before the first and behind the last."""

    @abc.abstractmethod
    def latest(self) -> list[torch.Tensor]:
        """Returns what the last call of the latest run returned."""

    def ready(self) -> None:
        """Makes the rank ready for :meth:`run`: no garbage, idle devices, a cold L2 cache."""
        _collect()
        _gc_disable()
        quiesce()
        evict()
        synchronize_all()

    def run(self, mark: AbstractContextManager[Any] = _NO_MARK) -> BlockRun:
        """Runs one block behind a barrier of all ranks, until this process's devices are idle. Collectives of captured calls count too.
        ``mark`` is entered while the calls are launched."""
        try:
            _all_reduce(self._barrier)
            counted = -_collectives()
            with mark:
                begin = _clock()
                self._launch()
                launch_us = (_clock() - begin) * 1e6
            counted += _collectives()
            synchronize_all()
        finally:
            _gc_enable()
        return BlockRun(float(_elapsed(self._start, self._end)) * 1e3, launch_us, self.captured_collectives + counted)

    def warm(self) -> None:
        """Every call once, without barrier."""
        self._launch()
        _synchronize()

    def profile(self, mark: AbstractContextManager[Any] | None = None) -> None:
        """One block to be recorded, without clocks; with a ``mark`` as it is timed: what is launched inside the mark are its calls."""
        if mark is None:
            self.warm()
        else:
            self.ready()
            self.run(mark)


class EagerBlock(Block):
    def _launch(self) -> None:
        _record(self._start)
        self._enqueue(range(self.plan.calls), list)
        _record(self._end)

    def latest(self) -> list[torch.Tensor]:
        return self._kept


class BackToBackBlock(EagerBlock):
    """Calls on all slots in turn, with nothing between them; the warm-up is apart, and behind it the caches are as calls leave them."""

    def _enqueue(self, slots: Iterable[int], keep: Callable[[list[torch.Tensor]], list[Any]]) -> None:
        count = len(self._inputs.args)
        for call in slots:
            self._solution(*self._outputs.fresh(self._inputs.args[call % count]))

    def warm(self) -> None:
        self._enqueue(range(self.plan.warm_up), list)
        _synchronize()


class GraphBlock(Block):
    """Replays the calls as CUDA graphs, with swaps and copies of outputs among them.

    A graph holds at most 16 calls, for NCCL ties every captured collective to all earlier ones of its graph: its k-th one costs in
    proportion to k. A block of more calls is several graphs behind each other. Raises what the capture raises.
    """

    in_graphs, calls_per_graph = True, 16
    barrier_bytes = 64 << 20
    """It takes the device about as long as the host takes to launch the graphs: no rank is early then, and no pause follows."""

    def __init__(self, solution: Solution, inputs: ArgumentSlots, outputs: OutputRegions, device: torch.device, plan: BlockPlan) -> None:
        super().__init__(solution, inputs, outputs, device, plan)
        _all_reduce(self._barrier)
        _synchronize()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._capture()

    def _capture(self) -> None:
        self._graphs.clear()
        stream, before = _current_stream(), _collectives()
        pool, calls = torch.cuda.graph_pool_handle(), self.plan.calls
        try:
            for first in range(0, calls, self.calls_per_graph):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                    if first == 0:
                        _record(self._start)
                    self._enqueue(range(first, min(first + self.calls_per_graph, calls)), lambda found: [*map(Unowned, found)])
                    if first + self.calls_per_graph >= calls:
                        _record(self._end)
                self._graphs.append(graph)
        except BaseException:
            _set_stream(stream)  # torch.cuda.graph stays on its own stream when a broken capture cannot be ended
            raise
        self.captured_collectives = _collectives() - before
        _synchronize()

    def _launch(self) -> None:
        for graph in self._graphs:
            _replay(graph)

    def profile(self, mark: AbstractContextManager[Any] | None = None) -> None:
        """Captured anew before, so that a record of the host has the calls."""
        self._capture()
        super().profile(mark)

    def latest(self) -> list[torch.Tensor]:
        return [item.tensor() for item in self._kept]


def capture_failure(error: BaseException) -> str:
    """Returns why a capture failed: torch reports the end of the capture, with what went wrong inside it as the context."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {error}"[:1000]


class _CopiesGraph(GraphBlock):
    """Swaps and copies alone, in one graph: parts of it might be empty."""

    calls_per_graph = 1 << 30


def make_block(
    mode: str, solution: Solution, inputs: ArgumentSlots, outputs: OutputRegions, device: torch.device, plan: BlockPlan
) -> Block:
    """The block of a launch mode, ``eager`` or ``graph``."""
    kind = GraphBlock if mode == "graph" else BackToBackBlock if plan.warm_up else EagerBlock
    return kind(solution, inputs, outputs, device, plan)


def copies_time(block: Block, undo_swaps: Callable[[], None]) -> tuple[float, float]:
    """Returns the microseconds of a block's swaps and output copies without its calls: what the device takes for them, and what the host
    takes to launch the copies one by one. Each is the shortest of a few runs, behind each of which swaps are undone.

    The device's time is that of a graph. In eager mode it is the shorter one of a graph and of single launches. Large copies take longer in
    a graph: 1,551 us for 2.1 GB on an H200, and 1,042 us one by one. Small ones wait for the host, which costs nothing while the device
    still computes.
    """
    solution, inputs, outputs, device, plan = block._solution, block._inputs, block._outputs, block._device, block.plan
    alike: dict[str, Tree] = {}  # one answer stands for all of its layout: several may take more memory than there is
    answers = {}
    for slot in range(plan.calls):
        layout = repr(outputs.shapes(slot))
        if layout not in alike:
            alike[layout] = map_leaves(solution(*outputs.fresh(inputs.args[slot])), waited_for)  # waiting is no copy
        answers[slot] = alike[layout]
    calls = itertools.cycle(range(plan.calls))

    def runs_of(kind: type[Block], plan: BlockPlan) -> list[BlockRun]:
        block = kind(lambda *_: answers[next(calls)], inputs, outputs, device, plan)
        block.warm()
        runs = []
        for _ in range(COPIES_RUNS):
            if plan.swaps:
                undo_swaps()
            block.ready()
            runs.append(block.run())
        if plan.swaps:
            undo_swaps()
        return runs

    # The host waits for copies from its own memory, which no graph can hold.
    in_graph = device.type == "cuda" and all(tensor.is_cuda for answer in alike.values() for tensor in leaves(answer))
    kinds: list[type[_CopiesGraph | EagerBlock]] = [_CopiesGraph] if in_graph else []
    if not (in_graph and block.in_graphs):
        kinds.append(EagerBlock)
    device_us = min(run.events_us for kind in kinds for run in runs_of(kind, plan))
    return device_us, min(run.launch_us for run in runs_of(EagerBlock, replace(plan, swaps=())))
