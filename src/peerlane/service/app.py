"""The service's routes, as one ASGI application. docs/service.md describes them; ``GET /openapi.json`` has them for machines."""

import asyncio
import contextlib
import json
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from peerlane.common.version import __version__
from peerlane.evaluate.evaluator import Evaluator
from peerlane.service.metrics import render_metrics
from peerlane.service.node import Node
from peerlane.service.openapi import openapi_document
from peerlane.service.queue import JobQueue, NotOwner
from peerlane.service.request import DEFAULT_NAME, ENDED, FieldFault, JobDocument, Refusal, RequestFault, job_key, job_of, parse_request
from peerlane.service.settings import ServiceSettings, Tokens

MOST_BODY_BYTES = 13 << 20
"""a candidate has at most two of these megabytes, and JSON may make six bytes of one"""
_BODY_S = 30.0
"""for a body to arrive"""
LONGEST_POLL_S = 60.0
_HEARTBEAT_S = 15.0
_AGAIN_S = 5
"""what Retry-After says at most, in place of the time that the queue will take"""

Handler = Callable[[Request, str], Awaitable[Response]]


class Service:
    """The service: state that the routes share, and the routes. Errors are answered as :class:`.Refusal`, each with its status.

    Args:
        settings: limits.
        tokens: who may ask.
        queue: the jobs.
        node: who judges them.
        identify: the evaluator whose identities name jobs; it need not be open.
        end: called if the node's loop ends by a defect: nothing would be judged any more.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        tokens: Tokens,
        queue: JobQueue,
        node: Node,
        identify: Evaluator,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        self.settings, self.tokens, self.queue, self.node, self.identify, self.end = settings, tokens, queue, node, identify, end
        self.responses: Counter[tuple[str, int]] = Counter()

    def application(self) -> Starlette:
        """The application; the node works while it runs."""
        routes = [
            Route("/health", self._counted("/health", self.health, public=True)),
            Route("/openapi.json", self._counted("/openapi.json", self.openapi, public=True)),
            Route("/metrics", self._counted("/metrics", self.metrics)),
            Route("/v1/node", self._counted("/v1/node", self.describe)),
            Route("/v1/jobs", self._counted("/v1/jobs", self.submit), methods=["POST"]),
            Route("/v1/jobs/{key}", self._counted("/v1/jobs/{id}", self.show), methods=["GET"]),
            Route("/v1/jobs/{key}", self._counted("/v1/jobs/{id}", self.cancel), methods=["DELETE"]),
            Route("/v1/jobs/{key}/events", self._counted("/v1/jobs/{id}/events", self.events)),
        ]
        return Starlette(routes=routes, lifespan=self._lifespan, exception_handlers={HTTPException: _refused})

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        work = asyncio.create_task(self.node.run())
        work.add_done_callback(lambda _: self.end())
        try:
            yield
        finally:
            await self.node.drain(0.0)
            await asyncio.gather(work, return_exceptions=True)

    def _counted(self, name: str, handler: Handler, *, public: bool = False) -> Callable[[Request], Awaitable[Response]]:
        """The handler, behind the token unless it is public; its answers are counted."""

        async def endpoint(request: Request) -> Response:
            owner = self.tokens.owner(request.headers.get("authorization", ""))
            if owner is None and not public:
                why = "expected a header `Authorization: Bearer TOKEN` with an accepted token"
                answer = refuse(401, why, {"WWW-Authenticate": "Bearer"})
            else:
                try:
                    answer = await handler(request, owner or "")
                except sqlite3.Error as error:
                    self.node.disk_failed(error)
                    answer = refuse(503, f"the node is left out: {self.node.why}", {"Retry-After": str(_AGAIN_S)})
            self.responses[name, answer.status_code] += 1
            return answer

        return endpoint

    # --- jobs ---

    async def submit(self, request: Request, owner: str) -> Response:
        """Accepts a job: 202; 200 if it has ended. Equal requests are one job."""
        try:
            body = await read_body(request, MOST_BODY_BYTES)
            if body is None:
                return refuse(413, f"the body has more than {MOST_BODY_BYTES} bytes")
            asked = parse_request(body)
            job = job_of(asked, self.settings.world_size)
        except TimeoutError:
            return refuse(408, f"the body did not arrive within {_BODY_S:g} s")
        except ClientDisconnect:
            return refuse(400, "the body ended early")
        except RequestFault as fault:
            return _invalid(fault.faults)
        key = job_key(self.identify.identity(job).digest, asked.timeout)
        if (not self.queue.is_open(key) or asked.rerun) and (refused := self._no_room(owner)) is not None:
            return refused
        try:
            self.queue.add(key, asked, owner)
        except NotOwner as error:
            return refuse(403, str(error))
        self.node.work_came()
        document = self._document(key, owner)
        assert document is not None
        return _job(document, 200 if document.state in ENDED else 202, {"Location": f"/v1/jobs/{key}"})

    def _no_room(self, owner: str) -> Response | None:
        """Returns a refusal if no more jobs are accepted, of this owner or of anybody."""
        if self.node.condition in ("draining", "left_out"):
            why = {"draining": "the service is ending"}.get(self.node.condition, f"the node is left out: {self.node.why}")
            return refuse(503, why, {"Retry-After": str(_AGAIN_S)})
        limit = self.settings.queue_limit
        if (waiting := self.queue.queued()) >= limit:
            return refuse(429, f"the queue is full: {waiting} jobs wait", {"Retry-After": str(_AGAIN_S)})
        share = max(1, int(limit * self.settings.share)) if len(self.tokens.pairs) > 1 else limit
        if (mine := self.queue.queued(owner)) >= share:
            return refuse(429, f"the share of this token is full: {mine} of its jobs wait", {"Retry-After": str(_AGAIN_S)})
        return None

    async def show(self, request: Request, owner: str) -> Response:
        """The job; with ``wait=SECONDS`` once it has ended, or when the time is over."""
        key = request.path_params["key"]
        try:
            seconds = float(request.query_params.get("wait", 0))
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds <= LONGEST_POLL_S:
            return _invalid([FieldFault(field="wait", message=f"expected seconds, 0 to {LONGEST_POLL_S:g}")])
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while True:
            event = self.node.changes.of(key)
            state = self.queue.state(key)
            left = end - loop.time()
            if state is None or state in ENDED or left <= 0 or self.node.stopped:
                break
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(event.wait(), left)
        document = self._document(key, owner)
        return _unknown(key) if document is None else _job(document)

    async def cancel(self, request: Request, owner: str) -> Response:
        """Takes the request of this token back; the job is cancelled if no other token has asked for it."""
        key = request.path_params["key"]
        if self.queue.state(key) is None:
            return _unknown(key)
        if self.queue.cancel(key, owner):
            self.node.cancel(key)
        document = self._document(key, owner)
        assert document is not None
        return _job(document)

    async def events(self, request: Request, owner: str) -> Response:
        """Server-sent events: the job at each of its stages, then once it has ended."""
        key = request.path_params["key"]
        if self.queue.state(key) is None:
            return _unknown(key)

        async def stream() -> AsyncIterator[str]:
            told: tuple[str, str | None] | None = None
            while True:
                event = self.node.changes.of(key)
                try:
                    document = self._document(key, owner)
                except sqlite3.Error as error:
                    self.node.disk_failed(error)
                    return
                if document is None:
                    return
                if (now := (document.state, document.stage)) != told:
                    told = now
                    yield f"event: {document.state}\ndata: {document.model_dump_json(exclude_none=True)}\n\n"
                if document.state in ENDED or self.node.stopped:
                    return
                try:
                    await asyncio.wait_for(event.wait(), _HEARTBEAT_S)
                except TimeoutError:
                    yield ": still here\n\n"  # or a proxy would close the connection

        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(stream(), media_type="text/event-stream", headers=headers)

    def _document(self, key: str, owner: str) -> JobDocument | None:
        """The job; another token than the owner's does not see how the owner calls the candidate."""
        document = self.queue.get(key)
        if document is not None and document.result is not None and self.queue.owner(key) != owner:
            document.result["candidate"]["name"] = DEFAULT_NAME
        running = self.node.running.get(key)
        if document is not None and running is not None and document.state == "running":
            document.stage = running.stage
        return document

    # --- the service ---

    async def describe(self, request: Request, owner: str) -> Response:
        """Describes what judges here: the node, its settings, and the limits."""
        node = self.identify.node_of(self.settings.world_size)
        found = {
            "evaluator_version": __version__,
            "node": node.node_class.model_dump(),
            "description": str(node.node_class),
            "world_size": self.settings.world_size,
            "device": self.settings.device,
            "isolation": self.identify.isolation.tier,
            "rules_hash": node.rules_hash,
            "condition": self.node.condition,
            "why": self.node.why,
            "queue_limit": self.settings.queue_limit,
            "longest_poll_s": LONGEST_POLL_S,
        }
        return JSONResponse(found)

    async def health(self, request: Request, owner: str) -> Response:
        """200 while the node takes work or will soon; 503 if it is left out or ending."""
        good = self.node.condition in ("ready", "checking")
        return JSONResponse({"condition": self.node.condition, "why": self.node.why}, 200 if good else 503)

    async def metrics(self, request: Request, owner: str) -> Response:
        """Prometheus text."""
        text = render_metrics(self.queue, self.node, self.responses)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def openapi(self, request: Request, owner: str) -> Response:
        """The OpenAPI document of this service."""
        return JSONResponse(openapi_document())


async def read_body(request: Request, limit: int) -> bytes | None:
    """The body, or None as soon as it is larger; a chunked one has no length to look at. Raises TimeoutError."""
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > limit:
        return None
    parts, size = [], 0
    async with asyncio.timeout(_BODY_S):
        async for part in request.stream():
            size += len(part)
            if size > limit:
                return None
            parts.append(part)
    return b"".join(parts)


def refuse(status: int, error: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse(Refusal(error=error).model_dump(), status, headers)


def _invalid(faults: list[FieldFault]) -> Response:
    return JSONResponse(Refusal(error="the request cannot be carried out", fields=faults).model_dump(), 422)


def _unknown(key: str) -> Response:
    return refuse(404, f"there is no job {key[:64]!a}; submit it again")


def _job(document: JobDocument, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    body: dict[str, Any] = json.loads(document.model_dump_json())
    return JSONResponse(body, status, headers)


async def _refused(request: Request, error: Exception) -> Response:
    """Answers what starlette refuses itself: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    return refuse(error.status_code, error.detail, dict(error.headers or {}))
