"""Requests and answers as plain messages. Standard library only.

Answers of a candidate's ranks are untrusted. :func:`read_answer` is the one place that checks them: what it returns has the declared types,
lengths and ranges, and fits the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast, get_args

from peerlane.errors import ProtocolError
from peerlane.evaluate.wire import REQUESTS, Answer, ErrorKind, Request
from peerlane.evaluate.wire_format import Reader, is_count, reader_of, to_plain

Message = dict[str, Any]
A = TypeVar("A", bound=Answer)

ERROR_CHARACTERS = 8_000
"""of a rank's error, its end, which holds all that :func:`shortened` leaves of the last exception"""
_EXCEPTION_CHARACTERS = 6_000
_ERROR_KINDS = get_args(ErrorKind)
_OP, _RANKS = "op", "ranks"


@dataclass(frozen=True)
class RankError:
    """A failed request: the kind of the failure, the end of the rank's traceback, and, of several ranks in one process, the rank."""

    kind: ErrorKind
    text: str
    rank: int | None = None


def request_message(request: Request[Answer] | Sequence[Request[Answer]]) -> Message:
    """The message of a request; of several of one class, which one process carries out, that of all."""
    if isinstance(request, Request):
        message = to_plain(request)
        message[_OP] = request.op
        return message
    return {_OP: request[0].op, _RANKS: [to_plain(item) for item in request]}


def read_request(message: Message) -> Request[Answer] | list[Request[Answer]]:
    """The inverse of :func:`request_message`."""
    read = _READERS[message.pop(_OP)]
    if _RANKS in message:
        return [read(item) for item in message[_RANKS]]
    request: Request[Answer] = read(message)
    return request


def answer_message(answer: Answer | Sequence[Answer]) -> Message:
    """The message of an answer; of several, of the ranks of one process, that of all."""
    if isinstance(answer, Answer):
        message = to_plain(answer)
        message["ok"] = True
        return message
    return {"ok": True, _RANKS: [to_plain(item) for item in answer]}


def shortened(text: str, most: int = _EXCEPTION_CHARACTERS) -> str:
    """Returns a long text without its middle, so that the type of an exception, what it says first and its end are kept."""
    head, tail = most // 3, most - most // 3
    return text if len(text) <= most else f"{text[:head]}\n... {len(text) - most} characters ...\n{text[-tail:]}"


def error_message(error: RankError) -> Message:
    text = error.text[-ERROR_CHARACTERS:]
    return {"ok": False, "error": {"kind": error.kind, "message": text, "rank": error.rank}}


def building_message(building: bool) -> Message:
    """Returns the message that a rank sends before its answer, when it begins or ends to compile."""
    return {"building": building}


def read_building(message: Message) -> bool | None:
    """Tells whether a rank compiles from now on; None for a message that says something else."""
    building = message.get("building")
    return building if isinstance(building, bool) else None


def read_answer(request: Request[A], message: Message) -> A | RankError:
    """A rank's answer, checked, or the failure that it reports; raises ProtocolError for anything else. Takes the message apart."""
    if message.get("ok") is not True:
        return _read_error(message)
    del message["ok"]
    return _read_part(request, message)


def read_answers(requests: Sequence[Request[A]], message: Message) -> list[A] | RankError:
    """The answers of a process that carries out one request for each of its ranks; as :func:`read_answer`."""
    if message.get("ok") is not True:
        return _read_error(message)
    del message["ok"]
    if _RANKS not in message:  # it stands for those of all ranks
        return [_read_part(requests[0], message)] * len(requests)
    parts = message[_RANKS]
    if len(message) != 1 or not isinstance(parts, list) or len(parts) != len(requests):
        raise ProtocolError(f"the answer to {requests[0].op} is malformed: expected a part for each of {len(requests)} ranks")
    return [_read_part(request, part) for request, part in zip(requests, parts, strict=True)]


def _read_part(request: Request[A], plain: Any) -> A:
    try:
        answer: A = _ANSWER_READERS[type(request)](plain)
        request.check(answer)
    except ProtocolError as error:
        raise ProtocolError(f"the answer to {request.op} is malformed: {error}") from None
    return answer


def _read_error(message: Message) -> RankError:
    report = message.get("error")
    kind = report.get("kind") if isinstance(report, dict) else None
    if not isinstance(report, dict) or not isinstance(kind, str) or kind not in _ERROR_KINDS:
        raise ProtocolError("an answer that is neither ok nor an error")
    text, rank = report.get("message"), report.get("rank")
    text = text[-ERROR_CHARACTERS:].strip() if isinstance(text, str) else ""  # a rank that a candidate has changed cuts nothing
    return RankError(kind, text or "no message", rank if is_count(rank) else None)  # type: ignore[arg-type]


# Made here, before any rank is forked.
_READERS: dict[str, Reader] = {op: reader_of(cast(Any, kind)) for op, kind in REQUESTS.items()}
_ANSWER_READERS: dict[type, Reader] = {kind: reader_of(cast(Any, kind.answer)) for kind in REQUESTS.values()}
