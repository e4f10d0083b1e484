"""A rank process: joins its group, then serves requests until it is told to exit. Forked from the fork server with torch imported.

Imports the standard library, torch and peerlane's problems; the candidate's side loads candidate code and is untrusted from then on.
"""

import contextlib
import datetime
import gc
import importlib
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d

from peerlane import problems
from peerlane.common.cluster import Cluster
from peerlane.common.place import Place
from peerlane.errors import CompileError, DeviceTimeout, EmulatedFault
from peerlane.evaluate import wire
from peerlane.evaluate.memory.arena import Arena
from peerlane.evaluate.memory.slots import ArgumentSlots, OutputRegions
from peerlane.evaluate.messages import REQUESTS, ErrorKind, Message, building_message
from peerlane.evaluate.rank_interface import BlockInterface, RankInterface
from peerlane.evaluate.ranks.timed_block import Block, Solution, capture_failure, make_block
from peerlane.evaluate.timing import cache_flush
from peerlane.evaluate.timing.cores import Pin, cores_of_rank
from peerlane.problems.contract.spec import Case, GroupLayout, Problem

_MEETING = datetime.timedelta(minutes=10)  # the supervisor has timeouts of its own
_KEPT_BYTES = 1 << 30  # of memory, that a rank may keep for later

_c10d: Any = _distributed_c10d
_CUDA_WORDS = ("CUDA error", "CUDA_ERROR", "cudaError", "CUBLAS_STATUS", "device-side assert", "Triton Error [CUDA]")
_MEMORY_WORDS = (
    "out of memory", "OutOfMemory", "CUDA_ERROR_OUT_OF_MEMORY", "cudaErrorMemoryAllocation", "can't allocate memory",
    "Cannot allocate memory",
)  # fmt: skip
_GPU_WORDS = re.compile(r"\b(cuda|nvidia|gpus?|nvrtc|nvcc)\b|CUDA_HOME|libcuda|libnv", re.IGNORECASE)


def classify(error: BaseException, default: ErrorKind = "runtime_error") -> ErrorKind:
    """The kind of failure an exception stands for: out_of_memory, cuda_error, build_error, not_run or ``default``."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(word in text for word in _MEMORY_WORDS):
        return "out_of_memory"
    if refused_source(error) or "Error building extension" in text or "Ninja is required" in text:
        return "build_error"
    if isinstance(error, ModuleNotFoundError) and error.name == "triton":
        return "not_run"
    if isinstance(error, (DeviceTimeout, EmulatedFault)) or any(word in text for word in _CUDA_WORDS):
        return "cuda_error"
    return default


def refused_source(error: BaseException) -> bool:
    """Tells whether a compiler of device code, which needs no GPU, has refused the source: the kit's, or NVRTC through ``cuda.core``."""
    return isinstance(error, CompileError) or "NVRTC_ERROR_COMPILATION" in str(error)


def wants_gpu(line: str) -> bool:
    """Tells whether an error, by the last line of its traceback, says that there is no GPU, or nothing that goes with one."""
    return _GPU_WORDS.search(line) is not None and not line.startswith(("SyntaxError", "IndentationError", "NameError"))


def keep_symmetric_memory_within_nodes(cluster: Cluster) -> None:
    """Makes a rendezvous raise RuntimeError in a group whose ranks are in several nodes, as it does on real hosts.

    Ranks of a virtual cluster are on one machine, which would let symmetric memory map any of them.
    """
    memory = _c10d._SymmetricMemory
    rendezvous = memory.rendezvous

    def rendezvous_within_node(tensor: Any, group_name: str | None = None) -> Any:
        group = dist.group.WORLD if not group_name else _c10d._resolve_process_group(group_name)
        members = distributed_c10d.get_process_group_ranks(group)
        if cluster.spans_nodes(*members):
            nodes = sorted({cluster.node_of(rank) for rank in members})
            raise RuntimeError(
                f"symmetric memory: ranks {members} are in nodes {nodes}, and memory of another node cannot be mapped; "
                "pass the group of one node's ranks"
            )
        return rendezvous(tensor, group_name)

    memory.rendezvous = staticmethod(rendezvous_within_node)


class RankProcess(RankInterface):
    """A process that serves requests of the supervisor: those of an interface that it has methods for."""

    def __init__(self, config: dict[str, Any], rank: int, memory_fd: int) -> None:
        self.config, self.rank, self.memory_fd = config, rank, memory_fd
        self.world_size: int = config["world_size"]
        self.gpus: Sequence[int] = config.get("gpu_of_rank", range(self.world_size))
        self.cluster = Cluster(config.get("nodes", 1), config.get("emulated_ranks", self.world_size))
        self.place = Place.of(config["device"])
        self.device = torch.device("cuda", self.gpus[rank]) if self.place.has_gpus else torch.device("cpu")
        Arena.begin_at(rank * config.get("memory_range", 0))
        self.handlers: dict[str, Callable[..., Any]] = {op: getattr(self, op) for op in REQUESTS if hasattr(self, op)}
        """What carries out each request that this process serves, by operation."""
        self.leaving = False
        self.send: Callable[[Message], None] = lambda _: None
        """Sends a message to the supervisor between a request and its answer."""

    def initialize(self) -> int:
        return os.getpid()

    def exit(self) -> None:
        self.leaving = True

    def report_building(self, building: bool) -> None:
        """Tells the supervisor that this process compiles from now on, or no more."""
        self.send(building_message(building))

    @staticmethod
    def freeze_objects() -> None:
        """Exempts what has been imported and laid out by now from garbage collection: blocks collect before they run, and it would add
        milliseconds to each that grow with every problem."""
        gc.collect()
        gc.freeze()


class Rank(RankProcess, BlockInterface):
    """The base of ranks of both sides: a device, a process group, sub-groups, and timed blocks."""

    def __init__(self, config: dict[str, Any], rank: int, memory_fd: int) -> None:
        super().__init__(config, rank, memory_fd)
        self.shares_gpu = len({*self.gpus}) < self.world_size
        self._groups: dict[tuple[tuple[int, ...], ...], Any] = {}
        self._store: Any = None
        self._meetings = 0
        self._check_capture: Callable[[], None] = lambda: None
        """Raises if the process group has captured messages that nothing waited for."""
        self._pin = Pin(cores_of_rank(rank, self.world_size))
        self.block: Block | None = None
        """What was prepared; one at a time, for live graphs with collectives slow down eager calls."""

    def initialize(self) -> int:
        if self.cluster.nodes > 1:
            keep_symmetric_memory_within_nodes(self.cluster)
        store = self._store = dist.FileStore(  # type: ignore[attr-defined]
            str(Path(self.config["folder"]) / "store"), self.world_size
        )
        if self.place.has_gpus:
            torch.cuda.set_device(self.device)
            cache_flush.bind()
            backend = self.config["backend"]
            device_id = self.device if backend == "nccl" else None  # a group written in Python connects at its first call
            if backend == "peerlane":
                self._check_capture = importlib.import_module("peerlane.device.backend").check_captured_messages
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world_size, device_id=device_id)
            dist.all_reduce(torch.zeros(1, device=self.device))
            torch.cuda.synchronize()
        else:
            torch.set_num_threads(1)
            dist.init_process_group(self.config["backend"], store=store, rank=self.rank, world_size=self.world_size)
            dist.barrier()
        return super().initialize()

    def export_arena(self) -> wire.ExportedArena:
        self._exported = Arena.create(1, self.device, self.memory_fd)
        byte = int.from_bytes(os.urandom(1), "big")
        self._exported.data[0] = byte
        self.synchronize()
        return wire.ExportedArena(self._exported.handle, byte)

    def import_arena(self, arena: dict[str, Any]) -> int:
        mapped = Arena.attach(arena, self.device, self.memory_fd)
        byte = int(mapped.data[0])
        mapped.close()
        return byte

    def use_device(self) -> None:
        torch.zeros(1, device=self.device).add_(1).cpu()
        self.synchronize()

    @property
    def prepared(self) -> Block:
        if self.block is None:
            raise RuntimeError("no block was prepared: expected prepare first")
        return self.block

    def build_block(
        self, mode: wire.LaunchMode, plan: wire.BlockPlan, solution: Solution, arguments: ArgumentSlots, outputs: OutputRegions
    ) -> str | None:
        """Builds a timed block. For graphs this captures; why that failed is an answer, not an error."""
        self.block = None
        if mode == "graph":  # which has memory of its own, beside what calls have left for later ones
            self.give_back()
        try:
            block = make_block(mode, solution, arguments, outputs, self.device, plan)
            self._check_capture()
            self.block = block
        except Exception as error:
            if mode != "graph":
                raise
            with contextlib.suppress(Exception):  # messages of a graph that is not replayed: eager calls follow
                self._check_capture()
            return capture_failure(error)
        return None

    def warm_up_block(self) -> None:
        self.prepared.warm()

    def ready_block(self, core: int) -> None:
        self._pin.take(core)
        self.prepared.ready()

    def run_block(self) -> wire.BlockRun:
        try:
            return self.prepared.run()
        finally:
            self._pin.release()

    def groups(self, layout: GroupLayout) -> dict[str, Any]:
        """This rank's process group of every named layout; created once per layout, on all ranks in the same order."""
        mine = {}
        for name, members_of in layout.items():
            key = tuple(tuple(members) for members in members_of)
            if key not in self._groups:
                created = [dist.new_group(list(members)) for members in key]
                self._groups[key] = next((g for g, members in zip(created, key, strict=True) if self.rank in members), None)
            mine[name] = self._groups[key]
        return mine

    def synchronize(self) -> None:
        if self.place.has_gpus:
            torch.cuda.synchronize()

    def meet(self) -> None:
        """Waits until all ranks are here, on the host: kernels of collectives wait for a few seconds only."""
        self._meetings += 1
        here, all_here = f"meeting {self._meetings}", f"meeting {self._meetings} is complete"
        if self._store.add(here, 1) == self.world_size:
            self._store.set(all_here, "")
        self._store.wait([all_here], _MEETING)

    def give_back(self) -> None:
        """Returns memory that PyTorch keeps for later to the device, where another rank's process may need it, if it is much: small cases
        that follow each other go on with what there is."""
        if self.place.has_gpus and torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > _KEPT_BYTES:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    @staticmethod
    def case_of(case: wire.CaseId) -> tuple[Problem, Case]:
        problem = problems.get(case.problem)
        return problem, problem.case(case.preset, case.label, case.world_size, case.nodes)
