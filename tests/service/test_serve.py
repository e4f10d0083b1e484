"""`peerlane serve` at work on CPU ranks: killed in the middle, told to end, and checked before it takes work."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import peerlane as pl
from command_line import Peerlane
from e2e.runs import MARK, RIGHT, SLEEPS, marked_processes, wait_for
from peerlane.errors import UsageError
from peerlane.results.reader import read_results
from peerlane.service.client import Client
from peerlane.service.node_check import CHEATS, check_node
from peerlane.service.server import exclusive, listen, serve
from peerlane.service.settings import ServiceSettings, Tokens
from service.stand_in import TOKEN

SOURCES = {
    **{f"{RIGHT}# {number}\n": "correct" for number in range(3)},
    **{f"def solution(tensor):\n    return tensor.clone()  # {number}\n": "wrong_result" for number in range(5)},
    **{f"def solve(tensor): ...  # {number}\n": "import_error" for number in range(8)},
}


@contextmanager
def served(folder: Path, port: int, *options: str) -> Iterator[subprocess.Popen[str]]:
    """The command, once it listens; killed at the end if it still runs."""
    command = [sys.executable, "-P", "-m", "peerlane", "serve", "--port", str(port), "--out", str(folder), "--world-size", "2"]
    environment = {**os.environ, "PEERLANE_TOKEN": TOKEN, MARK: folder.name}
    process = subprocess.Popen(
        [*command, "--device", "cpu", "--no-check", *options], env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stderr is not None
    try:
        while not (line := process.stderr.readline()).startswith("listening"):
            assert line, "the service ended before it listened"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.mark.parametrize(("uid", "warnings"), [(0, 1), (1000, 0)])
def test_a_service_of_root_warns_once(
    uid: int, warnings: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    monkeypatch.setattr("uvicorn.Server.run", lambda *_, **__: None)
    serve(ServiceSettings(tmp_path, world_size=2, isolation="L0", check=False), Tokens(), listen("127.0.0.1", 0, Tokens()), [])
    assert capfd.readouterr().err.count("runs as root") == warnings


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.slow
def test_sixty_four_clients_and_a_kill_lose_nothing(tmp_path: Path) -> None:
    """Every job that was accepted is judged, none twice, and the clients notice nothing but the time that it took."""
    folder, port = tmp_path / f"killed-{os.getpid()}", free_port()
    asked = [source for source in SOURCES for _ in range(4)]

    async def ask() -> list[pl.Result]:
        with Client(f"http://127.0.0.1:{port}", TOKEN, presets=("small",), modes=(), track="open", patience=120) as judge:
            return await asyncio.gather(*[judge.evaluate_async(1, source, name=f"c{number}") for number, source in enumerate(asked)])

    async def kill_and_restart() -> list[pl.Result]:
        with served(folder, port):
            clients = asyncio.create_task(ask())
            while len(stored(folder)) < 3:
                await asyncio.sleep(0.02)
        with served(folder, port) as second:
            results = await clients
            second.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(second.wait, 30) == 0
        return results

    results = asyncio.run(kill_and_restart())
    assert [(item.candidate.name, item.verdict.kind) for item in results] == [(f"c{n}", SOURCES[source]) for n, source in enumerate(asked)]
    judged = Counter(item.candidate.sha256 for item in read_results(folder))
    assert len(judged) == len(SOURCES) and set(judged.values()) == {1}
    wait_for(lambda: marked_processes(folder.name) == [], 10, "the end of all ranks")


@pytest.mark.slow
def test_sigterm_finishes_what_runs_and_keeps_what_waits(tmp_path: Path) -> None:
    """An evaluation that takes longer than the drain is put back, and is judged after the next start."""
    folder, port = tmp_path / f"drained-{os.getpid()}", free_port()

    async def both() -> tuple[pl.Result, pl.Result]:
        with Client(f"http://127.0.0.1:{port}", TOKEN, presets=("small",), modes=(), track="open", patience=120) as judge:
            with served(folder, port, "--drain", "0.5") as first:
                hangs = asyncio.create_task(judge.evaluate_async(1, SLEEPS, timeout=4.0))
                while (await asyncio.to_thread(judge.node))["condition"] != "ready":
                    await asyncio.sleep(0.05)
                await asyncio.sleep(1.0)
                waits = asyncio.create_task(judge.evaluate_async(1, RIGHT))
                await asyncio.sleep(0.3)
                first.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(first.wait, 30) == 0
            with served(folder, port):
                return await hangs, await waits

    hung, right = asyncio.run(both())
    assert hung.verdict.kind == "hang" and right.correct
    assert len(read_results(folder)) == 2


def stored(folder: Path) -> list[str]:
    """Lines of results."""
    file = folder / "results.jsonl"
    return re.findall(r'"type":"result"', file.read_text()) if file.exists() else []


@pytest.mark.slow
def test_a_node_is_checked_by_cheats_and_the_reference() -> None:
    report = check_node("cpu", cheats=(CHEATS[0], "no_such_cheat"))
    assert report.cheats == 1 and report.faults == ("1 of 2 cheats were judged",) and "left out" in str(report)


def test_one_service_has_a_folder(tmp_path: Path) -> None:
    with exclusive(tmp_path, []), pytest.raises(UsageError, match=r"another `peerlane serve` has the folder"), exclusive(tmp_path, []):
        pass


def test_a_service_may_judge_on_emulated_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peerlane: Peerlane) -> None:
    found: list[ServiceSettings] = []

    def end_at_once(settings: ServiceSettings, tokens: Tokens, listener: socket.socket, gpus: list[str]) -> None:
        listener.close()
        found.append(settings)

    monkeypatch.setattr("peerlane.service.server.serve", end_at_once)
    peerlane("serve", "--device", "emulated", "--judges", "3", "--port", "0", "--out", str(tmp_path))
    assert (found[0].device, found[0].world_size) == ("emulated", 4)
    assert found[0].evaluator_options()["pool_settings"].judged_at_a_time == 3
