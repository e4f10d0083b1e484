"""A choice is measured once, kept, the same on all ranks, and left to the model where it must not be measured."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from peerlane.device.host import tune

OPTIONS = ("as the model says", "faster", "slower")


class Clock:
    """A device on which a launch takes as long as its option says. Notes which options have been made, and which have memory."""

    def __init__(self) -> None:
        self.us = {"as the model says": 11.0, "faster": 9.0, "slower": 20.0}
        self.now_us, self.made, self.open = 0.0, list[str](), set[str]()

    def make(self, option: str) -> tuple[Callable[[], None], Callable[[], None]]:
        self.made.append(option)
        self.open.add(option)
        return lambda: self.launch(option), lambda: self.open.remove(option)

    def launch(self, option: str) -> None:
        assert option in self.open and len(self.open) <= 2
        self.now_us += self.us[option]

    def event(self, enable_timing: bool) -> "Event":
        return Event(self)


class Event:
    """Stands for ``torch.cuda.Event``."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.us = clock, 0.0

    def record(self) -> None:
        self.us = self.clock.now_us

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "Event") -> float:
        return (end.us - self.us) / 1e3


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setenv("PEERLANE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PEERLANE_TUNE", "1")
    monkeypatch.setattr(torch.cuda, "Event", clock.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    yield clock
    assert not clock.open


def same_everywhere(value: Any) -> list[Any]:
    return [value] * 2


def choose(
    clock: Clock,
    *,
    rank: int = 0,
    together: bool = True,
    exchange: Callable[[Any], list[Any]] = same_everywhere,
    shape: tuple[int, ...] = (1, 2, 3),
) -> tune.Choice:
    """Returns what ``report`` says of the choice. ``exchange``: every rank's value, given this rank's."""
    group: Any = SimpleNamespace(
        rank=rank, world_size=2, device=0, sm_count=132, ranks_per_device=1, runs_together=together, exchange=exchange
    )
    option = tune.choose(group, "kernel", shape, OPTIONS, clock.make)
    (choice,) = (item for item in tune.report() if item.shape == shape)
    assert choice.option == option
    return choice


def test_the_fastest_option_is_chosen_once_and_kept(clock: Clock) -> None:
    measured = choose(clock)
    assert (measured.option, measured.by, measured.microseconds["slower"]) == ("faster", "measured", 20.0)
    assert clock.made == [*OPTIONS]
    assert choose(clock).by == "cache" and clock.made == [*OPTIONS]
    assert choose(clock, shape=(4, 5, 6)).by == "measured" and clock.made == [*OPTIONS] * 2


def test_all_ranks_follow_what_rank_0_has_kept(clock: Clock) -> None:
    assert choose(clock, rank=1, exchange=lambda value: ["slower", None]).option == "slower" and clock.made == []


def test_a_gain_within_the_noise_is_none(clock: Clock) -> None:
    clock.us["faster"] = 10.8
    choice = choose(clock)
    assert (choice.option, choice.by) == ("as the model says", "measured")


def test_options_beyond_the_budget_are_left_out(clock: Clock) -> None:
    def slow_peer(value: Any) -> list[Any]:
        return [value, 2 * tune.BUDGET_S] if isinstance(value, float) else [value] * 2

    choice = choose(clock, exchange=slow_peer)
    assert choice.option == "faster" and "slower" not in choice.microseconds and clock.made == [*OPTIONS[:2]]


def test_a_time_is_the_median_of_the_slowest_rank(clock: Clock) -> None:
    def disturbed_peer(value: Any) -> list[Any]:
        """The other rank is faster, but for one stretch of the first option of each pair."""
        if not isinstance(value, list):
            return [value] * 2
        first, second = ([us / 2 for us in stretches] for stretches in value)
        return [value, [[1000.0, *first[1:]], second]]

    assert choose(clock, exchange=disturbed_peer).microseconds == clock.us


@pytest.mark.parametrize("why", ["switched off", "captured", "ranks in turn"])
def test_the_model_decides_where_nothing_may_be_measured(clock: Clock, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    if why == "switched off":
        monkeypatch.delenv("PEERLANE_TUNE")
    if why == "captured":
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    choice = choose(clock, together=why != "ranks in turn")
    assert (choice.option, choice.by) == ("as the model says", "model") and clock.made == []


@pytest.mark.parametrize("content", ["", "[1]", '{"a": 1}', "no json"])
def test_a_file_that_cannot_be_used_is_replaced(clock: Clock, tmp_path: Path, content: str) -> None:
    (tmp_path / "tuned.json").write_text(content)
    assert choose(clock).option == "faster"
    assert list(json.loads((tmp_path / "tuned.json").read_text()).values()) == ["faster"]
