"""PEERLANE_CHECK=1: calls in different orders on the ranks are told, with both places; calls in one order go on."""

import re
import threading
from collections.abc import Callable

import pytest
import torch.distributed as dist

from peerlane.device.host import call_order
from peerlane.device.host.call_order import CallOrder
from peerlane.errors import DeviceTimeout, UsageError

Act = Callable[[CallOrder], None]


def play(*acts: Act) -> list[BaseException | None]:
    """What each rank raised."""
    store = dist.HashStore()
    failed: list[BaseException | None] = [None] * len(acts)

    def main(rank: int) -> None:
        try:
            acts[rank](CallOrder(store, rank))
        except BaseException as error:
            failed[rank] = error

    threads = [threading.Thread(target=main, args=(rank,)) for rank in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failed


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_order, "LOOK_S", 0.1)


def calls(*groups: str) -> Act:
    """Calls of these groups, in order; the two ranks are in all of them."""

    def act(order: CallOrder) -> None:
        for group in groups:
            order.enter(group, (0, 1), f"kernel_of_{group}", 20.0)

    return act


def test_calls_in_one_order_go_on() -> None:
    assert play(*[calls(*"abba" * 5)] * 2) == [None, None]


def test_groups_in_other_orders_are_told_with_both_places() -> None:
    for rank, error in enumerate(play(calls("a", "a", "b"), calls("a", "b", "a"))):
        assert isinstance(error, UsageError)
        said = str(error)
        assert "ranks 0 and 1 wait for each other" in said or "ranks 1 and 0 wait for each other" in said
        assert re.search(rf"rank {rank}: kernel_of_{'ab'[rank]} at .*test_call_order.py:\d+ \(call {1 - rank} of ranks \[0, 1\]\)", said), (
            said
        )
        assert f"rank {1 - rank}: kernel_of_{'ba'[rank]} at " in said


def test_different_calls_of_one_group_are_told() -> None:
    def act(what: str) -> Act:
        return lambda order: order.enter("a", (0, 1), what, 20.0)

    for error in play(act("all_reduce"), act("all_gather")):
        assert isinstance(error, UsageError) and "rank 0: all_reduce at " in str(error) and "rank 1: all_gather at " in str(error)


def test_groups_of_other_ranks_are_no_breach() -> None:
    """Rank 1 is long in a call with rank 2 before it comes to the one with rank 0."""

    def first(order: CallOrder) -> None:
        order.enter("a", (0, 1), "one", 20.0)

    def second(order: CallOrder) -> None:
        order.enter("b", (1, 2), "other", 20.0)
        order.enter("a", (0, 1), "one", 20.0)

    def third(order: CallOrder) -> None:
        threading.Event().wait(0.5)
        order.enter("b", (1, 2), "other", 20.0)

    assert play(first, second, third) == [None] * 3


def test_a_rank_that_never_comes_is_told_with_its_last_call() -> None:
    def alone(order: CallOrder) -> None:
        order.enter("a", (0, 1), "one", 20.0)
        order.enter("a", (0, 1), "two", 0.3)

    first, second = play(alone, lambda order: order.enter("a", (0, 1), "one", 20.0))
    assert second is None and isinstance(first, DeviceTimeout)
    assert re.search(r"rank 1 did not come to two at .* within 0.3 s; its last call: one at ", str(first))
