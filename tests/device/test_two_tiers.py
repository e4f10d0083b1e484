"""Two tiers in the emulator: right protocols run clean, and broken twins are caught, over memory that no load or store reaches."""

import ctypes
from pathlib import Path

import pytest
import torch

from peerlane.emulator import Report, Scenario, check
from peerlane.errors import UsageError

SOURCE = Path(__file__).parent / "protocols" / "two_tiers.cu"
RIGHT = {"flushes": 0, "signals_with_put": 1}
LAUNCHES, SCHEDULES, WORDS = 3, 60, 32


class Places(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("part", "ready", "total", "done", "outbox", "inboxes", "counter"))


def report(twin: int) -> Report:
    scenario = Scenario("two tiers", SOURCE, 4, {"TWIN": twin}, nodes=2)
    arena, remote = scenario.arena(1024), scenario.remote(1024)
    inside, between = (arena.take(128) for _ in range(4)), (remote.take(nbytes) for nbytes in (128, 256, 128))
    places = Places(*inside, *between)
    for epoch in range(1, LAUNCHES + 1):
        given = [(torch.arange(WORDS) * (rank + 2) + epoch).int() for rank in range(4)]
        total = torch.stack(given).sum(0).int()
        data, out = scenario.buffer("in", given), scenario.buffer("out", [torch.zeros_like(total)] * 4, expected=[total] * 4)
        scenario.launch("sum_over_nodes", 1, WORDS, [arena, remote, places, data, out, ctypes.c_uint32(epoch)])
    return check(scenario, schedules=SCHEDULES)


@pytest.mark.parametrize("twin", RIGHT.values(), ids=RIGHT)
def test_a_right_protocol_is_clean(twin: int) -> None:
    assert report(twin).clean


@pytest.mark.parametrize(
    ("twin", "kind", "memory"),
    [(2, "race", "remote memory+"), (3, "race", "remote memory+"), (4, "race", "remote memory+")],
    ids=["never_flushes", "reuses_source", "has_one_inbox"],
)
def test_a_broken_twin_is_a_race_across_tiers(twin: int, kind: str, memory: str) -> None:
    found = report(twin)
    assert found.findings and found.findings[0].kind == kind and memory in str(found), found
    assert "asynchronously" in str(found)
    if twin == 2:
        assert found.caught == SCHEDULES, "nothing orders the two, whatever the schedule"


@pytest.mark.parametrize(("twin", "kind"), [(5, "crash"), (6, "illegal_address")], ids=["arena", "remote memory"])
def test_no_store_reaches_another_node(twin: int, kind: str) -> None:
    assert [finding.kind for finding in report(twin).findings] == [kind]


def test_nodes_have_as_many_ranks_each() -> None:
    with pytest.raises(UsageError, match="3 ranks in 2 nodes"):
        Scenario("uneven", SOURCE, 3, nodes=2)
