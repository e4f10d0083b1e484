"""The process that starts rank groups: torch is imported once here, every group is forked from it in milliseconds.

supervisor -- fork server -- leader (one per group) -- rank processes

A leader owns its group. It adopts orphans, so a daemon that a candidate leaves behind is still its descendant, and it kills the
whole tree when it is told to or when the supervisor's end of its socket closes, for whatever reason. The fork server does so for a leader
that was killed itself. The fork server and leaders never initialise CUDA and never run candidate code.
"""

import array
import contextlib
import gc
import importlib
import itertools
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any, NoReturn

from peerlane.evaluate.processes.protocol import Channel
from peerlane.sandbox.confine import Confinement
from peerlane.sandbox.core_time import CoreClock
from peerlane.sandbox.limits import LOOK_S, Limits, Watch
from peerlane.sandbox.process_tree import adopt_orphans, children, descendants, die_with_parent, kill_descendants
from peerlane.sandbox.stillness import Stillness, is_ending
from peerlane.sandbox.untrusted_folders import remove_tree

KEPT_BYTES = 1 << 16
"""Bytes that are kept of what each rank printed last."""
_CHUNK_BYTES = 1 << 16  # what a pipe holds
_DRAIN_CHUNKS = 64  # read from a pipe at a time, at most: a rank may be printing faster than anybody reads
FDS_PER_RANK = 3  # command socket, shared memory, log
_SWEEP_S = 5.0  # orphans of a leader that was killed are looked for so long
_ENDING_LOOKS = 10  # what ends by itself has a status by then
_STILL_S = 600  # nobody needs to know of more, and a group that waits for its turn says nothing then
_PARTING_S = 9.0  # leaders, whose supervisor is gone too, have this long to end their groups


class LogTail:
    """The end of what a rank prints, which comes out of a pipe, in a memory file that never holds more than twice ``KEPT_BYTES``."""

    def __init__(self, pipe: int, file: int) -> None:
        self._pipe, self._file, self._size = pipe, file, 0
        os.set_blocking(pipe, False)

    def fileno(self) -> int:
        return self._pipe

    def pump(self) -> bool:
        """Takes what the pipe holds now; False once nobody can write to it any more."""
        for _ in range(_DRAIN_CHUNKS):
            try:
                chunk = os.read(self._pipe, _CHUNK_BYTES)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            self._append(chunk)
        return True

    def _append(self, chunk: bytes) -> None:
        if self._size + len(chunk) > 2 * KEPT_BYTES:
            kept = os.pread(self._file, KEPT_BYTES, max(0, self._size - KEPT_BYTES))
            os.ftruncate(self._file, 0)
            self._size = os.pwrite(self._file, kept, 0)
        self._size += os.pwrite(self._file, chunk, self._size)

    def close(self) -> None:
        os.close(self._pipe)


def _run_rank(config: dict[str, Any], rank: int, fds: list[int], log: int, leader: int, forker: int) -> NoReturn:
    status = 1
    try:
        Confinement.from_json(config["confinement"]).enter_rank(config["role"], config["folder"])
        while os.getppid() == forker:
            time.sleep(0.0005)
        die_with_parent(leader)
        command, memory, _ = fds[1 + FDS_PER_RANK * rank : 1 + FDS_PER_RANK * (rank + 1)]
        for fd in fds:
            if fd not in (command, memory):
                os.close(fd)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(null)
        os.close(log)
        sys.stdout = open(1, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115
        program = sys.modules[config["program"]]
        status = program.serve(config, rank, Channel(socket.socket(fileno=command)), memory)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _fork_ranks(config: dict[str, Any], fds: list[int], logs: list[tuple[int, int]]) -> list[int]:
    """Forks the ranks of the leader that calls it; their process numbers. They print to ``logs``, which are pipes.

    Their parent ends at once, and they become the leader's children: so they are in a domain that it is not in.
    """
    leader, (reading, writing) = os.getpid(), os.pipe()
    if (forker := os.fork()) == 0:
        try:
            forker, pids = os.getpid(), []
            os.setpriority(os.PRIO_PROCESS, 0, max(os.getpriority(os.PRIO_PROCESS, 0), config["niceness"]))
            os.setsid()  # the kernel gives every session its share of the cores: the leader keeps its own
            Confinement.from_json(config["confinement"]).enter_ranks(config["role"])
            for rank, (_, log) in enumerate(logs):
                if (pid := os.fork()) == 0:
                    for other in {reading, writing, *itertools.chain(*logs)} - {log}:
                        os.close(other)
                    _run_rank(config, rank, fds, log, leader, forker)
                pids.append(pid)
            os.write(writing, json.dumps(pids).encode())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as told:
        numbers = told.read()
    os.waitpid(forker, 0)
    return list(json.loads(numbers))


def _end_group(config: dict[str, Any]) -> list[int]:
    """Kills all processes of the group of the leader that calls it; those that survive that."""
    Confinement.from_json(config["confinement"]).kill_group(config["role"])
    return kill_descendants()


def _watch(config: dict[str, Any]) -> Watch | None:
    """Watches what the ranks to come take of the machine, if they are a candidate's."""
    if config["limits"] is None:
        return None
    confinement = Confinement.from_json(config["confinement"])
    watch = Watch(Limits.from_json(config["limits"]), confinement.shared_memory, confinement.uid, config["writable"])
    watch.enter()
    return watch


def _answer(control: Channel, clock: CoreClock) -> bool:
    """Does what the supervisor asks of a leader; False if that is to end the group."""
    while (message := control.pop()) is not None:
        if "core_time" not in message:
            return False
        if message["core_time"] == "mark":
            clock.mark(descendants(os.getpid()))
            continue
        with contextlib.suppress(OSError):
            control.send({"core_time": clock.since(descendants(os.getpid()))})
    return True


def _lead(config: dict[str, Any], fds: list[int]) -> NoReturn:
    """Starts the ranks and watches them until the group is to end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    adopt_orphans()
    watch = _watch(config)
    Confinement.from_json(config["confinement"]).enter_group(config["role"], config["device"], config["folder"], config["writable"])
    pipes = [os.pipe() for _ in range(config["world_size"])]
    pids = _fork_ranks(config, fds, pipes)
    control = Channel(socket.socket(fileno=os.dup(fds[0])))
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ, None)
    logs: list[LogTail] = []
    for rank, (pid, (pipe, log)) in enumerate(zip(pids, pipes, strict=True)):
        os.close(log)
        logs.append(LogTail(pipe, fds[FDS_PER_RANK * (rank + 1)]))
        selector.register(logs[-1], selectors.EVENT_READ, logs[-1])
        selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (rank, pid))
    for fd in {*fds} - {fds[FDS_PER_RANK * (rank + 1)] for rank in range(config["world_size"])}:
        os.close(fd)
    running, stillness, clock = True, Stillness(), CoreClock()
    ending = Counter[int]()
    while running:
        if watch is not None and (exceeded := watch.look()) is not None:
            watch = None
            with contextlib.suppress(OSError):
                control.send({"exceeded": list(exceeded)})
            _end_group(config)
        elif watch is not None and (still_s := stillness.look(descendants(os.getpid()))) is not None and still_s <= _STILL_S:
            with contextlib.suppress(OSError):
                control.send({"still_s": still_s})
        if watch is not None:
            _tell_of_ending(pids, ending, control)
        for key, _ in selector.select(None if watch is None else LOOK_S):
            if key.data is None:
                running = control.feed() and _answer(control, clock)
                continue
            if isinstance(key.data, LogTail):
                if not key.data.pump():
                    selector.unregister(key.fileobj)
                continue
            rank, pid = key.data
            selector.unregister(key.fileobj)
            status = -signal.SIGKILL
            with contextlib.suppress(ChildProcessError):
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            logs[rank].pump()  # what it has said of its end
            with contextlib.suppress(OSError):
                control.send({"exited": rank, "status": status})
    survivors = _end_group(config)
    for tail in logs:
        tail.pump()  # what was printed last
    remove_tree(config["folder"])
    with contextlib.suppress(OSError):
        control.send({"ended": True, "survivors": survivors})
    os._exit(0)


def _tell_of_ending(pids: Sequence[int], seen: Counter[int], control: Channel) -> None:
    """Tells the supervisor of a rank that ends and is not gone after some looks: another rank may wait for it, and it for the device."""
    for rank, pid in enumerate(pids):
        seen[rank] += is_ending(pid)
        if seen[rank] == _ENDING_LOOKS:
            seen[rank] += 1
            with contextlib.suppress(OSError):
                control.send({"ending": rank})


def _receive_order(sock: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """One order with its file descriptors (a sequenced packet), or None at the end."""
    room = array.array("i")
    try:
        data, ancillary, _, _ = sock.recvmsg(1 << 16, socket.CMSG_SPACE(64 * room.itemsize))
    except ConnectionResetError:  # the supervisor ended and had not read that this process is up
        return None
    if not data:
        return None
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            room.frombytes(payload[: len(payload) - len(payload) % room.itemsize])
    return json.loads(data), list(room)


def _clear_up(leaders: dict[int, str]) -> bool:
    """Removes leaders that have ended, and what those that a candidate killed could not clear up: their folders and their orphans. True if
    there were orphans: they may have had children."""
    living = children(os.getpid())
    for leader in leaders.keys() - living:
        remove_tree(leaders.pop(leader))
    orphans = living - leaders.keys()
    for orphan in orphans:
        for pid in (orphan, *descendants(orphan)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return bool(orphans)


def _end_leader(leaders: dict[int, str], folder: str) -> None:
    """Kills the leader of a group, if it does not end as it was told, and until there are none its orphans. Its ranks die with it."""
    end = time.monotonic() + _SWEEP_S
    for leader in children(os.getpid()):
        if leaders.get(leader) == folder:
            with contextlib.suppress(ProcessLookupError):
                os.kill(leader, signal.SIGKILL)
    while (_clear_up(leaders) or folder in leaders.values()) and time.monotonic() < end:
        time.sleep(0.005)


def _import(module: str) -> None:
    """Imports a module for all processes that are forked from now on."""
    gc.disable()  # an import leaves little to collect and looks for it again and again
    importlib.import_module(module)
    gc.enable()
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # torch takes back its operators one by one, for 0.1 s, in every process that ends
    gc.collect()
    gc.freeze()  # what is imported by now never needs collecting: ranks collect in microseconds, and share the pages


def main(fd: int, confinement: Confinement, folders: list[str], program: str) -> None:
    """Imports ``program``, the module whose ``serve`` every rank runs, then serves orders until the supervisor's end closes, and then
    removes the run's folders."""
    confinement.enter_fork_server()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    adopt_orphans()
    orders = socket.socket(fileno=fd)
    _import(program)  # and torch with it, the slow part, before any fork
    with contextlib.suppress(BrokenPipeError):  # the supervisor has ended, as the wait for an order tells
        orders.send(b"ready")
    leaders: dict[int, str] = {}
    while (order := _receive_order(orders)) is not None:
        config, fds = order
        _clear_up(leaders)
        if "import" in config:
            with contextlib.suppress(ImportError):  # the candidate's own import says why
                _import(config["import"])
            continue
        if "end" in config:
            _end_leader(leaders, config["end"])
            with contextlib.suppress(OSError):  # the supervisor has ended meanwhile
                orders.send(config["end"].encode())
            continue
        if (leader := os.fork()) == 0:
            try:
                orders.close()
                _lead(config, fds)
            except BaseException:
                traceback.print_exc()
            finally:
                _end_group(config)
                os._exit(1)
        leaders[leader] = config["folder"]
        for received in fds:
            os.close(received)
    end = time.monotonic() + _PARTING_S
    while leaders and time.monotonic() < end:
        time.sleep(0.02)
        _clear_up(leaders)
    kill_descendants()
    for folder in folders:
        remove_tree(folder)


if __name__ == "__main__":
    channel, start = int(sys.argv[1]), json.loads(sys.argv[2])
    del sys.argv[1:]  # a candidate that parses its options at import has none
    main(channel, Confinement.from_json(start["confinement"]), start["folders"], start["program"])
