"""The processes of a run: the fork server, one trusted group, warm groups for the next candidates, builders. No CUDA context here."""

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

from peerlane.common.cluster import Cluster
from peerlane.common.place import Device, Place
from peerlane.common.toolkit import extension_architectures
from peerlane.errors import HarnessError
from peerlane.evaluate import wire
from peerlane.evaluate.messages import Request
from peerlane.evaluate.processes import prestart
from peerlane.evaluate.processes.fork_client import FILE_BYTES, ForkServer, fork_server_environment
from peerlane.evaluate.processes.import_ahead import wants_import
from peerlane.evaluate.processes.machine_faults import cores, kept_from_cores_s
from peerlane.evaluate.processes.pool import WarmPool
from peerlane.evaluate.processes.rank_group import EmulatedRankGroup, GroupFailure, RankGroup
from peerlane.evaluate.rank_interface import BlockInterface, CandidateInterface, RankInterface, TrustedInterface
from peerlane.hardware.virtual_node import MpsDaemon, VirtualNode
from peerlane.problems.contract.spec import Case
from peerlane.sandbox import linux
from peerlane.sandbox.confine import NOT_DUMPABLE
from peerlane.sandbox.isolation import NO_ISOLATION, Isolation
from peerlane.settings import Deadlines, PoolSettings, cluster_environment

A = TypeVar("A")
_BUSY_GROUPS = 2  # beside those that are warm: the trusted ranks, and a candidate's
_USE_S = 5.0
_LONG_NICENESS = 5  # a third of the usual share
EMULATED_SCHEDULES = 8
"""Schedules under which the emulator runs the launches of a candidate that is evaluated."""
_EMULATED_CALLS = 10  # a call whose kernels run in the emulator may take so many times as long


class Strain(NamedTuple):
    """Seconds of an evaluation that are not the candidate's."""

    kept_s: float = 0.0
    """in which other programs kept its ranks from their cores"""
    own_s: float = 0.0
    """in which the evaluator's own ranks computed"""
    seconds: float = 1.0
    """since the mark"""


class Session:
    """Everything that runs for one world size. Use as a context manager: leaving it ends every process.

    ``isolation`` is that of candidates and builders. ``note`` hears what went wrong and was mended. On a virtual ``node`` the session owns
    the daemon through which ranks share GPUs. ``beside``: a session whose fork server this one uses, too; it must be left later. ``nodes``:
    how many the ranks are in.
    """

    def __init__(
        self,
        device: Device,
        world_size: int,
        deadlines: Deadlines,
        pool_settings: PoolSettings | None = None,
        isolation: Isolation = NO_ISOLATION,
        note: Callable[[str], None] = lambda _: None,
        node: VirtualNode | None = None,
        beside: "Session | None" = None,
        *,
        nodes: int = 1,
    ) -> None:
        self._beside = beside
        self.place = Place.of(device, shared=node is not None and node.ranks_per_gpu > 1).in_nodes(nodes)
        self.cluster = Cluster(nodes, world_size)
        self.world_size, self.isolation = world_size, isolation
        self.deadlines = deadlines if not self.place.emulated else deadlines.with_calls(_EMULATED_CALLS * deadlines.first_call)
        self._kept_open = contextlib.ExitStack()
        self.pool_settings, self.note, self.node = pool_settings or PoolSettings(), note, node
        if node is not None:
            self.deadlines = deadlines.times(node.patience)
            most = max(1, node.most_groups - _BUSY_GROUPS)
            self.pool_settings = replace(self.pool_settings, warm_groups=min(self.pool_settings.warm_groups, most))
        self._daemon: MpsDaemon | None = None
        self._fork_server: ForkServer | None = None
        self._trusted: RankGroup | None = None
        self._at_work: RankGroup | None = None
        self._suspected, self._marked = False, 0.0
        self._trusted_source = WarmPool("trusted", self._spawn_trusted, self.pool_settings, note)
        self._pool = WarmPool("candidate", self._spawn_candidate, self.pool_settings, note)
        self._block = 0
        self._sm_holder = ""  # the kernel that candidates' ranks on GPUs hold SMs with, which trusted ranks compile

    def __enter__(self) -> Self:
        if self._beside is not None:
            self._fork_server = self._beside.fork_server
            if self.node is not None:  # a daemon of its own: a fault in one session is none of the other's
                self._daemon = self._kept_open.enter_context(self.node.daemon())
            return self
        environment = fork_server_environment(self.place.device)
        if NOT_DUMPABLE in self.isolation.measures:
            self._kept_open.enter_context(linux.not_dumpable())
        try:
            if self.node is not None:
                self._daemon = self._kept_open.enter_context(self.node.daemon())
            begun = prestart.take(environment, self.isolation)
            self._fork_server = begun or ForkServer(environment, self.deadlines.spawn, self.isolation)
            self._fork_server.await_start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._beside is not None:
            self.drop_trusted()
            self._pool.clear()
        elif self._fork_server is not None:
            prestart.give(self._fork_server)
            self._fork_server = None
        self._daemon = None
        self._kept_open.close()

    @property
    def fork_server(self) -> ForkServer:
        assert self._fork_server is not None, "use the session as a context manager"
        return self._fork_server

    def _spawn_trusted(self) -> RankGroup:
        group = self.fork_server.spawn("trusted", self.world_size, self._config())
        group.begin(Request(RankInterface.initialize), "spawn", self.deadlines.spawn)
        return group

    def _spawn_candidate(self) -> RankGroup:
        """On CPU the two sides share memory files, on GPUs they use CUDA IPC. Emulated ranks of a candidate are one process, which maps
        what all trusted ranks have: these share one file, each with a range of its own."""
        config = self._config()
        # Confined ranks read the kit's kernels from the cache, which the trusted ranks of a virtual node fill when they start.
        share = self.trusted if not self.place.has_gpus or self.node is not None else None
        if self.place.has_gpus:
            share, config["environment"] = None, {"TORCH_CUDA_ARCH_LIST": extension_architectures()}
        if self.place.emulated:
            config |= {"emulated_ranks": self.world_size, "schedules": EMULATED_SCHEDULES}
            group = self.fork_server.spawn("candidate", 1, config, share, EmulatedRankGroup)
            assert isinstance(group, EmulatedRankGroup)
            group.emulated_ranks = self.world_size
        else:
            group = self.fork_server.spawn("candidate", self.world_size, config, share)
        group.begin(Request(RankInterface.initialize), "spawn", self.deadlines.spawn)
        return group

    def _config(self) -> dict[str, Any]:
        """Returns what a group's processes must know of their place: CPUs, a GPU for each, or several on each GPU."""
        ranks, node, cluster = range(self.world_size), self.node, self.cluster
        config: dict[str, Any] = {"device": self.place.device, "backend": self.place.backend}
        if cluster.nodes > 1:
            config["nodes"] = cluster.nodes
            config["rank_environment"] = [cluster_environment(cluster.node_of(rank)) for rank in ranks]
        if self.place.emulated:
            config["memory_range"] = FILE_BYTES // self.world_size
        if node is not None:
            config["backend"] = node.baseline
            config["gpu_of_rank"] = [node.device_index(rank) for rank in ranks]
            known = config.get("rank_environment") or [{}] * self.world_size
            config["rank_environment"] = [known[rank] | node.rank_environment(rank, self._daemon) for rank in ranks]
        if self._daemon is not None:
            config["writable"] = [str(self._daemon.folder)]
        return config

    @property
    def trusted(self) -> RankGroup:
        """The trusted group; started anew if it died. Raises :class:`NoRanks`."""
        if self._trusted is None:
            group = self._trusted_source.take()
            sm_holders = self._prepare(group, Request(TrustedInterface.take_secret, secrets.token_hex(16)))
            self._trusted, self._sm_holder = group, sm_holders[0]
        return self._trusted

    def _prepare(self, group: RankGroup, request: Request[A]) -> list[A]:
        """Asks a group that is up for the first time; ends it if it fails."""
        try:
            return group.ask(request, "spawn", self.deadlines.spawn)
        except GroupFailure as failure:
            with contextlib.suppress(HarnessError):
                group.kill()
            raise HarnessError(f"the {group.role} ranks did not start: {failure}\n{group.log_tail()}".strip()) from None

    def drop_trusted(self) -> None:
        """Kills the trusted group after a failure of its own, and warm groups that share its memory; the next use starts others."""
        if self._trusted is not None:
            with contextlib.suppress(HarnessError):
                self._trusted.kill()
        self._trusted, self._suspected = None, False
        if not self.place.has_gpus:
            self._pool.clear()

    @property
    def shares_faults(self) -> bool:
        """True where a fault of one rank ends all: those of all groups are clients of one MPS server."""
        return self._daemon is not None

    def recover_from_fault(self) -> None:
        """After ranks failed: where these share faults, and the trusted ranks have lost their GPUs too, all groups end, and those that come
        next start when the MPS server is ready again. Raises :class:`HarnessError` if there is no server any more."""
        if self._daemon is None or (self._trusted is not None and self._works(self._trusted)):
            return
        self.note("a fault ended all ranks that share a GPU through MPS; others take their place")
        self.drop_trusted()
        self._pool.clear()
        self._trusted_source.clear()
        self._daemon.await_ready()

    @staticmethod
    def _works(group: RankGroup) -> bool:
        with contextlib.suppress(GroupFailure, HarnessError):
            group.ask(Request(BlockInterface.use_device), "spawn", _USE_S)
            return True
        return False

    def suspect_trusted(self) -> None:
        """After a capture failed in the trusted ranks nobody knows their state: others take their place before the next group is taken."""
        self._suspected = True

    def _recover(self) -> None:
        if self._trusted is not None and not self._suspected and self._trusted.lost:
            self.note("the trusted ranks died while nothing was asked of them; others take their place")
            self._suspected = True
        if self._suspected:
            self.drop_trusted()

    def import_ahead(self, source: str) -> None:
        """Has the fork server import what a candidate with this source may want, which would take seconds in every rank."""
        if wants_import(source):
            self.fork_server.import_ahead()
            self._pool.drop_without_imports()

    def start_warm_groups(self, expected: int) -> None:
        """Keeps warm groups ahead, but no more than the groups that the run may still take. They use cores and GPUs until
        :meth:`wait_for_starts`."""
        self._recover()
        self._pool.refill(min(self.pool_settings.warm_groups, expected))
        self.trusted  # noqa: B018  (comes up side by side with them)

    def take_group(self) -> RankGroup:
        """A fresh candidate group, ready. Raises :class:`NoRanks`."""
        self._recover()
        group = self._pool.take()
        if self.place.has_gpus:
            self.trusted  # noqa: B018  (compiles the kernel)
            self._prepare(group, Request(CandidateInterface.load_sm_holder, self._sm_holder))
        self._at_work = group
        return group

    def mark_core_time(self, group: RankGroup) -> None:
        """Begins the time of :meth:`strain`, for this group and the trusted one."""
        self._marked = time.monotonic()
        for ranks in (group, self._trusted):
            if ranks is not None and ranks.alive:
                ranks.mark_core_time()

    def strain(self, group: RankGroup) -> Strain:
        """Returns what kept the evaluation of this group since the mark. Without what the kernel tells there is nothing to show."""
        seconds, asked = time.monotonic() - self._marked, [ranks for ranks in (group, self._trusted) if ranks is not None and ranks.alive]
        told = [(ranks, times) for ranks in asked if (times := ranks.core_time()) is not None]
        own_s = max((times.longest_run_s for ranks, times in told if ranks is self._trusted), default=0.0)
        return Strain(kept_from_cores_s([times for _, times in told], seconds, cores()), own_s, seconds)

    def let_others_go_first(self) -> None:
        """Gives the candidate at work a smaller share of the cores: it takes long, and may well spin for ever."""
        group = self._at_work
        if group is not None and group.alive and self.isolation.tier != "L2":  # where processes have other numbers
            for pid in group.pids:
                linux.lower_priority(pid, _LONG_NICENESS)

    def end(self, group: RankGroup) -> None:
        """Kills a candidate's group. Processes that survive are a note; what the candidate did is known all the same."""
        if self._daemon is not None and group.alive and (running := group.running):
            self._daemon.terminate(running)
        try:
            group.kill()
        except HarnessError as error:
            self.note(str(error))
        if self._trusted is not None and not self.place.has_gpus:  # what the trusted ranks still have of it has been judged
            self._trusted.empty_memory()

    @contextlib.contextmanager
    def longer_deadlines(self, factor: float) -> Iterator[None]:
        """All phases may take so many times as long in here."""
        before = self.deadlines
        self.deadlines = before.times(factor)
        try:
            yield
        finally:
            self.deadlines = before

    def wait_for_starts(self) -> bool:
        """Waits until all warm groups are up, so that their start does not disturb what is timed next; False if none were coming up."""
        return self._pool.wait_for_starts()

    def builder(self) -> RankGroup:
        """A process that compiles, on cores where no rank is timed; no GPU is visible to it."""
        environment = {"CUDA_VISIBLE_DEVICES": "", "TORCH_CUDA_ARCH_LIST": extension_architectures()}
        config = {"device": "cpu", "environment": environment, "timed_ranks": self.world_size if self.place.has_gpus else 0}
        return self.fork_server.spawn("builder", 1, config)

    def next_block(self) -> int:
        """A number that no earlier input generation of this session has had."""
        self._block += 1
        return self._block


def case_id(case: Case) -> wire.CaseId:
    """The names by which ranks find a case."""
    return wire.CaseId(case.problem, case.preset, case.label, case.world_size, case.nodes)
