from pathlib import Path

import pytest

from kept_fork_servers import kept_fork_servers

__all__ = ["kept_fork_servers"]


@pytest.fixture(scope="session")
def user_folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("user")


@pytest.fixture
def model_surroundings(monkeypatch: pytest.MonkeyPatch, user_folders: Path, forgetful_clients: None) -> None:
    """Keys for the fakes, nothing written into the user's folders, and retries that do not wait."""
    from tenacity import wait_none

    for name in ("FAKE_API_KEY", "ANTHROPIC_API_KEY"):
        monkeypatch.setenv(name, "none")
    for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(user_folders / name))
    monkeypatch.setattr("inspect_ai.model._retry.wait_exponential_jitter", lambda *_, **__: wait_none())
