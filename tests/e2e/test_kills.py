"""A kill at every boundary of a whole evaluation's conversation: the result is the right one, the file is valid, no process is left.

The conversation is a sequence of requests, each to all ranks of one group, and of their answers. It has two boundaries at every request:
just before it is sent, and behind it, when the ranks have it and no answer has been read. At each of them somebody gets SIGKILL. Not
everybody, which would take too long: a rank of the candidate, a trusted rank and the supervisor take turns, and at the first boundary of a
phase all of them die, one after the other. So every boundary is struck, and every victim dies in every phase.

The evaluations, of a right and of a wrong candidate, look at one case. Each has a session of its own, which begins with the start of ranks.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from e2e.faults import GOOD, ONE_PASS, POOL_SETTINGS, Fault, Message, Switchboard, kill_rank
from e2e.runs import plan_of, wait_for, within
from peerlane.evaluate import Result, evaluate
from peerlane.evaluate.processes.fork_client import ForkServer
from peerlane.results.store import ResultsStore
from peerlane.sandbox.process_tree import descendants
from sample_results import on_cpu

CANDIDATE, TRUSTED, SUPERVISOR = VICTIMS = ("candidate", "trusted", "supervisor")
LOAD = Message(CANDIDATE, "load_candidate", 0)
WRONG = "def solution(tensor):\n    return 0 * tensor\n"
PHASES = {
    "correct": {"spawn", "import", "first_call", "correctness", "stress", "audit", "exit"},
    "wrong_result": {"spawn", "import", "first_call"},
}


@dataclass(frozen=True)
class Kill:
    """Of a victim at the ``number``-th request: just before it is sent, or behind it."""

    number: int
    behind: bool
    victim: str


def boundaries_of(requests: list[Message]) -> list[tuple[int, bool]]:
    """The number of a request, and whether it is behind it, for every boundary, in order."""
    return [(number, behind) for number in range(len(requests)) for behind in (False, True)]


def kills_at(requests: list[Message]) -> list[Kill]:
    """At every boundary: of the victim whose turn it is among those that live by then, and of all that have not died in the phase."""
    kills: list[Kill] = []
    met = set()
    for turn, (number, behind) in enumerate(boundaries_of(requests)):
        living = [*dict.fromkeys(request.role for request in requests[: number + 1]), SUPERVISOR]
        for place, victim in enumerate(living):
            first = (victim, requests[number].phase)
            if place == turn % len(living) or first not in met:
                met.add(first)
                kills.append(Kill(number, behind, victim))
    return kills


@dataclass(frozen=True)
class Outcome:
    """What matters of a result; ``phase`` is that of the verdict, if it has one."""

    kind: str
    phase: str = ""
    audited: bool = True

    @classmethod
    def of(cls, result: Result) -> Outcome:
        return cls(result.verdict.kind, getattr(result.verdict, "phase", ""), "audit_failed" not in result.flags)


@dataclass
class Dying:
    """Evaluations of one candidate, each with another kill. ``requests`` and ``undisturbed`` are those of one without."""

    board: Switchboard
    candidate: Path
    folder: Path

    def __post_init__(self) -> None:
        self.undisturbed = Outcome.of(self.evaluate(self.folder / "undisturbed"))
        self.requests = list(self.board.seen)

    def evaluate(self, out: Path, kill: Kill | None = None) -> Result:
        """In a session of its own; the result is in the folder ``out``."""
        plan = plan_of(self.candidate, out=out, isolation="L0", pool_settings=POOL_SETTINGS, stress=ONE_PASS)
        if kill is None:
            self.board.arm(None, None)
        else:
            self.board.arm(self.requests[kill.number], self.fault(kill.victim), sent=kill.behind)
        with within(60):
            (result,) = evaluate(plan, self.board.heard)
        return result

    @staticmethod
    def fault(victim: str) -> Fault:
        if victim == SUPERVISOR:
            return lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        return lambda board, _: kill_rank(board, board.groups[victim])

    def results_after(self, kill: Kill, out: Path) -> list[Result]:
        """Of the evaluation, which was struck: one, or none where the supervisor, in a process of its own, was killed."""
        if kill.victim != SUPERVISOR:
            result = self.evaluate(out, kill)
            assert self.board.struck, kill
            return [result]
        if (child := os.fork()) == 0:
            try:
                self.evaluate(out, kill)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, kill
        return []

    def outcomes(self, kill: Kill) -> set[Outcome]:
        """Those that are right. Behind a request, the victim may have answered it."""
        return {self.dead_from(number, kill.victim) for number in range(kill.number, kill.number + 1 + kill.behind)}

    def dead_from(self, number: int, victim: str) -> Outcome:
        """What is right if a rank is dead before this request is sent."""
        asked = [request for request in self.requests[number:] if request.role == victim]
        if number < self.requests.index(LOAD) or not asked:
            return self.undisturbed  # others are started in its place, or nobody misses it
        if victim == TRUSTED:
            return Outcome("harness_error", asked[0].phase)
        if asked[0].phase == "audit":
            return replace(self.undisturbed, audited=False)  # evidence in the open track, no verdict
        return Outcome("runtime_error", asked[0].phase)


@pytest.mark.long
@pytest.mark.usefixtures("one_case")
@pytest.mark.parametrize("kind", PHASES)
def test_a_kill_at_every_boundary(kind: str, fork_server: ForkServer, board: Switchboard, tmp_path: Path) -> None:
    candidate = GOOD
    if kind == "wrong_result":
        candidate = tmp_path / "8_wrong_pytorch.py"
        candidate.write_text(WRONG)
    dying = Dying(board, candidate, tmp_path)
    assert dying.undisturbed.kind == kind
    kills = kills_at(dying.requests)
    struck = set()
    for count, kill in enumerate(kills):
        store = ResultsStore(tmp_path / str(count))
        earlier = on_cpu()
        store.append(earlier)
        results = dying.results_after(kill, tmp_path / str(count))
        struck.add(kill)
        case = f"{kill} at {dying.requests[kill.number]}: {results}"
        wait_for(lambda: descendants(fork_server.pid) == [], 20, f"the end of all processes after a {case}")
        assert ResultsStore(tmp_path / str(count)).results() == [earlier, *results], case
        for result in results:
            assert Outcome.of(result) in dying.outcomes(kill), case
            assert result.verdict.kind != "runtime_error" or (result.verdict.rank == 1 and "SIGKILL" in result.verdict.message), case
    assert {(kill.number, kill.behind) for kill in struck} == set(boundaries_of(dying.requests))
    assert {(kill.victim, dying.requests[kill.number].phase) for kill in struck} == {
        (victim, phase) for victim in VICTIMS for phase in PHASES[kind]
    }
