from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache

import pytest

from ranks.pool import RankPool


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[Callable[[int], RankPool]]:
    """``rank_pool(world_size)``: one persistent pool of gloo ranks per world size."""
    with ExitStack() as pools:
        yield cache(lambda world_size: pools.enter_context(RankPool(world_size)))
