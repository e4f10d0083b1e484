"""A node out of fewer GPUs than ranks: several ranks share a GPU, at once through MPS, or in turns.

    node = share_gpus(ranks=4, gpus=1)                  or None: there are too few GPUs
    with node.daemon() as daemon:                       a daemon of its own; ended here, also if this process is killed
        environment = node.rank_environment(rank, daemon)

A virtual node tells right from wrong under true concurrency. It says nothing about links, so its results are never compared with a node's.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from peerlane.common.toolkit import output_of
from peerlane.errors import HarnessError, UsageError
from peerlane.hardware import mps_watcher, topology
from peerlane.settings import RANKS_PER_GPU, shared_gpu_environment

CONTROL = "nvidia-cuda-mps-control"
START_LIMIT_S, END_LIMIT_S, READY_LIMIT_S, ASK_LIMIT_S, POLL_S = 15.0, 10.0, 10.0, 2.0, 0.1
MPS_CLIENTS = 48
"""processes that one MPS server admits"""

Sharing = Literal["mps", "time_slices"]
Baseline = Literal["peerlane", "nccl"]


def available_sharing() -> Sharing:
    """Returns ``mps`` where the machine has the program that controls it."""
    return "mps" if shutil.which(CONTROL) else "time_slices"


def share_gpus(ranks: int, gpus: int, ranks_per_gpu: int | None = None, sharing: Sharing | None = None) -> VirtualNode | None:
    """Returns the node for ``ranks`` on a machine with ``gpus``: equally many on every GPU, and no more than ``ranks_per_gpu``.

    None for ``ranks_per_gpu``: as few on a GPU as there can be. Returns None where there are too few GPUs.
    """
    counts = [count for count in range(1, min(ranks, gpus) + 1) if ranks % count == 0]
    if ranks_per_gpu is not None:
        counts = [count for count in counts if ranks <= count * ranks_per_gpu][:1]
    return VirtualNode(ranks, counts[-1], sharing or available_sharing()) if counts else None


@dataclass(frozen=True)
class VirtualNode:
    """A node of ``ranks`` ranks on ``gpus`` GPUs, ``sharing`` them through MPS or in time slices.

    ``baseline``: what serves torch.distributed in all ranks. NCCL can only reach ranks that share a GPU through sockets.
    """

    ranks: int
    gpus: int
    sharing: Sharing
    baseline: Baseline = "peerlane"

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.gpus < 1 or self.ranks % self.gpus:
            raise UsageError(f"{self.ranks} ranks on {self.gpus} GPUs: expected the same number of ranks, at least one, on every GPU")

    @property
    def ranks_per_gpu(self) -> int:
        return self.ranks // self.gpus

    def device_index(self, rank: int) -> int:
        """Returns the GPU of a rank; neighbours share one."""
        return rank // self.ranks_per_gpu

    def rank_environment(self, rank: int, daemon: MpsDaemon | None = None) -> dict[str, str]:
        """Returns the environment that ``rank`` needs before CUDA and NCCL start.

        No rank gets a percentage from MPS. With 25 for each of four ranks on one H100, problems 11 to 14 and 16 hung at ``pkb``: the SMs
        behind percentages seem to overlap. Kernels of the kit take a share of all SMs instead (``Group.sm_count``).
        """
        environment: dict[str, str] = {}
        if self.ranks_per_gpu > 1:
            environment = {**shared_gpu_environment(f"rank{rank}"), RANKS_PER_GPU: str(self.ranks_per_gpu)}
        return environment | (daemon.environment if daemon is not None else {})

    @property
    def most_groups(self) -> int:
        """The number of rank groups that can be up at a time."""
        return MPS_CLIENTS // self.ranks_per_gpu if self.sharing == "mps" else MPS_CLIENTS

    @property
    def patience(self) -> float:
        """The factor by which timeouts grow: in time slices every rank waits while the others have their turns."""
        return float(self.ranks_per_gpu) if self.sharing == "time_slices" else 1.0

    def describe(self) -> dict[str, str | int]:
        """Returns the fields of the virtual node for the record of a result."""
        kind = "virtual" if self.ranks_per_gpu > 1 else "node"
        return {"node_kind": kind, "ranks_per_gpu": self.ranks_per_gpu, "sharing": self.sharing, "baseline": self.baseline}

    def __str__(self) -> str:
        how = "at once, by MPS" if self.sharing == "mps" else f"in time slices: there is no {CONTROL} on PATH"
        return f"virtual node: {self.ranks_per_gpu} ranks share a GPU, {how}; torch.distributed runs on {self.baseline}"

    @contextlib.contextmanager
    def daemon(self) -> Iterator[MpsDaemon | None]:
        """Runs a daemon where ranks share GPUs through MPS; gives it, else None."""
        if self.sharing != "mps":
            yield None
            return
        with MpsDaemon() as daemon:
            yield daemon


def _visible_gpus() -> dict[str, str]:
    """Returns CUDA_VISIBLE_DEVICES by UUIDs, if it is set. A daemon renumbers what it sees: an index means another GPU to its clients."""
    uuids = [gpu.uuid for gpu in topology.discover().gpus] if "CUDA_VISIBLE_DEVICES" in os.environ else []
    return {"CUDA_VISIBLE_DEVICES": ",".join(uuids)} if uuids else {}


class MpsDaemon:
    """An MPS daemon in a folder of its own. It and the folder go when the context ends, or within 10 s after this process was killed.

    Raises HarnessError if the daemon does not come up, with the end of its log.
    """

    def __init__(self) -> None:
        self.folder = Path()
        self._watcher: subprocess.Popen[bytes] | None = None
        self._visible = _visible_gpus()

    @property
    def environment(self) -> dict[str, str]:
        """The variables that its clients need."""
        folders = {"CUDA_MPS_PIPE_DIRECTORY": str(self.folder / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(self.folder / "log")}
        return folders | self._visible

    def __enter__(self) -> Self:
        control = shutil.which(CONTROL)
        if control is None:
            raise UsageError(f"there is no {CONTROL} on PATH; ranks can share a GPU in time slices")
        self.folder = Path(tempfile.mkdtemp(prefix="peerlane-mps-"))
        for name in ("pipe", "log"):
            (self.folder / name).mkdir()
        # The watcher comes first, so that the daemon always has one.
        self._watcher = subprocess.Popen(
            [sys.executable, "-I", "-S", mps_watcher.__file__, str(os.getpid()), str(self.folder), control],
            stdin=subprocess.PIPE,
            env={**os.environ, **self.environment},
            start_new_session=True,
        )
        try:
            self._start(control)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def is_alive(self) -> bool:
        """Tells whether a process of the daemon is there."""
        return bool(mps_watcher.processes(self.folder))

    def await_ready(self, limit_s: float = READY_LIMIT_S) -> None:
        """Waits until its servers admit clients. After a fault of one client a server refuses others until all its clients have ended.

        Starts the daemon anew if it takes longer than ``limit_s``; raises HarnessError if that fails.
        """
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            if self._is_ready():
                return
            time.sleep(POLL_S)
        control = shutil.which(CONTROL) or CONTROL
        mps_watcher.end_daemon(self.folder, control)
        for name in ("pipe", "log"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
            (self.folder / name).mkdir()
        self._start(control)

    def terminate(self, pids: Collection[int]) -> None:
        """Ends what these clients run on the GPU. Clients that are killed while their kernels run take all others of the server along."""
        for server in (self._ask("get_server_list") or "").split():
            clients = (self._ask(f"get_client_list {server}") or "").split() if server.isdecimal() else ()
            for pid in {str(pid) for pid in pids} & set(clients):
                self._ask(f"terminate_client {server} {pid}")

    def _is_ready(self) -> bool:
        servers = self._ask("get_server_list")
        if servers is None:
            return False
        return all("ACTIVE" in (self._ask(f"get_server_status {pid}") or "") for pid in servers.split() if pid.isdecimal())

    def _ask(self, command: str) -> str | None:
        """Returns the daemon's answer; None if there is none."""
        return output_of([CONTROL], ASK_LIMIT_S, given=f"{command}\n", environ={**os.environ, **self.environment})

    def close(self) -> None:
        """Ends the daemon and removes its folder. May be called twice."""
        watcher, self._watcher = self._watcher, None
        if watcher is None:
            return
        assert watcher.stdin is not None
        watcher.stdin.close()
        try:
            watcher.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            watcher.kill()
            watcher.wait()
            mps_watcher.end_daemon(self.folder, CONTROL)
            shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self, control: str) -> None:
        environment = {**os.environ, **self.environment}
        try:
            started = subprocess.run([control, "-d"], env=environment, capture_output=True, text=True, timeout=START_LIMIT_S)
        except subprocess.TimeoutExpired as error:
            raise HarnessError(f"{CONTROL} -d did not return within {START_LIMIT_S:g} s; {self._log_end()}") from error
        end = time.monotonic() + START_LIMIT_S
        while not started.returncode and not self.is_alive() and time.monotonic() < end:
            time.sleep(POLL_S)
        if not self.is_alive():
            said = (started.stderr or started.stdout).strip()
            raise HarnessError(f"{CONTROL} -d left with {started.returncode} and no daemon: {said or 'it said nothing'}; {self._log_end()}")

    def _log_end(self) -> str:
        path = self.folder / "log" / "control.log"
        lines = path.read_text(errors="replace").splitlines()[-3:] if path.exists() else []
        return f"its log ends with: {' / '.join(lines)}" if lines else "it has no log"
