import json
import subprocess
from pathlib import Path

import pytest
import torch

import peerlane
from peerlane.hardware.environment import git_revision, installed_version, node_class, record, recorded_variables
from peerlane.hardware.topology import Gpu, Topology


def machine(names: list[str], links: dict[tuple[int, int], str], driver: str | None = "580.159.04") -> Topology:
    gpus = tuple(Gpu(index, name, f"GPU-{index}", 141 * 2**30, 1980, 3201, ("gpu_idle",)) for index, name in enumerate(names))
    return Topology(gpus, links, driver, "a CPU", 64, 2**39, "nvml")


BARE = Topology((), {}, None, "a CPU", 2, None, "none", "no NVIDIA driver")
ALL_NVLINK = {(a, b): "NV18" for a in range(4) for b in range(a + 1, 4)}


def test_record_is_json_and_round_trips() -> None:
    for topology in (machine(["NVIDIA H200"] * 4, ALL_NVLINK), BARE):
        environment = record(topology, {})
        assert json.loads(json.dumps(environment)) == environment


def test_record_on_this_machine_creates_no_cuda_context() -> None:
    environment = record()
    assert environment["software"]["torch"] == torch.__version__
    assert environment["software"]["peerlane"] == peerlane.__version__
    assert environment["cpu"]["cores"] >= 1
    assert not torch.cuda.is_initialized()


def test_record_of_a_node() -> None:
    environment = record(machine(["NVIDIA H200"] * 4, ALL_NVLINK), {"NCCL_NVLS_ENABLE": "0"})
    assert environment["links"]["0-3"] == "NV18" and len(environment["links"]) == 6
    assert environment["gpus"][1]["sm_clock_mhz"] == 1980 and environment["gpus"][1]["clock_event_reasons"] == ["gpu_idle"]
    assert environment["variables"] == {"NCCL_NVLS_ENABLE": "0"}


def test_only_variables_that_matter_are_recorded() -> None:
    environ = {
        "NCCL_DEBUG": "INFO",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NVSHMEM_DISABLE_NVLS": "1",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "AWS_SECRET_ACCESS_KEY": "hidden",
        "MY_NCCL_THING": "hidden",
    }
    assert set(recorded_variables(environ)) == set(environ) - {"AWS_SECRET_ACCESS_KEY", "MY_NCCL_THING"}


@pytest.mark.parametrize(
    ("topology", "expected"),
    [
        (machine(["NVIDIA H200"] * 4, ALL_NVLINK), "4x NVIDIA H200, NVLink, driver 580"),
        (machine(["NVIDIA H200"], {}), "1x NVIDIA H200, driver 580"),
        (machine(["NVIDIA H200", "NVIDIA A100"], {(0, 1): "SYS"}, None), "1x NVIDIA A100 + 1x NVIDIA H200, PCIe, unknown driver"),
        (BARE, "no GPU, 2 cores"),
    ],
)
def test_node_class(topology: Topology, expected: str) -> None:
    assert node_class(record(topology, {})) == expected


def test_git_revision(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
        return subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True, text=True
        ).stdout.strip()

    assert git_revision(tmp_path) is None
    git("init", "-q")
    assert git_revision(tmp_path) is None  # no commit yet
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-q", "-m", "first")
    revision = git("rev-parse", "HEAD")
    assert git_revision(tmp_path) == {"revision": revision, "dirty": False}
    (tmp_path / "file").write_text("two")
    assert git_revision(tmp_path) == {"revision": revision, "dirty": True}


def test_installed_version() -> None:
    assert installed_version("pytest") == pytest.__version__
    assert installed_version("no-such-distribution-here") is None
