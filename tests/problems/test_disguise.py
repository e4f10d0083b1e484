"""Disguised problems: the mathematics of the suite under other names, orders and shapes."""

import re
from pathlib import Path

import pytest

import peerlane as pl
from peerlane import problems
from peerlane.errors import UsageError
from peerlane.generate.machine import choose_machine
from peerlane.generate.prompt import PromptSettings, render_prompt
from peerlane.problems.disguise import FIRST, WORDS, disguise_source, write_disguises
from peerlane.problems.reference_source import reference_source


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PEERLANE_PROBLEMS", str(write_disguises(7, tmp_path / "disguised")))
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("number", WORDS)
def test_a_disguise_tells_nothing_of_the_original(number: int) -> None:
    original, made = problems.get(number), problems.get(FIRST + number)
    text = render_prompt(made, PromptSettings(choose_machine("h200x4"), shots=0)).text
    task = text.partition("## What counts")[0]
    known = [*original.slug.split("_"), *(name for name in original.parameters if name != "group")]
    assert not [word for word in known if re.search(rf"\b{word}\b", task)]
    assert original.title not in text and made.summary != original.summary
    for case, before in zip(made.cases("pkb", 4), original.cases("pkb", 4), strict=False):
        assert case.params != before.params
    assert sorted(made.tolerance(made.cases("small", 4)[0])) == sorted(original.tolerance(original.cases("small", 4)[0]))


@pytest.mark.usefixtures("folder")
def test_references_of_disguised_problems_meet_their_oracles() -> None:
    with pl.Evaluator(2, "cpu", presets=("small",), modes=(), track="open") as evaluator:
        for number in (FIRST + 45, FIRST + 58):
            source = f"{reference_source(problems.get(number))}\n\nsolution = reference\n"
            result = evaluator.evaluate(number, source)
            assert result.correct, result.verdict


def test_the_seed_decides_names_and_shapes() -> None:
    assert disguise_source(58, 1) == disguise_source(58, 1) != disguise_source(58, 2)


def test_only_problems_with_words_can_be_disguised() -> None:
    with pytest.raises(UsageError, match="expected one of 1, 7, 8"):
        disguise_source(2, 1)
