"""YAML of plain data, for the few files that others read as such. Strings are quoted as in JSON, which YAML contains."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any


def to_yaml(value: Any) -> str:
    """Returns mappings, lists, strings, numbers, booleans and None as YAML; keys must be plain words."""
    return "".join(f"{line}\n" for line in _lines(value))


def _lines(value: Any) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _entry(f"{key}:", item)
    elif isinstance(value, list) and value:
        for item in value:
            first, *rest = _lines(item)
            yield f"- {first}"
            yield from (f"  {line}" for line in rest)
    else:
        yield json.dumps(value, ensure_ascii=False, allow_nan=False)


def _entry(key: str, value: Any) -> Iterator[str]:
    lines = list(_lines(value))
    if isinstance(value, dict | list) and value:
        yield key
        yield from (f"  {line}" for line in lines)
    else:
        yield f"{key} {lines[0]}"
