from ranks.conftest import rank_pool

__all__ = ["rank_pool"]
