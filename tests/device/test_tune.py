"""A choice is measured once, kept, the same on all ranks, and left to the model where it must not be measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from peerlane.device import tune

OPTIONS = ("as the model says", "faster", "slower")


class Measured:
    """Times of this rank and of another, and how often somebody looked."""

    def __init__(self) -> None:
        self.us = {"as the model says": (10.0, 11.0), "faster": (8.0, 9.0), "slower": (7.0, 20.0)}
        self.looks = 0

    def __call__(self, group: Any, options: Any, make: Any) -> dict[str, float]:
        self.looks += 1
        return {str(option): max(self.us[option]) for option in options}


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Measured]:
    times = Measured()
    monkeypatch.setenv("PEERLANE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PEERLANE_TUNE", "1")
    monkeypatch.setattr(tune, "_times", times)
    monkeypatch.setattr(tune, "node_class", lambda group: ["a GPU"])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    yield times
    tune._choices.clear()


def choose(*, rank: int = 0, together: bool = True, told: list[Any] | None = None, shape: tuple[int, ...] = (1, 2, 3)) -> str:
    """``told``: what all ranks say where this one says something."""
    group: Any = SimpleNamespace(rank=rank, world_size=2, runs_together=together, exchange=lambda value: told or [value, None])
    return tune.choose(group, "kernel", shape, OPTIONS, lambda option: (lambda: None, lambda: None))


def test_the_option_whose_slowest_rank_is_fastest_is_chosen_and_kept(measured: Measured) -> None:
    assert choose() == "faster" and tune.report()[0].by == "measured" and tune.report()[0].microseconds["slower"] == 20.0
    tune._choices.clear()
    assert choose() == "faster" and tune.report()[0].by == "cache" and measured.looks == 1
    assert choose(shape=(4, 5, 6)) == "faster" and measured.looks == 2


def test_all_ranks_follow_what_rank_0_has_kept(measured: Measured) -> None:
    assert choose(rank=1, told=["slower", None]) == "slower" and measured.looks == 0


def test_a_gain_within_the_noise_is_none(measured: Measured) -> None:
    measured.us["faster"] = (10.8, 10.8)
    assert choose() == "as the model says" and tune.report()[0].by == "measured"


@pytest.mark.parametrize("why", ["switched off", "captured", "ranks in turn"])
def test_the_model_decides_where_nothing_may_be_measured(measured: Measured, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    if why == "switched off":
        monkeypatch.delenv("PEERLANE_TUNE")
    if why == "captured":
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert choose(together=why != "ranks in turn") == "as the model says"
    assert measured.looks == 0 and tune.report()[0].by == "model"


@pytest.mark.parametrize("content", ["", "[1]", '{"a": 1}', "no json"])
def test_a_file_that_cannot_be_used_is_written_anew(measured: Measured, tmp_path: Path, content: str) -> None:
    (tmp_path / "tuned.json").write_text(content)
    assert choose() == "faster"
    assert list(json.loads((tmp_path / "tuned.json").read_text()).values()) == ["faster"]
