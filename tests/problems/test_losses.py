"""Problems 23, 24, 25 and 30 beyond the contract: losses against their definitions and autograd, ties, error models, published costs."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from peerlane import problems
from peerlane.problems.contract import AnswerContext
from peerlane.problems.contract.calibration import ratios_of
from peerlane.problems.families.importance import evaluate
from peerlane.problems.p024_load_balancing_loss_fn import local_loss
from problem_cases import arguments, costs, drawn, oracle, oracles

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


def test_costs_match_published_figures() -> None:
    """A product of 2 T H V operations and 65.5 MB of weights; 86 KB and 308 MB out of a port."""
    cost = costs(25, "pkb")[1]
    valid = 1024 - int(1024 * 0.2)
    assert cost.flops["bf16"] == pytest.approx(67e9 * valid / 1024, rel=0.01)
    assert cost.hbm_bytes == pytest.approx(65.5e6 + valid * 2048, rel=0.01)
    for preset, kilobytes in (("pkb", 86), ("production_deepseek_v3", 308e3)):
        cost = costs(30, preset)[0]
        assert cost.egress_bytes == cost.ingress_bytes == pytest.approx(kilobytes * 1e3, rel=0.01)
    for preset, bytes_ in (("production_qwen3_30b_a3b", 768 * 1024), ("production_qwen3_235b", 3 * 2**20)):
        assert costs(30, preset, 2)[0].egress_bytes == bytes_


# Problem 23


@pytest.mark.parametrize("label", ["gradient_of_sum_fp32", "idle_fp32", "idle_infinite_fp32", "few_global_tokens_fp32"])
def test_normalised_loss_and_its_gradient_by_autograd(label: str) -> None:
    case, inputs = drawn(23, label)
    counts = torch.stack([args[1] for args in inputs])
    losses = torch.stack([args[0] if args[1] else torch.zeros(()) for args in inputs]).to(FP64).requires_grad_()
    whole = inputs[0][2]
    total = (losses * counts).sum()
    for rank, (normalised, summed, gradient) in enumerate(oracles(case, inputs)):
        *_, grad, grad_sum = inputs[rank]
        torch.testing.assert_close(normalised.value, (total / whole).detach(), rtol=1e-12, atol=0.0)
        torch.testing.assert_close(summed.value, total.detach(), rtol=1e-12, atol=0.0)
        outputs = grad.to(FP64) * total / whole + (0.0 if grad_sum is None else grad_sum.to(FP64) * total)
        (every,) = torch.autograd.grad(outputs, losses, retain_graph=True)
        torch.testing.assert_close(gradient.value, every[rank], rtol=1e-12, atol=0.0)
        assert not (counts[rank] == 0 and gradient.value != 0)


def test_counts_are_unlike_and_whole() -> None:
    for label in ("ragged_bf16", "idle_fp32", "many_tokens_fp32", "few_global_tokens_fp32"):
        _, inputs = drawn(23, label)
        counts = [int(args[1]) for args in inputs]
        assert all(args[1].dtype == args[2].dtype == torch.int64 for args in inputs)
        assert len({int(args[2]) for args in inputs}) == 1
        assert max(counts) > 3 * min(counts) and (counts[0] == 0) == (label == "idle_fp32")
    assert int(drawn(23, "many_tokens_fp32", 2)[1][0][1]) > 2**24


# Problem 24


def switch_loss(logits: torch.Tensor, top_k: int, weights: torch.Tensor) -> torch.Tensor:
    """By one-hot vectors of every choice, (rows, k, E), as the definition has it."""
    probabilities = logits.to(FP64).softmax(-1)
    chosen = F.one_hot(probabilities.topk(top_k, dim=-1).indices, logits.shape[1]).to(FP64)
    share = (chosen * weights.view(-1, 1, 1)).sum(0) / weights.sum()
    mean = (probabilities * weights.unsqueeze(-1)).sum(0) / weights.sum()
    return logits.shape[1] * (share * mean).sum()


@pytest.mark.parametrize(
    "label", ["plain_fp32", "masked_fp32", "masked_bf16", "many_experts_bf16", "collapsed_fp32", "disabled_experts_bf16"]
)
def test_balancing_loss_is_the_mean_of_local_losses(label: str) -> None:
    case, inputs = drawn(24, label)
    losses = []
    for logits, _, top_k, mask in inputs:
        whole = logits if isinstance(logits, torch.Tensor) else torch.cat(logits)
        weights = torch.ones(len(whole)) if mask is None else mask.flatten().repeat(len(logits))
        losses.append(switch_loss(whole, top_k, weights.to(FP64)))
    expected = oracle(case, inputs)
    mean = torch.stack(losses).mean()
    assert float(expected.low) - 1e-12 <= float(mean) <= float(expected.high) + 1e-12
    if case.dtype == FP32:
        assert float(expected.value) == pytest.approx(float(mean), rel=1e-12)
        assert float(expected.high - expected.low) <= 1e-3 * float(mean)


def test_a_balanced_router_has_loss_k_and_a_collapsed_one_loss_e() -> None:
    value, low, high = local_loss(torch.zeros(11, 6), torch.ones(11), 2, 0.0)
    assert [float(x) for x in (value, low, high)] == pytest.approx([2.0] * 3)
    collapsed = torch.full((11, 6), -200.0)
    collapsed[:, 3] = 200.0
    assert float(local_loss(collapsed, torch.ones(11), 1, 0.0)[0]) == pytest.approx(6.0)


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_least_and_largest_loss_over_all_choices_among_ties(top_k: int) -> None:
    logits = torch.tensor([[1.0, 1.0, 0.0, -1.0], [0.0, 2.0, 2.0, 2.0], [3.0, 1.0, 1.0, 1.0], [0.5, -0.5, 0.25, 0.0]])
    weights = torch.tensor([1.0, 1.0, 0.0, 1.0])
    probabilities = logits.to(FP64).softmax(-1)
    mean = (probabilities * weights.unsqueeze(-1)).sum(0) / weights.sum()
    sums = []
    for row in probabilities:
        best = row.topk(top_k).values.sum()
        sums.append([float(mean[list(c)].sum()) for c in itertools.combinations(range(4), top_k) if row[list(c)].sum() > best - 1e-12])
    every = [4 * sum(float(w) * s for w, s in zip(weights, choice, strict=True)) / 3 for choice in itertools.product(*sums)]
    value, low, high = (float(x) for x in local_loss(logits, weights, top_k, 1e-9))
    assert low == pytest.approx(min(every), rel=1e-12) and high == pytest.approx(max(every), rel=1e-12)
    assert any(value == pytest.approx(loss, rel=1e-12) for loss in every)


def test_skew_differs_between_ranks_and_calls() -> None:
    """Else a rank's own loss, or the one of the call before, would do."""
    case = problems.get(24).cases("pkb", 4)[0]
    calls = [[float(local_loss(args[0], torch.ones(len(args[0])), 2, 0.0)[0]) for args in arguments(case, block)] for block in range(6)]
    assert all(max(losses) > 1.3 * min(losses) and min(losses) > 2.0 and max(losses) < 8.0 for losses in calls)
    means = [sum(losses) / 4 for losses in calls]
    assert max(means) > 1.3 * min(means)


@pytest.mark.parametrize("world_size", [2, 4])
def test_no_regular_sample_of_tokens_has_the_popularity_of_all(world_size: int) -> None:
    """Where tokens' places mean nothing every sample passes: the bfloat16 tolerance is wider than the error of so many tokens' mean."""
    problem = problems.get(24)
    case = problem.case("production_mixtral_8x7b", "bf16", world_size)
    samples = {"every_other", "every_fourth", "every_fourth_in_turn", "sixteenth_in_turn"}
    wrong = [null for null in problem.known_wrong_answers if null.name in samples]
    assert len(wrong) == 4 and all(null.applies(case) for null in wrong)
    for uneven in (True, False):
        drawn = replace(case, params={**case.params, "uneven": uneven})
        inputs = arguments(drawn)
        expected = problem.oracle(drawn, inputs, 0)
        ratios = {
            null.name: ratios_of(problem, drawn, null.answer(AnswerContext(drawn, 0, inputs, {}, None)), expected)["loss"] for null in wrong
        }
        assert all(ratio > 10.0 if uneven else ratio <= 1.0 for ratio in ratios.values()), ratios


def test_tokens_collapse_in_every_layer_but_not_padding() -> None:
    """On one expert, another one on every rank, with the probabilities of a confident router."""
    case = problems.get(24).case("production_mixtral_8x7b", "bf16", 4)
    experts = []
    for layers, _, _, mask in arguments(case):
        probabilities = torch.stack(layers).float().softmax(-1)
        valid = mask.flatten().bool()
        confident = (probabilities[:, valid] > 0.85) & (probabilities[:, valid] < 0.99)
        shares = confident.float().mean(1)
        expert = int(shares.mean(0).argmax())
        experts.append(expert)
        assert (shares[:, expert] > 0.1).all() and (shares[:, expert] < 0.8).all()
        assert ((probabilities[:, ~valid, expert] > 0.85).float().mean() < 0.5 * shares[:, expert].mean()) or not (~valid).any()
    assert len(set(experts)) == 4


def test_a_mask_of_zeros_gives_nan_everywhere() -> None:
    case, inputs = drawn(24, "nothing_valid_fp32", 2)
    assert not inputs[1][3].any() and inputs[0][3].any() and not inputs[0][3].all(1).all()
    assert all(expected.value.isnan() for expected in oracles(case, inputs))


# Problem 25


@pytest.mark.parametrize(
    "label", ["plain_fp32", "six_tokens_fp32", "silent_rank_bf16", "clamped_fp32", "ignore_zero_bf16", "wide_logprobs_bf16"]
)
def test_policy_loss_token_by_token(label: str) -> None:
    case, inputs = drawn(25, label, 2)
    gradients, ratios, divergences, entropies = [], [], [], []
    per_rank = []
    for hidden, weight, labels, old, advantages, *ignore in inputs:
        ignored = ignore[0] if ignore else -100
        logits = hidden.to(FP64).flatten(0, -2) @ weight.to(FP64).t()
        tokens = []
        for row, label_, before, advantage in zip(
            logits.log_softmax(-1), labels.flatten().tolist(), old.flatten().tolist(), advantages.flatten().tolist(), strict=True
        ):
            if label_ == ignored:
                tokens.append((0.0, 0.0))
                continue
            lp = float(row[label_])
            d = min(20.0, max(-20.0, lp - before))
            tokens.append((lp, -math.exp(d) * advantage))
            gradients.append(-math.exp(d) * advantage)
            ratios.append(math.exp(d))
            divergences.append(math.exp(d) - d - 1.0)
            entropies.append(-lp)
        per_rank.append(torch.tensor(tokens, dtype=FP64))
    count = len(ratios)
    metrics = [sum(ratios) / count, min(ratios), max(ratios), sum(divergences) / count, sum(entropies) / count]
    for tokens, (loss, nothing, lp, pg, got) in zip(per_rank, oracles(case, inputs), strict=True):
        assert nothing is None and lp.dtype == case.dtype
        torch.testing.assert_close(lp.value.flatten(), tokens[:, 0], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(pg.value.flatten(), tokens[:, 1], rtol=1e-9, atol=0.0)
        assert float(loss.value) == pytest.approx(sum(gradients) / count, rel=1e-9)
        assert got.value.tolist() == pytest.approx(metrics, rel=1e-9)
        assert label != "wide_logprobs_bf16" or pg.dtype == FP32
    assert label != "clamped_fp32" or (max(ratios) == math.exp(20) and min(ratios) == math.exp(-20))


def test_without_valid_tokens_all_but_the_extremes_is_zero() -> None:
    loss, _, lp, pg, metrics = oracle(*drawn(25, "none_valid_fp32", 2))
    assert loss.value == 0 and not lp.value.any() and not pg.value.any()
    assert metrics.value.tolist() == [0.0, math.inf, -math.inf, 0.0, 0.0]


def test_error_model_covers_rounded_logits() -> None:
    """Logits, log-probabilities and sums of exponentials rounded to bfloat16: never beyond the bound, and not far below it either."""
    worst = 0.0
    for hidden, weight, labels, old, advantages, ignore in drawn(25, "plain_bf16", 2)[1]:
        states, flat = hidden.flatten(0, -2), labels.flatten()
        tokens = evaluate(states, weight, flat, old.flatten(), advantages.flatten(), ignore)
        logits = (states.to(FP32) @ weight.to(FP32).t()).to(BF16).to(FP32)
        largest = logits.amax(-1, keepdim=True)
        total = (logits - largest).exp().sum(-1).to(BF16).to(FP32).log().to(BF16).to(FP32)
        own = logits.gather(-1, flat.clamp(min=0).unsqueeze(-1)) - largest
        rounded = (own.squeeze(-1) - total).to(BF16).to(FP64)
        ratio = ((rounded - tokens.log_probability).abs() / tokens.error)[tokens.valid]
        worst = max(worst, float(ratio.max()))
    assert 0.3 < worst <= 1.0


def test_policy_inputs_are_worth_a_loss() -> None:
    """Sampled tokens' probabilities, log-ratios that are not clamped, and unlike numbers of valid tokens."""
    counts = []
    for hidden, weight, labels, old, advantages, ignore in drawn(25, "plain_fp32")[1]:
        tokens = evaluate(hidden.flatten(0, -2), weight, labels.flatten(), old.flatten(), advantages.flatten(), ignore)
        probabilities = tokens.log_probability[tokens.valid].exp()
        assert probabilities.quantile(0.1) < 0.2 and probabilities.quantile(0.9) > 0.6
        assert tokens.log_ratio.abs().max() < 20 and tokens.log_ratio[tokens.valid].std() > 0.05
        counts.append(int(tokens.valid.sum()))
    assert len(set(counts[:3])) == 3


# Problem 30


def test_gradients_are_summed_one_by_one_within_their_group() -> None:
    problem = problems.get(30)
    case, inputs = drawn(30, "strided_group_bf16")
    assert [list(members) for members in problem.process_groups(case)["strided"]] == [[0, 2], [1, 3]]
    for rank, answers in enumerate(oracles(case, inputs)):
        assert [answer.name for answer in answers] == list(problem.parameters[:3])
        for index, answer in enumerate(answers):
            want = sum(inputs[q][index].to(FP64) for q in (rank % 2, rank % 2 + 2))
            assert torch.equal(answer.value, want) and answer.value.shape == inputs[rank][index].shape
            assert torch.equal(answer.value.to(BF16).to(FP64), want)
