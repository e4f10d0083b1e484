"""The JSON Schema of a line of ``results.jsonl``: a file of the package, made from the models."""

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from peerlane.results.result import SCHEMA_VERSION, EnvironmentLine, Result

SCHEMA_ID = f"urn:peerlane:results:{SCHEMA_VERSION}"
SCHEMA_FILE = Path(__file__).with_name(f"results-{SCHEMA_VERSION}.schema.json")

_LINE: TypeAdapter[Any] = TypeAdapter(Annotated[Result | EnvironmentLine, Field(discriminator="type")])


def schema_text() -> str:
    """Returns the schema of the present models; the committed file must be equal."""
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA_ID, "title": "A line of results.jsonl"}
    return json.dumps({**head, **_without_titles(_LINE.json_schema(mode="serialization"))}, indent=1, ensure_ascii=False) + "\n"


def _without_titles(schema: Any) -> Any:
    """Titles repeat the names."""
    if isinstance(schema, dict):
        return {name: _without_titles(item) for name, item in schema.items() if name != "title" or not isinstance(item, str)}
    return [_without_titles(item) for item in schema] if isinstance(schema, list) else schema
