"""Problems 11-14, 16, 18 and 54 beyond the contract: oracles against independent float64 arithmetic."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from peerlane import problems
from peerlane.problems import Case
from peerlane.problems.contract import score
from peerlane.problems.families.attention import attention
from problem_cases import arguments, costs, drawn, oracles, wide

FP64 = torch.float64


@pytest.mark.parametrize("number", [13, 16])
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_partial_products_added_one_by_one_are_right(number: int, world_size: int) -> None:
    """A few elements, whose terms may cancel, and columns of unlike size: one column can be most of the norm."""
    problem = problems.get(number)
    case = problem.case("small", "unequal_k_bf16", world_size)
    for slot in range(100):
        inputs = arguments(case, slot=slot)
        total, *others = [a @ b for a, b in inputs]
        for other in others:
            total += other
        rows = total.chunk(world_size) if number == 16 else [total] * world_size
        for got, expected in zip(rows, oracles(case, inputs), strict=True):
            (found,) = score(problem, case, got, expected)
            assert found.ratio < 0.8, (slot, found)


def test_rms_norm_sends_no_more_than_two_collectives() -> None:
    """A direct exchange of one float32 per row with 7 peers takes 28 KB; the least is 2/8 of it."""
    cost = costs(18, "pkb")[0]
    assert cost.egress_bytes == cost.ingress_bytes == 7 * 1024 * 4 * 2 / 8


def test_causal_attention_costs_add_up_over_the_ring() -> None:
    """Every byte sent is received, and the pairs of all ranks are the triangle of the whole sequence."""
    found = costs(54, "production_llama2_7b_16k")
    assert sum(cost.egress_bytes for cost in found) == sum(cost.ingress_bytes for cost in found)
    assert sum(cost.flops["bf16"] for cost in found) == 4 * 32 * 128 * (16384 * 16385 / 2)


@pytest.mark.parametrize("number", [11, 12])
@pytest.mark.parametrize("label", ["tile_bf16", "rank_scale_bf16"])
def test_gathered_product_by_shards_is_the_whole_product(number: int, label: str) -> None:
    case, inputs = drawn(number, label)
    a = torch.cat([wide(args[0]) for args in inputs], dim=1)
    for (_, b), expected in zip(inputs, oracles(case, inputs), strict=True):
        torch.testing.assert_close(expected.value, a @ wide(b), rtol=1e-12, atol=0.0)
        assert expected.magnitude is not None
        torch.testing.assert_close(expected.magnitude, a.abs() @ wide(b).abs(), rtol=1e-12, atol=0.0)


def test_partial_products_add_up_to_the_product_over_all_ranks() -> None:
    case, inputs = drawn(13, "unequal_k_bf16")
    assert [a.shape[1] for a, _ in inputs] == [3, 8, 1, 5]
    whole = torch.cat([wide(a) for a, _ in inputs], dim=1) @ torch.cat([wide(b) for _, b in inputs])
    partials = torch.stack([(wide(a) @ wide(b)).abs() for a, b in inputs]).sum(0)
    products = torch.stack([wide(a).abs() @ wide(b).abs() for a, b in inputs]).sum(0)
    unit = 5 * 2.0**-8
    for expected in oracles(case, inputs):
        torch.testing.assert_close(expected.value, whole, rtol=1e-12, atol=1e-14)
        assert expected.magnitude is not None
        torch.testing.assert_close(unit * expected.magnitude, unit * partials + 1e-5 * products, rtol=1e-12, atol=0.0)


def test_rows_of_the_scattered_product_are_those_of_the_whole() -> None:
    case, inputs = drawn(16, "row_scale_bf16")
    whole = torch.stack([wide(a) @ wide(b) for a, b in inputs]).sum(0)
    scattered = torch.cat([expected.value for expected in oracles(case, inputs)])
    torch.testing.assert_close(scattered, whole, rtol=1e-12, atol=1e-12)


def test_column_blocks_use_the_a_of_their_own_rank() -> None:
    case, inputs = drawn(14, "ragged_bf16")
    whole = torch.cat([wide(a) @ wide(b) for a, b in inputs], dim=1)
    for expected in oracles(case, inputs):
        torch.testing.assert_close(expected.value, whole, rtol=1e-12, atol=1e-14)


def test_only_a_replicated_a_is_equal_on_all_ranks() -> None:
    for label, equal in (("replicated_a_bf16", True), ("tile_bf16", False)):
        first, second = (args[0] for args in drawn(14, label, 2)[1])
        assert torch.equal(first, second) == equal


@pytest.mark.parametrize("label", ["ragged_bf16", "decades_fp32", "fp32_weight_bf16"])
def test_sharded_rms_norm_is_rms_norm(label: str) -> None:
    case, inputs = drawn(18, label)
    hidden, weight = (torch.cat([wide(args[i]) for args in inputs], dim=-1) for i in (0, 1))
    whole = F.rms_norm(hidden, hidden.shape[-1:], weight, eps=case["eps"])
    answers = torch.cat([expected.value for expected in oracles(case, inputs)], dim=-1)
    torch.testing.assert_close(answers, whole, rtol=1e-12, atol=0.0)


def test_rms_norm_of_extreme_rows_follows_float32_squares() -> None:
    case, inputs = drawn(18, "extreme_fp32", 2)
    for (hidden, weight, eps), expected in zip(inputs, oracles(case, inputs), strict=True):
        zero, tiny, huge, poisoned, *ordinary = expected.value
        assert not zero.any() and not huge.any()
        torch.testing.assert_close(tiny, wide(hidden[1]) * wide(weight) / eps**0.5, rtol=1e-9, atol=0.0)
        assert poisoned.isnan().all()
        assert torch.stack(ordinary).isfinite().all() and torch.stack(ordinary).all()


def dense_attention(case: Case, inputs: Sequence[tuple[Any, ...]]) -> torch.Tensor:
    """Attention over the sequence of the given ranks by torch, in float64."""
    q, k, v = (torch.cat([wide(args[i]) for args in inputs], dim=1).transpose(1, 2) for i in (0, 1, 2))
    k, v = (tensor.expand(-1, q.shape[1], -1, -1) for tensor in (k, v))
    output = F.scaled_dot_product_attention(q, k, v, is_causal=case["causal"], scale=case.params.get("scale"))
    return output.transpose(1, 2)


@pytest.mark.parametrize(
    "label", ["causal_bf16", "full_bf16", "scaled_causal_bf16", "one_kv_head_bf16", "narrow_values_bf16", "growing_bf16", "spike_last_bf16"]
)
@pytest.mark.parametrize("world_size", [2, 4])
def test_attention_oracle_agrees_with_torch(label: str, world_size: int) -> None:
    case, inputs = drawn(54, label, world_size)
    answers = torch.cat([expected.value for expected in oracles(case, inputs)], dim=1)
    torch.testing.assert_close(answers, dense_attention(case, inputs), rtol=1e-10, atol=1e-12)


def test_attention_oracle_stays_within_the_group() -> None:
    case, inputs = drawn(54, "interleaved_groups_bf16")
    assert problems.get(54).process_groups(case) == {"context": [[0, 2], [1, 3]]}
    answers = oracles(case, inputs)
    for ring in ([0, 2], [1, 3]):
        got = torch.cat([answers[rank].value for rank in ring], dim=1)
        torch.testing.assert_close(got, dense_attention(case, [inputs[rank] for rank in ring]), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("causal", [True, False])
def test_attention_in_chunks_is_attention_at_once(causal: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(2, 7, 3, 8, generator=generator)
    k, v = (torch.randn(2, 21, 3, 8, generator=generator) for _ in range(2))
    whole = attention(q, k, v, scale=0.4, causal=causal)
    for rows in (1, 2, 3):
        chunked = attention(q, k, v, scale=0.4, causal=causal, score_bytes=rows * 21 * 8)
        for got, want in zip(chunked, whole, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-15)


def test_spike_draws_all_of_one_head_to_the_farthest_rank() -> None:
    _, inputs = drawn(54, "spike_last_bf16")
    scores = torch.einsum("bqd,bkd->bqk", *(torch.cat([wide(args[i]) for args in inputs], dim=1)[:, :, 0] for i in (0, 1))) / 4
    best, key = scores.max(-1)
    assert ((best > 70) & (best < 90)).all()
    assert (key >= 15).all() and len(key.unique()) == 1
