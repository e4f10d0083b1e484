"""Prompts of all problems and backends: complete, short enough, without answers; three of them are pages of the documentation."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jinja2
import pytest

from peerlane import problems, solutions
from peerlane.errors import UsageError
from peerlane.generate.machine import Machine, choose_machine
from peerlane.generate.prompt import BACKENDS, MAX_TOKENS, PromptSettings, describe_machine, render_prompt, templates
from peerlane.problems import Problem
from peerlane.problems.reference_source import reference_source

NODE = choose_machine("h200x4")
ROOT = Path(__file__).parents[2]
SOLUTIONS = [line for path in Path(solutions.__file__).parent.glob("p*.py") for line in path.read_text().splitlines() if len(line) > 60]


@pytest.mark.parametrize("problem", problems.all_problems(), ids=lambda p: f"p{p.id:03d}")
def test_prompt_is_complete_short_and_holds_no_answer(problem: Problem) -> None:
    for backend in BACKENDS:
        text = render_prompt(problem, PromptSettings(NODE, backend=backend, shots=1)).text  # raises for more than MAX_TOKENS
        assert problem.signature in text and reference_source(problem) in text and "```python" in text.rpartition("## Output")[2]
        assert "4x NVIDIA H200" in text and "None" not in text.partition("## Hardware")[2].partition("## Backend")[0]
        own = text.replace(reference_source(problem), "")  # solutions begin like their references
        assert not [line for line in SOLUTIONS if line in own]


@pytest.mark.parametrize("shots", range(4))
def test_shots_are_worked_examples(shots: int) -> None:
    text = render_prompt(problems.get(1), PromptSettings(NODE, backend="triton", shots=shots)).text
    assert text.count("### Example") == shots


def test_tracks_differ_only_in_rules_of_communication() -> None:
    custom, free = (render_prompt(problems.get(1), PromptSettings(NODE, track=track)).text for track in ("custom", "open"))
    assert "must not use NCCL" in custom and "Anything goes" in free and "must not use NCCL" not in free


def test_the_public_variant_prints_its_own_reference() -> None:
    default, public = (render_prompt(problems.get(39), PromptSettings(NODE, variant=variant)).text for variant in ("default", "pkb"))
    assert default != public and "def reference(" in public


def test_a_name_that_a_template_does_not_know_is_an_error() -> None:
    with pytest.raises(jinja2.UndefinedError):
        templates().from_string("{{ problm.id }}").render(problem=1)


def test_too_long_a_prompt_is_refused() -> None:
    verbose = NODE.model_copy(update={"gpu": "GPU of a long name " * MAX_TOKENS})
    with pytest.raises(UsageError, match=f"expected at most {MAX_TOKENS}"):
        render_prompt(problems.get(1), PromptSettings(verbose))


def test_hardware_is_a_file_a_known_node_or_an_error(tmp_path: Path) -> None:
    file = tmp_path / "node.json"
    file.write_text(NODE.model_copy(update={"gpu": "Example X1", "count": 6}).model_dump_json())
    machine = choose_machine(str(file))
    assert machine.profile is None and "6x Example X1" in describe_machine(machine)
    assert "no implementation can take less" not in render_prompt(problems.get(1), PromptSettings(machine)).text
    assert choose_machine("b200x8").count == 8
    file.write_text(json.dumps({"gpu": "x", "count": "many"}))
    for bad in (str(file), "b300x8", str(tmp_path / "missing.json")):
        with pytest.raises(UsageError, match="--hardware"):
            choose_machine(bad)


def test_a_node_of_which_little_is_known_can_be_described() -> None:
    assert "1x Unknown" in describe_machine(Machine(gpu="Unknown", count=1))


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "prompts").glob("*.txt")), ids=lambda path: path.stem)
def test_pages_show_the_prompts_of_today(page: Path) -> None:
    number, backend = re.fullmatch(r"(\d+)_(\w+)", page.stem).groups()
    made = render_prompt(problems.get(int(number)), PromptSettings(NODE, backend=backend))
    assert page.read_text() == made.text, f"peerlane prompt {number} --backend {backend} --hardware h200x4 > {page.relative_to(ROOT)}"


def test_there_are_three_such_pages() -> None:
    assert len(list((ROOT / "docs" / "prompts").glob("*.txt"))) == 3
