"""Problems 64-70 and 85 beyond the contract: against their definitions element by element, and against each other."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from peerlane import problems
from peerlane.problems import Case, Draw
from peerlane.problems.families.graph import count_table, expected_distinct, least_table, skewed
from peerlane.problems.families.neighbours import mean_taken
from peerlane.problems.p069_negative_score_ranking import sigmoid_range
from peerlane.problems.p085_distributed_sample_sort import balanced
from problem_cases import arguments, costs, drawing, drawn, members, oracle, oracles, small

# Problems 65 and 66


@pytest.mark.parametrize("case", small(65))
def test_counts_of_the_exchange_agree_between_ranks(case: Case) -> None:
    inputs = arguments(case)
    for rank in range(case.world_size):
        group = members(case, rank)
        me, ranks = group.index(rank), len(group)
        features, ids, sent, received, _ = inputs[rank]
        assert len(ids) == sum(received) and (len(ids) == 0 or int(ids.max()) < len(features))
        for j in range(ranks):
            assert inputs[group[(me + j) % ranks]][3][-j % ranks] == sent[j]


@pytest.mark.parametrize("case", small(65))
def test_exchanged_rows_one_by_one(case: Case) -> None:
    """Chunk by chunk as the sender sees it: chunk j of rank r lands on rank r + j, at place -j there."""
    inputs = arguments(case)
    for group in {tuple(members(case, rank)) for rank in range(case.world_size)}:
        ranks = len(group)
        landed: list[list[list[Any]]] = [[[] for _ in range(ranks)] for _ in range(ranks)]
        for r, q in enumerate(group):
            features, ids, _, received, _ = inputs[q]
            places = iter(ids.tolist())
            for j, count in enumerate(received):
                landed[(r + j) % ranks][-j % ranks] = [features[next(places)] for _ in range(count)]
        for r, q in enumerate(group):
            rows = list(itertools.chain.from_iterable(landed[r]))
            want = torch.stack(rows) if rows else inputs[q][0][:0]
            got = problems.get(65).oracle(case, inputs, q).value
            assert got.shape == want.shape and torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("splits", ["uneven", "idle"])
def test_problem_66_is_the_adjoint_of_problem_65(splits: str, world_size: int) -> None:
    """<exchange(x), g> = <x, adjoint(g)>, summed over ranks, for the same counts and ids."""
    forward = Case(65, "small", "any", world_size, torch.float32, params={"splits": splits, "seeds": 7, "row": (5,)})
    backward = Case(66, "small", "any", world_size, torch.float32, params={"splits": splits, "seeds": 7, "depth": 5})
    generator = torch.Generator().manual_seed(7)
    inputs = [
        (torch.randn(7, 5, generator=generator, dtype=torch.float64), *args[1:])
        for args in (problems.get(65).inputs(forward, rank, drawing(forward, rank)) for rank in range(world_size))
    ]
    gradients = [
        (torch.randn(sum(sent), 5, generator=generator, dtype=torch.float64), ids, 7, sent, received, None)
        for _, ids, sent, received, _ in inputs
    ]
    left = right = 0.0
    for rank in range(world_size):
        left += float((problems.get(65).oracle(forward, inputs, rank).value * gradients[rank][0]).sum())
        right += float((inputs[rank][0] * problems.get(66).oracle(backward, gradients, rank).value).sum())
    assert left == pytest.approx(right, rel=1e-12) and abs(left) > 1e-3


@pytest.mark.parametrize("splits", ["equal", "uneven", "idle", "nothing", "gather", "heavy", "diagonal", "popular", "ragged"])
def test_counts_are_never_below_what_costs_assume(splits: str) -> None:
    for ranks in (2, 4, 8):
        case = Case(65, "small", "any", ranks, torch.float32, params={"splits": splits, "rows": 640})
        least = least_table(case, ranks)
        for slot in range(5):
            table = count_table(case, ranks, drawing(case, 0, slot=slot).layout)
            pairs = [(n, bound) for row, bounds in zip(table, least, strict=True) for n, bound in zip(row, bounds, strict=True)]
            assert all(bound <= n for n, bound in pairs)
            assert sum(bound for _, bound in pairs) >= 0.8 * sum(n for n, _ in pairs) or splits in ("uneven", "idle")


@pytest.mark.parametrize(("count", "below", "skew"), [(1000, 700, 1.0), (5000, 100_000, 3.0), (100, 10**8, 1.0), (20_000, 2_000_000, 6.0)])
def test_expected_number_of_different_ids(count: int, below: int, skew: float) -> None:
    draws = [Draw(secret=str(i), case_key="any", slot=0, block=0, rank=0) for i in range(8)]
    found = [len(skewed(draw, count, below, skew).unique()) for draw in draws]
    assert sum(found) / len(found) == pytest.approx(expected_distinct(count, below, skew), rel=0.03)


# Problem 67


@pytest.mark.parametrize("case", small(67))
def test_pushed_pairs_one_by_one(case: Case) -> None:
    inputs = arguments(case)
    for rank, answer in enumerate(oracles(case, inputs)):
        group = members(case, rank)
        ids, rows = (expected.value for expected in answer)
        want = [(q, k) for q in group for k, i in enumerate(inputs[q][0].tolist()) if i % len(group) == group.index(rank)]
        assert ids.tolist() == [int(inputs[q][0][k]) for q, k in want]
        assert all(torch.equal(row, inputs[q][1][k]) for row, (q, k) in zip(rows, want, strict=True))
        assert all(0 <= i < case["nodes"] for i in ids.tolist())


# Problem 68


@pytest.mark.parametrize("case", small(68))
def test_projected_rows_of_the_whole_table(case: Case) -> None:
    inputs = arguments(case)
    for rank, expected in enumerate(oracles(case, inputs)):
        table = torch.cat([inputs[q][0] for q in members(case, rank)]).double()
        _, ids, projection, nodes, _ = inputs[rank]
        assert len(table) == nodes
        torch.testing.assert_close(expected.value, table[ids.long()] @ projection.double(), rtol=1e-12, atol=1e-12)


def test_features_have_a_mean_of_zero_and_ordinary_sizes() -> None:
    problem = problems.get(68)
    case = problem.case("small", "skewed_fp16", 2)
    wide = Case(68, "small", "any", 2, torch.bfloat16, params={**case.params, "nodes_per_rank": 2000})
    table = problem.inputs(wide, 0, drawing(wide, 0))[0].double()
    assert float(table.abs().min()) >= 0.5 and float(table.abs().max()) < 2.0
    assert abs(float(table.mean())) < 0.05 and len(table.unique()) == 512


# Problem 69


@pytest.mark.parametrize("case", small(69))
def test_ranks_by_counting(case: Case) -> None:
    inputs = arguments(case)
    expected = problems.get(69).oracle(case, inputs, 0)
    want = []
    for q in members(case, 0):
        positive, negative = (x.double().sigmoid().to(case.dtype).double() for x in inputs[q][:2])
        for p, row in zip(positive.tolist(), negative.tolist(), strict=True):
            want.append(1 + sum(n > p or (math.isnan(n) and not math.isnan(p)) for n in row))
    assert expected.value.tolist() == want
    assert bool(((expected.low <= expected.value) & (expected.value <= expected.high)).all())
    # Rounding errors leave nearly all ranks one value.
    assert float((expected.low == expected.high).double().mean()) >= 0.9


@pytest.mark.parametrize("case", small(69, variant="pkb"))
def test_open_ties_take_every_place_among_them(case: Case) -> None:
    inputs = arguments(case)
    expected = problems.get(69).oracle(case, inputs, 0)
    start = 0
    for positive, negative, *_ in inputs:
        ties = (negative.double().sigmoid().to(case.dtype) == positive.double().sigmoid().to(case.dtype).unsqueeze(1)).sum(1)
        part = slice(start, start + len(positive))
        assert bool((expected.high[part] >= expected.value[part] + ties).all())
        start += len(positive)
    assert int((expected.high - expected.low).max()) >= 40


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_float32_sigmoids_lie_in_their_range(dtype: torch.dtype) -> None:
    scores = torch.cat((torch.linspace(-90, 90, 20001), torch.randn(20000))).to(dtype)
    low, middle, high = sigmoid_range(scores)
    wide = scores.float()
    for answer in (torch.sigmoid(scores), (1 / (1 + torch.exp(-wide))).to(dtype)):
        assert bool(((low <= answer.double()) & (answer.double() <= high)).all())
    assert bool(((low <= middle) & (middle <= high)).all())


@pytest.mark.parametrize("label", ["tied_fp32", "saturated_fp32"])
def test_tied_float32_scores_have_equal_sigmoids(label: str) -> None:
    """Else a sigmoid that is computed another way at a tensor's end tells equal scores apart; ties must count all the same."""
    for positive, negative in arguments(problems.get(69).case("small", label, 2)):
        equal = negative == positive.unsqueeze(1)
        low, _, high = sigmoid_range(negative)
        assert int(equal.sum()) > 50 and bool((low == high)[equal].all())


def test_a_wrong_place_is_not_called_a_rank() -> None:
    case, inputs = drawn(69, "tied_bf16", 2)
    expected = oracle(case, inputs)
    (score,) = problems.get(69).compare(case, expected.value + 100, expected, "random")
    assert score.detail.startswith("8 of 8 positives have the wrong place; accepted here: place")


def test_ranks_are_cheaper_to_send_than_scores() -> None:
    """On 8 ranks: 7 KB of 8-byte ranks, of which 2 bytes each do, against 1.8 MB of scores."""
    cost = costs(69, "pkb")[0]
    assert 4 * cost.ingress_bytes == pytest.approx(7.2e3, rel=0.02)
    assert cost.ingress_bytes < 1.8e6 / 900


# Problem 70


def jagged(args: tuple[Any, ...]) -> list[list[list[tuple[int, Any]]]]:
    """feature -> sample -> its (value, weight) pairs."""
    lengths, values, key_splits, batch, _, weights, per_key, _ = args
    counts, data = iter(lengths.tolist()), iter(zip(values.tolist(), values.tolist() if weights is None else weights.tolist(), strict=True))
    return [
        [[next(data) for _ in range(next(counts))] for _ in range(per_key[feature] if per_key else batch)]
        for feature in range(sum(key_splits))
    ]


@pytest.mark.parametrize("case", small(70))
def test_jagged_features_sample_by_sample(case: Case) -> None:
    inputs = arguments(case)
    for rank, answer in enumerate(oracles(case, inputs)):
        group = members(case, rank)
        me, ranks = group.index(rank), len(group)
        _, _, key_splits, _, _, weights, per_key, stagger = inputs[rank]
        order = [x + ranks // stagger * y for x in range(ranks // stagger) for y in range(stagger)]
        owned = range(sum(key_splits[:me]), sum(key_splits[: me + 1]))
        bags = [bag for feature in owned for s in order for bag in jagged(inputs[group[s]])[feature]]
        got = {name: expected.value for name, expected in answer.items()}
        assert got["lengths"].tolist() == [len(bag) for bag in bags]
        assert got["values"].tolist() == [value for bag in bags for value, _ in bag]
        if weights is not None:
            assert got["weights"].tolist() == [weight for bag in bags for _, weight in bag] and list(got)[-1] == "weights"
        if per_key is None:
            batches = [inputs[q][3] for q in group]
            assert int(got["stride"]) == sum(batches) and got["stride"].shape == () and got["stride_per_rank"].tolist() == batches
        else:
            table = [[inputs[group[s]][6][feature] for s in order] for feature in owned]
            assert got["stride_per_key_per_rank"].tolist() == table and got["stride_per_key_per_rank"].shape == (len(owned), ranks)


@pytest.mark.parametrize("number", [64, 67, 70])
def test_shapes_are_the_same_in_every_block(number: int) -> None:
    for case in problems.get(number).cases("small", 2):
        shapes = []
        for block in (0, 1):
            answers = oracles(case, arguments(case, block))
            shapes.append([[leaf.value.shape for leaf in (one.values() if isinstance(one, dict) else one)] for one in answers])
        assert shapes[0] == shapes[1], case.label


# Problem 64


def sampled(case: Case, inputs: Sequence[tuple[Any, ...]], rank: int) -> tuple[list[int], list[int], list[int], list[int]]:
    """The definition, one edge after the other."""
    group = members(case, rank)
    seeds, fanouts, _, _, owner = inputs[rank][:5]
    pointers, columns = {q: inputs[q][2].tolist() for q in group}, {q: inputs[q][3].tolist() for q in group}
    node = seeds.tolist()
    place = {v: i for i, v in enumerate(node)}
    row, col, edge = [], [], []
    frontier = list(node)
    for fanout in fanouts:
        fresh = []
        for v in frontier:
            q = group[int(owner[v])]
            first, end = pointers[q][v], pointers[q][v + 1]
            for p in range(first, end if fanout < 0 else min(end, first + fanout)):
                u = columns[q][p]
                if u not in place:
                    place[u] = len(node)
                    node.append(u)
                    fresh.append(u)
                row.append(place[u])
                col.append(place[v])
                edge.append(p)
        frontier = fresh
    return node, row, col, edge


@pytest.mark.parametrize("case", small(64))
def test_samples_edge_by_edge(case: Case) -> None:
    inputs = arguments(case)
    for rank, answer in enumerate(oracles(case, inputs)):
        assert tuple(expected.value.tolist() for expected in answer) == sampled(case, inputs, rank)


@pytest.mark.parametrize("case", small(64))
def test_graphs_are_partitioned(case: Case) -> None:
    """Every rank has edges of its own nodes alone; seeds are distinct."""
    inputs = arguments(case)
    for rank in range(case.world_size):
        seeds, _, pointer, column, owner = inputs[rank][:5]
        degree = pointer.diff()
        assert len(pointer) == len(owner) + 1 and int(pointer[-1]) == len(column)
        assert bool((degree[owner != members(case, rank).index(rank)] == 0).all())
        assert len(column) and int(column.min()) >= 0 and int(column.max()) < len(owner)
        assert len(set(seeds.tolist())) == len(seeds) == case["seeds"]


def test_isolated_seeds_leave_a_rank_without_edges() -> None:
    edges = [answer[3].value.numel() for answer in oracles(*drawn(64, "isolated_seeds", 2))]
    assert edges[0] == 0 and edges[1] > 10


def test_production_graphs_have_the_named_mean_degrees() -> None:
    edges = {"production_ogbn_products": 123.7e6 / 2.449e6, "production_igb_medium": 12.0, "production_papers100m": 3.2e9 / 111e6}
    for name, mean in edges.items():
        (case,) = problems.get(64).cases(name, 8)
        assert mean_taken(case, -1) == pytest.approx(mean, rel=0.05)


# Problem 85


@pytest.mark.parametrize("case", small(85))
def test_sorted_shards(case: Case) -> None:
    inputs = arguments(case)
    for rank, expected in enumerate(oracles(case, inputs)):
        group = members(case, rank)
        whole = sorted(itertools.chain.from_iterable(inputs[q][0].tolist() for q in group), key=order_key)
        base, extra, me = len(whole) // len(group), len(whole) % len(group), group.index(rank)
        start = me * base + min(me, extra)
        want = whole[start : start + base + (me < extra)]
        got = expected.value.tolist()
        assert len(got) == len(want) and all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(got, want, strict=True))


def order_key(value: float) -> tuple[bool, float]:
    return math.isnan(value), 0.0 if math.isnan(value) else value


def test_signs_of_zeros_and_bits_of_nan_are_free() -> None:
    problem = problems.get(85)
    case = Case(85, "small", "any", 2, torch.float32, params={"count": 3})
    expected = problem.oracle(case, [(torch.tensor([0.0, math.nan, -0.0]),), (torch.tensor([1.0, -1.0, 2.0]),)], 0)
    assert expected.value.tolist() == [-1.0, 0.0, 0.0]
    for answer, right in (([-1.0, -0.0, 0.0], True), ([-1.0, 0.0, -0.0], True), ([-1.0, 0.0, 1e-45], False)):
        (result,) = problem.compare(case, torch.tensor(answer), expected, "random")
        assert result.passed == right


def test_balanced_parts() -> None:
    assert balanced(10, 4) == [3, 3, 2, 2] and balanced(3, 4) == [1, 1, 1, 0] and balanced(0, 2) == [0, 0]
