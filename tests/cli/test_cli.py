"""The command line is an interface: its verbs, options, exit codes and JSON are frozen here, so that changing one is a decision."""

import errno
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer.main

from command_line import Peerlane
from help_examples import COMMANDS, help_and_example
from peerlane import cli, problems
from peerlane.cli import doctor, exit_codes, progress
from peerlane.cli.evaluation import print_results
from peerlane.cli.exit_codes import ExitCode
from peerlane.common import problem_files
from peerlane.common.version import EXAMPLES, own_example
from peerlane.device import emulator
from peerlane.emulator import Report
from peerlane.errors import HarnessError, MissingDependency, UsageError
from peerlane.evaluate import discover
from peerlane.hardware import topology
from peerlane.hardware.ceilings import Ceilings, Measurement
from peerlane.problems.scaffolds import BACKENDS
from peerlane.results.verdict import HarnessFailure, NotRun
from sample_results import hung, on_cpu, result, text_of, wrong

ROOT = Path(__file__).parents[2]
MECHANISMS_FILE = ROOT / "results" / "h200x4" / "mechanisms.json"


def shape(value: Any) -> str:
    """The keys and types of a JSON value; lists by their first element."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {shape(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{shape(value[0]) if value else ''}]"
    return type(value).__name__


def test_help_does_not_import_what_is_slow() -> None:
    code = "import sys, peerlane.cli; print(sorted({'torch', 'pydantic', 'rich', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        (("list",), "13   gemm_allreduce"),
        (("list", "--category", "cooking"), "no problem fits"),
        (("show", "13"), "# 13. "),
        (("show", "gemm_allreduse"), "perhaps gemm_allreduce"),
    ],
)
def test_lists_and_pages_of_the_suite_do_not_import_torch(words: Sequence[str], printed: str) -> None:
    code = "import atexit, sys, peerlane.cli; atexit.register(lambda: print('torch' in sys.modules)); peerlane.cli.main()"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert printed in done.stdout + done.stderr and done.stdout.endswith("False\n")


def test_an_index_that_lacks_a_problem_is_not_used(peerlane: Peerlane, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Such as one of a user's own: all problems are imported then, and have the same entries."""
    entries = problem_files.index_entries()
    assert entries
    (tmp_path / "index.json").write_text(json.dumps(entries[1:]))
    monkeypatch.setattr(problem_files, "INDEX", tmp_path / "index.json")
    assert problem_files.index_entries() is None
    assert json.loads(peerlane("list", "--json").out)["problems"] == entries


def test_module_is_the_same_program() -> None:
    done = subprocess.run([sys.executable, "-m", "peerlane", "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Usage: peerlane")


def test_list_json(peerlane: Peerlane) -> None:
    printed = json.loads(peerlane("list", "--json").out)
    assert shape(printed) == (
        "{problems: [{id: int, slug: str, title: str, category: str, parallelism: [str], world_sizes: [int], nodes: [int], modes: "
        "[str], presets: [str], variants: [str], signature: str}]}"
    )
    assert [entry["id"] for entry in printed["problems"]] == list(problems.numbers())


def test_list_is_filtered_by_category_and_parallelism(peerlane: Peerlane) -> None:
    first = problems.get(1)
    found = json.loads(peerlane("list", "--json", "--category", first.category, "--parallelism", first.parallelism[0]).out)["problems"]
    assert 0 < len(found) < len(problems.numbers()) and all(entry["category"] == first.category for entry in found)
    assert first.category in peerlane("list", "--category", "cooking", code=ExitCode.USAGE).err


def test_a_problem_is_found_by_name_and_its_reference_runs(peerlane: Peerlane) -> None:
    text = peerlane("show", "gemm_allreduce", "--source").out
    compile(text, "reference", "exec")
    assert "all_reduce" in text and "import peerlane" not in text and "from peerlane" not in text


def test_version_and_short_help(peerlane: Peerlane) -> None:
    assert peerlane("--version").out.startswith("peerlane 0.")
    assert "--cases" in peerlane("eval", "-h").out


def test_list_for_people(peerlane: Peerlane) -> None:
    lines = peerlane("list").out.splitlines()
    for number in problems.numbers():
        assert any(line.split()[:2] == [str(number), problems.get(number).slug] for line in lines)


def test_list_is_short_unless_it_is_asked_for_more(peerlane: Peerlane) -> None:
    """A line for each problem, which fits the narrowest terminal."""
    lines = peerlane("list").out.splitlines()
    assert max(len(line.rstrip()) for line in lines[:-1]) <= 80 and len(lines) <= len(problems.numbers()) + 6
    assert problems.get(1).title in peerlane("list", "--long").out


def test_help_has_every_command_under_a_heading(peerlane: Peerlane) -> None:
    lines = peerlane("--help").out.splitlines()
    lines = lines[: lines.index("  Example:")]
    headings = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert headings == ["Options:", "Start here:", "Write a kernel:", "Read results:", "Score a model:", "Operate:"]
    listed = [line.split()[0] for line in lines[lines.index("Start here:") :] if line.startswith("  ")]
    assert sorted(listed) == sorted(typer.main.get_command(cli.app).commands) and not any(line.endswith("...") for line in lines[1:])


@pytest.mark.parametrize("names", COMMANDS, ids=" ".join)
def test_help_ends_with_an_example_whose_options_exist(names: tuple[str, ...]) -> None:
    said, shown = help_and_example(names)
    words = shlex.split(shown)
    assert tuple(words[: len(names)]) == names and "Example:" not in said
    used = next(tuple(words[:most]) for most in (2, 1) if tuple(words[:most]) in COMMANDS)
    COMMANDS[used].make_context(shown, words[len(used) :])  # refuses an option or a value that it does not have
    assert [word for word in words if word.startswith("examples/") and not (EXAMPLES.parent / word).is_file()] == []


def test_own_examples_are_found_in_any_folder_that_has_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    mine = Path("examples/cuda/1_allreduce_cuda.py")
    (found,) = discover([str(mine)])
    assert found.path == own_example(mine) == EXAMPLES / "cuda" / mine.name
    mine.parent.mkdir(parents=True)
    mine.write_text("")
    assert own_example(mine) == mine and own_example("examples/none.py") == Path("examples/none.py")


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("peerlane sh", ["show"]),
        ("peerlane show gemm_", ["gemm_allreduce", "gemm_allgather", "gemm_reducescatter"]),
        ("peerlane show 8", ["8", *map(str, range(80, 88))]),
        ("peerlane eval mine.py --problem 1-8,7", [f"1-8,{number}" for number in (7, *range(70, 80))]),
        ("peerlane eval mine.py --preset small,pk", ["small,pkb"]),
        ("peerlane prompt 1 --track ", ["open", "custom"]),
        ("peerlane new 1 --backend ", list(BACKENDS)),
    ],
)
def test_shells_complete_the_last_word(peerlane: Peerlane, monkeypatch: pytest.MonkeyPatch, line: str, offered: list[str]) -> None:
    for name, value in {"_PEERLANE_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}.items():
        monkeypatch.setenv(name, value)
    assert peerlane().out.split() == offered


def test_completion_does_not_import_torch() -> None:
    code = "import atexit, sys, peerlane.cli; atexit.register(lambda: print({'torch', 'numpy'} & set(sys.modules))); peerlane.cli.main()"
    asked = {"_PEERLANE_COMPLETE": "complete_bash", "COMP_WORDS": "peerlane show gemm_allr", "COMP_CWORD": "2"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **asked})
    assert done.stdout.split() == ["gemm_allreduce", "set()"]


def test_show_json(peerlane: Peerlane) -> None:
    printed = json.loads(peerlane("show", "1", "--json", "--preset", "pkb", "--world-size", "2").out)
    assert isinstance(printed.pop("error_model"), str | None)  # as the problem documents it
    assert shape(printed) == (
        "{id: int, slug: str, title: str, category: str, parallelism: [str], world_sizes: [int], nodes: [int], modes: [str], presets: "
        "[{name: str, about: str, cases: [{label: str, dtype: str, variant: str, world_sizes: [int], params: {shape: [int]}, arguments: "
        "[{name: str, value: str}], tolerance: {sum: {relative: float, magnitude: float, rms: float, normwise: float, rowwise: "
        "NoneType, size: str, words: str}}, cost: {flops: {fp32: float}, hbm_bytes: float, egress_bytes: float, ingress_bytes: float, "
        "network_egress_bytes: float, network_ingress_bytes: float}, roofline: {bound_us: float, bound_by: str, times_us: {latency: "
        "float, nvlink: float, network: float, hbm: float, tensor: float, vector: float}}, process_groups: {}}]}], variants: [str], "
        "signature: str, origin: str, summary: str, notes: [str], speed_note: str, graph_reason: str, replicated: bool, updates: [], "
        "integer_exact: bool, mutates: [], comparison: NoneType, known_wrong_answers: [{name: str, why: str, cases: NoneType}], "
        "excused: {neighbours_exchanged: str, ranks_reversed: str, ring_order: str, another_rank: str}, world_size: int, profile: str, "
        "attainable: NoneType, clusters: [], sweep: [{name: str, size: str}]}"
    )
    assert printed["world_size"] == 2 and [preset["name"] for preset in printed["presets"]] == ["pkb"]
    assert printed["signature"] == "solution(tensor: torch.Tensor) -> torch.Tensor"
    # 1024 x 1024 bfloat16 on 2 ranks: each port carries 2 (W - 1) / W = 1 payload, at 450 GB/s.
    (case,) = printed["presets"][0]["cases"]
    assert case["arguments"] == [{"name": "tensor", "value": "bfloat16[1024, 1024]"}]
    assert case["roofline"]["bound_us"] == pytest.approx(2 * 1024 * 1024 / 450e3) and case["roofline"]["bound_by"] == "nvlink"
    assert printed["profile"] == "H200 SXM"


def test_show_leaves_a_sweep_out_unless_it_is_asked_for(peerlane: Peerlane) -> None:
    def shown(*arguments: str) -> tuple[list[str], list[dict[str, str]]]:
        printed = json.loads(peerlane("show", "1", "--json", *arguments).out)
        return [preset["name"] for preset in printed["presets"]], printed["sweep"]

    presets, sweep = shown()
    assert not any(name.startswith("sweep") for name in presets)
    assert (sweep[0], sweep[-1]) == ({"name": "sweep_2kib", "size": "2 KiB"}, {"name": "sweep_512mib", "size": "512 MiB"})
    assert shown("--preset", "sweep,pkb")[0] == [*(item["name"] for item in sweep), "pkb"]
    assert shown("--preset", "sweep_1mib")[0] == ["sweep_1mib"]
    assert peerlane("show", "1").out.count("`sweep`: 2 KiB - 512 MiB") == 1


def test_show_prints_what_the_page_has_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peerlane: Peerlane) -> None:
    monkeypatch.chdir(tmp_path)
    shown = peerlane("show", "13").out
    page = (ROOT / "docs" / "problems" / "p013_gemm_allreduce.md").read_text()
    own = [line for line in shown.splitlines() if line.startswith(("|", "*")) and line not in page]
    assert own == [] and "solution us" in shown and "us per call" in shown
    assert not any(word in shown for word in ("<details", "![", ".svg", "](../../src"))


def test_show_for_people_names_its_profile(peerlane: Peerlane) -> None:
    out = peerlane("show", "1", "--profile", "b200").out
    assert "B200 SXM datasheet; it is not a measurement" in out and "transport faults" in out and "on 4 ranks" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["show", "99999"], "there is no problem 99999"),
        (["show", "1", "--preset", "huge"], "problem 1 has no preset 'huge'; it has: small, pkb"),
        (["show", "1", "--world-size", "3"], "does not run on 3 ranks"),
        (["show", "1", "--profile", "abacus"], "no hardware profile 'abacus'; there are: H100 SXM"),
        (["eval", "reference", "--mode", "fast"], "--mode got 'fast': expected one of eager, graph"),
        (["eval", "reference", "--world-size", "2,x"], "--world-size got '2,x'"),
        (["eval", "reference", "--world-size", "0"], "--world-size got '0'"),
        (["eval", "reference", "--preset", "pkb,,small"], "--preset got 'pkb,,small'"),
        (["eval", "reference", "--device", "tpu"], "--device got 'tpu': expected one of auto, cuda, cpu"),
        (["eval", "reference", "--problem", "1", "--preset", "small,production_typo"], "has no preset 'production_typo'; it has: small"),
        (["eval", "reference", "--problem", "1", "--preset", "sweep_1,production_2"], "problem 1 has no preset 'sweep_1'"),
        (["eval", "reference", "--problem", "1-3", "--preset", "pkb,sweep_typo"], "none of the chosen problems has a preset 'sweep_typo'"),
        (["calibrate", "--problem", "1", "--preset", "small,production_typo"], "problem 1 has no preset 'production_typo'"),
        (["calibrate", "--problem", "1", "--world-size", "3"], "nothing to calibrate on 3 ranks"),
        (["calibrate", "--problem", "1", "--world-size", "2,3", "--json"], "nothing to calibrate on 3 ranks"),
        (["eval", ""], "got '' for a candidate"),
        (["report", "--noise", "results.jsonl"], "expected `peerlane noise results.jsonl`"),
        (["report", "--plot", "x.svg", "results.jsonl"], "expected `peerlane plot results.jsonl --out x.svg`"),
        (["report", "results.jsonl", "--html", "page.html"], "expected `peerlane page results.jsonl --out page.html`"),
        (["report", "x/mechanisms.json"], "expected `peerlane bench mechanisms --from x/mechanisms.json`"),
        (["report", "/nonexistent.jsonl"], "there is no file /nonexistent.jsonl"),
        (["page", "/nonexistent.jsonl"], "there is no /nonexistent.jsonl"),
    ],
)
def test_user_errors_are_one_block_on_stderr(arguments: list[str], says: str, peerlane: Peerlane) -> None:
    captured = peerlane(*arguments, code=ExitCode.USAGE)
    assert captured.err.startswith("peerlane: ") and says in captured.err and "Traceback" not in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import os\nx = 1 / 0\n", "mine.py, line 2 raised ZeroDivisionError: division by zero"),
        ("x = 1\ndef race(\n", "raised SyntaxError: '(' was never closed (mine.py, line 2)"),
        ("import sys\nsys.exit(3)\n", "mine.py, line 2 raised SystemExit: 3"),
        ("def race(world_size):\n    yield int('x')\n", "mine.py, line 2 raised ValueError: invalid literal"),
        ("def race(world_size):\n    return 3\n", "mine.py gave ['int']; expected one or more"),
    ],
)
def test_what_a_file_to_race_raises_is_the_users_error(source: str, says: str, tmp_path: Path, peerlane: Peerlane) -> None:
    (tmp_path / "mine.py").write_text(source)
    error = peerlane("race", str(tmp_path / "mine.py"), code=ExitCode.USAGE).err
    assert says in error and "Traceback" not in error


def test_what_a_file_to_race_prints_is_kept_out_of_stdout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peerlane: Peerlane) -> None:
    (tmp_path / "mine.py").write_text(
        "from peerlane.emulator import Scenario\nprint('at import')\n"
        "def race(world_size):\n    print('in race')\n    yield Scenario('mine', '', world_size)\n"
    )
    report = Report("mine", 2, 1, 0, 0, (), 0.0)
    monkeypatch.setattr(emulator, "check", lambda *_, **__: report)
    captured = peerlane("race", "--json", "--world-size", "2", str(tmp_path / "mine.py"))
    assert json.loads(captured.out)["clean"] and captured.err == "at import\nin race\n"


@pytest.mark.parametrize(
    ("error", "code"), [(UsageError("x"), 2), (MissingDependency("x"), 2), (HarnessError("x"), 4), (KeyboardInterrupt(), 130)]
)
def test_exit_codes_of_errors(error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, peerlane: Peerlane) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(problem_files, "index_entries", fail)
    assert "Traceback" not in peerlane("list", code=code).err


def test_a_defect_is_a_harness_failure_with_its_traceback(monkeypatch: pytest.MonkeyPatch, peerlane: Peerlane) -> None:
    monkeypatch.setattr(problem_files, "index_entries", lambda: 1 / 0)
    assert "ZeroDivisionError" in peerlane("list", code=ExitCode.HARNESS).err


def test_exit_codes_of_verdicts() -> None:
    harness = result(verdict=HarnessFailure(phase="spawn", message="no ranks"), speed=())
    absent = result(verdict=NotRun(missing="a GPU"), speed=())
    assert exit_codes.exit_code([result(), on_cpu()]) == 0
    assert exit_codes.exit_code([result(), wrong()]) == 3
    assert exit_codes.exit_code([result(), absent]) == 3
    assert exit_codes.exit_code([wrong(), harness]) == 4


def test_a_page_is_written(tmp_path: Path, peerlane: Peerlane) -> None:
    (tmp_path / "results.jsonl").write_text(text_of(result(), hung(preset="small")))
    said = peerlane("page", str(tmp_path), "--out", str(tmp_path / "page.html"), "--title", "My <kernels>")
    assert said == (f"written: {tmp_path / 'page.html'}\n", "")
    assert "<h1>My &lt;kernels&gt;</h1>" in (tmp_path / "page.html").read_text()


def test_report_prints_markdown(tmp_path: Path, peerlane: Peerlane) -> None:
    """Of a file, or of the folder that `eval` names; lines that are no results are told of, and an empty file is no error."""
    file = tmp_path / "results.jsonl"
    file.write_text(text_of(result(), hung(preset="small")) + "my notes\n" + text_of(result()))
    for argument in (str(file), str(tmp_path)):
        out, err = peerlane("report", argument)
        assert out.startswith("| candidate | problem | preset | W |") and out.count("2.00 [1.96, 2.04]") == 1
        assert "4x NVIDIA H200" in out and "hang: first_call: rank(s) 1" in out and "line 4 is no result" in err
    file.write_text("")
    assert peerlane("report", str(tmp_path)) == ("", f"no results in {tmp_path}\n")
    calibrations = MECHANISMS_FILE.parents[1] / "cpu" / "calibration.jsonl"
    assert "no results" in peerlane("report", str(calibrations), code=ExitCode.USAGE).err


def test_a_piped_table_fits_an_editor(capsys: pytest.CaptureFixture[str]) -> None:
    print_results([result(), wrong(), on_cpu(preset="small")])
    out = capsys.readouterr().out
    table = out.split("1_allreduce_cuda, problem")[0]
    assert max(map(len, table.splitlines())) <= 120 and "speedup" in table


def test_the_schema_of_results_is_printed(peerlane: Peerlane) -> None:
    assert json.loads(peerlane("results", "schema").out)["$id"] == "urn:peerlane:results:2"


def test_bench_needs_gpus(monkeypatch: pytest.MonkeyPatch, peerlane: Peerlane) -> None:
    peerlane("bench", "mechanism", code=ExitCode.USAGE)
    monkeypatch.setattr(topology, "discover", lambda: SimpleNamespace(gpus=()))
    assert "needs 2 or more GPUs; this machine has 0" in peerlane("bench", "mechanisms", code=ExitCode.USAGE).err


def test_doctor_json(monkeypatch: pytest.MonkeyPatch, peerlane: Peerlane, tmp_path: Path) -> None:
    monkeypatch.setenv("PEERLANE_CACHE_DIR", str(tmp_path))
    printed = json.loads(peerlane("doctor", "--json").out)
    assert set(printed) == {"node", "checks", "ceilings"} and printed["ceilings"] is None
    assert all(set(check) == {"name", "status", "detail", "remedy"} for check in printed["checks"])
    out = peerlane("doctor").out
    assert printed["node"] in out and all(check["name"] in out for check in printed["checks"])


@pytest.mark.parametrize(
    ("ending", "why"),
    [
        (subprocess.CompletedProcess((), 4, "", "peerlane: no link\n"), "no link"),
        (subprocess.CompletedProcess((), 0, "", ""), "there is no file"),
        (subprocess.TimeoutExpired((), 90), "90 s"),
        (None, None),
    ],
)
def test_doctor_measures_mechanisms_too(ending: Any, why: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def bench(command: list[str], **_: Any) -> Any:
        if isinstance(ending, Exception):
            raise ending
        if ending is None:
            shutil.copy(MECHANISMS_FILE, command[-1])
        return ending or subprocess.CompletedProcess((), 0, "", "")

    monkeypatch.setattr(subprocess, "run", bench)
    before = Ceilings("node", "2026-01-02", {}, {"hbm_copy_tbps": Measurement(4.0, 3.9, 4.1, 9)}, ("a note",))
    after = doctor.with_mechanisms(before)
    assert after.figures.items() >= before.figures.items() and after.notes[0] == "a note"
    if why is None:
        assert after.median("nvlink_sm_store_gbps") is not None and after.median("packet_round_us") is not None and len(after.notes) == 1
    else:
        assert after.figures == before.figures and "mechanisms: not measured" in after.notes[1] and why in after.notes[1]


def test_progress_without_a_terminal_is_plain_lines_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.progress() as shown:
        shown.started(2, 3)
        shown.phase("a", 1, "pkb", 4, "timing")
        shown.finished(result())
        shown.finished(hung())
        shown.note("that is all")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "2 evaluations to run; 3 already done with this evaluator and skipped",
        "[1/2] 1_allreduce_cuda  problem 1 pkb W=4  correct",
        "[2/2] 1_allreduce_cuda  problem 1 pkb W=4  hang",
        "that is all",
    ]


def test_live_progress_writes_only_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    shown = progress.LiveProgress()
    with shown.bar:
        shown.started(1, 0)
        shown.phase("a", 1, "pkb", 4, "timing")
        shown.finished(wrong())
    captured = capsys.readouterr()
    assert captured.out == "" and "1 evaluation to run" in captured.err and "wrong_result" in captured.err


def test_bench_looks_for_its_folder_before_it_measures(monkeypatch: pytest.MonkeyPatch, peerlane: Peerlane, tmp_path: Path) -> None:
    monkeypatch.setattr(topology, "discover", lambda: SimpleNamespace(gpus=[0, 1]))
    (tmp_path / "file").touch()
    peerlane("bench", "mechanisms", "--out", str(tmp_path / "file"), code=ExitCode.USAGE)


FIRST_INTERRUPTED = """
import pathlib, sys
here = pathlib.Path(__file__).parents[1]
sys.path.remove(str(here))
if not (here / "again").exists():
    (here / "again").touch()
    raise KeyboardInterrupt
del sys.modules["numpy"]
import numpy
"""


def test_an_interrupt_while_torch_is_imported_is_one(tmp_path: Path) -> None:
    """torch looks for numpy on its way, and takes whatever is raised there for its absence."""
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "__init__.py").write_text(FIRST_INTERRUPTED)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    ended = subprocess.run([sys.executable, "-m", "peerlane", "show", "1", "--json"], env=environment, capture_output=True, text=True)
    assert (tmp_path / "again").exists()
    assert ended.returncode == 130 and "interrupted" in ended.stderr and "Traceback" not in ended.stderr


class Screen(io.StringIO):
    """A stdout that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_report_on_a_terminal_fits_it(columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peerlane: Peerlane) -> None:
    (tmp_path / "results.jsonl").write_text(text_of(result(), hung(preset="small")))
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("COLUMNS", str(columns))
    peerlane("report", str(tmp_path))
    printed = re.sub(r"\x1b\[[0-9;]*m", "", screen.getvalue())
    assert max(len(line.rstrip()) for line in printed.splitlines()) <= columns
    assert "2.00 [1.96, 2.04]" in printed and "| candidate |" not in printed


def test_show_on_a_terminal_draws_no_source(monkeypatch: pytest.MonkeyPatch, peerlane: Peerlane) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("COLUMNS", "80")
    peerlane("show", "13")
    printed = screen.getvalue()
    assert "flowchart" not in printed and "production_llama3_70b_o_proj_decode" in printed and "../" not in printed


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_progress_keeps_clock_and_countdown(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", str(columns))
    with progress.progress() as shown:
        shown.started(87, 0)
        shown.phase("33_ulysses_all_to_all_tensor_primitive_cuda", 33, "production_llama3_70b", 8, "first_call, timeout in 87 s")
        shown.bar.refresh()
    lines = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line) for line in screen.getvalue().replace("\r", "\n").splitlines()]
    told = [line for line in lines if "first_call" in line]
    assert told and all("0/87 0:0" in line and len(line.rstrip()) <= columns for line in told)
    assert all("timeout in 87 s" in line for line in told) or columns == 60


def test_a_full_disk_is_no_defect(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(**_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "table.csv")

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr().err
    assert ended.value.code == ExitCode.HARNESS and "cannot write table.csv: No space left on device" in said
    assert "defect" not in said and "Traceback" not in said
