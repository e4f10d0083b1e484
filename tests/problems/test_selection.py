"""Problem 79 against its definition, row by row, and what its comparison lets pass."""

import math
import random
from collections.abc import Callable, Sequence

import pytest
import torch

from peerlane import problems
from peerlane.problems.contract import Case
from peerlane.problems.p079_distributed_knn import allowed_error
from problem_cases import arguments, members, oracles, small

KNN = problems.get(79)


@pytest.mark.parametrize("case", [param for param in small(79) if "dense" not in param.id])
def test_nearest_neighbours_row_by_row(case: Case) -> None:
    inputs = arguments(case)
    for rank, (similarities, labels) in enumerate(oracles(case, inputs)):
        owners = members(case, rank)
        train = [row for q in owners for row in inputs[q][1].t().double().tolist()]
        names = [label for q in owners for label in inputs[q][2][0].tolist()]
        for query, found, found_labels in zip(inputs[rank][0].double().tolist(), similarities.value, labels.value, strict=True):
            products = [math.fsum(a * b for a, b in zip(query, row, strict=True)) for row in train]
            best = sorted(range(len(train)), key=lambda j: -products[j])[: case["k"]]
            torch.testing.assert_close(found, torch.tensor([products[j] for j in best], dtype=torch.float64), rtol=1e-12, atol=1e-12)
            # Among equal products the labels are any of theirs.
            distinct = [i for i, j in enumerate(best) if sum(abs(products[j] - other) < 1e-9 for other in products) == 1]
            assert [int(found_labels[i]) for i in distinct] == [names[best[i]] for i in distinct]


def judge_one_query(rows: Sequence[tuple[float, str]], answer: Sequence[tuple[float, str]]) -> tuple[bool, bool]:
    """Whether similarities and labels are right for one query of length 1 whose products with the rows, one number each, are given."""
    half = len(rows) // 2
    case = Case(79, "small", "any", 2, torch.bfloat16, params={"queries": 1, "rows": half, "depth": 1, "k": len(answer), "classes": 26})
    values = torch.tensor([[value for value, _ in rows]], dtype=torch.bfloat16)
    names = torch.tensor([[ord(label) for _, label in rows]])
    query = torch.ones(1, 1, dtype=torch.bfloat16)
    inputs = [(query, values[:, part], names[:, part], len(answer)) for part in (slice(half), slice(half, None))]
    expected = KNN.oracle(case, inputs, 0)
    got = (torch.tensor([[value for value, _ in answer]], dtype=torch.bfloat16), torch.tensor([[ord(label) for _, label in answer]]))
    similarities, labels = KNN.compare(case, got, expected, "random")
    return similarities.passed, labels.passed


ROWS = [(0.5, "c"), (0.875, "a"), (0.25, "a"), (0.75, "b"), (0.5, "d"), (-0.5, "e")]


def test_either_of_two_rows_tied_at_the_cut_is_right() -> None:
    assert judge_one_query(ROWS, [(0.875, "a"), (0.75, "b"), (0.5, "c")]) == (True, True)
    assert judge_one_query(ROWS, [(0.875, "a"), (0.75, "b"), (0.5, "d")]) == (True, True)
    # Rounding may exchange rows that lie one bfloat16 apart, here 2^-8.
    near = [(0.5 + 2**-8 if label == "c" else value, label) for value, label in ROWS]
    assert judge_one_query(near, [(0.875, "a"), (0.75, "b"), (0.5, "d")])[1]
    far = [(0.5 + 2**-6 if label == "c" else value, label) for value, label in ROWS]
    assert not judge_one_query(far, [(0.875, "a"), (0.75, "b"), (0.5, "d")])[1]


def test_labels_within_ties_come_in_any_order() -> None:
    rows = [(0.5, "c"), (0.75, "a"), (0.5, "d"), (0.25, "b")]
    assert judge_one_query(rows, [(0.75, "a"), (0.5, "d"), (0.5, "c")]) == (True, True)
    assert judge_one_query(rows, [(0.75, "c"), (0.5, "d"), (0.5, "a")]) == (True, False)


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        ([(0.875, "a"), (0.75, "b"), (0.5, "e")], "a label of a row that is too far"),
        ([(0.875, "a"), (0.75, "b"), (0.5, "x")], "a label that no row has"),
        ([(0.875, "a"), (0.75, "b"), (0.5, "b")], "a label used more often than near rows have it"),
        ([(0.875, "b"), (0.75, "a"), (0.5, "c")], "labels exchanged between similarities"),
        ([(0.875, "a"), (0.75, "a"), (0.5, "c")], "a nearer row of the same label that does not exist"),
        ([(0.875, "a"), (0.75, "c"), (0.5, "d")], "a neighbour missing, its similarity reported"),
        ([(0.875, "a"), (0.5, "c"), (0.5, "d")], "a neighbour missing, with its similarity"),
    ],
)
def test_wrong_labels(answer: list[tuple[float, str]], what: str) -> None:
    assert not judge_one_query(ROWS, answer)[1], what


@pytest.mark.parametrize(
    "values",
    [(0.75, 0.875, 0.5), (0.875, 0.75, 0.25), (0.875, 0.75, 0.53125), (0.875, math.nan, 0.5), (math.inf, 0.75, 0.5)],
    ids=["ascending", "too_small", "too_large", "nan", "inf"],
)
def test_wrong_similarities(values: tuple[float, ...]) -> None:
    labels = {0.875: "a", 0.75: "b"}
    assert not judge_one_query(ROWS, [(value, labels.get(value, "c")) for value in values])[0]


def matching(left: int, right: int, joined: Callable[[int, int], bool]) -> int:
    """Size of a maximum bipartite matching, by augmenting paths."""
    partner: dict[int, int] = {}

    def augment(i: int, seen: set[int]) -> bool:
        for j in range(right):
            if j not in seen and joined(i, j):
                seen.add(j)
                if j not in partner or augment(partner[j], seen):
                    partner[j] = i
                    return True
        return False

    return sum(augment(i, set()) for i in range(left))


def can_be_matched(rows: Sequence[tuple[float, str]], answer: Sequence[tuple[float, str]]) -> bool:
    """Whether each answer can have a row of its own so that no required row is left over, by the definition of the label score."""
    case = Case(79, "small", "any", 2, torch.bfloat16, params={"depth": 1})
    longest = torch.tensor(max(value for value, _ in rows), dtype=torch.float64)

    def allowed(similarity: float) -> float:
        return float(allowed_error(case, torch.tensor(similarity, dtype=torch.float64), longest))

    k = len(answer)
    last = sorted(rows)[-k][0]
    near = [row for row in rows if row[0] >= last - allowed(last)]
    required = [row for row in near if row[0] > last + allowed(last)]

    def fits(item: tuple[float, str], row: tuple[float, str]) -> bool:
        low = row[0] - allowed(row[0]) if row in required else -math.inf
        return item[1] == row[1] and low <= item[0] <= row[0] + allowed(row[0])

    # If all answers can be matched, and all required rows can be matched, then both can be at once (Mendelsohn and Dulmage).
    return matching(k, len(near), lambda i, j: fits(answer[i], near[j])) == k and matching(
        len(required), k, lambda i, j: fits(answer[j], required[i])
    ) == len(required)


def test_labels_are_right_only_if_they_match_rows() -> None:
    """Random answers, right and spoilt, against a search for a matching."""
    source = random.Random(7)
    verdicts = {True: 0, False: 0}
    for _ in range(400):
        rows = [(0.5 + source.randrange(12) / 256, source.choice("abc")) for _ in range(10)]
        k = source.randrange(2, 6)
        answer = sorted(source.sample(rows, k) if source.random() < 0.2 else sorted(rows)[-k:], reverse=True)
        for _ in range(source.randrange(3)):
            i = source.randrange(k)
            answer[i] = (answer[i][0] + source.choice([-2, -1, 0, 1, 2]) / 256, source.choice("abc"))
        want = can_be_matched(rows, answer)
        assert judge_one_query(rows, answer)[1] == want, (rows, answer)
        verdicts[want] += 1
    assert min(verdicts.values()) > 50


def test_more_neighbours_than_rows() -> None:
    with pytest.raises(ValueError, match="max_k is 5 but the shard has 4 rows"):
        KNN.reference(torch.ones(1, 2), torch.ones(2, 4), torch.zeros(1, 4, dtype=torch.int64), 5)
