"""The supervisor's handle on the fork server (:mod:`peerlane.evaluate.processes.fork_server`): starts it, orders groups, ends it.

No torch here, so that it can be started before torch is imported.
"""

import contextlib
import fcntl
import json
import os
import socket
import subprocess
import tempfile
import threading
import time
from dataclasses import asdict
from typing import Any

from peerlane.common.place import Place
from peerlane.errors import HarnessError
from peerlane.evaluate.processes import import_ahead
from peerlane.evaluate.processes.protocol import Channel
from peerlane.evaluate.processes.rank_group import RankGroup
from peerlane.sandbox.caches import RunFolders
from peerlane.sandbox.isolation import NO_ISOLATION, Isolation
from peerlane.sandbox.limits import Limits
from peerlane.sandbox.untrusted_folders import remove_tree
from peerlane.settings import multicast_environment

RANK_PROGRAM = "peerlane.evaluate.ranks.serve"
"""The module whose ``serve`` every rank runs. It is named, not imported: it imports torch, and lies above this one."""
_SEND_S = 10  # a rank that does not read its requests for this long has failed, and the answer's deadline will say so
_SWEEP_S = 10  # nobody waits longer than this for the fork server to clear up behind a leader
FILE_BYTES = 1 << 42  # address space, not memory: pages come into being when they are written


def memory_file(name: str) -> int:
    """A file that holds the arenas of one CPU rank. Its size is sealed: a candidate that cut it would kill the trusted rank (SIGBUS)."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, FILE_BYTES)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


def fork_server_environment(device: str) -> dict[str, str]:
    """Returns the variables that the fork server of this device's ranks gets besides those of its isolation."""
    environment = multicast_environment() | {
        "OMP_NUM_THREADS": "1",  # the fork server must have one thread when it forks
        "OPENBLAS_NUM_THREADS": "1",
        # With more, torch.compile starts a process for each core in every rank, and ranks end only after them, seconds later.
        "TORCHINDUCTOR_COMPILE_THREADS": os.environ.get("TORCHINDUCTOR_COMPILE_THREADS", "1"),
        "KINETO_LOG_LEVEL": "99",  # audits would print a line for each end of every record
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking how many GPUs there are must not initialise CUDA
    }
    return environment | {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"} if not Place.of(device).has_gpus else environment


class ForkServer:
    """Starts the fork server process, anew if it is killed, and orders groups from it. Does not wait for it: that takes seconds."""

    def __init__(self, environment: dict[str, str], start_deadline_s: float = 120.0, isolation: Isolation = NO_ISOLATION) -> None:
        self._environment, self._start_deadline_s, self._isolation = environment, start_deadline_s, isolation
        self._folders = RunFolders(isolation.tier != "L0")
        self._groups: list[RankGroup] = []
        self._ordering = threading.RLock()  # several sessions, and builds, order from it
        self._imported_ahead = False
        self.sharers = 1
        """groups of candidates that share the machine's memory at a time"""
        try:
            self._launch()
        except BaseException:
            self._folders.remove()
            raise

    def _launch(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._orders, self._up, self._start_end = ours, False, time.monotonic() + self._start_deadline_s
        folders, isolation = self._folders, self._isolation
        told = {"confinement": asdict(isolation.confinement), "folders": list(map(str, folders.writable)), "program": RANK_PROGRAM}
        interpreter = isolation.command(folders.writable, folders.readable)
        self._variables = isolation.environment() | self._environment
        self._process = subprocess.Popen(
            [*interpreter, "-P", "-m", "peerlane.evaluate.processes.fork_server", str(theirs.fileno()), json.dumps(told)],
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
        """True if a fork server that was made of these now would be started in the same way."""
        return self._isolation == isolation and self._variables == isolation.environment() | environment

    @property
    def is_up(self) -> bool:
        """True once it has told that it takes orders."""
        return self._up

    def clear(self) -> bool:
        """Ends all groups, so that another session may use it; False if it cannot be used any more."""
        if not self._up or not self.alive:
            return False
        self.end_groups()
        self._groups, self.sharers = [], 1
        return True

    @property
    def alive(self) -> bool:
        """False once the process has ended: somebody killed it. Its groups live on."""
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def spawn(
        self, role: str, world_size: int, config: dict[str, Any], share: RankGroup | None = None, kind: type[RankGroup] = RankGroup
    ) -> RankGroup:
        """A new group, as soon as the process is up; ``share`` gives it that group's shared memory, rank by rank, instead of its own.
        Raises :class:`HarnessError`."""
        with self._ordering:
            return self._spawn(role, world_size, config, share, kind)

    def _spawn(self, role: str, world_size: int, config: dict[str, Any], share: RankGroup | None, kind: type[RankGroup]) -> RankGroup:
        self._groups = [group for group in self._groups if group.alive]
        if not self.alive:
            self._reap()
            self._launch()
            self._imported_ahead = False
            self.await_start()
        with contextlib.ExitStack() as kept, contextlib.ExitStack() as handed_over:
            try:
                folder = tempfile.mkdtemp(dir=self._folders.scratch)
                kept.callback(remove_tree, folder)
                slot = self._folders.slot() if role != "trusted" else None
                if slot is not None:
                    kept.callback(slot.release)
                pairs = [socket.socketpair() for _ in range(1 + world_size)]
                for here, there in pairs:
                    kept.enter_context(here)
                    handed_over.enter_context(there)
                memories, logs = [], []
                for rank in range(world_size):
                    if share is not None:
                        memories.append(os.dup(share.memory_fd(rank)))
                    elif memories and "memory_range" in config:
                        memories.append(os.dup(memories[0]))
                    else:
                        memories.append(memory_file(f"peerlane-arena-{rank}"))
                    kept.callback(os.close, memories[-1])
                    logs.append(os.memfd_create(f"peerlane-log-{rank}"))
                    kept.callback(os.close, logs[-1])
                confinement = self._isolation.confine(role, [group.uid for group in self._groups])
                order = {
                    **config,
                    "program": RANK_PROGRAM,
                    "role": role,
                    "world_size": world_size,
                    "folder": folder,
                    "writable": [folder, *([] if slot is None else [str(slot.folder)]), *config.get("writable", ())],
                    "confinement": asdict(confinement),
                    "niceness": os.getpriority(os.PRIO_PROCESS, 0),
                    "limits": None if role == "trusted" else asdict(Limits.of_machine(self._folders.scratch, self.sharers)),
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
        group = kind(role, control, channels, memories, logs, lambda: self._sweep(folder))
        group.slot, group.uid, group.imported_ahead = slot, confinement.uid, self._imported_ahead
        self._groups.append(group)
        return group

    def import_ahead(self) -> None:
        """Has torch's slow part imported before the next group is started, which waits for it."""
        with self._ordering, contextlib.suppress(OSError):  # it was killed: the next one imports nothing ahead
            if not self._imported_ahead:
                self._order({"import": import_ahead.MODULE}, [])
                self._imported_ahead = True

    def _order(self, order: dict[str, Any], fds: list[int]) -> None:
        socket.send_fds(self._orders, [json.dumps(order).encode()], fds)

    def _sweep(self, folder: str) -> None:
        """Has what is left of the group with this folder killed, and waits until that is done."""
        with self._ordering:
            self._order({"end": folder}, [])
            if not self._up:
                return  # it has started nothing
            self._orders.settimeout(_SWEEP_S)
            with contextlib.suppress(TimeoutError):
                while self._orders.recv(4096) not in (folder.encode(), b""):  # an answer that came too late for an earlier one
                    pass
            self._orders.settimeout(None)

    def close(self) -> None:
        """Kills all groups, then the fork server; before them, if nobody has waited for it: it may not be up, and would start them yet."""
        if not self._up:
            self._reap()
        self.end_groups()
        self._reap()
        self._folders.remove()

    def end_groups(self) -> None:
        for group in self._groups:
            with contextlib.suppress(HarnessError):
                group.kill()

    def _reap(self) -> None:
        self._orders.close()
        if not self._up:
            self._process.kill()  # it has started nothing, and would not look at its orders before it is up
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()
