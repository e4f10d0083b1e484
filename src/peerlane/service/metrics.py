"""Counters and gauges of the service, as text that Prometheus reads."""

import itertools
import os
import time
from collections.abc import Iterable, Mapping

from peerlane.service.node import Histogram, Node
from peerlane.service.queue import JobQueue

_STARTED = time.time()


def render_metrics(queue: JobQueue, node: Node, responses: Mapping[tuple[str, int], int]) -> str:
    """The exposition format, version 0.0.4."""
    times = os.times()
    counts = queue.counts()
    states = ("queued", "running", "done", "failed", "cancelled")
    metrics: list[tuple[str, str, str, Iterable[tuple[str, float]]]] = [
        ("peerlane_jobs", "gauge", "Jobs that the queue knows, by state.", [(f'state="{name}"', counts.get(name, 0)) for name in states]),
        ("peerlane_node_ready", "gauge", "1 while the node takes work.", [("", float(node.condition == "ready"))]),
        ("peerlane_verdicts_total", "counter", "Evaluations since the start, by verdict.", _labelled("kind", node.verdicts)),
        ("peerlane_evaluation_seconds_total", "counter", "Wall time of evaluations since the start.", [("", node.seconds)]),
        (
            "peerlane_responses_total",
            "counter",
            "Answers since the start, by route and status.",
            [(f'route="{route}",status="{status}"', count) for (route, status), count in sorted(responses.items())],
        ),
        ("process_cpu_seconds_total", "counter", "CPU time of the service without its ranks.", [("", times.user + times.system)]),
        ("process_resident_memory_bytes", "gauge", "Memory of the service without its ranks.", [("", _resident_bytes())]),
        ("process_start_time_seconds", "gauge", "Start of the service, since 1970.", [("", _STARTED)]),
    ]
    lines = []
    for name, kind, text, samples in metrics:
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        lines += [f"{name}{{{labels}}} {value:.15g}" if labels else f"{name} {value:.15g}" for labels, value in samples]
    for name, histogram in node.histograms.items():
        lines += _histogram(f"peerlane_{name}_seconds", f"Seconds of {name}, for every job that was judged.", histogram)
    return "\n".join(lines) + "\n"


def _histogram(name: str, text: str, histogram: Histogram) -> list[str]:
    counts = list(itertools.accumulate(histogram.counts))
    bounds = [*(f"{bound:g}" for bound in histogram.BOUNDS), "+Inf"]
    lines = [f"# HELP {name} {text}", f"# TYPE {name} histogram"]
    lines += [f'{name}_bucket{{le="{bound}"}} {count}' for bound, count in zip(bounds, counts, strict=True)]
    return [*lines, f"{name}_sum {histogram.total:.15g}", f"{name}_count {counts[-1]}"]


def _labelled(label: str, counts: Mapping[str, int]) -> list[tuple[str, float]]:
    return [(f'{label}="{name}"', count) for name, count in sorted(counts.items())]


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
