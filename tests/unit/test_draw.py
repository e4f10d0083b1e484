"""What draws promise beyond the distribution that they name."""

from __future__ import annotations

import torch

from peerlane.problems._draw import Draw


def _drawn(secret: str, block: int) -> torch.Tensor:
    draw = Draw(secret=secret, case_key="1/small/case/w2", slot=0, block=block, rank=0)
    return draw.apart((1000,), low=-2.0, high=8.0)


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
