"""Which test files cost too much for every change. `make test` leaves them out, `make test-room` runs them when their room changes.

Single tests, and cases of a test, are marked ``slow`` or ``long`` where they stand. CONTRIBUTING.md says what is held where."""

import pytest

_EMULATED_KERNELS = """
attention attention_backward capacity collective_protocols convolutions corpus_races delta_chunks dispatch ended_waits fourier fp8_products
grouped_products kernels matrix_products_emulated moe multicast_emulated newton_schulz nucleus ops parallel_layers
patterns perceptron point_to_point random_kernels raw_cuda_emulated reductions ring_attention ring_backward rms_norm row_gather
sharded_rms_norm shared_pieces solutions_emulated triton_emulated two_tiers ulysses_attention
"""
_EVALUATIONS = """
e2e/test_calibrate.py e2e/test_descendants.py e2e/test_faults.py e2e/test_side_by_side.py e2e/test_limits.py e2e/test_own_problems.py
e2e/test_sharing.py e2e/test_tracks.py e2e/test_updates.py e2e/test_variants.py
e2e/test_evidence.py::test_inputs_are_never_the_same_twice e2e/test_evidence.py::test_modules_beside_a_candidate
generate/test_agent.py generate/test_examples.py generate/test_run.py::test_broken_model_fails_as_its_table_says
generate/test_run.py::test_numbered_files_become_samples_of_a_run
e2e/test_verdicts.py::test_good_examples e2e/test_verdicts.py::test_four_ranks e2e/test_processes.py::test_interrupt_inside_evaluate
evaluate/test_api.py::test_evaluations_from_two_threads evaluate/test_api.py::test_leaving_ends_what_still_runs
evaluate/test_api.py::test_two_runs_with_one_folder_judge_everything_once evaluate/test_api.py::test_the_example_of_the_page_runs
evaluate/test_api.py::test_a_deadline_missed_on_an_overloaded_machine_is_no_final_verdict
evaluate/test_api.py::test_memory_that_the_machine_lacks_is_not_the_candidates_fault
evaluate/test_candidates.py::test_a_file_that_changes_while_it_waits_is_not_judged
evaluate/test_clusters.py::test_the_reference_moves_what_it_must_between_nodes
evaluate/test_clusters.py::test_the_kit_refuses_memory_of_another_node_on_emulated_ranks
evaluate/test_emulated.py::test_results_are_stored_and_found_again
evaluate/test_emulated.py::test_names_of_the_c_library_work_in_both_worlds
evaluate/test_emulated.py::test_a_kernel_that_no_gpu_runs_is_a_build_error
evaluate/processes/test_prestart.py::test_one_whose_supervisor_dies_before_it_is_awaited_clears_up
evaluate/ranks/test_extension_calls.py::test_an_evaluation_finds_what_its_builder_compiled
evaluate/test_worker_slots.py::test_a_hang_holds_up_nobody_in_a_run
evaluate/test_worker_slots.py::test_a_hang_holds_up_nobody_who_asks_later
project/test_docs.py::test_evaluating_from_python_works_as_written
project/test_release.py::test_the_wheel_judges_its_kit_example_and_reports
project/test_tutorials.py::test_the_all_reduce_is_right_and_unstable_without_step_4
"""
_TRAINING = "ops/test_operators.py ops/test_training_examples.py ops/test_worlds.py"
_OTHERS = """
device/test_emulated_ranks.py::test_a_grid_that_two_sms_do_not_hold_is_a_deadlock device/test_jit.py::test_two_processes_compile_once
device/test_loaded_code.py::test_example device/test_rows_page.py::test_the_tutorials_kernel_compiles_for_the_gpu
device/test_rows_page.py::test_the_tutorials_ranks_find_nothing
device/test_pytest_plugin.py::test_the_page_s_test_passes_and_its_twins_fail_with_lines
evaluate/audit/test_library.py::test_a_library_kernel_violates_the_custom_track
evaluate/ranks/test_timed_block.py::test_swaps_and_copies_alone_call_one_of_alike_slots_and_undo_their_swaps
evaluate/ranks/test_timed_block.py::test_on_a_gpu_copies_take_what_a_graph_takes_and_in_eager_mode_no_more_than_single_launches
evaluate/ranks/test_workers.py publish/test_page.py::test_committed_results_give_a_page_without_an_empty_section
hardware/test_measure.py::test_probes_without_cuda_leave_a_note_and_no_traceback
problems/test_disguise.py::test_references_of_disguised_problems_meet_their_oracles
ranks/test_backend.py::test_gradients_of_fsdp_and_ddp_stay_on_the_kit ranks/test_ops_groups.py
selftest/test_selftest.py::test_false_verdicts_on_honest_candidates_are_counted
"""
SLOW = (*(f"device/test_{name}.py" for name in _EMULATED_KERNELS.split()), *_EVALUATIONS.split(), *_TRAINING.split(), *_OTHERS.split())
"""Files of tests, and tests with all their cases. A kernel compiled for the emulator takes three CPU seconds, an evaluation one to ten."""


def mark_slow(items: list[pytest.Item]) -> None:
    """Marks what costs too much for every change."""
    slow = {f"tests/{name}" for name in SLOW}
    for item in items:
        test = item.nodeid.partition("[")[0]
        if test in slow or test.partition("::")[0] in slow:
            item.add_marker(pytest.mark.slow)
