"""``peerlane eval`` and ``peerlane demo`` from end to end, on two CPU ranks."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from command_line import Peerlane
from peerlane.cli.demo import can_run, comparison, demo_exit_code, good_folders, needs_gpu
from peerlane.cli.evaluation import choose_device, gpu_count, torch_has_cuda
from peerlane.cli.exit_codes import ExitCode
from peerlane.cli.expectations import Expectation, read_expectation
from peerlane.errors import RunStopped, UsageError
from peerlane.evaluate import discover
from peerlane.evaluate.candidates import reference_candidate
from peerlane.results.verdict import NotRun
from sample_results import on_cpu

ROOT = Path(__file__).resolve().parents[2]

RIGHT = """
import torch
import torch.distributed as dist


def solution(tensor: torch.Tensor) -> torch.Tensor:
    total = tensor.clone()
    dist.all_reduce(total)
    return total
"""
LAZY = "# expect: wrong_result\n\ndef solution(tensor):\n    return tensor.clone()\n"


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    """A folder with a right, a broken and a CUDA candidate in its subfolders."""
    for name in ("pytorch", "broken", "cuda"):
        (tmp_path / "examples" / name).mkdir(parents=True)
    (tmp_path / "examples" / "pytorch" / "1_right_pytorch.py").write_text(RIGHT)
    (tmp_path / "examples" / "cuda" / "1_right_cuda.py").write_text(f"load_inline = None\n{RIGHT}")
    (tmp_path / "examples" / "broken" / "1_lazy_pytorch.py").write_text(LAZY)
    return tmp_path / "examples"


def test_eval_prints_one_json_object_and_exits_by_the_verdicts(
    examples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peerlane: Peerlane
) -> None:
    monkeypatch.setattr("peerlane.evaluate.processes.session.ForkServer", None)  # it is started early, elsewhere
    shared = ["--preset", "small", "--world-size", "2", "--device", "cpu", "--out", str(tmp_path / "out"), "--json"]
    arguments = ["eval", str(examples / "pytorch"), str(examples / "broken"), *shared]
    first = peerlane(*arguments, code=ExitCode.NOT_CORRECT)
    kinds = {item["candidate"]["name"]: item["verdict"]["kind"] for item in json.loads(first.out)["results"]}
    assert kinds == {"1_right_pytorch": "correct", "1_lazy_pytorch": "wrong_result"}
    assert all(text in first.err for text in ("2 evaluations to run", "[2/2] 1_", "1_lazy_pytorch  problem 1"))

    again = peerlane(*arguments, code=ExitCode.NOT_CORRECT)
    assert "0 evaluations to run; 2 already done with this evaluator and skipped" in again.err
    assert json.loads(again.out) == json.loads(first.out)


def test_the_device_is_chosen_without_torch() -> None:
    assert torch_has_cuda() == (torch.version.cuda is not None)
    code = "import sys; from peerlane.cli import evaluation as e; print(e.choose_device('auto'), e.gpu_count(), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [choose_device("auto"), str(gpu_count()), "False"]


def test_without_the_gpu_that_was_asked_for_no_folder_is_made(
    examples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peerlane: Peerlane
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    out = tmp_path / "out"
    done = peerlane("eval", str(examples / "pytorch"), "--device", "cuda", "--world-size", "2", "--out", str(out), code=ExitCode.USAGE)
    assert "no GPU is visible" in done.err and not out.exists()


def test_a_run_that_stops_shows_what_it_has(examples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peerlane: Peerlane) -> None:
    def stop(plan: object, progress: object) -> None:
        raise RunStopped("the disk is full", [on_cpu()])

    monkeypatch.setattr("peerlane.evaluate.evaluator.evaluate", stop)
    stopped = peerlane("eval", str(examples / "pytorch"), "--device", "cpu", "--out", str(tmp_path / "out"), code=ExitCode.HARNESS)
    assert on_cpu().candidate.name in stopped.out


def test_demo_compares_verdicts_with_the_expected_ones(examples: Path, peerlane: Peerlane) -> None:
    (examples / "broken" / "1_idle_pytorch.py").write_text(LAZY.replace("wrong_result", "hang"))
    done = peerlane("demo", "--all", "--examples", str(examples), "--world-size", "2", code=ExitCode.NOT_CORRECT)
    assert "did not get its expected verdict" in done.err
    assert "--device cpu lacks what they need: 1_right_cuda\n" in done.err
    rows = {row[0]: row for row in map(str.split, done.out.splitlines()) if row}
    assert "correct" in rows["1_right_pytorch"]
    assert (
        rows["1_lazy_pytorch"][:5] == ["1_lazy_pytorch", "1", "2", "wrong_result", "wrong_result"] and rows["1_lazy_pytorch"][-1] == "yes"
    )
    assert rows["1_idle_pytorch"][3:5] == ["hang", "wrong_result"] and rows["1_idle_pytorch"][-1] == "no"


def test_demo_does_not_fail_by_what_a_busy_machine_cannot_tell() -> None:
    kept_out = on_cpu(verdict=NotRun(missing="time"), speed=(), flags=("overloaded",))
    row = comparison(kept_out, {kept_out.candidate.name: ["hang"]})
    assert row[-1] == "too busy to tell" and demo_exit_code([on_cpu()], [kept_out], [row]) == ExitCode.OK
    assert comparison(on_cpu(), {on_cpu().candidate.name: ["hang"]})[-1] == "no"
    assert demo_exit_code([on_cpu(verdict=NotRun(missing="torch"), speed=())], [kept_out], [row]) == ExitCode.NOT_CORRECT


def test_demo_needs_its_examples(tmp_path: Path, peerlane: Peerlane) -> None:
    assert "no candidates in" in peerlane("demo", "--all", "--examples", str(tmp_path), code=ExitCode.USAGE).err


@pytest.mark.slow
def test_the_short_demonstration_shows_what_is_wrong_with_each(peerlane: Peerlane) -> None:
    shown = {item["name"]: item for item in json.loads(peerlane("demo", "--json").out)["shown"]}
    assert len(shown) == 6 and all(item["got"] == item["expected"] and item["sentence"] for item in shown.values())
    lines = [line for line in shown["missing_release"]["reason"].splitlines() if ": missing_release.py:" in line]
    assert len(lines) == 2 and "writes" in lines[0] and "reads" in lines[1]


def test_the_short_demonstration_without_a_compiler(monkeypatch: pytest.MonkeyPatch, peerlane: Peerlane) -> None:
    """The race is left out with a sentence, and what follows from a wrong verdict is an exit code."""
    monkeypatch.setattr("shutil.which", lambda _: None)
    named = (on_cpu().candidate.model_copy(update={"name": name}) for name in ("1_allreduce_pytorch", "1_returns_nan_pytorch"))
    judged = [on_cpu(candidate=candidate) for candidate in named]
    monkeypatch.setattr("peerlane.evaluate.evaluate", lambda plan, progress: [*map(progress.finished, judged)])
    monkeypatch.setattr("peerlane.evaluate.processes.prestart.early_start", lambda *_: contextlib.nullcontext())
    done = peerlane("demo", code=ExitCode.NOT_CORRECT)
    assert "left out: the race of a kernel, for there is no g++" in done.err
    assert "1_returns_nan_pytorch: correct, and not wrong_result as expected" in done.out and "1 of 2 verdicts" in done.out


def test_options_that_choose_among_all_examples_need_all(peerlane: Peerlane) -> None:
    assert "give --all too" in peerlane("demo", "--device", "cuda", code=ExitCode.USAGE).err


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("# expect: hang\nimport torch\n", Expectation(("hang",), ("hang",))),
        ("# expect: unstable, wrong_result\n", Expectation(("unstable", "wrong_result"), ("unstable", "wrong_result"))),
        ("# expect: cuda_error on gpu, not_run on cpu\n# needs: nvrtc\n", Expectation(("cuda_error",), ("not_run",), "nvrtc")),
        ("# expect: hang on gpu\n", Expectation(("hang",), ())),
    ],
)
def test_expectations(source: str, expected: Expectation, tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(source)
    assert read_expectation(tmp_path / "x.py") == expected


@pytest.mark.parametrize("source", ["import torch\n", "import torch\n# expect: hang\n", "# expect:\n", "# expect: hang\n# needs: luck\n"])
def test_a_broken_candidate_must_say_what_it_is_made_for(source: str, tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(source)
    with pytest.raises(UsageError, match="does not say what it is made for"):
        read_expectation(tmp_path / "x.py")


def test_what_needs_a_gpu_is_left_out_on_cpu() -> None:
    assert can_run(Expectation(("hang",), ("hang",)), "cpu")
    assert not can_run(Expectation(("hang",), ("hang",), "gpu"), "cpu") and can_run(Expectation(("hang",), ("hang",), "gpu"), "cuda")
    assert not can_run(Expectation(("hang",), ()), "cpu")


def test_a_good_candidate_may_say_that_it_needs_a_gpu(tmp_path: Path) -> None:
    for name, source in (
        ("1_a_pytorch.py", "# needs: gpu\n"),
        ("1_b_pytorch.py", "import torch\n# needs: gpu\n"),
        ("1_c_cuda.py", "import cupy\n"),
    ):
        (tmp_path / name).write_text(source)
    assert [needs_gpu(candidate) for candidate in discover([str(tmp_path)])] == [True, False, True]
    assert not needs_gpu(reference_candidate())


def test_bundled_examples_say_what_they_are_made_for() -> None:
    broken = [candidate.path for candidate in discover([str(ROOT / "examples" / "broken")]) if candidate.path is not None]
    expected = [read_expectation(path) for path in broken]
    kinds = {kind for expectation in expected for kind in (*expectation.cuda, *expectation.cpu)}
    assert {"wrong_result", "wrong_type", "build_error", "import_error", "runtime_error", "hang"} <= kinds
    good = discover(good_folders(ROOT / "examples"))
    assert len({candidate.problem for candidate in good}) >= 6
