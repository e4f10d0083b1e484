"""A file of results stays readable whatever is in it, and says what was left out."""

import contextlib
import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from e2e.runs import within
from peerlane.common.files import one_process
from peerlane.errors import FileRefused, HarnessError, UsageError
from peerlane.results.json_lines import MOST_LINE_BYTES, append_lines, make_appendable
from peerlane.results.reader import ResultsReader, as_document, read_results
from peerlane.results.store import ResultsStore
from sample_results import hung, result, text_of, wrong


def test_results_are_read_back_from_a_file_and_from_its_folder(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    file.write_text(text_of(result(), wrong()))
    assert read_results(file) == read_results(tmp_path) == [result(), wrong()]
    assert read_results(file)[0].environment == result().environment
    with pytest.raises(UsageError, match="there is no file"):
        read_results(tmp_path / "absent.jsonl")


def test_an_environment_is_stored_once(tmp_path: Path) -> None:
    lines = [json.loads(line) for line in text_of(result(), wrong(), hung()).splitlines()]
    assert [line["type"] for line in lines] == ["environment", "result", "result", "result"]
    assert {line["environment_hash"] for line in lines} == {result().environment_hash}
    assert not any("environment" in line for line in lines[1:])


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("my notes", "line 3 is no result and left out (not JSON)"),
        ("[1, 2]", "line 3 is no result and left out (no schema_version)"),
        ('{"schema_version": 2, "type": "result"}', "line 3 is no result and left out (evaluator_version: Field required)"),
        ('{"schema_version": 2, "x": Infinity}', "line 3 is no result and left out (not JSON)"),
        ('{"schema_version": 2, "x": %s}' % ("9" * 5000), "line 3 is no result and left out (not JSON)"),
        ('{"schema_version":2,"type":"result","evaluator_v', "line 3 is no result and left out (not JSON)"),
        ('{"schema_version": 2, "type": "footnote"}', "line 3 is no result and left out (an unknown type)"),
        ('{"schema_version": 3, "type": "result"}', "1 line left out: written by another version of peerlane (schema 3, this one reads 2)"),
        ('{"schema_version": %s}' % ("9" * 400), "line 3 is no result and left out (no schema_version)"),
        ('{"schema_version": 2, "type": "result", "environment_hash": []}', "line 3 is no result and left out (evaluator_version: Field"),
        ('{"schema_version": 1}', "1 line left out: written by another version of peerlane (schema 1, this one reads 2)"),
    ],
)
def test_one_line_makes_no_other_unreadable(line: str, told: str, tmp_path: Path) -> None:
    file, notes = tmp_path / "results.jsonl", list[str]()
    file.write_text(text_of(result()) + line + "\n" + text_of(wrong()))
    assert read_results(file, notes) == [result(), wrong()]
    assert len(notes) == 1 and told in notes[0]
    file.write_text(line + "\n")
    with pytest.raises(UsageError, match="left out"):
        read_results(file)


def test_binary_lines_are_told_and_blank_ones_are_not(tmp_path: Path) -> None:
    file, notes = tmp_path / "results.jsonl", list[str]()
    broken = text_of(wrong()).encode().splitlines()[1].replace(b"correctness", b"\xff\xfe")
    file.write_bytes(b"\n \n\xff\xfe\x00\n" + text_of(result()).encode() + broken + b"\n")
    assert read_results(file, notes) == [result()]
    assert "lines 3, 6 are no results" in notes[0]


@pytest.mark.parametrize(
    "content", [b"<html>404 Not Found</html>", b"\x1f\x8b\x08\x00", bytes(64), text_of(result()).replace("\n", "\r").encode()]
)
def test_a_file_in_which_nothing_is_readable_is_refused(content: bytes, tmp_path: Path) -> None:
    """None of them has a line end, which is not how a killed run leaves a record."""
    file = tmp_path / "results.jsonl"
    file.write_bytes(content)
    with pytest.raises(UsageError, match="line 1 is no result"):
        read_results(file)
    with contextlib.suppress(UsageError):
        make_appendable(file)
        append_lines(file, b"{}")
    assert file.read_bytes().startswith(content), "what is not ours is kept"


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("/dev/zero"), os.mkfifo, lambda path: path.symlink_to("other.jsonl")])
def test_a_folder_of_a_stranger_is_refused_and_left_as_it_is(make: Callable[[Path], None], tmp_path: Path) -> None:
    """A pipe would be waited for, a device never ends, and a link may lead to a file of the user."""
    (tmp_path / "other.jsonl").write_text(text_of(result()))
    make(tmp_path / "results.jsonl")
    with within(20):
        for use in (read_results, ResultsStore):
            with pytest.raises(UsageError, match=r"results\.jsonl is a (link|pipe)"):
                use(tmp_path)
        with pytest.raises(HarnessError, match="was not stored"):
            append_lines(tmp_path / "results.jsonl", b"{}")
    assert (tmp_path / "other.jsonl").read_text() == text_of(result())


def test_a_lock_that_is_a_link_costs_no_file(tmp_path: Path) -> None:
    mine = tmp_path / "precious.txt"
    mine.write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "results.lock").symlink_to(mine)
    store = ResultsStore(tmp_path / "run")
    with pytest.raises(FileRefused, match=r"results\.lock is a link"), store.alone(lambda: None):
        pass
    with pytest.raises(FileRefused, match=r"results\.lock is a link"), one_process(tmp_path / "run" / "results.lock"):
        pass
    assert mine.read_text() == "precious"


def test_a_small_file_takes_little_memory(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text(text_of(result()))
    tracemalloc.start()
    try:
        read_results(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_a_line_without_end_takes_neither_memory_nor_time(tmp_path: Path) -> None:
    """Its file takes no room on the disk."""
    file, notes = tmp_path / "results.jsonl", list[str]()
    file.write_text(text_of(result()))
    os.truncate(file, 300 << 20)
    tracemalloc.start()
    try:
        with within(30):
            make_appendable(file)
            append_lines(file, text_of(wrong()).splitlines()[1].encode())
            assert read_results(file, notes) == [result(), wrong()]
        assert tracemalloc.get_traced_memory()[1] < 80 << 20
    finally:
        tracemalloc.stop()
    assert len(notes) == 1 and f"line 3 is no result and left out (more than {MOST_LINE_BYTES} bytes)" in notes[0]


def test_an_unfinished_last_line_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    text = text_of(result(), wrong())
    file.write_text(text[:-1])
    assert read_results(file) == [result(), wrong()], "a last line that lacks its end alone is whole"
    file.write_text(text + text[-500:-1])
    file.write_text(text + text.splitlines()[1][:500])
    reader = ResultsReader(file)
    assert reader.results == [result(), wrong()] and reader.notes() == []
    with file.open("a") as added:
        added.write(text.splitlines()[1][500:] + "\n")
    assert ResultsReader(file).results == [result(), wrong(), result()], "it was being written"


def test_fields_that_are_not_known_are_ignored(tmp_path: Path) -> None:
    later = json.loads(wrong().model_dump_json())
    later["mood"], later["verdict"]["colour"], later["node"]["rack"] = "good", "red", 7
    (tmp_path / "results.jsonl").write_text(text_of(wrong()).splitlines()[0] + "\n" + json.dumps(later) + "\n")
    assert read_results(tmp_path) == [wrong()]


def test_a_document_of_results_is_plain_json() -> None:
    document = json.loads(json.dumps(as_document([result(), wrong()]), allow_nan=False))
    assert document["environments"] == {result().environment_hash: result().environment}
    assert [item["verdict"]["kind"] for item in document["results"]] == ["correct", "wrong_result"]
