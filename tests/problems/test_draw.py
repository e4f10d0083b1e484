"""What draws promise beyond the distribution that they name."""

import itertools
from typing import Any

import pytest
import torch

from peerlane.problems.contract import Draw, constant
from peerlane.problems.contract.codes import eight_bit_floats, eight_bits


def _draw(secret: str, block: int) -> Draw:
    return Draw(secret=secret, case_key="1/small/case/w2", slot=0, block=block, rank=0)


def _drawn(secret: str, block: int) -> torch.Tensor:
    return _draw(secret, block).apart((1000,), low=-2.0, high=8.0)


def test_apart_takes_another_end_of_the_range_in_every_block() -> None:
    first_ends = set()
    for secret in map(str, range(20)):
        upper = [bool((_drawn(secret, block) >= 4.5).all()) for block in range(3)]
        lower = [bool((_drawn(secret, block) < 1.5).all()) for block in range(3)]
        assert upper[0] != upper[1] and upper[0] == upper[2] and lower == [not end for end in upper]
        first_ends.add(upper[0])
    assert first_ends == {True, False}  # which end comes first is secret
    assert float(_drawn("a", 0).min()) >= -2.0 and float(_drawn("a", 0).max()) < 8.0
    assert not torch.equal(_drawn("a", 0), _drawn("a", 2))


def test_draws_depend_on_slot_block_rank_and_secret_alone() -> None:
    def drawn(**changed: Any) -> torch.Tensor:
        usual = {"secret": "a", "case_key": "1/small/case/w2", "slot": 0, "block": 1, "rank": 0}
        return Draw(**{**usual, **changed}).normal((64,), torch.float32)

    assert torch.equal(drawn(), drawn())
    others = [drawn(slot=1), drawn(block=2), drawn(rank=1), drawn(secret="b"), drawn(case_key="1/small/case/w4")]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations([drawn(), *others], 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_normal_is_drawn_in_float32_and_rounded(dtype: torch.dtype) -> None:
    wide, narrow = (_draw("a", 0).normal((1000,), which, scale=0.5, shift=3.0) for which in (torch.float32, dtype))
    assert narrow.dtype == dtype and torch.equal(narrow, wide.to(dtype))
    assert abs(float(wide.mean()) - 3.0) < 0.1 and abs(float(wide.std()) - 0.5) < 0.05
    assert len(set(wide.tolist())) > 990


def test_uniform_stays_in_its_range() -> None:
    values = _draw("a", 0).uniform((100_000,), torch.float32, low=-2.0, high=3.0)
    assert -2.0 <= float(values.min()) < -1.99 and 2.99 < float(values.max()) < 3.0


def test_on_the_meta_device_draws_have_shapes_only() -> None:
    draw = Draw(secret="a", case_key="1/small/case/w2", slot=0, block=0, rank=0, device="meta")
    drawn = [draw.normal((3, 4), torch.bfloat16), draw.uniform((3, 4), torch.float32), draw.octaves((3, 4))]
    assert all(tensor.is_meta and tensor.shape == (3, 4) for tensor in drawn)


def test_octaves_keep_rounding_errors_and_break_short_codes() -> None:
    draw = _draw("a", 0)
    x, w, scale = draw.normal((64, 512), torch.bfloat16), draw.normal((512, 32), torch.float32), draw.octaves((512,), most=3)
    assert sorted(set(scale.tolist())) == [0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0]
    scaled, compensating = x * scale.to(x.dtype), w / scale.unsqueeze(1)
    assert torch.equal(scaled.float() / scale, x.float())
    exact = x.double() @ w.double()
    plain = eight_bits(x).double() @ w.double() - exact
    coded = eight_bits(scaled).double() @ compensating.double() - exact
    assert plain.norm() < 0.01 * exact.norm() < 0.1 * coded.norm()


@pytest.mark.parametrize("shape", [(3, 40), (2, 0), (), (1,), (2, 32)])
def test_a_code_of_eight_bits_keeps_what_fits_it(shape: tuple[int, ...]) -> None:
    tensor = _draw("a", 0).normal(shape, torch.float32)
    coded = eight_bits(tensor)
    assert coded.shape == tensor.shape and coded.dtype == tensor.dtype
    assert torch.allclose(coded, tensor, atol=4.0 / 127, rtol=0.0)
    assert torch.equal(eight_bits(coded.sign() * 127.0), coded.sign() * 127.0)
    assert tensor.numel() < 32 or not torch.equal(coded, tensor)


def test_eight_bit_floats_keep_four_significant_bits() -> None:
    rows = torch.tensor([[448.0, 1.0, 1.0625, 1.125, 2.0**-10], [0.0] * 5])
    assert eight_bit_floats(rows).tolist() == [[448.0, 1.0, 1.0, 1.125, 0.0], [0.0] * 5]
    scaled = eight_bit_floats((rows * 1024).to(torch.bfloat16))
    assert scaled.dtype == torch.bfloat16 and torch.equal(scaled.float(), eight_bit_floats(rows) * 1024)


def test_constants_are_made_once_and_told_apart_by_source() -> None:
    cpu = torch.device("cpu")
    assert constant([1, 2], cpu) is constant([1, 2], cpu) and constant([1, 2], cpu).dtype == torch.int64
    assert constant([1.0, 2.0], cpu).dtype == torch.float32 and constant([1, 2], cpu, torch.float64).dtype == torch.float64
    assert float(constant([0.0], cpu).signbit()) != float(constant([-0.0], cpu).signbit())
    assert constant([[1], [2]], cpu).shape == (2, 1) and constant([], cpu).numel() == 0
