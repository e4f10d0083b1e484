"""results.jsonl: appended whole or not at all, never rewritten, readable after a crash."""

import fcntl
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peerlane.common import files
from peerlane.errors import HarnessError, UsageError
from peerlane.evaluate.selftest.calibrate import CalibrationPlan, calibrate
from peerlane.generate.samples import Sample
from peerlane.results.json_lines import append_lines
from peerlane.results.result import Result
from peerlane.results.store import ResultsStore
from peerlane.results.verdict import Correct, Hang, HarnessFailure, NotRun
from sample_results import hung, on_cpu, own_audit, result, wrong, wrong_result


def numbered(number: int) -> Result:
    """Results of different candidates."""
    return on_cpu(candidate=result().candidate.model_copy(update={"sha256": f"{number:064d}"}))


def test_an_overloaded_machine_says_nothing_about_a_candidate(tmp_path: Path) -> None:
    """Also in files from before such results were ``not_run``: no reward, no sample, and judged again."""
    store, before = ResultsStore(tmp_path), hung(flags=("overloaded", "time_limit"))
    store.append(before)
    (again,) = ResultsStore(tmp_path).results()
    assert again.says_nothing and again.reward("correct") is None and not store.has(again.identity)
    assert not Sample.of(again, 0).judged and Sample.of(hung(), 0).judged and hung().reward("correct") == 0.0


@pytest.mark.parametrize(
    ("verdict", "final"),
    [
        (Correct(), True),
        (wrong_result(), True),
        (Hang(phase="first_call", ranks=(1,), deadline_s=20.0), True),
        (NotRun(missing="a GPU"), False),
        (HarnessFailure(phase="spawn", message="a trusted rank ended"), False),
    ],
    ids=lambda value: getattr(value, "kind", value),
)
def test_only_what_says_something_about_the_candidate_is_final(verdict: Any, final: bool, tmp_path: Path) -> None:
    """The rest is judged again: where there is a GPU by now, or when our fault is mended."""
    item = on_cpu() if verdict.kind == "correct" else on_cpu(verdict=verdict, speed=())
    ResultsStore(tmp_path).append(item)
    again = ResultsStore(tmp_path)
    assert again.has(item.identity) == final and (again.find(item.identity, item.candidate.name) == item) == final
    assert (item.reward("correct") is not None) == final


def test_round_trip(tmp_path: Path) -> None:
    store = ResultsStore(tmp_path / "new" / "folder")
    for item in (result(), wrong()):
        store.append(item)
    again = ResultsStore(tmp_path / "new" / "folder")
    assert again.results() == store.results() == [result(), wrong()]
    assert again.has(result().identity) and not again.has(numbered(5).identity)


def test_torn_last_line_is_dropped_and_overwritten(tmp_path: Path) -> None:
    store = ResultsStore(tmp_path)
    store.append(numbered(1))
    whole = store.path.read_bytes()
    store.path.write_bytes(whole + whole[: len(whole) // 2])
    again = ResultsStore(tmp_path)
    assert again.results() == [numbered(1)]
    again.append(numbered(2))
    assert again.path.read_bytes().startswith(whole)
    assert ResultsStore(tmp_path).results() == [numbered(1), numbered(2)]


def test_lines_that_are_no_results_stay_and_do_no_harm(tmp_path: Path) -> None:
    store = ResultsStore(tmp_path)
    store.append(numbered(1))
    with open(store.path, "ab") as file:
        file.write(b"not json\n{}\n\xff\xfe\x00\n\n" + b'{"schema_version": 3}\n')
    before = store.path.read_bytes()
    again = ResultsStore(tmp_path)
    assert again.has(numbered(1).identity) and len(again.notes) == 2
    again.append(numbered(2))
    assert ResultsStore(tmp_path).results() == [numbered(1), numbered(2)]
    assert store.path.read_bytes().startswith(before)


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder" / "results.jsonl").mkdir(parents=True)
    for folder in (tmp_path / "file", tmp_path / "file" / "folder", tmp_path / "folder", Path("/proc/absent")):
        with pytest.raises(UsageError, match=r"cannot write results.*--out"):
            ResultsStore(folder)
        with pytest.raises(UsageError, match=r"cannot write results.*--out"):
            next(calibrate(CalibrationPlan("1", world_sizes=(2,), out=folder / "results.jsonl")))


@pytest.mark.parametrize("text", ["my last note", "records of mine\nand more", "{schema", '{"name": "x"}\n'])
def test_a_file_of_something_else_is_refused_and_kept(text: str, tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"begins with .*expected records.*--out"):
        ResultsStore(tmp_path)
    with pytest.raises(UsageError, match="expected records"):
        next(calibrate(CalibrationPlan("1", world_sizes=(2,), out=file)))
    assert file.read_text() == text


@pytest.mark.parametrize("length", [1, 17, 18, 60, 90_000])
def test_what_a_killed_run_left_of_any_record_is_replaced(length: int, tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    first_lines = [path.read_bytes().split(b"\n")[0] for path in Path(__file__).parents[2].glob("results/h200x2/*.jsonl")]
    records = [line for line in first_lines if line.startswith(b'{"schema_version"')]
    assert len(records) > 5
    for data in [*records, b'{"schema_version":2' + b" " * 200_000]:
        file.write_bytes(b"{}\n" + data[: min(length, len(data) - 1)])
        append_lines(file, b'{"schema_version":2}')
        assert file.read_bytes() == b'{}\n{"schema_version":2}\n'


def test_a_last_line_that_lacks_its_end_alone_is_kept(tmp_path: Path) -> None:
    ResultsStore(tmp_path).append(numbered(1))
    file = tmp_path / "results.jsonl"
    file.write_bytes(file.read_bytes()[:-1])
    store = ResultsStore(tmp_path)
    store.append(numbered(2))
    assert ResultsStore(tmp_path).results() == store.results() == [numbered(1), numbered(2)]


def test_an_append_reads_one_byte_and_not_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ResultsStore(tmp_path)
    for number in range(20):
        store.append(numbered(number))
    read: list[int] = []
    monkeypatch.setattr(os, "pread", lambda _, count, where, pread=os.pread: read.append(count) or pread(_, count, where))
    monkeypatch.setattr(Path, "read_bytes", lambda _: pytest.fail("the file was read"))
    monkeypatch.setattr(Path, "open", lambda *_: pytest.fail("the file was read"))
    store.append(numbered(20))
    assert read == [1]


def test_a_file_that_is_removed_during_a_run_is_made_again(tmp_path: Path) -> None:
    store = ResultsStore(tmp_path)
    store.append(numbered(1))
    store.path.unlink()
    with store.alone(lambda: None):
        store.append(numbered(2))
    assert ResultsStore(tmp_path).results() == store.results() == [numbered(2)]


def test_full_disk_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    """A file size limit stands in for the full disk: the append fails in the middle of its line."""
    ResultsStore(tmp_path).append(numbered(1))
    before = (tmp_path / "results.jsonl").read_bytes()
    script = f"""
import resource, signal, sys
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[1])!r}]
from pathlib import Path
from test_store import numbered
from peerlane.errors import HarnessError
from peerlane.results.store import ResultsStore
store = ResultsStore(Path({str(tmp_path)!r}))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({len(before) + 50}, resource.RLIM_INFINITY))
try:
    store.append(numbered(2))
except HarnessError as error:
    assert "was not stored" in str(error)
    assert not store.has(numbered(2).identity)
    sys.exit(7)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 7
    assert (tmp_path / "results.jsonl").read_bytes() == before


@pytest.mark.parametrize("flag", [{"unrecorded_collectives": 10**4300}, {"copies": {"peer": 10**4300}}])
def test_what_could_not_be_read_again_is_not_written(flag: dict[str, Any], tmp_path: Path) -> None:
    """One such line, and no result of the file could be read any more."""
    store = ResultsStore(tmp_path)
    store.append(numbered(1))
    audited = result(track="custom", audit=own_audit())
    assert audited.audit is not None
    with pytest.raises(HarnessError, match="cannot be written so that it can be read"):
        store.append(audited.model_copy(update={"audit": audited.audit.model_copy(update=flag)}))
    assert ResultsStore(tmp_path).results() == store.results() == [numbered(1)]


def append_thirty(folder: Path, writer: int) -> None:
    store = ResultsStore(folder)
    for number in range(30):
        store.append(numbered(1000 * writer + number))


def test_two_writers(tmp_path: Path) -> None:
    """Processes that append to one file at the same time lose nothing and tear nothing."""
    writers = [multiprocessing.get_context("fork").Process(target=append_thirty, args=(tmp_path, number)) for number in (1, 2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(600)
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert len({item.candidate.sha256 for item in ResultsStore(tmp_path).results()}) == 60


def test_lines_are_plain_json(tmp_path: Path) -> None:
    """Infinite error ratios included: any JSON reader can read the file."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    store = ResultsStore(tmp_path)
    store.append(wrong())
    told, line = store.path.read_text().splitlines()
    assert json.loads(line, parse_constant=refuse)["verdict"]["error_over_tolerance"] is None
    assert json.loads(told)["environment"] == wrong().environment and "Infinity" not in line


def test_a_foreign_lock_delays_an_append_for_a_moment_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To lock a file it is enough to be able to read it."""
    store = ResultsStore(tmp_path)
    clock = itertools.count(0.0, 10.0)
    monkeypatch.setattr(files, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda seconds: None))
    with store.path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        store.append(numbered(1))
    assert ResultsStore(tmp_path).results() == [numbered(1)]
