"""What the profiler records of calls of the kit's own process groups, which PyTorch does not record itself."""

import multiprocessing

import torch

from peerlane.device.backend.ordering import FinishedWork
from peerlane.device.backend.spans import spanned
from peerlane.device.host.tally import count
from peerlane.evaluate.audit.activity import activity
from peerlane.evaluate.audit.recorder import recording


def test_a_collective_of_the_kit_s_backend_is_seen_and_counted() -> None:
    with recording(torch.device("cpu"), "a mark") as found:
        count("all_reduce", "cuda", "kit")
        spanned("all_reduce", [torch.ones(4)], FinishedWork, captured=False)
    assert sorted(found.marks) == ["a mark:begin", "a mark:end"] and found.collectives == 1
    assert activity(found.host, found.device).forbidden()[-1:] == ("peerlane:all_reduce",)


def test_nothing_is_counted_where_nothing_is_called() -> None:
    with recording(torch.device("cpu"), "a mark") as found:
        torch.ones(4).add_(1)
    assert found.collectives == 0
    assert activity(found.host, found.device).forbidden() == ()


def seen_span() -> None:
    spanned("all_reduce", [torch.ones(4)], FinishedWork, captured=False)


def test_a_forked_process_has_spans_of_its_own() -> None:
    """The thread that ends them does not come along."""
    seen_span()
    child = multiprocessing.get_context("fork").Process(target=seen_span)
    child.start()
    child.join(20)
    ended = child.exitcode
    child.kill()
    assert ended == 0
