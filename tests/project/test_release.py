"""What users get: a wheel that works outside a checkout, and files that say the same version."""

import json
import os
import shlex
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from help_examples import COMMANDS, help_and_example
from peerlane.common.version import __version__
from peerlane.evaluate.selftest.table import load

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel installs, and nothing else."""
    folder = tmp_path_factory.mktemp("wheel")
    wheel = next(WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"]))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "installed")
    return folder / "installed"


def environment(installed: Path) -> dict[str, str]:
    """That of processes which find the peerlane of the wheel, and no problems but its own."""
    return {**os.environ, "PYTHONPATH": str(installed), "PEERLANE_PROBLEMS": "", "COLUMNS": "100"}


def run(installed: Path, folder: Path, *arguments: str, status: int = 0) -> str:
    """Returns what ``python ARGUMENTS`` prints in an empty folder, with the peerlane of the wheel."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment(installed), cwd=folder)
    assert done.returncode == status, done.stderr[-2000:]
    return done.stdout


def test_the_wheel_has_the_corpus(installed: Path, tmp_path: Path) -> None:
    code = "from peerlane.evaluate.selftest.table import corpus_home, load; print(len(load().entries), corpus_home())"
    count, folder = run(installed, tmp_path, "-c", code).split()
    assert int(count) == len(load().entries)
    assert Path(folder) == installed / "peerlane" / "evaluate" / "selftest"


def test_the_wheel_has_all_device_code(installed: Path) -> None:
    package = ROOT / "src" / "peerlane"
    sources = {path.relative_to(package) for ending in ("cuh", "h", "cpp") for path in package.rglob(f"*.{ending}")}
    assert len(sources) > 90 and [path for path in sorted(sources) if not (installed / "peerlane" / path).is_file()] == []


def test_the_wheel_lists_and_prompts(installed: Path, tmp_path: Path) -> None:
    assert len(json.loads(run(installed, tmp_path, "-m", "peerlane", "list", "--json", "--nodes", "1"))["problems"]) == 87
    assert "solution" in run(installed, tmp_path, "-m", "peerlane", "prompt", "1")
    code = "from peerlane.report.stored_page import stored_page; print(stored_page(1), end='')"
    assert run(installed, tmp_path, "-c", code) == run(installed, tmp_path, "-m", "peerlane", "show", "1")


def test_the_wheel_judges_its_kit_example_and_reports(installed: Path, tmp_path: Path) -> None:
    example = str(installed / "peerlane" / "examples" / "cuda" / "1_allreduce_cuda.py")
    options = ("--device", "emulated", "--preset", "small", "--world-size", "2", "--cases", "timed", "--json")
    judged = json.loads(run(installed, tmp_path, "-m", "peerlane", "eval", example, *options))
    assert [result["verdict"]["kind"] for result in judged["results"]] == ["correct"]
    assert "1_allreduce_cuda" in run(installed, tmp_path, "-m", "peerlane", "report", "peerlane-results")


@pytest.mark.long
def test_the_wheel_runs_its_demonstration(installed: Path, tmp_path: Path) -> None:
    shown = json.loads(run(installed, tmp_path, "-m", "peerlane", "demo", "--all", "--world-size", "2", "--json"))
    assert True in shown["as_expected"] and False not in shown["as_expected"]  # None: other programs kept the cores
    assert {item["verdict"]["kind"] for item in shown["good"] if "overloaded" not in item["flags"]} == {"correct"}


@pytest.mark.long
def test_the_examples_of_all_helps_work_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    """As a stranger tries them, without a GPU. What reads a run reads the one that the example of `generate` makes."""
    need_gpus, serve, generate = {("noise",), ("plot",), ("bench",)}, ("serve",), ("generate",)
    shown = {names: ["-m", "peerlane", *shlex.split(help_and_example(names)[1])] for names in COMMANDS}
    run(installed, tmp_path, *shown.pop(generate))
    run(installed, tmp_path, "-m", "peerlane", "eval", "runs/broken", "--preset", "small", "--world-size", "2", status=3)
    with subprocess.Popen(
        [sys.executable, *shown.pop(serve)], env=environment(installed), cwd=tmp_path, stderr=subprocess.PIPE, text=True
    ) as it:
        assert it.stderr is not None and any("listening on" in line for line in it.stderr)
        it.terminate()
        it.stderr.read()
    assert it.returncode == 0
    for names, words in shown.items():
        run(installed, tmp_path, *words, status=2 if names in need_gpus else 0)


def test_files_name_this_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == __version__
    assert f"version: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_pinned_versions_are_those_of_the_lock() -> None:
    """`make lock` writes both files; editing one of them, or the dependencies in pyproject.toml, without it shows here."""
    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    packages = {package["name"]: package for package in lock["package"]}
    own = packages.pop("peerlane")
    assert own["version"] == __version__
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#"))
    assert pins == {name: package["version"] for name, package in packages.items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lists = [project["project"]["dependencies"], *project["project"]["optional-dependencies"].values()]
    asked = {Requirement(text) for texts in lists for text in texts if not text.startswith("peerlane[")}
    locked = [item for item in own["metadata"]["requires-dist"] if item["name"] != "peerlane"]
    of_lock = {Requirement(f"{item['name']}{item['specifier']}") for item in locked}
    assert {(canonicalize_name(item.name), item.specifier) for item in asked} == {(item.name, item.specifier) for item in of_lock}
    for group, texts in project["dependency-groups"].items():
        named = {canonicalize_name(Requirement(text).name) for text in texts}
        assert named == {item["name"] for item in own["metadata"]["requires-dev"][group]} <= pins.keys()
