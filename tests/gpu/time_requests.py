"""Where the time of evaluations goes: what the supervisor asks of its ranks, how often, and how long it waits for the answers.

    python tests/gpu/time_requests.py [--problem 1-8] [--world-size 2] [--preset pkb] [--mode eager,graph] [--device cuda]
                                      [--candidate FILE]

Judges the candidate (by default the references), and prints a line per problem, its phases, and a table of requests: milliseconds per
evaluation, times per evaluation, milliseconds each. Requests that two groups answer at the same time count twice.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from peerlane.evaluate import EvaluationPlan, Result, evaluate
from peerlane.evaluate.candidates import discover
from peerlane.evaluate.evaluator import Silent
from peerlane.evaluate.processes.protocol import Message
from peerlane.evaluate.processes.rank_group import RankGroup

Request = tuple[str, str, str, str]
"""Who was asked, for what, in which launch mode, for which side."""


@dataclass
class Book:
    """What was asked, how often, and the seconds until all ranks had answered."""

    counts: dict[Request, int] = field(default_factory=lambda: defaultdict(int))
    seconds: dict[Request, float] = field(default_factory=lambda: defaultdict(float))
    open: dict[int, tuple[Request, float]] = field(default_factory=dict)

    def watch(self) -> Any:
        """Writes down every request of every rank group, while the context is entered."""
        begin, finish = RankGroup.begin, RankGroup.finish

        def begins(group: RankGroup, requests: Message | Sequence[Message], phase: str, deadline_s: float) -> None:
            first = requests if isinstance(requests, dict) else requests[0]
            asked = (group.role, str(first["op"]), str(first.get("mode", "")), str(first.get("side", "")))
            self.open[id(group)] = asked, time.perf_counter()
            begin(group, requests, phase, deadline_s)

        def finishes(group: RankGroup) -> list[Message]:
            answers = finish(group)
            if (asked := self.open.pop(id(group), None)) is not None:
                self.counts[asked[0]] += 1
                self.seconds[asked[0]] += time.perf_counter() - asked[1]
            return answers

        return mock.patch.multiple(RankGroup, begin=begins, finish=finishes)


class Watch(Silent):
    """Prints every result as it comes, with the seconds of its phases."""

    def finished(self, result: Result) -> None:
        phases = " ".join(f"{phase} {seconds:.2f}" for phase, seconds in result.stage_seconds.items())
        rounds = " ".join(f"{speed.mode} {speed.rounds} rounds" for speed in result.speed if speed.status == "measured")
        print(
            f"{sum(result.stage_seconds.values()):6.2f} s  "
            f"{result.problem.id} {result.problem.slug}: {result.verdict.kind}; {phases}; {rounds}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problem", default="1-8")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--preset", default="pkb")
    parser.add_argument("--mode", default="eager,graph")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--candidate", default="reference")
    options = parser.parse_args()
    book, begin = Book(), time.perf_counter()
    with book.watch():
        results = evaluate(
            EvaluationPlan(
                candidates=discover([options.candidate]),
                problems=options.problem,
                presets=(options.preset,),
                world_sizes=(options.world_size,),
                modes=tuple(options.mode.split(",")),
                device=options.device,
            ),
            Watch(),
        )
    whole_s, count = time.perf_counter() - begin, max(len(results), 1)
    print(f"{len(results)} evaluations in {whole_s:.1f} s, {whole_s / count:.2f} s each")
    print(f"{'ms per evaluation':>18} {'times':>7} {'ms each':>8}  request")
    for asked, seconds in sorted(book.seconds.items(), key=lambda item: -item[1]):
        times = book.counts[asked]
        print(f"{seconds / count * 1e3:18.1f} {times / count:7.1f} {seconds / times * 1e3:8.2f}  {' '.join(filter(None, asked))}")


if __name__ == "__main__":
    main()
