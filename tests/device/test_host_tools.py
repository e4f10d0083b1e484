"""The timeline's trace, without a GPU."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest

from peerlane.device.host.timeline import Event, decode
from peerlane.device.tools.trace import observed_spans, trace, write_trace
from peerlane.errors import UsageError


def ring(events: list[tuple[int, int, int]], capacity: int) -> bytes:
    """As the device leaves it: a count, then the events, each in the place of its number."""
    places = [bytes(16)] * capacity
    for number, event in enumerate(events):
        places[number % capacity] = struct.pack("<QII", *event)
    return struct.pack("<I12x", len(events)) + b"".join(places)


WAIT, STORE = 4, 0
CONSUMER = 2 << 24


def test_a_ring_gives_its_events_in_the_order_of_time() -> None:
    decoded = decode(ring([(50, CONSUMER | 3, WAIT << 1), (90, CONSUMER | 3, WAIT << 1 | 1), (70, 0, STORE << 1)], capacity=8))
    assert decoded == [Event(50, 2, 3, WAIT, False), Event(70, 0, 0, STORE, False), Event(90, 2, 3, WAIT, True)]


def test_an_overwritten_start_leaves_its_span_out() -> None:
    events = [(10, 0, WAIT << 1), (20, 0, WAIT << 1 | 1), (30, 0, STORE << 1), (40, 0, STORE << 1 | 1)]
    spans = [item for item in trace([decode(ring(events, capacity=3))])["traceEvents"] if item["ph"] == "X"]
    assert [(span["name"], span["ts"], span["dur"]) for span in spans] == [("store", 0.01, 0.01)]


def test_groups_of_one_role_have_tracks_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    second_consumer = (2 + 16) << 24
    events = [
        (5, second_consumer | 3, 5 << 1),
        (9, second_consumer | 3, 5 << 1 | 1),
        (7, CONSUMER | 3, 5 << 1),
        (8, CONSUMER | 3, 5 << 1 | 1),
    ]
    observed = SimpleNamespace(read=lambda: decode(ring(events, capacity=8)))
    monkeypatch.setattr("peerlane.device.tools.trace.observed", [observed])
    assert observed_spans(9) == [["compute", "consumer", 3, 7, 8], ["compute", "consumer 1", 3, 5, 9]]
    assert observed_spans(1) == [["compute", "consumer 1", 3, 5, 9]]


def test_all_ranks_are_in_one_trace_on_one_clock(tmp_path: Path) -> None:
    first = [Event(1000, 2, 3, WAIT, False), Event(4000, 2, 3, WAIT, True)]
    second = [Event(500_000, 0, 0, 16, False), Event(501_500, 0, 0, 16, True)]
    write_trace(tmp_path / "trace.json", [first, second], names={16: "dequantise"}, offsets_ns=[0, -498_000])
    written = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [(item["pid"], item["name"], item["ts"], item["dur"]) for item in written if item["ph"] == "X"]
    assert spans == [(0, "wait", 0.0, 3.0), (1, "dequantise", 1.0, 1.5)]
    assert {item["args"]["name"] for item in written if item["ph"] == "M"} == {"rank 0", "rank 1", "block 3 consumer", "block 0 block"}
    with pytest.raises(UsageError, match="1 clock offsets for 2 ranks"):
        trace([first, second], offsets_ns=[0])
