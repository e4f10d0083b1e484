"""Confined ranks share memory with trusted ones, and a run says so when they cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.runs import DEADLINES, GOOD
from peerlane.errors import UsageError
from peerlane.evaluate import EvaluationPlan, discover, evaluation, isolation, sharing
from peerlane.evaluate.sharing import sharing_failure


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
    monkeypatch.setattr(evaluation, "choose", lambda tier, device, readable: confined)
    monkeypatch.setattr(evaluation, "sharing_failure", lambda *_: "mapping the arena failed: cudaErrorMapBufferObjectFailed")
    found = evaluation.choose_isolation(EvaluationPlan(discover([str(GOOD)]), device="cuda"))
    assert found.tier == "L0" and "cudaErrorMapBufferObjectFailed" in found.describe()
    with pytest.raises(UsageError, match=r"isolation L1 is not possible here.*cudaErrorMapBufferObjectFailed"):
        evaluation.choose_isolation(EvaluationPlan(discover([str(GOOD)]), device="cuda", isolation="L1"))
