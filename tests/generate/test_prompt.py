"""Prompts of all problems and backends: complete, short enough, without answers; three of them are pages of the documentation."""

import json
import re
from pathlib import Path

import jinja2
import pytest

from command_line import Peerlane
from peerlane import problems, solutions
from peerlane.errors import UsageError
from peerlane.generate.machine import Machine, choose_machine
from peerlane.generate.prompt import BACKENDS, MAX_TOKENS, PromptSettings, describe_machine, render_prompt, templates
from peerlane.problems import Problem
from peerlane.problems.reference_source import reference_source

NODE = choose_machine("h200x4")
ROOT = Path(__file__).parents[2]
# Every kernel of the kit begins with next_epoch, prompts say so.
SOLUTIONS = [
    line
    for path in Path(solutions.__file__).parent.glob("p*.py")
    for line in path.read_text().splitlines()
    if len(line) > 60 and "next_epoch(" not in line
]


@pytest.mark.parametrize("problem", problems.all_problems(), ids=lambda p: f"p{p.id:03d}")
def test_prompt_is_complete_short_and_holds_no_answer(problem: Problem) -> None:
    for backend in BACKENDS:
        text = render_prompt(problem, PromptSettings(NODE, backend=backend, shots=1)).text  # raises for more than MAX_TOKENS
        assert problem.signature in text and reference_source(problem) in text and "```python" in text.rpartition("## Output")[2]
        assert "4x NVIDIA H200" in text and "None" not in text.partition("## Hardware")[2].partition("## Backend")[0]
        own = text.replace(reference_source(problem), "")  # solutions begin like their references
        assert not [line for line in SOLUTIONS if line in own]


@pytest.mark.parametrize("problem", problems.suite(), ids=lambda p: f"p{p.id:03d}")
def test_error_models_are_words_and_numbers_below_one(problem: Problem) -> None:
    """A bound of 1 in units that only the oracle knows says nothing, nor does a name that is defined elsewhere."""
    text = render_prompt(problem, PromptSettings(NODE)).text
    (right,) = re.findall(r"## What counts as right\n(.*?)\n- Calls are repeated", text, re.DOTALL)
    lines = [line for line in right.splitlines() if line.startswith("- ")]
    assert len(lines) > 1 and not [line for line in lines if line.rstrip().endswith(":")]
    assert not re.findall(r"\b(?:[A-Z][A-Z_]{3,}|magnitude|UNIT_ROUNDOFF|oracle's error)\b|:\w+:`", "\n".join(lines))
    assert (", where S is" in right) == (" S in every element" in right or "|s| + S" in right) and (" 2 d " in right) == (
        "d is how far" in right
    )
    assert " u " not in f"{right} " or "u is" in right
    for case in problem.cases("pkb", max(size for size in problem.world_sizes if size <= NODE.count)):
        for name, model in problem.tolerance(case).items():
            numbers = (model.relative, model.magnitude, model.rms, model.normwise or 0.0, model.rowwise or 0.0)
            assert model.words or 0 < max(numbers) < 1, f"{name}: {model}"


@pytest.mark.parametrize("problem", problems.all_problems(2), ids=lambda p: f"p{p.id:03d}")
def test_a_prompt_between_nodes_tells_the_tiers(problem: Problem) -> None:
    for backend in BACKENDS:
        text = render_prompt(problem, PromptSettings(NODE, backend=backend, track="open")).text
        assert "The ranks are in 2 nodes: rank r is on node r // 2" in text and "Memory of another node cannot be mapped" in text
        assert "Each GPU has a network adapter of its own to the other nodes, 50 GB/s" in text and "2x NVIDIA H200 in one node" in text
        assert re.search(r"send \S+ \w+ to other ranks of its node and \S+ \w+ to other nodes", text)
    with pytest.raises(UsageError, match="use --track open"):
        render_prompt(problem, PromptSettings(NODE, track="custom"))


def test_only_exact_outputs_are_said_to_match_bit_for_bit() -> None:
    texts = {number: render_prompt(problems.get(number), PromptSettings(NODE)).text for number in (2, 13, 40)}
    assert "- Bit for bit: `gathered`" in texts[2] and "small integers" not in texts[2]
    assert "- Bit for bit" not in texts[13] and "small integers, so that sums are exact" in texts[13]
    assert "bit for bit" not in texts[40].lower().replace("must then match bit for bit", "")


def test_shapes_are_told_once_and_patterns_of_values_by_name() -> None:
    text = render_prompt(problems.get(40), PromptSettings(NODE)).text
    assert "small/late_step_fp32: as small/fp32, but `step` 1000\n" in text and "small/nan_bf16 (pattern nan)" in text
    assert "a large eps, unusual betas" in text


@pytest.mark.parametrize("backend", ["cuda", "triton", "pytorch"])
def test_types_of_the_handle_s_attributes_are_told(backend: str) -> None:
    text = render_prompt(problems.get(1), PromptSettings(NODE, backend=backend)).text
    assert "`handle.buffer_ptrs_dev`, `handle.signal_pad_ptrs_dev`: int" in text and "`handle.multicast_ptr`: int, 0 without" in text
    named = set(re.findall(r"handle\.(\w+)", text))
    from torch._C._distributed_c10d import _SymmetricMemory

    assert named <= set(dir(_SymmetricMemory)), named


def test_limits_of_the_machine_and_of_time_are_told() -> None:
    text = render_prompt(problems.get(1), PromptSettings(NODE)).text
    for words in (
        "a block may have 227 KiB",
        "at most 255 a thread",
        "300 s for compiling",
        "for warm-up",
        "no CUTLASS",
        "switched off here",
    ):
        assert words in text, words
    open_multicast = PromptSettings(NODE.model_copy(update={"multicast": True}))
    assert "multicast is switched off" not in render_prompt(problems.get(1), open_multicast).text


def test_cuda_is_taught_by_nvrtc_first() -> None:
    text = render_prompt(problems.get(1), PromptSettings(choose_machine("b200x4"))).text
    assert 0 < text.index("cuda.core") < text.index("load_inline") and 'arch="sm_100a"' in text and "sm_90a" not in text


def test_the_kit_has_one_host_interface_everywhere() -> None:
    folder, new = ROOT / "src" / "peerlane" / "generate" / "prompts", ROOT / "src" / "peerlane" / "problems" / "scaffolds" / "kit.txt"
    files = [*folder.rglob("*kit.*"), new]
    assert len(files) == 4
    for file in files:
        assert "group_of" in file.read_text() and "DeclaredKernel" in file.read_text(), file
        for line in file.read_text().splitlines():
            assert not re.search(r"\bArena\(|compile_cubin|\bKernel\(", line) or "__grid" in line, f"{file.name}: {line}"


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
    assert "1x Unknown" in describe_machine(Machine(gpu="Unknown", count=1)), "of which little is known"


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "prompts").glob("*.txt")), ids=lambda path: path.stem)
def test_pages_show_the_prompts_of_today(page: Path) -> None:
    number, backend = re.fullmatch(r"(\d+)_(\w+)", page.stem).groups()
    made = render_prompt(problems.get(int(number)), PromptSettings(NODE, backend=backend))
    assert page.read_text() == made.text, f"peerlane prompt {number} --backend {backend} --hardware h200x4 > {page.relative_to(ROOT)}"


def test_there_are_three_such_pages() -> None:
    assert len(list((ROOT / "docs" / "prompts").glob("*.txt"))) == 3


def test_several_prompts_are_a_table(peerlane: Peerlane) -> None:
    rows = json.loads(peerlane("prompt", "1,13", "--hardware", "h200x4", "--json").out)["prompts"]
    assert [(row["problem"], row["tier"]) for row in rows] == [(1, "hard"), (13, "hard")]
    assert all(set(row["tokens"]) == set(BACKENDS) and 0 < row["bound_us"] < 20 for row in rows)
    printed = peerlane("prompt", "1-2", "--hardware", "h200x4").out
    assert all(backend in printed for backend in BACKENDS) and "allgather" in printed
