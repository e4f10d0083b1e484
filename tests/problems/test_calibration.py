"""Margins: what makes a case unsound is found and named."""

import dataclasses
import math
from typing import Any

import pytest
import torch

from peerlane import problems
from peerlane.problems import Expected, Tolerance
from peerlane.problems.contract import except_for, grouped, is_excused, known_wrong_answers, names_of, same_bits, where, wrong
from peerlane.problems.contract.calibration import Margins, draw_all, ratios_of, worst, wrong_answer_ratios
from peerlane.problems.contract.wrong_answers import case_names

SUM = problems.get(1)
CASE = SUM.case("small", "ragged_bf16", 2)


def test_a_sound_case_has_no_complaints() -> None:
    ratios = [wrong_answer_ratios(SUM, CASE, rank, secret="unit") for rank in range(2)]
    found = worst([Margins(reference={"sum": 0.4}, wrong_answers=each) for each in ratios])
    assert found.complaints() == [] and set(found.wrong_answers) == {null.name for null in known_wrong_answers(SUM)}
    assert min(ratio for each in found.wrong_answers.values() for ratio in each.values()) >= 10


def test_a_loose_tolerance_lets_wrong_answers_near() -> None:
    loose = dataclasses.replace(SUM, tolerance=lambda case: {"sum": Tolerance(rms=2.0)})
    complaints = Margins(wrong_answers=wrong_answer_ratios(loose, CASE, 0, secret="unit")).complaints()
    assert any(line.startswith("known wrong answer zeros: sum has ratio") for line in complaints)


def test_a_tight_tolerance_fails_the_oracle_itself() -> None:
    tight = dataclasses.replace(SUM, tolerance=lambda case: {"sum": Tolerance(relative=1e-9)})
    with pytest.raises(ValueError, match="once rounded, fails its own tolerance"):
        wrong_answer_ratios(tight, CASE, 0, secret="unit")


def test_standard_wrong_answers_must_fail_on_every_output() -> None:
    ratios = {"first": 100.0, "second": 3.0}
    assert Margins(wrong_answers={"drop_last_rank": ratios}).complaints() == []
    assert Margins(wrong_answers={"zeros": ratios}).complaints() == ["known wrong answer zeros: second has ratio 3 only"]
    assert Margins(wrong_answers={"zeros": ratios, "own": ratios}).reach() == {"zeros": 3.0, "own": 100.0}


def test_alternatives_need_half_of_the_tolerance() -> None:
    found = Margins(reference={"y": 1.5}, variants={"fp32": {"y": 0.6}}, faults=["the reference changes its argument x"])
    assert found.complaints() == [
        "the reference changes its argument x",
        "the reference misses the oracle: y has ratio 1.5",
        "alternative solution fp32: y has ratio 0.6",
    ]


def test_the_worst_rank_counts_and_replicated_outputs_must_agree() -> None:
    ranks = [
        Margins(reference={"y": 0.1}, wrong_answers={"zeros": {"y": 2.0}}, bits={"y": 1}),
        Margins(wrong_answers={"zeros": {"y": 50.0}}, bits={"y": 2}),
    ]
    found = worst(ranks)
    assert found.wrong_answers == {"zeros": {"y": 50.0}} and found.reference == {"y": 0.1}
    assert found.complaints() == ["the reference's y must have the same bits on all ranks, and has not"]


def test_wrong_types_are_far_and_empty_outputs_are_left_out() -> None:
    expected = SUM.oracle(CASE, draw_all(SUM, CASE, secret="unit"), 0)
    assert ratios_of(SUM, CASE, torch.zeros(3), expected) == {"sum": math.inf}
    empty = Expected("sum", torch.zeros(0), torch.bfloat16)
    assert ratios_of(SUM, CASE, torch.zeros(0, dtype=torch.bfloat16), empty) == {}


@pytest.mark.parametrize(
    ("key", "excused"),
    [
        ("zeros", True), ("zeros/sum", True), ("zeros/other", False), ("zeros@small/ragged_bf16", True),
        ("zeros@small/ragged_bf16/w4", False), ("zeros/sum@small/ragged_bf16/w2", True), ("ones", False),
    ],
)  # fmt: skip
def test_excuses_hold_where_they_say(key: str, excused: bool) -> None:
    null = next(item for item in known_wrong_answers(SUM) if item.name == "zeros")
    assert is_excused(dataclasses.replace(SUM, excused={key: "a reason"}), null, CASE, "sum") is excused


@pytest.mark.parametrize(
    ("cases", "applies"),
    [
        (None, True),
        (("small/ragged_bf16",), True),
        (("small/ragged_bf16/w4",), False),
        (except_for("small/ragged_bf16"), False),
        (except_for("ragged_bf16"), False),
        (except_for("pkb/ragged_bf16", "ragged"), True),
        (grouped, False),
        (where(lambda case: case.world_size == 2), True),
    ],
)
def test_null_answers_apply_where_they_say(cases: Any, applies: bool) -> None:
    assert wrong("wrong", "why", lambda context: None, cases).applies(CASE) is applies


def test_the_cases_of_a_test_are_named() -> None:
    def names(cases: Any) -> list[str] | None:
        return case_names(SUM, wrong("wrong", "why", lambda context: None, cases))

    labels = [f"{preset.name}/{spec.label}" for preset in SUM.presets for spec in preset.cases]
    assert names(None) is None and names(("small/a",)) == ["small/a"]
    assert names(lambda case: True) == labels
    assert names(except_for(labels[0])) == labels[1:]
    assert names(lambda case: case.name == CASE.name) == [CASE.name]
    assert set(names_of(SUM.presets, lambda case: case.name == CASE.name)) == {CASE.name}


def test_bits_of_one_element_are_compared_at_any_stride() -> None:
    one = torch.tensor(1.5).expand(1)
    assert one.stride() == (0,) and same_bits(one, torch.tensor([1.5])) and not same_bits(one, torch.tensor([2.5]))
