"""Kernels that serve one family of problems, shared by the solutions of that family."""
