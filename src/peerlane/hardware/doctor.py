"""Checks of the machine, as data: what is there, what is missing, and what cannot be done without it.

No check creates a CUDA context, imports an optional package or raises; a missing thing is a result with the command that brings it.
"""

import ctypes.util
import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from peerlane.common.toolkit import find_nvcc
from peerlane.hardware.environment import installed_version, software_versions
from peerlane.hardware.profiles import profile_for
from peerlane.hardware.topology import Topology, discover
from peerlane.hardware.virtual_node import CONTROL, available_sharing
from peerlane.settings import MULTICAST_OFF

Status = Literal["ok", "warn", "fail", "absent"]

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 9)
SHARED_MEMORY_BYTES = 2**30


@dataclass(frozen=True)
class Check:
    """One finding.

    Attributes:
        name: what was looked at.
        status: ``ok``; ``warn``: works, with a drawback; ``fail``: peerlane does not work; ``absent``: an optional thing is not there.
        detail: what was found, or what cannot be done without it.
        remedy: what to do, usually a command; empty when there is nothing to do.
    """

    name: str
    status: Status
    detail: str
    remedy: str = ""


def diagnose(topology: Topology | None = None, environ: Mapping[str, str] | None = None) -> list[Check]:
    """Runs all checks, in the order in which a reader wants them: what peerlane needs, the GPUs, the compilers, the system."""
    environ = os.environ if environ is None else environ
    topology = discover(environ) if topology is None else topology
    return [
        check_python(),
        check_torch(topology),
        check_gpus(topology),
        check_links(topology),
        check_ranks(topology),
        check_nccl(topology),
        check_cuda_bindings(),
        check_nvrtc(),
        check_nvcc(environ),
        check_triton(),
        check_nvshmem(),
        check_nccl_device_api(topology),
        check_extension_toolchain(),
        check_shared_memory(),
        check_multicast(topology, environ),
        check_nvml(topology),
    ]


def check_python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        return Check("Python", "fail", f"{version}; peerlane needs {oldest} or newer", f"uv venv --python {oldest}")
    return Check("Python", "ok", version)


def check_torch(topology: Topology) -> Check:
    version, cuda = str(torch.__version__), torch.version.cuda
    if tuple(int(part) for part in version.split("+")[0].split(".")[:2]) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        return Check("torch", "fail", f"{version}; peerlane needs {oldest} or newer", f"pip install 'torch>={oldest}'")
    if cuda is None and topology.gpus:
        return Check(
            "torch",
            "warn",
            f"{version}, built without CUDA: the GPUs cannot be used",
            "pip install torch --index-url https://download.pytorch.org/whl/cu130",
        )
    return Check("torch", "ok", f"{version}, {f'CUDA {cuda}' if cuda else 'without CUDA'}")


def check_gpus(topology: Topology) -> Check:
    if not topology.gpus:
        return Check(
            "GPUs",
            "absent",
            f"{topology.reason}. PyTorch candidates run on CPU ranks, those of the device kit on emulated ranks; other CUDA candidates are "
            "only compiled and imported, and nothing is timed",
            "install the NVIDIA driver, or use a machine with GPUs",
        )
    names = ", ".join(f"GPU {gpu.index}: {gpu.name}, {gpu.memory_bytes / 2**30:.0f} GiB" for gpu in topology.gpus)
    detail = f"{names}; driver {topology.driver_version or 'unknown'}"
    strangers = sorted({gpu.name for gpu in topology.gpus if profile_for(gpu.name) is None})
    if strangers:
        return Check(
            "GPUs", "warn", f"{detail}. No datasheet profile of {', '.join(strangers)}: no roofline", "add one to hardware/profiles.py"
        )
    return Check("GPUs", "ok", detail)


def check_links(topology: Topology) -> Check:
    name = "NVLink"
    if len(topology.gpus) < 2:
        return Check(name, "absent", f"{len(topology.gpus)} GPUs: no links between GPUs", "use a machine with two or more GPUs")
    kinds = ", ".join(sorted(set(topology.links.values()))) or "none reported"
    if topology.interconnect == "NVLink":
        return Check(name, "ok", f"every pair of GPUs is joined ({kinds})")
    if topology.interconnect == "unknown links":
        return Check(name, "warn", "neither NVML nor nvidia-smi says how the GPUs are joined", "nvidia-smi topo -m")
    return Check(
        name,
        "warn",
        f"not every pair of GPUs is joined by NVLink ({kinds}): rooflines assume it, and device-kit kernels need peer access",
        "set CUDA_VISIBLE_DEVICES to GPUs that NVLink joins; nvidia-smi topo -m shows them",
    )


def check_ranks(topology: Topology) -> Check:
    if len(topology.gpus) >= 2:
        return Check("ranks", "ok", f"up to {len(topology.gpus)} on GPUs, one each; {topology.cpu_cores} CPU cores")
    if topology.gpus:
        several = "several on the GPU, a virtual node: real concurrency, no links"
        if available_sharing() == "mps":
            return Check("ranks", "ok", f"{several}; at once, by MPS")
        what = f"install {CONTROL} (in the driver's package), and put it on PATH"
        return Check("ranks", "warn", f"{several}; in time slices, for there is no {CONTROL}", what)
    cores = f"{topology.cpu_cores} CPU core{'s' if topology.cpu_cores != 1 else ''}"
    return Check(
        "ranks", "warn", f"2, 4 or 8 on the CPU with gloo, for correctness only, on {cores}", "for timing: a machine with two GPUs or more"
    )


def check_nccl(topology: Topology) -> Check:
    version = software_versions()["nccl"]
    if version:
        return Check("NCCL", "ok", version)
    status: Status = "warn" if topology.gpus else "absent"
    return Check(
        "NCCL",
        status,
        "this torch has none: ranks on GPUs cannot communicate, gloo on the CPU can",
        "pip install torch --index-url https://download.pytorch.org/whl/cu130" if topology.gpus else "nothing, as long as there is no GPU",
    )


def check_cuda_bindings() -> Check:
    versions = {name: installed_version(name) for name in ("cuda-bindings", "cuda-core")}
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        return Check(
            "CUDA bindings",
            "absent",
            f"no {' and no '.join(missing)}: the device kit can neither compile nor launch kernels",
            "pip install 'peerlane[cuda]'",
        )
    return Check("CUDA bindings", "ok", ", ".join(f"{name} {version}" for name, version in versions.items()))


def check_nvrtc() -> Check:
    packaged = (f"{name} {v}" for name in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12") if (v := installed_version(name)))
    found = next(packaged, None) or ctypes.util.find_library("nvrtc")
    return _optional("NVRTC", found, "device-kit kernels cannot be compiled", "pip install 'peerlane[cuda]'")


def check_nvcc(environ: Mapping[str, str]) -> Check:
    without = "candidates that use torch's load_inline or nvcc cannot be built"
    return _optional("nvcc", find_nvcc(environ), without, "install the CUDA toolkit, or put nvcc on PATH")


def check_triton() -> Check:
    return _optional("Triton", installed_version("triton"), "candidates written in Triton cannot run", "pip install 'peerlane[triton]'")


def check_nvshmem() -> Check:
    """Checks for NVSHMEM: headers, both libraries, and what compiles and links kernels that call it."""
    from peerlane.device.nvshmem.installation import INSTALL, find_installation, what_is_missing
    from peerlane.device.nvshmem.program import nvjitlink

    found = find_installation()
    if found is None:
        return Check(
            "NVSHMEM", "absent", f"candidates for it are not run: they need {(what_is_missing() or '').partition(': run')[0]}", INSTALL
        )
    if nvjitlink() is not None:
        return Check("NVSHMEM", "ok", f"{found}; kernels are compiled by NVRTC and linked by nvJitLink")
    if find_nvcc():
        return Check("NVSHMEM", "ok", f"{found}; kernels are compiled and linked by nvcc")
    return Check("NVSHMEM", "warn", f"{found}; neither nvJitLink nor nvcc can link kernels with its device library", INSTALL)


NCCL_DEVICE_API: Sequence[tuple[tuple[int, ...], str]] = (
    ((2, 28), "kernels may load and store peers' memory (LSA), and put over the network (GIN) given an RDMA NIC"),
    ((2, 29), "such kernels also run with later versions"),
    ((2, 30), "ranks may share a GPU (NCCL_MULTI_RANK_GPU_ENABLE=1)"),
    ((2, 32, 3), "GIN also goes by sockets, where ranks share a GPU"),
)
"""What NCCL's device API allows, by the version since which it does so."""


def check_nccl_device_api(topology: Topology) -> Check:
    """Checks which version of NCCL's device API is here, and what that version would allow."""
    from peerlane.device.nccl.installation import INSTALL, what_is_missing

    name, version = "NCCL device API", software_versions()["nccl"]
    numbers = tuple(int(part) for part in (version or "").split(".") if part.isdecimal())
    allowed = [what for since, what in NCCL_DEVICE_API if numbers >= since]
    remedy = "a torch with a newer NCCL: pip install --upgrade torch --index-url https://download.pytorch.org/whl/cu130"
    if allowed and (missing := what_is_missing()) is not None:
        return Check(name, "absent", f"NCCL {version}; candidates for it are not run: they need {missing.partition(': run')[0]}", INSTALL)
    if not allowed:
        return Check(name, "absent", f"{f'NCCL {version}' if version else 'no NCCL'}; its device API begins with 2.28", remedy)
    detail = f"NCCL {version}: {'; '.join(allowed)}"
    return Check(name, "ok", detail) if topology.gpus else Check(name, "absent", detail, "use a machine with GPUs")


def check_extension_toolchain() -> Check:
    """Checks for ninja and a C++ compiler, which ``torch.utils.cpp_extension.load_inline`` needs besides nvcc."""
    compiler = shutil.which("g++") or shutil.which("c++")
    ninja = shutil.which("ninja") or (importlib.util.find_spec("ninja") and "the ninja package")
    missing = [command for tool, command in ((ninja, "pip install ninja"), (compiler, "apt-get install g++")) if not tool]
    if missing:
        return Check("ninja and g++", "absent", "candidates that use torch's load_inline cannot be built", " && ".join(missing))
    return Check("ninja and g++", "ok", f"{ninja}, {compiler}")


def check_shared_memory(folder: Path = Path("/dev/shm")) -> Check:
    name = "shared memory"
    try:
        status = os.statvfs(folder)
    except OSError:
        return Check(
            name, "warn", f"{folder} is missing: NCCL and torch exchange data between ranks through it", f"mount -t tmpfs tmpfs {folder}"
        )
    size = status.f_frsize * status.f_blocks
    detail = f"{folder} has {size / 2**20:.0f} MiB, {status.f_frsize * status.f_bavail / 2**20:.0f} MiB free"
    if size < SHARED_MEMORY_BYTES:
        return Check(name, "warn", f"{detail}; ranks may run out of it", "docker run --shm-size=8g, or mount -o remount,size=8g /dev/shm")
    return Check(name, "ok", detail)


def check_multicast(topology: Topology, environ: Mapping[str, str]) -> Check:
    name = "NVLink multicast"
    if len(topology.gpus) < 2:
        return Check(name, "ok", "not possible with fewer than two GPUs")
    unset = [f"{variable}={value}" for variable, value in MULTICAST_OFF.items() if environ.get(variable) != value]
    if not unset:
        return Check(name, "ok", "switched off in NCCL, torch and NVSHMEM")
    return Check(
        name,
        "warn",
        "not switched off everywhere. peerlane does not use it, but libraries under it may, and a program that dies while using it can "
        "take GPUs that others share out of service",
        f"export {' '.join(unset)}",
    )


def check_nvml(topology: Topology) -> Check:
    version = installed_version("nvidia-ml-py")
    without = "GPUs are described from the output of nvidia-smi" if topology.gpus else "not needed without a GPU"
    return _optional("NVML bindings", version and f"nvidia-ml-py {version}", without, "pip install nvidia-ml-py")


def _optional(name: str, found: str | None, without: str, remedy: str) -> Check:
    return Check(name, "ok", found) if found else Check(name, "absent", without, remedy)
