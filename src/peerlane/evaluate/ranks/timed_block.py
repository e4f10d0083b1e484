"""Timed blocks: K calls back to back on one rank, each between two events, in eager or graph mode.

A block starts with a cold L2 cache, and each of its bursts behind a device-side barrier over all ranks. The times are device times of this
rank; the supervisor takes the maximum over the ranks per call.

Functions used while candidate code is present are bound at import, which happens before.
"""

from __future__ import annotations

import abc
import gc
import statistics
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist

from peerlane.evaluate.audit.recorder import collectives
from peerlane.evaluate.memory.slots import OutputRegions, Unowned
from peerlane.evaluate.timing.cache_flush import evict, quiesce, synchronize_all
from peerlane.evaluate.timing.cores import TimedCore, parts
from peerlane.evaluate.timing.locks import Hooks
from peerlane.problems.contract.tree import Tree

_Event = torch.cuda.Event
_record = torch.cuda.Event.record
_elapsed = torch.cuda.Event.elapsed_time
_synchronize = torch.cuda.synchronize
_current_stream, _set_stream = torch.cuda.current_stream, torch.cuda.set_stream
_sleep = torch.cuda._sleep
_CYCLES_PER_US = 1_800  # SM clock
_CORES_APART = 3  # where one burst and the next begin to look for a core: ranks have up to eight
_EXCHANGE_US, _LOCK_US = 300.0, 60.0  # of host time, generously, of what happens between two calls
_replay = torch.cuda.CUDAGraph.replay
_all_reduce = dist.all_reduce
_collectives = collectives
_clock = time.perf_counter
_collect, _gc_enable, _gc_disable = gc.collect, gc.enable, gc.disable

Solution = Callable[..., Tree]


def _timer(**options: bool) -> torch.cuda.Event:
    return _Event(enable_timing=True, **options)  # type: ignore[no-untyped-call]


class Block(abc.ABC):
    """K slots of one case on this rank, in one launch mode, with the events that time them.

    ``head_start_us``: for so long per call the device is kept waiting while the host enqueues, so that the host stays ahead of it.
    """

    head_start_us = 0.0
    moves = False
    """whether each burst has a core of its own"""
    captured_collectives = 0
    """what process groups counted while the calls were captured"""

    def __init__(self, solution: Solution, args: list[tuple[Any, ...]], outputs: OutputRegions, device: torch.device) -> None:
        self._solution, self._args, self._outputs = solution, args, outputs
        self._barrier = torch.zeros(1, device=device)
        self._starts: list[torch.cuda.Event] = []
        self._ends: list[torch.cuda.Event] = []

    def _run(self, order: list[int], before: Hooks, behind: Hooks, positions: range) -> None:
        """Enqueues the calls at these positions of an order of slots, and what belongs between them."""
        last = len(order) - 1
        for position in positions:
            if position in before:
                before[position]()
            self._call(order[position], last=position == last)
            if position in behind:
                behind[position]()

    def _start_together(self, before: Hooks, behind: Hooks, positions: range) -> None:
        """Keeps the device waiting until the calls at these positions can be enqueued, and then until all ranks are there."""
        if self.head_start_us:
            between_us = sum(_LOCK_US if position in behind else _EXCHANGE_US for position in positions if position in before)
            _sleep(int((self.head_start_us * len(positions) + between_us) * _CYCLES_PER_US))  # type: ignore[no-untyped-call]
        _all_reduce(self._barrier)

    @abc.abstractmethod
    def bursts(self, calls: int, most: int) -> list[range]:
        """The positions of calls that are enqueued before the host waits for the device; ``most``: where their number is free."""

    @abc.abstractmethod
    def _call(self, slot: int, *, last: bool) -> None:
        """Enqueues the call of a slot; what the ``last`` one returns is kept."""

    @abc.abstractmethod
    def latest(self) -> list[torch.Tensor]:
        """What the last call of the latest run returned."""

    def run(
        self,
        core: TimedCore,
        sought: Mapping[str, Any],
        order: list[int],
        before: Hooks,
        behind: Hooks,
        *,
        parts: int = 1,
        timed: bool = True,
    ) -> dict[str, Any]:
        """One block, its slots in this order, this thread kept on a core at full speed; ``sought``: the arguments of its ``settle``.
        Eager calls come in up to so many ``parts``, each on a core of its own.

        Returns ``pace_us`` and ``collectives``: how many the process groups counted in the calls, captured ones included. If ``timed``, for
        which no slot may come twice, also ``iterations_us`` (call by call), ``span_us`` (first start to last end of every burst, added
        up), ``gaps_us`` (behind each call, until the next one of its burst starts; 0 behind its last), and ``host_gap_us`` (for how long a
        device that is ready must usually wait for the host there).
        """
        _collect()
        _gc_disable()
        counted, paces_us = 0, []
        bursts = self.bursts(len(order), parts)
        try:
            quiesce()
            with core.taken():
                for number, positions in enumerate(bursts):
                    if number == 0 or self.moves:  # at the last moment: cores change within milliseconds
                        paces_us.append(core.settle(**sought, further=_CORES_APART * number))
                    if number == 0:
                        evict()
                    self._start_together(before, behind, positions)
                    counted -= _collectives()
                    self._run(order, before, behind, positions)
                    counted += _collectives()
                    synchronize_all()
        finally:
            _gc_enable()
        answer: dict[str, Any] = {"pace_us": min(paces_us), "collectives": self.captured_collectives + counted}
        if timed:
            answer["iterations_us"] = [self._elapsed_us(slot, slot) for slot in order]
            answer["span_us"] = sum(self._elapsed_us(order[positions[0]], order[positions[-1]]) for positions in bursts)
            following = {call: (order[call], order[call + 1]) for positions in bursts for call in positions[:-1]}
            device_us = {call: float(_elapsed(self._ends[slot], self._starts[after])) * 1e3 for call, (slot, after) in following.items()}
            answer["gaps_us"] = [max(0.0, device_us.get(call, 0.0)) for call in range(len(order))]
            answer["host_gap_us"] = self._host_gap_us(following.values())
        return answer

    def _elapsed_us(self, first: int, last: int) -> float:
        """From the start of a slot's call to the end of another's."""
        return float(_elapsed(self._starts[first], self._ends[last])) * 1e3

    @abc.abstractmethod
    def _host_gap_us(self, pairs: Collection[tuple[int, int]]) -> float:
        """For how long the device must usually wait for the host between the call of a slot and that of the next one, given as pairs."""

    def warm(self) -> None:
        """Every call once, without clocks and barrier, until all have ended."""
        self._once(list(range(len(self._args))))

    def profile_block(self, order: list[int]) -> None:
        """The same in this order."""
        self._once(order)

    def _once(self, order: list[int]) -> None:
        self._run(order, {}, {}, range(len(order)))
        _synchronize()


class EagerBlock(Block):
    """Calls ``solution`` from Python for every slot, in parts from several cores."""

    moves = True

    def __init__(self, solution: Solution, args: list[tuple[Any, ...]], outputs: OutputRegions, device: torch.device) -> None:
        super().__init__(solution, args, outputs, device)
        self._starts = [_timer() for _ in args]
        self._ends = [_timer() for _ in args]
        self._latest: list[torch.Tensor] = []
        self._recorded_s = [(0.0, 0.0) for _ in args]
        """of each slot's call, when the host recorded its start and its end"""

    def bursts(self, calls: int, most: int) -> list[range]:
        return parts(calls, most)

    def _call(self, slot: int, *, last: bool) -> None:
        self._latest = []
        args = self._outputs.fresh(self._args[slot])
        begin = _clock()
        _record(self._starts[slot])
        output = self._solution(*args)
        _record(self._ends[slot])
        self._recorded_s[slot] = begin, _clock()
        found = self._outputs.take(slot, output, args)
        if last:
            self._latest = found

    def _host_gap_us(self, pairs: Collection[tuple[int, int]]) -> float:
        return _median_us([self._recorded_s[after][0] - self._recorded_s[slot][1] for slot, after in pairs])

    def latest(self) -> list[torch.Tensor]:
        return self._latest


class GraphBlock(Block):
    """Captures the call of every slot, with its snapshot, into a CUDA graph of its own and replays them in any order.

    In bursts, because a device's queue is finite: it held 19 to 28 such graphs on H200s. A host that meets a full one is hardly ahead of
    the device any more, and every rank waits for the slowest host.

    One graph for the whole block would be wrong: NCCL ties every captured collective to all earlier ones of the same graph, so that the
    k-th costs in proportion to k. Raises what the capture raises.
    """

    head_start_us = 40.0
    """meant to exceed what launching a graph takes: 18 us on hosts of H200s, and 38 in the slowest burst of nine blocks of ten. A slower
    host still counts. The same on both sides: the outer clock runs meanwhile"""
    burst = 16

    def __init__(self, solution: Solution, args: list[tuple[Any, ...]], outputs: OutputRegions, device: torch.device) -> None:
        super().__init__(solution, args, outputs, device)
        self._starts = [_timer(external=True) for _ in args]
        self._ends = [_timer(external=True) for _ in args]
        self._launched_s = [0.0 for _ in args]
        """when the host began to launch each slot's graph"""
        self._returned: list[list[Unowned]] = []
        self._last = 0
        _all_reduce(self._barrier)
        _synchronize()
        stream, before = _current_stream(), _collectives()
        try:
            self._graphs = self._capture()
        except BaseException:
            _set_stream(stream)  # torch.cuda.graph stays on its own stream when a broken capture cannot be ended
            raise
        self.captured_collectives = _collectives() - before
        _synchronize()

    def profile_block(self, order: list[int]) -> None:
        """As every block's, captured anew before."""
        self._graphs.clear()
        self._returned.clear()
        self._graphs = self._capture()
        _synchronize()
        super().profile_block(order)

    def _capture(self) -> list[torch.cuda.CUDAGraph]:
        graphs = []
        pool = torch.cuda.graph_pool_handle()
        for slot, args in enumerate(map(self._outputs.fresh, self._args)):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                _record(self._starts[slot])
                output = self._solution(*args)
                _record(self._ends[slot])
                self._returned.append([Unowned(tensor) for tensor in self._outputs.take(slot, output, args)])
                del output
            graphs.append(graph)
        return graphs

    def bursts(self, calls: int, most: int) -> list[range]:
        return [range(first, min(first + self.burst, calls)) for first in range(0, calls, self.burst)]

    def _call(self, slot: int, *, last: bool) -> None:
        self._launched_s[slot] = _clock()
        _replay(self._graphs[slot])
        self._last = slot

    def _host_gap_us(self, pairs: Collection[tuple[int, int]]) -> float:
        period_us = _median_us([self._launched_s[after] - self._launched_s[slot] for slot, after in pairs])
        return max(0.0, period_us - self.head_start_us)

    def latest(self) -> list[torch.Tensor]:
        return [item.tensor() for item in self._returned[self._last]]


def _median_us(seconds: list[float]) -> float:
    return 1e6 * statistics.median(seconds or [0.0])


def capture_failure(error: BaseException) -> str:
    """Why a capture failed: torch reports the end of the capture, with what went wrong inside it as the context."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {error}"[:1000]


def make_block(mode: str, solution: Solution, args: list[tuple[Any, ...]], outputs: OutputRegions, device: torch.device) -> Block:
    """The block of a launch mode, ``eager`` or ``graph``."""
    return (EagerBlock if mode == "eager" else GraphBlock)(solution, args, outputs, device)
