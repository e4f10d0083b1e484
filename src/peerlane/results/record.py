"""The base class of all stored records, and numbers that JSON has no word for."""

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError, ValidationInfo, field_validator

from peerlane.results.sanitize import sanitize

Mode = Literal["eager", "graph"]
Track = Literal["open", "custom"]

_OF_SEVERAL_LINES = ("message", "log_tail", "findings")

_INFINITE = Field(allow_inf_nan=True)

Ratio = Annotated[
    float,
    _INFINITE,
    BeforeValidator(lambda value: math.inf if value is None else value),
    PlainSerializer(lambda value: value if math.isfinite(value) else None, return_type=float | None, when_used="json"),
]
"""An error divided by the tolerance. ``null`` in JSON where no number of times the tolerance would do: an exact output differs."""

Value = Annotated[
    float,
    _INFINITE,
    PlainSerializer(
        lambda value: value if math.isfinite(value) else str(value), return_type=float | Literal["inf", "-inf", "nan"], when_used="json"
    ),
]
"""An element of a tensor. Text in JSON where the element is not finite: ``"inf"``, ``"-inf"`` or ``"nan"``."""


class Record(BaseModel):
    """Base of all records: immutable; fields that it does not know are ignored, so that later files stay readable.

    Texts are made printable, because candidates have a say in some of them. Numbers are finite, but for :data:`Ratio` and :data:`Value`.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _readable(cls, value: Any, info: ValidationInfo) -> Any:
        return sanitize(value, lines=info.field_name in _OF_SEVERAL_LINES)


def first_fault(error: ValidationError, whole: str = "the file") -> str:
    """Returns the first field that is wrong and what is wrong with it; ``whole`` stands for a fault of no field."""
    fault = error.errors()[0]
    return f"{'.'.join(map(str, fault['loc'])) or whole}: {fault['msg']}"
