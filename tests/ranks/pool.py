"""A pool of gloo ranks for tests: processes forked once, fed with function names."""

import contextlib
import gc
import logging
import multiprocessing as mp
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from peerlane import problems
from peerlane.problems.contract import Case, resolve_groups


def _serve(rank: int, world_size: int, backend: str, store: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # what was imported before the fork never needs collecting
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world_size)
    while (job := pipe.recv()) is not None:
        function, args = job
        try:
            pipe.send((True, function(rank, world_size, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()


class RankPool:
    """``world_size`` forked processes in one group of ``backend``.

    ``run(function, *args)`` calls function(rank, world_size, *args) on all.
    """

    def __init__(self, world_size: int, backend: str = "gloo") -> None:
        context = mp.get_context("fork")
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        self._pipes, self._processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world_size, backend, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((function, args))
        results = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(timeout):
                self.close(kill=True)
                raise TimeoutError(f"rank {rank} did not answer within {timeout} s")
            ok, value = pipe.recv()
            results.append((ok, value))
        for rank, (ok, value) in enumerate(results):
            if not ok:
                raise AssertionError(f"rank {rank} failed:\n{value}")
        return [value for _, value in results]

    def close(self, kill: bool = False) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if kill:
                process.kill()
            else:
                pipe.send(None)
        for process in self._processes:
            process.join(10)
        self._folder.cleanup()


@contextlib.contextmanager
def logged(name: str, level: int) -> Iterator[list[str]]:
    """The lines that a logger gets meanwhile in this process, whatever tests of the process that forked have set."""
    lines: list[str] = []
    handler, log = logging.Handler(), logging.getLogger(name)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.disable(logging.NOTSET)
    log.disabled = False
    log.addHandler(handler)
    log.setLevel(level)
    try:
        yield lines
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)


_GROUPS: dict[tuple[tuple[int, ...], ...], Any] = {}


def with_groups(case: Case, rank: int, tree: Any) -> Any:
    """A rank's arguments with this rank's groups of the case; these are created once per process, on all ranks in the same order."""
    mine = {}
    for name, each in problems.get(case.problem).process_groups(case).items():
        members_of = tuple(tuple(members) for members in each)
        if members_of not in _GROUPS:
            created = [dist.new_group(list(members)) for members in members_of]
            _GROUPS[members_of] = next((group for group, members in zip(created, members_of, strict=True) if rank in members), None)
        mine[name] = _GROUPS[members_of]
    return resolve_groups(tree, mine.__getitem__)
