"""`peerlane serve` keeps its own files from the candidates that it judges."""

from pathlib import Path
from typing import Any

import pytest

from command_line import Peerlane
from peerlane.sandbox.hidden_files import hidden_paths
from peerlane.service import server


def test_token_files_are_hidden_from_candidates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peerlane: Peerlane) -> None:
    given, named = tmp_path / "given", tmp_path / "named"
    for file in (given, named):
        file.write_text(f"the-{file.name}-token-of-the-service\n")
        file.chmod(0o600)
    hidden: list[str] = []
    monkeypatch.setenv("PEERLANE_TOKEN_FILE", str(named))
    monkeypatch.setattr(server, "listen", lambda *_: None)

    def run(*_: Any) -> None:
        hidden.extend(hidden_paths())

    monkeypatch.setattr(server, "serve", run)
    words = ["serve", "--device", "cpu", "--token-file", str(given), "--out", str(tmp_path / "jobs")]
    peerlane(*words)
    assert {str(given), str(named)} <= set(hidden)
