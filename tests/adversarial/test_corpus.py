"""The adversarial corpus: its table is whole, its files are what they say, and on CPU ranks every candidate gets its verdict."""

import difflib
import importlib.util
import os
import re
from collections import defaultdict
from pathlib import Path

import pytest

from e2e.runs import marked, marked_processes
from peerlane import problems
from peerlane.evaluate.candidates import REFERENCE, candidate_file
from peerlane.evaluate.selftest.outcome import Outcome, objection
from peerlane.evaluate.selftest.run import SelftestPlan, selftest
from peerlane.evaluate.selftest.table import Entry, load
from peerlane.sandbox.isolation import choose

RUN = f"corpus-{os.getpid()}"  # marks this run's processes
ROOT = Path(__file__).parents[2]
CORPUS = load()
FILES = [path for entry in CORPUS.entries if (path := CORPUS.path(entry)) is not None]
TIER = choose(None, "cpu").tier
JUDGED = [entry for entry in CORPUS.entries if entry.cpu and entry.isolation <= TIER]
ON_CPU = list({entry.row: entry for entry in reversed(JUDGED)}.values())[::-1]
"""The first candidate of every row that this machine can judge; `peerlane selftest` judges all."""

OF_RULES = {entry.rule: entry for entry in reversed(ON_CPU) if entry.kind != "legitimate" and entry.file.endswith("_pytorch")}.values()
"""A cheat or a bug of every rule, for every change; the other rows are slow."""

ROWS = [*(f"C{n:02}" for n in range(1, 68)), *(f"B{n:02}" for n in range(1, 21)), *(f"A{n:02}" for n in range(18))]
"""A row is never given up: what was once a way to be fooled stays one to be guarded against."""


def test_every_row_is_there() -> None:
    assert list(CORPUS.rows) == ROWS


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_says_its_row_and_its_trick(path: Path) -> None:
    row = path.stem.split("_")[1].upper()
    assert re.match(rf'"""{row}: [^\n]+[.:]\n?', path.read_text(encoding="utf-8"))


def test_the_honest_set_is_whole() -> None:
    """Nobody's rows are lost from it: what it does not hold cannot be accused in it."""
    honest = CORPUS.honest(4)
    assert {(entry.kind, entry.world_size) for entry in honest.entries} == {("legitimate", 4)}
    assert all(problems.get(entry.problem) and (entry.file == REFERENCE or honest.path(entry).is_file()) for entry in honest.entries)
    solved = [entry.problem for entry in honest.select("A18")]
    assert solved == [problem.id for problem in problems.all_problems()]
    assert all(entry.accepted("cuda") == entry.accepted("emulated") == ("correct",) for entry in honest.select("A18"))
    nobodys = [entry for entry in honest.select("A00-A17") if entry.accepted("cpu") == ("correct",)]
    assert len({entry.problem for entry in nobodys}) >= 25 and len(nobodys) >= 50


BASELINES = {
    "1_a04_persistent_workspace_pytorch": ("b01_no_entry", "b02_no_exit", "b03", "b10", "b18", "a13_chunks"),
    "1_a01_side_thread_joined_pytorch": ("b02_input",),
    "1_a07_double_buffered_push_pytorch": ("b05_one",),
    "1_a07_two_shot_push_pytorch": ("b05_result", "b17_peer_stores", "c15_finishes"),
    "1_a13_chunks_by_size_pytorch": ("b07",),
    "1_a04_persistent_workspace_cuda": ("b01", "b02", "b03", "b04", "b07", "b09", "b10", "b12", "a10"),
    "1_a07_double_buffered_push_cuda": ("b05",),
}
MUTANTS = [
    (baseline, path.stem)
    for baseline, mutants in BASELINES.items()
    for path in FILES
    if path.stem.startswith(tuple(f"1_{mutant}" for mutant in mutants)) and path.stem.endswith(baseline.rsplit("_", 1)[-1])
]


@pytest.mark.parametrize(("baseline", "mutant"), MUTANTS)
def test_a_mutant_is_its_honest_kernel_but_for_a_few_lines(baseline: str, mutant: str) -> None:
    """A verdict on the mutant is then a verdict on the mutation."""
    honest, changed = ((CORPUS.folder / f"{name}.py").read_text(encoding="utf-8").splitlines() for name in (baseline, mutant))
    lines = [line for line in difflib.unified_diff(honest, changed, n=0, lineterm="") if re.match(r"[+-](?![+-])", line)]
    assert 0 < len(lines) <= 20, "\n".join(lines)


WITH_DEVICE_CODE = [path for path in FILES if "compile_cubin(" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", WITH_DEVICE_CODE, ids=lambda path: path.stem)
def test_device_code_compiles(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEERLANE_CACHE_DIR", str(tmp_path))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.CUBIN.compiled_here and module.CUBIN.path.stat().st_size


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, list[Outcome]]:
    """What every chosen candidate that runs on CPU ranks got, and the legitimate ones between them, by file."""
    chosen = [
        item.callspec.params.get("entry")
        for item in request.session.items
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
    ]
    before = {path: path.read_bytes() for path in CORPUS.folder.iterdir() if path.is_file()}
    with marked(RUN):
        judged = selftest(SelftestPlan(CORPUS, tuple(entry for entry in ON_CPU if entry in chosen), "cpu"))
        assert marked_processes(RUN) == []
    assert {path: path.read_bytes() for path in CORPUS.folder.iterdir() if path.is_file()} == before
    assert not list(Path("/dev/shm").glob("peerlane-corpus-*"))
    found = defaultdict(list)
    for entry, outcome in judged:
        found[entry.file].append(outcome)
    return found


@pytest.mark.parametrize(
    "entry", [pytest.param(entry, marks=() if entry in OF_RULES else pytest.mark.slow, id=entry.file) for entry in ON_CPU]
)
def test_verdict(entry: Entry, outcomes: dict[str, list[Outcome]]) -> None:
    assert len(outcomes[entry.file]) >= entry.runs
    for outcome in outcomes[entry.file]:
        assert objection(entry, outcome) is None, f"{objection(entry, outcome)}; judged after {outcome.after}"


def test_public_style_is_recognised() -> None:
    """A file of the public benchmark needs no change: its backend follows from its name or from what it imports."""
    found = candidate_file(CORPUS.folder / "1_a15_public_style_cuda.py")
    assert (found.backend, found.problem, found.compiles) == ("cuda", 1, True)
