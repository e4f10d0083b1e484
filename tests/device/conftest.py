from one_compiler import one_compiler

__all__ = ["one_compiler"]
