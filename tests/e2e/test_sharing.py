"""Confined ranks share memory with trusted ones, and a run says so when they cannot."""

from __future__ import annotations

import pytest

from e2e.runs import DEADLINES, GOOD
from peerlane.errors import UsageError
from peerlane.evaluate import EvaluationPlan, discover, evaluation, isolation
from peerlane.evaluate.sharing import sharing_failure


def test_memory_is_shared_at_the_default_tier() -> None:
    assert sharing_failure(isolation.choose(None, "cpu"), "cpu", DEADLINES) == ""


def test_ranks_that_cannot_share_memory_are_not_confined_or_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default the tier falls to L0, with the reason; a tier that was asked for is refused."""
    confined = isolation.Isolation("L1", isolation.NO_ISOLATION.confinement, {})
    monkeypatch.setattr(evaluation, "choose", lambda tier, device, readable: confined)
    monkeypatch.setattr(evaluation, "sharing_failure", lambda *_: "mapping the arena failed: cudaErrorMapBufferObjectFailed")
    found = evaluation.choose_isolation(EvaluationPlan(discover([str(GOOD)]), device="cuda"))
    assert found.tier == "L0" and "cudaErrorMapBufferObjectFailed" in found.describe()
    with pytest.raises(UsageError, match=r"isolation L1 is not possible here.*cudaErrorMapBufferObjectFailed"):
        evaluation.choose_isolation(EvaluationPlan(discover([str(GOOD)]), device="cuda", isolation="L1"))
