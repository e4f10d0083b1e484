"""Says in one line what went wrong at a provider, and tells of every request that is tried again."""

import re
from collections.abc import Callable, Iterator
from typing import Any

from inspect_ai.model import Model

_MARKUP = re.compile(r"\[/?[a-z][a-z ]*\]")  # of rich, such as [bold][blue]
_MOST_CHARACTERS = 300
_HTML = re.compile(r"<(?:!doctype|html)\b.*", re.IGNORECASE | re.DOTALL)


def first_line(error: BaseException) -> str:
    """Returns an error's message in one line of at most 300 characters, without the markup of terminals.

    Of an error that a library wraps, the provider's own message counts, with the status of HTTP before it.
    """
    if (refused := unreachable(error)) is not None:
        return refused
    chain = list(_chain(error))
    answers = [item for item in chain if isinstance(getattr(item, "status_code", None), int)]
    inner = answers[-1] if answers else chain[0]  # the provider's own error is the innermost that has a status
    status = getattr(inner, "status_code", None)
    text = _said(inner)
    if (page := _HTML.search(text)) is not None:
        text = page[0] if isinstance(status, int) and status >= 300 else f"no JSON: {page[0]}"
    if isinstance(status, int) and status >= 300:
        text = f"{status}: {text}"
    line = " ".join(_MARKUP.sub("", text).split())
    return line if len(line) <= _MOST_CHARACTERS else f"{line[: _MOST_CHARACTERS - 3]}..."


def unreachable(error: BaseException) -> str | None:
    """Returns why no server could be reached, with its address; None for any other error."""
    chain = list(_chain(error))
    urls = [str(url) for item in chain if (url := _url(item)) is not None]
    refused = next((item for item in chain if isinstance(item, OSError)), None)
    if not urls or not (refused is not None or any(type(item).__name__ == "ConnectError" for item in chain)):
        return None
    if isinstance(refused, ConnectionRefusedError) or "All connection attempts failed" in map(str, chain):
        return f"connection refused: {urls[0]}"
    return f"no connection: {refused or chain[-1]}: {urls[0]}"


def tell_of_retries(model: Model, tell: Callable[[str], None], may_retry: Callable[[BaseException], bool]) -> None:
    """Makes a model tell of each request that it tries again, and not try those again that ``may_retry`` refuses."""
    decide, client = model.api.should_retry, getattr(model.api, "client", None)
    if client is not None and isinstance(getattr(client, "max_retries", None), int):
        client.max_retries = 0  # the provider's package would try again in silence

    def should_retry(error: Any) -> Any:
        if not may_retry(error):
            return False
        decision = decide(error)
        if decision:
            tell(f"tried again: {first_line(error)}")
        return decision

    model.api.should_retry = should_retry


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yields the causes of an error, the outermost last attempt of a retry first."""
    seen: set[int] = set()
    now: BaseException | None = error
    while now is not None and id(now) not in seen:
        seen.add(id(now))
        attempt = getattr(now, "last_attempt", None)
        if attempt is not None and attempt.exception() is not None:
            now = attempt.exception()
            continue
        yield now
        now = now.__cause__ or now.__context__


def _said(error: BaseException) -> str:
    """Returns the message in the body of an answer, or else the error's own."""
    body = getattr(error, "body", None)
    if isinstance(body, dict):
        inner = body.get("error", body)
        message = inner.get("message") if isinstance(inner, dict) else inner
        if isinstance(message, str) and message.strip():
            return message.strip()
    text = getattr(getattr(error, "response", None), "text", "")
    if isinstance(text, str) and _HTML.search(text):
        return text
    return str(getattr(error, "provider_message", "") or getattr(error, "message", "") or error).strip() or type(error).__name__


def _url(error: BaseException) -> Any:
    try:
        return getattr(getattr(error, "request", None), "url", None)
    except RuntimeError:  # httpx: an error that never got its request
        return None
