"""What stands best for eager calls: how far estimates of one ratio scatter, from timed rounds of the reference against itself.

    python tests/gpu/compare_estimates.py [--problem 1,3,5] [--world-size 2] [--preset pkb] [--seconds 2.2] [--rounds 45] [--parts 4]
                                          [--save FILE | --calls FILE]

Times the references for ``--seconds`` each, draws ``--rounds`` of the rounds at random, again and again, and prints a line per problem: the
standard deviation of every estimate of the ratio, in percent. The last line is the root of the mean square over problems.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np

from peerlane.evaluate import EvaluationPlan, evaluate
from peerlane.evaluate.candidates import discover
from peerlane.evaluate.timing.speed import Race
from peerlane.evaluate.timing.statistics import _pooled_means, paired_interval
from peerlane.settings import StressRules, TimingRules

DRAWS = 200

Groups = Sequence[Sequence[float]]
Estimate = Callable[[Groups, Groups, np.ndarray], np.ndarray]
"""Logarithms of the ratio of two lists of blocks' times, for every row of how often each round is there."""


def pooled(low: float, high: float) -> Estimate:
    """By the means between two quantiles of all calls."""
    return lambda a, b, times: np.log(_pooled_means(a, times, (low, high)) / _pooled_means(b, times, (low, high)))


def round_by_round(a: Groups, b: Groups, times: np.ndarray) -> np.ndarray:
    """By the blocks' medians, a ratio for every round."""
    medians = [np.array([np.median(block) for block in blocks]) for blocks in (a, b)]
    drawn = [np.repeat(np.arange(len(a)), row) for row in times]
    return np.array([math.log(paired_interval(medians[0][rounds], over=medians[1][rounds]).median) for rounds in drawn])


ESTIMATES: dict[str, Estimate] = {
    "rounds": round_by_round,
    **{f"{share}%": pooled(share / 100 - 0.005, share / 100 + 0.005) for share in (5, 10, 20, 30, 50)},
    **{f"{low}-{high}%": pooled(low / 100, high / 100) for low, high in ((0, 20), (5, 40), (10, 30), (10, 50), (0, 100))},
}


Timed = dict[int, list[list[list[float]]]]
"""For every problem the warm calls of the reference's blocks, and of those of the other side, which is the reference too. Microseconds."""


def time_references(options: argparse.Namespace) -> Timed:
    """Times the references for so many seconds each."""
    timed: Timed = {}

    def keep(race: Race, budget_s: float) -> None:
        run(race, budget_s)  # the last one of a problem is the candidate's
        timed[race.runner.problem.id] = [[list(block.warm_us) for block in side] for side in (race.references, race.others)]

    run, never = Race.run, {"eager": 0.0, "graph": 0.0}
    limits = {"budget_s": options.seconds, "usual_s": options.seconds, "max_rounds": 10_000, "target_half_width": never}
    rules = replace(TimingRules(), **limits, **({"eager_parts": options.parts} if options.parts else {}))
    plan = EvaluationPlan(
        candidates=discover(["reference"]),
        problems=options.problem,
        presets=(options.preset,),
        world_sizes=(options.world_size,),
        modes=("eager",),
        device="cuda",
        rules=rules,
        stress=StressRules(budget_s=0.05),
    )
    with mock.patch.object(Race, "run", keep):
        evaluate(plan)
    return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problem", default="1,3,5,8,9,12,16,21,23,29,31,36-38,40,41,43,46,58,65")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--preset", default="pkb")
    parser.add_argument("--seconds", type=float, default=2.2)
    parser.add_argument("--rounds", type=int, default=45)
    parser.add_argument("--parts", type=int, help="of a block; by default as in evaluations")
    parser.add_argument("--save", type=Path, help="where to keep the calls")
    parser.add_argument("--calls", type=Path, help="calls that were kept, in place of new ones")
    options = parser.parse_args()
    if options.calls:
        timed = {int(problem): sides for problem, sides in json.loads(options.calls.read_text()).items()}
    else:
        timed = time_references(options)
    if options.save:
        options.save.write_text(json.dumps(timed))
    print(f"{'problem':>8} {'rounds':>7}  " + " ".join(f"{name:>7}" for name in ESTIMATES))
    generator, found = np.random.default_rng(0), []
    for problem, blocks in timed.items():
        count = len(blocks[1])
        times = generator.multinomial(options.rounds, np.full(count, 1 / count), size=DRAWS)
        found.append([float(np.std(estimate(*blocks, times))) for estimate in ESTIMATES.values()])
        print(f"{problem:8} {count:7}  " + " ".join(f"{100 * value:7.2f}" for value in found[-1]))
    print(f"{'all':>8} {'':7}  " + " ".join(f"{100 * value:7.2f}" for value in np.sqrt(np.mean(np.square(found), axis=0))))


if __name__ == "__main__":
    main()
