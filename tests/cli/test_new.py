"""``peerlane new``: files with the problem's signature."""

import ast
import errno
import inspect
from pathlib import Path

import pytest

from command_line import Peerlane
from peerlane import problems
from peerlane.cli.exit_codes import ExitCode
from peerlane.evaluate import discover
from peerlane.problems.scaffolds import scaffold


@pytest.mark.parametrize("backend", ["kit", "cuda", "nvshmem", "nccl", "triton", "pytorch"])
@pytest.mark.parametrize("number", [1, 36])
def test_a_new_file_is_a_candidate_with_the_problem_s_signature(
    number: int, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peerlane: Peerlane
) -> None:
    monkeypatch.chdir(tmp_path)
    done = peerlane("new", str(number), "--backend", backend)
    (file,) = tmp_path.iterdir()
    (found,) = discover([str(file)])
    assert found.problem == number and f"peerlane eval {file.name}" in done.out
    tree = ast.parse(file.read_text())
    (solution,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "solution"]
    assert [item.arg for item in solution.args.args] == list(problems.get(number).parameters)
    defaults = [
        item.default
        for item in inspect.signature(problems.get(number).reference).parameters.values()
        if item.default is not inspect.Parameter.empty
    ]
    assert [ast.literal_eval(item) for item in solution.args.defaults] == defaults


def test_the_next_command_names_the_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peerlane: Peerlane) -> None:
    monkeypatch.chdir(tmp_path)
    assert "--nodes 2 --device cpu" in peerlane("new", "101", "--backend", "pytorch").out


def test_what_is_there_stays_unless_it_is_to_be_replaced(tmp_path: Path, peerlane: Peerlane) -> None:
    file = tmp_path / "mine.py"
    file.write_text("mine")
    assert "--force" in peerlane("new", "1", "--out", str(file), code=ExitCode.USAGE).err and file.read_text() == "mine"
    peerlane("new", "1", "--out", str(file), "--force")
    assert "def solution(" in file.read_text()


@pytest.mark.parametrize(
    ("arguments", "says"), [(["56"], "begin with --backend pytorch"), (["1", "--backend", "c"], "expected one of kit")]
)
def test_what_cannot_be_written_says_why(arguments: list[str], says: str, tmp_path: Path, peerlane: Peerlane) -> None:
    assert says in peerlane("new", *arguments, "--out", str(tmp_path / "new.py"), code=ExitCode.USAGE).err and not list(tmp_path.iterdir())


def test_a_full_disk_leaves_no_empty_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peerlane: Peerlane) -> None:
    def write_nothing(path: Path, *_: object, **__: object) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", write_nothing)
    file = tmp_path / "1_mine_pytorch.py"
    assert "No space left on device" in peerlane("new", "1", "--backend", "pytorch", "--out", file, code=ExitCode.USAGE).err
    assert not file.exists()


def test_no_name_of_a_file_is_defined_twice() -> None:
    """A reference's helper would replace a function that the scaffold calls."""
    for problem in problems.suite():
        if problem.id != 56:
            body = ast.parse(scaffold(problem, "kit")).body
            names = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
            assert len(names) == len(set(names)), problem.id
