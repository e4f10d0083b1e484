"""Which test files cost too much for every change. `make test` leaves them out, `make test-room` runs them when their room changes.

Single tests, and cases of a test, are marked ``slow`` or ``long`` where they stand. CONTRIBUTING.md says what is held where."""

from __future__ import annotations

import pytest

_EMULATED_KERNELS = """
attention attention_backward capacity collective_protocols convolutions corpus_races delta_chunks dispatch ended_waits fp8_products
grouped_products kernels matrix_products_emulated moe multicast_emulated newton_schulz nucleus ops parallel_layers parted_exchange
patterns perceptron point_to_point random_kernels raw_cuda_emulated reductions ring_attention ring_backward rms_norm row_gather
sharded_rms_norm shared_pieces solutions_emulated triton_emulated tutorial two_tiers ulysses_attention
"""
SLOW_FILES = frozenset(f"tests/device/test_{name}.py" for name in _EMULATED_KERNELS.split())
"""Each compiles kernels for the emulator, which takes three CPU seconds a kernel. What the emulator finds is held by its own tests."""


def mark_slow(items: list[pytest.Item]) -> None:
    """Marks what costs too much for every change."""
    for item in items:
        if item.nodeid.partition("::")[0] in SLOW_FILES:
            item.add_marker(pytest.mark.slow)
