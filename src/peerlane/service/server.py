"""Runs the service: a lock on its folder and its GPUs, a socket, signals, and the drain at its end."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import ipaddress
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from peerlane.common.files import lock, open_appendable
from peerlane.errors import FileRefused, HarnessError, MissingDependency, UsageError
from peerlane.settings import cache_dir

if TYPE_CHECKING:
    from peerlane.service.settings import ServiceSettings, Tokens

INSTALL = "pip install 'peerlane[serve]'"
_CLOSING_S = 5
"""for answers that are being sent at the end"""


def require_serve_extra() -> None:
    """Raises MissingDependency, which names the command, unless starlette and uvicorn are installed."""
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingDependency(f"the service needs {' and '.join(missing)}, not installed: {INSTALL}")


def is_loopback(host: str) -> bool:
    """True for an address that this machine alone can reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int, tokens: Tokens) -> socket.socket:
    """A bound socket; raises UsageError for one that cannot be, and for one that others could reach without a token."""
    if not tokens.pairs and not is_loopback(host):
        raise UsageError(
            f"--host {host}: others could submit code to this machine. Set PEERLANE_TOKEN or --token-file, or listen on 127.0.0.1"
        )
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        raise UsageError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port or --host") from None
    return listener


@contextlib.contextmanager
def exclusive(folder: Path, gpus: list[str]) -> Iterator[None]:
    """Holds the folder and the GPUs for one service; raises UsageError if another has one of them."""
    with contextlib.ExitStack() as stack:
        files = {folder / "serve.lock": f"the folder {folder}"}
        files |= {cache_dir() / f"serve-{uuid}.lock": f"the GPU {uuid}" for uuid in gpus}
        for path, what in files.items():
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(open_appendable(path, 0o600))
            except (FileRefused, OSError) as error:
                raise UsageError(f"{error}; choose another folder with --out") from None
            if not lock(file, 0.0):
                raise UsageError(f"another `peerlane serve` has {what}: end it, or choose another") from None
        yield


def serve(settings: ServiceSettings, tokens: Tokens, listener: socket.socket, gpus: list[str]) -> None:
    """Serves until SIGTERM or SIGINT; then the running evaluation ends or is put back, and no process is left."""
    require_serve_extra()
    import uvicorn

    from peerlane.evaluate.evaluator import Evaluator, Progress
    from peerlane.service.app import Service
    from peerlane.service.node import Node, NodeCheck
    from peerlane.service.queue import JobQueue

    def open_evaluator(progress: Progress) -> Evaluator:
        return Evaluator(**settings.evaluator_options(), progress=progress, out=settings.folder)

    with exclusive(settings.folder, gpus), listener:
        queue = JobQueue(settings.folder)
        identify = Evaluator(**settings.evaluator_options())
        tier = identify.isolation.tier
        if tier == "L0" and settings.isolation is None:
            print("candidates are not confined: this machine gives no isolation L1, see docs/isolation.md", file=sys.stderr, flush=True)
        if os.geteuid() == 0:
            print(
                "peerlane serve runs as root: a candidate that escapes its confinement has all rights on this machine. Run it as an "
                "ordinary user without secrets, see SECURITY.md",
                file=sys.stderr,
                flush=True,
            )
        node = Node(queue, open_evaluator, NodeCheck(settings.device, tier) if settings.check else None)
        service = Service(settings, tokens, queue, node, identify, lambda: setattr(server, "should_exit", True))
        config = uvicorn.Config(
            service.application(),
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=_CLOSING_S,
            server_header=False,
            limit_concurrency=4096,
        )

        ending: list[asyncio.Task[None]] = []

        class Server(uvicorn.Server):
            """Answers until the running evaluation has ended."""

            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                await super().startup(sockets)
                host, port = listener.getsockname()[:2]
                print(f"listening on http://{f'[{host}]' if ':' in host else host}:{port}", file=sys.stderr, flush=True)

            def handle_exit(self, sig: int, frame: FrameType | None) -> None:
                seconds = 0.0 if node.condition == "draining" else settings.drain_s  # a second signal ends the wait
                loop = asyncio.get_running_loop()
                loop.call_soon_threadsafe(lambda: ending.append(loop.create_task(self.drain(seconds))))

            async def drain(self, seconds: float) -> None:
                await node.drain(seconds)
                self.should_exit = True

        server = Server(config)
        try:
            server.run(sockets=[listener])
        finally:
            queue.close()
        if node.ended_by is not None:
            raise HarnessError(f"the service ended: {type(node.ended_by).__name__}: {node.ended_by}") from node.ended_by
