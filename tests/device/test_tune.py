"""A choice is measured once, kept, the same on all ranks, and left to the model where it must not be measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from peerlane.device.host import tune

OPTIONS = ("as the model says", "faster", "slower")


class Measured:
    """The slowest rank's times, how often somebody looked at two of them, and which options have memory."""

    def __init__(self) -> None:
        self.us = {"as the model says": 11.0, "faster": 9.0, "slower": 20.0}
        self.looks, self.made = 0, set[str]()

    def __call__(self, group: Any, calls: Any) -> list[float]:
        self.looks += 1
        assert len(self.made) == len(calls)
        return [self.us[call()] for call in calls]

    def make(self, option: str) -> tuple[Any, Any]:
        self.made.add(option)
        return lambda: option, lambda: self.made.remove(option)


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Measured]:
    times = Measured()
    monkeypatch.setenv("PEERLANE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PEERLANE_TUNE", "1")
    monkeypatch.setattr(tune, "_in_turns", times)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(tune, "node_class", lambda group: ["a GPU"])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    yield times
    assert not times.made
    tune._choices.clear()


def choose(
    measured: Measured, *, rank: int = 0, together: bool = True, told: list[Any] | None = None, shape: tuple[int, ...] = (1, 2, 3)
) -> str:
    """``told``: what all ranks say where this one says something."""
    group: Any = SimpleNamespace(rank=rank, world_size=2, device=0, runs_together=together, exchange=lambda value: told or [value] * 2)
    return tune.choose(group, "kernel", shape, OPTIONS, measured.make)


def test_the_option_whose_slowest_rank_is_fastest_is_chosen_and_kept(measured: Measured) -> None:
    assert choose(measured) == "faster" and tune.report()[-1].by == "measured" and tune.report()[-1].microseconds["slower"] == 20.0
    tune._choices.clear()
    assert choose(measured) == "faster" and tune.report()[-1].by == "cache" and measured.looks == 2
    assert choose(measured, shape=(4, 5, 6)) == "faster" and measured.looks == 4


def test_all_ranks_follow_what_rank_0_has_kept(measured: Measured) -> None:
    assert choose(measured, rank=1, told=["slower", None]) == "slower" and measured.looks == 0


def test_a_gain_within_the_noise_is_none(measured: Measured) -> None:
    measured.us["faster"] = 10.8
    assert choose(measured) == "as the model says" and tune.report()[-1].by == "measured"


def test_options_are_left_out_when_the_budget_is_used_up(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "BUDGET_S", 0.0)
    assert choose(measured) == "faster" and measured.looks == 1 and "slower" not in tune.report()[-1].microseconds


def test_a_time_is_the_median_of_the_slowest_ranks_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(0, 1000, tune.LAUNCHES))
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None, elapsed_time=lambda end: next(ticks) * 1e-3)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    others = [[90.0, 0.0, 0.0, 0.0, 0.0], [0.0] * 5]  # one disturbed stretch
    group: Any = SimpleNamespace(exchange=lambda value: [value, others])
    assert tune._in_turns(group, (lambda: None, lambda: None)) == [6.0, 5.0]


@pytest.mark.parametrize("why", ["switched off", "captured", "ranks in turn"])
def test_the_model_decides_where_nothing_may_be_measured(measured: Measured, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    if why == "switched off":
        monkeypatch.delenv("PEERLANE_TUNE")
    if why == "captured":
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert choose(measured, together=why != "ranks in turn") == "as the model says"
    assert measured.looks == 0 and tune.report()[-1].by == "model"


@pytest.mark.parametrize("content", ["", "[1]", '{"a": 1}', "no json"])
def test_a_file_that_cannot_be_used_is_written_anew(measured: Measured, tmp_path: Path, content: str) -> None:
    (tmp_path / "tuned.json").write_text(content)
    assert choose(measured) == "faster"
    assert list(json.loads((tmp_path / "tuned.json").read_text()).values()) == ["faster"]
