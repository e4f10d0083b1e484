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
_EVALUATIONS = """
e2e/test_calibrate.py e2e/test_descendants.py e2e/test_faults.py e2e/test_lanes.py e2e/test_limits.py e2e/test_own_problems.py
e2e/test_sharing.py e2e/test_tracks.py e2e/test_updates.py e2e/test_variants.py
e2e/test_evidence.py::test_inputs_are_never_the_same_twice e2e/test_evidence.py::test_modules_beside_a_candidate
generate/test_agent.py generate/test_examples.py generate/test_run.py::test_broken_model_fails_as_its_table_says
generate/test_run.py::test_numbered_files_become_samples_of_a_run
"""
_TRAINING = "ops/test_operators.py ops/test_training_examples.py ops/test_worlds.py"
_OTHERS = """
device/test_emulated_ranks.py::test_a_grid_that_two_sms_do_not_hold_is_a_deadlock device/test_jit.py::test_two_processes_compile_once
device/test_loaded_code.py::test_example device/test_pytest_plugin.py::test_the_page_s_test_passes_and_its_twins_fail_with_lines
hardware/test_measure.py::test_probes_without_cuda_leave_a_note_and_no_traceback
problems/test_disguise.py::test_references_of_disguised_problems_meet_their_oracles
ranks/test_backend.py::test_gradients_of_fsdp_and_ddp_stay_on_the_kit ranks/test_ops_groups.py
selftest/test_selftest.py::test_false_verdicts_on_honest_candidates_are_counted
"""
SLOW = (
    *(f"device/test_{name}.py" for name in _EMULATED_KERNELS.split()),
    *_EVALUATIONS.split(),
    *_TRAINING.split(),
    *_OTHERS.split(),
)
"""Files of tests, and tests with all their cases. A kernel compiled for the emulator takes three CPU seconds, an evaluation one to ten."""


def mark_slow(items: list[pytest.Item]) -> None:
    """Marks what costs too much for every change."""
    slow = {f"tests/{name}" for name in SLOW}
    for item in items:
        test = item.nodeid.partition("[")[0]
        if test in slow or test.partition("::")[0] in slow:
            item.add_marker(pytest.mark.slow)
