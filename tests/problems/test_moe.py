"""Problems 26, 28, 29, 31, 32 and 49-51 beyond the contract: oracles against independent arithmetic."""

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from peerlane import problems
from peerlane.problems import Case
from peerlane.problems.families import moe, moe_layer
from peerlane.problems.p026_moe_token_preprocess import lists_accepted, metadata
from problem_cases import arguments, costs, drawing, drawn, members, oracles, small

FP64 = torch.float64
LAYERS = (31, 32, 49, 50, 51)
small_cases = partial(small, variant=None)


def test_a_single_rank_without_peers_sends_nothing() -> None:
    cost = costs(51, "pkb", 2)[0]
    assert cost.egress_bytes == cost.ingress_bytes == 0


@pytest.mark.parametrize(("experts", "k", "ranks", "expected"), [(256, 8, 8, 5.3), (128, 8, 8, 5.3), (16, 4, 8, 3.6), (128, 4, 8, 3.3)])
def test_ranks_per_token_of_published_models(experts: int, k: int, ranks: int, expected: float) -> None:
    even = Case(31, "x", "x", ranks, torch.bfloat16, params={"experts": experts, "k": k})
    assert moe.distinct_ranks(even, ranks) == pytest.approx(expected, abs=0.06)
    skewed = Case(31, "x", "x", ranks, torch.bfloat16, params={"experts": experts, "k": k, "exponent": 0.8})
    assert 1 <= moe.distinct_ranks(skewed, ranks) < moe.distinct_ranks(even, ranks)


def test_ranks_per_token_are_not_more_than_those_drawn() -> None:
    case = Case(31, "x", "x", 4, torch.bfloat16, params={"experts": 32, "k": 4, "exponent": 1.0, "empty": 2})
    source = drawing(case, 0)
    chosen = moe.draw_experts(case, source, moe.log_popularity(case, source).expand(4000, -1), 4)
    hit = torch.zeros(4000, 4).scatter_(1, chosen // 8, 1.0).sum(1).mean()
    assert moe.distinct_ranks(case, 4) <= float(hit)


@pytest.mark.parametrize("extra", [{}, {"limit": (8, 4)}, {"exponent": 0.8}])
def test_more_ranks_than_units_are_hit_by_each_that_is_taken(extra: dict[str, object]) -> None:
    case = Case(31, "x", "x", 16, torch.bfloat16, params={"experts": 8, "k": 4, **extra})
    assert moe.distinct_ranks(case, 16) == pytest.approx(4)


def test_apportioned_shares_are_whole_capped_and_ordered() -> None:
    generator = random.Random(1)
    for _ in range(200):
        count, cap = generator.randrange(1, 40), generator.randrange(0, 60)
        weights = [generator.choice([0.0, generator.random(), 100 * generator.random()]) for _ in range(count)]
        alive = sum(weight > 0 for weight in weights)
        total = generator.randrange(0, alive * cap + 1)
        shares = moe.apportion(total, cap, weights)
        assert sum(shares) == total and max(shares) <= cap and min(shares) >= 0
        assert all(share == 0 for share, weight in zip(shares, weights, strict=True) if weight == 0)
        ranked = [share for _, share in sorted(zip(weights, shares, strict=True), key=lambda pair: -pair[0])]
        assert ranked == sorted(ranked, reverse=True)
    with pytest.raises(ValueError, match="left over"):
        moe.apportion(11, 5, [1.0, 0.0, 1.0])


@pytest.mark.parametrize(
    ("tokens", "experts", "k", "limit", "params"),
    [
        (0, 8, 2, (1, 1), {}),
        (1, 8, 3, (1, 1), {"exponent": 1.2}),
        (200, 8, 2, (1, 1), {"exponent": 1.0, "empty": 2}),
        (150, 64, 8, (8, 4), {"exponent": 0.8}),
        (90, 16, 4, (4, 1), {}),
    ],
)
def test_assigned_experts_meet_their_counts(tokens: int, experts: int, k: int, limit: tuple[int, int], params: dict[str, Any]) -> None:
    case = Case(28, "x", "x", 2, torch.bfloat16, params={"tokens": tokens, "experts": experts, "k": k, "limit": limit, **params})
    counts = moe.drawn_counts(case, drawing(case, 0))[0]
    assert sum(counts) == tokens * k and sum(count == 0 for count in counts) >= params.get("empty", 0)
    selected = moe.assign_experts(drawing(case, 0), counts, tokens, k, limit)
    assert selected.flatten().bincount(minlength=experts).tolist() == list(counts)
    assert all(len(set(row)) == k for row in selected.tolist())
    groups, chosen = limit
    assert all(len({expert * groups // experts for expert in row}) <= chosen for row in selected.tolist())
    if tokens:
        again = moe.assign_experts(drawing(case, 1), counts, tokens, k, limit)
        assert tokens == 1 or not torch.equal(selected, again)


def test_assigned_sets_are_many() -> None:
    """Equal counts do not tie certain experts together."""
    case = Case(28, "x", "x", 2, torch.bfloat16, params={"tokens": 1024, "experts": 8, "k": 2})
    selected = moe.assign_experts(drawing(case, 0), [256] * 8, 1024, 2)
    assert len({tuple(sorted(row)) for row in selected.tolist()}) >= 12


def test_chunks_in_the_other_order_and_back() -> None:
    lengths = torch.tensor([[2, 0, 3], [1, 4, 0]])
    order = moe.chunk_order(lengths, 10)
    assert order.tolist() == [0, 1, 5, 6, 7, 8, 9, 2, 3, 4]
    assert torch.arange(10)[order][moe.chunk_order(lengths.t(), 10)].tolist() == list(range(10))
    assert moe.chunk_order(torch.zeros(2, 2, dtype=torch.int64), 0).numel() == 0


@pytest.mark.parametrize("case", small_cases(28))
def test_splits_are_those_that_problem_26_finds(case: Case) -> None:
    """For masks that are consistent; the public benchmark's, in variant pkb, are not."""
    inputs = arguments(case)
    for rank, args in enumerate(inputs):
        group = members(case, rank)
        counts = torch.stack([(inputs[q][1].sum(1) != 0).sum(1) for q in group])
        sent, received, per_local, _ = metadata(counts, group.index(rank), torch.int64)
        same = args[3] == sent.tolist() and args[4] == received.tolist() and torch.equal(args[5], per_local)
        assert same == (case.variant == "default")
        assert sum(args[3]) == int(counts[group.index(rank)].sum()), "even so every row is sent"


@pytest.mark.parametrize("case", [item for item in small_cases(28) if "payloads" not in item.values[0].params])
def test_dispatch_and_combination_of_halves_give_the_tokens_back(case: Case) -> None:
    """Problem 29 undoes problem 28 if experts do nothing and weights add up to one."""
    inputs = arguments(case)
    combined = []
    for args, (rows, routing_map, mapping, shape) in zip(inputs, oracles(case, inputs), strict=True):
        tokens = args[0].reshape(-1, args[0].shape[-1])
        chosen = (args[1] != 0).to(torch.int64)
        selected = chosen.argmax(0).t()  # (T, slots)
        share = 1.0 / (routing_map.value != 0).sum(0).clamp(min=1).to(FP64)
        first = torch.stack([(selected[:, :j] != selected[:, j : j + 1]).all(1) for j in range(selected.shape[1])], 1)
        weights = share.unsqueeze(1) * first
        combined.append((rows.value.to(FP64), weights, selected, *args[2:6], routing_map.value, mapping.value, shape, args[6], tokens))
    for rank, (*args, tokens) in enumerate(combined):
        got = problems.get(29).oracle(case, [item[:-1] for item in combined], rank).value
        routed = (args[7] != 0).any(0)
        torch.testing.assert_close(got[routed], tokens.to(FP64)[routed])
        assert not got[~routed].any()


def test_integer_sums_of_rows_stay_exact_in_bfloat16() -> None:
    problem = problems.get(29)
    for item in small_cases(29):
        case = item.values[0]
        inputs = [problem.inputs(case, rank, drawing(case, rank, kind="integer")) for rank in range(case.world_size)]
        for expected in oracles(case, inputs):
            assert expected.value.abs().sum() == 0 or expected.magnitude.max() <= 256


def routed_alone(tokens: torch.Tensor, args: Sequence[Any], owner: Any) -> torch.Tensor:
    """The layer by a loop over tokens and experts in float64; ``owner(e)`` gives the arguments of the rank of expert e."""
    result = torch.zeros(tokens.shape, dtype=FP64)
    logits = tokens.to(FP64) @ args[1].to(FP64).t() + (0.0 if args[2] is None else args[2].to(FP64))
    for t, row in enumerate(logits):
        probabilities = torch.exp(row - row.max()) / torch.exp(row - row.max()).sum()
        for e in probabilities.argsort(descending=True)[: args[-2]].tolist():
            layers, factors = owner(e)[3:6], [factor.to(FP64) for factor in owner(e)[6:-3]]
            matrices = [layer.weight.detach().to(FP64) for layer in layers]
            if factors:
                matrices = [matrix + b @ a for matrix, a, b in zip(matrices, factors[::2], factors[1::2], strict=True)]
            x = tokens[t].to(FP64)
            gate, up = (matrix @ x + layer.bias.detach().to(FP64) for matrix, layer in zip(matrices[:2], layers[:2], strict=True))
            inner = gate / (1 + torch.exp(-gate)) * up
            result[t] += probabilities[e] * (matrices[2] @ inner + layers[2].bias.detach().to(FP64))
    return result


@pytest.mark.parametrize(
    ("number", "label", "rank", "owners"),
    [
        (31, "skewed_bf16", 2, [0, 1, 2, 3]),
        (31, "no_bias_bf16", 1, [0, 1, 2, 3]),
        (31, "strided_group_bf16", 3, [1, 3]),
        (32, "ragged_fp32", 3, [0, 1, 2, 3]),
        (32, "cancelling_bf16", 0, [0, 1, 2, 3]),
        (49, "rotated_bf16", 2, [0, 1, 2, 3]),
        (50, "together_bf16", 0, [0, 1, 2, 3]),
        (51, "replicas_bf16", 3, [2, 3]),
        (51, "more_than_ranks_bf16", 1, [0, 1, 2, 3]),
        (51, "strided_group_bf16", 2, [0, 2]),
    ],
)
def test_layer_oracle_is_a_loop_over_tokens_and_experts(number: int, label: str, rank: int, owners: list[int]) -> None:
    case, inputs = drawn(number, label)
    experts = inputs[rank][-3]
    tokens = inputs[rank][0].reshape(-1, inputs[rank][0].shape[-1])[:10]
    want = routed_alone(tokens, inputs[rank], lambda e: inputs[owners[e * len(owners) // experts]])
    got = problems.get(number).oracle(case, inputs, rank).value[:10]
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_layer_with_zero_factors_is_the_layer_without() -> None:
    case, inputs = drawn(32, "zero_factors_bf16", 2)
    bare = [(*args[:6], *args[-3:]) for args in inputs]
    for rank, expected in enumerate(oracles(case, inputs)):
        assert torch.equal(expected.value, problems.get(31).oracle(case, bare, rank).value)


def test_a_block_is_a_world_of_its_own() -> None:
    case, inputs = drawn(51, "two_each_bf16")
    alone = Case(31, case.preset, case.label, 2, case.dtype, params={**case.params, "replicas": 1})
    for expected, want in zip(oracles(case, inputs), oracles(alone, inputs[:2]) + oracles(alone, inputs[2:]), strict=True):
        assert torch.equal(expected.value, want.value)


def chosen_gap(hidden: torch.Tensor, gate_weight: torch.Tensor, gate_bias: torch.Tensor | None, k: int, dtype: torch.dtype) -> Any:
    """The chosen sets (T, E) with logits rounded to ``dtype``, and by how much every token's k-th logit leads the next."""
    bias = None if gate_bias is None else gate_bias.to(dtype)
    logits = F.linear(hidden.to(dtype), gate_weight.to(dtype), bias).to(FP64)
    best = logits.topk(min(k + 1, logits.shape[1]), dim=1)
    gap = (best.values[:, k - 1] - best.values[:, k]) if logits.shape[1] > k else torch.full((1,), torch.inf)
    return torch.zeros_like(logits).scatter_(1, best.indices[:, :k], 1.0), gap


@pytest.mark.parametrize("case", [*small_cases(*LAYERS, worlds=(2, 8)), *small_cases(*LAYERS, worlds=(4,), marks=pytest.mark.long)])
def test_routing_is_the_same_in_any_precision(case: Case) -> None:
    for args in arguments(case):
        hidden = args[0].reshape(-1, args[0].shape[-1])
        hidden = hidden[~hidden.isnan().any(1)]
        if not hidden.numel():
            continue
        exact, gap = chosen_gap(hidden, args[1], args[2], args[-2], FP64)
        rounded, _ = chosen_gap(hidden, args[1], args[2], args[-2], torch.bfloat16)
        assert torch.equal(exact, rounded)
        assert float(gap.min()) > 0.8 * moe_layer.GAP


@pytest.mark.parametrize(("experts", "k", "hidden"), [(8, 2, 4096), (256, 8, 7168), (128, 4, 2880), (2, 1, 3584)])
def test_production_routing_has_its_gap(experts: int, k: int, hidden: int) -> None:
    case = Case(31, "x", "x", 2, torch.bfloat16, params={"experts": experts, "k": k, "hidden": hidden, "tokens": 256, "inner": 1})
    args = problems.get(31).inputs(case, 0, drawing(case, 0))
    exact, gap = chosen_gap(*args[:3], k, FP64)
    assert torch.equal(exact, chosen_gap(*args[:3], k, torch.bfloat16)[0])
    assert float(gap.min()) > 0.8 * moe_layer.GAP
    sizes = args[0].to(FP64).square().mean(0).sqrt()
    assert 0.9 < float(sizes.median()) < 1.3, "tokens keep the size of activations"
    assert float(sizes.max() / sizes.min()) > 200, "their channels do not"


def chosen_counts(number: int, label: str) -> torch.Tensor:
    """Rows per rank and expert, (W, E), by what the router really does."""
    counts = []
    for args in drawn(number, label)[1]:
        hidden = args[0].reshape(-1, args[0].shape[-1])
        counts.append(chosen_gap(hidden, args[1], args[2], args[-2], FP64)[0].sum(0))
    return torch.stack(counts)


def test_patterns_of_routing() -> None:
    balanced = chosen_counts(49, "balanced_bf16")
    assert balanced.tolist() == [[24.0] * 4, [0.0] * 4, [10.0] * 4, [16.0] * 4]
    assert torch.equal(chosen_counts(49, "own_bf16"), torch.diag(torch.tensor([96.0, 0.0, 40.0, 64.0], dtype=FP64)))
    assert (chosen_counts(49, "one_rank_bf16").sum(0) > 0).sum() == 1
    assert (chosen_counts(49, "dead_expert_bf16").sum(0) == 0).sum() == 1
    skewed = chosen_counts(31, "skewed_bf16").sum(0)
    assert (skewed == 0).sum() >= 1 and skewed.max() > 2 * skewed.mean()


def test_tokens_of_both_patterns_over_ranks() -> None:
    for label, ranks in (("together_bf16", 1), ("spread_bf16", 2)):
        for args in drawn(50, label)[1]:
            if args[0].numel():
                chosen, _ = chosen_gap(*args[:3], 2, FP64)
                assert (chosen.view(-1, 4, 4).amax(2).sum(1) == ranks).all()


def test_split_sizes_may_be_lists_in_the_variant_pkb() -> None:
    problem, counts = problems.get(26), torch.tensor([[2.0, 3.0]])

    def published(*_: Any) -> Any:
        return [2, 3], [2.0, 4.0], counts, counts[0]

    sent, received, *rest = problem.accepting("pkb", published)()
    assert sent.equal(torch.tensor([2, 3])) and received.equal(torch.tensor([2, 4])) and rest[0] is counts
    assert problem.accepting("default", published) is published
    assert lists_accepted(([2.5], ["x"], counts, counts))[:2] == ([2.5], ["x"])
