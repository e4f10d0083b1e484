from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def model_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Keys for the fakes, nothing written outside the test's folder, and retries that do not wait."""
    from tenacity import wait_none

    for name in ("FAKE_API_KEY", "ANTHROPIC_API_KEY"):
        monkeypatch.setenv(name, "none")
    for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setattr("inspect_ai.model._retry.wait_exponential_jitter", lambda *_, **__: wait_none())
    yield
    with warnings.catch_warnings():  # clients leave their connections open
        warnings.simplefilter("ignore")
        gc.collect()
