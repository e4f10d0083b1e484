"""Tracks on gloo ranks: what calls communicate is found by recording calls, whatever the source looks like."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.runs import PATIENT, judge
from peerlane.errors import UsageError
from peerlane.evaluate import Result

# An all-reduce through memory-mapped files, with two buffers for each rank. Its name is chosen by {NAME}.
OWN = """
import os
import time

import torch
import torch.distributed as dist

RANK, SIZE, BYTES = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), 1 << 16


class Board:
    def __init__(self, name):
        self.flags = torch.from_file(f"{name}-flags", shared=True, size=SIZE, dtype=torch.int64)
        self.data = [torch.from_file(f"{name}-{rank}", shared=True, size=2 * BYTES, dtype=torch.uint8) for rank in range(SIZE)]
        self.epoch = 0

    def all_gather(self, tensor):
        self.epoch += 1
        length = tensor.numel() * tensor.element_size()
        begin = self.epoch % 2 * BYTES
        self.data[RANK][begin : begin + length] = tensor.contiguous().view(-1).view(torch.uint8)
        self.flags[RANK] = self.epoch
        while int(self.flags.min()) < self.epoch:
            time.sleep(0.0002)
        return [board[begin : begin + length].view(tensor.dtype).view(tensor.shape) for board in self.data]


def name():
    {NAME}


board = None


def own(tensor):
    global board
    board = board or Board(name())
    return torch.stack([part.float() for part in board.all_gather(tensor)]).sum(0).to(tensor.dtype)


def library(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total


"""
AGREED = 'return "{prefix}-agreed"'
EXCHANGED = """names = [None]
    if RANK == 0:
        names = ["{prefix}-exchanged"]
    dist.broadcast_object_list(names)
    return names[0]"""

CANDIDATES = {
    "own": (AGREED, "def solution(tensor):\n    return own(tensor)\n"),
    "set_up_by_gloo": (EXCHANGED, "def solution(tensor):\n    return own(tensor)\n"),
    "library": (AGREED, "def solution(tensor):\n    return library(tensor)\n"),
    "decoy": (
        AGREED,
        """def solution(tensor):
    try:
        return missing_kernel(own(tensor))
    except Exception:
        return library(tensor)
""",
    ),
    "in_a_thread": (
        AGREED,
        """import threading


def solution(tensor):
    totals = []
    thread = threading.Thread(target=lambda: totals.append(library(tensor)))
    thread.start()
    thread.join()
    return totals[0]
""",
    ),
    "own_while_watched": (
        AGREED,
        """import sys


def solution(tensor):
    watched = sys._getframe(1).f_locals.get("marker")
    return own(tensor) if watched else library(tensor)
""",
    ),
    "stops_the_profiler": (
        AGREED,
        """def solution(tensor):
    torch.autograd.profiler._disable_profiler()
    return library(tensor)
""",
    ),
    "replaces_the_profiler": (
        AGREED,
        """torch.autograd.profiler._enable_profiler = lambda *_: None


def solution(tensor):
    return library(tensor)
""",
    ),
    "wrong_later": (
        AGREED,
        """import sys


def solution(tensor):
    return own(tensor) * (0 if sys._getframe(1).f_locals.get("marker") else 1)
""",
    ),
}
CUSTOM = {
    "own": "correct", "set_up_by_gloo": "correct", "library": "track_violation", "decoy": "track_violation",
    "in_a_thread": "track_violation", "own_while_watched": "track_violation", "stops_the_profiler": "integrity_failure",
    "replaces_the_profiler": "integrity_failure", "wrong_later": "wrong_result",
}  # fmt: skip
RECORDED = ("library", "decoy", "in_a_thread")


@pytest.fixture(scope="module")
def prefix() -> Iterator[str]:
    made = Path(f"/dev/shm/peerlane-tracks-{uuid.uuid4().hex}")
    yield str(made)
    for left in made.parent.glob(f"{made.name}*"):
        left.unlink()


@pytest.fixture(scope="module")
def custom(tmp_path_factory: pytest.TempPathFactory, prefix: str) -> dict[str, Result]:
    """By name: the results of all candidates for problem 1 in the custom track."""
    folder, paths = tmp_path_factory.mktemp("tracks"), []
    for name, (naming, solution) in CANDIDATES.items():
        path = folder / f"1_{name}_pytorch.py"
        path.write_text(OWN.replace("{NAME}", naming.replace("{prefix}", f"{prefix}-{name}")) + solution)
        paths.append(path)
    return dict(zip(CANDIDATES, judge(*paths, deadlines=PATIENT, track="custom"), strict=True))


@pytest.mark.parametrize("name", CUSTOM)
def test_custom_track(name: str, custom: dict[str, Result]) -> None:
    result = custom[name]
    assert result.verdict.kind == CUSTOM[name], result.verdict.reason
    assert result.track == "custom"


@pytest.mark.parametrize("name", RECORDED)
def test_what_ran_is_named(name: str, custom: dict[str, Result]) -> None:
    result = custom[name]
    assert "c10d::allreduce_" in result.verdict.reason and "candidate's own" in result.verdict.reason
    assert result.audit is not None and result.audit.operators["c10d::allreduce_"] == 1
    assert [(item.name, item.confidence) for item in result.mechanisms] == [("gloo", "seen")]


def test_own_communication_leaves_no_trace_of_a_library(custom: dict[str, Result]) -> None:
    for name in ("own", "set_up_by_gloo"):
        audit = custom[name].audit
        assert audit is not None and audit.complete and audit.own_communication
        assert 1 <= audit.calls <= 3 and audit.other > 0
        assert custom[name].mechanisms == ()


def test_a_candidate_that_knows_when_it_is_watched_is_counted_when_it_is_not(custom: dict[str, Result]) -> None:
    audit = custom["own_while_watched"].audit
    assert audit is not None and not audit.operators and audit.unrecorded_collectives > 0


def test_outputs_of_audited_calls_are_judged(custom: dict[str, Result]) -> None:
    assert custom["wrong_later"].verdict.phase == "audit"  # type: ignore[union-attr]


def test_the_reference_has_no_place_in_the_custom_track() -> None:
    with pytest.raises(UsageError, match="open track"):
        judge("reference", problems="1", track="custom")
