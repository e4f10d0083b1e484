"""Whatever dies, wherever in the conversation, the verdict blames the right side, and the next evaluation is unaffected."""

import itertools
import os
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from e2e.faults import (
    GOOD,
    ONE_PASS,
    POOL_SETTINGS,
    Fault,
    Message,
    Switchboard,
    close_channel,
    garble,
    kill_leader,
    kill_rank,
    switchboard,
)
from e2e.runs import plan_of, wait_for, within
from peerlane.evaluate import Result, evaluator
from peerlane.evaluate.evaluator import Evaluator
from peerlane.evaluate.messages import Request
from peerlane.evaluate.processes.fork_client import ForkServer
from peerlane.evaluate.processes.rank_group import RankGroup
from peerlane.evaluate.rank_interface import RankInterface
from peerlane.results.store import ResultsStore
from peerlane.sandbox.process_tree import descendants


class Conversation:
    """One session in which evaluations follow each other, each with its own fault."""

    def __init__(self, board: Switchboard, out: Path, candidates: list[Path]) -> None:
        self.board, self.store, self.heard, self.struck_in = board, ResultsStore(out), board.heard, ""
        plan = plan_of(*candidates, pool_settings=POOL_SETTINGS, stress=ONE_PASS, isolation="L0")
        self.evaluator = Evaluator(plan=plan, progress=self.heard)
        self.judged = self.evaluator.scheduler.judge(evaluator.make_jobs(plan))

    def evaluate(self, at: Message | None = None, fault: "Fault | None" = None) -> Result:
        """The next evaluation; its result has been stored, and ``struck_in`` is the phase of the fault."""

        def strike(board: Switchboard, group: RankGroup) -> None:
            self.struck_in = self.heard.phases[-1]
            assert fault is not None
            fault(board, group)

        self.board.arm(at, strike)
        with within(60):
            _, result = next(self.judged)
        assert at is None or self.board.struck, f"the evaluation ended before {at}: {result.verdict}"
        self.store.append(result)
        return result


@pytest.mark.usefixtures("one_case")
def test_every_kind_of_message(board: Switchboard, tmp_path: Path) -> None:
    """What breaks at the first message of every kind; test_kills.py has kills at all messages, but no session that goes on."""
    conversation = Conversation(board, tmp_path, [GOOD] * 400)
    with conversation.evaluator, closing(conversation.judged):
        assert conversation.evaluate().correct and conversation.evaluate().correct
        firsts = [message for message in board.seen if message.ordinal == 0]
        points = [*itertools.product(firsts, [kill_leader, garble])]
        points += [
            (message, fault) for message in firsts if message.op in ("call", "generate_inputs") for fault in (kill_rank, close_channel)
        ]
        assert {message.role for message in firsts} == {"trusted", "candidate"} and len(points) > 30
        for message, fault in points:
            result = conversation.evaluate(message, fault)
            case = f"{fault.__name__} at {message}: {result.verdict}"
            if message.role == "trusted":
                assert result.verdict.kind == "harness_error", case
            elif message.op == "initialize":
                assert result.correct, case  # it was the warm group for the next one
            elif conversation.struck_in == "audit":
                assert result.correct and "audit_failed" in result.flags, case  # evidence in the open track, no verdict
            else:
                kinds = {
                    kill_rank: "runtime_error",
                    close_channel: "runtime_error",
                    kill_leader: "integrity_failure",
                    garble: "integrity_failure",
                }
                verdict: Any = result.verdict
                assert (verdict.kind, verdict.phase) == (kinds[fault], conversation.struck_in), case
                assert fault is not kill_rank or (verdict.rank == 1 and "SIGKILL" in verdict.message), case
        assert conversation.evaluate().correct
    stored = ResultsStore(tmp_path).results()
    assert stored == conversation.store.results() and len(stored) == len(points) + 3


@pytest.mark.parametrize("op", ["initialize", "take_secret"])
def test_trusted_ranks_that_do_not_start_are_started_again(op: str, board: Switchboard, tmp_path: Path) -> None:
    conversation = Conversation(board, tmp_path, [GOOD] * 3)
    with conversation.evaluator, closing(conversation.judged):
        assert conversation.evaluate(Message("trusted", op, 0), kill_rank).correct
        assert conversation.evaluate(Message("candidate", "initialize", 0), kill_rank).correct
        assert conversation.evaluate().correct
    assert any("did not start" in text for text in conversation.heard.notes), conversation.heard.notes


def test_builders(board: Switchboard, tmp_path: Path) -> None:
    """What dies while it compiles a candidate is the candidate's; what dies before is ours."""
    points = [("initialize", kill_rank, "harness_error"), ("build_candidate", kill_rank, "runtime_error")]
    points += [("initialize", garble, "harness_error"), ("build_candidate", garble, "integrity_failure")]
    points.append(("build_candidate", kill_leader, "integrity_failure"))
    candidates = [tmp_path / f"8_build{number}_cuda.py" for number in range(len(points) + 1)]
    for number, path in enumerate(candidates):
        path.write_text(
            f"import time  # {number}: no two are the same file\nload_inline = None\nload_inline\ntime.sleep(0.2)\nsolution = print\n"
        )
    conversation = Conversation(board, tmp_path, candidates)
    with conversation.evaluator, closing(conversation.judged):
        for op, fault, kind in points:
            verdict: Any = conversation.evaluate(Message("builder", op, 0), fault).verdict
            assert (verdict.kind, verdict.phase) == (kind, "build"), verdict
        assert conversation.evaluate().verdict.kind == "not_run"


def test_a_killed_fork_server_is_replaced(board: Switchboard, fork_server: ForkServer, tmp_path: Path) -> None:
    conversation = Conversation(board, tmp_path, [GOOD] * 3)

    def kill_fork_server(board: Switchboard, group: RankGroup) -> None:
        os.kill(fork_server.pid, signal.SIGKILL)
        wait_for(lambda: not fork_server.alive, 10, "the end of the fork server")

    with conversation.evaluator, closing(conversation.judged):
        results = [conversation.evaluate(Message("candidate", "load_candidate", 0), kill_fork_server)]
        results += [conversation.evaluate(), conversation.evaluate()]
    assert fork_server.alive and all(result.correct for result in results), [result.verdict for result in results]


KILLED_AT = [("candidate", "initialize"), ("candidate", "call"), ("trusted", "judge_outputs")]


def test_a_killed_supervisor_leaves_valid_results_and_no_process(fork_server: ForkServer, tmp_path: Path) -> None:
    """Leaders end their groups, warm groups among them, when the supervisor's sockets close, for whatever reason."""

    def supervise(at: Message) -> int:
        """The status of a process that is killed during its second evaluation."""
        if (child := os.fork()) == 0:
            try:
                with switchboard() as board:
                    conversation = Conversation(board, tmp_path, [GOOD] * 3)
                    conversation.evaluate()
                    conversation.evaluate(at, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            finally:
                os._exit(1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    for number, (role, op) in enumerate(KILLED_AT, 1):
        assert supervise(Message(role, op, 0)) == -signal.SIGKILL, (role, op)
        wait_for(lambda: descendants(fork_server.pid) == [], 20, f"the end of all processes after {role} {op}")
        assert len(ResultsStore(tmp_path).results()) == number


def test_a_stopped_leader_does_not_keep_its_group(fork_server: ForkServer) -> None:
    with switchboard() as board:
        group = fork_server.spawn("builder", 1, {"device": "cpu", "timed_ranks": 0})
    group.ask(Request(RankInterface.initialize), "build", 30)
    os.kill(board.leader(group), signal.SIGSTOP)
    group.kill(0.2)
    wait_for(lambda: descendants(fork_server.pid) == [], 20, "the end of the group")
