"""Doubles from prompt to metrics on CPU ranks, candidates from elsewhere, and settings that are not mixed."""

import json
from pathlib import Path

import pytest

from command_line import Peerlane
from peerlane.cli.exit_codes import ExitCode
from peerlane.cli.runs import run_to_judge
from peerlane.errors import HarnessError, UsageError
from peerlane.generate.agent import Episode
from peerlane.generate.doubles import BROKEN, broken_reply, expert_source
from peerlane.generate.extra import require_models_extra
from peerlane.generate.models import ModelOptions
from peerlane.generate.reply import extract_code
from peerlane.generate.run_folder import RunFolder, RunSettings, SampleKey, SampleRecord, StepRecord, is_run
from peerlane.generate.single_shot import Progress, ProviderDown, run_inspect
from peerlane.problems.reference_source import reference_source

require_models_extra()  # says what to install

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("model_surroundings")]

JUDGE = ["--preset", "small", "--world-size", "2", "--device", "cpu", "--mode", "eager"]


def test_broken_model_fails_as_its_table_says(tmp_path: Path, peerlane: Peerlane) -> None:
    run = tmp_path / "run"
    words = ["1-8", "--model", "peerlane/broken", "--samples", 2, "--hardware", "h200x4", "--track", "open", "--out", run]
    peerlane("generate", *words)
    peerlane("metrics", run, "--json")
    peerlane("eval", run, *JUDGE, code=ExitCode.NOT_CORRECT)
    (found,) = json.loads(peerlane("metrics", run, "--json").out)["models"]
    wanted: dict[str, int] = {}
    for verdict, _ in BROKEN:
        wanted[verdict] = wanted.get(verdict, 0) + 2
    assert found["verdicts"] == wanted and found["samples"] == 16 and found["unjudged_samples"] == 0
    assert found["problems"] == 8 and found["pass_at_k"]["1"]["problems"] == found["pass_at_k"]["2"]["problems"] == 1
    assert sum(row["problems"] for row in found["by_category"].values()) == 8 == found["tried"]
    once = {"correct@1": 1.0, "correct_most@1": 1.0, "correct@2": 1.0, "correct_most@2": 1.0}
    assert found["by_category"]["collective"] == {"problems": 8, **once}
    assert found["fast_p_at_k"] == {"eager": None, "graph": None}, "CPU ranks measure no speed"
    assert found["by_problem"]["2"]["verdicts"] == ["wrong_result"] * 2
    said = peerlane("metrics", run, run, "--published", "--compare", "--by-problem").out
    assert "correct@1: peerlane/broken minus peerlane/broken (2) is +0.0 points [+0.0, +0.0] over 8 problems" in said
    assert "Not comparable" in said and "not measured" in said
    assert "8 of 87 tasks tried" in peerlane("metrics", run, "--problem", "all").out
    tables = tmp_path / "tables"
    shown = peerlane("metrics", run, "--csv", tables)
    assert shown.out.split() == [str(tables / f"{name}.csv") for name in ("metrics", "groups", "samples", "usage")]
    assert "8 of 8 tasks tried" in shown.err
    shown = peerlane("metrics", run, "--latex")
    assert r"\toprule" in shown.out and "tasks tried" in shown.err and "tasks tried" not in shown.out
    words = ["--latex", "--csv", tables]
    assert "expected one of them" in peerlane("metrics", run, *words, code=ExitCode.USAGE).err
    assert found["by_regime"] == {} or sum(part["problems"] for part in found["by_regime"].values()) == 8
    assert {name: part["problems"] for name, part in found["by_tier"].items()} == {"hard": 8}
    # A second setting is not mixed with the first.
    peerlane("eval", run, *JUDGE[:2], "--world-size", "4", *JUDGE[4:], "--problem", "1")
    assert "choose one with" in peerlane("metrics", run, code=ExitCode.USAGE).err
    assert "samples are not judged" in peerlane("metrics", run, "--world-size", 4).out
    peerlane("metrics", run, "--world-size", 2, "--k", 3, code=ExitCode.USAGE)


def test_candidates_from_elsewhere_become_a_run(tmp_path: Path, peerlane: Peerlane) -> None:
    candidate = tmp_path / "theirs" / "001" / "0" / "candidate.py"
    candidate.parent.mkdir(parents=True)
    candidate.write_text(extract_code(broken_reply(1)) or "")
    peerlane("eval", tmp_path / "theirs", "--model", "somebody", "--track", "open", *JUDGE)
    (found,) = json.loads(peerlane("metrics", tmp_path / "theirs", "--json").out)["models"]
    assert found["model"] == "somebody" and found["verdicts"] == {"correct": 1}
    assert "it has these:\n  track open" in peerlane("metrics", tmp_path / "theirs", "--track", "custom", code=ExitCode.USAGE).err
    assert "is a run of 'somebody'" in peerlane("eval", tmp_path / "theirs", "--model", "another", *JUDGE, code=ExitCode.USAGE).err
    (tmp_path / "empty").mkdir()
    said = peerlane("eval", tmp_path / "empty", "--model", "somebody", code=ExitCode.USAGE)
    assert "013/0/candidate.py" in said.err and not list((tmp_path / "empty").iterdir())


def test_numbered_files_become_samples_of_a_run(tmp_path: Path, peerlane: Peerlane) -> None:
    folder, right = tmp_path / "theirs", extract_code(broken_reply(1)) or ""
    folder.mkdir()
    (folder / "1_allreduce_cuda.py").write_text(right)
    (folder / "1_allreduce_cuda_2.py").write_text("def solution(tensor):\n    return tensor.clone()\n")
    for _ in range(2):  # the second time nothing is judged again
        peerlane("eval", folder, "--model", "them", "--track", "open", *JUDGE, code=ExitCode.NOT_CORRECT)
        run = RunFolder.open(folder)
        assert [key.folder for key in run.sample_keys()] == ["001/0", "001/1"]
    assert json.loads(peerlane("metrics", folder, "--json").out)["models"][0]["verdicts"] == {"correct": 1, "wrong_result": 1}
    (folder / "002").symlink_to(tmp_path)
    (folder / "2_allgather_cuda.py").write_text(right)
    assert "002 is a link" in peerlane("eval", folder, "--model", "them", *JUDGE, code=ExitCode.USAGE).err


def test_samples_follow_their_numbered_files(tmp_path: Path) -> None:
    """Also without --model: a file that was changed is judged as it is now, and one that is gone is no sample any more."""

    def judged(model: str | None) -> dict[str, bytes]:
        run = run_to_judge([str(folder)], model)
        assert run is not None and not run.refused
        return {item.name: (item.source() or "").encode("latin-1") for item in run.candidates}

    folder = tmp_path / "theirs"
    folder.mkdir()
    first, second = folder / "1_a_cuda.py", folder / "1_b_cuda.py"
    first.write_bytes(b"A")
    second.write_bytes(b"B")
    assert judged("them") == {"001/0": b"A", "001/1": b"B"}
    first.write_bytes(b"new")
    assert judged(None) == {"001/0": b"new", "001/1": b"B"}
    second.unlink()
    assert judged(None) == {"001/0": b"new"}
    assert [key.folder for key in RunFolder.open(folder).sample_keys()] == ["001/0"]


def test_numbered_files_replace_no_sample_of_another_origin(tmp_path: Path) -> None:
    (tmp_path / "001/0").mkdir(parents=True)
    mine = tmp_path / "001/0/candidate.py"
    mine.write_text("mine")
    (tmp_path / "1_a_cuda.py").write_text("theirs")
    with pytest.raises(UsageError, match=r"001/0/candidate\.py is a sample already, and 1_a_cuda\.py would replace it"):
        run_to_judge([str(tmp_path)], "them")
    assert mine.read_text() == "mine" and not is_run(tmp_path)


def test_a_sample_under_a_wrong_name_is_refused_aloud(tmp_path: Path) -> None:
    for name in ("001/0", "1/1", "001/02"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "candidate.py").write_text(name)
    run = run_to_judge([str(tmp_path)], "them")
    assert run is not None and [item.name for item in run.candidates] == ["001/0"]
    assert [text.partition(f"{tmp_path}/")[2] for text in run.refused] == [
        "1/1 is no name of a sample: expected 001/1; it is skipped",
        "001/02 is no name of a sample: expected 001/2; it is skipped",
    ]


@pytest.mark.parametrize("link", ["001", "001/0", "001/0/steps", "logs"])
def test_nothing_is_written_or_deleted_behind_a_link(link: str, tmp_path: Path, peerlane: Peerlane) -> None:
    run, mine = tmp_path / "run", tmp_path / "mine"
    for folder in ("", "0", "0/steps", "steps"):
        (mine / folder).mkdir(parents=True, exist_ok=True)
        (mine / folder / "candidate.py").write_text("mine")
    (run / link).parent.mkdir(parents=True)
    (run / link).symlink_to(mine)
    before = sorted(mine.rglob("*"))
    opened, key = RunFolder(run, RunSettings.model_construct(kind="generate")), SampleKey(1, 0)
    record = SampleRecord(problem=1, sample=0, status="code")
    step = StepRecord.model_construct(step=1)
    if link == "logs":
        progress = Progress(1)
        with pytest.raises(UsageError, match="logs is a link"):
            run_inspect(opened, [], None, ModelOptions("mockllm/model"), progress)
    elif link.endswith("steps"):
        with pytest.raises(UsageError, match="steps is a link"):
            opened.write_step(key, step, "theirs")
    else:
        for write in (lambda: opened.write_sample(record, "", "theirs"), lambda: Episode(opened, key)):
            with pytest.raises(UsageError, match=r"001(/0)? is a link"):
                write()
    assert sorted(mine.rglob("*")) == before and {file.read_text() for file in mine.rglob("*.py")} == {"mine"}


def test_after_a_reply_that_cannot_be_kept_nothing_is_asked(tmp_path: Path) -> None:
    told: list[str] = []
    (tmp_path / "001/0/candidate.py").mkdir(parents=True)
    progress = Progress(2, tell=told.append)
    with pytest.raises(HarnessError, match="cannot write"):
        progress.keep(RunFolder(tmp_path, RunSettings.model_construct()), SampleRecord(problem=1, sample=0, status="code"), "", "x = 1")
    with pytest.raises(ProviderDown, match="not asked: cannot write"):
        progress.check()
    assert len(told) == 1 and "cannot write" in told[0]


def test_the_doubles_answer_with_solution_and_reference() -> None:
    from peerlane import problems, solutions

    files = sorted(Path(solutions.__file__).parent.glob("p*.py"))
    assert files and [expert_source(int(file.name[1:4])) for file in files] == [file.read_text() for file in files]
    assert expert_source(86) is None or (Path(solutions.__file__).parent / "p086_tp_muon_newton_schulz.py").exists()
    assert reference_source(problems.get(1)) in (extract_code(broken_reply(1)) or "")
