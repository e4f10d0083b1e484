"""A rank process: joins its group, then serves requests until it is told to exit. Forked from the fork server with torch imported.

Imports the standard library, torch and peerlane's problems; the candidate's side loads candidate code and is untrusted from then on.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import importlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from peerlane import problems
from peerlane.common.cluster import Cluster
from peerlane.common.place import Place
from peerlane.errors import CompileError, DeviceTimeout, EmulatedFault
from peerlane.evaluate import messages, wire
from peerlane.evaluate.memory.arena import Arena
from peerlane.evaluate.memory.slots import ArgumentSlots, OutputRegions
from peerlane.evaluate.ranks.node_memory import keep_symmetric_memory_within_nodes
from peerlane.evaluate.ranks.timed_block import Block, Solution, capture_failure, make_block
from peerlane.evaluate.timing import cache_flush
from peerlane.evaluate.timing.cores import Pin, cores_of_rank
from peerlane.problems.contract.spec import Case, GroupLayout, Problem

Handler = Callable[[Any], wire.Answer | list[wire.Answer]]

_MEETING = datetime.timedelta(minutes=10)  # the supervisor has timeouts of its own
_KEPT_BYTES = 1 << 30  # of memory, that a rank may keep for later

_CUDA_WORDS = ("CUDA error", "CUDA_ERROR", "cudaError", "CUBLAS_STATUS", "device-side assert", "Triton Error [CUDA]")
_MEMORY_WORDS = (
    "out of memory",
    "OutOfMemory",
    "CUDA_ERROR_OUT_OF_MEMORY",
    "cudaErrorMemoryAllocation",
    "can't allocate memory",
    "Cannot allocate memory",
)
_GPU_WORDS = re.compile(r"\b(cuda|nvidia|gpus?|nvrtc|nvcc)\b|CUDA_HOME|libcuda|libnv", re.IGNORECASE)


def classify(error: BaseException, default: wire.ErrorKind = "runtime_error") -> wire.ErrorKind:
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


class Rank:
    """The base of both kinds of rank: a device, a process group, sub-groups, and the requests every rank understands."""

    def __init__(self, config: dict[str, Any], rank: int, memory_fd: int) -> None:
        self.config, self.rank, self.memory_fd = config, rank, memory_fd
        self.world_size: int = config["world_size"]
        gpus = config.get("gpu_of_rank", range(self.world_size))
        self.cluster = Cluster(config.get("nodes", 1), config.get("emulated_ranks", self.world_size))
        self.place = Place.of(config["device"])
        self.device = torch.device("cuda", gpus[rank]) if self.place.has_gpus else torch.device("cpu")
        self.shares_gpu = len({*gpus}) < self.world_size
        Arena.begin_at(rank * config.get("memory_range", 0))
        self._groups: dict[tuple[tuple[int, ...], ...], Any] = {}
        self._store: Any = None
        self._meetings = 0
        self.handlers: dict[type[wire.Request[Any]], Handler] = {
            wire.Initialize: self.initialize,
            wire.ExportArena: self.export_arena,
            wire.ImportArena: self.import_arena,
            wire.UseDevice: self.use_device,
            wire.WarmUpBlock: self.warm_up_block,
            wire.ReadyBlock: self.ready_block,
            wire.RunBlock: self.run_block,
            wire.Exit: self.exit,
        }
        """for every request that this rank serves, what carries it out"""
        self.leaving = False
        self.send: Callable[[messages.Message], None] = lambda _: None
        """sends a message to the supervisor between a request and its answer"""
        self._check_capture: Callable[[], None] = lambda: None
        """raises if the process group has captured messages that nothing waited for"""
        self._pin = Pin(cores_of_rank(rank, self.world_size))
        self.block: Block | None = None
        """what was prepared; one at a time, for live graphs with collectives slow down eager calls"""

    def initialize(self, request: wire.Initialize) -> wire.Initialized:
        """Joins the process group and runs one collective, so that connections exist."""
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
        return wire.Initialized(os.getpid())

    def export_arena(self, request: wire.ExportArena) -> wire.ExportedArena:
        """Creates a small arena with a random byte in it."""
        self._exported = Arena.create(1, self.device, self.memory_fd)
        byte = int.from_bytes(os.urandom(1), "big")
        self._exported.data[0] = byte
        self.synchronize()
        return wire.ExportedArena(self._exported.handle, byte)

    def import_arena(self, request: wire.ImportArena) -> wire.ImportedArena:
        """Maps an exported arena and reads its byte."""
        arena = Arena.attach(request.arena, self.device, self.memory_fd)
        byte = int(arena.data[0])
        arena.close()
        return wire.ImportedArena(byte)

    def use_device(self, request: wire.UseDevice) -> wire.Done:
        """Runs a small kernel."""
        torch.zeros(1, device=self.device).add_(1).cpu()
        self.synchronize()
        return wire.Done()

    def exit(self, request: wire.Exit) -> wire.Done:
        """Ends the serving loop after this answer."""
        self.leaving = True
        return wire.Done()

    @property
    def prepared(self) -> Block:
        if self.block is None:
            raise RuntimeError("no block was prepared: expected prepare first")
        return self.block

    def build_block(
        self, request: wire.PrepareBlock, solution: Solution, arguments: ArgumentSlots, outputs: OutputRegions
    ) -> wire.PreparedBlock:
        """Builds a timed block in the request's launch mode; for graphs this captures, and a failed capture is an answer, not an error."""
        self.block = None
        if request.mode == "graph":  # which has memory of its own, beside what calls have left for later ones
            self.give_back()
        try:
            block = make_block(request.mode, solution, arguments, outputs, self.device, request.plan)
            self._check_capture()
            self.block = block
        except Exception as error:
            if request.mode != "graph":
                raise
            with contextlib.suppress(Exception):  # messages of a graph that is not replayed: eager calls follow
                self._check_capture()
            return wire.PreparedBlock(capture_failure(error))
        return wire.PreparedBlock(None)

    def warm_up_block(self, request: wire.WarmUpBlock) -> wire.Done:
        """Runs the prepared block once, without clocks."""
        self.prepared.warm()
        return wire.Done()

    def ready_block(self, request: wire.ReadyBlock) -> wire.Done:
        """Makes this rank ready for :meth:`run_block`, on the core with this number."""
        self._pin.take(request.core)
        self.prepared.ready()
        return wire.Done()

    def run_block(self, request: wire.RunBlock) -> wire.BlockRun:
        """Runs the prepared block; as little as possible besides, for the supervisor's clock runs meanwhile."""
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

    @staticmethod
    def freeze_objects() -> None:
        """Exempts what has been imported and laid out by now from garbage collection: blocks collect before they run, and it would add
        milliseconds to each that grow with every problem."""
        gc.collect()
        gc.freeze()

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
