import os

# Before torch is imported: tests run side by side, and threads of theirs would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import gc
import sys
import warnings
from collections.abc import Iterator

import pytest

from command_line import Peerlane, Said
from floors import mark_slow
from kept_fork_servers import waiting_fork_servers
from peerlane import cli

__all__ = ["waiting_fork_servers"]

# Imports and collection leave little to collect. Looking for it again and again takes a fifth of their time.
gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before tests are chosen by their marks."""
    mark_slow(items)


def pytest_collection_finish() -> None:
    """What is there now stays: later collections need not look at it, nor copy it in forked ranks."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture
def forgetful_clients() -> Iterator[None]:
    """What clients of models leave open is closed before the next test, without the warnings."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


@pytest.fixture
def peerlane(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Peerlane:
    def run(*words: object, code: int = 0) -> Said:
        monkeypatch.setattr(sys, "argv", ["peerlane", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = Said(*capsys.readouterr())
        assert int(ended.value.code or 0) == code, said
        return said

    return run
