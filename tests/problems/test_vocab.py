"""Problems 82 to 84 beyond the contract: against the definition token by token and autograd, and what their comparisons let pass."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from peerlane import problems
from peerlane.problems import Case
from peerlane.problems.contract import rounded
from peerlane.problems.contract.judge import score
from peerlane.problems.families.vocab import check_chunks, filter_in_own_dtype
from peerlane.problems.families.vocab_logprob import log_probability_answer
from peerlane.problems.p084_vocab_parallel_sampled_logprob_backward import gradient_answer
from problem_cases import arguments, costs, members, oracles, small
from ranks.pool import RankPool

BACKWARD = problems.get(84)


def kept(row: torch.Tensor, top_k: int | None, top_p: float | None) -> torch.Tensor:
    """The definition, on one float64 row: the k-th largest and its equals; then, ascending, cumulative probability above 1 - top_p."""
    mask = row > -math.inf
    if top_k is not None and top_k > 0:
        mask &= row >= row.sort(descending=True).values[min(top_k, len(row)) - 1]
    if top_p is not None and top_p < 1.0:
        probability = torch.where(mask, row, -math.inf).softmax(0)
        ascending = sorted((v for v in range(len(row)) if mask[v]), key=lambda v: (float(row[v]), v))
        total = 0.0
        for v in ascending:
            total += float(probability[v])
            mask[v] = total > 1 - top_p or v == ascending[-1]
    return mask


def log_probabilities(whole: torch.Tensor, target: torch.Tensor, top_k: int | None, top_p: float | None) -> torch.Tensor:
    """(T,) from float64 logits (T, V); differentiable in them."""
    masks = torch.stack([kept(row, top_k, top_p) for row in whole.detach()])
    return whole.masked_fill(~masks, -math.inf).log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)


def whole_rows(case: Case, inputs: Sequence[tuple[Any, ...]], rank: int) -> torch.Tensor:
    return torch.cat([inputs[q][0].double() for q in members(case, rank)], dim=-1).flatten(0, 1)


@pytest.mark.parametrize("case", [*(param for param in small(82) if "wide" not in param.id), *small(83)])
def test_log_probabilities_follow_the_definition(case: Case) -> None:
    inputs = arguments(case)
    for rank, expected in enumerate(oracles(case, inputs)):
        _, target, _, top_k, top_p, *_ = inputs[rank]
        want = log_probabilities(whole_rows(case, inputs, rank), target.flatten(), top_k, top_p)
        torch.testing.assert_close(expected.value.flatten(), want, rtol=1e-9, atol=1e-9)
        # The definition's answer is always one that the comparison takes.
        dropped = expected.value == -math.inf
        assert bool((expected.may_drop | ~dropped).all()) and bool((expected.may_keep | dropped).all())
        assert bool((dropped | ((expected.low <= expected.value) & (expected.value <= expected.high))).all())


@pytest.mark.parametrize("case", small(84))
def test_gradients_are_those_of_autograd(case: Case) -> None:
    """Where the filter drops the target, its log-probability is -inf; the gradient is then that of minus the normaliser."""
    inputs = arguments(case)
    for rank, expected in enumerate(oracles(case, inputs)):
        logits, target, upstream, _, top_k, top_p, _ = inputs[rank]
        whole = whole_rows(case, inputs, rank).requires_grad_()
        masks = torch.stack([kept(row, top_k, top_p) for row in whole.detach()])
        survives = masks.gather(-1, target.flatten().unsqueeze(-1)).squeeze(-1)
        predicted = whole.gather(-1, target.flatten().unsqueeze(-1)).squeeze(-1)
        answer = torch.where(survives, predicted, 0.0) - whole.masked_fill(~masks, -math.inf).logsumexp(-1)
        (gradient,) = torch.autograd.grad(answer, whole, upstream.flatten().double())
        place, shard = members(case, rank).index(rank), logits.shape[-1]
        want = gradient[:, place * shard : (place + 1) * shard].reshape(logits.shape)
        torch.testing.assert_close(expected.value.double(), want, rtol=1e-6, atol=1e-14 * float(upstream.double().abs().max()))
        # The definition's answer is always one that the comparison takes.
        (result,) = BACKWARD.compare(case, want.float(), expected, "random")
        assert result.ratio < 0.1, result


@pytest.mark.parametrize("case", small(84))
def test_gradients_add_up_to_zero_or_to_minus_the_upstream_one(case: Case) -> None:
    inputs = arguments(case)
    total = sum(BACKWARD.oracle(case, inputs, rank).value.double().sum(-1) for rank in members(case, 0))
    _, target, upstream, _, top_k, top_p, _ = inputs[0]
    dropped = log_probabilities(whole_rows(case, inputs, 0), target.flatten(), top_k, top_p).isneginf().view(target.shape)
    want = torch.where(dropped, -upstream.double(), 0.0)
    torch.testing.assert_close(total, want, rtol=1e-5, atol=1e-6 * float(upstream.double().abs().max()))


def passes(
    number: int, index: tuple[int, ...], answer: float, weights: Sequence[float], target: int, top_k: int | None, top_p: float | None
) -> bool:
    """Whether rank 0 may return ``answer`` there: all else is right, for two tokens of these weights and an upstream gradient of 2."""
    shard, problem = len(weights) // 2, problems.get(number)
    params = {"batch": 1, "sequence": 2, "vocab": 2 * shard, "top_k": top_k, "top_p": top_p}
    case = Case(number, "small", "any", 2, torch.float32, params=params)
    logits = torch.tensor(weights, dtype=torch.float64).log().float().expand(1, 2, -1)
    upstream, chunks = ([torch.full((1, 2), 2.0)], [1]) if number == 84 else ([], [])
    inputs = [
        (logits[..., part], torch.full((1, 2), target), *upstream, None, top_k, top_p, *chunks)
        for part in (slice(shard), slice(shard, None))
    ]
    expected = problem.oracle(case, inputs, 0)
    got = rounded(expected)
    got[index] = answer
    (result,) = problem.compare(case, got, expected, "random")
    assert result.passed or result.index == index
    return bool(result.passed)


def accepts(weights: Sequence[float], token: int, answer: float, top_k: int | None = None, top_p: float | None = 1.0) -> bool:
    """Whether this may be the second token's log-probability."""
    return passes(82, (0, 1), answer, weights, token, top_k, top_p)


def accepts_gradient(weights: Sequence[float], place: int, answer: float, *, target: int = 0, top_p: float = 1.0) -> bool:
    """Whether this may be the gradient at a place of the second token's half of the vocabulary."""
    return passes(84, (0, 1, place), answer, weights, target, None, top_p)


def test_a_clear_cut_has_one_answer() -> None:
    weights = [0.4, 0.3, 0.2, 0.1]
    assert accepts(weights, 1, math.log(0.3 / 0.7), top_p=0.6)
    assert not accepts(weights, 1, math.log(0.3 / 0.9), top_p=0.6)
    assert not accepts(weights, 1, -math.inf, top_p=0.6)
    assert accepts(weights, 2, -math.inf, top_p=0.6)
    assert not accepts(weights, 2, math.log(0.2 / 0.9), top_p=0.6)
    assert not accepts(weights, 2, math.nan, top_p=0.6)
    assert not accepts(weights, 0, math.inf, top_p=0.6)


def test_either_side_of_a_cut_within_the_margin_is_right() -> None:
    weights = [0.4, 0.3, 0.2, 0.1]
    for top_p in (0.7, 0.69999, 0.70001):
        assert accepts(weights, 2, -math.inf, top_p=top_p)
        assert accepts(weights, 2, math.log(0.2 / 0.9), top_p=top_p)
        assert accepts(weights, 0, math.log(0.4 / 0.7), top_p=top_p)
        assert accepts(weights, 0, math.log(0.4 / 0.9), top_p=top_p)
        assert not accepts(weights, 0, math.log(0.4), top_p=top_p)
        assert not accepts(weights, 0, -math.inf, top_p=top_p)
        assert not accepts(weights, 3, math.log(0.1), top_p=top_p)
    for top_p in (0.6999, 0.7001):
        assert accepts(weights, 2, -math.inf, top_p=top_p) == (top_p < 0.7)


def test_equal_logits_at_the_cut_may_be_kept_or_dropped() -> None:
    for token in range(4):
        assert accepts([1.0] * 4, token, -math.inf, top_p=0.6)
        assert accepts([1.0] * 4, token, math.log(1 / 3), top_p=0.6)
        assert not accepts([1.0] * 4, token, math.log(1 / 4), top_p=0.6)
        assert not accepts([1.0] * 4, token, math.log(1 / 2), top_p=0.6)
    # Not if the cut is elsewhere.
    assert not accepts([1.0, 1.0, 4.0, 4.0], 2, -math.inf, top_p=0.85)
    assert accepts([1.0, 1.0, 4.0, 4.0], 0, -math.inf, top_p=0.85)


def test_equal_logits_at_the_top_k_threshold_are_all_kept() -> None:
    weights = [1.0, 2.0, 2.0, 3.0]
    for token in (1, 2):
        assert accepts(weights, token, math.log(2 / 7), top_k=2)
        assert not accepts(weights, token, math.log(2 / 5), top_k=2)
        assert not accepts(weights, token, -math.inf, top_k=2)
    assert accepts(weights, 0, -math.inf, top_k=2)
    assert not accepts(weights, 0, math.log(1 / 7), top_k=2)


def test_the_largest_logit_is_never_dropped() -> None:
    for top_p in (0.0, 1e-9, 0.5):
        assert accepts([1.0, 1.0, 1.0, 9.0], 3, 0.0, top_p=top_p)
        assert not accepts([1.0, 1.0, 1.0, 9.0], 3, -math.inf, top_p=top_p)


def test_a_clear_cut_has_one_gradient() -> None:
    weights = [0.4, 0.3, 0.2, 0.1]
    assert accepts_gradient(weights, 0, 2 * (1 - 4 / 7), top_p=0.6)
    assert accepts_gradient(weights, 1, -2 * 3 / 7, top_p=0.6)
    assert not accepts_gradient(weights, 1, 0.0, top_p=0.6)
    assert not accepts_gradient(weights, 1, -2 * 0.3, top_p=0.6)
    assert not accepts_gradient(weights, 0, -2 * 4 / 7, top_p=0.6)
    # A target that is dropped gets nothing.
    assert accepts_gradient(weights, 1, 0.0, target=1, top_p=0.3)
    assert not accepts_gradient(weights, 1, 2.0, target=1, top_p=0.3)
    assert accepts_gradient(weights, 0, -2.0, target=1, top_p=0.3)


def test_either_side_of_a_cut_has_its_gradient() -> None:
    weights = [0.4, 0.2, 0.3, 0.1]
    for top_p in (0.7, 0.69999, 0.70001):
        assert accepts_gradient(weights, 1, 0.0, top_p=top_p)
        assert accepts_gradient(weights, 1, -2 * 2 / 9, top_p=top_p)
        assert accepts_gradient(weights, 0, 2 * (1 - 4 / 7), top_p=top_p)
        assert accepts_gradient(weights, 0, 2 * (1 - 4 / 9), top_p=top_p)
        assert not accepts_gradient(weights, 0, 0.0, top_p=top_p)
    assert not accepts_gradient(weights, 1, -2 * 2 / 9, top_p=0.6999)
    assert not accepts_gradient(weights, 1, 0.0, top_p=0.7001)


@pytest.mark.parametrize("number", [82, 83, 84])
@pytest.mark.parametrize(("label", "right"), [("bf16", False), ("public_bf16", True)])
def test_a_bfloat16_filter_has_one_verdict_for_every_secret(number: int, label: str, right: bool) -> None:
    """It is wrong in the default variant, and right in the variant pkb."""
    problem, verdicts = problems.get(number), set()
    case = problem.case("pkb", label, 4)
    answer = gradient_answer if number == 84 else log_probability_answer
    for secret in range(10):
        inputs = arguments(case, secret=str(secret))
        kept = filter_in_own_dtype(case, inputs, 0)
        expected = oracles(case, inputs)
        results = [score(problem, case, answer(case, rank, inputs[rank], kept), expected[rank]) for rank in range(4)]
        verdicts.add(all(item.passed for scores in results for item in scores))
    assert verdicts == {right}


def test_chunks_must_be_multiples_of_the_ranks() -> None:
    assert check_chunks(torch.zeros(2, 6), 0, 2) == 2
    assert check_chunks(torch.zeros(3, 8), 4, 4) == 12
    with pytest.raises(ValueError, match="got 12 tokens in chunks of 2 on 4 ranks"):
        check_chunks(torch.zeros(2, 6), 1, 4)
    with pytest.raises(ValueError, match="got 9 tokens"):
        check_chunks(torch.zeros(3, 3), 2, 2)


def test_costs_match_published_figures() -> None:
    """On 8 ranks: Llama's gradient is 263 MB, and 12 bytes per token are sent but for the rank's own share."""
    chunked, backward = (costs(number, "production_llama3_rl")[0] for number in (83, 84))
    read, written = 4096 * 16032 * 2, 4096 * 16032 * 4
    assert written == pytest.approx(263e6, rel=0.01)
    assert backward.hbm_bytes == pytest.approx(read + written, rel=1e-3)
    assert backward.flops["fp32"] == 2 * 4096 * 16032
    assert chunked.egress_bytes == 12 * 4 * 4096 * 7 / 8
    assert chunked.hbm_bytes == pytest.approx(4 * 4096 * 16032 * 2, rel=1e-3)


def odd_number_of_tokens(rank: int, world_size: int) -> str:
    try:
        problems.get(82).reference(torch.zeros(1, 3, 4), torch.zeros(1, 3, dtype=torch.int64))
    except ValueError as error:
        return str(error)
    return ""


def test_tokens_must_be_a_multiple_of_the_ranks(rank_pool: Callable[[int], RankPool]) -> None:
    assert rank_pool(2).run(odd_number_of_tokens) == ["got 3 tokens on 2 ranks: expected a multiple of the number of ranks"] * 2
