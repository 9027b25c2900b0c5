"""Which tests show which feature. A row counts when every test that it names exists and passes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

ROWS: dict[str, dict[str, list[str]]] = {
    "E1 the loop over sized, unsized, infinite and no data": {
        "engine/test_data.py": [
            "test_every_epoch_iterates_the_data_anew",
            "test_unsized_epochs_are_completed_where_the_data_ends",
            "test_windows_over_unsized_data_end_where_the_data_ends",
            "test_infinite_data_needs_no_epochs",
            "test_a_run_without_data_has_batches_of_none",
            "test_empty_data_that_has_a_length_is_refused_before_the_run",
            "test_an_empty_generator_is_an_error",
            "test_sized_data_that_ends_early_is_an_error_that_names_both_lengths",
        ],
        "engine/test_loop.py": [
            "test_the_real_order_of_events_is_the_catalogues_pseudocode",
            "test_a_run_ends_at_the_first_bound_it_reaches",
        ],
    },
    "E2 filters, unions, custom events": {
        "engine/test_events.py": [
            "test_a_filter_passes_exactly_these_counts",
            "test_a_union_changes_neither_operand",
            "test_a_filter_that_makes_no_sense_is_refused_where_it_is_written",
            "test_an_own_event_is_counted_by_how_often_it_was_fired",
            "test_an_own_event_may_have_a_counter_function",
        ],
    },
    "E3 decorators, handles, has, detach": {
        "engine/test_handler.py": [
            "test_handles_detach_and_work_as_context_managers",
            "test_bad_attachments_fail_at_once",
        ],
    },
    "E4 terminate, terminate_epoch, skip": {
        "engine/test_loop.py": [
            "test_terminate_lets_the_other_receivers_run_and_ends_with_terminated_and_completed",
            "test_terminate_epoch_ends_the_epoch_and_the_next_begins",
        ],
        "engine/test_data.py": ["test_a_batch_of_none_is_counted_and_skipped_and_without_data_it_is_not"],
        "engine/test_update.py": ["test_the_loss_of_an_update_that_was_skipped_before_its_forward_is_none"],
    },
    "E5 minimum epochs and steps, maximum time": {
        "engine/test_loop.py": [
            "test_minimum_bounds_hold_a_stop_back",
            "test_a_stop_that_is_held_back_can_be_withdrawn",
        ],
        "engine/test_interval.py": ["test_max_time_ends_a_run_between_iterations"],
    },
    "E6 exceptions": {
        "test_errors.py": [
            "test_every_exception_handler_runs_once_and_the_first_error_leaves",
            "test_keyboard_interrupt_is_told_as_interrupted_and_never_swallowed",
            "test_ctrl_c_in_a_real_process_ends_it_cleanly",
        ],
    },
    "E7 the wiring; handler and event in errors": {
        "engine/test_wiring.py": [
            "test_the_wiring_is_printed_by_event_and_phase_in_the_order_of_the_loop",
            "test_the_wiring_shows_events_of_ones_own_and_is_drawn",
        ],
        "test_errors.py": ["test_an_error_in_a_handler_names_handler_event_epoch_and_iteration"],
    },
    "E8 intervals": {
        "engine/test_interval.py": [
            "test_an_interval_is_a_number_and_a_unit",
            "test_what_is_no_interval_is_refused_with_the_value_and_the_forms",
            "test_steps_under_accumulation_are_due_once_for_every_n_real_steps",
            "test_seconds_are_due_at_the_first_iteration_after_them",
        ],
    },
    "X4 order of attaching, no trace": {
        "test_composition.py": [
            "test_every_order_of_attaching_gives_one_result_kept_files_included",
            "test_any_subset_in_any_order_gives_one_result_and_detaching_leaves_no_trace",
        ],
        "test_invariants.py": ["test_a_handler_keeps_its_promises", "test_every_shipped_handler_is_checked"],
    },
}


@pytest.mark.parametrize("row", ROWS)
def test_the_tests_that_a_row_names_exist(row: str) -> None:
    for file, names in ROWS[row].items():
        there = set(re.findall(r"^def (test_\w+)", (TESTS / file).read_text(), re.MULTILINE))
        assert set(names) <= there
