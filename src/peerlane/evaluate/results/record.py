"""What all stored records have in common."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from peerlane.evaluate.results.sanitize import sanitize

Mode = Literal["eager", "graph"]

_OF_SEVERAL_LINES = ("message", "log_tail")


class Record(BaseModel):
    """Base of all records: immutable, no unknown fields. Its texts can be printed: candidates have a say in some of them."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=True, ser_json_inf_nan="strings")

    @field_validator("*")
    @classmethod
    def _readable(cls, value: Any, info: ValidationInfo) -> Any:
        return sanitize(value, lines=info.field_name in _OF_SEVERAL_LINES)
