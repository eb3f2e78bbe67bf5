"""Constants are found again by whoever only sees the times that they lead to."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace

import pytest
import torch
from pretend_gpu import SMALL, KnowingClock, captured_once

from trainfit.calibrating import answering, probes
from trainfit.calibrating.answering import answer_all, fastest_products, fastest_stream, read_all
from trainfit.calibrating.calibration_result import Best, with_constants, with_rates
from trainfit.calibrating.instrument import CPU_SIZES, GPU_SIZES, Instrument
from trainfit.calibrating.questions import groups_for
from trainfit.calibrating.solving import PricedProbes, Question, Solved
from trainfit.costs.constants import constants_of
from trainfit.devices.device_table import Device, find_device, this_cpu
from trainfit.devices.efficiency import Constants
from trainfit.timing.rounds import Timing

HIDDEN = Constants(
    in_step_share=0.71,
    simt_share=0.66,
    convolution_share=0.55,
    grouped_convolution_share=0.21,
    narrow_groups_gain=2.2,
    odd_groups_share=0.11,
    depthwise_last_cycles=1.9,
    depthwise_last_tap_cycles=0.13,
    grouped_channels_last_share=0.17,
    unaligned_share=0.45,
    tf32_share=0.9,
    depthwise_cycles=1.3,
    depthwise_tap_cycles=0.2,
    depthwise_float32_waste=90.0,
    rewriting_share=0.5,
    transposed_share=0.37,
    joined_share=0.52,
    attention_share=0.5,
    attention_backward_share=0.3,
    efficient_attention_share=0.7,
    stream_share=0.91,
    reduction_share=0.64,
    strided_share=0.41,
    irregular_share=0.33,
    list_share=0.77,
    cache_gain=2.5,
    kernel_seconds=3.1e-6,
)
"""Of a GPU that only a test knows."""


@pytest.fixture(autouse=True)
def _captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "PricedProbes", captured_once)
    assert torch.backends.cudnn.allow_tf32, "then convolutions in float32 run on tensor cores"


def solve_all(
    instrument: Instrument, rounds_seconds: float = 0.0, count: int | None = None
) -> tuple[Device, dict[str, Solved], tuple[str, ...]]:
    """Measure and solve some groups as a calibration does, without host and steps."""
    groups = groups_for(instrument)[:count]
    readings = read_all(groups, instrument, rounds_seconds, lambda stage: None)
    rates = fastest_products(readings.values()), fastest_stream(readings["memory"])
    answers = answer_all(groups, readings, with_rates(instrument, *rates))
    return with_constants(answers.device, answers.solved), answers.solved, answers.undetermined


@pytest.mark.parametrize("known", [True, False])
def test_hidden_constants_are_found_again(known: bool) -> None:
    """GIVEN a GPU whose every kernel takes what hidden constants say, THEN the calibration finds them.

    How the speed of products is divided between `matmul_share` and `in_step_share` is not theirs to know,
    nor is it for whom the datasheet is not known how it is between peaks and shares: prices decide.
    """
    truth = replace(find_device("h100"), matmul_share=0.8)
    # What a calibration does not ask about is that of the architecture.
    hidden = replace(HIDDEN, tile_fill=constants_of(truth).tile_fill)
    clock = KnowingClock(truth, hidden)
    as_known = truth if known else Device("new", "cuda", 1 << 34, architecture="sm_90", sm_count=132)
    as_known = replace(as_known, cache_bytes=truth.cache_bytes)
    instrument = clock.instrument(as_known, ("fp32", "tf32", "bf16", "fp16"))
    device, solved, missing = solve_all(instrument)
    assert missing == ("plain_convolution_share", "winograd_gain")  # for convolutions without tensor cores
    if known:
        free = {"in_step_share"}
        for name, found in solved.items():
            if name not in free:
                assert found.value == pytest.approx(getattr(hidden, name), rel=1e-3), name
        assert device.matmul_share is not None
        share = device.matmul_share * solved["in_step_share"].value
        assert share == pytest.approx(0.8 * hidden.in_step_share, rel=1e-3)
        assert device.flops["bf16"] == truth.flops["bf16"] and device.flops["fp32"] == truth.flops["fp32"]
        assert device.bandwidth_bytes_per_second == truth.bandwidth_bytes_per_second
    for group in groups_for(instrument):
        made = group.make(instrument.sizes)
        priced = captured_once(made, device)
        for question in group.ask(made):
            for key in question.keys:
                if key[1] == "forward" or next(p for p in made if p.name == key[0]).backward:
                    found_seconds = priced.seconds(key, device, constants_of(device))
                    true_seconds = priced.seconds(key, truth, hidden)
                    # Cycles are counted by the clock that the peak implies, which is not known then.
                    assert found_seconds == pytest.approx(true_seconds, rel=0.01 if known else 0.12), key


def test_outliers_do_not_change_a_median() -> None:
    """Every tenth call takes ten times as long, as when another program interrupts."""
    truth = find_device("a100-40gb")
    clock = KnowingClock(truth, HIDDEN, outliers=0.1)
    _, solved, _ = solve_all(clock.instrument(truth, ("fp32", "bf16"), 2), 0.3, 2)
    assert solved["stream_share"].value == pytest.approx(HIDDEN.stream_share, rel=1e-3)
    assert solved["simt_share"].value == pytest.approx(HIDDEN.simt_share, rel=1e-3)


def test_chips_with_shared_lanes_have_their_own_constant() -> None:
    truth = find_device("rtx-4090")
    hidden = replace(HIDDEN, shared_lanes_share=0.37)
    _, solved, _ = solve_all(KnowingClock(truth, hidden).instrument(truth, ("fp32", "bf16"), 2), 0.0, 2)
    assert solved["shared_lanes_share"].value == pytest.approx(0.37, rel=1e-3)
    assert "simt_share" not in solved


CPU = replace(
    this_cpu(), bandwidth_bytes_per_second=1e10, flops={"fp32": 1e11}, matmul_share=1.0, cache_bytes=None
)


def price_of(
    names: tuple[str, ...], constants: Constants
) -> tuple[PricedProbes, dict[tuple[str, str], Timing]]:
    priced = PricedProbes(probes.memory(SMALL), CPU)
    keys = [(name, "forward") for name in names]
    return priced, {key: Timing(priced.seconds(key, CPU, constants), 0.07) for key in keys}


def test_one_probe_has_the_spread_of_the_clock_and_several_that_between_them() -> None:
    general = Constants()
    priced, timings = price_of(("copy", "add"), replace(general, stream_share=0.5))
    copy, add = ("copy", "forward"), ("add", "forward")
    alone = priced.solve(Question("stream_share", (copy,)), timings, CPU, general)
    assert alone == Solved(pytest.approx(0.5), 0.07)
    # Without the kernel's own time, a copy that takes four times as long has a quarter of the share.
    general = replace(general, kernel_seconds=1e-15)
    priced, timings = price_of(("copy", "add"), replace(general, stream_share=0.5))
    timings[copy] = Timing(4 * timings[copy].seconds, 0.0)
    both = priced.solve(Question("stream_share", (copy, add)), timings, CPU, general)
    assert both is not None and both.spread is not None
    assert both.value == pytest.approx(0.25, rel=1e-3)  # the geometric mean of 0.125 and 0.5
    assert both.spread == pytest.approx(1.0, rel=1e-3)  # one half and twice as much


def test_a_constant_that_prices_do_not_depend_on_is_left_alone() -> None:
    priced, timings = price_of(("copy",), Constants())
    copy = (("copy", "forward"),)
    assert priced.solve(Question("attention_share", copy), timings, CPU, Constants()) is None
    assert priced.solve(Question("stream_share", (("none", "forward"),)), timings, CPU, Constants()) is None
    # Faster than the kernel alone: no share of the bandwidth explains it.
    at_once = {copy[0]: Timing(1e-9, 0.0)}
    assert priced.solve(Question("stream_share", copy), at_once, CPU, Constants()) is None


def test_every_question_is_about_a_constant_and_probes_that_exist() -> None:
    names = {known.name for known in fields(Constants)}
    for instrument in (
        Instrument(find_device("h100"), "meta", None, GPU_SIZES, ("fp32", "tf32", "bf16", "fp16")),  # type: ignore[arg-type]
        Instrument(find_device("rtx-3090"), "meta", None, GPU_SIZES, ("fp32", "bf16")),  # type: ignore[arg-type]
        Instrument(find_device("v100-sxm-16gb"), "meta", None, GPU_SIZES, ("fp32", "fp16")),  # type: ignore[arg-type]
        Instrument(CPU, "cpu", None, CPU_SIZES, ("fp32", "bf16")),  # type: ignore[arg-type]
    ):
        asked: Counter[str] = Counter()
        for group in groups_for(instrument):
            made = group.make(replace(instrument.sizes, cache_bytes=1 << 25))
            all_names = [probe.name for probe in made]
            assert len(set(all_names)) == len(all_names) and not any("." in name for name in all_names)
            for question in group.ask(made):
                asked[question.constant] += 1
                assert question.keys and {name for name, _ in question.keys} <= set(all_names)
        assert set(asked) <= names
        in_turn = {constant for constant, count in asked.items() if count > 1}
        in_pairs = {"depthwise_cycles", "depthwise_last_cycles"}
        assert in_turn == {*in_pairs, *(name.replace("cycles", "tap_cycles") for name in in_pairs)}


# Rates ----------------------------------------------------------------------------------------------------


def rated(device: Device, best: dict[str, float], bandwidth: float) -> Device:
    rates = tuple(best)
    instrument = Instrument(device, "cpu", None, CPU_SIZES, rates)  # type: ignore[arg-type]
    return with_rates(
        instrument, {rate: Best(found, 0.1) for rate, found in best.items()}, Best(bandwidth, 0.2)
    )


def test_a_known_gpu_keeps_its_datasheet_and_gets_shares_of_it() -> None:
    sheet = replace(
        find_device("h100"), flops={"fp32": 60e12, "tf32": 500e12, "bf16": 1000e12, "fp16": 1000e12}
    )
    found = rated(sheet, {"fp32": 50e12, "tf32": 320e12, "bf16": 800e12, "fp16": 720e12}, 3e12)
    assert found.matmul_share == pytest.approx(0.8)
    assert found.flops == pytest.approx({"fp32": 60e12, "tf32": 500e12, "bf16": 1000e12, "fp16": 900e12})
    assert found.bandwidth_bytes_per_second == sheet.bandwidth_bytes_per_second
    assert found.spreads == {"fp32": 0.1, "tf32": 0.1, "bf16": 0.1, "fp16": 0.1, "bandwidth": 0.2}


def test_a_gpu_that_nobody_knows_and_one_whose_datasheet_cannot_be_its_own_have_what_was_measured() -> None:
    best = {"fp32": 50e12, "bf16": 800e12}
    unknown = rated(Device("new", "cuda", 1 << 34), best, 3e12)
    assert (unknown.flops, unknown.matmul_share) == (best, 1.0)
    assert unknown.bandwidth_bytes_per_second == 3e12
    wrong = rated(replace(find_device("h100"), flops={"fp32": 1e12, "bf16": 100e12}), best, 3e12)
    assert (wrong.flops, wrong.matmul_share) == (best, 1.0)
