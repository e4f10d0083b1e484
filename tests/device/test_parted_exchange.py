"""Transforms whose exchange runs in parts give the answers of those that exchange at once."""

from typing import Any

import pytest
import torch

from device.judged import cases, judge, require_correct
from peerlane import problems, solutions
from peerlane.device.collectives import strided
from peerlane.solutions.families import parted_exchange


def judged_in_parts(
    number: int, label: str, world_size: int, monkeypatch: pytest.MonkeyPatch, *, part_of: dict[int, int]
) -> tuple[Any, int]:
    """A small case in parts of a slice; part i is exchanged as ``part_of[i]``, or i. Returns the judgement and the parts of a call."""
    monkeypatch.setattr(parted_exchange, "PART_BYTES", 1)
    seen, exchange = set(), strided.exchange_part

    def exchanged(group: Any, x: torch.Tensor, part: int, parts: int, **axes: int) -> torch.Tensor:
        seen.add(part)
        return exchange(group, x, part_of.get(part, part), parts, **axes)

    monkeypatch.setattr(parted_exchange, "exchange_part", exchanged)
    case = next(case for case in cases(problems.get(number), world_size) if case.label == label)
    return judge(solutions.files()[number], number, case, schedules=2), len(seen)


@pytest.mark.parametrize(
    ("number", "label", "world_size"), [(59, "four_axes_steep", 2), (59, "plain", 4), (60, "plain", 2), (60, "forward", 4)]
)
def test_transforms_in_parts_are_right(number: int, label: str, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    judged, parts = judged_in_parts(number, label, world_size, monkeypatch, part_of={})
    require_correct(judged)
    assert parts > 1


def test_a_part_that_takes_another_parts_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    judged, _ = judged_in_parts(59, "plain", 2, monkeypatch, part_of={1: 0})
    assert not judged.correct


@pytest.mark.parametrize("slices", [1, 2, 5, 8, 26, 146])
def test_parts_are_alike_and_cover_all_slices(slices: int) -> None:
    starts, size = parted_exchange.part_starts(slices, 32 << 20)
    assert sorted({start + i for start in starts for i in range(size)}) == list(range(slices)) and len(starts) == min(slices, 4)


def test_small_transforms_are_not_cut() -> None:
    assert parted_exchange.part_starts(20, 1 << 20) == ([0], 20)
    assert parted_exchange.part_starts(0, 0) == ([0], 0)
