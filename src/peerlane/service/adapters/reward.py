"""The part that all adapters share: from a model's reply to a reward, or to None where there is no verdict."""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_args

from peerlane.errors import UsageError
from peerlane.generate.reply import extract
from peerlane.results.result import RewardKind
from peerlane.service.client import Client, ServiceFault, checked_options

if TYPE_CHECKING:
    from peerlane.results.result import Result

_NO_SOURCE = {
    "no_code": "The reply holds no complete Python block that defines `solution`, or one of more than two megabytes.",
    "refused": "The reply declines to answer.",
    "empty": "The reply says nothing.",
    "truncated": "The reply ends before a complete Python block that defines `solution`.",
}
URL = "PEERLANE_URL"
"""variable of the environment with the service's URL"""
TIMEOUT_S = 60.0
"""The seconds of one evaluation, unless the options say otherwise."""


@dataclass(frozen=True)
class Reward:
    """The reward of one reply.

    Attributes:
        value: None if nothing can be said: the service was not there, the machine failed, or a speed was not measured.
        verdict: kind of the verdict; ``no_verdict`` if there is none. If the reply holds no candidate, why: ``no_code``, ``truncated``,
            ``refused`` or ``empty``.
        feedback: text for the author of the reply.
        result: the stored record, if there is one.
    """

    value: float | None
    verdict: str
    feedback: str = ""
    result: Result | None = None


@dataclass(frozen=True)
class RewardSettings:
    """The kind of reward, and the place where it is judged.

    Attributes:
        kind, p: as in :meth:`.Result.reward`.
        url: of the service, or of several, among which jobs are spread; None: PEERLANE_URL, with commas between several. The token comes
            from PEERLANE_TOKEN or PEERLANE_TOKEN_FILE.
        options: of every request, such as ``presets``, ``modes`` or ``track``. By default ``timeout`` is 60 seconds, compiling and waiting
            apart.

    Raises UsageError for what can give no reward: an unknown kind or option, and a speedup without a mode that is timed.
    """

    kind: RewardKind = "correct"
    p: float = 1.0
    url: str | Sequence[str] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in get_args(RewardKind):
            raise UsageError(f"kind={self.kind!r}: expected one of {', '.join(get_args(RewardKind))}")
        if not (math.isfinite(self.p) and self.p >= 0):
            raise UsageError(f"p={self.p!r}: expected a speedup, such as 1.0")
        checked_options(self.options)
        modes = self.options.get("modes")
        if self.kind != "correct" and modes is not None and not tuple(modes):
            raise UsageError(f"kind={self.kind!r} needs a speed, and modes=() measures none: leave modes out, or take kind='correct'")

    def client(self) -> Client:
        """The client of the service, one for each process; raises UsageError without a URL."""
        given = self.url or service_url()
        urls = tuple(given.split(",") if isinstance(given, str) else given)
        options = {"timeout": TIMEOUT_S, **self.options}
        return _client(os.getpid(), urls, json.dumps(options, default=list, sort_keys=True))


def service_url() -> str:
    """See :data:`URL`."""
    if (url := os.environ.get(URL)) is None:
        raise UsageError(f"no service: set {URL}, such as to http://127.0.0.1:8300, or give url=")
    return url


@functools.lru_cache(maxsize=8)
def _client(_process: int, urls: tuple[str, ...], options: str) -> Client:
    return Client(urls, **json.loads(options))  # through JSON: trainers give lists of their own, which cannot be sent


async def reward_of(problem: int, reply: Any, settings: RewardSettings) -> Reward:
    """The reward of a reply: text, or a chat's messages, of which the last counts.

    Whatever a model writes gets a reward. UsageError is about the settings alone, such as a missing token.
    """
    client = settings.client()
    source, status = extract(reply_text(reply), "refusal" if _refuses(reply) else "", _arguments(reply))
    if source is None:
        return Reward(0.0, status, f"verdict: {status}\n{_NO_SOURCE[status]}")
    try:
        source.encode()
    except UnicodeEncodeError as error:
        return Reward(0.0, "no_code", f"verdict: no_code\nThe code is no valid text: {error.reason} at character {error.start}.")
    try:
        result = await client.evaluate_async(problem, source)
    except ServiceFault as fault:
        return Reward(None, "no_verdict", str(fault))
    return Reward(result.reward(settings.kind, p=settings.p), result.verdict.kind, result.feedback(), result)


def reply_text(reply: Any) -> str:
    """The text of a reply in any of the shapes that trainers use."""
    if isinstance(reply, str):
        return reply
    if isinstance(reply, Sequence) and reply:
        return reply_text(reply[-1])
    content = _part(reply, "content") or _part(reply, "refusal") or ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, Sequence) else ()
    texts = [_part(part, "text") or _part(part, "refusal") for part in parts]
    return "".join(text for text in texts if isinstance(text, str))


def _part(reply: Any, name: str) -> Any:
    return reply.get(name) if isinstance(reply, Mapping) else getattr(reply, name, None)


def _last(reply: Any) -> Any:
    return reply[-1] if isinstance(reply, Sequence) and not isinstance(reply, str) and reply else reply


def _refuses(reply: Any) -> bool:
    message = _last(reply)
    return not isinstance(message, str) and bool(_part(message, "refusal"))


def _arguments(reply: Any) -> list[str]:
    """The texts among the arguments of a reply's calls of tools, as OpenAI's protocol has them."""
    message = _last(reply)
    calls = None if isinstance(message, str) else _part(message, "tool_calls")
    found: list[str] = []
    for call in calls if isinstance(calls, Sequence) and not isinstance(calls, str) else ():
        given = _part(_part(call, "function") or call, "arguments")
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except (ValueError, RecursionError):
                given = {"text": given}
        if isinstance(given, Mapping):
            found += [value for value in given.values() if isinstance(value, str)]
    return found
