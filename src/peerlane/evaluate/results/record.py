"""What all stored records have in common: the base class, and numbers that JSON has no word for."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationInfo, field_validator

from peerlane.evaluate.results.sanitize import sanitize

Mode = Literal["eager", "graph"]
Track = Literal["open", "custom"]

_OF_SEVERAL_LINES = ("message", "log_tail", "findings")

_INFINITE = Field(allow_inf_nan=True)
_NAMES: dict[str, str] = {"inf": "inf", "-inf": "-inf", "nan": "nan"}


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _number_or_name(value: float) -> float | Literal["inf", "-inf", "nan"]:
    return value if math.isfinite(value) else _NAMES[str(value)]  # type: ignore[return-value]


Ratio = Annotated[
    float,
    _INFINITE,
    BeforeValidator(lambda value: math.inf if value is None else value),
    PlainSerializer(_finite_or_none, return_type=float | None, when_used="json"),
]
"""An error divided by the tolerance. ``null`` in JSON where no number of times the tolerance would do: an exact output differs."""

Value = Annotated[float, _INFINITE, PlainSerializer(_number_or_name, return_type=float | Literal["inf", "-inf", "nan"], when_used="json")]
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
