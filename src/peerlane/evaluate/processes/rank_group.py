"""Rank groups as the supervisor sees them: ask all ranks with a deadline, kill. No CUDA here, and no torch."""

import contextlib
import math
import os
import re
import selectors
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from peerlane.errors import HarnessError, ProtocolError
from peerlane.evaluate import messages
from peerlane.evaluate.messages import Answer, Request
from peerlane.evaluate.processes.group_failure import GroupFailure as GroupFailure
from peerlane.evaluate.processes.group_failure import root_cause
from peerlane.evaluate.processes.leader import Leader
from peerlane.evaluate.processes.limit import Limit
from peerlane.evaluate.processes.protocol import Channel, encode
from peerlane.sandbox import linux
from peerlane.sandbox.caches import CacheSlot
from peerlane.sandbox.core_time import CoreTime

A = TypeVar("A")

_LOG_BYTES = 2000
_GAVE_UP = re.compile(r"(terminate called |Fatal Python error: ).*?(?=\n\n|\nException raised from|\Z)", re.DOTALL)
_LAST_WORDS_CHARACTERS = 500
_LONG_CALL_S, _REPORT_EVERY_S = 3.0, 1.0  # seconds after which a call may well hang, and between two reports of it
_MAX_DEADLINES = 4.0  # times its deadline that a request with a limit in CPU seconds may take
_GRACE_S = 0.1  # seconds after the first failure in which the leader or another rank may be found dead, which would be the cause


class BuildTime:
    """The time in which a group may compile, all its builds together: it is not taken from what the ranks are asked meanwhile."""

    def __init__(self, total_s: float) -> None:
        self.total_s = self.left_s = total_s
        self.ranks: set[int] = set()
        """those that compile now"""

    def report(self, rank: int, begun: bool) -> None:
        (self.ranks.add if begun else self.ranks.discard)(rank)

    def spend(self, seconds: float) -> float:
        """Deducts seconds from the budget; returns the amount deducted."""
        spent = min(seconds, self.left_s)
        self.left_s -= spent
        return spent


class RankGroup:
    """The supervisor's handle on a leader and its ranks. ``sweep`` has all killed that is left of them where the leader cannot."""

    def __init__(
        self,
        role: str,
        control: Channel,
        ranks: list[Channel],
        memories: list[int],
        logs: list[int],
        sweep: Callable[[], None] | None = None,
    ) -> None:
        self.role = role
        self.slot: CacheSlot | None = None
        self.uid = 0
        """dedicated user id of its processes, or 0"""
        self._leader = Leader(control, sweep)
        self._ranks, self._memories, self._logs = ranks, memories, logs
        self.world_size = len(ranks)
        self._log = ""
        self._pending: tuple[str, float, float, bool] | None = None
        """the phase, the end of its time, how long that is, and whether candidate code runs"""
        self._quiet_s = math.inf
        self._counts_cpu = False
        self._asked: list[Request[Any]] = []
        """The last request of every rank."""
        self.building = BuildTime(0.0)
        self.spaces = set[str]()
        """in which its ranks have a case attached"""
        self.imported_ahead = False
        """its ranks need not import torch's slow part, see :mod:`~peerlane.evaluate.processes.import_ahead`"""
        self.pids: tuple[int, ...] = ()
        """The process ids of the ranks, known once they run."""
        self.limit: Limit | None = None
        """The limit of the evaluation that waits for this group. When it is over, the wait ends, and the group is to be killed."""
        self.tell_wait: Callable[[str, float], None] | None = None
        """hears every second of a long call of the candidate: the phase, and the seconds left until the call counts as a hang"""

    # --- conversation ---

    def ask(
        self,
        requests: Request[A] | Sequence[Request[A]],
        phase: str,
        deadline_s: float,
        *,
        calls: bool = True,
        quiet_s: float = math.inf,
        counts_cpu: bool = False,
    ) -> list[A]:
        """Sends one request to every rank (the same, or one each) and waits for all answers; raises :class:`GroupFailure`.

        ``calls``: the ranks run code of the candidate for it, so that one which does not answer hangs. ``quiet_s``: ranks that make no
        progress for so long hang, too; see :class:`Stillness`. ``counts_cpu``: ranks that are busy have so many CPU seconds, however few
        cores others leave them; those that wait for something else have the deadline as it is.
        """
        self.begin(requests, phase, deadline_s, calls=calls)
        self._quiet_s, self._counts_cpu = quiet_s, counts_cpu
        return self.finish()

    @property
    def busy(self) -> bool:
        return self._pending is not None

    @property
    def alive(self) -> bool:
        """Returns whether its leader has not ended, as far as it is known."""
        return self._leader.alive

    @property
    def lost(self) -> bool:
        """Returns whether the leader, or a rank, has ended by now. Does not wait."""
        return not self.alive or self._leader.read("spawn") is not None or bool(self._leader.exits)

    def begin(self, requests: Request[Any] | Sequence[Request[Any]], phase: str, deadline_s: float, *, calls: bool = True) -> None:
        """Sends without waiting; :meth:`finish` collects. Raises ProtocolError, with nothing sent, for a request that cannot be encoded."""
        if self._pending is not None:
            raise HarnessError(f"{self.role} group was asked to {phase} while busy with {self._pending[0]}")
        frames = self._frames(requests)
        if self.limit is not None:
            self.limit.check(phase)
        now = time.monotonic()
        self._pending = (phase, now + deadline_s, deadline_s, calls)
        for rank, frame in enumerate(frames):
            try:
                self._ranks[rank].send_frame(frame)
            except OSError:
                continue  # the exit report says why

    def _frames(self, requests: Request[Any] | Sequence[Request[Any]]) -> list[bytes]:
        """Returns the frame that each process is sent. Remembers the requests, which answers have to fit."""
        if isinstance(requests, Request):
            frames = [encode(messages.request_message(requests))] * self.world_size
            self._asked = [requests] * self.world_size
        else:
            frames = [encode(messages.request_message(request)) for request in requests]
            self._asked = list(requests)
        return frames

    def _read_answer(self, process: int, message: messages.Message) -> Answer[Any] | messages.RankError:
        """Returns a process's answer, checked; raises ProtocolError."""
        return messages.read_answer(self._asked[process], message)

    def finish(self) -> list[Any]:
        """Waits for the answers to :meth:`begin`."""
        assert self._pending is not None, "begin comes first"
        phase, end, deadline_s, calls = self._pending
        self._pending, waiting, begin = None, set(range(self.world_size)), time.monotonic()
        quiet_s, self._quiet_s = self._quiet_s, math.inf
        counts_cpu, self._counts_cpu = self._counts_cpu, False
        answers: dict[int, Answer[Any]] = {}
        failure: GroupFailure | None = None
        last_end = math.inf if self.limit is None else self.limit.end
        next_report = begin + _LONG_CALL_S if calls and self.tell_wait is not None else math.inf
        with selectors.DefaultSelector() as selector:
            selector.register(self._leader.channel, selectors.EVENT_READ, None)
            if self.limit is not None:
                selector.register(self.limit, selectors.EVENT_READ, self.limit)
            for rank in sorted(waiting):
                selector.register(self._ranks[rank], selectors.EVENT_READ, rank)
            expired = stuck = False  # the last look comes after the deadline: answers that lay waiting for longer than that count
            while waiting and not expired:
                now, building = time.monotonic(), bool(self.building.ranks)
                left = min(last_end - now, self.building.left_s if building else end - now)
                stuck = not building and min(self._leader.still_s, now - begin) >= quiet_s
                if counts_cpu and end <= now < last_end and failure is None and not building:
                    end = now + self._cpu_left_s(deadline_s, now - begin)
                    if end > now:
                        continue
                expired = left <= 0 or stuck
                ready = selector.select(0 if stuck else max(min(left, next_report - now), 0))
                if building:
                    spent = self.building.spend(time.monotonic() - now)
                    end, last_end = end + spent, last_end + spent
                    if self.limit is not None:
                        self.limit.end = last_end
                if self.tell_wait is not None and next_report <= time.monotonic() < now + left:
                    self.tell_wait("build" if building else phase, now + left - time.monotonic())
                    next_report = time.monotonic() + _REPORT_EVERY_S
                for key, _ in ready:
                    if key.data is None:
                        failure = self._leader.read(phase) or failure
                        continue
                    if isinstance(key.data, Limit):
                        key.data.check(phase)
                    outcome = self._read_rank(key.data, phase)
                    if outcome is None:
                        continue
                    if isinstance(outcome, GroupFailure):
                        if outcome.kind == "exit":  # the leader knows the status; wait for its report a moment
                            outcome = self._leader.await_exit(key.data, phase) or self._exit_failure(key.data, phase)
                        failure = root_cause(failure, outcome)
                    else:
                        answers[key.data] = outcome
                    waiting.discard(key.data)
                    selector.unregister(key.fileobj)
                for rank in sorted(waiting & (self._leader.ending | set(self._leader.exits))):
                    waiting.discard(rank)
                    selector.unregister(self._ranks[rank])
                    outcome = self._last_words(rank, phase)
                    if isinstance(outcome, GroupFailure):
                        failure = root_cause(failure, outcome)
                    else:
                        answers[rank] = outcome
                if failure is not None:
                    self.building.ranks.clear()
                    end = min(end, time.monotonic() + _GRACE_S)
        call_s = time.monotonic() - begin
        if self.limit is not None and calls:
            self.limit.called_s += call_s
        if failure is not None:
            raise failure
        if waiting:
            late = tuple(sorted(waiting))
            if self.limit is not None:
                self.limit.check(phase, late if calls else (), call_s)
            if stuck:
                deadline_s = quiet_s
            elif self.building.ranks:
                phase, deadline_s, late = "build", self.building.total_s, tuple(sorted(self.building.ranks))
            what = f"no answer from rank(s) {', '.join(map(str, late))} for {deadline_s:g} s"
            if not calls:
                what += f" to {self._asked[0].op}, while no call ran: threads of the candidate, or other programs, keep them busy"
            raise GroupFailure("hang" if calls else "no_answer", phase, what, ranks=late, deadline_s=deadline_s, stuck=stuck)
        return [answers[rank].value for rank in range(self.world_size)]

    def _cpu_left_s(self, cpu_s: float, waited_s: float) -> float:
        """Returns how much longer to wait for ranks that have not had their CPU seconds: 0 if they have, or do not want them."""
        had = self.core_time()
        if had is None or had.longest_run_s >= cpu_s or 2 * (had.longest_run_s + had.longest_wait_s) < waited_s:
            return 0.0
        return max(0.0, min(max(1.0, cpu_s - had.longest_run_s), _MAX_DEADLINES * cpu_s - waited_s))

    def _read_rank(self, rank: int, phase: str) -> Answer[Any] | GroupFailure | None:
        """A rank's answer, or how it failed; None while there is no answer. Here a candidate's answer becomes a checked one."""
        channel = self._ranks[rank]
        open_ = channel.feed()
        try:
            while (message := channel.pop()) is not None and (building := messages.read_building(message)) is not None:
                self.building.report(rank, building)
            answer = None if message is None else self._read_answer(rank, message)
        except ProtocolError as error:
            return GroupFailure("garbage", phase, str(error), rank=rank)
        if isinstance(answer, messages.RankError):
            return GroupFailure(answer.kind, phase, answer.text, rank=self._rank_of(rank, answer))
        if answer is not None or open_:
            return answer
        return GroupFailure("exit", phase, "the process ended", rank=rank)

    def _last_words(self, rank: int, phase: str) -> Answer[Any] | GroupFailure:
        """Returns what a rank sent before it ended, or how it ended. Its answer may have come after the selector's last look."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._ranks[rank], selectors.EVENT_READ)
            while selector.select(0):
                outcome = self._read_rank(rank, phase)
                if isinstance(outcome, GroupFailure) and outcome.kind == "exit":
                    break
                if outcome is not None:
                    return outcome
        return self._exit_failure(rank, phase)

    def _rank_of(self, process: int, error: messages.RankError) -> int:
        """The rank that a process's report of an error is about."""
        return process

    def _exit_failure(self, rank: int, phase: str) -> GroupFailure:
        status = self._leader.exits.get(rank)
        if self._leader.exceeded is not None:  # told before its ranks were killed
            return GroupFailure(self._leader.exceeded[0], phase, self._leader.exceeded[1])
        if status is None:
            how = "died, and waits for its device to be freed" if rank in self._leader.ending else "closed its command socket"
        elif status < 0:
            known = {member.value: member.name for member in signal.Signals}
            how = f"was ended by signal {known.get(-status, -status)}"  # real-time signals have no names
        else:
            how = f"exited with status {status}"
        said = self._said_of_end(rank) if status in (None, -signal.SIGABRT) else ""
        return GroupFailure("exit", phase, f"rank {rank} {how}{said and f': {said}'}", rank=rank)

    def _said_of_end(self, rank: int) -> str:
        """Returns what the C++ runtime, or Python, has printed when it gave up; empty if neither did."""
        found = _GAVE_UP.search(self._log_of(rank)) if self._logs else None
        return "" if found is None else " ".join(found[0].split())[:_LAST_WORDS_CHARACTERS]

    @property
    def running(self) -> tuple[int, ...]:
        """The processes of its ranks that have not ended, as far as the leader has told."""
        self._leader.read("exit")
        return tuple(pid for rank, pid in enumerate(self.pids) if rank not in self._leader.exits)

    def await_end(self, deadline_s: float) -> tuple[int, ...]:
        """Waits for all ranks to exit by themselves; returns those that have not."""
        self._leader.await_exits(self.world_size, deadline_s)
        return tuple(rank for rank in range(self.world_size) if rank not in self._leader.exits)

    # --- resources ---

    def mark_core_time(self) -> None:
        """Begins the time that :meth:`core_time` is about."""
        self._leader.mark_core_time()

    def core_time(self) -> CoreTime | None:
        """Returns what its processes had of the cores since the mark; None if the leader does not report it."""
        return self._leader.core_time()

    def memory_fd(self, rank: int) -> int:
        """The rank's shared memory file, for another group's rank to map."""
        return self._memories[rank]

    def empty_memory(self) -> None:
        """Zeros in all of the ranks' memory files: what a candidate left there, in arenas or far behind them, is nobody's any more."""
        for fd in self._memories:
            linux.empty_file(fd)

    def admit(self, sha256: str) -> str | None:
        """Gives the ranks the cache of the candidate with this source, for as long as they live; its path, or None if all share one."""
        return None if self.slot is None else str(self.slot.admit(sha256))

    def log_tail(self) -> str:
        """The end of what the ranks printed, one section per rank that printed anything. Complete once the group has been killed."""
        parts = []
        for rank in range(len(self._logs)):
            if text := self._log_of(rank):
                parts.append(f"[rank {rank}] {text}")
        return "\n".join(parts) or self._log

    def _log_of(self, rank: int) -> str:
        fd = self._logs[rank]
        return os.pread(fd, _LOG_BYTES, max(0, os.fstat(fd).st_size - _LOG_BYTES)).decode(errors="replace").strip()

    def kill(self, deadline_s: float = 10.0) -> None:
        """Ends the whole tree and waits until it is gone; raises :class:`HarnessError` if a process survives."""
        survivors = self._leader.end(deadline_s)
        self._log = self.log_tail()
        for channel in [self._leader.channel, *self._ranks]:
            channel.close()
        for fd in [*self._memories, *self._logs]:
            with contextlib.suppress(OSError):
                os.close(fd)
        self._memories, self._logs = [], []
        if self.slot is not None:
            self.slot.release()
            self.slot = None
        if survivors:
            raise HarnessError(f"processes {survivors} survived SIGKILL for {deadline_s:g} s; they may be stuck in the GPU driver")


class EmulatedRankGroup(RankGroup):
    """Emulated ranks, all of them threads of one process. Takes one request for each rank, or one for all, as other groups do; the process
    gets them in one message, and answers for all ranks in one."""

    emulated_ranks = 0
    """how many ranks the process has; set when it is started"""

    def _frames(self, requests: Request[Any] | Sequence[Request[Any]]) -> list[bytes]:
        self._asked = [requests] * self.emulated_ranks if isinstance(requests, Request) else list(requests)
        return [encode(messages.request_message(requests))]

    def _read_answer(self, process: int, message: messages.Message) -> Answer[Any] | messages.RankError:
        return messages.read_answers(self._asked, message)

    def finish(self) -> list[Any]:
        try:
            (answers,) = super().finish()
        except GroupFailure as failure:
            if failure.kind in ("hang", "no_answer"):
                failure.ranks = tuple(range(self.emulated_ranks))
            raise
        return list(answers)

    def _rank_of(self, process: int, error: messages.RankError) -> int:
        return error.rank if error.rank is not None and error.rank < self.emulated_ranks else 0
