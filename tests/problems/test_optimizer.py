"""Problems 9, 21, 22, 40-43, 47 and 48 beyond the contract: oracles against independent arithmetic."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from peerlane import problems
from peerlane.problems import Case, Draw, p040_ddp, p047_fsdp_step_e2e
from peerlane.problems.contract import expected_leaves
from peerlane.problems.families import zero
from peerlane.problems.families.clipping import draw_gradients, draw_split, shard, tensors
from peerlane.problems.families.optimizer import Adam, Output, Training, rank_gradients, step_expected
from peerlane.problems.families.training_step import StepModel, parameter_count, shapes_of
from peerlane.problems.p021_clip_grad_norm_no_ep import entries
from problem_cases import arguments, costs, drawn, wide

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


def values(case: Case, inputs: Sequence[tuple[Any, ...]], rank: int) -> dict[str, torch.Tensor]:
    """The oracle's answers by name, in float64."""
    return {leaf.name: leaf.value.to(FP64) for leaf in expected_leaves(problems.get(case.problem).oracle(case, inputs, rank))}


def test_a_second_case_has_its_own_cost() -> None:
    problem = problems.get(48)
    cost = problem.cost(problem.cases("production_llama3_8b_mlp", 8)[1], 0)
    assert cost.egress_bytes == cost.ingress_bytes == pytest.approx(308e6, rel=0.01)
    assert cost.flops["bf16"] == pytest.approx(2886e9, rel=0.01)


# Problem, published bytes in MB per rank but rank 0 with a broadcast and two collectives, one after the other.
@pytest.mark.parametrize(("number", "published"), [(40, 2.5), (41, 1.45), (42, 1.45)])
def test_steps_need_no_more_than_separate_collectives_send(number: int, published: float) -> None:
    assert 0.7 * published * 1e6 < costs(number, "pkb")[3].ingress_bytes < published * 1.01e6


def test_layer_norm_sends_two_sums() -> None:
    assert costs(9, "pkb")[0].egress_bytes == 2 * 7 / 8 * 2 * 1024 * 2


@pytest.mark.parametrize(
    ("preset", "count", "parameters"),
    [("production_llama3_2_1b_fsdp", 146, 1.236e9), ("production_qwen3_0p6b_fsdp", 310, 5.96e8), ("production_llama3_8b_flat", 1, 2.008e9)],
)
def test_clipped_models_have_their_published_sizes(preset: str, count: int, parameters: float) -> None:
    case = problems.get(21).cases(preset, 8)[0]
    lists = [entries(case, rank) for rank in range(8)]
    assert {len(one) for one in lists} == {count}
    total = sum(math.prod(entry[0]) for one in lists for entry in one if entry is not None)
    assert total == pytest.approx(parameters, rel=1e-3)


def test_shards_of_ceiled_length_leave_the_last_ranks_less() -> None:
    parts = [shard(tensors(BF16, (10, 3), None, (2,)), 4, place) for place in range(4)]
    assert [part[0] for part in parts] == [((3, 3), BF16)] * 3 + [((1, 3), BF16)]
    assert [part[2] for part in parts] == [((1,), BF16)] * 2 + [((0,), BF16)] * 2


@pytest.mark.parametrize("label", ["ragged_fp32", "mixed", "rank_scale_bf16"])
def test_layer_norm_gradients_are_autograds(label: str) -> None:
    case, inputs = drawn(9, label)
    normalised, upstream = (torch.cat([wide(args[i]) for args in inputs]) for i in (0, 1))
    gain, bias = (torch.ones(case["hidden"], dtype=FP64, requires_grad=True) for _ in range(2))
    (normalised * gain + bias).backward(upstream)
    got = values(case, inputs, 2)
    torch.testing.assert_close(got["d_gamma"], gain.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got["d_beta"], bias.grad, rtol=1e-12, atol=1e-12)


def test_normalised_rows_are_those_of_layer_norm() -> None:
    (x_hat, _), *_ = drawn(9, "ragged_fp32", 2)[1]
    torch.testing.assert_close(x_hat.mean(1), torch.zeros(3), atol=1e-6, rtol=0)
    torch.testing.assert_close(x_hat.square().mean(1), torch.ones(3), atol=1e-3, rtol=0)


def flat(gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
    return torch.cat([wide(gradient).reshape(-1) for gradient in gradients if gradient is not None])


@pytest.mark.parametrize("label", ["ragged", "below", "norm_1", "norm_3", "no_group", "strided_group", "just_above", "just_below", "tiny"])
def test_clipping_is_that_of_one_long_vector(label: str) -> None:
    case, inputs = drawn(21, label)
    members = {"no_group": [2], "strided_group": [0, 2]}.get(label, range(4))
    norm = torch.linalg.vector_norm(torch.cat([flat(inputs[q][0]) for q in members]), case.params.get("norm_type", 2.0))
    got = values(case, inputs, 2)
    torch.testing.assert_close(got.pop("norm"), norm, rtol=1e-12, atol=0)
    clips = bool(norm > case["max_norm"])
    assert clips == case["clips"]
    factor = case["max_norm"] / norm if clips else 1.0
    torch.testing.assert_close(torch.cat([item.reshape(-1) for item in got.values()]), flat(inputs[2][0]) * factor, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("label", "above"), [("just_above", True), ("just_below", False)])
def test_norms_near_the_bound_are_within_half_a_percent_of_it(label: str, above: bool) -> None:
    case = problems.get(21).case("small", label, 2)
    for block in range(8):
        distance = float(values(case, arguments(case, block), 0)["norm"]) - case["max_norm"]
        assert 4e-4 < (distance if above else -distance) < 2.5e-3


@pytest.mark.parametrize("lists", [1, 2])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_no_half_no_list_and_no_earlier_call_tells_the_norm(lists: int, ranks: int) -> None:
    """Whatever is added up in their stead misses the norm by a sixth; where any rank's elements are left out, by some per mille."""
    shapes = [{rank: tensors(BF16, (64, 1024)) for rank in range(ranks)}] * lists
    earlier = None
    for block in range(64):
        split = draw_split(Draw(secret="s", case_key="k", slot=0, block=block, rank=0).shared, shapes, 1e-3, 2.0)
        rest, spike = split.rest.double().square(), split.spike.double().square()
        total = float(rest.sum() + spike.sum())
        wrong = [2 * float(spike.max()) + float(rest.sum()), 2 * float(spike.sum() - spike.max()) + float(rest.sum())]
        wrong += [total - float(rest[index].sum() + spike[index].sum()) for index in range(lists) if lists == 2]
        wrong += [total - float(rest[:, -1].sum() + spike[:, -1].sum())] if lists == 1 else []
        wrong += [earlier] if earlier is not None else []
        assert all(abs(math.sqrt(total / answer) - 1) > 1 / 6 for answer in wrong)
        assert 1 - math.sqrt(1 - float((rest + spike).sum(0).min()) / total) > 5e-3
        earlier = total


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0])
def test_gradients_have_the_norms_that_were_drawn(norm_type: float) -> None:
    shapes = tensors(BF16, (8, 4096), None, (8, 128, 32), (8, 0), (8, 1))
    for block in range(8):
        draw = Draw(secret="s", case_key="k", slot=0, block=block, rank=1)
        split = draw_split(draw.shared, [{0: shapes, 1: shapes}] * 2, 1e-3, norm_type)
        for which in (0, 1):
            drawn = flat(draw_gradients(draw, shapes, split, norm_type, rank=1, which=which, stacked=which == 1))
            expected = float(split.rest[which, 1] ** norm_type + split.spike[which, 1] ** norm_type)
            assert float(drawn.abs().pow(norm_type).sum()) == pytest.approx(expected, rel=0.5)
            assert float(drawn.abs().max()) >= 0.99 * float(split.spike[which, 1])


def test_infinite_norms_make_gradients_zero_and_nan_leaves_them() -> None:
    case, inputs = drawn(21, "infinite", 2)
    got = values(case, inputs, 0)
    assert got.pop("norm").isinf()
    joined = torch.cat([item.reshape(-1) for item in got.values()])
    assert int(joined.isnan().sum()) == 1 and not joined.nan_to_num().any()
    case, inputs = drawn(21, "nan", 2)
    got = values(case, inputs, 1)
    assert got.pop("norm").isnan()
    assert torch.equal(torch.cat([item.reshape(-1) for item in got.values()]), flat(inputs[1][0]))


def test_expert_groups_are_blocks_and_strides() -> None:
    problem = problems.get(22)
    layout = problem.process_groups(problem.case("small", "grid", 4))
    assert [list(group) for group in layout["ep"]] == [[0, 1], [2, 3]]
    assert [list(group) for group in layout["ep_fsdp"]] == [[0, 2], [1, 3]]
    pair = problem.case("pkb", "bf16", 2)
    assert arguments(pair)[0][4] == 1 and arguments(pair)[0][7] is None


@pytest.mark.parametrize(
    ("label", "divisor"), [("grid", 2), ("below", 2), ("all_ranks", 4), ("norm_1", 2), ("divisor_3", 3), ("no_non_ep", 2)]
)
def test_expert_clipping_is_that_of_one_long_vector(label: str, divisor: int) -> None:
    case, inputs = drawn(22, label)
    assert inputs[0][4] == divisor
    non_ep, ep = ([wide(g).reshape(-1) for args in inputs for g in args[i] if g is not None] for i in (0, 1))
    norm = torch.linalg.vector_norm(torch.cat([*non_ep, *(g / divisor for g in ep)]), case.params.get("norm_type", 2.0))
    got = values(case, inputs, 3)
    torch.testing.assert_close(got["norm"], norm, rtol=1e-12, atol=0)
    factor = float(case["max_norm"] / norm) if case["clips"] else 1.0
    for name, gradients, scale in (("gradient", inputs[3][0], factor), ("expert_gradient", inputs[3][1], factor / divisor)):
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                torch.testing.assert_close(got[f"{name}_{index}"], wide(gradient) * scale, rtol=1e-6, atol=0)


def test_skipped_stages_reduce_over_what_is_left() -> None:
    case, inputs = drawn(22, "ep_fsdp_only")
    squares = [[float(flat(args[i]).square().sum()) for args in inputs] for i in (0, 1)]
    for rank, sharers in ((0, (0, 2)), (1, (1, 3))):
        norm = math.sqrt(sum(squares[0]) + sum(squares[1][q] for q in sharers) / 4)
        assert float(values(case, inputs, rank)["norm"]) == pytest.approx(norm, rel=1e-12)


def step_by_torch(case: Case, batches: Sequence[tuple[torch.Tensor, ...]], state: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """New flat parameters and moments by torch's modules, autograd and optimizer, in float64."""
    linear = [torch.nn.Linear(case["d_in"], case["h"], dtype=FP64), torch.nn.Linear(case["h"], case["d_out"], dtype=FP64)]
    model = torch.nn.Sequential(linear[0], torch.nn.ReLU(), linear[1])
    parameters = [linear[0].weight, linear[0].bias, linear[1].weight, linear[1].bias]
    sizes = [parameter.numel() for parameter in parameters]
    for parameter, part in zip(parameters, wide(state[0]).split(sizes), strict=True):
        parameter.data.copy_(part.view_as(parameter))
    sum(F.mse_loss(model(wide(x)), wide(y)) / len(batches) for x, y in batches).backward()
    optimizer = torch.optim.AdamW(
        parameters, lr=case["lr"], betas=(0.9, 0.999), eps=case.params.get("eps", 1e-8), weight_decay=case.params.get("weight_decay", 0.0)
    )
    for parameter, m, v in zip(parameters, wide(state[1]).split(sizes), wide(state[2]).split(sizes), strict=True):
        moments = {"exp_avg": m.clone().view_as(parameter), "exp_avg_sq": v.clone().view_as(parameter)}
        optimizer.state[parameter] = {"step": torch.tensor(float(case["step"] - 1)), **moments}
    optimizer.step()
    moved = [torch.cat([optimizer.state[parameter][key].reshape(-1) for parameter in parameters]) for key in ("exp_avg", "exp_avg_sq")]
    return [torch.cat([parameter.detach().reshape(-1) for parameter in parameters]), *moved]


@pytest.mark.parametrize("label", ["fp32", "unequal_batches_fp32", "late_step_fp32", "dead_units_fp32", "zero_loss_fp32", "large_eps_fp32"])
def test_data_parallel_step_is_torchs(label: str) -> None:
    case, inputs = drawn(40, label)
    state = [torch.cat([part.reshape(-1) for part in inputs[0][first : first + 4]]) for first in (2, 6, 10)]
    want = step_by_torch(case, [args[:2] for args in inputs], state)
    got = values(case, inputs, 3)
    for prefix, right in zip(("", "exp_avg_", "exp_avg_sq_"), want, strict=True):
        joined = torch.cat([got[prefix + name].reshape(-1) for name in ("W1", "b1", "W2", "b2")])
        torch.testing.assert_close(joined, right, rtol=1e-10, atol=1e-16)


@pytest.mark.parametrize("label", ["fp32", "others_nan_bf16", "unlike_shards_fp32"])
def test_sharded_step_is_torchs(label: str) -> None:
    case, inputs = drawn(42, label)
    state = [torch.cat([part.reshape(-1) for part in inputs[0][2:6]]), *(torch.cat([args[i] for args in inputs]) for i in (6, 7))]
    want = step_by_torch(case, [args[:2] for args in inputs], state)
    tight = {"rtol": 1e-6, "atol": 1e-12} if case.dtype == BF16 else {"rtol": 1e-10, "atol": 1e-16}
    for rank in range(4):
        got = values(case, inputs, rank)
        size = inputs[rank][6].numel()
        own = slice(rank * size, (rank + 1) * size)
        torch.testing.assert_close(torch.cat([got[name].reshape(-1) for name in ("W1", "b1", "W2", "b2")]), want[0], **tight)
        torch.testing.assert_close(got["exp_avg_part"], want[1][own], **tight)
        torch.testing.assert_close(got["exp_avg_sq_part"], want[2][own], **tight)


@pytest.mark.parametrize("label", ["fp32", "first_step_fp32", "no_decay_fp32"])
def test_fsdp_step_is_torchs(label: str) -> None:
    case, inputs = drawn(47, label)
    state = [torch.cat([args[i] for args in inputs]) for i in (2, 4, 5)]
    want = step_by_torch(case, [args[:2] for args in inputs], state)
    answers = [values(case, inputs, rank) for rank in range(4)]
    for name, right in zip(("flat_param_shard", "exp_avg_shard", "exp_avg_sq_shard"), want, strict=True):
        torch.testing.assert_close(torch.cat([got[name] for got in answers]), right, rtol=1e-10, atol=1e-16)


def test_shards_begin_inside_biases_and_rows() -> None:
    case = problems.get(41).case("small", "fp32", 8)
    assert parameter_count(case) == 104
    assert shapes_of(case) == ((8, 3), (8,), (8, 8), (8,))
    starts = [13 * rank for rank in range(8)]
    assert any(start < 24 and start % 3 for start in starts) and any(24 < start < 32 for start in starts)


@pytest.mark.parametrize(("number", "model"), [(40, p040_ddp.MODEL), (42, zero.MODEL), (47, p047_fsdp_step_e2e.MODEL)])
def test_moments_and_steps_have_the_gradients_scale(number: int, model: StepModel) -> None:
    """Neither the old moments nor the gradient outweighs the other, and the median update is visible in bfloat16."""
    case = problems.get(number).cases("pkb", 2)[0]
    inputs = arguments(case)
    training = model.training(case, inputs)
    gradient = torch.stack(rank_gradients(training)).mean(0)
    for part in torch.split(torch.stack([gradient, training.exp_avg.float()]), 4096, dim=1):
        ratio = float(part[0].std() / part[1].std())
        assert 2 < ratio < 20
    new = training.adam.apply(training.parameters.double(), gradient.double(), training.exp_avg.double(), training.exp_avg_sq.double())
    spacing = 2.0 ** (torch.frexp(training.parameters.double()).exponent - 8)
    assert float(((new[0] - training.parameters.double()).abs() / spacing).median()) > 2


def test_a_hidden_unit_near_zero_may_be_on_or_off() -> None:
    """One unit's pre-activation is zero but for a rounding error: both gradients are within what the oracle allows."""
    x, y = torch.tensor([[1.0]], dtype=BF16), torch.tensor([[3.0]], dtype=BF16)
    shapes = ((1, 1), (1,), (1, 1), (1,))
    b1 = -1.0
    parameters = torch.tensor([1.0078125 - 0.0078125 / 2, b1, 1.0, 0.5]).to(FP64)
    state = torch.full((4,), 1e-2).to(FP64)
    training = Training(Adam(1e-3, 0.9, 0.999, 1e-8, 3), parameters, state, state, batches=[(x, y)], shapes=shapes)
    (expected,) = step_expected(training, [Output("exp_avg", 1, 0, (4,))], BF16)
    off = 0.9 * 1e-2
    assert expected.magnitude is not None
    assert abs(float(expected.value[0]) - off) > 0.1
    assert abs(float(expected.value[0]) - off) <= float(expected.magnitude[0])


def test_overflowing_squares_leave_the_parameters() -> None:
    case, inputs = drawn(43, "huge_bf16", 2)
    got = values(case, inputs, 0)["parameters"]
    for rank, args in enumerate(inputs):
        first = rank * args[1].numel()
        torch.testing.assert_close(got[first : first + 4], wide(args[1][:4]), rtol=0, atol=0)
    case, inputs = drawn(43, "still_fp32", 2)
    moved = values(case, inputs, 0)["parameters"] != torch.cat([wide(args[1]) for args in inputs])
    assert moved[:4].tolist() == [False, False, True, True]


@pytest.mark.parametrize("label", ["grid_bf16", "tall_grid_fp32", "unequal_rows_bf16", "saturated_bf16"])
def test_mlp_on_a_grid_is_the_whole_mlp(label: str) -> None:
    case, inputs = drawn(48, label, 8)
    n_tp, n_fsdp = inputs[0][4:]
    assert n_tp * n_fsdp == 8
    grid = [[inputs[f * n_tp + t] for t in range(n_tp)] for f in range(n_fsdp)]
    w1, w2 = (torch.cat([torch.cat([wide(args[i]) for args in row], dim=1) for row in grid]) for i in (1, 2))
    w3 = torch.cat([torch.cat([wide(args[3]) for args in row], dim=0) for row in grid], dim=1)
    for rank, args in enumerate(inputs):
        x = wide(args[0])
        assert torch.equal(args[0], inputs[rank // n_tp * n_tp][0])
        torch.testing.assert_close(values(case, inputs, rank)["y"], (F.silu(x @ w1) * (x @ w2)) @ w3, rtol=1e-10, atol=1e-12)


def test_cancelling_slices_cancel() -> None:
    case, inputs = drawn(48, "cancelling_bf16")
    whole = values(case, inputs, 0)["y"]
    x, (w1, w2, w3) = wide(inputs[0][0]), (torch.cat([wide(inputs[q][i]) for q in (0, 2)], dim=1 if i == 3 else 0) for i in (1, 2, 3))
    assert float(whole.norm()) < 0.9 * float(((F.silu(x @ w1) * (x @ w2)) @ w3).norm())
