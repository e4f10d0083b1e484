"""Bounds of stored results, and times of known algorithms at measured rates."""

import json
from pathlib import Path

import pytest

from peerlane import problems
from peerlane.hardware.ceilings import Ceilings, Measurement
from peerlane.hardware.profiles import H200_SXM
from peerlane.hardware.roofline import steps_us
from peerlane.problems.contract import Problem, step
from peerlane.report.bounds import attainable_us, bound_us
from peerlane.results.reader import ResultsReader
from peerlane.results.result import Result
from sample_results import measured, result

ROOT = Path(__file__).parents[2] / "results"
PRODUCTION = ROOT / "h200x2" / "production_solutions.jsonl"
CEILINGS = Ceilings.from_json(json.loads((ROOT / "h200x2" / "ceilings.json").read_text()))
MODELLED = [problem for problem in problems.suite() if not isinstance(problem.attainable, str)]


def beats_bound(result: Result) -> bool:
    """Whether the kernel or the reference is surely quicker than the bound, which a rank's own GPU and links alone allow."""
    least_us = None if result.node.place.shares_gpus else bound_us(result)
    sure = [speed for speed in result.speeds if not speed.copies_matter]
    return least_us is not None and any(min(speed.candidate_us.low, speed.reference_us.low) < least_us for speed in sure)


def test_no_stored_result_beats_its_bound() -> None:
    results = [(path, item) for path in ROOT.rglob("*.jsonl") for item in ResultsReader(path).results]
    assert sum(bound_us(item) is not None for _, item in results) > 600
    assert [(str(path), item.problem.id, item.preset) for path, item in results if beats_bound(item)] == []


def test_a_result_below_its_bound_is_found() -> None:
    assert not beats_bound(result()) and beats_bound(result(speed=(measured("eager", 40.0, 20.0), measured("graph", 40.0, 0.5))))


def test_the_bound_is_todays_or_else_the_stored_one() -> None:
    stored = result().speeds[0].utilisation[0].bound_us
    assert bound_us(result(preset="production_gone")) == stored != bound_us(result())


def ceilings(**medians: float) -> Ceilings:
    return Ceilings("a node", "", {}, {name: Measurement(value, value, value, 1) for name, value in medians.items()})


RATES = {"hbm_copy_tbps": 4.0, "nvlink_sm_store_gbps": 400.0, "packet_round_us": 2.0, "barrier_round_us": 3.0, "kernel_launch_us": 4.0}


def test_steps_follow_each_other_and_each_overlaps_by_hand() -> None:
    sort, exchange = step("sort", hbm=40e6), step("exchange", hbm=4e6, link=8e6, barriers=2)
    assert steps_us([[sort, exchange]] * 2, ceilings(**RATES), H200_SXM, launched=False) == pytest.approx([10.0, 20.0 + 6.0])
    barriers = step("search", barriers=5)
    assert steps_us([[barriers]] * 2, ceilings(**RATES), H200_SXM, launched=False) == [15.0]
    assert steps_us([[barriers]] * 2, ceilings(**RATES), H200_SXM, launched=True) == [4.0 + 15.0], "each is launched"
    assert steps_us([[step("little", hbm=4.0)], [step("little", hbm=40e6)]], ceilings(**RATES), H200_SXM, launched=False) == [10.0]


def test_random_places_take_their_own_time() -> None:
    gather = step("gather", hbm=4e6, places={"read_rows_512b_tbps": 4e6, "swap_words_gops": 3e3})
    rates = ceilings(**RATES, read_rows_512b_tbps=2.0, swap_words_gops=1.0)
    assert steps_us([[gather]] * 2, rates, H200_SXM, launched=False) == pytest.approx([2.0 + 3.0])
    assert steps_us([[gather]] * 2, ceilings(**RATES, read_rows_512b_tbps=2.0), H200_SXM, launched=False) is None


@pytest.mark.parametrize("missing", RATES)
def test_without_a_measured_rate_there_is_no_time(missing: str) -> None:
    assert steps_us([[step("sort", hbm=1.0)]], ceilings(**RATES | {missing: 1.0}), H200_SXM, launched=False) is not None
    rates = {name: value for name, value in RATES.items() if name != missing}
    assert steps_us([[step("sort", hbm=1.0)]], ceilings(**rates), H200_SXM, launched=False) is None
    assert steps_us([[step("product", flops={"bf16": 1.0})]], ceilings(**RATES), H200_SXM, launched=False) is None


@pytest.mark.parametrize("problem", MODELLED, ids=lambda problem: str(problem.id))
def test_an_algorithm_does_what_every_implementation_must(problem: Problem) -> None:
    assert not isinstance(problem.attainable, str)
    for world_size in (2, 4):
        case = next(case for preset in problem.family("production") for case in problem.cases(preset.name, world_size))
        for rank in range(world_size):
            least, done = problem.cost(case, rank), [item.cost for item in problem.attainable.steps(case, rank)]
            assert sum(cost.hbm_bytes for cost in done) >= least.hbm_bytes * 0.999
            assert sum(cost.egress_bytes for cost in done) >= max(least.egress_bytes, least.ingress_bytes) * 0.999
            assert sum(sum(cost.flops.values()) for cost in done) >= sum(least.flops.values())


def test_times_of_algorithms_belong_to_the_measured_node() -> None:
    stored = next(item for item in ResultsReader(PRODUCTION).results if item.problem.id == 85)
    times = attainable_us(stored, CEILINGS)
    assert times is not None and sum(times.values()) > (bound_us(stored) or 0) and "merge of the runs" in times
    assert attainable_us(result(), CEILINGS) is None, "of another node"
    without = stored.model_copy(update={"problem": stored.problem.model_copy(update={"id": 1})})
    assert isinstance(problems.get(1).attainable, str) and attainable_us(without, CEILINGS) is None
