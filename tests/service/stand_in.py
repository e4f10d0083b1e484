"""A service on loopback whose evaluator is a stand-in: it takes verdicts from comments in the sources. For tests of the protocol alone."""

import asyncio
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import uvicorn

from e2e.runs import wait_for
from peerlane.errors import RunStopped
from peerlane.evaluate.candidates import candidate_info, candidate_text
from peerlane.evaluate.evaluator import Evaluator
from peerlane.results.result import ProblemInfo, Result
from peerlane.results.verdict import HarnessFailure, NotRun
from peerlane.service.app import Service
from peerlane.service.node import Node, NodeCheck
from peerlane.service.queue import JobQueue
from peerlane.service.server import listen
from peerlane.service.settings import ServiceSettings, Tokens
from sample_results import hung, on_cpu, own_audit, wrong

TOKEN = "a-token-of-the-tests"
OTHER = "another-token-of-the-tests"
TOKENS = Tokens((("one", TOKEN), ("two", OTHER)))


class StandIn:
    """Judges by comments: ``# wrong``, ``# hang``, ``# harness``, ``# harness once``, ``# not run``, ``# busy``, ``# raise``,
    ``# not stored once``, ``# sleep SECONDS``."""

    def __init__(self, judged: Counter[str]) -> None:
        self.judged, self.gave_up, self.capacity = judged, None, 1

    def __enter__(self) -> "StandIn":
        return self

    def __exit__(self, *_: object) -> None: ...

    async def evaluate_async(
        self, problem: int, source: str, *, name: str, presets: tuple[str], track: str, tell: Callable[[str], None], **asked: Any
    ) -> Result:
        self.judged[source] += 1
        tell("correctness")
        if (seconds := re.search(r"# sleep ([\d.]+)", source)) is not None:
            await asyncio.sleep(float(seconds[1]))
        if "# raise" in source:
            raise OSError("the stand-in fell over")
        if "# not stored once" in source and self.judged[source] == 1:
            raise RunStopped("cannot append to results.jsonl: No space left on device", [])
        info = candidate_info(candidate_text(source, problem, name))
        audit = {"audit": own_audit()} if track == "custom" else {}
        same = {
            "candidate": info,
            "problem": ProblemInfo(id=problem, slug="allreduce", variant="default"),
            "preset": presets[0],
            "track": track,
        }
        if "# harness" in source and not ("once" in source and self.judged[source] > 1):
            return on_cpu(**same, verdict=HarnessFailure(phase="spawn", message="no ranks"), speed=())
        if "# busy" in source:
            return on_cpu(**same, verdict=NotRun(missing="time: a busy machine"), speed=(), flags=("overloaded",))
        if "# not run" in source:
            return on_cpu(**same, verdict=NotRun(missing="a GPU"), speed=())
        made = partial(wrong, device="cpu") if "# wrong" in source else partial(hung, device="cpu") if "# hang" in source else on_cpu
        return made(**same, **audit)


@dataclass
class Running:
    """A service that runs, and what its evaluator has judged."""

    url: str
    service: Service
    judged: Counter[str] = field(default_factory=Counter)
    is_up: Callable[[], bool] = lambda: True


@contextmanager
def serving(folder: Path, tokens: Tokens = TOKENS, check: bool = False, **limits: Any) -> Iterator[Running]:
    """A service in a thread."""
    settings = ServiceSettings(folder, world_size=2, check=check, **limits)
    judged: Counter[str] = Counter()
    queue = JobQueue(folder)
    node = Node(queue, lambda _: cast(Evaluator, StandIn(judged)), NodeCheck("cpu", "L0") if check else None)
    identify = Evaluator(2, "cpu", isolation="L0")
    service = Service(settings, tokens, queue, node, identify, lambda: setattr(server, "should_exit", True))
    with listen("127.0.0.1", 0, tokens) as listener:
        server = uvicorn.Server(uvicorn.Config(service.application(), log_level="error", timeout_graceful_shutdown=2))
        thread = threading.Thread(target=lambda: server.run(sockets=[listener]), daemon=True)
        thread.start()
        try:
            wait_for(lambda: server.started, 20, "the service")
            yield Running(f"http://127.0.0.1:{listener.getsockname()[1]}", service, judged, thread.is_alive)
        finally:
            server.should_exit = True
            thread.join(20)
            queue.close()
    assert not thread.is_alive()
