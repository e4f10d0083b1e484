"""Bytes of collectives: counted message by message for a direct exchange among all members."""

from __future__ import annotations

import pytest

from peerlane.problems.contract import traffic


@pytest.mark.parametrize("members", [1, 2, 4, 8])
def test_bytes_are_those_of_a_direct_exchange(members: int) -> None:
    part = 24
    whole = members * part
    to_others = sum(part for other in range(members) if other != 0)
    assert traffic.all_to_all(whole, members) == traffic.all_gather(whole, members) == traffic.reduce_scatter(whole, members) == to_others
    assert traffic.all_reduce(whole, members) == 2 * to_others
