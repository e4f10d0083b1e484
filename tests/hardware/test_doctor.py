from pathlib import Path
from typing import get_args

import pytest
import torch

from peerlane.hardware import doctor
from peerlane.hardware.doctor import Check, Status, diagnose
from peerlane.hardware.topology import Gpu, Topology
from peerlane.settings import MULTICAST_OFF

BARE = Topology((), {}, None, "a CPU", 2, 2**34, "none", "no NVIDIA driver: neither NVML nor nvidia-smi answers")


def machine(count: int, link: str = "NV18", name: str = "NVIDIA H200") -> Topology:
    gpus = tuple(Gpu(index, name, f"GPU-{index}", 141 * 2**30) for index in range(count))
    return Topology(gpus, {(a, b): link for a in range(count) for b in range(a + 1, count)}, "580.1", "a CPU", 64, 2**39, "nvml")


def by_name(checks: list[Check]) -> dict[str, Check]:
    assert len({check.name for check in checks}) == len(checks)
    return {check.name: check for check in checks}


def test_bare_machine_is_usable_and_says_what_it_cannot_do() -> None:
    checks = by_name(diagnose(BARE, {}))
    assert not [check for check in checks.values() if check.status == "fail"]
    assert checks["GPUs"].status == "absent" and "nothing is timed" in checks["GPUs"].detail
    assert checks["NVLink"].status == "absent"
    assert checks["ranks"].status == "warn" and "gloo" in checks["ranks"].detail and "2 CPU cores" in checks["ranks"].detail


@pytest.mark.parametrize("topology", [BARE, machine(1), machine(4), machine(2, "SYS")])
def test_whatever_is_not_well_says_what_to_do(topology: Topology) -> None:
    for check in diagnose(topology, {}):
        assert check.status in get_args(Status) and check.detail
        assert check.status == "ok" or check.remedy, check


def test_node_with_nvlink() -> None:
    checks = by_name(diagnose(machine(4), dict(MULTICAST_OFF)))
    assert checks["GPUs"].status == "ok" and "GPU 3: NVIDIA H200, 141 GiB" in checks["GPUs"].detail
    assert checks["NVLink"].status == "ok" and "NV18" in checks["NVLink"].detail
    assert checks["ranks"].status == "ok" and "up to 4" in checks["ranks"].detail
    assert checks["NVLink multicast"].status == "ok"


@pytest.mark.parametrize(("sharing", "status", "told"), [("mps", "ok", "at once, by MPS"), ("time_slices", "warn", "in time slices")])
def test_one_gpu_is_a_virtual_node(sharing: str, status: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "available_sharing", lambda: sharing)
    found = doctor.check_ranks(machine(1))
    assert found.status == status and told in found.detail and ("on PATH" in found.remedy) == (sharing == "time_slices")


def test_gpus_without_nvlink_or_profile() -> None:
    checks = by_name(diagnose(machine(2, "SYS", "NVIDIA L4"), {}))
    assert checks["NVLink"].status == "warn" and "SYS" in checks["NVLink"].detail
    assert checks["GPUs"].status == "warn" and "NVIDIA L4: no roofline" in checks["GPUs"].detail


def test_multicast_names_the_variables_that_are_not_set() -> None:
    check = doctor.check_multicast(machine(2), {"NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "0"})
    assert check.status == "warn"
    assert check.remedy == "export TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1"


def test_gpus_with_a_cpu_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert doctor.check_torch(machine(2)).status == "warn"
    assert doctor.check_torch(BARE).status == "ok"


def test_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.8.1+cu128")
    check = doctor.check_torch(BARE)
    assert check.status == "fail" and check.remedy == "pip install 'torch>=2.9'"
    monkeypatch.setattr("sys.version_info", (3, 10, 4))
    assert doctor.check_python().status == "fail"


def test_missing_packages_and_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed_version", lambda name: "1.2" if name == "cuda-core" else None)
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda *arguments, **options: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    bindings = doctor.check_cuda_bindings()
    assert bindings.status == "absent" and "no cuda-bindings:" in bindings.detail and bindings.remedy == "pip install 'peerlane[cuda]'"
    assert doctor.check_nvrtc().status == "absent"
    assert doctor.check_triton().remedy == "pip install 'peerlane[triton]'"
    assert doctor.check_nvcc({}).status == "absent"
    assert doctor.check_extension_toolchain().remedy == "pip install ninja && apt-get install g++"
    assert doctor.check_nvml(machine(1)).status == "absent"


def test_nvcc_is_found_under_cuda_home(tmp_path: Path) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    check = doctor.check_nvcc({"CUDA_HOME": str(tmp_path), "PATH": ""})
    assert check == Check("nvcc", "ok", str(nvcc))


def test_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_shared_memory(tmp_path / "missing").status == "warn"
    monkeypatch.setattr(doctor, "SHARED_MEMORY_BYTES", 2**63)
    check = doctor.check_shared_memory(tmp_path)
    assert check.status == "warn" and "MiB" in check.detail and "--shm-size" in check.remedy
    monkeypatch.setattr(doctor, "SHARED_MEMORY_BYTES", 0)
    assert doctor.check_shared_memory(tmp_path).status == "ok"
