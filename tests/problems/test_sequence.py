"""Problems 10, 17, 33 to 35, 37 to 39, 45 and 46 beyond the contract: layouts element by element, second computations."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from peerlane import problems
from peerlane.problems import Case
from peerlane.problems import p010_embedding_lookup as embedding
from problem_cases import arguments, attention_layer, drawing, drawn, oracles

FP64 = torch.float64


def values(case: Case, inputs: Sequence[tuple[Any, ...]]) -> list[torch.Tensor]:
    """Every rank's single output before rounding."""
    return [expected.value for expected in oracles(case, inputs)]


def numbered(number: int, label: str) -> tuple[Case, list[tuple[Any, ...]]]:
    """A small case's arguments with a tensor whose every element, over all ranks, is another integer."""
    case, inputs = drawn(number, label)
    first = itertools.accumulate((args[0].numel() for args in inputs), initial=0)
    tensors = [torch.arange(start, start + args[0].numel()).view(args[0].shape) for start, args in zip(first, inputs, strict=False)]
    return case, [(tensor, *args[1:]) for tensor, args in zip(tensors, inputs, strict=True)]


@pytest.mark.parametrize("label", ["scatter_third_bf16", "scatter_second_bf16", "same_axis_bf16", "negative_int32", "vector_int64"])
def test_exchanged_pieces_element_by_element(label: str) -> None:
    case, inputs = numbered(33, label)
    for rank, output in enumerate(values(case, inputs)):
        x, scatter_dim, gather_dim, _ = inputs[0]
        scatter, gather = scatter_dim % x.dim(), gather_dim % x.dim()
        piece = x.shape[scatter] // case.world_size
        length = piece if scatter == gather else x.shape[gather]
        for place in itertools.product(*map(range, output.shape)):
            source, origin = place[gather] // length, list(place)
            origin[gather] = place[gather] % length
            origin[scatter] += rank * piece
            assert output[place] == inputs[source][0][tuple(origin)]


@pytest.mark.parametrize("label", ["padded_bf16", "packed_padded_bf16", "heads_first_int32", "short_bf16"])
def test_scattered_sequence_element_by_element(label: str) -> None:
    case, inputs = numbered(37, label)
    inputs = [(args[0] + 1, *args[1:]) for args in inputs]  # 0 is padding
    x, seq_dim, head_dim, _ = inputs[0]
    block, heads = -(-x.shape[seq_dim] // case.world_size), x.shape[head_dim]
    for rank, output in enumerate(values(case, inputs)):
        assert output.shape[seq_dim] == block and output.shape[head_dim] == heads * case.world_size
        for place in itertools.product(*map(range, output.shape)):
            origin = list(place)
            origin[seq_dim] += rank * block
            origin[head_dim] %= heads
            inside = origin[seq_dim] < x.shape[seq_dim]
            assert output[place] == (inputs[place[head_dim] // heads][0][tuple(origin)] if inside else 0)


def test_out_of_attention_undoes_into_attention() -> None:
    """Problem 37 after 36 is the identity, and with a length that is no multiple of W zeros take the place of what was cut."""
    into, inputs = numbered(36, "padded_bf16")
    back = values(problems.get(37).case("small", "padded_bf16", 4), [(whole, 1, 2, None) for whole in values(into, inputs)])
    original = torch.cat([args[0] for args in inputs], dim=1)
    original[:, 4 * 3 - 1 :] = 0
    assert torch.equal(torch.cat(back, dim=1), original)


@pytest.mark.parametrize("label", ["plain_bf16", "padded_bf16", "packed_padded_split_int32", "long_padding_fp32"])
def test_fused_exchange_is_three_exchanges(label: str) -> None:
    case, inputs = numbered(38, label)
    _, seq_dim, _, unpadded, restore = inputs[0]
    params = {"seq_dim": seq_dim, "head_dim": len(case["shape"]) - 1, "unpadded": (0, unpadded or 0)}
    exchange = Case(36, "small", "thirds", case.world_size, case.dtype, params=params)
    thirds = [args[0].chunk(3, dim=-1) for args in inputs]
    parts = [values(exchange, [(third[i], *args[1:]) for third, args in zip(thirds, inputs, strict=True)]) for i in range(3)]
    for rank, output in enumerate(values(case, inputs)):
        mine = [part[rank] for part in parts]
        assert torch.equal(output, torch.cat(mine, dim=-1) if restore else torch.stack(mine, dim=-2))


def test_gathers_follow_the_groups_order() -> None:
    for number in (34, 35):
        case, inputs = numbered(number, "strided_group_bf16")
        answers = values(case, inputs)
        for members in ((0, 2), (1, 3)):
            expected = torch.cat([inputs[rank][0] for rank in members])
            assert all(torch.equal(answers[rank], expected) for rank in members)


def test_unequal_lengths_change_places_between_slots() -> None:
    case = problems.get(35).case("small", "uneven_bf16", 4)
    lengths = [[args[0].shape[0] for args in arguments(case, slot=slot)] for slot in range(8)]
    assert all(sorted(each) == [1, 3, 4, 6] for each in lengths)
    assert len({tuple(each) for each in lengths}) > 2


def test_lengths_of_the_models_keep_their_total() -> None:
    problem = problems.get(35)
    for preset in problem.presets[2:]:
        totals = []
        for world_size in (2, 4, 8):
            case = problem.cases(preset.name, world_size)[0]
            totals.append(sum(sum(case["eighths"][first : first + 8 // world_size]) for first in range(0, 8, 8 // world_size)))
            cost = problem.cost(case, 0)
            line = math.prod(length or 1 for length in case["shape"]) * 2
            assert cost.egress_bytes >= (world_size - 1) / world_size * totals[-1] * line
        assert len(set(totals)) == 1


def test_embeddings_come_in_the_order_of_a_stable_sort_by_owner() -> None:
    table = torch.arange(16).unsqueeze(-1)
    ids = torch.tensor([15, 0, 7, 8, 1, 0])
    case = Case(10, "small", "documented", 2, torch.int64, params={"rows": 8})
    answer = problems.get(10).oracle(case, [(ids, table[:8]), (ids, table[8:])], 0).value
    assert answer.flatten().tolist() == [0, 7, 1, 0, 15, 8]
    for label in ("uniform_bf16", "edges_bf16", "descending_bf16", "local_and_idle_bf16"):
        other, inputs = drawn(10, label)
        whole = torch.cat([shard.view(torch.int16) for _, shard in inputs])
        for (own, _), answer in zip(inputs, values(other, inputs), strict=True):
            order = torch.argsort(own // 8, stable=True)
            assert torch.equal(answer.view(torch.int16), whole[own[order]])


@pytest.mark.parametrize("exponent", [1.0, 1.05])
def test_zipf_draws_follow_their_distribution(exponent: float) -> None:
    size, draws = 1000, 50_000
    uniform = torch.rand(draws, generator=torch.Generator().manual_seed(1), dtype=FP64)
    ids = embedding.zipf(uniform, size, exponent)
    assert ids.min() == 0 and ids.max() == size - 1
    bounds = torch.arange(size + 1, dtype=FP64)
    below = embedding.zipf_below(bounds, size, exponent)
    assert below[0] == 0 and below[-1] == pytest.approx(1.0)
    found = torch.bincount(ids, minlength=size).cumsum(0) / draws
    torch.testing.assert_close(found.to(FP64), below[1:], rtol=0.0, atol=1e-2)


@pytest.mark.parametrize("label", ["uniform_bf16", "zipf_bf16", "wide_bf16"])
def test_costs_of_lookups_are_means_of_different_rows(label: str) -> None:
    case = problems.get(10).case("small", label, 2)
    draws, rounds = 17, 400
    for owner in range(2):
        counted = 0
        for slot in range(rounds):
            ids, _ = problems.get(10).inputs(case, 0, drawing(case, 0, slot=slot))
            assert ids.numel() == draws
            counted += ids[ids // 8 == owner].unique().numel()
        assert embedding.distinct(case, draws, owner) == pytest.approx(counted / rounds, rel=0.06)


def test_rotation_is_a_complex_product() -> None:
    case, inputs = drawn(17, "grouped_fp32")
    for index, expected in enumerate(problems.get(17).oracle(case, inputs, 1)):
        x = torch.cat([args[index] for args in inputs], dim=1).to(FP64)
        cos, sin = (torch.cat([args[i] for args in inputs], dim=1).to(FP64).unsqueeze(2)[..., :3] for i in (2, 3))
        turned = torch.complex(x[..., :3], x[..., 3:]) * torch.complex(cos, sin).expand(-1, -1, x.shape[2], -1)
        torch.testing.assert_close(expected.value, torch.cat((turned.real, turned.imag), dim=-1), rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(expected.value.norm(dim=-1), x.norm(dim=-1), rtol=1e-6, atol=0.0)


def test_positions_continue_from_rank_to_rank() -> None:
    """A channel's tables turn by the same angle from every position to the next, also across ranks."""
    params = {"batch": 1, "local": 50, "q_heads": 1, "k_heads": 1, "depth": 8, "theta": 1e4}
    inputs = arguments(Case(17, "small", "long", 4, torch.float32, params=params))
    cos, sin = (torch.cat([args[i] for args in inputs], dim=1)[0, :, 2] for i in (2, 3))
    position = torch.complex(cos, sin)
    steps = (position[1:] * position[:-1].conj()).angle()
    torch.testing.assert_close(steps, torch.full_like(steps, 1e4**-0.5), rtol=0.0, atol=2e-4)


@pytest.mark.parametrize("label", ["ragged_bf16", "large_eps_bf16", "fp32_gain_bf16", "decades_fp32", "cancelling_fp32"])
def test_scattered_norm_is_rms_norm_of_the_mean(label: str) -> None:
    case, inputs = drawn(45, label)
    mean = torch.stack([args[0].to(FP64) for args in inputs]).mean(0).view(-1, case["hidden"])
    whole = F.rms_norm(mean, mean.shape[-1:], inputs[0][1].to(FP64), eps=case["eps"])
    torch.testing.assert_close(torch.cat(values(case, inputs)), whole, rtol=1e-10, atol=1e-12)


def test_norm_of_special_rows() -> None:
    for answer in values(*drawn(45, "special_fp32")):
        poisoned, infinite, zero, *ordinary = answer
        assert poisoned.isnan().all()
        assert infinite.isnan().sum() == 1 and not infinite.nan_to_num().any()
        assert not zero.any()
        assert torch.stack(ordinary).isfinite().all()


@pytest.mark.parametrize("label", ["tokens_bf16", "odd_depth_bf16", "large_bias_bf16", "masked_bf16"])
def test_gathered_logits_are_one_linear_layer(label: str) -> None:
    case, inputs = drawn(46, label)
    assert all(torch.equal(args[0], inputs[0][0]) for args in inputs)
    weight, bias = (torch.cat([args[i].to(FP64) for args in inputs]) for i in (1, 2))
    whole = F.linear(inputs[0][0].to(FP64), weight, bias)
    for answer in values(case, inputs):
        torch.testing.assert_close(answer, whole, rtol=1e-12, atol=1e-12)
    assert whole.isneginf().any() == (label == "masked_bf16")


def attention_block(inputs: Sequence[tuple[Any, ...]]) -> torch.Tensor:
    """The whole sequence of these ranks through the layer."""
    _, w_qkv, w_o, _, heads, causal = inputs[0]
    return attention_layer(torch.cat([args[0] for args in inputs], dim=1), w_qkv, w_o, heads, causal=causal)


@pytest.mark.parametrize("label", ["full_bf16", "causal_bf16", "one_token_bf16", "one_head_causal_bf16", "large_scores_fp32"])
def test_ulysses_attention_is_attention(label: str) -> None:
    case, inputs = drawn(39, label)
    torch.testing.assert_close(torch.cat(values(case, inputs), dim=1), attention_block(inputs), rtol=1e-9, atol=1e-11)


def test_ulysses_attention_stays_within_the_group() -> None:
    case, inputs = drawn(39, "strided_group_bf16")
    answers = values(case, inputs)
    for members in ((0, 2), (1, 3)):
        whole = attention_block([inputs[rank] for rank in members])
        torch.testing.assert_close(torch.cat([answers[rank] for rank in members], dim=1), whole, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("label", ["public_full_bf16", "public_causal_fp32"])
def test_public_semantics_attend_over_heads_token_by_token(label: str) -> None:
    case, inputs = drawn(39, label)
    for rank, answer in enumerate(values(case, inputs)):
        hidden, w_qkv, w_o, _, heads, causal = inputs[rank]
        q, k, v = (part.unflatten(-1, (heads, -1)) for part in F.linear(hidden.to(FP64), w_qkv.to(FP64)).chunk(3, dim=-1))
        context = torch.empty_like(q)
        for b, s, first in itertools.product(range(q.shape[0]), range(q.shape[1]), range(0, heads, 2)):
            group = slice(first, first + 2)
            scores = q[b, s, group] @ k[b, s, group].T * q.shape[-1] ** -0.5
            if causal:
                scores[0, 1] = -math.inf
            context[b, s, group] = scores.softmax(-1) @ v[b, s, group]
        torch.testing.assert_close(answer, F.linear(context.flatten(2), w_o.to(FP64)), rtol=1e-10, atol=1e-12)


def test_one_head_a_rank_makes_the_variant_pkb_a_projection() -> None:
    case, inputs = drawn(39, "public_one_head_bf16")
    for (hidden, w_qkv, w_o, *_), answer in zip(inputs, values(case, inputs), strict=True):
        v = F.linear(hidden.to(FP64), w_qkv.to(FP64)).chunk(3, dim=-1)[2]
        torch.testing.assert_close(answer, F.linear(v, w_o.to(FP64)), rtol=1e-10, atol=1e-12)
