"""Locked calls on CPU ranks: nobody knows their inputs before they are let through, and nobody changes their answers afterwards."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import pytest

from peerlane import problems
from peerlane.evaluate.correctness.case_runner import CaseRunner, Rejected
from peerlane.evaluate.processes.fork_client import ForkServer
from peerlane.evaluate.processes.protocol import Message
from peerlane.evaluate.processes.rank_group import GroupFailure
from peerlane.evaluate.processes.session import Session
from peerlane.evaluate.results.verdict import Phase
from peerlane.evaluate.timing.turnstile import Passage, ask_and_let_through
from peerlane.settings import Deadlines

HEAD = """
import time
import torch
import torch.distributed as dist

def solution(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
"""
HONEST = HEAD + "    return total\n"
SPIES = """
import sys
import torch
import torch.distributed as dist

def rank():
    frame = sys._getframe()
    while not hasattr(frame.f_locals.get("self"), "_spaces"):
        frame = frame.f_back
    return frame.f_locals["self"]

def space():
    return rank()._spaces["timed"]
"""
AHEAD = f"""{SPIES}
answers = {{}}

def solution(tensor):
    if not answers:
        slots = [args[0] for args in space().arguments.args]
        totals = torch.stack(slots)
        dist.all_reduce(totals)
        answers.update((slot.data_ptr(), total) for slot, total in zip(slots, totals))
    return answers.pop(tensor.data_ptr())
"""
PUTS_OFF = f"""{SPIES}
waiting = []

def solution(tensor):
    waiting.append(tensor)
    if len(waiting) < 4:
        return torch.empty_like(tensor)
    totals = torch.stack(waiting)
    dist.all_reduce(totals)
    places = {{args[0].data_ptr(): slot for slot, args in enumerate(space().arguments.args)}}
    for mine, total in zip(waiting, totals):
        space().outputs.views[places[mine.data_ptr()]][0].copy_(total)
    return totals[-1]
"""
LOOKS = f"""{SPIES}
seen = []

def solution(tensor):
    if not seen:
        seen.extend(args[0].clone() for args in space().arguments.args)
    number = len(seen) - 4
    known = seen[number % 4]
    seen.append(known)
    assert torch.equal(tensor, known) == (number != 2), number
    total = tensor.clone()
    dist.all_reduce(total)
    return total
"""
SLEEPS = HEAD + "    time.sleep(0.01 if dist.get_rank() else 0.0)\n    return total\n"
ALONE = "def solution(tensor):\n    return tensor.clone()\n"
FAILS = HEAD + "    if failed := dist.get_rank() == 1:\n        raise ValueError('here')\n    return total\n"
ENDLESS = HEAD + "    while dist.get_rank() == 1:\n        time.sleep(1.0)\n    return total\n"
SAYS_SO_AT_ONCE = f"""{SPIES}
def solution(tensor):
    rank().locks._page.committed = 1 << 60
    total = tensor.clone()
    dist.all_reduce(total)
    return total
"""
SLOTS = 4

Open = Callable[[str], CaseRunner]


@pytest.fixture
def opened(fork_server: ForkServer) -> Iterator[Open]:
    """Opens a trial of problem 1 for a candidate with this source, on two ranks."""
    with ExitStack() as stack:
        session = stack.enter_context(Session("cpu", 2, Deadlines(timing=3.0)))

        def open_(source: str) -> CaseRunner:
            problem = problems.get(1)
            group = session.take_group()
            stack.callback(session.end, group)
            runner = CaseRunner(session, group, problem, problem.cases("small", 2)[0], "timed", SLOTS)
            request = {"op": "load", "path": "/1_turnstile_pytorch.py", "source": source, "cache": None, "problem": 1, "variant": "default"}
            group.ask(request, "import", 30.0)
            runner.open()
            return runner

        yield open_


def run(
    runner: CaseRunner,
    order: Sequence[int] = range(SLOTS),
    positions: Sequence[int] = range(SLOTS),
    phase: Phase = "stress",
    jitter: Sequence[tuple[int, str, float]] = (),
) -> tuple[list[Message], list[Passage]]:
    """A pass in this order, with calls locked at these positions; ``jitter`` holds up rank 1."""
    runner.generate_inputs()
    locked = runner.lock(order, positions)
    runner.publish_inputs(locked=locked)
    request = {"op": "stress", "side": "candidate", "order": list(order), "exchanges": [], "poisoned": [], "kept": list(range(SLOTS))}
    requests = [{**request, "jitter": steps} for steps in ((), jitter)]
    answers, passages = runner.let_through(runner.group, requests, locked, phase, 3.0)
    runner.hold_to(passages, locked, phase)
    return answers, passages


def test_honest_calls_are_let_through_and_are_right(opened: Open) -> None:
    runner, order = opened(HONEST), [2, 0, 3, 1]
    answers, passages = run(runner, order, [0, 3])
    assert [(passage.position, passage.slot) for passage in passages] == [(0, 2), (3, 1)]
    assert all(0 < passage.us < 1e6 for passage in passages)
    assert len({digest for passage in passages for digest in passage.digests}) == 4, "the same sums, under keys of their own"
    runner.collect_from(answers, order, "stress")
    runner.judge("stress", at_rest=True)  # also that nothing else has changed, guard bands included
    assert runner.evidence.stressed_slots == SLOTS and runner.evidence.max_error_over_tolerance <= 1


def test_every_call_has_a_key_and_a_ticket_of_its_own(opened: Open) -> None:
    runner = opened(HONEST)
    first, second = (runner.lock(range(SLOTS), [1, 3]) for _ in range(2))
    assert [(position, slot) for position, slot, _ in first.calls] == [(1, 1), (3, 3)]
    tickets = [ticket for locked in (first, second) for *_, ticket in locked.calls]
    assert tickets == sorted(set(tickets)) and tickets[0] > 0
    keys = [key for locked in (first, second) for of_ranks in locked.keys.values() for key in of_ranks]
    assert len(set(keys)) == len(keys) == 8, "on every rank"


def test_contents_of_locked_calls_are_not_in_the_arena(opened: Open) -> None:
    runner = opened(LOOKS)
    answers, _ = run(runner, positions=[2])
    runner.collect_from(answers, range(SLOTS), "stress")
    runner.judge("stress")


def test_inputs_are_not_known_before_their_call(opened: Open) -> None:
    runner = opened(AHEAD)
    answers, _ = run(runner)
    runner.collect_from(answers, [1, 2, 3], "stress")
    with pytest.raises(Rejected, match=r"unstable|wrong_result"):
        runner.judge("stress")


@pytest.mark.parametrize("phase", ["timing", "stress"])
@pytest.mark.parametrize("source", [PUTS_OFF, SAYS_SO_AT_ONCE], ids=["put off", "said to be there"])
def test_answers_cannot_be_given_later(source: str, phase: Phase, opened: Open) -> None:
    with pytest.raises(Rejected) as caught:
        run(opened(source), phase=phase)
    assert caught.value.verdict.kind == "integrity_failure"
    assert re.search(r"[1-4] of 4 locked calls returned something else than the rank had", caught.value.verdict.reason)


def test_what_is_judged_is_what_was_digested(opened: Open) -> None:
    """Whoever writes between the two is too late."""
    runner, order = opened(HONEST), [2, 0, 3, 1]
    answers, _ = run(runner, order, [0])
    for slot in (2, 0):
        runner.ask("copy_again", "stress", 3.0, slot=slot)  # what the last call returned
    runner.collect_from(answers, [2], "stress")
    runner.judge("stress")
    runner.collect_from(answers, [0], "stress")
    with pytest.raises(Rejected, match=r"unstable"):
        runner.judge("stress")


def test_a_call_takes_from_its_key_to_its_answer(opened: Open) -> None:
    _, passages = run(opened(SLEEPS), positions=[0, 1, 3])
    assert all(10_000 < passage.us < 1e6 for passage in passages)


@pytest.mark.parametrize("phase", ["timing", "stress"])
def test_a_timed_call_has_no_key_before_all_ranks_have_come(phase: Phase, opened: Open) -> None:
    """Rank 1 comes 30 ms late, and nobody waits in a call. Under stress calls meet peers that have not come."""
    _, passages = run(opened(ALONE), positions=[1, 2], phase=phase, jitter=[(2, "host", 30_000.0)])
    assert [passage.us > 25_000 for passage in passages] == [False, phase == "stress"]
    assert [[us > 25_000 for us in passage.waited_us] for passage in passages] == [[False] * 2, [phase == "timing", False]]


@pytest.mark.parametrize("phase", ["timing", "stress"])
@pytest.mark.parametrize(("source", "kind"), [(FAILS, "runtime_error"), (ENDLESS, "hang")])
def test_ranks_that_fail_in_a_locked_call(source: str, kind: str, phase: Phase, opened: Open) -> None:
    runner = opened(source)
    with pytest.raises(GroupFailure) as caught:
        run(runner, phase=phase)
    assert (caught.value.kind, caught.value.phase) == (kind, phase)


def test_a_rank_that_waits_for_others_is_not_to_blame_for_a_hang(opened: Open) -> None:
    runner = opened(ALONE)
    with pytest.raises(GroupFailure) as caught:
        run(runner, positions=[2], phase="timing", jitter=[(2, "host", 6e6)])
    assert (caught.value.kind, caught.value.ranks) == ("hang", (1,))


def test_nobody_waits_for_a_rank_that_has_answered(opened: Open) -> None:
    runner = opened(ALONE)
    runner.generate_inputs()
    locked = runner.lock(range(SLOTS), [1])
    runner.publish_inputs(locked=locked)
    steps = {"exchanges": [], "poisoned": [], "jitter": [], "kept": [], "locked": locked.calls, "deadline_s": 60.0}
    comes = {"op": "stress", "side": "candidate", "space": "timed", "order": list(range(SLOTS)), **steps}
    begin = time.monotonic()
    with pytest.raises(GroupFailure, match="before all of its locked calls had been let through"):
        ask_and_let_through(runner.group, [comes, {"op": "copy_again", "space": "timed", "slot": 0}], locked, "timing", 30.0)
    assert time.monotonic() - begin < 10.0


def test_ranks_that_skip_locked_calls(opened: Open) -> None:
    runner = opened(HONEST)
    locked = runner.lock(range(SLOTS), [1])
    with pytest.raises(GroupFailure, match="before all of its locked calls had been let through"):
        ask_and_let_through(runner.group, {"op": "copy_again", "space": "timed", "slot": 0}, locked, "stress", 3.0)
