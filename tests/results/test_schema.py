"""The JSON Schema of the package is that of the models, and committed results keep to it."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from peerlane.results.schema import SCHEMA_FILE, SCHEMA_ID, schema_text
from sample_results import hung, on_cpu, own_audit, result, text_of, wrong

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
