"""Timelines: what is read of ranks' recordings, what is computed from them, and the files that people open."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from peerlane.errors import UsageError
from peerlane.evaluate import wire
from peerlane.evaluate.audit.recorder import Recording
from peerlane.evaluate.audit.timeline import HOST_LANE, Span, Timeline, perfetto, timeline_of
from peerlane.report.timeline import draw_timelines, shares_table

LABELS = {"candidate": "mine", "problem": 13, "slug": "gemm_allreduce", "preset": "pkb", "world_size": 2, "mode": "graph"}


def recorded(*events: tuple[str, int, int, int], roles: Any = None) -> wire.Recording:
    return wire.Recording({}, {}, ["begin", "end"], 0, 900, [], list(events), roles)


def span(kind: str, start: float, end: float, rank: int = 0) -> Span:
    return Span("kernel", rank, 7, kind, start, end)  # type: ignore[arg-type]


def test_times_start_with_the_first_event_on_a_device_and_kinds_come_from_names_and_code() -> None:
    recordings = [
        recorded(("aten::mm", -1, 900, 950), ("gemm", 7, 1_000, 3_000), ("ncclDevKernel_AllReduce", 8, 2_000, 4_000)),
        recorded(("fused", 7, 1_500, 5_500), ("exchange_packets", 7, 5_500, 5_600), ("c10d::allreduce_", -1, 1_000, 1_100)),
    ]
    timeline = timeline_of(recordings, 1, {"fused": {"sm_load_store"}, "gemm": set()}, LABELS)
    assert {(item.name, item.kind) for item in timeline.spans} == {
        ("aten::mm", "host"),
        ("gemm", "compute"),
        ("ncclDevKernel_AllReduce", "communication"),
        ("fused", "both"),
        ("exchange_packets", "communication"),
        ("c10d::allreduce_", "communication"),
    }
    assert [(item.start_us, item.end_us) for item in timeline.timed_spans(0)] == [(0.0, 2.0), (1.0, 3.0)]


class Recorded:
    """An event as the profiler gives it."""

    def __init__(self, name: str, device: Any, start: int, correlation: int = 0) -> None:
        self.name, self.device_type, self.start_ns = (lambda: name), (lambda: device), (lambda: start)
        self.correlation_id, self.duration_ns = (lambda: correlation), (lambda: 5)
        self.is_user_annotation, self.device_resource_id = (lambda: False), (lambda: 7)


def test_what_is_launched_before_the_calls_is_left_out_even_if_it_runs_later() -> None:
    cpu, gpu = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA
    events = [
        Recorded("cudaLaunchKernel", cpu, 10, 1),
        Recorded("word:calls", cpu, 20),
        Recorded("aten::mm", cpu, 21, 1),  # operators are numbered by themselves
        Recorded("cudaGraphLaunch", cpu, 22, 2),
        Recorded("barrier", gpu, 30, 1),
        Recorded("gemm", gpu, 40, 2),
    ]
    record = Recording("word")
    record.keep_events(events, "word")
    assert record.events == [("gemm", 7, 40, 45), ("aten::mm", -1, 21, 26), ("cudaGraphLaunch", -1, 22, 27)]


def test_stamps_of_another_clock_are_placed_inside_the_kernels_that_made_them(tmp_path: Path) -> None:
    kernels = [("fused", 7, 1_000, 3_000), ("copy", 7, 3_100, 3_200), ("fused", 7, 4_000, 6_000), ("copy", 7, 6_300, 6_400)]
    stamps = [("wait", "storer", 5, 90_100, 91_900), ("compute", "consumer 1", 5, 93_050, 95_000)]
    first, second = recorded(*kernels, roles=stamps), recorded(*kernels, roles=[(*s[:3], s[3] + 10, s[4] + 10) for s in stamps])
    timeline = timeline_of([first, second], 2, {}, LABELS)
    by_rank = [[(s.name, s.role, s.block, s.start_us, s.end_us) for s in timeline.roles if s.rank == rank] for rank in (0, 1)]
    assert by_rank[0] == [("wait", "storer", 5, 0.095, 1.895), ("compute", "consumer 1", 5, 3.045, 4.995)]
    # The ranks share a GPU's clock, so 10 ns between their stamps stay 10 ns.
    assert by_rank[1][0][3] == pytest.approx(by_rank[0][0][3] + 0.010)
    tracks = {item["args"]["name"] for item in perfetto([timeline])["traceEvents"] if item["name"] == "thread_name"}
    assert {"block 5 storer", "block 5 consumer 1"} <= tracks
    timeline.write(tmp_path / "side.json")
    assert Timeline.read(tmp_path / "side.json") == timeline
    draw_timelines([timeline], tmp_path / "out.svg")
    assert "block 5, consumer 1" in (tmp_path / "out.svg").read_text()


def test_shares_are_those_of_the_busiest_rank() -> None:
    spans = (span("compute", 0, 40), span("communication", 30, 60), span("communication", 80, 90), span("compute", 0, 10, rank=1))
    found = Timeline(2, 2, spans, LABELS).shares()
    assert found.us_per_call == 45
    assert (found.computing, found.communicating) == pytest.approx((40 / 90, 40 / 90))
    assert (found.overlap, found.idle) == pytest.approx((10 / 40, 20 / 90))


def test_a_call_is_counted_from_the_moment_when_all_ranks_have_begun() -> None:
    waits = (span("both", 0, 60), span("both", 62, 80))
    late = (span("both", 40, 60, rank=1), span("both", 62, 82, rank=1))
    found = Timeline(2, 2, waits + late, LABELS).shares()
    assert (found.us_per_call, found.busy_us_per_call) == (21, 20)


def test_a_kernel_that_does_both_hides_all_of_its_communication() -> None:
    found = Timeline(1, 1, (span("both", 0, 50),), LABELS).shares()
    assert (found.computing, found.communicating, found.overlap, found.idle) == (1, 1, 1, 0)


def test_the_file_has_a_process_per_side_and_rank_and_survives_hostile_names(tmp_path: Path) -> None:
    hostile = Span('</script>"\n', 1, HOST_LANE, "host", 0, 1)
    sides = [Timeline(2, 1, (span("compute", 0, 5), hostile), LABELS), Timeline(2, 1, (span("both", 0, 3),), {**LABELS, "candidate": "b"})]
    sides[0].write(tmp_path / "side.json")
    assert Timeline.read(tmp_path / "side.json") == sides[0]
    events = json.loads(json.dumps(perfetto(sides)))["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {0: "mine rank 0", 1: "mine rank 1", 1000: "b rank 0", 1001: "b rank 1"}
    assert [event["dur"] for event in events if event["ph"] == "X"] == [5, 1, 3]


def test_the_picture_and_the_table_show_both_sides(tmp_path: Path) -> None:
    sides = [
        Timeline(1, 1, (span("compute", 0, 5), span("communication", 5, 9)), {**LABELS, "candidate": "reference", "bound_us": 2.0}),
        Timeline(1, 1, (span("both", 0, 6),), LABELS),
    ]
    draw_timelines(sides, tmp_path / "out.svg")
    picture = (tmp_path / "out.svg").read_text()
    assert "reference: 9.0 us per call, 0 % of the communication overlapped" in picture and "mine: 6.0 us per call" in picture
    assert shares_table(sides).rows[1][:2] == ("mine", "6.0")


def test_an_empty_timeline_is_said_to_be_one() -> None:
    with pytest.raises(UsageError, match="the timeline of mine is empty"):
        Timeline(2, 1, (), LABELS).shares()
