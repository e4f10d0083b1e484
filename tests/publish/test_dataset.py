"""The suite and scores in the formats of the Hugging Face Hub, whose readers are not needed here: the formats are plain YAML and JSON."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from command_line import Peerlane
from peerlane import problems
from peerlane.cli.exit_codes import ExitCode
from peerlane.publish.dataset import FIELDS, to_yaml
from sample_runs import make_run

PYTHON_TYPES: dict[str, type] = {"string": str, "int64": int, "float64": float}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from peerlane.cli import export

    folder = tmp_path_factory.mktemp("hub") / "data"
    export.hf(folder, problem="1,13,85", hardware="h100x8", backend="triton", track="open", preset="pkb")
    return folder


def front_matter(folder: Path) -> dict[str, Any]:
    _, metadata, _ = (folder / "README.md").read_text().split("---\n", 2)
    loaded: dict[str, Any] = yaml.safe_load(metadata)
    return loaded


def fits(value: Any, kind: dict[str, str]) -> bool:
    if "list" in kind:
        return isinstance(value, list) and all(isinstance(item, PYTHON_TYPES[kind["list"]]) for item in value)
    return value is None or isinstance(value, PYTHON_TYPES[kind["dtype"]])


def test_every_row_has_the_columns_that_the_card_declares(exported: Path) -> None:
    card = front_matter(exported)
    declared = {feature.pop("name"): feature for feature in card["dataset_info"]["features"]}
    (config,) = card["configs"]
    (data,) = config["data_files"]
    rows = [json.loads(line) for line in (exported / data["path"]).read_text().splitlines()]
    assert data["split"] == "test" and [row["number"] for row in rows] == [1, 13, 85]
    for row in rows:
        assert row.keys() == declared.keys() == FIELDS.keys()
        assert all(fits(value, declared[name]) for name, value in row.items())


def test_a_row_is_all_that_a_model_needs(exported: Path) -> None:
    row = json.loads((exported / "data" / "test.jsonl").read_text().splitlines()[1])
    problem = problems.get(13)
    assert (row["name"], row["signature"], row["world_size"]) == (problem.slug, problem.signature, 8)
    assert problem.signature.split("(")[0] in row["prompt"] and "Triton" in row["prompt"] and "H100" in row["prompt"]
    assert any(isinstance(node, ast.FunctionDef) and node.name == "reference" for node in ast.parse(row["reference"]).body)
    assert row["bound_us"] > 0 and row["bound_by"] == "nvlink" and row["tier"] in ("easy", "medium", "hard")


def test_the_benchmark_names_its_split_and_has_tasks_for_harbor(exported: Path) -> None:
    about = yaml.safe_load((exported / "eval.yaml").read_text())
    assert about.keys() == {"name", "description", "evaluation_framework", "tasks"} and about["evaluation_framework"] == "harbor"
    (config,) = front_matter(exported)["configs"]
    for task in about["tasks"]:
        assert (task["config"], task["split"]) == (config["config_name"], config["data_files"][0]["split"])
    assert sorted(path.name for path in (exported / "tasks").iterdir()) == ["p001", "p013", "p085"]
    test = (exported / "tasks" / "p013" / "tests" / "test.sh").read_text()
    assert "13_candidate_triton.py" in test and "--world-size 8" in test and "--track open" in test
    assert "gpus = 8" in (exported / "tasks" / "p013" / "task.toml").read_text()


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path, peerlane: Peerlane) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    said = peerlane("export", "hf", str(tmp_path), "--problem", "1", code=ExitCode.USAGE)
    assert "not empty" in said.err and [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_scores_of_a_run_count_all_problems(tmp_path: Path, peerlane: Peerlane) -> None:
    make_run(tmp_path / "run", "model-a", [1, 2, 3, 4, 5, 6], good=1.0, track="custom")
    out = tmp_path / "model" / ".eval_results" / "peerlane.yaml"
    arguments = ["export", "results", str(tmp_path / "run"), "--dataset", "owner/peerlane", "--out", str(out)]
    peerlane(*arguments, "--source", "https://example.org/run")
    correct, faster = yaml.safe_load(out.read_text())
    assert correct["dataset"] == {"id": "owner/peerlane", "task_id": "correct"} and faster["dataset"]["task_id"] == "fast_1"
    solved = round(correct["value"] * len(problems.suite()) / 100)
    assert 3 <= solved <= 6 and correct["value"] == round(100 * solved / len(problems.suite()), 2) and faster["value"] <= correct["value"]
    assert correct["source"] == {"url": "https://example.org/run"} and "6 of 87 problems tried" in correct["notes"]
    assert isinstance(correct["date"], str)
    assert "peerlane.yaml/below.yaml: " in peerlane(*arguments[:-1], str(out / "below.yaml"), code=ExitCode.USAGE).err


def test_scores_of_an_unjudged_run_are_refused(tmp_path: Path, peerlane: Peerlane) -> None:
    make_run(tmp_path / "run", "model-a", [1, 2, 3], good=1.0)
    (tmp_path / "run" / "results.jsonl").write_text("")
    said = peerlane("export", "results", str(tmp_path / "run"), "--dataset", "o/p", "--out", str(tmp_path / "x.yaml"), code=ExitCode.USAGE)
    assert "judged under 0 settings" in said.err and not (tmp_path / "x.yaml").exists()


@pytest.mark.parametrize(
    "value",
    [
        {"a": 'quotes " and: colons', "b": [{"c": None, "d": [1, 2.5]}, {"c": True}], "e": {}, "f": []},
        [{"dataset": {"id": "o/n", "task_id": "x"}, "value": 1.5, "date": "2026-01-02"}],
        {"lines": "one\ntwo: # three", "umlaut": "ü", "answer": "no", "number": "1e5"},
    ],
)
def test_yaml_is_read_back_as_it_was(value: Any) -> None:
    assert yaml.safe_load(to_yaml(value)) == value
