from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from peerlane import cli


@pytest.fixture
def peerlane(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs the command line in this process; returns its exit code."""

    def run(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["peerlane", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0)

    return run
