"""Problems 82 to 84, log-probabilities under top-k and top-p, on one GPU: first judged in float64, then timed as replayed graphs.

    PYTHONPATH=src:tests/gpu python tests/gpu/bench_sampling.py --world 1|2 [--only TEXT] [--check] [--sweep] [--out FILE]

Inputs are those of the problems' production presets, and of some filters that no preset has. With ``--world 2`` two ranks share the GPU:
each has half of the SMs and half of the vocabulary. A part of the tokens is judged as the problem judges it. Repeated launches must give
the same bits, and so must all ranks of problems 82 and 83. Bandwidth is the problem's bytes, of all ranks, over the time. ``of_peak`` is
its share of the GPU's data sheet. ``--only 82`` or ``--only llama3`` takes rows whose name has this text. ``--sweep`` also times other
shapes of blocks. To time another version of the kernels, put that one's ``src`` on PYTHONPATH. Takes less than a minute without
``--sweep``, ends by itself after four, and exits with 1 if an answer was wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from check_kernels import captured, faults_told

from peerlane import problems
from peerlane.device.host.local import LocalRanks
from peerlane.hardware.environment import record
from peerlane.problems.contract import Case, Draw
from peerlane.solutions.families import nucleus

BF16, FP32 = torch.bfloat16, torch.float32
LIMIT_S, STRETCHES, STRETCH_S = 240, 5, 0.03
JUDGED_TOKENS, REPEATS = 256, 10
PEAKS = {"H200": 4.8e12, "H100": 3.35e12}
"""Bytes per second of HBM, by a part of the GPU's name."""
PRODUCTION = ("production_llama3_rl", "production_qwen3_rl", "production_deepseek_v3_rl")
SHAPES = ((1024, 8), (1024, 4), (1024, 2), (1024, 1))
"""Threads of a block and its teams."""
Call = Callable[[], torch.Tensor]


def preset(number: int, name: str, world: int, **changed: Any) -> Case:
    """A preset's first case, also on one rank."""
    case = problems.get(number).cases(name, 2)[0]
    return dataclasses.replace(case, world_size=world, params={**case.params, **changed})


def rows(world: int) -> Iterator[tuple[str, Case]]:
    for number in (82, 83, 84):
        for name in PRODUCTION:
            yield f"{number} {name.removeprefix('production_').removesuffix('_rl')}", preset(number, name, world)
    yield "82 sweep_8192", preset(82, "sweep_8192", world)
    llama = PRODUCTION[0]
    yield "82 llama3 top_k 500", preset(82, llama, world, top_k=500, top_p=1.0)
    yield "82 llama3 top_k 500 top_p", preset(82, llama, world, top_k=500, top_p=0.9)
    yield "82 llama3 no filter", preset(82, llama, world, top_p=1.0)
    yield "82 llama3 large logits", preset(82, llama, world, scale=60.0)
    yield "82 llama3 16 tokens", preset(82, llama, world, batch=1, sequence=16)
    float32 = dataclasses.replace(preset(82, llama, world, batch=4), dtype=FP32)
    yield "82 llama3 float32", float32
    yield "82 llama3 tied float32", dataclasses.replace(float32, params={**float32.params, "pattern": "tied", "top_k": 40, "batch": 1})


def draw(case: Case, rank: int) -> tuple[Any, ...]:
    source = Draw(secret="bench", case_key=case.key, slot=0, block=0, rank=rank, device="cuda")
    return problems.get(case.problem).inputs(case, rank, source)


def call(group: Any, case: Case, args: Sequence[Any]) -> torch.Tensor:
    """The solution's, on arguments of the problem."""
    weight, filters = (args[2], (args[4], args[5])) if case.problem == 84 else (None, (args[3], args[4]))
    return nucleus.filtered_logits(group, args[0], args[1], filters, weight)


def answers(ranks: LocalRanks, case: Case, inputs: Sequence[Sequence[Any]]) -> list[torch.Tensor]:
    torch.cuda.synchronize()
    outputs = [call(group, case, inputs[group.rank]) for group in ranks.each()]
    ranks.synchronize()
    return outputs


def checksum(outputs: Sequence[torch.Tensor]) -> list[int]:
    return [int(out.view(torch.int32).sum(dtype=torch.int64)) for out in outputs]


def judge(ranks: LocalRanks, case: Case, inputs: Sequence[Sequence[Any]]) -> tuple[float, bool]:
    """The largest error of some tokens over what is allowed, and whether all launches and ranks have the same bits."""
    problem, first = problems.get(case.problem), answers(ranks, case, inputs)
    kept = min(case["sequence"], JUDGED_TOKENS // case["batch"])
    part = dataclasses.replace(case, params={**case.params, "sequence": kept})
    shorter = [tuple(arg[:, :kept].contiguous() if isinstance(arg, torch.Tensor) else arg for arg in args) for args in inputs]
    worst, compare = 0.0, problem.compare
    assert compare is not None
    for rank, got in enumerate(first):
        scores = compare(part, got[:, :kept].contiguous(), problem.oracle(part, shorter, rank), "random")
        worst = max(worst, *(score.ratio for score in scores))
    sums = checksum(first)
    same = case.problem == 84 or all(torch.equal(first[0], other) for other in first)
    del first
    for _ in range(REPEATS):
        same = same and checksum(answers(ranks, case, inputs)) == sums
    return worst, same


def microseconds(ranks: LocalRanks, case: Case, inputs: Sequence[Sequence[Any]]) -> float:
    """Of a call on all ranks, the median of some stretches."""
    answers(ranks, case, inputs)
    torch.cuda.synchronize()

    def work(_: int, rank: int) -> None:
        call(ranks.groups[rank], case, inputs[rank])

    graphs = [captured(ranks, work, 0, rank) for rank in range(len(inputs))]
    streams = ranks.groups[0].shared.streams

    def stretch(count: int) -> float:
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call, unused-ignore]
        begin.record(streams[0])
        for stream in streams[1:]:
            stream.wait_event(begin)
        for _ in range(count):
            for stream, graph in zip(streams, graphs, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
        for stream in streams[1:]:
            streams[0].wait_stream(stream)
        end.record(streams[0])
        end.synchronize()
        return float(begin.elapsed_time(end)) / count * 1e3

    stretch(1)
    count = max(2, int(STRETCH_S * 1e6 / stretch(2)))
    return statistics.median(stretch(count) for _ in range(STRETCHES))


def peak() -> float:
    return next((rate for part, rate in PEAKS.items() if part in torch.cuda.get_device_name()), PEAKS["H100"])


def report(name: str, case: Case, us: float, facts: dict[str, Any]) -> dict[str, Any]:
    nbytes = sum(problems.get(case.problem).cost(case, rank).hbm_bytes for rank in range(case.world_size))
    rate = nbytes / us * 1e6
    print(f"  {name:28} {us:10.1f} us {rate / 1e9:8.0f} GB/s {rate / peak():7.1%} of peak   {facts}", flush=True)
    return {
        "name": name,
        "world": case.world_size,
        "us": round(us, 1),
        "GBps": round(rate / 1e9),
        "of_peak": round(rate / peak(), 4),
        **facts,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=1, choices=(1, 2))
    parser.add_argument("--only", default="")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    signal.alarm(LIMIT_S)
    began, found, right = time.monotonic(), [], True
    print(f"{torch.cuda.get_device_name()}, {options.world} ranks", flush=True)
    with faults_told():
        for name, case in rows(options.world):
            if options.only not in name:
                continue
            inputs = [draw(case, rank) for rank in range(options.world)]
            ranks = LocalRanks(options.world)
            error, same = judge(ranks, case, inputs)
            correct = error <= 1 and same
            right &= correct
            print("ok  " if correct else "FAIL", f"{name}: {error:.3g} of the tolerance, same bits: {same}", flush=True)
            if not options.check:
                us = microseconds(ranks, case, inputs)
                found.append(report(name, case, us, {"of_tolerance": round(error, 4), "same_bits": same}))
            for threads, teams in SHAPES if options.sweep else ():
                with mock.patch.multiple(nucleus, THREADS=threads, TEAMS=teams):
                    us = microseconds(LocalRanks(options.world), case, inputs)
                    found.append(report(name, case, us, {"threads": threads, "teams": teams}))
            del inputs, ranks
            gc.collect()
            torch.cuda.empty_cache()
    print(f"took {time.monotonic() - began:.0f} s", flush=True)
    if options.out is not None:
        with options.out.open("a") as file:
            file.write(json.dumps({"environment": record(), "right": right, "rows": found}) + "\n")
    sys.exit(not right)


if __name__ == "__main__":
    main()
