"""The documentation says what is true: its links lead somewhere, its tables are complete, its first candidate works."""

import importlib.util
import inspect
import json
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

from command_line import Peerlane
from help_examples import COMMANDS
from peerlane.cli.exit_codes import ExitCode
from peerlane.hardware.profiles import PROFILES
from peerlane.results.verdict import Verdict
from sample_results import result, text_of, wrong

ROOT = Path(__file__).resolve().parents[2]
WRITTEN = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


def text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def code_block(path: str, name: str) -> str:
    """The Python between the markers of this name."""
    found = re.search(rf"<!-- {name}:begin -->\n```python\n(.*?)```\n<!-- {name}:end -->", text(path), re.DOTALL)
    assert found, f"{path} has lost its block {name}"
    return found[1]


def commands_in(document: str) -> Iterator[list[str]]:
    """The peerlane command lines in code of a document, as words."""
    blocks = re.findall(r"^```bash\n(.*?)^```", document, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()] + re.findall(r"`(peerlane [a-z]+[^`\n]*)`", document)
    for line in lines:
        if line.startswith("peerlane "):
            yield line.split("#")[0].split()[1:]


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    prose = re.sub(
        r"^```.*?^```|`[^`\n]*`|<!--.*?-->", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )  # code has brackets of its own
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", prose):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


@pytest.mark.parametrize(
    "path",
    [path for path in WRITTEN if path.parent.name != "problems" and path.name != "CHANGELOG.md"],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_commands_exist(path: Path) -> None:
    for words in commands_in(path.read_text(encoding="utf-8").partition("## Not there")[0]):  # behind it are commands that are refused
        names = next((tuple(words[:most]) for most in (2, 1) if tuple(words[:most]) in COMMANDS), ())
        command, further = COMMANDS[names], words[len(names) :]
        is_one = not hasattr(command, "commands") or not further or further[0].startswith("--")
        assert is_one, f"{path.name} names the command {' '.join(words[:2])}"
        known = {option for parameter in command.params for option in parameter.opts}
        unknown = {word for word in words if word.startswith("--")} - known
        assert not unknown, f"{path.name} gives {' '.join(names)} the options {unknown}"


def test_make_targets_exist() -> None:
    named = {word for path in WRITTEN for word in re.findall(r"`?make ([a-z]+)`?\b", path.read_text(encoding="utf-8"))}
    targets = set(re.findall(r"^([a-z]+):", text("Makefile"), re.MULTILINE))
    assert {"demo", "test", "check", "docs"} <= named & targets


def test_every_verdict_is_explained() -> None:
    union, _ = typing.get_args(Verdict)
    kinds = {kind.model_fields["kind"].default for kind in typing.get_args(union)}
    section = text("docs/evaluating.md").partition("## Verdicts")[2].partition("\n## ")[0]
    explained = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert sorted(explained) == sorted(kinds)


def test_every_exit_code_is_listed() -> None:
    listed = [int(code) for code in re.findall(r"^\| (\d+) \|", text("README.md"), re.MULTILINE)]
    assert sorted(listed) == sorted(set(ExitCode) - {ExitCode.CHECK_FAILED})


def test_every_profile_is_named() -> None:
    assert all(profile.name in text("docs/hardware.md") for profile in PROFILES)


def test_first_candidate_is_short_and_correct(tmp_path: Path, peerlane: Peerlane) -> None:
    source = code_block("README.md", "first-candidate")
    assert len(source.splitlines()) <= 20
    file = tmp_path / "1_allreduce_pytorch.py"
    file.write_text(source)
    arguments = ["eval", str(file), "--preset", "small", "--world-size", "2", "--device", "cpu", "--out", str(tmp_path / "out"), "--json"]
    (result,) = json.loads(peerlane(*arguments).out)["results"]
    assert result["verdict"] == {"kind": "correct"} and result["problem"]["id"] == 1


def test_results_are_read_as_written(tmp_path: Path) -> None:
    (tmp_path / "peerlane-results").mkdir()
    (tmp_path / "peerlane-results" / "results.jsonl").write_text(text_of(result(), wrong(preset="small")))
    source = code_block("docs/record.md", "read")
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", source], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == "1_allreduce_cuda 1 pkb 4 correct node"
    assert done.stdout.splitlines()[-1] == "1_allreduce_cuda 1 small 4 wrong_result node"
    assert done.stdout.count("graph") == 1


def test_words_of_the_glossary_are_in_order_and_used() -> None:
    words = re.findall(r"^\| ([^|]+) \|", text("docs/glossary.md"), re.MULTILINE)[2:]
    assert words == sorted(words, key=str.casefold) and len(set(words)) == len(words)
    written = " ".join(path.read_text(encoding="utf-8") for path in WRITTEN if path.name != "glossary.md")
    plain = re.sub(r"[^a-z0-9]+", " ", written.casefold())
    unused = [word for line in words for word in line.split(", ") if re.sub(r"[^a-z0-9]+", " ", word.casefold()) not in plain]
    assert not unused


def test_evaluating_from_python_works_as_written(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    source = code_block("docs/evaluating.md", "from-python")
    done = subprocess.run([sys.executable, "-c", source], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[0].startswith("1_allreduce_pytorch correct ")
    assert done.stdout.count("no GPU") == 2
    assert (tmp_path / "peerlane-results" / "results.jsonl").exists()


ABSENT = [
    pytest.param(refused, id=refused)
    for page in (ROOT / "docs/compare.md", *sorted((ROOT / "docs/migrate").glob("*.md")))
    for refused in re.findall(r"^\|.*\| `(peerlane[^`]+)` \|$", page.read_text(encoding="utf-8").partition("## Not there")[2], re.MULTILINE)
]
"""What pages say to be absent: a command that is refused, a name that does not exist, or one of a function without this parameter."""


@pytest.mark.parametrize("refused", ABSENT)
def test_what_pages_call_absent_is_absent(refused: str, peerlane: Peerlane) -> None:
    if refused.startswith("peerlane "):
        peerlane(*refused.split()[1:], code=ExitCode.USAGE)
        return
    path, _, parameter = refused.rstrip(")").partition("(")
    module, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(module), name, None) or importlib.util.find_spec(path)
    assert (parameter not in inspect.signature(found).parameters) if parameter else found is None


def test_pages_have_rows_of_what_is_absent() -> None:
    assert len(ABSENT) > 15
