"""Frozen dataclasses as plain JSON values and back, with every value checked against its annotation. Standard library only.

Values may come from a candidate's process. A checked value has exactly the fields, types, lengths and ranges that its class declares;
anything else is a ProtocolError that names the field, and never quotes the value.
"""

import dataclasses
import functools
import types
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from peerlane.errors import ProtocolError

Reader = Callable[[Any], Any]

_LARGEST_COUNT = 2**53  # what any JSON reader takes as it is; sums of many counts have few more digits


@dataclasses.dataclass(frozen=True)
class Must:
    """A condition on a value beyond its type; for Annotated. ``expected`` says it in an error."""

    expected: str
    holds: Callable[[Any], bool]


def is_count(value: Any) -> bool:
    """True for an integer of at least 0 and below 2**53."""
    return type(value) is int and 0 <= value < _LARGEST_COUNT


def to_plain(record: Any) -> dict[str, Any]:
    """The fields of a record by name, records inside it likewise. Values are not copied, and not checked."""
    plain: dict[str, Any] = record.__dict__.copy()
    for name in _fields_with_records(record.__class__):
        plain[name] = _plain_value(plain[name])
    return plain


def _plain_value(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain_value(item) for item in value]
    return to_plain(value) if dataclasses.is_dataclass(value) else value


def writer_of(hint: Any) -> Callable[[Any], Any] | None:
    """Returns the function that makes plain values of those of an annotation; None where they are plain already."""
    return _plain_value if _holds_record(hint) else None


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    names = {item.name for item in dataclasses.fields(kind)}
    return {name: hint for name, hint in get_type_hints(kind, include_extras=True).items() if name in names}


@functools.cache
def _fields_with_records(kind: Any) -> tuple[str, ...]:
    return tuple(name for name, hint in _hints(kind).items() if _holds_record(hint))


def _holds_record(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint) or any(_holds_record(part) for part in get_args(hint))


@functools.cache
def reader_of(hint: Any) -> Reader:
    """The function that checks and converts the plain values of an annotation."""
    origin, parts = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value: value
    if dataclasses.is_dataclass(hint):
        return _record_reader(hint)
    if origin is Annotated:
        return _checked_reader(reader_of(parts[0]), parts[1])
    if origin is Literal:
        return _checked_reader(reader_of(str), Must(f"one of {', '.join(parts)}", frozenset(parts).__contains__))
    if origin in (Union, types.UnionType):
        (inner,) = (reader_of(part) for part in parts if part is not type(None))
        return lambda value: None if value is None else inner(value)
    if origin in (list, tuple):
        return _sequence_reader(origin, parts)
    if origin is dict:
        return _dict_reader(reader_of(parts[1]))
    return _SCALARS[hint]


_KINDS = {type(None): "null", bool: "a boolean", int: "an integer", float: "a number", str: "a text", list: "a list", dict: "an object"}


def _unexpected(expected: str, value: Any) -> ProtocolError:
    got = _KINDS[type(value)] + (f" of {len(value)}" if isinstance(value, (list, dict, str)) else "")
    return ProtocolError(f"expected {expected}, got {got}")


def _exact_reader(kind: type, expected: str) -> Reader:
    def read(value: Any) -> Any:
        if type(value) is not kind:
            raise _unexpected(expected, value)
        return value

    return read


def _read_float(value: Any) -> float:
    if type(value) is float:
        return value
    if type(value) is int and abs(value) < _LARGEST_COUNT:
        return float(value)
    raise _unexpected("a number", value)


_SCALARS: dict[Any, Reader] = {
    bool: _exact_reader(bool, "a boolean"),
    int: _exact_reader(int, "an integer"),
    str: _exact_reader(str, "a text"),
    float: _read_float,
}


def _checked_reader(read: Reader, must: Must) -> Reader:
    def read_checked(value: Any) -> Any:
        result = read(value)
        if not must.holds(result):
            raise _unexpected(must.expected, value)
        return result

    return read_checked


def _sequence_reader(kind: type, parts: tuple[Any, ...]) -> Reader:
    if kind is tuple and parts[-1] is not Ellipsis:
        readers = [reader_of(part) for part in parts]

        def read_fixed(value: Any) -> Any:
            if type(value) is not list or len(value) != len(readers):
                raise _unexpected(f"a list of {len(readers)}", value)
            return tuple(read(item) for read, item in zip(readers, value, strict=True))

        return read_fixed
    read, of_any = reader_of(parts[0]), parts[0] is Any

    def read_all(value: Any) -> Any:
        if type(value) is not list:
            raise _unexpected("a list", value)
        return kind(value) if of_any else kind([read(item) for item in value])

    return read_all


def _dict_reader(read: Reader) -> Reader:
    def read_dict(value: Any) -> Any:
        if type(value) is not dict:
            raise _unexpected("an object", value)
        return {key: read(item) for key, item in value.items()}

    return read_dict


def fields_reader(title: str, hints: Mapping[str, Any]) -> Callable[[Any], dict[str, Any]]:
    """Returns the function that checks and converts an object with exactly these fields, which are annotated so."""
    fields = [(name, reader_of(hint)) for name, hint in hints.items()]
    names = {name for name, _ in fields}

    def read_fields(plain: Any) -> dict[str, Any]:
        if type(plain) is not dict:
            raise _unexpected("an object", plain)
        if plain.keys() != names:
            missing, unknown = [name for name, _ in fields if name not in plain], len(plain.keys() - names)
            raise ProtocolError(f"{title} with unknown fields ({unknown}) or without fields ({', '.join(missing) or 'none'})")
        name = ""
        values = {}
        try:
            for name, read in fields:
                values[name] = read(plain[name])
        except ProtocolError as error:
            raise ProtocolError(f"{name}: {error}") from None
        return values

    return read_fields


def _record_reader(kind: Any) -> Reader:
    read = fields_reader(kind.__name__, _hints(kind))

    def read_record(plain: Any) -> Any:
        values = read(plain)
        record = object.__new__(kind)  # the constructor of a frozen class takes as long as all checks
        record.__dict__.update(values)
        return record

    return read_record
