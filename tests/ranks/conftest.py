from collections.abc import Iterator
from typing import Any

import pytest

from ranks.pool import RankPool


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[Any]:
    """``rank_pool(world_size)``: one persistent pool of gloo ranks per world size."""
    pools: dict[int, RankPool] = {}

    def pool(world_size: int) -> RankPool:
        if world_size not in pools:
            pools[world_size] = RankPool(world_size)
        return pools[world_size]

    yield pool
    for item in pools.values():
        item.close()
