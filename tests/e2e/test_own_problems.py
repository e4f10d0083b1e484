"""Problems outside the package, as docs/your-own-problems.md describes them: named by a folder, or offered by an installed package."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from peerlane.problems.contract.registry import get

ROOT = Path(__file__).resolve().parents[2]
CANDIDATE = """
import torch
import torch.distributed as dist

def solution(tensor):
    mean = tensor.to(torch.float32, copy=True)
    dist.all_reduce(mean)
    return (mean / dist.get_world_size()).to(tensor.dtype)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's example in a folder of its own."""
    page = (ROOT / "docs" / "your-own-problems.md").read_text(encoding="utf-8")
    found = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert found, "docs/your-own-problems.md has lost its example"
    made = tmp_path_factory.mktemp("problems")
    (made / "p1001_mean.py").write_text(found[1], encoding="utf-8")
    return made


def run(*command: str, status: int = 0, **environment: str) -> str:
    variables = {**os.environ, **environment}
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, env=variables, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout if status == 0 else done.stderr


def test_verbs_know_a_folder(folder: Path) -> None:
    entry = json.loads(run("peerlane", "list", "--json", "--problems", str(folder)))["problems"][-1]
    assert entry["id"] == 1001 and entry["presets"] == ["small", "pkb", "production_ddp_bucket"]
    assert "solution(tensor: torch.Tensor) -> torch.Tensor" in run("peerlane", "show", "1001", "--problems", str(folder))


def test_candidates_are_judged_on_it(folder: Path, tmp_path: Path) -> None:
    """The reference, one that is right and one that is wrong; the ranks find the folder too."""
    (tmp_path / "1001_mean_pytorch.py").write_text(CANDIDATE)
    (tmp_path / "1001_wrong_pytorch.py").write_text("def solution(tensor):\n    return tensor.clone()\n")
    options = ["--problem", "1001", "--preset", "small", "--world-size", "2", "--device", "cpu", "--json", "--problems", str(folder)]
    printed = run("peerlane", "eval", "reference", str(tmp_path / "1001_mean_pytorch.py"), *options, "--out", str(tmp_path))
    assert [item["verdict"]["kind"] for item in json.loads(printed)["results"]] == ["correct", "correct"]
    wrong = ["eval", str(tmp_path / "1001_wrong_pytorch.py"), *options[:-3], "--out", str(tmp_path)]
    run("peerlane", *wrong, status=3, PEERLANE_PROBLEMS=str(folder))


@pytest.mark.slow
def test_the_contract_tests_take_it_up(folder: Path) -> None:
    printed = run("pytest", "tests/ranks", "-q", "-k", "p1001", PEERLANE_PROBLEMS=str(folder))
    # Two cases on two world sizes, its declarations, the shapes of its answers, and its reference as one file.
    assert re.search(r"^\d passed", printed, re.MULTILINE), printed


def test_its_calibration_is_sound(folder: Path) -> None:
    options = ["--problem", "1001", "--world-size", "2", "--device", "cpu", "--json", "--problems", str(folder)]
    assert [item["complaints"] for item in json.loads(run("peerlane", "calibrate", *options))["calibrations"]] == [[]]


def test_a_proof_beside_a_problem_is_read_when_needed(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (folder / "p1001_mean.py").read_text()
    fields = re.findall(r"^    (known_\w+|alternative_\w+)=(.*),$", text, re.MULTILINE)
    for name, _ in fields:
        text = re.sub(rf"^    {name}=.*", f'    {name}=FromProof(__name__, "{name.upper()}"),', text, flags=re.MULTILINE)
    (tmp_path / "p1001_mean.py").write_text(text.replace("import (", "import (\n    FromProof,", 1))
    imports = "from peerlane.problems.contract import AlternativeSolution, KnownWrongAnswer\nfrom .p1001_mean import _mean, torch\n"
    (tmp_path / "p1001_mean_proof.py").write_text(imports + "\n".join(f"{name.upper()} = {value}" for name, value in fields))
    monkeypatch.setenv("PEERLANE_PROBLEMS", str(tmp_path))
    problem = get(1001)
    assert not [module for module in sys.modules if module.endswith("p1001_mean_proof")]
    assert [item.name for item in problem.known_wrong_answers] == ["sum"]
    assert [item.name for item in problem.alternative_solutions] == ["fp32"]


def test_an_installed_package_offers_problems(folder: Path, tmp_path: Path) -> None:
    package = tmp_path / "offered" / "problems"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "p1001_mean.py").write_text((folder / "p1001_mean.py").read_text())
    metadata = tmp_path / "offered-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: offered\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[peerlane.problems]\nmine = offered.problems\n")
    assert json.loads(run("peerlane", "list", "--json", PYTHONPATH=str(tmp_path)))["problems"][-1]["id"] == 1001
    clash = run("peerlane", "list", "--problems", str(folder), status=2, PYTHONPATH=str(tmp_path))
    assert re.search(r"problem 1001 is both .*offered.* and .*: give one of them another number", clash), clash


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("p1002_x.py", "PROBLEM = 3\n", "declares no problem"),
        ("p1003_x.py", "import torch\n1 / 0\n", "p1003_x.py, line 2, raised ZeroDivisionError"),
        ("p1004_x.py", "import sys\nsys.exit(3)\n", "p1004_x.py, line 2, raised SystemExit: 3; correct this file"),
        ("p1005_x.py", "raise OSError('\\x1b[2J')\n", r"raised OSError: '\x1b[2J'; correct this file"),
        ("p1006_x.py", "class E(BaseException):\n def __str__(self): raise self\nraise E\n", "line 3, raised E: an error without a text"),
        ("p1007_x.py", "PROBLEM = type('\x1b', (), {'__repr__': None})()\n", r"got '\x1b'"),
        ("p1008_x.py", "def __getattr__(name): raise OSError\n", "declares no problem"),
        ("p1_x.py", "", "there are no problems in"),
    ],
)
def test_a_folder_that_holds_none_is_named(name: str, text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert said in run("peerlane", "list", "--problems", str(tmp_path), status=2)


@pytest.mark.parametrize(
    ("make", "kind"), [(os.mkfifo, "pipe"), (os.mkdir, "folder"), (lambda path: path.symlink_to("/dev/zero"), "device")]
)
def test_a_problem_is_a_regular_file(make: Callable[[Path], None], kind: str, tmp_path: Path) -> None:
    make(tmp_path / "p1006_x.py")
    assert f"p1006_x.py is a {kind}: expected a regular file" in run("peerlane", "list", "--problems", str(tmp_path), status=2)
