"""NVLink multicast is off in every rank where a machine's owner forbids it, and records say so."""

from pathlib import Path

import pytest

from e2e.runs import judge
from peerlane.errors import UsageError
from peerlane.evaluate import EvaluationPlan
from peerlane.evaluate.node import describe_node
from peerlane.evaluate.processes.fork_client import fork_server_environment
from peerlane.results.identity import NodeClass
from peerlane.settings import MULTICAST_OFF, multicast_allowed, multicast_environment
from sample_results import ENVIRONMENT

CANDIDATE = """
import os

import torch.distributed as dist

seen = [os.environ.get(name) for name in ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS")]


def solution(tensor):
    if seen != ["0", "1", "1"]:
        raise RuntimeError(f"multicast is not off: {seen}")
    out = tensor.clone()
    dist.all_reduce(out)
    return out
"""


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PEERLANE_MULTICAST", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", *MULTICAST_OFF):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("setting", "devices", "off"),
    [
        (None, "0,1", False),
        (None, "MIG-7a0e", True),
        (None, "0:1", True),
        ("forbid", "0,1", True),
        ("allow", "MIG-7a0e", False),
        ("allow", "0,1", False),
    ],
)
def test_the_setting_reaches_ranks_and_records(setting: str | None, devices: str, off: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", devices)
    if setting is not None:
        monkeypatch.setenv("PEERLANE_MULTICAST", setting)
    assert (MULTICAST_OFF.items() <= fork_server_environment("cuda").items()) is off
    recorded = describe_node(EvaluationPlan((), device="cpu")).environment["variables"]
    node = NodeClass.of({**ENVIRONMENT, "variables": recorded}, "cuda")
    assert (node.nvls, node.multicast) == (not off, not off)
    assert multicast_allowed() is (setting == "allow")


def test_what_an_owner_forbids_no_other_variable_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEERLANE_MULTICAST", "forbid")
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0")
    assert not multicast_allowed() and multicast_environment() == MULTICAST_OFF
    monkeypatch.setenv("PEERLANE_MULTICAST", "off")
    with pytest.raises(UsageError, match="expected forbid or allow"):
        multicast_environment()


@pytest.mark.slow
def test_candidates_run_without_multicast_where_it_is_forbidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEERLANE_MULTICAST", "forbid")
    file = tmp_path / "1_a_pytorch.py"
    file.write_text(CANDIDATE)
    (found,) = judge(file)
    assert found.correct, found.verdict
