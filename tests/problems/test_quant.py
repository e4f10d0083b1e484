"""Problems 19, 20, 44, 52 and 53 beyond the contract: codes against exact arithmetic, ties."""

import bisect
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch

from peerlane import problems
from peerlane.problems.contract import Case, Expected, Tolerance, compare_exact, exactly, rounded, score
from peerlane.problems.families import quant
from peerlane.problems.families.interval import Interval, comparison
from problem_cases import arguments, costs, drawn, oracle, oracles

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64

# The 127 finite e4m3fn numbers that are not negative, from the definition of the format: 3 mantissa bits, exponent bias 7, subnormals.
E4M3 = [Fraction(m, 8) * Fraction(2) ** -6 for m in range(8)] + [
    (1 + Fraction(m, 8)) * Fraction(2) ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)
]


def nearest_codes(quotient: Fraction) -> set[Fraction]:
    """The e4m3 number nearest to the quotient: two of them at a tie."""
    size, sign = abs(quotient), 1 if quotient >= 0 else -1
    above = bisect.bisect_left(E4M3, size)
    near = E4M3[max(above - 1, 0) : above + 1]
    best = min(abs(code - size) for code in near)
    return {sign * code for code in near if abs(code - size) == best}


def ratio(case: Case, got: Any, expected: Any) -> float:
    return max(item.ratio for item in score(problems.get(case.problem), case, got, expected))


def test_on_two_ranks_sending_all_codes_is_cheaper() -> None:
    assert costs(44, "pkb", 2)[0].egress_bytes == 1048576 + 4 * 8192


def test_every_production_size_divides_among_the_ranks() -> None:
    for number in (19, 20, 52, 53):
        problem = problems.get(number)
        for item in problem.presets[2:]:
            for spec in item.cases:
                for name, unit in (("elements", 1024 if number == 19 else 1), ("rows", 1)):
                    assert all(spec.params.get(name, 0) % (unit * world) == 0 for world in problem.world_sizes)


# Codes


def test_all_e4m3_numbers_are_known_and_rounded_to_themselves() -> None:
    values = torch.tensor([float(code) for code in E4M3])
    assert len(E4M3) == 127 and values.max() == quant.E4M3_MAX
    assert torch.equal(quant.e4m3(values).view(torch.uint8), torch.arange(127, dtype=torch.uint8))


@pytest.mark.parametrize("label", ["ragged_bf16", "three_axes_fp32", "hard_bf16", "hard_fp32"])
def test_codes_are_the_nearest_to_the_exact_quotient(label: str) -> None:
    case, inputs = drawn(19, label, 2)
    codes, scales = oracle(case, inputs)
    size = case.params.get("block", 128)
    blocks = torch.cat([args[0].to(FP64).reshape(-1, size) for args in inputs]).tolist()
    values, low, high = (part.to(FP32).reshape(-1, size).tolist() for part in (codes.value, codes.low, codes.high))
    open_ = 0
    for block, scale, *rows in zip(blocks, scales.value.flatten().tolist(), values, low, high, strict=True):
        if math.inf in block:
            assert scale == math.inf
            assert all(math.isnan(code) if x == math.inf else code == 0 for x, code in zip(block, rows[0], strict=True))
            continue
        exact = max(abs(Fraction(x)) for x in block) / 448
        assert scale == float(exact)
        for x, value, least, largest in list(zip(block, *rows, strict=True))[:: 1 if label == "hard_bf16" else 5]:
            best = nearest_codes(Fraction(x) / exact) if exact else {Fraction(0)}
            assert Fraction(value) in best or least < largest
            assert best <= {Fraction(least), Fraction(largest)} and least <= value <= largest
            # Both neighbours only very near a tie.
            slack = {code for sign in (-1, 1) for code in nearest_codes(Fraction(x) / (exact or 1) * (1 + sign * Fraction(1, 2**20)))}
            assert {Fraction(least), Fraction(largest)} <= slack
            open_ += least < largest
    assert label != "hard_bf16" or open_ > 50


def test_one_wrong_code_is_found_and_ties_may_go_either_way() -> None:
    case, inputs = drawn(19, "hard_fp32", 2)
    expected = oracle(case, inputs)
    codes, scales = rounded(expected)
    assert ratio(case, (codes, scales), expected) <= 1
    low, high = expected[0].low.view(torch.uint8), expected[0].high.view(torch.uint8)
    for choice in (expected[0].low, expected[0].high):
        assert ratio(case, (choice, scales), expected) <= 1
    closed = (low == high).flatten().nonzero().flatten()
    for place in closed[7::97].tolist():
        wrong = codes.clone()
        byte = wrong.view(torch.uint8).view(-1)
        byte[place] = byte[place] ^ 1  # the neighbour that differs in the last bit
        assert ratio(case, (wrong, scales), expected) == math.inf


def test_an_infinity_leaves_the_next_block_alone() -> None:
    _, scales = oracle(*drawn(19, "hard_bf16", 2))
    infinite = scales.value.flatten().isinf()
    assert infinite.any() and not infinite.roll(1)[infinite].any()
    assert scales.value.flatten()[infinite.roll(1)].isfinite().all()


# Dequantisation


@pytest.mark.parametrize("label", ["all_codes_fp8", "flat_scales_fp8", "one_axis_bf16"])
def test_products_are_those_of_elements_and_their_blocks(label: str) -> None:
    case, inputs = drawn(20, label, 2)
    size = case.params.get("block", 128)
    for rank, expected in enumerate(oracles(case, inputs)):
        received = expected.value.flatten(1)
        for source, (y, scales, *_) in enumerate(inputs):
            flat, factors, elements = y.to(FP64).flatten(), scales.to(FP64).flatten(), y[0].numel()
            for place in range(0, elements, 37):
                index = rank * elements + place
                want = (flat[index] * factors[index // size]).to(FP32)
                got = received[source, place]
                assert torch.equal(got, want) or (got.isnan() and want.isnan())


def test_a_payload_has_all_codes_and_extreme_scales_overflow() -> None:
    payload = torch.cat([args[0].view(torch.uint8).flatten() for args in drawn(20, "all_codes_fp8")[1]])
    assert len(payload.unique()) == 256
    answers = torch.cat([expected.value for expected in oracles(*drawn(20, "extreme_fp8", 2))])
    finite = answers[answers.isfinite() & (answers != 0)].abs()
    assert answers.isinf().any() and answers.isnan().any() and (answers == 0).any()
    assert finite.min() >= torch.finfo(FP32).tiny


# Integer codes


@pytest.mark.parametrize("label", ["ragged_bf16", "one_short_block_fp32", "two_axes_bf16", "floor_fp32", "ties_bf16"])
def test_mean_of_nearest_integer_codes(label: str) -> None:
    """Exact rational arithmetic on float32 scales; Python's round is half-even."""
    case, inputs = drawn(44, label, 2)
    expected = oracle(case, inputs, 1)
    size, flats = case["block"], [args[0].to(FP64).flatten().tolist() for args in inputs]
    value, low, high = (part.flatten().tolist() for part in (expected.value, expected.low, expected.high))
    for place in range(0, len(value), 11):
        block = slice(place // size * size, (place // size + 1) * size)
        total = Fraction(0)
        for flat in flats:
            largest = max(map(abs, flat[block]))
            scale = torch.tensor(max(largest, 1e-8), dtype=FP32).div(127).item()
            total += max(-127, min(127, round(Fraction(flat[place]) / Fraction(scale)))) * Fraction(scale)
        mean = float(total / 2)
        slack = 1e-12 * abs(mean)
        assert low[place] - slack <= mean <= high[place] + slack
        if low[place] == high[place]:
            assert value[place] == pytest.approx(mean, rel=1e-12, abs=0.0)


def test_a_code_that_is_one_off_is_found_unless_it_is_a_tie() -> None:
    case, inputs = drawn(44, "ragged_fp32")
    expected = oracle(case, inputs)
    answer = rounded(expected)
    step = inputs[2][0][:64].abs().max() / 127 / 4
    for place in (3, 17, 40):
        wrong = answer.clone()
        wrong[place] += step
        assert ratio(case, wrong, expected) > 1000
    ties, inputs = drawn(44, "ties_bf16")
    expected = oracle(ties, inputs)
    assert (expected.low < expected.high).float().mean() > 0.2
    for bound in (expected.low, expected.high):
        assert ratio(ties, bound.to(BF16), expected) <= 1


def test_nan_and_infinity_take_their_whole_block_and_no_other() -> None:
    value = oracle(*drawn(44, "special_bf16"), rank=2).value
    assert value[:64].isnan().all() and value[15 * 64 :].isnan().all() and value[64 : 15 * 64].isfinite().all()


# The amax history


def test_an_old_maximum_decides_until_it_is_dropped() -> None:
    flat = torch.tensor([1.1, -0.25], dtype=BF16)
    kept, history = quant.fp8_round_trip(flat, torch.tensor([1.0, 500.0, 2.0, 3.0], dtype=BF16))
    assert history.tolist() == pytest.approx([500.0, 2.0, 3.0, 1.1], rel=2**-8)
    assert kept[0].item() == pytest.approx(1.117, abs=5e-4)
    dropped, history = quant.fp8_round_trip(flat, torch.tensor([500.0, 1.0, 2.0, 3.0], dtype=BF16))
    assert history.tolist() == pytest.approx([1.0, 2.0, 3.0, 1.1], rel=2**-8)
    assert dropped[0].item() == pytest.approx(1.070, abs=5e-4)


@pytest.mark.parametrize("flat", [[0.0, 0.0], [-0.0, -0.0], [-3.0, 1.0], [-2.0, -1.0], [math.nan, -1.0], [-math.inf, 1.0]])
def test_the_amax_has_the_bits_of_the_largest_absolute_value(flat: list[float]) -> None:
    vector, history = torch.tensor(flat), torch.ones(3)
    pushed, letter = quant.push_history(vector, history), quant.history_to_the_letter(vector, history)
    assert compare_exact("history", pushed, letter).passed


def test_history_in_bfloat16_may_round_the_amax_down() -> None:
    flat = torch.tensor([1.0 + 2.0**-9, 0.5])
    decoded, history = quant.fp8_round_trip(flat, torch.zeros(2, dtype=BF16))
    assert history.tolist() == [0.0, 1.0]
    assert decoded[0].item() == 1.0
    exact = quant.decoded(flat, quant.exact_scale(history))
    assert exact.low[0] <= 1.0 <= exact.high[0] and exact.value[0] == 1.0


@pytest.mark.parametrize("label", ["history_4_bf16", "bf16_history_fp32", "rank_scale_bf16", "outlier_bf16", "ties_bf16"])
def test_gathered_parameters_are_nearest_codes_times_scale(label: str) -> None:
    case, inputs = drawn(53, label, 2)
    full, _ = oracle(case, inputs)
    length = inputs[0][0].numel()
    for rank, (flat, history) in enumerate(inputs):
        entries = [*history[1:].tolist(), flat.abs().max().to(history.dtype).item()]
        scale = Fraction(max(entries)) / 448
        for place in range(0, length, 5):
            quotient = Fraction(flat[place].item()) / scale
            quotient = max(Fraction(-448), min(Fraction(448), quotient))
            wanted = {torch.tensor(float(code * scale), dtype=FP64).to(case.dtype).item() for code in nearest_codes(quotient)}
            index = rank * length + place
            low, high = full.low[index].item(), full.high[index].item()
            assert all(low <= want <= high for want in wanted)
            # No wider than both neighbours, each with the last rounding either way.
            assert high - low <= max(wanted) - min(wanted) + 2**-7 * abs(high) or (label == "ties_bf16" and len(wanted) == 1)


def test_scattered_means_are_those_of_the_gathered_vectors() -> None:
    case, inputs = drawn(52, "history_4_bf16")
    trips = torch.stack([quant.fp8_round_trip(*args)[0].to(FP64) for args in inputs]).mean(0)
    shards = torch.cat([shard.value for shard, *_ in oracles(case, inputs)])
    torch.testing.assert_close(shards, trips, rtol=1e-12, atol=0.0)


def test_inputs_have_codes_of_every_kind() -> None:
    """Normal numbers, subnormal ones and zeros: only then can the tolerance of a bfloat16 sum tell 4 bits from 8."""
    for flat, history in arguments(problems.get(52).cases("pkb", 2)[0]):
        quotients = flat.to(FP64).abs() / quant.exact_scale(quant.push_history(flat, history))
        assert history[0] > 2 * flat.abs().max()
        for part in (quotients > 2**-6, (quotients <= 2**-6) & (quotients > 2**-10), quotients < 2**-10):
            assert part.float().mean() > 0.05


@pytest.mark.parametrize("world_size", [2, 4])
def test_history_and_current_amax_decide_the_scale_by_turns(world_size: int) -> None:
    case = problems.get(53).cases("pkb", world_size)[0]
    by_history = [bool(history[1:].max() > flat.abs().max()) for flat, history in arguments(case)]
    assert by_history == [by_history[0] == (rank % 2 == 0) for rank in range(world_size)]


@pytest.mark.parametrize("label", ["nan_bf16", "inf_fp32"])
def test_one_poisoned_element_poisons_its_rank_alone(label: str) -> None:
    (_, first_history), *_, (full, history) = oracles(*drawn(53, label))
    blocks = full.value.view(4, -1)
    assert blocks[3].isnan().all() and blocks[:3].isfinite().all()
    assert not history.value[-1].isfinite() and first_history.value.isfinite().all()


def test_idle_rank_hits_the_floor_and_gives_zeros() -> None:
    full, history = oracle(*drawn(53, "idle_bf16", 2))
    assert not full.value.view(2, -1)[0].any() and full.value.view(2, -1)[1].any() and not history.value.any()


# Intervals


def one_score(expected: Expected, got: Sequence[float], tolerance: Tolerance) -> float:
    compare = comparison(lambda _: {"x": tolerance})
    case = problems.get(53).cases("pkb", 2)[0]
    return compare(case, torch.tensor(got, dtype=expected.dtype), expected, "random")[0].ratio


def test_interval_takes_what_lies_inside_and_measures_the_rest() -> None:
    low, high = torch.tensor([1.0, -2.0, math.nan, math.inf]), torch.tensor([2.0, -2.0, math.nan, math.inf])
    expected = Interval(name="x", value=low, dtype=FP32, low=low, high=high)
    assert one_score(expected, [1.7, -2.0, math.nan, math.inf], Tolerance()) == 0
    assert one_score(expected, [2.1, -2.0, math.nan, math.inf], Tolerance()) == math.inf
    assert one_score(expected, [2.1, -2.0, math.nan, math.inf], Tolerance(relative=0.1)) == pytest.approx(0.5, rel=1e-3)
    for wrong in ([math.nan, -2.0, math.nan, math.inf], [1.5, -2.0, 0.0, math.inf], [1.5, -2.0, math.nan, -math.inf]):
        assert one_score(expected, wrong, Tolerance(relative=1.0)) == math.inf


def test_exact_outputs_know_one_nan() -> None:
    other_nan = torch.tensor([0x7FC00001, 0x3F800000], dtype=torch.int32).view(FP32)
    assert one_score(exactly("x", other_nan), [math.nan, 1.0], Tolerance()) == 0
    assert one_score(exactly("x", other_nan), [math.nan, 1.0000001], Tolerance()) == math.inf
    assert one_score(exactly("x", torch.tensor([0.0])), [-0.0], Tolerance()) == math.inf
