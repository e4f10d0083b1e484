"""Rank groups as the supervisor sees them: spawn, ask all ranks with a deadline, kill. No CUDA here."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from peerlane.errors import HarnessError, ProtocolError
from peerlane.evaluate.caches import CacheSlot, RunFolders
from peerlane.evaluate.isolation import NO_ISOLATION, Isolation
from peerlane.evaluate.protocol import Channel, Message, encode
from peerlane.settings import ARCHITECTURE

_REPORTED_KINDS = {"runtime_error", "import_error", "cuda_error", "out_of_memory", "build_error", "not_run"}
_SEND_S = 10  # a rank that does not read its requests for this long has failed, and the answer's deadline will say so
_GRACE_S = 0.1  # after the first rank fails, the leader or another rank has this long to be found dead, which would be the cause
_FILE_BYTES = 1 << 42  # address space, not memory: pages come into being when they are written


class GroupFailure(Exception):
    """A rank group did not do what it was asked. The group must be killed.

    Attributes:
        kind: ``hang``, ``exit``, ``garbage``, or the kind a rank reported (``runtime_error``, ``cuda_error``, ...).
        phase: what was being done.
        rank: the first rank that failed, if one can be named.
        ranks: for a hang, the ranks that had not answered.
        message: the rank's traceback or a sentence.
        deadline_s: for a hang, how long was waited.
    """

    def __init__(
        self,
        kind: str,
        phase: str,
        message: str,
        *,
        rank: int | None = None,
        ranks: Sequence[int] = (),
        deadline_s: float = 0.0,
    ) -> None:
        super().__init__(f"{kind} in {phase}: {message}")
        self.kind, self.phase, self.message = kind, phase, message
        self.rank, self.ranks, self.deadline_s = rank, tuple(ranks), deadline_s


def _cause(first: GroupFailure | None, second: GroupFailure) -> GroupFailure:
    """Which of two failures, in the order of their arrival, explains the other: ranks raise when one that they wait for has ended."""
    if first is None or (first.kind == "runtime_error" and second.kind == "exit"):
        return second
    return first


class RankGroup:
    """The supervisor's handle on a leader and its ranks. ``end_leader`` has the leader killed when it does not do what it is told."""

    def __init__(
        self,
        role: str,
        control: Channel,
        ranks: list[Channel],
        memories: list[int],
        logs: list[int],
        end_leader: Callable[[], None] | None = None,
    ) -> None:
        self.role = role
        self.slot: CacheSlot | None = None
        self.world_size = len(ranks)
        self._control, self._ranks, self._memories, self._logs = control, ranks, memories, logs
        self._exits: dict[int, int] = {}
        self._early: list[Message] = []
        self._log = ""
        self._end_leader = end_leader
        self._pending: tuple[str, float, float, set[int]] | None = None
        self.alive = True

    # --- conversation ---

    def ask(self, requests: Message | Sequence[Message], phase: str, deadline_s: float) -> list[Message]:
        """Sends one request to every rank (the same, or one each) and waits for all answers; raises :class:`GroupFailure`."""
        self.begin(requests, phase, deadline_s)
        return self.finish()

    @property
    def busy(self) -> bool:
        """True between :meth:`begin` and :meth:`finish`."""
        return self._pending is not None

    @property
    def lost(self) -> bool:
        """True if the leader, or a rank, has ended by now. Does not wait."""
        return not self.alive or self._read_control("spawn") is not None or bool(self._exits)

    def wait(self) -> None:
        """Collects the answers to :meth:`begin` early; :meth:`finish` then returns at once."""
        self._early = self.finish()

    def begin(self, requests: Message | Sequence[Message], phase: str, deadline_s: float) -> None:
        """Sends without waiting; :meth:`finish` collects. Raises ProtocolError, with nothing sent, for a request that cannot be encoded."""
        if self._pending is not None:
            raise HarnessError(f"{self.role} group was asked to {phase} while busy with {self._pending[0]}")
        each = [encode(requests)] * self.world_size if isinstance(requests, dict) else [encode(request) for request in requests]
        now = time.monotonic()
        self._pending = (phase, now + deadline_s, deadline_s, set(range(self.world_size)))
        for rank, frame in enumerate(each):
            try:
                self._ranks[rank].send_frame(frame)
            except OSError:
                continue  # the exit report says why

    def finish(self) -> list[Message]:
        """Waits for the answers to :meth:`begin`."""
        if self._pending is None:
            answers_, self._early = self._early, []
            return answers_
        phase, end, deadline_s, waiting = self._pending
        self._pending = None
        answers: dict[int, Message] = {}
        failure: GroupFailure | None = None
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ, None)
            for rank in sorted(waiting):
                selector.register(self._ranks[rank], selectors.EVENT_READ, rank)
            expired = False  # the last look comes after the deadline: answers that lay waiting for longer than that count
            while waiting and not expired:
                left = end - time.monotonic()
                expired = left <= 0
                for key, _ in selector.select(max(left, 0)):
                    if key.data is None:
                        failure = self._read_control(phase) or failure
                        continue
                    outcome = self._read_rank(key.data, phase)
                    if outcome is None:
                        continue
                    if isinstance(outcome, GroupFailure):
                        if outcome.kind == "exit":  # the leader knows the status; wait for its report a moment
                            outcome = self._await_exit(key.data, phase) or self._exit_failure(key.data, phase)
                        failure = _cause(failure, outcome)
                    else:
                        answers[key.data] = outcome
                    waiting.discard(key.data)
                    selector.unregister(key.fileobj)
                for rank in sorted(waiting & set(self._exits)):
                    waiting.discard(rank)
                    failure = _cause(failure, self._exit_failure(rank, phase))
                if failure is not None:
                    end = min(end, time.monotonic() + _GRACE_S)
        if failure is not None:
            raise failure
        if waiting:
            stuck = tuple(sorted(waiting))
            raise GroupFailure("hang", phase, f"no answer from rank(s) {stuck}", ranks=stuck, deadline_s=deadline_s)
        return [answers[rank] for rank in range(self.world_size)]

    def _read_rank(self, rank: int, phase: str) -> Message | GroupFailure | None:
        channel = self._ranks[rank]
        open_ = channel.feed()
        try:
            message = channel.pop()
        except ProtocolError as error:
            return GroupFailure("garbage", phase, str(error), rank=rank)
        if message is not None:
            if message.get("ok") is True:
                return message
            report = message.get("error")
            if not isinstance(report, dict) or report.get("kind") not in _REPORTED_KINDS:
                return GroupFailure("garbage", phase, "an answer that is neither ok nor an error", rank=rank)
            return GroupFailure(report["kind"], phase, str(report.get("message", "")).strip() or "no message", rank=rank)
        return None if open_ else GroupFailure("exit", phase, "the process ended", rank=rank)

    def _read_control(self, phase: str) -> GroupFailure | None:
        if not self._control.feed():
            self.alive = False
            return GroupFailure("garbage", phase, "the process that guards the ranks was killed")
        while (message := self._control.pop()) is not None:
            if "exited" in message:
                self._exits[int(message["exited"])] = int(message["status"])
        return None

    def _await_exit(self, rank: int, phase: str) -> GroupFailure | None:
        """Waits until the leader has told how the rank ended; the failure, if the leader has ended itself."""
        end = time.monotonic() + 1.0
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            while rank not in self._exits and (left := end - time.monotonic()) > 0:
                if selector.select(left) and (failure := self._read_control(phase)) is not None:
                    return failure
        return None

    def _exit_failure(self, rank: int, phase: str) -> GroupFailure:
        status = self._exits.get(rank)
        if status is None:
            how = "closed its command socket"
        elif status < 0:
            known = {member.value: member.name for member in signal.Signals}
            how = f"was ended by signal {known.get(-status, -status)}"  # real-time signals have no names
        else:
            how = f"exited with status {status}"
        return GroupFailure("exit", phase, f"rank {rank} {how}", rank=rank)

    def await_end(self, deadline_s: float) -> tuple[int, ...]:
        """Waits for all ranks to exit by themselves; returns those that have not."""
        end = time.monotonic() + deadline_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            while len(self._exits) < self.world_size and (left := end - time.monotonic()) > 0:
                if selector.select(left) and self._read_control("exit") is not None:
                    break
        return tuple(rank for rank in range(self.world_size) if rank not in self._exits)

    # --- resources ---

    def memory_fd(self, rank: int) -> int:
        """The rank's shared memory file, for another group's rank to map."""
        return self._memories[rank]

    def admit(self, sha256: str) -> str | None:
        """Gives the ranks the cache of the candidate with this source, for as long as they live; its path, or None if all share one."""
        return None if self.slot is None else str(self.slot.admit(sha256))

    def log_tail(self, characters: int = 2000) -> str:
        """The end of what the ranks printed, one section per rank that printed anything. Complete once the group has been killed."""
        parts = []
        for rank, fd in enumerate(self._logs):
            data = os.pread(fd, characters, max(0, os.fstat(fd).st_size - characters))
            if text := data.decode(errors="replace").strip():
                parts.append(f"[rank {rank}] {text}")
        return "\n".join(parts) or self._log

    def kill(self, deadline_s: float = 10.0) -> None:
        """Ends the whole tree and waits until it is gone; raises :class:`HarnessError` if a process survives."""
        survivors = self._end(deadline_s) if self.alive else []
        self._log = self.log_tail()
        for channel in [self._control, *self._ranks]:
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

    def _end(self, deadline_s: float) -> list[int]:
        """Has the leader kill everything, itself last; the processes that are still there."""
        self.alive = False
        with contextlib.suppress(OSError):
            self._control.send({"op": "end"})
        end = time.monotonic() + deadline_s
        with contextlib.suppress(ProtocolError), selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            while (left := end - time.monotonic()) > 0 and selector.select(left):
                open_ = self._control.feed()
                while (message := self._control.pop()) is not None:
                    if message.get("ended"):
                        return list(message.get("survivors", []))
                if not open_:
                    return []  # the leader was killed, and its ranks with it
        if self._end_leader is not None:  # it was stopped, or is stuck
            with contextlib.suppress(OSError):
                self._end_leader()
        return []


def memory_file(name: str) -> int:
    """A file that holds the arenas of one CPU rank. Its size is sealed: a candidate that cut it would kill the trusted rank (SIGBUS)."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, _FILE_BYTES)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


def nursery_environment(device: str) -> dict[str, str]:
    """What the nursery of ranks on this device gets besides the environment of its isolation."""
    environment = {
        "OMP_NUM_THREADS": "1",  # the nursery must have one thread when it forks
        "OPENBLAS_NUM_THREADS": "1",
        "KINETO_LOG_LEVEL": "99",  # audits would print a line for each end of every record
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking how many GPUs there are must not initialise CUDA
    }
    return environment | {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"} if device == "cpu" else environment


def start_ranks(nursery: Nursery, role: str, device: str, world_size: int, deadline_s: float, share: RankGroup | None = None) -> RankGroup:
    """A group of trusted or candidate ranks that is coming up; ``finish`` waits for it.

    On CPU the two sides ``share`` memory files, on GPUs they use CUDA IPC.
    """
    config: dict[str, Any] = {"device": device}
    if role == "candidate" and device == "cuda":
        config["environment"] = {"TORCH_CUDA_ARCH_LIST": ARCHITECTURE}
    group = nursery.spawn(role, world_size, config, share if device == "cpu" else None)
    group.begin({"op": "init"}, "spawn", deadline_s)
    return group


class Nursery:
    """Starts the nursery process, anew if it is killed, and orders groups from it. Does not wait for it: that takes seconds."""

    def __init__(self, environment: dict[str, str], start_deadline_s: float = 120.0, isolation: Isolation = NO_ISOLATION) -> None:
        self._environment, self._start_deadline_s, self._isolation = environment, start_deadline_s, isolation
        self._folders = RunFolders(isolation.tier != "L0")
        self._groups: list[RankGroup] = []
        try:
            self._launch()
        except BaseException:
            self._folders.remove()
            raise

    def _launch(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._orders, self._up, self._start_end = ours, False, time.monotonic() + self._start_deadline_s
        folders, isolation = self._folders, self._isolation
        start = json.dumps({"confinement": isolation.confinement.to_json(), "folders": [str(path) for path in folders.writable]})
        interpreter = isolation.command(folders.writable, folders.readable)
        self._variables = isolation.environment() | self._environment
        self._process = subprocess.Popen(
            [*interpreter, "-P", "-m", "peerlane.evaluate.nursery", str(theirs.fileno()), start],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env=self._variables,
        )
        theirs.close()

    def await_start(self) -> None:
        """Waits until the process takes orders; raises :class:`HarnessError` if it does not come up."""
        if self._up:
            return
        try:
            self._orders.settimeout(max(self._start_end - time.monotonic(), 0))
            word = self._orders.recv(16)
        except OSError:
            word = b""
        if word != b"ready":
            self._process.kill()
            _, errors = self._process.communicate()
            self._orders.close()
            raise HarnessError(f"the process that starts ranks did not come up: {errors.decode(errors='replace').strip()[-2000:]}")
        self._orders.settimeout(None)
        self._up = True

    def serves(self, environment: dict[str, str], isolation: Isolation) -> bool:
        """True if a nursery that was made of these now would be started in the same way."""
        return self._isolation == isolation and self._variables == isolation.environment() | environment

    @property
    def alive(self) -> bool:
        """False once the process has ended: somebody killed it. Groups that it has borne live on."""
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def spawn(self, role: str, world_size: int, config: dict[str, Any], share: RankGroup | None = None) -> RankGroup:
        """A new group, as soon as the process is up; ``share`` gives it that group's shared memory, rank by rank, instead of its own.
        Raises :class:`HarnessError`."""
        self._groups = [group for group in self._groups if group.alive]
        if not self.alive:
            self._bury()
            self._launch()
            self.await_start()
        with contextlib.ExitStack() as kept, contextlib.ExitStack() as handed_over:
            try:
                folder = tempfile.mkdtemp(dir=self._folders.scratch)
                kept.callback(shutil.rmtree, folder, ignore_errors=True)
                slot = self._folders.slot() if role != "trusted" else None
                if slot is not None:
                    kept.callback(slot.release)
                pairs = [socket.socketpair() for _ in range(1 + world_size)]
                for here, there in pairs:
                    kept.enter_context(here)
                    handed_over.enter_context(there)
                memories, logs = [], []
                for rank in range(world_size):
                    memories.append(os.dup(share.memory_fd(rank)) if share is not None else memory_file(f"peerlane-arena-{rank}"))
                    kept.callback(os.close, memories[-1])
                    logs.append(os.memfd_create(f"peerlane-log-{rank}"))
                    kept.callback(os.close, logs[-1])
                order = {
                    **config,
                    "role": role,
                    "world_size": world_size,
                    "folder": folder,
                    "writable": [folder] if slot is None else [folder, str(slot.folder)],
                    "confinement": self._isolation.confinement.to_json(),
                }
                ends = [there.fileno() for _, there in pairs]
                per_rank = zip(ends[1:], memories, logs, strict=True)
                self._order(order, [ends[0], *(fd for fds in per_rank for fd in fds)])
            except OSError as error:
                raise HarnessError(f"a rank group cannot be started: {error}") from None
            control, *channels = [Channel(here) for here, _ in pairs]
            kept.pop_all()
        for channel in channels:
            channel.limit_sending(_SEND_S)
        group = RankGroup(role, control, channels, memories, logs, lambda: self._order({"end": folder}, []))
        group.slot = slot
        self._groups.append(group)
        return group

    def _order(self, order: dict[str, Any], fds: list[int]) -> None:
        socket.send_fds(self._orders, [json.dumps(order).encode()], fds)

    @property
    def groups(self) -> tuple[RankGroup, ...]:
        """Those that have not been ended."""
        return tuple(group for group in self._groups if group.alive)

    def close(self) -> None:
        """Kills all groups, then the nursery; before them, if nobody has waited for it: it may not be up, and would bear them yet."""
        if not self._up:
            self._bury()
        self.end_groups()
        self._bury()
        self._folders.remove()

    def end_groups(self) -> None:
        """Kills all groups."""
        for group in self._groups:
            with contextlib.suppress(HarnessError):
                group.kill()

    def _bury(self) -> None:
        self._orders.close()
        if not self._up:
            self._process.kill()  # it has borne nothing, and would not look at its orders before it is up
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()
