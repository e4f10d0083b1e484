"""A file of results stays readable whatever is in it, and says what was left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from peerlane.errors import UsageError
from peerlane.results.reader import ResultsReader, as_document, read_results
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
        ('{"schema_version": 2, "x": Infinity}', None),
        ('{"schema_version":2,"type":"result","evaluator_v', None),
        ('{"schema_version": 2, "type": "footnote"}', None),
        ('{"schema_version": 3, "type": "result"}', "1 line left out: written by another version of peerlane (schema 3, this one reads 2)"),
        ('{"schema_version": 1}', "1 line left out: written by another version of peerlane (schema 1, this one reads 2)"),
    ],
)
def test_one_line_makes_no_other_unreadable(line: str, told: str | None, tmp_path: Path) -> None:
    file, notes = tmp_path / "results.jsonl", list[str]()
    file.write_text(text_of(result()) + line + "\n" + text_of(wrong()))
    assert read_results(file, notes) == [result(), wrong()]
    assert len(notes) == (told is not None) and (told or "") in "".join(notes)
    file.write_text(line + "\n")
    if told is not None:
        with pytest.raises(UsageError, match="left out"):
            read_results(file)


def test_binary_lines_and_blank_ones(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    file.write_bytes(b"\n \n\xff\xfe\x00\n" + text_of(result()).encode())
    assert read_results(file) == [result()]


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
