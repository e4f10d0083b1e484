"""Confined ranks share memory with trusted ones, and a run says so when they cannot."""

from pathlib import Path

import pytest

from e2e.runs import DEADLINES, GOOD
from peerlane.cli.doctor import isolation_checks
from peerlane.errors import UsageError
from peerlane.evaluate import EvaluationPlan, discover, node
from peerlane.evaluate.processes import sharing
from peerlane.evaluate.processes.sharing import sharing_failure
from peerlane.sandbox import isolation


def test_memory_is_shared_at_the_default_tier_and_that_is_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PEERLANE_CACHE_DIR", str(tmp_path))
    chosen = isolation.choose(None, "cpu")
    sharing_failure.cache_clear()
    assert sharing_failure(chosen, "cpu", DEADLINES) == ""
    monkeypatch.setattr(sharing, "_try", lambda *_: "tried again")
    sharing_failure.cache_clear()
    assert sharing_failure(chosen, "cpu", DEADLINES) == ""
    restarted = tmp_path / "boot_id"
    restarted.write_text("another start")
    monkeypatch.setattr(sharing, "_MACHINE", (restarted,))
    sharing_failure.cache_clear()
    assert sharing_failure(chosen, "cpu", DEADLINES) == "tried again"
    sharing_failure.cache_clear()
    assert sharing_failure(chosen, "cpu", DEADLINES) == "tried again", "a failure must not be remembered"
    sharing_failure.cache_clear()


def test_ranks_that_cannot_share_memory_are_not_confined_or_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default the tier falls to L0, with the reason; a tier that was asked for is refused."""
    confined = isolation.Isolation("L1", isolation.NO_ISOLATION.confinement, {})
    monkeypatch.setattr(node, "choose", lambda tier, device: confined)
    monkeypatch.setattr(node, "sharing_failure", lambda *_: "mapping the arena failed: cudaErrorMapBufferObjectFailed")
    found = node.choose_isolation(EvaluationPlan(discover([str(GOOD)]), device="cuda"))
    assert found.tier == "L0" and "cudaErrorMapBufferObjectFailed" in found.describe()
    with pytest.raises(UsageError, match=r"isolation L1 is not possible here.*cudaErrorMapBufferObjectFailed"):
        node.choose_isolation(EvaluationPlan(discover([str(GOOD)]), device="cuda", isolation="L1"))


def test_the_doctor_finds_out_whether_confined_ranks_can_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    confined = isolation.Isolation("L1", isolation.NO_ISOLATION.confinement, {})
    monkeypatch.setattr(isolation, "choose", lambda tier, device: confined)
    tried: list[str] = []

    def fails(isolation: object, device: str, deadlines: object, mps: bool = False) -> str:
        tried.append(device)
        return "candidate ranks did not start\nTraceback\nPermissionError: no"

    monkeypatch.setattr(sharing, "sharing_failure", fails)
    assert {check.status for check in isolation_checks("cpu")} == {"ok"} and not tried
    found = isolation_checks("cuda")
    assert {check.status for check in found} == {"absent"} and set(tried) == {"cuda"}
    assert found[0].detail.endswith("candidate ranks did not start ... PermissionError: no")
