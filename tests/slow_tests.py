"""Tests that take ten seconds or more and have quicker ones beside them: run with `scripts/test --slow`.

Continuous integration has two cores and half an hour. Of every kind something stays: one case of a list, one
command of a page, one real run. Times are those of a run of everything.
"""

from __future__ import annotations

import zlib

_LINE = "test_doc_lines.py::test_a_line_of_the_documentation_runs[trainfit "
SLOW = (
    "autoplanning/test_planned_trainer.py::test_losses_and_weights_are_the_same[adafactor]",
    "autoplanning/test_planned_trainer.py::test_losses_and_weights_are_the_same[own loss]",
    "autoplanning/test_planned_trainer.py::test_losses_and_weights_are_the_same[smoothing]",
    "autoplanning/test_planned_trainer.py::test_losses_and_weights_are_the_same[workers]",
    "applying/test_memory.py::test_computing_everything_again_lowers_the_peak",
    "applying/test_memory.py::test_keeping_everything_needs_no_more_than_one_region_on_top",
    "calibrating/test_calibrate.py::test_a_processor_is_calibrated_and_its_file_is_used",
    "calibrating/test_calibrate.py::test_a_step_that_does_not_fit_runs_with_half_its_batch",
    "capturing/test_clusters.py::test_objects_of_another_rank_are_what_it_sends",
    "capturing/test_steps.py::test_a_result_that_names_the_run",
    "clusters/test_compiled_ranks.py::",
    "clusters/test_divided_models.py::test_transformers_models_are_divided_by_their_own_plan[cp]",
    "clusters/test_divided_models.py::test_transformers_models_are_divided_by_their_own_plan[dp-tp]",
    "clusters/test_divided_models.py::test_transformers_models_are_divided_by_their_own_plan[pp-cp]",
    "clusters/test_divided_models.py::test_transformers_models_are_divided_by_their_own_plan[pp-dp]",
    "clusters/test_divided_models.py::test_transformers_models_are_divided_by_their_own_plan[pp]",
    "clusters/test_exchanged_counts.py::test_counts_that_are_exchanged_are_those_of_real_ranks[asynchronous]",
    "clusters/test_exchanged_counts.py::test_counts_that_are_exchanged_are_those_of_real_ranks[functional]",
    "clusters/test_exchanged_counts.py::test_counts_that_are_exchanged_are_those_of_real_ranks[with sizes]",
    "clusters/test_verified_meshes.py::",
    "fitting/test_fit.py::test_nothing_fits_is_exit_code_3",
    "ordering/test_best_order.py::test_two_hundred_thousand_nodes",
    "planning/test_replay.py::test_passes_that_accumulate_gradients_share_their_decisions",
    "planning/test_which_model.py::test_a_teacher_larger_than_the_student",
    "renting/test_compare.py::test_a_shared_capture_is_what_each_device_would_have_had[llama-tiny-bf16-mesh1]",
    "renting/test_compare.py::test_a_shared_capture_is_what_each_device_would_have_had[resnet-tiny-fp32-mesh2]",
    "renting/test_compare.py::test_a_step_that_asks_what_it_runs_on_is_captured_for_each",
    "scenarios/test_scenarios.py::test_on_the_cpu_the_predicted_peak_is_the_measured_one[accelerate_loop]",
    "sizing/test_max_size.py::test_a_plan_makes_a_larger_batch_fit",
    "sizing/test_max_size.py::test_a_step_that_takes_another_course_with_every_size",
    "sizing/test_max_size.py::test_plans_of_a_list",
    "sizing/test_max_size.py::test_sizes_that_a_step_refuses",
    "sizing/test_max_size.py::test_the_longest_sequence_is_that_of_the_model_or_of_the_memory",
    "sweeping/test_sweep.py::test_a_second_run_continues_and_a_changed_step_begins_anew",
    "sweeping/test_sweep.py::test_a_worker_that_is_killed_from_outside_loses_nothing",
    "sweeping/test_sweep.py::test_figures_are_those_of_estimate_and_plan",
    "test_advice_holds.py::test_what_is_said_of_half_a_batch_and_of_bf16_is_what_captures_have[gpt2-8]",
    f"{_LINE}estimate gpt2-tiny --batch 8,16,max",
    f"{_LINE}estimate llama-3-8b --device h100 --mesh",
    f"{_LINE}estimate llama-3-8b --mesh",
    f"{_LINE}fit",
    f"{_LINE}frontier gpt2 --batch 8",
    f"{_LINE}max-batch gpt2-tiny --device t4 --budget",
    f"{_LINE}sweep grid.toml",
    f"{_LINE}verify examples",
    f"{_LINE}verify gpt2-tiny --plan",
    f"{_LINE}verify gpt2-tiny --report",
    f"{_LINE}verify train.py",
    "verification/test_ranks.py::test_a_rank_that_fails_ends_all_with_one_message",
    "verification/test_ranks.py::test_every_rank_is_compared_with_the_plan_on_its_own_step",
    "verification/test_ranks.py::test_ranks_with_different_numbers_of_batches_that_join",
    "verification/test_ranks.py::test_regions_with_collectives_run_again_on_all_ranks",
)
"""How their names begin, below the folder of the tests."""
ONE_OF = {
    "capturing/test_raising_pipelines.py::": 4,
    "capturing/test_sharded_steps.py::": 2,
    "clusters/test_divided_models.py::": 2,
    "clusters/test_planned_ranks.py::": 2,
    "clusters/test_rules_on_gpus.py::": 4,
    "compat/test_sac_ilp.py::": 3,
    "scenarios/test_scenarios.py::": 3,
    "test_models.py::": 2,
}
"""Of these with parameters, one in so many cases stays: always the same ones, chosen by their names."""


def is_slow(nodeid: str) -> bool:
    """Whether a test is one of them."""
    name = nodeid.removeprefix("tests/")
    if name.startswith(SLOW):
        return True
    shares = [share for start, share in ONE_OF.items() if name.startswith(start) and "[" in name]
    return any(zlib.crc32(name.encode()) % share for share in shares)
