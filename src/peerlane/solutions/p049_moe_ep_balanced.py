"""Problem 49, a mixture-of-experts layer with one expert on each rank: the kernels of problem 31."""

from peerlane.solutions.p031_fused_moe_fwd import solution

__all__ = ["solution"]
