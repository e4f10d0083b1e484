"""The environment record that every stored result carries, and the node class that says which results may be compared."""

import importlib.metadata
import os
import platform
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from peerlane.common.toolkit import output_of
from peerlane.common.version import PACKAGE, __version__
from peerlane.hardware.topology import Topology, discover

_RECORDED_PREFIXES = ("NCCL_", "TORCH_NCCL_", "TORCH_SYMM_MEM_", "NVSHMEM_")
_RECORDED_NAMES = (
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING",
    "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "OMP_NUM_THREADS",
)  # fmt: skip
_GIT_TIMEOUT_S = 10.0


def record(topology: Topology | None = None, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Records the environment as it is now, JSON-able; creates no CUDA context. What does not exist here is None.

    Keys: ``gpus`` (list: index, name, uuid, memory_bytes, sm_clock_mhz, memory_clock_mhz, clock_event_reasons), ``links`` (``"0-1"`` ->
    ``"NV18"``), ``interconnect``, ``driver``, ``topology_source``, ``cpu`` (model, cores, ram_bytes), ``os``, ``host``, ``software``
    (python, peerlane, torch, cuda, nccl, triton), ``git`` (revision, dirty) of the peerlane checkout, ``variables`` (those that change how
    NCCL, CUDA and torch behave). Clocks and clock event reasons are read at the moment of the call.
    """
    environ = os.environ if environ is None else environ
    topology = discover(environ) if topology is None else topology
    return {
        "gpus": [{**asdict(gpu), "clock_event_reasons": _as_list(gpu.clock_event_reasons)} for gpu in topology.gpus],
        "links": {f"{a}-{b}": link for (a, b), link in sorted(topology.links.items())},
        "interconnect": topology.interconnect,
        "driver": topology.driver_version,
        "topology_source": topology.source,
        "cpu": {"model": topology.cpu_model, "cores": topology.cpu_cores, "ram_bytes": topology.ram_bytes},
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "host": platform.node(),
        "software": software_versions(),
        "git": git_revision(PACKAGE.parents[1]),
        "variables": recorded_variables(environ),
    }


def node_class(environment: Mapping[str, Any]) -> str:
    """Returns the class that two results must share to be comparable: ``4x NVIDIA H200, NVLink, driver 580``, or ``no GPU, 2 cores``.

    Takes a :func:`record`. GPU models and number, how they are joined, and the driver's major version count; host, clocks and versions of
    libraries do not.
    """
    counts = Counter(gpu["name"] for gpu in environment["gpus"])
    if not counts:
        return f"no GPU, {environment['cpu']['cores']} cores"
    models = " + ".join(f"{count}x {name}" for name, count in sorted(counts.items()))
    driver = environment["driver"]
    parts = [models, environment["interconnect"], f"driver {driver.split('.')[0]}" if driver else "unknown driver"]
    return ", ".join(part for part in parts if part)


def software_versions() -> dict[str, str | None]:
    """Returns the versions of python, peerlane, torch, the CUDA and NCCL that torch uses, and triton; None for what is not there."""
    return {
        "python": platform.python_version(),
        "peerlane": __version__,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "nccl": _nccl_version(),
        "triton": installed_version("triton"),
    }


def installed_version(distribution: str) -> str | None:
    """Returns the version of an installed Python distribution, without importing it; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def recorded_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables that change how NCCL, CUDA and torch behave, sorted by name."""
    return {name: value for name, value in sorted(environ.items()) if name in _RECORDED_NAMES or name.startswith(_RECORDED_PREFIXES)}


def git_revision(checkout: Path) -> dict[str, Any] | None:
    """Returns ``{"revision": 40 hex digits, "dirty": bool}`` of a git checkout; None if the folder is not the root of one, or git is
    missing."""
    if not (checkout / ".git").exists():
        return None
    revision = _git(checkout, "rev-parse", "HEAD")
    if revision is None:
        return None
    changes = _git(checkout, "status", "--porcelain", "--untracked-files=no")
    return {"revision": revision.strip(), "dirty": changes is None or bool(changes.strip())}


def _git(checkout: Path, *arguments: str) -> str | None:
    # safe.directory: git otherwise refuses a checkout that belongs to another user, which is usual in containers. No optional locks: a
    # record must not get in the way of someone else's git.
    command = ["git", "--no-optional-locks", "-c", f"safe.directory={checkout}", "-C", str(checkout), *arguments]
    return output_of(command, _GIT_TIMEOUT_S)


def _nccl_version() -> str | None:
    if sys.platform != "linux" or not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _as_list(values: tuple[str, ...] | None) -> list[str] | None:
    return None if values is None else list(values)
