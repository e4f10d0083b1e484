"""The client of a service: an :class:`.Evaluator` that is elsewhere. Standard library and pydantic only; no torch."""

import asyncio
import contextlib
import http.client
import json
import logging
import random
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from peerlane.errors import HarnessError, UsageError
from peerlane.evaluate.candidates import CandidateFile, candidate_info, one_candidate
from peerlane.results.result import Result
from peerlane.results.store import ResultsStore
from peerlane.settings import service_token

_POLL_S = 30.0
_CONNECT_S = 30.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 30.0
_ASYNC_CALLS = 64
"""at a time and URL; more wait here"""
_MOVE_ON_S = 20.0
"""without an answer, after which a job goes to another URL"""
_SILENT_S = 5.0
"""without any answer, after which a warning is logged"""
_log = logging.getLogger("peerlane")
_BROKEN = (OSError, http.client.HTTPException, ValueError)
"""no connection, one that broke in the middle of an answer, or an answer that is no JSON"""
_OPTIONS = ("modes", "cases", "track", "variant", "world_size", "timeout", "priority", "rerun")


class ServiceFault(HarnessError):
    """The service cannot be reached, or has no verdict; says nothing about the candidate."""


class _NoAnswer(ServiceFault):
    """A service does not answer."""


class _Stop(Exception):
    """The call was cancelled from another thread."""


class _Call:
    """One call, which another thread may stop."""

    def __init__(self, url: str) -> None:
        self.stopped = threading.Event()
        self.url = url
        self.job: str | None = None
        self.begun = False


@dataclass(frozen=True)
class _Answer:
    status: int
    body: dict[str, Any]
    retry_after: float | None = None


class Client:
    """Judges candidates on a service: the calls of :class:`.Evaluator`, from any number of threads and tasks.

    Args:
        url: of ``peerlane serve``, such as ``http://127.0.0.1:8300``, or a list of such URLs, among which jobs are spread: each goes to
            the one where the fewest of this client's jobs wait, and to another one if that does not answer.
        token: by default PEERLANE_TOKEN, or the one in the file that PEERLANE_TOKEN_FILE names.
        patience: seconds without any answer after which a call gives up.
        longest: seconds after which a call gives up in any case, the wait in the service's queue included.
        options: of every call that does not say otherwise: ``presets``, ``modes``, ``cases``, ``track`` (``custom``, if left out),
            ``variant``, ``timeout``, ``priority``, ``rerun``.

    Calls raise :class:`UsageError` for what the service refuses, and :class:`ServiceFault` if there is no verdict.
    """

    def __init__(
        self, url: str | Sequence[str], token: str | None = None, *, patience: float = 600.0, longest: float = 86_400.0, **options: Any
    ) -> None:
        self.urls = tuple(dict.fromkeys(_checked(item) for item in ([url] if isinstance(url, str) else url)))
        if not self.urls:
            raise UsageError("url=[]: expected at least one address such as http://127.0.0.1:8300")
        self.url = self.urls[0]
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if (found := token or service_token()) is not None:
            self._headers["Authorization"] = f"Bearer {found}"
        self._patience, self._longest, self._options = patience, longest, _known(options)
        self._store: ResultsStore | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._wanted: Counter[tuple[str, str]] = Counter()
        """by URL and job, calls that wait for it"""
        self._taken_back: set[tuple[str, str]] = set()
        self._calls: set[_Call] = set()

    def storing(self, folder: Path) -> Self:
        """This client, which from now on adds its results to the folder's ``results.jsonl``, too."""
        self._store = ResultsStore(folder)
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown()

    # --- the calls of an Evaluator ---

    def evaluate(
        self,
        problem: int | None = None,
        source: str | bytes | None = None,
        *,
        path: str | Path | None = None,
        candidate: CandidateFile | None = None,
        name: str = "candidate",
        **changes: Any,
    ) -> Result:
        """The result of one candidate, as :meth:`.Evaluator.evaluate` gives it."""
        return self._judge(*self._body(one_candidate(problem, source, path, candidate, name), changes), _Call(self.url))

    async def evaluate_async(self, problem: int | None = None, source: str | bytes | None = None, **request: Any) -> Result:
        """The same, awaited. A cancelled task takes its request back."""
        path, candidate = request.pop("path", None), request.pop("candidate", None)
        chosen = one_candidate(problem, source, path, candidate, request.pop("name", "candidate"))
        call = _Call(self.url)
        future = self._pool().submit(self._judge, *self._body(chosen, request), call)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._stop(call)
            raise

    def evaluate_all(self, candidates: Sequence[CandidateFile], **changes: Any) -> list[Result]:
        """One result for every candidate and preset, in order; they wait in the service's queue together."""
        presets = _known(changes).get("presets") or self._options.get("presets", ("pkb",))
        calls = [self._body(item, {**changes, "presets": (preset,)}) for item in candidates for preset in presets]
        made = [_Call(self.url) for _ in calls]
        futures = [self._pool().submit(self._judge, body, item, call) for (body, item), call in zip(calls, made, strict=True)]
        try:
            return [future.result() for future in futures]
        except BaseException:
            for call in made:
                self._stop(call)
            raise

    def node(self) -> dict[str, Any]:
        """Describes what judges there, at the first URL: node class, ranks, isolation, evaluator version, limits."""
        return self._ask("GET", "/v1/node", None, _Call(self.url)).body

    # --- one job ---

    def _body(self, candidate: CandidateFile, changes: Mapping[str, Any]) -> tuple[dict[str, Any], CandidateFile]:
        options = {**self._options, **_known(changes)}
        preset = _one_preset(options.pop("presets", ("pkb",)))
        if candidate.is_reference:
            raise UsageError("the reference is no text that can be sent: evaluate it on the node itself")
        if candidate.problem is None:
            raise UsageError(f"{candidate.name} does not say which problem it solves: give problem=NUMBER")
        source = candidate.source()
        assert source is not None
        try:
            text = source.encode("latin-1").decode()
        except UnicodeDecodeError as error:
            raise UsageError(f"{candidate.name}: expected UTF-8, got {error.object[error.start : error.end]!r}") from None
        if candidate.track is not None:
            options["track"] = candidate.track
        chosen = {name: value for name, value in options.items() if value is not None}
        name = candidate.name.rsplit("/", 1)[-1][:200]
        return {"problem": candidate.problem, "source": text, "name": name, "preset": preset, **chosen}, candidate

    def _judge(self, body: dict[str, Any], candidate: CandidateFile, call: _Call) -> Result:
        """The result, from the first URL that gives one."""
        with self._lock:
            self._calls.add(call)
        try:
            tried: list[str] = []
            while True:
                with self._lock:
                    left = [url for url in self.urls if url not in tried]
                    others = [other.url for other in self._calls if other is not call and other.begun]
                    call.url, call.begun = min(left, key=lambda url: (others.count(url), random.random())), True
                tried.append(call.url)
                try:
                    job = self._job(body, call, self._patience if len(left) == 1 else min(self._patience, _MOVE_ON_S))
                    break
                except _NoAnswer:
                    if len(left) == 1:
                        raise
        except _Stop:
            raise ServiceFault("cancelled here") from None
        finally:
            self._leave(call)
            with self._lock:
                self._calls.discard(call)
        if job["result"] is None:
            raise ServiceFault(f"the job {job['id']} {job['state']} on {call.url}: {job['error']}")
        result = Result.model_validate({**job["result"], "environment": job["environment"] or {}})
        result = result.model_copy(update={"candidate": candidate_info(candidate)})
        if self._store is not None:
            with self._lock:
                if not self._store.has(result.identity) or self._store.find(result.identity, candidate.name) != result:
                    self._store.append(result)
        return result

    def _job(self, body: dict[str, Any], call: _Call, patience: float) -> dict[str, Any]:
        """Submits the job and waits for its end. Submitting again is safe, for equal requests are one job."""
        give_up = time.monotonic() + self._longest
        try:
            job = self._submit(body, call, patience)
            while job["state"] in ("queued", "running"):
                if time.monotonic() > give_up:
                    raise ServiceFault(f"no verdict of {call.url} within {self._longest:g} s; the job {job['id']} is {job['state']}")
                answer = self._ask("GET", f"/v1/jobs/{job['id']}?wait={_POLL_S:g}", None, call, patience)
                # A service that lost its folder does not know the job any more.
                job = answer.body if answer.status == 200 else self._submit(body, call, patience)
                if job["state"] == "cancelled" and (call.url, job["id"]) in self._taken_back:  # by another call, while this was under way
                    self._taken_back.discard((call.url, job["id"]))
                    job = self._submit(body, call, patience)
            return job
        except _NoAnswer:
            self._leave(call)
            raise

    def _submit(self, body: dict[str, Any], call: _Call, patience: float) -> dict[str, Any]:
        job = self._ask("POST", "/v1/jobs", json.dumps(body).encode(), call, patience).body
        with self._lock:
            if call.job is None:
                call.job = job["id"]
                self._wanted[call.url, job["id"]] += 1
        return job

    def _leave(self, call: _Call) -> bool:
        """The call wants its job no more. True if no other call of this client does."""
        with self._lock:
            job, call.job = call.job, None
            if job is None:
                return False
            key = call.url, job
            self._wanted[key] -= 1
            last = self._wanted[key] == 0
            if last:
                del self._wanted[key]
            return last

    def _stop(self, call: _Call) -> None:
        """Ends a call from another thread; its job is cancelled, unless another call wants it or the service is not there."""
        call.stopped.set()
        job = call.job
        if job is not None and self._leave(call):
            self._pool().submit(self._take_back, call.url, job)

    def stop(self) -> None:
        """Ends all calls from another thread, and cancels their jobs."""
        with self._lock:
            calls = list(self._calls)
        for call in calls:
            self._stop(call)

    def _take_back(self, url: str, job: str) -> None:
        self._taken_back.add((url, job))
        with contextlib.suppress(*_BROKEN):
            self._send("DELETE", f"{url}/v1/jobs/{job}", None)

    def _ask(self, method: str, path: str, body: bytes | None, call: _Call, patience: float | None = None) -> _Answer:
        """The answer, after as many tries as it takes: with back-off, and as the service asks with Retry-After."""
        url, patience = call.url, self._patience if patience is None else patience
        heard, begin, pause = time.monotonic(), time.monotonic(), _FIRST_PAUSE_S
        why, told = "", False
        while True:
            if call.stopped.is_set():
                raise _Stop
            answer = None
            try:
                answer = self._send(method, url + path, body)
            except _BROKEN as error:
                why = str(getattr(error, "reason", error))
            if answer is not None:
                if answer.status not in (408, 429, 500, 502, 503, 504):
                    return _accepted(url, answer)
                why = f"{answer.status}: {answer.body.get('error')}"
                if answer.status == 429:
                    heard = time.monotonic()  # it is there, and has much to do
            now = time.monotonic()
            if now - heard > patience or now - begin > self._longest:
                raise _NoAnswer(f"{url} does not answer: {why}; tried for {now - begin:.0f} s")
            if answer is None and not told and now - heard > _SILENT_S:
                told = True
                _log.warning("%s does not answer (%s): is `peerlane serve` running there? Trying for up to %.0f s", url, why, patience)
            wanted = answer.retry_after if answer is not None and answer.retry_after is not None else pause
            call.stopped.wait(max(0.05, min(wanted, _LONGEST_PAUSE_S) * random.uniform(0.5, 1.0)))
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _send(self, method: str, url: str, body: bytes | None) -> _Answer:
        request = urllib.request.Request(url, data=body, headers=self._headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=_POLL_S + _CONNECT_S) as found:
                return _Answer(found.status, json.load(found))
        except urllib.error.HTTPError as error:
            with error:
                retry_after = error.headers.get("Retry-After", "")
                try:
                    told = json.load(error)
                except ValueError:  # of a proxy
                    told = {"error": error.reason}
                return _Answer(error.code, told, float(retry_after) if retry_after.isdecimal() else None)

    def _pool(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(_ASYNC_CALLS * len(self.urls), thread_name_prefix="peerlane-client")
            return self._threads


def _checked(url: str) -> str:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"url={url!r}: expected an address such as http://127.0.0.1:8300")
    return url.rstrip("/")


def _accepted(url: str, answer: _Answer) -> _Answer:
    """The answer; raises UsageError for one that says that the request itself is wrong."""
    if answer.status == 401:
        raise UsageError(f"{url} does not accept the token: set PEERLANE_TOKEN or PEERLANE_TOKEN_FILE, or give token=")
    if answer.status in (400, 403, 405, 413, 422):
        fields = "; ".join(f"{item['field']}: {item['message']}" for item in answer.body.get("fields", ()))
        raise UsageError(f"{url} refuses the request: {fields or answer.body.get('error')}")
    return answer


def checked_options(options: Mapping[str, Any]) -> None:
    """Raises UsageError for options of a request that do not exist, and for several presets."""
    presets = _known(options).get("presets")
    if presets is not None:
        _one_preset(presets)


def _one_preset(presets: Any) -> str:
    if isinstance(presets, str) or len(presets) != 1:
        raise UsageError(f"presets={presets!r}: expected one preset, such as ('small',); use evaluate_all for several")
    return str(presets[0])


def _known(options: Mapping[str, Any]) -> dict[str, Any]:
    if "timelines" in options:
        raise UsageError("a service sends no timelines: record them on the node itself, with `peerlane trace`")
    if unknown := options.keys() - {*_OPTIONS, "presets"}:
        raise UsageError(f"unknown options: {', '.join(sorted(unknown))}; expected {', '.join(('presets', *_OPTIONS))}")
    return dict(options)
