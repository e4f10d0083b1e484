"""What is stored is described by the schema, and texts of candidates are made harmless before."""

import json
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerlane.results.result import Result
from peerlane.results.sanitize import LINE_CHARACTERS, TEXT_CHARACTERS, one_line, printable, sanitize, several_lines
from peerlane.results.schema import SCHEMA_FILE, SCHEMA_ID, schema_text
from peerlane.results.verdict import RuntimeFailure, WrongType
from sample_results import again, hung, on_cpu, own_audit, result, text_of, wrong


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("naïve µs → 東京", "naïve µs → 東京"),
        ("\x1b[2J\x07\r", "\\x1b[2J\\x07\\r"),
        ("a\nb\tc", "a\\nb\\tc"),
        ("\u202ecorrect\u2066\u200b", "\\u202ecorrect\\u2066\\u200b"),
        ("\x9b31m\x85\u2028", "\\x9b31m\\x85\\u2028"),
        ("\udcff", "\\udcff"),
    ],
)
def test_what_a_terminal_obeys_is_written_out(text: str, shown: str) -> None:
    assert printable(text) == one_line(text) == shown


def test_lines_stay_where_they_belong() -> None:
    assert several_lines("a\n\tb\x1b") == "a\n\tb\\x1b"
    assert sanitize(("a\nb", {"c\n": ["d\n", 1, None]})) == ("a\\nb", {"c\\n": ["d\\n", 1, None]})


def test_begin_of_a_line_and_end_of_a_text() -> None:
    assert one_line("x" * 10_000).endswith("xxx...") and len(one_line("\x1b" * 10_000)) == LINE_CHARACTERS
    assert several_lines("x" * TEXT_CHARACTERS + "end").endswith("xend") and len(several_lines("\x1b" * 50_000)) == TEXT_CHARACTERS


@given(st.text(max_size=50), st.booleans())
def test_twice_is_as_good_as_once(text: str, lines: bool) -> None:
    once = sanitize(text, lines=lines)
    assert sanitize(once, lines=lines) == once and isinstance(once.encode(), bytes)


def test_records_hold_what_can_be_printed() -> None:
    """In one place for the table, the lines while it runs, and what is written."""
    hostile = "\x1b[2J\n[1/1] another  correct\u202e"
    failure = RuntimeFailure(phase="import", rank=0, message=f"Traceback\n{hostile}")
    record = Result.model_validate({**wrong().model_dump(), "verdict": failure, "log_tail": hostile, "flags": (hostile,)})
    assert record.verdict.reason == "rank 0, import: [1/1] another  correct\\u202e"
    assert record.log_tail == "\\x1b[2J\n[1/1] another  correct\\u202e" and "\n" not in record.flags[0]
    assert WrongType(case="x", rank=0, detail=f"output holds a {hostile}").reason.isprintable()
    assert again(record) == record


VALIDATOR = jsonschema.Draft202012Validator(json.loads(SCHEMA_FILE.read_text()))
COMMITTED = Path(__file__).parents[2] / "results"


def test_the_file_is_what_the_models_say() -> None:
    """Files outlive versions: fields with a default, verdicts and names of mechanisms may be added. Other changes take a new version."""
    assert SCHEMA_FILE.read_text() == schema_text(), "write it anew with peerlane.results.schema.schema_text()"
    assert json.loads(SCHEMA_FILE.read_text())["$id"] == SCHEMA_ID


def test_what_is_written_keeps_to_it() -> None:
    for line in text_of(result(audit=own_audit()), on_cpu(), wrong(), hung()).splitlines():
        VALIDATOR.validate(json.loads(line))


@pytest.mark.parametrize("change", [{"verdict": {"kind": "excellent"}}, {"type": "note"}, {"world_size": 0}, {"modes": "eager"}])
def test_what_breaks_it_is_refused(change: dict[str, object]) -> None:
    line = json.loads(result().model_dump_json())
    assert VALIDATOR.is_valid(line) and not VALIDATOR.is_valid(line | change)


@pytest.mark.parametrize("file", ["h200x4/references.jsonl", "h200x2/sweep.jsonl", "h200x4/examples.jsonl"])
def test_committed_results_keep_to_it(file: str) -> None:
    lines = [json.loads(line) for line in (COMMITTED / file).read_text().splitlines()]
    for line in [*lines[:3], *lines[-3:]]:
        VALIDATOR.validate(line)
