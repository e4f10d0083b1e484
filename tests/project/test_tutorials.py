"""Tutorials say what happens: their commands run, their kernel is right, and breaks as they show; quoted messages and figures are real."""

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from docs.build import tutorial_figures
from peerlane import cli
from peerlane.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = ROOT / "docs" / "tutorials"
STEP_4 = re.compile(r"    // 4\..*?(?=^}$)", re.DOTALL | re.MULTILINE)


def text(path: str) -> str:
    return (ROOT / "docs" / path).read_text(encoding="utf-8")


def kernel() -> str:
    found = re.search(r"<!-- kernel:begin -->\n```python\n(.*?)```", text("tutorials/all-reduce.md"), re.DOTALL)
    assert found is not None
    return found[1]


def run(*words: str) -> str:
    done = CliRunner().invoke(cli.app, list(words))
    assert done.exit_code in (0, 3), done.output
    return done.output


def test_the_all_reduce_is_right_and_unstable_without_step_4(tmp_path: Path) -> None:
    broken, removed = STEP_4.subn("", kernel())
    assert removed == 1
    (tmp_path / "1_whole_cuda.py").write_text(kernel())
    (tmp_path / "1_mine_cuda.py").write_text(broken)
    options = ("--device", "emulated", "--preset", "small", "--world-size", "2", "--out", str(tmp_path / "out"), "--json")
    done = CliRunner().invoke(cli.app, ["eval", str(tmp_path), *options])
    verdicts = {result["candidate"]["name"]: result["verdict"] for result in json.loads(done.stdout)["results"]}
    assert verdicts["1_whole_cuda"]["kind"] == "correct"
    assert verdicts["1_mine_cuda"]["kind"] == "unstable"
    shown = set(re.findall(r"1_mine_cuda\.py:(\d+)", text("tutorials/all-reduce.md")))
    found = set(re.findall(r"1_mine_cuda\.py:(\d+)", json.dumps(verdicts["1_mine_cuda"])))
    assert shown <= found


def test_two_buffers_need_no_acknowledgement(tmp_path: Path) -> None:
    source = STEP_4.sub("", kernel())
    for place in ("args.landing + arena.rank", "args.landing + rank"):
        assert place in source
        source = source.replace(place, place.replace("args.landing", "args.landing + (epoch & 1) * WORLD_SIZE * args.bytes"))
    source = source.replace('"landing": group', '"landing": 2 * group')
    (tmp_path / "1_mine_cuda.py").write_text(source)
    output = run("race", str(tmp_path / "1_mine_cuda.py"), "--world-size", "2", "--case", "ragged_bf16")
    assert "nothing found" in output and "race:" not in output


@pytest.mark.slow
@pytest.mark.usefixtures("forgetful_clients")
@pytest.mark.filterwarnings("ignore")
def test_scoring_a_model_prints_what_the_tutorial_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = text("tutorials/score-a-model.md")
    commands = [line for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL) for line in block.splitlines()]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    output = "".join(run(*shlex.split(command)[1:]) for command in commands)
    tables = [line for line in page.splitlines() if re.match(r" (00\d/0|peerlane/)", line)]
    printed = {" ".join(line.split()) for line in output.splitlines()}
    assert len(tables) == 5 and [line for line in tables if " ".join(line.split()) not in printed] == []
    assert (tmp_path / "page.html").is_file()


def test_messages_that_troubleshooting_names_are_ours() -> None:
    page = text("troubleshooting.md")
    named = [*re.findall(r"^\| `([a-z][^`]* [^`]*)` \|", page, re.MULTILINE), *re.findall(r"`(the NVRTC [^`]*)`", page)]
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src/peerlane").rglob("*.py"))
    assert len(named) > 15
    assert [message for message in named if message not in source] == []


def test_shares_of_a_call_add_up_and_are_those_of_the_page() -> None:
    sides = json.loads((ROOT / tutorial_figures.TRACE).read_text())["sides"][:2]
    rows = re.findall(
        r"^\| (?:reference|kernel) \| ([\d.]+) \| (\d+) % \| (\d+) % \| (\d+) % \| (\d+) % \|", text("tutorials/overlap.md"), re.MULTILINE
    )
    names = ("computing", "communicating", "overlap", "idle")
    assert rows == [(f"{side['us_per_call']:.1f}", *(f"{100 * side[name]:.0f}" for name in names)) for side in sides]
    for side in sides:
        assert sum(tutorial_figures.shares_us(side).values()) == pytest.approx(side["us_per_call"], rel=1e-3)


def test_the_log_of_training_is_quoted_and_drawn_as_it_is() -> None:
    log = (ROOT / tutorial_figures.TRAINING).read_text()
    quoted = re.findall(r"^(?:step|peerlane|torch\.|largest|broadcast).*$", text("tutorials/train.md"), re.MULTILINE)
    assert len(quoted) == 5 and all(line in log for line in quoted)
    steps, losses = tutorial_figures.read_losses(log, "ddp")
    assert steps == [1, 51, 101, 151, 200] and losses["peerlane"][0] == 4.29676
    assert tutorial_figures.training(ROOT / tutorial_figures.TRAINING).count("<circle") == len(steps) + 1
    with pytest.raises(UsageError, match="no losses of decode"):
        tutorial_figures.read_losses(log, "decode")
