from one_compiler import one_compiler
from one_rank import one_rank

__all__ = ["one_compiler", "one_rank"]
