"""Which tests show which feature. A row counts when every test that it names exists and passes."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

ROWS: dict[str, dict[str, list[str]]] = {
    "E1 the loop over sized, unsized, infinite and no data": {
        "engine/data/test_source.py": [
            "test_every_epoch_iterates_the_data_anew",
            "test_unsized_epochs_are_completed_where_the_data_ends",
            "test_windows_over_unsized_data_end_where_the_data_ends",
            "test_infinite_data_needs_no_epochs",
            "test_a_run_without_data_has_batches_of_none",
            "test_empty_data_that_has_a_length_is_refused_before_the_run",
            "test_an_empty_generator_is_an_error",
            "test_sized_data_that_ends_early_is_an_error_that_names_both_lengths",
        ],
        "engine/core/test_loop.py": [
            "test_the_real_order_of_events_is_the_catalogues_pseudocode",
            "test_a_run_ends_at_the_first_bound_it_reaches",
        ],
    },
    "E11 a kernel that trains by itself": {
        "engine/core/test_kernel.py": ["test_the_kernel_trains_by_itself_to_the_bits_of_an_engine"],
        "test_structure.py": [
            "test_the_kernel_names_no_room_also_not_for_types",
            "test_the_kernel_is_read_in_an_afternoon",
        ],
    },
    "E12 a look that raises changes nothing": {
        "engine/findings/test_looks.py": [
            "test_a_look_that_raises_is_said_once_and_changes_nothing",
            "test_a_look_at_the_start_that_raises_is_said_once_and_changes_nothing",
        ],
    },
    "E2 filters, unions, custom events": {
        "engine/core/test_events.py": [
            "test_a_filter_passes_exactly_these_counts",
            "test_a_union_changes_neither_operand",
            "test_a_filter_that_makes_no_sense_is_refused_where_it_is_written",
            "test_an_own_event_is_counted_by_how_often_it_was_fired",
            "test_an_own_event_may_have_a_counter_function",
        ],
    },
    "E3 decorators, handles, has, detach": {
        "engine/core/test_handler.py": [
            "test_handles_detach_and_work_as_context_managers",
            "test_bad_attachments_fail_at_once",
        ],
    },
    "E4 terminate, terminate_epoch, skip": {
        "engine/core/test_boundary.py": [
            "test_terminate_lets_the_other_receivers_run_and_ends_with_terminated_and_completed",
            "test_terminate_epoch_ends_the_epoch_and_the_next_begins",
        ],
        "engine/data/test_source.py": ["test_a_batch_of_none_is_counted_and_skipped_and_without_data_it_is_not"],
        "engine/core/test_step.py": ["test_the_loss_of_an_update_that_was_skipped_before_its_forward_is_none"],
    },
    "E5 minimum epochs and steps, maximum time": {
        "engine/core/test_boundary.py": [
            "test_minimum_bounds_hold_a_stop_back",
            "test_a_stop_that_is_held_back_can_be_withdrawn",
        ],
        "engine/authoring/test_interval.py": ["test_max_time_ends_a_run_between_iterations"],
    },
    "E6 exceptions": {
        "test_errors.py": [
            "test_every_exception_handler_runs_once_and_the_first_error_leaves",
            "test_keyboard_interrupt_is_emitted_as_interrupted_and_never_swallowed",
            "test_ctrl_c_in_a_real_process_ends_it_cleanly",
        ],
    },
    "E7 the wiring; handler and event in errors": {
        "engine/runs/test_wiring.py": [
            "test_the_wiring_is_printed_by_event_and_phase_in_the_order_of_the_loop",
            "test_the_wiring_shows_events_of_ones_own_and_is_drawn",
        ],
        "test_errors.py": ["test_an_error_in_a_handler_names_handler_event_epoch_and_iteration"],
    },
    "E8 intervals": {
        "engine/authoring/test_interval.py": [
            "test_an_interval_is_a_number_and_a_unit",
            "test_what_is_no_interval_is_refused_with_the_value_and_the_forms",
            "test_steps_under_accumulation_are_due_once_for_every_n_real_steps",
            "test_seconds_are_due_at_the_first_iteration_after_them",
        ],
    },
    "E9 engine.check(): findings with codes, as a table and as JSON": {
        "engine/findings/test_check.py": [
            "test_nothing_is_changed",
            "test_a_run_after_a_check_is_the_run_without_it",
            "test_a_check_of_a_good_composition_finds_nothing",
            "test_what_is_found_is_a_table_and_json",
            "test_the_first_run_reports_warnings_once_and_keeps_the_rest",
            "test_a_code_is_silenced_in_check_and_in_run",
            "test_a_handler_adds_findings_of_its_own",
        ],
        "engine/core/test_declarations.py": [
            "test_every_receiver_that_is_shipped_declares_what_it_uses",
            "test_receivers_write_what_they_declare_and_nothing_else",
            "test_receivers_read_what_they_declare_and_nothing_else",
        ],
        "test_mistakes.py": [
            "test_a_mistake_is_noticed",
            "test_the_same_done_right_stays_silent",
            "test_each_code_has_a_case",
        ],
    },
    "E10 what silently ruins training is noticed": {
        "handlers/test_guards.py": [
            "test_the_recipes_raise_no_alarm_and_end_as_without",
            "test_handlers_that_change_the_training_raise_no_alarm",
            "test_two_processes_raise_no_alarm",
            "test_a_code_can_stop_the_run_or_be_silenced",
            "test_between_its_looks_an_iteration_makes_no_call_more",
        ],
        "engine/findings/test_epoch_checks.py": [
            "test_what_changes_a_training_on_purpose_is_no_mistake",
            "test_an_unused_head_is_listed_and_no_warning",
        ],
        "test_mistakes.py": ["test_a_mistake_is_noticed", "test_the_same_done_right_stays_silent"],
    },
    "T1 gradient accumulation": {
        "handlers/test_gradient_accumulation.py": [
            "test_weights_equal_a_plain_loop",
            "test_a_schedule_equals_a_plain_loop",
            "test_a_weight_of_tokens_equals_a_plain_loop",
            "test_a_short_last_window_is_averaged_over_its_real_length",
            "test_reading_unsized_data_ahead_does_not_change_what_the_model_draws",
        ],
        "test_recipes.py": ["test_accumulation_fp16_clipping_schedule_and_average"],
    },
    "T2 micro-batches": {
        "handlers/test_micro_batching.py": [
            "test_it_trains_as_whole_batches_do",
            "test_weights_equal_a_plain_loop",
            "test_a_retry_leaves_no_trace_in_the_training",
            "test_the_smaller_size_is_kept_and_saved",
        ],
    },
    "T3 clipping": {
        "handlers/test_gradient_clipping.py": [
            "test_weights_equal_a_plain_loop",
            "test_with_accumulation_it_clips_once_for_each_window",
            "test_under_fp16_scaling_unscaled_gradients_are_clipped",
            "test_one_update_of_two_is_clipped",
        ],
        "handlers/test_adaptive_gradient_clipping.py": [
            "test_weights_equal_a_plain_loop",
            "test_together_with_clipping_by_norm_and_fp16_in_every_order",
        ],
    },
    "T4 gradient norms": {
        "handlers/test_gradient_norms.py": [
            "test_the_norms_equal_what_clip_grad_norm_returns",
            "test_under_fp16_accumulation_and_clipping_it_is_the_unscaled_norm_before_the_clip",
        ],
        "handlers/test_non_finite_guard.py": ["test_the_reason_names_the_parameters"],
    },
    "T5 non-finite losses and gradients": {
        "handlers/test_non_finite_guard.py": [
            "test_a_bad_batch_discards_its_whole_window_and_the_next_is_clean",
            "test_it_stops_at_the_patience_th_bad_step_in_a_row",
            "test_it_raises_and_names_the_iterations_of_the_loss",
            "test_an_overflow_under_fp16_is_the_scalers_business",
        ],
    },
    "T6 truncated back-propagation through time": {
        "handlers/test_truncated_bptt.py": [
            "test_batch_first_tensors_equal_a_plain_loop",
            "test_lists_of_time_steps_equal_a_plain_loop",
            "test_packed_sequences_equal_a_plain_loop_whose_hidden_state_is_narrowed",
            "test_a_split_of_ones_own_equals_a_plain_loop",
            "test_it_would_be_noticed_if_the_hidden_state_were_not_carried",
            "test_it_would_be_noticed_if_gradients_flowed_from_chunk_to_chunk",
        ],
        "test_recipes.py": ["test_truncated_bptt_accumulation_and_clipping"],
    },
    "T7 several optimizers": {
        "test_gan.py": [
            "test_alone_and_with_n_critic",
            "test_all_at_once_in_any_order",
            "test_each_update_leaves_the_other_networks_gradients_and_weights_untouched",
            "test_with_a_schedule_for_each_optimizer",
            "test_a_gan_resumes_after_any_iteration",
        ],
        "handlers/test_update_frequency.py": [
            "test_n_critic_equals_a_plain_loop",
            "test_windows_count_how_often_the_update_is_made_and_none_is_lost_at_the_end_of_an_epoch",
        ],
    },
    "T8 closure optimizers": {
        "engine/test_closures.py": [
            "test_weights_equal_a_plain_loop",
            "test_batches_count_by_their_weights",
            "test_scaling_for_float16_is_refused_before_the_first_batch",
            "test_a_state_inside_an_open_window_resumes_exactly",
        ],
    },
    "T9 sharpness-aware minimization": {
        "handlers/test_sharpness_aware_minimization.py": [
            "test_weights_equal_a_plain_loop",
            "test_both_gradients_are_clipped",
            "test_the_weights_are_put_back_bit_for_bit",
        ],
    },
    "T10 mixing, cutting and smoothing": {
        "handlers/test_mixup.py": ["test_weights_and_reported_losses_equal_a_plain_loop"],
        "handlers/test_cutmix.py": ["test_weights_and_shares_equal_a_plain_loop"],
        "handlers/test_cutout.py": ["test_weights_equal_a_plain_loop"],
        "handlers/test_label_smoothing.py": ["test_it_trains_as_torchs_label_smoothing_does"],
    },
    "T11 packed sequences": {
        "handlers/test_truncated_bptt.py": [
            "test_chunks_of_a_packed_batch_are_those_sequences_that_still_run_in_their_order"
        ],
        "handlers/test_device_transfer.py": ["test_packed_sequences_are_moved"],
    },
    "T12 freezing and discriminative rates": {
        "handlers/test_freezing.py": [
            "test_weights_and_statistics_equal_a_plain_loop",
            "test_everything_is_put_back",
            "test_a_saved_run_goes_on_bit_for_bit",
        ],
    },
    "T13 gradient noise, any field of the parameter groups": {
        "handlers/test_gradient_noise.py": ["test_weights_equal_a_plain_loop"],
        "handlers/test_parameter_scheduling.py": ["test_a_saved_run_goes_on_bit_for_bit"],
    },
    "R1 schedulers": {
        "handlers/test_lr_scheduling.py": [
            "test_a_saved_run_goes_on_bit_for_bit",
            "test_a_saved_plateau_goes_on_with_what_it_has_seen",
            "test_a_scheduler_that_gets_the_count_is_driven_as_in_its_own_loop",
        ],
    },
    "R2 schedules of many forms, shown without training": {
        "handlers/test_schedules.py": [
            "test_cosine_with_warmup_at_every_step",
            "test_warmup_stable_decay_at_every_step",
            "test_polynomial_at_every_step",
            "test_piecewise_holds_each_factor_from_its_step_on",
            "test_one_cycle_is_torchs",
            "test_what_is_simulated_is_what_training_uses",
        ],
        "handlers/test_lr_scheduling.py": [
            "test_a_simulation_leaves_the_run_the_random_streams_and_the_optimizer_alone",
            "test_a_schedule_is_drawn",
        ],
    },
    "R3 learning-rate finder": {
        "engine/tuning/test_learning_rate.py": [
            "test_the_losses_are_those_of_a_plain_loop_and_the_suggestion_scales_with_the_problem",
            "test_everything_is_as_before_and_the_run_that_follows_is_the_same",
            "test_an_interrupt_at_any_iteration_leaves_no_trace",
            "test_no_shipped_handler_shows_a_trace",
            "test_a_point_of_accumulated_batches_is_their_mean",
            "test_a_loss_that_is_not_finite_ends_the_sweep_and_is_left_out_of_the_suggestion",
            "test_a_curve_without_an_answer_says_what_to_change",
            "test_groups_keep_their_ratios",
            "test_of_several_updates_one_is_named_and_the_other_trains_at_its_own_rate",
            "test_two_processes_get_one_curve_and_leave_no_trace",
            "test_less_data_than_points_goes_round_and_says_so",
        ],
    },
    "R4 batch-size finder": {
        "engine/tuning/test_batch_size.py": [
            "test_the_largest_size_that_fits_is_found_and_was_tried",
            "test_no_size_is_tried_beyond_the_samples_or_the_maximum",
            "test_memory_that_runs_out_in_the_second_step_or_in_the_evaluation_is_noticed",
            "test_another_error_leaves_with_everything_as_before",
            "test_the_smallest_memory_of_two_processes_counts",
            "test_the_run_that_follows_is_the_same_and_losses_are_those_of_a_new_run",
            "test_a_limit_of_the_memory_of_a_process_is_found",
        ],
    },
    "R5 averaged weights": {
        "handlers/test_ema.py": [
            "test_averages_and_weights_equal_a_plain_loop",
            "test_a_validation_measures_the_averages_and_training_does_not_notice",
            "test_the_weights_come_back_after_an_error_inside_a_validation",
            "test_the_state_to_resume_from_holds_the_weights_and_the_averages",
        ],
        "handlers/test_swa.py": [
            "test_average_rates_and_weights_equal_torchs_recipe",
            "test_gathering_statistics_leaves_no_trace",
        ],
    },
    "S1 early stopping": {
        "handlers/test_early_stopping.py": [
            "test_it_stops_at_the_patience_th_value_in_a_row_without_improvement",
            "test_a_relative_min_delta_works_for_negative_scores",
            "test_it_stops_at_a_value_at_least_as_good_as_the_threshold",
            "test_it_stops_at_a_value_worse_than_the_divergence",
            "test_it_stops_at_once_at_a_value_that_is_not_finite",
            "test_the_modules_get_the_weights_of_the_best_value_back",
        ],
    },
    "S2 limits, overfitting, fast runs": {
        "handlers/test_limit_batches.py": [
            "test_each_epoch_takes_the_first_batches_of_a_new_shuffle",
            "test_a_share_is_that_of_the_length_exactly",
            "test_evaluations_have_a_limit_of_their_own",
        ],
        "handlers/test_overfit_batches.py": ["test_it_equals_a_plain_loop_over_the_same_batches"],
        "handlers/test_fast_dev_run.py": [
            "test_it_runs_one_epoch_of_a_few_batches_of_everything_and_writes_nothing",
            "test_after_an_error_nothing_stays_switched_off",
        ],
    },
    "V1 validation at any interval, several loaders": {
        "handlers/test_validation.py": [
            "test_it_measures_what_a_plain_loop_measures",
            "test_the_interval_says_when",
            "test_several_data_are_evaluated_under_their_names",
        ],
    },
    "U1 one line where people expect one": {
        "examples/test_jobs.py": [
            "test_a_job_ends_with_the_recorded_numbers",
            "test_each_job_is_as_short_as_the_short_forms_allow",
        ],
        "engine/weights/test_chosen.py": [
            "test_the_best_weights_are_those_that_were_chosen_averages_included",
            "test_it_is_the_plain_loop_with_the_best_weights",
        ],
    },
    "V2 sanity validation": {
        "handlers/test_validation.py": ["test_a_sanity_run_changes_nothing_and_leaves_no_metric"],
    },
    "V3 metrics": {
        "handlers/test_metrics.py": [
            "test_the_average_loss_counts_samples_and_not_batches",
            "test_a_torchmetrics_metric_equals_the_direct_computation",
            "test_running_values_can_be_had_within_the_epoch",
        ],
    },
    "V4 test and predict": {
        "handlers/test_predictions.py": [
            "test_outputs_inputs_and_targets_are_joined_over_the_batches",
            "test_with_a_folder_every_batch_is_a_file_and_nothing_stays_in_memory",
        ],
        "engine/runs/test_evaluation.py": ["test_testing_uses_the_best_weights_and_not_the_last"],
    },
    "H1 device placement": {
        "handlers/test_device_transfer.py": [
            "test_tensors_are_moved_in_all_containers",
            "test_the_model_is_on_its_device_before_the_optimizer_is_built",
            "test_prefetch_copies_on_a_stream_of_its_own_without_waiting_and_trains_the_same",
        ],
    },
    "H2 precision": {
        "handlers/test_mixed_precision.py": [
            "test_bf16_equals_a_plain_loop",
            "test_fp16_equals_a_plain_loop",
            "test_an_overflow_skips_the_step_and_halves_the_scale",
        ],
        "handlers/test_true_precision.py": ["test_it_equals_a_plain_loop"],
    },
    "S3 loaders made anew, samplers with the epoch, several loaders": {
        "engine/data/test_combined.py": [
            "test_batches_are_those_of_a_plain_loop",
            "test_a_run_resumed_anywhere_goes_on_in_every_part",
            "test_data_is_made_anew_every_few_epochs_and_may_change_its_length",
        ],
        "engine/data/test_loading.py": [
            "test_samplers_get_the_epoch_also_after_a_resume",
            "test_an_epoch_that_a_user_sets_holds",
        ],
    },
    "C1 checkpoints": {
        "handlers/test_checkpoint.py": [
            "test_the_last_ones_are_kept",
            "test_the_best_are_kept",
            "test_a_missing_metric_is_an_error_that_names_those_there_are",
            "test_the_template_names_the_position_and_metrics",
            "test_an_interval_of_time",
            "test_a_run_that_an_error_ended_goes_on_bit_for_bit",
            "test_weights_only_are_those_that_are_to_be_used",
        ],
        "engine/checkpoints/test_retention.py": [
            "test_nan_is_never_kept",
            "test_of_equal_values_the_earlier_one_stays",
        ],
        "engine/checkpoints/test_store.py": [
            "test_two_processes_in_one_folder_at_the_same_time",
        ],
        "engine/checkpoints/test_ownership.py": ["test_the_one_that_a_run_was_resumed_from_stays"],
    },
    "C2 exact resume": {
        "test_resume.py": [
            "test_a_run_resumed_from_any_cut_ends_as_the_one_that_was_not_stopped",
            "test_a_run_resumed_from_any_checkpoint_keeps_and_logs_the_same",
            "test_every_handler_that_has_a_state_is_in_a_recipe_that_gives_it_one",
        ],
        "test_resume_controls.py": ["test_a_state_without_this_part_ends_elsewhere"],
        "engine/data/test_loading.py": [
            "test_a_run_resumed_anywhere_skips_to_its_place",
            "test_augmentation_is_the_same_for_any_number_of_workers_and_differs_from_epoch_to_epoch",
            "test_reading_again_says_what_it_costs_and_what_would_not",
        ],
        "test_kills.py": ["test_killed_at_random_moments_it_ends_as_if_it_had_not_been"],
    },
    "C3 atomic, checksummed, asynchronous, the newest good one": {
        "engine/checkpoints/test_crash_states.py": [
            "test_whatever_a_power_cut_leaves_what_was_reported_as_saved_loads",
            "test_the_model_finds_what_a_careless_writer_loses",
        ],
        "engine/checkpoints/test_store.py": [
            "test_no_damage_is_ever_loaded_and_the_next_good_one_is_taken",
            "test_a_small_disk_that_is_really_full_is_an_oserror_and_the_run_can_go_on",
            "test_a_folder_that_becomes_read_only_is_an_error_and_the_earlier_ones_stay",
        ],
        "handlers/test_checkpoint.py": [
            "test_nothing_is_reported_as_saved_before_the_disk_has_it",
            "test_written_in_a_thread_the_training_and_the_files_are_the_same",
        ],
        "engine/checkpoints/test_saver.py": ["test_whichever_operation_fails_nothing_is_lost_and_the_run_can_go_on"],
    },
    "C4 hyperparameters, safe loading": {
        "handlers/test_checkpoint.py": [
            "test_hyperparameters_come_back_as_they_were_and_may_be_overridden",
            "test_the_file_is_read_back_without_running_code",
        ],
    },
    "C5 preemption": {
        "handlers/test_preemption.py": [
            "test_stopped_in_any_iteration_and_resumed_the_run_ends_the_same",
            "test_killed_at_random_moments_and_resumed_again_and_again",
            "test_a_process_leaves_with_the_exit_status_after_everything_was_emitted",
        ],
    },
    "H3 DDP from torchrun": {
        "handlers/test_distributed_data_parallel.py": [
            "test_it_trains_to_the_bits_of_torchs_ddp_in_a_plain_loop",
            "test_it_trains_as_one_process_on_the_batches_joined",
            "test_each_bucket_is_reduced_once_in_a_window",
            "test_what_one_process_asks_for_all_do",
            "test_a_process_that_learns_nothing_takes_the_step_of_the_others",
            "test_compressed_gradients_are_those_of_torchs_hooks",
            "test_what_cannot_be_is_refused_by_name",
            "test_launched_alone_it_changes_nothing",
            "test_after_a_run_the_model_is_the_plain_one",
            "test_what_is_written_is_written_by_rank_0_alone",
        ],
        "engine/data/test_sharding.py": [
            "test_batches_are_sharded_in_the_order_that_rank_0_draws",
            "test_each_process_may_have_data_of_its_own",
        ],
        "test_together.py": ["test_two_processes_keep_the_promises", "test_an_error_in_one_process_ends_both"],
        "test_resume_together.py": [
            "test_a_run_resumed_from_any_checkpoint_ends_as_the_one_that_was_not_stopped",
            "test_the_model_does_not_hide_the_order_of_the_buckets",
            "test_a_part_of_the_state_of_rank_1_that_is_left_out_is_noticed",
            "test_with_another_number_of_processes_no_batch_is_left_out",
        ],
    },
    "H4 FSDP2 and sharded checkpoints": {
        "handlers/test_fully_sharded_data_parallel.py": [
            "test_trains_to_the_weights_of_one_process",
            "test_handlers_do_with_shards_what_they_do_with_whole_tensors",
            "test_a_window_is_reduced_once",
            "test_a_checkpoint_moves_from_two_processes_to_one_and_to_three",
            "test_a_process_that_is_killed_during_a_save_leaves_the_older_checkpoint_whole",
            "test_a_damaged_shard_is_named_and_the_older_checkpoint_taken",
            "test_an_optimizer_that_was_built_is_refused_also_alone",
            "test_a_sharded_model_becomes_a_plain_one",
            "test_a_run_that_is_cut_goes_on_bit_for_bit",
        ],
    },
    "H6 elastic restart": {
        "test_torchrun.py": [
            "test_a_job_of_which_a_worker_was_killed_ends_as_if_it_had_not_been",
            "test_the_same_script_runs_alone",
            "test_a_signal_to_one_worker_saves_and_stops_all_and_the_next_job_goes_on",
            "test_an_error_that_comes_again_ends_the_job_and_every_worker_reports_whose_it_was",
        ],
        "handlers/test_checkpoint.py": [
            "test_a_script_that_is_started_again_goes_on_by_itself",
        ],
        "engine/checkpoints/test_failures.py": ["test_one_from_which_three_runs_failed_is_passed_over"],
    },
    "H8 no more collectives than plain DDP and FSDP2": {
        "test_collectives.py": [
            "test_an_iteration_makes_the_collectives_of_plain_ddp",
            "test_an_iteration_makes_the_collectives_of_plain_fsdp",
            "test_the_ranks_agree_once_between_epochs_and_share_an_order_that_is_drawn",
            "test_an_evaluation_makes_one_reduction_at_its_end",
        ],
    },
    "H9 the same bits for any number of processes": {
        "handlers/test_elastic_data_parallel.py": [
            "test_one_process_is_a_plain_loop_over_the_shards",
            "test_any_number_of_processes_ends_with_the_bits_of_one",
            "test_a_run_goes_on_with_any_number_of_processes_as_if_nothing_had_happened",
            "test_a_state_inside_a_window_has_the_batches_of_all_shards",
            "test_compositions_end_with_the_same_bits_on_one_two_and_three_processes",
            "test_what_would_depend_on_the_number_of_processes_is_refused_by_name",
        ],
        "test_elastic.py": [
            "test_killed_and_started_with_any_number_of_processes_all_end_as_one_undisturbed_process",
        ],
    },
    "T2 all ranks halve their batches": {
        "handlers/test_distributed_data_parallel.py": ["test_all_halve_their_batches_when_the_memory_of_one_runs_out"],
    },
    "V5 gathering without padding": {
        "handlers/test_distributed_data_parallel.py": [
            "test_metrics_are_those_of_one_process",
            "test_predictions_are_complete_and_in_the_order_of_the_data",
        ],
    },
    "T15 loss-spike detection with rewind; pruning": {
        "handlers/test_spike_guard.py": [
            "test_a_poisoned_batch_is_left_out_as_in_a_plain_loop_without_it",
            "test_what_is_watched_is_the_loss_the_norm_or_both",
            "test_the_norm_is_that_before_clipping",
            "test_a_window_counts_with_its_mean_loss_and_is_left_out_as_a_whole",
            "test_what_is_not_finite_is_left_to_the_other_guard",
            "test_spikes_do_not_enter_the_window_and_recorded_values_can_be_judged",
            "test_a_stop_names_the_iteration_and_the_reason",
            "test_a_rewind_ends_as_a_run_that_never_sees_these_batches",
            "test_a_shuffled_loader_leaves_out_batches_by_epoch_and_index",
            "test_a_spike_at_the_beginning_of_an_epoch_leaves_out_batches_of_two",
            "test_logs_metrics_checkpoints_and_validations_are_those_of_a_run_without_these_batches",
            "test_too_many_rewinds_are_an_error_that_names_the_batches",
            "test_resumed_from_any_iteration_before_in_or_after_a_rewind_it_ends_alike",
            "test_killed_before_in_or_after_a_rewind_it_ends_alike",
            "test_two_processes_go_back_together",
            "test_the_best_from_before_is_still_there_once_a_better_one_is_rewound",
            "test_the_actions_are_exported",
            "test_a_run_without_spikes_is_not_changed",
        ],
        "engine/resuming/test_past.py": ["test_memory_holds_no_more_states_than_asked_for"],
        "engine/runs/test_replay.py": ["test_on_mnist_1d_spikes_are_found_named_and_told_apart"],
        "handlers/test_pruning.py": [
            "test_weights_are_those_of_a_plain_loop",
            "test_each_layer_loses_the_same_share_or_the_smallest_of_all_go",
            "test_a_structure_keeps_the_largest_of_each_group",
            "test_zeros_stay_zero_for_a_thousand_steps_in_weights_moments_and_averages",
            "test_every_checkpoint_is_sparse_and_has_the_keys_of_the_model",
            "test_a_run_resumed_inside_the_schedule_ends_like_one_that_was_not_stopped",
            "test_detaching_leaves_the_zeros_and_nothing_else",
            "test_frozen_parameters_are_neither_pruned_nor_counted",
        ],
    },
    "C8 checkpoints and averages of what is trained only": {
        "handlers/test_trained_only.py": [
            "test_the_frozen_base_is_not_written_and_the_run_goes_on_as_if_it_were",
            "test_a_model_with_another_base_is_refused_and_keeps_its_weights",
            "test_weights_of_what_is_trained_are_put_on_top_of_the_base",
            "test_a_frozen_parameter_that_is_changed_by_hand_is_written",
            "test_where_nothing_is_frozen_it_says_so",
            "test_ranks_leave_out_the_base_and_resume_exactly",
            "test_averages_of_what_is_trained_evaluate_as_averages_of_everything_do",
            "test_a_parameter_is_averaged_from_its_first_step_and_a_resumed_run_knows_it",
        ],
    },
    "C9 engine.rewind and engine.replay": {
        "engine/resuming/test_past.py": [
            "test_going_back_and_on_again_changes_nothing",
            "test_the_batches_left_out_are_those_that_follow_and_no_others",
            "test_a_second_run_and_a_reset_know_what_was_left_out",
            "test_a_resumed_run_leaves_out_the_same_and_can_go_back_as_far",
            "test_mistakes_name_the_way_out",
        ],
        "engine/runs/test_replay.py": [
            "test_it_is_the_iteration_of_the_run",
            "test_its_samples_are_those_of_its_batch",
            "test_nothing_of_the_engine_is_changed",
            "test_a_poisoned_sample_is_named_first",
            "test_a_fault_does_not_repeat_and_bad_data_does",
            "test_within_a_window_loss_and_gradients_are_those_of_the_window",
        ],
    },
    "O1 progress bar": {
        "handlers/test_progress_bar.py": [
            "test_a_file_gets_a_line_for_each_epoch",
            "test_a_terminal_gets_a_bar_for_each_epoch",
            "test_unsized_data_has_a_bar_without_an_end",
            "test_chosen_metrics_alone_are_shown",
            "test_the_smoothed_loss_is_an_exponential_average_with_bias_correction",
            "test_values_are_fetched_only_when_they_are_drawn",
            "test_iterations_and_samples_are_counted_per_second",
            "test_the_time_left_is_known_for_every_bound",
            "test_epochs_that_are_short_share_one_bar_over_the_run",
            "test_lines_without_a_value_come_once_a_minute",
            "test_each_bar_stays_on_one_line_of_a_terminal",
            "test_rich_draws_on_request",
        ],
        "test_notebooks.py": [
            "test_a_run_stores_one_line_for_its_bar",
            "test_a_cell_that_was_interrupted_and_is_run_again_ends_as_without",
            "test_outside_of_a_notebook_ipython_is_not_imported",
            "test_a_notebook_of_the_examples_runs_and_each_cell_may_be_run_again",
        ],
        "engine/authoring/test_markup.py": ["test_a_notebook_shows_what_is_printed"],
    },
    "O2 TensorBoard": {
        "handlers/test_tensorboard.py": [
            "test_losses_and_the_rates_that_were_used_are_written_every_few_iterations",
            "test_images_figures_texts_and_histograms_are_read_back_as_they_were_logged",
            "test_the_values_of_a_row_are_one_event",
            "test_hyperparameters_and_the_last_metrics_are_one_session_in_the_same_file",
            "test_resumed_at_any_moment_all_that_is_shown_is_there_once",
            "test_killed_and_resumed_all_that_is_shown_is_there_once",
            "test_the_graph_is_drawn_without_a_trace_in_the_training",
            "test_a_graph_that_cannot_be_traced_is_reported_and_training_goes_on",
        ],
        "handlers/test_histograms.py": [
            "test_the_weights_after_the_iteration_and_the_gradients_of_the_next_step_are_those_of_a_plain_loop",
            "test_between_the_intervals_nothing_is_called",
            "test_gradients_of_strange_kinds_have_a_row_or_a_warning_with_their_name",
            "test_resumed_at_any_iteration_nothing_is_lost_or_doubled",
            "test_the_training_is_not_changed",
        ],
        "engine/authoring/test_log.py": [
            "test_a_number_of_each_iteration_is_sampled_and_a_rarer_one_is_written_always",
            "test_images_figures_and_texts_are_events_with_a_payload",
            "test_what_an_evaluation_logs_goes_to_the_loggers_of_the_trainer",
        ],
    },
    "O4 run history in memory": {
        "handlers/test_history.py": [
            "test_every_new_value_is_recorded_once_with_its_place",
            "test_the_table_has_a_row_for_each_epoch",
            "test_a_row_is_printed_as_each_epoch_completes_below_one_header",
            "test_what_training_and_validation_measure_shares_a_panel",
            "test_no_text_of_a_plot_is_cut_and_no_legend_covers_a_curve",
            "test_the_frame_has_a_row_for_each_iteration_in_which_something_was_measured",
        ],
    },
    "O3 MLflow, Weights & Biases, Trackio": {
        "handlers/test_remote_logger.py": [
            "test_the_service_gets_the_rows_of_the_csv_logger_value_for_value",
            "test_a_service_that_refuses_costs_one_warning_and_no_row",
            "test_a_service_that_hangs_holds_nothing_up_and_its_rows_can_be_sent_later",
            "test_the_run_puts_a_row_into_a_queue_and_calls_nothing_else",
            "test_a_resumed_run_continues_the_same_remote_run_and_doubles_nothing",
            "test_rows_that_were_not_sent_when_the_state_was_saved_are_sent_by_the_resumed_run",
            "test_rows_that_a_client_would_lose_with_its_process_are_in_the_file",
            "test_how_a_run_ends_is_its_status",
            "test_a_run_that_goes_back_and_takes_another_way_continues_as_a_new_remote_run",
            "test_of_several_processes_the_first_sends_one_run",
            "test_without_its_package_the_error_names_the_extra",
            "test_a_client_is_imported_only_once_a_run_begins",
            "test_generators_and_weights_are_those_of_a_run_without_it",
        ],
        "handlers/test_mlflow_logger.py": [
            "test_the_database_has_the_rows_of_the_csv_logger_value_for_value",
            "test_how_a_run_ends_is_its_status",
            "test_a_run_that_takes_another_way_continues_as_a_new_run",
            "test_a_run_that_is_killed_and_resumed_loses_and_doubles_nothing",
        ],
        "handlers/test_wandb_logger.py": [
            "test_the_files_have_the_rows_of_the_csv_logger_value_for_value",
            "test_how_a_run_ends_is_its_exit_code",
            "test_a_run_that_takes_another_way_continues_as_a_new_run",
            "test_a_run_that_is_killed_and_resumed_loses_and_doubles_nothing",
        ],
        "handlers/test_trackio_logger.py": [
            "test_the_database_has_the_rows_of_the_csv_logger_value_for_value",
            "test_how_a_run_ends_is_an_alert",
            "test_a_run_that_takes_another_way_continues_as_a_new_run",
            "test_a_run_that_is_killed_and_resumed_loses_and_doubles_nothing",
        ],
    },
    "O5 learning rate, momentum, statistics, memory, throughput, stragglers": {
        "handlers/test_throughput.py": [
            "test_rates_are_those_of_the_iterations_after_the_warm_up",
            "test_evaluations_and_checkpoints_do_not_count",
            "test_a_step_of_accumulated_batches_is_one_step",
            "test_operations_are_those_of_forward_and_backward_and_accumulation_changes_nothing",
            "test_the_operations_of_a_large_layer_are_the_formula",
            "test_of_an_unknown_device_there_is_no_mfu_and_a_line_says_why",
            "test_between_two_measurements_an_iteration_calls_it_once_or_three_times",
            "test_a_resumed_run_warms_up_again_and_shows_no_drop",
            "test_two_of_them_have_metrics_by_their_names",
        ],
        "handlers/test_device_statistics.py": [
            "test_the_memory_is_that_of_this_process_and_grows_with_what_it_holds",
        ],
        "handlers/test_parameter_statistics.py": ["test_the_statistics_are_those_of_a_plain_loop"],
        "handlers/test_gradient_norms.py": ["test_the_norms_equal_what_clip_grad_norm_returns"],
        "handlers/test_optimizer_statistics.py": [
            "test_the_values_are_those_that_the_steps_of_a_plain_loop_use",
            "test_the_history_and_the_loggers_have_all_of_them",
        ],
        "handlers/test_model_summary.py": ["test_shapes_and_calls_are_those_of_the_first_forward"],
        "handlers/test_straggler_detection.py": [
            "test_a_slow_rank_is_named_once_with_its_part_and_once_when_it_is_back_to_normal",
            "test_nobody_is_named_whom_a_busy_machine_holds_up_in_some_iterations",
            "test_between_two_comparisons_an_iteration_makes_three_calls_more",
        ],
        "test_cuda.py": [
            "test_statistics_in_every_iteration_wait_for_nothing",
            "test_cuda_sees_no_synchronisation_in_an_iteration_with_statistics",
        ],
    },
    "O6 profiler": {
        "handlers/test_profiler.py": [
            "test_what_waits_where_is_found_where_it_waits",
            "test_the_trace_has_the_iterations_that_were_asked_for",
            "test_torchs_profiler_has_the_operators_within_the_acts",
            "test_weights_are_those_of_a_run_without_it_and_nothing_of_it_stays",
        ],
    },
    "O7 model summary": {
        "handlers/test_model_summary.py": [
            "test_the_totals_are_what_torch_holds_with_shared_parameters_counted_once",
            "test_a_module_under_two_names_is_shown_twice_and_counted_once",
            "test_complex_and_lazy_parameters",
            "test_shapes_and_calls_are_those_of_the_first_forward",
            "test_operations_are_the_formulas_and_what_torch_counts",
            "test_attention_is_counted_on_the_cpu",
            "test_nothing_of_it_stays_also_after_an_error_in_the_forward",
            "test_rows_are_chosen_by_depth_and_by_pattern",
            "test_of_a_compiled_model_only_parameters_are_shown",
            "test_of_a_sharded_model_all_parameters_are_counted",
        ],
    },
    "O8 rank-aware print": {
        "engine/distributed/test_processes.py": ["test_rank_0_prints_and_with_all_every_rank_with_its_number"],
    },
    "O9 garbage collection in step": {
        "handlers/test_garbage_collection.py": [
            "test_garbage_is_collected_at_the_interval_and_at_the_end_of_an_epoch_and_at_no_other_time",
            "test_all_is_collected_after_many_collections_of_young_objects",
            "test_all_is_collected_before_an_evaluation",
            "test_pythons_collection_is_as_before_however_the_run_ends",
            "test_what_was_frozen_before_stays_so_and_nothing_is_added",
            "test_pauses_are_short",
            "test_what_it_took_is_counted_and_shown_by_the_profiler",
            "test_a_forked_worker_collects_on_its_own",
            "test_all_ranks_collect_at_the_same_iterations",
            "test_a_second_one_is_refused",
        ],
    },
    "X1 separate streams": {
        "engine/models/test_streams.py": [
            "test_switching_a_handler_off_moves_no_mask_no_order_and_no_other_handlers_draw",
            "test_with_shared_streams_the_same_handlers_shift_masks_and_order",
            "test_a_run_is_that_of_a_plain_loop_that_draws_alike",
            "test_a_run_resumed_at_any_cut_ends_as_if_it_had_not_been_stopped",
        ],
    },
    "X2 ablation studies": {
        "engine/ablation/test_designs.py": [
            "test_leave_one_out_switches_each_candidate_off_once",
            "test_one_at_a_time_starts_from_nothing",
            "test_a_factorial_has_every_combination_once_and_gives_the_levels",
            "test_a_swap_has_one_variant_for_each_alternative",
            "test_a_group_is_switched_together_and_its_handlers_not_alone",
        ],
        "engine/ablation/test_study.py": [
            "test_one_worker_and_two_leave_the_same_store",
            "test_dasks_executor_leaves_the_same_store",
            "test_killed_at_random_moments_it_ends_with_the_same_store",
            "test_a_failed_run_is_kept_with_its_traceback_and_made_again_only_when_asked_for",
            "test_more_seeds_and_other_variants_run_only_what_is_missing",
            "test_the_plan_says_what_is_to_be_made_and_what_it_costs",
            "test_variants_that_cannot_work_are_refused_together",
        ],
        "engine/ablation/test_statistics.py": [
            "test_the_interval_covers_the_truth_as_often_as_it_says",
            "test_the_test_keeps_its_level_alone_and_in_a_family",
            "test_holm_is_the_closed_test_of_bonferroni",
            "test_p_is_the_share_of_all_sign_patterns",
        ],
        "engine/ablation/test_report.py": [
            "test_a_failed_run_is_shown_and_named_in_every_form",
        ],
        "engine/ablation/test_sentences.py": ["test_too_few_seeds_are_said_with_how_many_it_takes"],
        "engine/ablation/test_plot.py": ["test_the_picture_shows_each_seed"],
    },
    "X7 planned looks, power, margins and equivalence": {
        "engine/ablation/test_looks.py": [
            "test_planned_looks_err_as_seldom_as_one_and_stop_early",
            "test_over_1000_studies_the_error_of_the_family_is_kept",
            "test_five_large_effects_take_at_most_60_percent_of_the_runs_of_the_last_look",
            "test_a_look_at_which_nothing_can_be_found_is_refused",
            "test_a_study_makes_no_more_runs_of_what_a_look_has_decided",
        ],
        "engine/ablation/test_detectability.py": [
            "test_power_is_that_of_a_simulation",
            "test_the_step_down_test_finds_more_than_holm",
            "test_a_plan_says_what_its_seeds_can_show",
        ],
        "engine/ablation/test_verdicts.py": [
            "test_no_verdict_contradicts_its_interval",
            "test_in_10000_reports_no_verdict_contradicts_its_interval",
            "test_equivalence_is_said_with_its_sign",
        ],
        "engine/ablation/test_joint.py": [
            "test_intervals_hold_together_and_a_family_errs_seldom",
            "test_step_down_is_its_definition_with_ties_and_missing_seeds",
        ],
        "engine/ablation/test_failures.py": [
            "test_nothing_advises_against_a_handler_that_prevents_collapses",
            "test_of_200_studies_none_advises_against_a_handler_that_prevents_collapses",
        ],
    },
    "X8 any factor, tuning by variant, several tasks and metrics": {
        "engine/ablation/test_factors.py": [
            "test_a_two_by_three_design_is_least_squares_with_interactions",
            "test_a_study_builds_each_variant_with_its_arguments",
            "test_every_pair_of_levels_is_a_cell",
        ],
        "engine/ablation/test_nuisance.py": [
            "test_each_variant_gets_the_best_value_of_the_same_grid_on_other_seeds",
            "test_a_search_is_that_of_optuna_for_each_variant_and_resumes",
            "test_tuning_in_two_steps_keeps_the_first_and_says_so",
        ],
        "engine/ablation/test_tasks.py": [
            "test_each_task_has_the_runs_that_a_study_of_it_alone_has",
            "test_the_store_keeps_the_runs_of_tasks_apart_even_where_they_are_built_alike",
        ],
        "engine/ablation/test_aggregate.py": [
            "test_points_are_those_of_the_definitions_and_of_scipy",
            "test_intervals_are_quantiles_over_the_resamples",
            "test_points_and_intervals_are_those_of_rliable_with_the_same_resamples",
        ],
        "engine/ablation/test_task_report.py": [
            "test_the_mean_score_of_a_seed_is_compared_as_any_metric",
            "test_the_comparisons_of_all_tasks_are_one_family",
            "test_variants_of_which_runs_fail_are_never_called_better",
        ],
        "engine/ablation/test_task_pictures.py": ["test_all_that_is_written_can_be_read"],
        "engine/ablation/test_metrics_report.py": [
            "test_all_variants_and_metrics_are_one_family",
            "test_the_correction_keeps_the_error_over_the_metrics",
        ],
    },
    "X9 failures count; Shapley values, a methods paragraph, one page": {
        "engine/ablation/test_failures.py": [
            "test_ranks_are_those_of_wilcoxon_with_failures_beyond_all",
            "test_mcnemar_is_the_binomial_test",
            "test_of_200_studies_none_advises_against_a_handler_that_prevents_collapses",
        ],
        "engine/ablation/test_orders.py": [
            "test_exact_values_are_those_of_the_definition_and_add_up",
            "test_sampled_values_have_an_interval_that_holds_the_exact_ones",
            "test_cumulative_steps_go_both_ways",
        ],
        "engine/ablation/test_paper.py": [
            "test_the_methods_state_what_was_done",
            "test_the_methods_name_failures_margins_and_looks",
            "test_the_page_holds_everything_and_needs_no_other_file",
        ],
        "engine/ablation/test_costs.py": ["test_ratios_and_intervals_are_those_of_the_logarithms"],
    },
    "X3 where two runs part": {
        "engine/ablation/test_divergence.py": [
            "test_averages_and_the_metrics_measured_with_them_part_the_runs",
            "test_runs_that_are_built_alike_never_part",
            "test_clipping_parts_the_gradients_when_they_are_ready",
            "test_an_extra_draw_parts_the_random_states",
            "test_another_seed_parts_the_runs_at_the_start",
        ],
    },
    "H5 compile, channels-last, activation checkpointing, float32 products, determinism": {
        "handlers/test_compile.py": [
            "test_a_short_last_batch_and_an_evaluation_compile_nothing_after_the_first_epoch",
            "test_a_hundred_steps_give_the_same_bits_with_dropout_and_batch_norm",
            "test_inductor_draws_the_same_random_numbers_and_rounds_a_little",
            "test_a_checkpoint_has_no_prefix_and_each_kind_of_run_resumes_the_other",
            "test_nothing_of_it_stays_however_the_run_ends",
            "test_on_two_ranks_the_bits_are_the_same",
            "test_more_sizes_than_graphs_are_one_warning_that_names_them",
        ],
        "engine/models/test_modules.py": [
            "test_names_states_and_weights_are_those_of_the_model_without_wrappers",
        ],
        "handlers/test_channels_last.py": [
            "test_everything_is_channels_last_inside_the_run_and_as_before_after_it",
            "test_batches_are_converted_after_they_are_moved_whatever_was_attached_first",
            "test_a_model_without_convolutions_is_left_as_it_is_with_one_line",
        ],
        "handlers/test_activation_checkpointing.py": [
            "test_a_hundred_steps_give_the_same_bits_also_of_dropout_and_statistics",
            "test_at_most_half_the_bytes_are_kept",
            "test_beside_what_computes_gradients_otherwise_the_bits_are_the_same",
            "test_on_two_ranks_the_bits_are_the_same",
        ],
        "handlers/test_precision32.py": [
            "test_the_setting_holds_inside_the_run_and_nothing_of_it_stays",
            "test_medium_rounds_products_inside_the_run_only",
            "test_the_newer_interface_of_torch_is_refused_with_what_was_set",
        ],
        "handlers/test_deterministic.py": [
            "test_an_operation_without_a_deterministic_algorithm_raises_inside_the_run_and_not_after",
            "test_with_warn_only_it_warns_with_the_event_and_the_receiver",
            "test_new_memory_is_not_filled",
            "test_cuda_that_has_started_without_the_variable_is_refused_with_the_line_for_the_shell",
        ],
        "handlers/test_benchmark.py": ["test_deterministic_beside_it_is_refused_by_name"],
    },
    "H7 other devices, tensor parallel, and what is refused": {
        "engine/authoring/test_devices.py": [
            "test_each_cell_says_tested_or_expected_or_why_it_is_refused",
            "test_every_handler_answers_for_every_device",
            "test_float64_on_mps_is_refused_with_the_name_of_the_tensor",
            "test_what_the_device_lacks_is_refused_before_the_first_batch",
            "test_the_generators_of_mps_and_xpu_are_saved_and_restored",
        ],
        "handlers/test_tensor_parallel_sharded.py": [
            "test_two_by_two_ranks_train_as_a_plain_loop_over_all_batches_whatever_is_attached_first",
            "test_with_what_it_meets_four_ranks_come_to_what_one_process_does",
            "test_the_ranks_of_a_group_draw_alike_and_the_groups_do_not",
            "test_a_checkpoint_moves_to_another_number_of_ranks",
            "test_what_does_not_go_together_is_refused_before_the_first_step",
        ],
        "handlers/test_tensor_parallel.py": [
            "test_two_processes_train_as_one_does_and_end_alike",
            "test_after_200_steps_the_copies_are_bit_equal_and_all_parameters_are_dtensors",
            "test_a_checkpoint_loads_on_any_number_of_ranks_and_the_run_continues_as_uninterrupted",
            "test_what_cannot_be_split_is_refused_on_all_ranks_before_the_first_step",
        ],
        "engine/models/test_modules.py": ["test_stages_and_schedules_of_torchs_pipelines_are_refused_with_the_reason"],
    },
    "C6 export": {
        "engine/weights/test_writing.py": [
            "test_the_same_weights_give_the_same_bytes",
            "test_two_ranks_export_the_bytes_of_one",
            "test_after_any_failure_there_is_the_old_file_or_the_new_one_whole",
            "test_two_averaging_handlers_have_to_be_told_apart",
        ],
        "engine/weights/test_program.py": [
            "test_the_program_gives_what_the_model_gives_bit_for_bit",
            "test_what_cannot_be_exported_is_named_and_the_old_file_stays",
        ],
        "handlers/test_export.py": [
            "test_the_weights_of_the_best_value_are_written_of_equal_ones_the_first",
            "test_averages_are_written_and_two_kinds_are_told_apart_before_the_first_batch",
        ],
        "engine/weights/test_averaging.py": ["test_the_mean_is_that_of_float64_and_counters_are_those_of_the_last"],
    },
    "C7 warm start": {
        "handlers/test_warm_start.py": [
            "test_a_run_begins_with_the_weights_of_a_file_bit_for_bit",
            "test_what_does_not_fit_is_an_error_and_no_weight_has_changed",
            "test_a_file_of_which_nothing_fits_is_always_an_error",
            "test_the_numbers_of_the_report_add_up_to_both_sides",
            "test_a_run_that_resumes_keeps_its_own_weights",
            "test_all_ranks_begin_with_the_weights_or_none",
        ],
    },
    "T14 penalties, distillation, progressive resizing, sequence-length warmup": {
        "handlers/test_penalty.py": [
            "test_weights_losses_and_terms_equal_those_of_a_plain_loop",
            "test_l2_is_the_weight_decay_of_sgd_where_the_products_are_exact",
            "test_the_second_evaluation_of_sam_has_the_term_too",
        ],
        "handlers/test_distillation.py": [
            "test_weights_losses_and_divergences_equal_those_of_a_plain_loop",
            "test_the_teacher_sees_the_mixed_batch",
            "test_no_state_holds_the_teacher_and_another_one_is_reported_on_resume",
        ],
        "handlers/test_progressive_resizing.py": [
            "test_weights_equal_those_of_a_plain_loop",
            "test_evaluations_see_whole_images",
        ],
        "handlers/test_sequence_length_warmup.py": [
            "test_cut_sequences_with_weighted_windows_equal_a_plain_loop",
            "test_split_sequences_keep_every_token_in_its_place_in_more_rows",
        ],
    },
    "X5 searches": {
        "handlers/test_reporting.py": [
            "test_each_value_is_reported_once_and_equals_the_plain_loops",
            "test_a_true_answer_ends_the_run_in_the_usual_way",
            "test_trials_are_bit_equal_to_the_plain_loops_and_prune_as_these_do",
        ],
        "engine/ablation/test_kfold.py": [
            "test_each_sample_is_validated_once_and_each_fold_is_the_plain_training",
        ],
        "engine/ablation/test_pruning.py": [
            "test_the_worst_mean_rank_is_pruned_and_the_evidence_is_stored",
            "test_a_study_that_was_killed_comes_to_the_same_store",
        ],
        "engine/ablation/test_executors.py": [
            "test_jobs_that_are_no_futures_are_asked_until_they_are_done",
        ],
        "test_launchers.py": ["test_trials_of_ray_tune_have_the_values_of_the_engines_also_after_a_kill"],
    },
    "X6 provenance and checksums": {
        "engine/ablation/test_provenance.py": [
            "test_other_arguments_are_other_runs",
            "test_a_docstring_does_not_start_a_study_anew",
            "test_stored_runs_are_made_again_and_are_the_same",
        ],
        "engine/ablation/test_store.py": [
            "test_a_flipped_bit_never_gives_other_numbers",
            "test_two_lines_of_one_run_with_different_numbers_are_an_error_that_names_both",
        ],
        "engine/commands/test_study.py": ["test_a_study_in_one_line_and_its_report"],
    },
    "D2 a first sign of life, a project of one's own, types in editors": {
        "engine/commands/test_demo.py": [
            "test_the_demo_trains_prints_the_wiring_and_shows_what_a_handler_does",
            "test_the_demo_prints_its_first_line_within_ten_seconds_of_work_also_into_a_pipe",
        ],
        "engine/commands/test_new.py": [
            "test_a_project_is_written_under_its_name",
            "test_a_new_project_trains_continues_passes_its_tests_and_its_study",
        ],
        "test_editors.py": ["test_mypy_finds_the_types", "test_pyright_finds_the_types"],
        "test_examples.py": [
            "test_the_main_example_says_what_it_does_before_it_imports_torch",
            "test_the_main_example_shows_progress_within_ten_seconds_of_work",
        ],
    },
    "I1 models that return their loss, batches of any kind": {
        "engine/updates/test_from_model.py": [
            "test_f12_a_model_that_returns_its_loss_trains_as_in_a_plain_loop_on_batches_of_any_kind",
            "test_predictions_and_metrics_find_output_inputs_and_targets",
            "test_mixup_over_mappings_trains_as_over_tuples",
            "test_distillation_passes_the_batch_to_the_teacher_as_to_the_student",
            "test_a_batch_that_is_a_mapping_costs_five_calls_more_than_a_tuple_at_most",
            "test_a_mistake_is_refused_with_the_way_out",
        ],
        "test_interop.py": [
            "test_f12_bert_trains_as_in_a_plain_loop_and_resumes",
            "test_f12_batches_of_other_libraries_train_as_in_a_plain_loop",
        ],
    },
    "I2 several optimizers as one step, and conventions of others": {
        "engine/updates/test_optimizers.py": [
            "test_clipping_schedules_accumulation_average_and_fp16_scaling_equal_a_plain_loop",
            "test_a_run_resumed_at_any_iteration_ends_in_the_same_state",
            "test_a_tied_embedding_is_in_one_group_only_by_its_first_name",
            "test_what_no_rule_matches_and_a_rule_that_matches_nothing_are_errors",
        ],
        "test_conventions.py": [
            "test_f3_a_state_of_a_form_of_its_own_is_saved_and_loaded_as_the_optimizer_gives_it",
            "test_f13_the_length_of_the_run_is_filled_in_by_the_names_of_other_libraries",
            "test_f14_a_scheduler_whose_step_requires_a_metric_is_stepped_with_it",
            "test_f15_optimizers_with_train_and_eval_are_put_in_the_right_mode",
            "test_f18_configurations_are_stored_and_read_back_as_plain_values",
            "test_f23_a_handler_that_computes_gradients_by_itself_trains_as_a_plain_loop",
        ],
        "test_interop.py": [
            "test_f13_schedules_of_hugging_face_and_timm_get_their_totals",
            "test_f15_schedule_free_optimizers_train_evaluate_and_resume",
        ],
        "engine/authoring/test_plugins.py": ["test_a_handler_of_another_package_is_found_listed_and_checked"],
    },
    "I3 exactness for other loops": {
        "engine/exact/test_exact.py": [
            "test_a_plain_loop_that_is_killed_again_and_again_ends_with_the_same_weights",
            "test_it_continues_after_every_batch",
            "test_lists_and_streams_continue_where_they_were",
            "test_a_damaged_version_is_named_and_the_newest_good_one_is_taken",
        ],
        "engine/exact/test_huggingface.py": [
            "test_a_trainer_that_is_killed_at_any_of_36_points_ends_with_the_same_bits",
            "test_what_a_bare_trainer_continues_exactly",
        ],
        "engine/exact/test_lightning.py": [
            "test_a_fit_that_is_killed_at_any_of_36_points_ends_with_the_same_bits",
            "test_a_bare_fit_continues_neither_inside_an_epoch_nor_from_its_end",
        ],
    },
    "I4 neutral suites": {
        "neutral/test_neutral.py": [
            "test_what_torch_and_torchmetrics_have_passes",
            "test_the_optimizers_of_pytorch_optimizer_pass",
            "test_the_schedulers_of_transformers_pass",
            "test_at_least_as_many_checks_of_scikit_learn_pass_as_with_skorch",
        ],
        "test_callbacks_of_others.py": [
            "test_keras_early_stopping_patience",
            "test_keras_checkpoint_every_fifteen_batches_of_five_an_epoch",
            "test_torchtnt_stops_at_the_last_value_and_not_before",
            "test_what_is_different_is_so_for_a_reason",
        ],
        "test_examples.py": ["test_an_exercise_of_the_book_ends_with_its_numbers"],
    },
    "X4 order of attaching, no trace": {
        "test_composition.py": [
            "test_every_order_of_attaching_gives_one_result_kept_files_included",
            "test_any_subset_in_any_order_gives_one_result_and_detaching_leaves_no_trace",
        ],
        "test_invariants.py": [
            "test_a_handler_keeps_its_promises",
            "test_every_shipped_handler_is_checked",
            "test_two_handlers_that_meet_train_together_in_either_order_or_are_refused",
        ],
    },
    "D1 a guide, whose examples run": {
        "test_guide.py": [
            "test_every_page_is_in_the_contents_and_has_been_looked_at_here",
            "test_every_handler_is_in_the_table_by_purpose",
            "test_what_a_page_shows_runs_and_prints_what_it_says",
        ],
        "test_site.py": ["test_the_guide_is_built_without_a_warning_and_has_a_page_for_each_handler_and_code"],
        "test_launchers.py": ["test_the_command_of_the_guide_trains_its_script_on_two_nodes"],
    },
    "D3 pages for those who come from elsewhere": {
        "test_guide.py": [
            "test_each_page_for_those_who_come_from_elsewhere_compares_the_weights_of_both_trainings",
            "test_what_a_page_shows_runs_and_prints_what_it_says",
        ],
        "test_guide_tables.py": [
            "test_every_row_has_an_answer_and_a_reason_where_it_is_no",
            "test_what_a_table_names_of_ours_is_there",
            "test_nothing_of_theirs_is_left_out",
        ],
    },
}


OFF = {"slow", "moderate", "campaign", "neutral"}


@cache
def named_in(file: str) -> dict[str, bool]:
    """The tests of a file, and whether all of a test is left out of the quick tier."""
    return {
        node.name: any(isinstance(mark, ast.Attribute) and mark.attr in OFF for mark in node.decorator_list)
        for node in ast.parse((TESTS / file).read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


@pytest.mark.parametrize("row", ROWS)
def test_the_tests_that_a_row_names_exist_and_one_of_them_is_quick(row: str) -> None:
    for file, names in ROWS[row].items():
        assert set(names) <= named_in(file).keys()
    assert any(not named_in(file)[name] for file, names in ROWS[row].items() for name in names)
