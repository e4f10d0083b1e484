"""The picture on a problem's page: what depends on whose data is found by asking the oracle, and drawn as it was found."""

import xml.etree.ElementTree as ET

import pytest

from docs.build.dependence import Answer, Dependence, Held, find_dependence
from docs.build.shard_diagram import COLOURS, MOST_STEPS, shard_diagram
from peerlane import problems
from peerlane.problems import Cost
from peerlane.problems.contract.count import Step

ALL = frozenset(range(4))
SVG = "{http://www.w3.org/2000/svg}"


def dependence(number: int) -> Dependence:
    problem = problems.get(number)
    case = problem.cases("pkb", 4)[0]
    return find_dependence(problem, 4, [problem.cost(case, rank) for rank in range(4)])


def drawn(dependence: Dependence, steps: tuple[Step, ...] = (), costs: tuple[Cost, ...] = ()) -> ET.Element:
    return ET.fromstring(shard_diagram(dependence, {"x": "bfloat16[8]"}, costs, steps, "A <title>", "pkb"))


def texts(picture: ET.Element) -> list[str]:
    return [item.text or "" for item in picture.iter(f"{SVG}text")]


@pytest.mark.parametrize(
    ("number", "needs"),
    [
        (1, [ALL] * 4), (3, [{0}] * 4), (4, [ALL, {1}, {2}, {3}]), (54, [ALL] * 4), (60, [ALL] * 4), (64, [ALL] * 4),
        (70, [ALL] * 4), (74, [{0, 1}, {0, 1}, ALL, ALL]), (87, [{0, 1}, {0, 1, 2}, {1, 2, 3}, {2, 3}]),
    ],
    ids=("all_reduce", "broadcast", "reduce", "shared_work", "complex", "graph", "integers", "as_costs_say", "halo"),
)  # fmt: skip
def test_needs_are_those_of_the_operation(number: int, needs: list[set[int]]) -> None:
    assert list(dependence(number).needs) == needs


def test_a_gathered_answer_has_a_stripe_of_every_rank() -> None:
    found = dependence(2)
    assert found.answers[0].maps == (tuple((frozenset({rank}),) for rank in range(4)),) * 4
    assert found.held == (Held("tensor", replicated=False),)


def test_arguments_that_all_ranks_share_are_found() -> None:
    assert [item.replicated for item in dependence(71).held] == [False, True]


def test_messages_are_drawn_from_source_to_target() -> None:
    some = Dependence(2, (Held("x", False),), (Answer("y", (((frozenset({1}),),), None)),), (frozenset({1}), frozenset()))
    picture = drawn(some, costs=(Cost(0, 0, 2e6), Cost(0, 2e6, 0)))
    (message,) = (item for item in picture.iter(f"{SVG}path") if item.get("class") == "message")
    assert message.get("stroke") == COLOURS[1]
    assert {"x: bfloat16[8]", "2 MB out", "2 MB in", "0 B in", "empty", "y"} <= set(texts(picture))


def test_a_part_of_several_ranks_has_stripes_of_their_colours() -> None:
    both = frozenset({0, 1})
    picture = drawn(Dependence(2, (Held("x", True),), (Answer("y", (((both,),),) * 2),), (both, both)))
    (pattern,) = picture.iter(f"{SVG}pattern")
    assert [item.get("fill") for item in pattern] == list(COLOURS[:2])
    assert "the same on all ranks" in texts(picture)


def test_a_long_reference_is_cut_in_the_middle_and_says_so() -> None:
    steps = tuple(Step("send" if number % 2 else "compute", ranks=2 * (number % 2)) for number in range(MOST_STEPS + 6))
    written = texts(drawn(Dependence(2, (), (), (frozenset(), frozenset())), steps))
    assert "6 more steps" in written and sum("send" in text for text in written) == MOST_STEPS // 2
    assert "none in the case that was drawn" in written
