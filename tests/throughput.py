"""Candidates an hour through ``peerlane eval``, an Evaluator or a service, and each verdict against what the generator knows.

    python tests/throughput.py --device cpu --world-size 2 --preset small --kinds pytorch --slice 48
    python tests/throughput.py --device cuda --world-size 4 --kinds load_inline --slice 48 --way service

With ``--cut-off`` the slice ends after so many seconds, and what is judged by then counts. Where there are several GPUs, each can have a
slice of its own: ``CUDA_VISIBLE_DEVICES=1 taskset -c 16-31 python tests/throughput.py ...``.

Not a test: it takes minutes. Builds count; the sources of every seed are new, so no candidate's cache is warm.
"""

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import peerlane as pl
from made_candidates import KINDS, MadeCandidate, make_candidates
from peerlane.evaluate.candidates import CandidateFile, candidate_text
from peerlane.evaluate.evaluator import Silent
from peerlane.results.reader import read_results
from peerlane.settings import PoolSettings

Verdicts = list[tuple[str, str] | None]
_WARM = "import torch.distributed as dist\n\n\ndef solution(tensor):\n    out = tensor.clone()\n    dist.all_reduce(out)\n    return out\n"


class GpuBusy:
    """The mean of what nvidia-smi calls utilisation of the visible GPUs, while its block runs; None without a GPU."""

    def __init__(self) -> None:
        self.share: float | None = None
        self._seen: list[float] = []
        self._end = threading.Event()

    def _look(self) -> None:
        command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
        command += [f"--id={visible}"] if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) else []
        while not self._end.wait(0.5):
            self._seen.append(statistics.mean(map(float, subprocess.run(command, capture_output=True, text=True).stdout.split())))

    def __enter__(self) -> "GpuBusy":
        self._thread = threading.Thread(target=self._look) if shutil.which("nvidia-smi") else None
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join()
        self.share = statistics.mean(self._seen) / 100 if self._seen else None


class TimeIsUp(BaseException):
    """The slice is cut off; what is judged by then counts."""


class Finished(Silent):
    """Keeps the results as they come."""

    def __init__(self) -> None:
        self.results: dict[str, pl.Result] = {}
        self.last_verdict = 0.0
        """when the last one was judged that did not hang"""

    def finished(self, result: pl.Result) -> None:
        self.results[result.candidate.name] = result
        if result.verdict.kind != "hang":
            self.last_verdict = time.monotonic()


def by_evaluator(asked: argparse.Namespace, work: list[MadeCandidate], busy: GpuBusy) -> tuple[Verdicts, float]:
    """Judges in this process; the ranks are up before the clock starts. After ``--cut-off`` seconds those that are judged count."""
    options = {"presets": (asked.preset,), "modes": asked.modes, "cases": asked.cases, "timeout": asked.timeout}
    heard = Finished()

    def cut_off(*_: object) -> None:
        raise TimeIsUp

    with pl.Evaluator(asked.world_size, asked.device, progress=heard, **asked.options) as evaluator:
        evaluator.evaluate(1, _WARM, **{**options, "timeout": None})
        signal.signal(signal.SIGALRM, cut_off)
        begin = time.monotonic()
        with busy, contextlib.suppress(TimeIsUp):
            signal.alarm(asked.cut_off)
            evaluator.evaluate_all([_file(number, item) for number, item in enumerate(work)], problems="1", **options)
        signal.alarm(0)
        seconds = time.monotonic() - begin
        asked.but_hangs = round(heard.last_verdict - begin, 2)
    found = [heard.results.get(_file(number, item).name) for number, item in enumerate(work)]
    return _told(asked, work, found), seconds


def _told(asked: argparse.Namespace, work: list[MadeCandidate], found: list[pl.Result | None]) -> Verdicts:
    """Returns the verdicts, and keeps what results say of stages and speeds."""
    results = [(item.fate, result) for item, result in zip(work, found, strict=True) if result is not None]
    names = dict.fromkeys(name for _, result in results for name in result.stage_seconds)
    asked.stages = {name: round(statistics.mean(result.stage_seconds.get(name, 0.0) for _, result in results), 2) for name in names}
    by_fate: dict[str, list[float]] = {}
    for fate, result in results:
        by_fate.setdefault(fate, []).append(sum(seconds for name, seconds in result.stage_seconds.items() if name != "build"))
    spread = (min, statistics.median, max)
    asked.by_fate = {fate: [round(of(seconds), 2) for of in spread] for fate, seconds in by_fate.items()}
    asked.speeds = Counter(f"{speed.mode} {speed.status}" for _, result in results for speed in result.speed)
    return [None if result is None else (result.verdict.kind, result.verdict.reason) for result in found]


def _file(number: int, item: MadeCandidate) -> CandidateFile:
    return candidate_text(item.source, 1, f"{number}_{item.fate}")


def by_eval(asked: argparse.Namespace, work: list[MadeCandidate], busy: GpuBusy) -> tuple[Verdicts, float]:
    """Judges a folder with the command; its start counts."""
    with tempfile.TemporaryDirectory() as folder:
        names = [f"1_{number:03}_{item.kind.replace('load_inline', 'cuda').replace('nvrtc', 'cuda')}" for number, item in enumerate(work)]
        for name, item in zip(names, work, strict=True):
            (Path(folder) / f"{name}.py").write_text(item.source)
        command = [sys.executable, "-m", "peerlane", "eval", folder, "--preset", asked.preset, "--world-size", str(asked.world_size)]
        command += ["--device", asked.device, "--cases", asked.cases, "--out", f"{folder}/out"]
        command += ["--mode", ",".join(asked.modes or ("eager",))]
        command += [] if asked.timeout is None else ["--timeout", str(asked.timeout)]
        begin = time.monotonic()
        with busy:
            ran = subprocess.Popen(command, stdout=subprocess.DEVNULL)
            try:
                ran.wait(asked.cut_off or None)
            except subprocess.TimeoutExpired:
                ran.send_signal(signal.SIGINT)
        seconds = time.monotonic() - begin
        ran.wait()
        results = {result.candidate.name: result for result in read_results(Path(folder) / "out" / "results.jsonl")}
    return _told(asked, work, [results.get(name) for name in names]), seconds


def by_service(asked: argparse.Namespace, work: list[MadeCandidate], busy: GpuBusy) -> tuple[Verdicts, float]:
    """Sends all to a service of this machine at once; the service is up before the clock starts."""
    token = secrets.token_hex(16)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "peerlane", "serve", "--port", str(port), "--out", folder, "--no-check"]
        command += ["--world-size", str(asked.world_size), "--device", asked.device]
        command += [] if asked.judged_at_a_time is None else ["--judges", str(asked.judged_at_a_time)]
        service = subprocess.Popen(command, env={**os.environ, "PEERLANE_TOKEN": token})
        try:
            options: dict[str, Any] = {"presets": (asked.preset,), "modes": asked.modes, "cases": asked.cases, "track": "open"}
            options |= {} if asked.timeout is None else {"timeout": asked.timeout}
            with pl.Client(f"http://127.0.0.1:{port}", token, **options) as client:
                client.evaluate(1, _WARM)
                begin = time.monotonic()
                with busy:
                    found = asyncio.run(_ask_together(client, [_file(number, item) for number, item in enumerate(work)], asked.cut_off))
                return _told(asked, work, found), time.monotonic() - begin
        finally:
            service.terminate()
            service.wait(150)


async def _ask_together(client: pl.Client, files: list[CandidateFile], cut_off: int) -> list[pl.Result | None]:
    tasks = [asyncio.create_task(client.evaluate_async(candidate=file)) for file in files]
    ended, late = await asyncio.wait(tasks, timeout=cut_off or None)
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    return [task.result() if task in ended else None for task in tasks]


WAYS = {"evaluator": by_evaluator, "eval": by_eval, "service": by_service}


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    """Judges one slice; its figures."""
    work = make_candidates(asked.slice, asked.kinds, asked.seed, asked.hangs)
    busy = GpuBusy()
    verdicts, seconds = WAYS[asked.way](asked, work, busy)
    judged = [(item, found) for item, found in zip(work, verdicts, strict=True) if found is not None]
    wrong = [(item.kind, item.fate, *found) for item, found in judged if not item.judged_rightly(found[0])]
    return {
        "way": asked.way,
        "device": asked.device,
        "kinds": asked.kinds,
        "candidates": len(work),
        "fates": Counter(item.fate for item in work),
        "hangs": asked.hangs,
        "modes": asked.modes,
        "timeout": asked.timeout,
        "options": {name: vars(value) for name, value in asked.options.items()},
        "seconds": round(seconds, 2),
        "seconds_of_all_but_hangs": asked.but_hangs,
        "judged": len(judged),
        "an_hour": round(3600 * len(judged) / seconds),
        "stage_seconds": asked.stages,
        "least_median_most_seconds_without_build": asked.by_fate,
        "speeds": asked.speeds,
        "gpu_busy": None if busy.share is None else round(busy.share, 3),
        "judged_rightly": len(judged) - len(wrong),
        "wrong": wrong,
        "load_average": os.getloadavg(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", choices=WAYS, default="evaluator")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["pytorch"])
    parser.add_argument("--slice", type=int, default=48, help="candidates")
    parser.add_argument("--seed", type=int, default=None, help="of the sources; by default another one each time")
    parser.add_argument("--hangs", type=float, default=None, help="share that hangs, all others being right; by default a mixture")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("--preset", default="pkb")
    parser.add_argument("--cases", default="timed", choices=("timed", "all"))
    parser.add_argument("--modes", default="", help="launch modes to time, with commas between them; none: correctness alone")
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--cut-off", type=int, default=0, help="seconds after which the slice ends, with what is judged")
    for name in ("judged-at-a-time", "warm-groups", "builds"):
        parser.add_argument(f"--{name}", type=int, help="see PoolSettings (evaluator, and the first one service)")
    parser.add_argument("--out", type=Path, help="file that gets a line of JSON more")
    asked = parser.parse_args()
    asked.modes = tuple(filter(None, asked.modes.split(",")))
    if asked.way == "eval" and asked.device == "cuda" and not asked.modes:
        parser.error("--way eval times on GPUs: name --modes")
    asked.seed = int(time.time()) if asked.seed is None else asked.seed
    asked.options, asked.but_hangs = {}, None
    chosen = {name: getattr(asked, name) for name in ("judged_at_a_time", "warm_groups", "builds") if getattr(asked, name) is not None}
    if chosen:
        asked.options["pool_settings"] = PoolSettings(**chosen)
    found = measure(asked)
    for item in found["wrong"]:
        print("judged otherwise:", *item, file=sys.stderr)
    print(json.dumps(found))
    if asked.out is not None:
        with asked.out.open("a") as file:
            file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
