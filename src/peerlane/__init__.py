"""peerlane: benchmark, evaluator, device kit and expert kernels for multi-GPU kernels."""

__version__ = "0.1.0"
