from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from peerlane import cli


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


@pytest.fixture
def peerlane(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs the command line in this process; returns its exit code."""

    def run(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["peerlane", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0)

    return run
