"""The state that steers regions: who watches what, and that nothing is left behind."""

from __future__ import annotations

import threading

import torch

from trainfit.applying.execution import Execution


def test_a_reader_hears_of_its_own_region_and_not_of_what_is_computed_again_in_it() -> None:
    execution, heard = Execution(), list[torch.Tensor]()
    with execution.forward(heard.append):
        assert execution.on_value_read == heard.append
        with execution.recomputation():
            assert (execution.regions, execution.level) == (2, 1)
            assert execution.on_value_read is None
        assert execution.on_value_read == heard.append
    assert execution.on_value_read is None


def test_a_region_that_failed_may_end_after_one_that_began_later() -> None:
    # GIVEN a region that failed, whose traceback is still there
    execution = Execution()
    failed = execution.forward(lambda tensor: None)
    failed.__enter__()
    # WHEN an older one is recomputed, and the traceback is freed meanwhile
    with execution.recomputation():
        failed.__exit__(None, None, None)
        assert (execution.regions, execution.level) == (1, 1)
    # THEN nothing is left behind
    assert (execution.regions, execution.level, execution.on_value_read) == (0, 0, None)


def test_threads_do_not_see_each_other() -> None:
    execution, seen = Execution(), list[int]()
    with execution.forward():
        other = threading.Thread(target=lambda: seen.append(execution.regions))
        other.start()
        other.join()
    assert seen == [0]
