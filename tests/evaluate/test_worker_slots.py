"""Nobody waits for another's hang: where nothing is timed, evaluations run side by side, and one that takes long gives up its place."""

import asyncio
import os
import time
from contextlib import closing
from types import SimpleNamespace
from typing import cast

import pytest

import peerlane as pl
from e2e.runs import RIGHT, SLEEPS
from peerlane.common.place import CPU, EMULATED, GPUS
from peerlane.evaluate import worker_slots
from peerlane.evaluate.candidates import candidate_text
from peerlane.evaluate.plan import make_jobs
from peerlane.evaluate.processes.session import Session
from peerlane.evaluate.worker_slots import WorkerSlots
from peerlane.settings import PoolSettings

LIMIT_S = 100.0


class Opened:
    """A session of which nothing but its slots is used."""

    place, world_size, pool_settings = CPU, 2, PoolSettings(builds=0)

    def __init__(self) -> None:
        self.fork_server = SimpleNamespace(sharers=1)
        self.left = self.waited = False

    def __exit__(self, *_: object) -> None:
        self.left = True

    def let_others_go_first(self) -> None: ...

    def wait_for_starts(self) -> None:
        self.waited = True


def slots_of(usual: int, maximum: int) -> tuple[WorkerSlots, list[Opened]]:
    opened = [Opened()]

    def beside() -> Session:
        opened.append(Opened())
        return cast(Session, opened[-1])

    return WorkerSlots(cast(Session, opened[0]), beside, usual, maximum), opened


def test_as_many_slots_as_usual_and_each_is_used_again() -> None:
    made, opened = slots_of(2, 8)
    first, second = made.take(), made.take()
    assert first is not None and second is not None and made.take() is None
    made.give(first)
    assert made.take() is first and len(opened) == 2
    made.close()
    assert all(item.left for item in opened)


def test_an_evaluation_that_takes_long_makes_room_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_slots, "_PATIENCE_S", 0.05)
    made, _ = slots_of(1, 2)
    assert made.take() is not None and made.take() is None
    before = made.capacity
    time.sleep(0.06)
    assert made.capacity == before + 1 and made.take() is not None
    time.sleep(0.06)
    assert made.take() is None, "two are the most"


def test_emulated_evaluations_take_a_core_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_slots, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    first = SimpleNamespace(
        place=EMULATED, world_size=4, pool_settings=PoolSettings(builds=0), fork_server=SimpleNamespace(sharers=1), let_others_go_first=int
    )
    made = WorkerSlots.of(cast(Session, first), lambda: cast(Session, Opened()))
    assert [made.take() is not None for _ in range(3)] == [True, True, False], "what takes long is at work: it makes room for nobody"


def test_patience_grows_with_what_evaluations_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_slots, "_MIN_SLOW_S", 0.0)
    made, _ = slots_of(1, 4)
    for _ in range(3):
        slot = made.take()
        assert slot is not None
        slot.begun -= 10.0
        made.give(slot)
    slow = made.take()
    assert slow is not None
    slow.begun -= 15.0
    assert made.take() is None, "the others took 10 s"
    slow.begun -= 25.0
    assert made.take() is not None


def test_what_is_timed_is_judged_alone() -> None:
    made, opened = slots_of(2, 2)
    first, second = made.take(), made.take()
    assert first is not None and second is not None and made.take(alone=True) is None
    made.give(first)
    assert made.take(alone=True) is None
    made.give(second)
    timed = made.take(alone=True)
    assert timed is second and made.take() is None
    assert [item.waited for item in opened] == [True, False], "ranks that start beside it are waited for"
    made.give(timed)
    assert made.take() is not None and made.take() is not None


@pytest.mark.parametrize(("setting", "slots_on_gpus"), [(None, 1), (3, 3)])
def test_gpus_have_one_slot_unless_a_setting_says_more(setting: int | None, slots_on_gpus: int) -> None:
    settings = PoolSettings(builds=0, judged_at_a_time=setting)
    first = SimpleNamespace(place=GPUS, world_size=4, pool_settings=settings, fork_server=SimpleNamespace(sharers=1))
    made = WorkerSlots.of(cast(Session, first), lambda: cast(Session, Opened()))
    assert (made.usual, made.maximum) == (slots_on_gpus, slots_on_gpus)


def test_where_something_is_timed_there_is_one_slot() -> None:
    made, _ = slots_of(1, 1)
    slot = made.take()
    assert slot is not None
    slot.begun -= 1000.0
    assert made.take() is None


def test_a_hang_holds_up_nobody_in_a_run() -> None:
    sources = [SLEEPS, *(f"{RIGHT}# {number}" for number in range(3)), SLEEPS + "#", *(f"{RIGHT}#_{number}" for number in range(3))]
    candidates = [candidate_text(source, 1, f"{number}") for number, source in enumerate(sources)]
    plan = pl.EvaluationPlan(candidates, problems="1", presets=("small",), modes=(), cases="timed", world_sizes=(2,), timeout=LIMIT_S)
    with pl.Evaluator(plan=plan) as evaluator, closing(evaluator.scheduler.judge(make_jobs(plan))) as judged:
        found = [next(judged) for _ in range(6)]
    assert all(result.correct for _, result in found), "all but those that hang have ended before these"
    assert {job.candidate.name for job, _ in found} == {"1", "2", "3", "5", "6", "7"}


def test_a_hang_holds_up_nobody_who_asks_later() -> None:
    async def ask(evaluator: pl.Evaluator) -> list[pl.Result]:
        hang = asyncio.create_task(evaluator.evaluate_async(1, SLEEPS, timeout=LIMIT_S))
        await asyncio.sleep(0.2)
        try:
            return await asyncio.gather(*(evaluator.evaluate_async(1, f"{RIGHT}# {number}") for number in range(4)))
        finally:
            assert not hang.done()
            hang.cancel()

    with pl.Evaluator(2, "cpu", presets=("small",), modes=(), cases="timed") as evaluator:
        assert all(result.correct for result in asyncio.run(ask(evaluator)))
