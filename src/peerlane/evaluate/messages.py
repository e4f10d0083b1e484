"""Requests to ranks and their answers, as plain messages. Standard library only.

An abstract method of an :class:`Interface` declares a request: its name is the operation, its parameters are the arguments, and it returns
the answer. The supervisor sends ``Request(TrustedInterface.save_output, space, slot)``; a rank's method of this name carries it out.

Answers of a candidate's ranks are untrusted. :func:`read_answer` is the one place that checks them: what it returns has the declared types,
lengths and ranges, and fits the request.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, Concatenate, Generic, Literal, ParamSpec, TypeVar, cast, get_args, get_type_hints

from peerlane.errors import ProtocolError
from peerlane.evaluate.wire_format import Reader, fields_reader, is_count, reader_of, to_plain, writer_of

Message = dict[str, Any]
Arguments = Mapping[str, Any]
Check = Callable[[Arguments, Any], None]
"""Raises ProtocolError if an answer does not fit the arguments of its request."""
P = ParamSpec("P")
A = TypeVar("A")
M = TypeVar("M", bound=Callable[..., Any])

ErrorKind = Literal["runtime_error", "import_error", "cuda_error", "out_of_memory", "build_error", "not_run"]
ERROR_CHARACTERS = 8_000
"""What is kept of a rank's error: its end, which holds all that :func:`shortened` leaves of the last exception."""
_EXCEPTION_CHARACTERS = 6_000
_ERROR_KINDS = get_args(ErrorKind)
_OP, _RANKS, _ANSWER = "op", "ranks", "answer"


@dataclass(frozen=True)
class Declaration:
    """A request as an interface declares it.

    Attributes:
        op: the operation, which is the method's name.
        parameters: the names of its arguments, in order.
        defaults: the values of arguments that may be left out.
        failure_kind: the kind of an exception that nothing more is known of.
        check: compares an answer with the arguments.
    """

    op: str
    parameters: tuple[str, ...]
    defaults: Arguments
    failure_kind: ErrorKind
    check: Check | None
    writers: Mapping[str, Callable[[Any], Any]]
    read_arguments: Callable[[Any], dict[str, Any]]
    write_answer: Callable[[Any], Message]
    read_answer: Reader

    @classmethod
    def of(cls, method: Any) -> "Declaration":
        """Makes a declaration from the signature and the annotations of a method."""
        hints = get_type_hints(method, include_extras=True)
        write_answer, read_answer = _answer_format(hints.pop("return"))
        parameters = inspect.signature(method).parameters
        return cls(
            op=method.__name__,
            parameters=tuple(hints),
            defaults={name: parameters[name].default for name in hints if parameters[name].default is not inspect.Parameter.empty},
            failure_kind=getattr(method, "failure_kind", "runtime_error"),
            check=getattr(method, "check", None),
            writers={name: write for name, hint in hints.items() if (write := writer_of(hint)) is not None},
            read_arguments=fields_reader(method.__name__, hints),
            write_answer=write_answer,
            read_answer=read_answer,
        )


def _answer_format(hint: Any) -> tuple[Callable[[Any], Message], Reader]:
    """Returns what makes an answer an object, and an object an answer: a record has its fields, None has none, anything else has one."""
    if is_dataclass(hint):
        return to_plain, reader_of(cast(Any, hint))
    read = fields_reader("answer", {} if hint is type(None) else {_ANSWER: hint})
    if hint is type(None):
        return lambda _: {}, lambda plain: read(plain).get(_ANSWER)
    write = writer_of(hint)
    return lambda answer: {_ANSWER: answer if write is None else write(answer)}, lambda plain: read(plain)[_ANSWER]


REQUESTS: dict[str, Declaration] = {}
"""Every request by its operation. Complete before any rank is forked."""


class Interface:
    """The base of what one kind of rank can be asked: abstract methods declare requests."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for op, method in vars(cls).items():
            if getattr(method, "__isabstractmethod__", False):
                assert op not in REQUESTS, f"{op} is declared twice"
                REQUESTS[op] = Declaration.of(method)


def declare(*, failure_kind: ErrorKind | None = None, check: Check | None = None) -> Callable[[M], M]:
    """Adds to the declaration of a request what its signature does not say."""

    def add(method: M) -> M:
        method.__dict__.update({name: value for name, value in (("failure_kind", failure_kind), ("check", check)) if value is not None})
        return method

    return add


class Request(Generic[A]):
    """A request to a rank: a method of an :class:`Interface`, and arguments for it."""

    __slots__ = ("arguments", "declaration")

    def __init__(self, method: Callable[Concatenate[Any, P], A], *positional: P.args, **named: P.kwargs) -> None:
        self.declaration = REQUESTS[method.__name__]
        arguments = dict(zip(self.declaration.parameters, positional, strict=False))
        if len(arguments) < len(self.declaration.parameters):
            arguments = {**self.declaration.defaults, **arguments, **named}
        self.arguments: Arguments = arguments

    @property
    def op(self) -> str:
        return self.declaration.op

    def plain(self) -> Message:
        """Returns the arguments as plain values."""
        plain = dict(self.arguments)
        for name, write in self.declaration.writers.items():
            plain[name] = write(plain[name])
        return plain


class Answer(Generic[A]):
    """A rank's checked answer; a list of them for several ranks in one process."""

    __slots__ = ("value",)

    def __init__(self, value: A) -> None:
        self.value = value


class PerRank(list[A]):
    """Answers of the ranks of one process, which differ."""


@dataclass(frozen=True)
class RankError:
    """A failed request: the kind of the failure, the end of the rank's traceback, and, of several ranks in one process, the rank."""

    kind: ErrorKind
    text: str
    rank: int | None = None


def request_message(request: Request[Any] | Sequence[Request[Any]]) -> Message:
    """Returns the message of a request; of several of one kind, which one process carries out, that of all."""
    if isinstance(request, Request):
        message = request.plain()
        message[_OP] = request.declaration.op
        return message
    return {_OP: request[0].op, _RANKS: [item.plain() for item in request]}


def read_request(message: Message) -> tuple[Declaration, dict[str, Any] | list[dict[str, Any]]]:
    """Returns what is asked, and the arguments; of several requests to one process, a list. The inverse of :func:`request_message`."""
    declaration = REQUESTS[message.pop(_OP)]
    if _RANKS in message:
        return declaration, [declaration.read_arguments(item) for item in message[_RANKS]]
    return declaration, declaration.read_arguments(message)


def answer_message(declaration: Declaration, answer: Any) -> Message:
    if isinstance(answer, PerRank):
        return {"ok": True, _RANKS: [declaration.write_answer(item) for item in answer]}
    message = declaration.write_answer(answer)
    message["ok"] = True
    return message


def shortened(text: str, length: int = _EXCEPTION_CHARACTERS) -> str:
    """Returns a long text without its middle, so that the type of an exception, what it says first and its end are kept."""
    head, tail = length // 3, length - length // 3
    return text if len(text) <= length else f"{text[:head]}\n... {len(text) - length} characters ...\n{text[-tail:]}"


def error_message(error: RankError) -> Message:
    """Returns the message of a failed request."""
    text = error.text[-ERROR_CHARACTERS:]
    return {"ok": False, "error": {"kind": error.kind, "message": text, "rank": error.rank}}


def building_message(building: bool) -> Message:
    """Returns the message that a rank sends before its answer, when it begins or ends to compile."""
    return {"building": building}


def read_building(message: Message) -> bool | None:
    """Tells whether a rank compiles from now on; None for a message that says something else."""
    building = message.get("building")
    return building if isinstance(building, bool) else None


def read_answer(request: Request[A], message: Message) -> Answer[A] | RankError:
    """Returns a rank's answer, checked, or the failure that it reports; raises ProtocolError for anything else. Takes the message apart."""
    if message.get("ok") is not True:
        return _read_error(message)
    del message["ok"]
    return Answer(_read_part(request, message))


def read_answers(requests: Sequence[Request[A]], message: Message) -> Answer[list[A]] | RankError:
    """Returns the answers of a process that carries out one request for each of its ranks; as :func:`read_answer`."""
    if message.get("ok") is not True:
        return _read_error(message)
    del message["ok"]
    if _RANKS not in message:  # it stands for those of all ranks
        return Answer([_read_part(requests[0], message)] * len(requests))
    parts = message[_RANKS]
    if len(message) != 1 or not isinstance(parts, list) or len(parts) != len(requests):
        raise ProtocolError(f"the answer to {requests[0].op} is malformed: expected a part for each of {len(requests)} ranks")
    return Answer([_read_part(request, part) for request, part in zip(requests, parts, strict=True)])


def _read_part(request: Request[A], plain: Any) -> A:
    try:
        answer: A = request.declaration.read_answer(plain)
        if request.declaration.check is not None:
            request.declaration.check(request.arguments, answer)
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
