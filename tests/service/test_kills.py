"""A service that is killed at a hundred random moments: none of its jobs is lost, and none judged twice."""

import itertools
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from peerlane.evaluate import evaluator
from peerlane.evaluate.plan import Job
from peerlane.results.reader import ResultsReader
from peerlane.results.result import Result
from peerlane.service.client import Client, ServiceFault
from peerlane.service.server import listen, serve
from peerlane.service.settings import ServiceSettings, Tokens

_KILLS, _CLIENTS, _TOKEN = 100, 16, "a-token-of-the-tests"
_FAILED = {"kind": "import_error", "phase": "import", "rank": 0, "message": "no solution", "trace": ""}


class WithoutRanks(evaluator.Evaluator):
    """Gives every candidate the same verdict after some milliseconds. Queue, store and locks are those of a service."""

    def __enter__(self) -> "WithoutRanks":
        return self

    def judge(
        self, jobs: Sequence[Job], limit: object = None, tell: object = None, all_begun: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[Job, Result]]:  # type: ignore[override]
        all_begun()
        for job, result in self._not_run(jobs, "ranks"):
            time.sleep(random.uniform(0.0, 0.02))
            yield job, Result.model_validate({**result.model_dump(), "verdict": _FAILED})


def serve_without_ranks(folder: Path, port: int, ready: threading.Event) -> None:
    evaluator.Evaluator = WithoutRanks  # type: ignore[misc]
    tokens = Tokens((("one", _TOKEN),))
    listener = listen("127.0.0.1", port, tokens)
    ready.set()
    serve(ServiceSettings(folder, world_size=2, check=False, isolation="L0"), tokens, listener, [])


@pytest.mark.long
def test_a_hundred_kills_lose_and_double_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # the fork server would not find what it is to import before it forks
    monkeypatch.setattr("peerlane.service.client._LONGEST_PAUSE_S", 0.1)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "uvicorn", "peerlane.service.app"])
    with listen("127.0.0.1", 0, Tokens()) as probe:
        port = probe.getsockname()[1]
    done = threading.Event()
    answered: list[str] = []

    def start() -> ForkServerProcess:
        ready = context.Event()
        process = context.Process(target=serve_without_ranks, args=(tmp_path, port, ready))
        process.start()
        assert ready.wait(60)
        return process

    def ask(number: int) -> None:
        with Client(f"http://127.0.0.1:{port}", _TOKEN, presets=("small",), modes=(), patience=120) as judge:
            for turn in itertools.count():
                if done.is_set():
                    return
                source = f"# {number} {turn} {'x' * random.choice((10, 100_000))}"
                while True:
                    try:
                        assert judge.evaluate(1, source, name=f"c{number}_{turn}").verdict.kind == "import_error"
                        break
                    except ServiceFault as fault:  # it ended three services by chance; the same request starts anew
                        if "3 times" not in str(fault):
                            raise
                answered.append(f"c{number}_{turn}")

    with ThreadPoolExecutor(_CLIENTS) as clients:
        asking = [clients.submit(ask, number) for number in range(_CLIENTS)]
        for _ in range(_KILLS):
            process = start()
            time.sleep(random.uniform(0.0, 1.5))
            process.kill()
            process.join()
            assert process.exitcode == -signal.SIGKILL
        done.set()
        process = start()
        for future in asking:
            future.result(120)
        process.terminate()
        process.join(30)
    reader = ResultsReader(tmp_path / "results.jsonl")
    stored = Counter(result.candidate.name for result in reader.results)
    print(f"{len(answered)} jobs, {len(reader.results)} results, {_KILLS} kills")
    assert reader.notes() == [] and len(answered) > _KILLS
    assert stored == Counter(answered)
