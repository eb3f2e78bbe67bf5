"""What is said to dominate a peak: layers that are alike, or the operators of what no layer has; by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from trace_text import trace

from trainfit.traces.simulate import simulate
from trainfit.traces.trace import Trace
from trainfit.webpage.page_answers import dominates
from trainfit.webpage.peak_places import LargestPart, largest_part, numbered

LAYERS = """
    x              :  10 held
    a = one(x)     : 300 saved @Net.blocks.0
    b = two(a)     : 300 saved @Net.blocks.1
    c = loss(b)    : {own} saved @Net
    -- backward
    d = back(c)    :   1 for c @Net
    e = back(b)    :   1 for b @Net.blocks.1
    f = back(a)    :   1 for a @Net.blocks.0
"""


def with_classes(text: str, classes: dict[str, str]) -> Trace:
    """Return a trace whose modules are of these classes, by the last part of their names."""
    found = trace(text)
    last = [module.name.rpartition(".")[2] for module in found.modules]
    modules = (replace(m, class_name=classes.get(n, n)) for m, n in zip(found.modules, last))
    return replace(found, modules=tuple(modules))


def test_layers_alike_are_one_place() -> None:
    """Each block has less than the model itself; both together have more."""
    found = largest_part(simulate(with_classes(LAYERS.format(own=400), {"0": "Block", "1": "Block"})))
    assert found == LargestPart("activation", 1000, "Net.blocks.0-1", 600, 2)


def test_numbered_modules_of_other_classes_are_not_alike() -> None:
    found = largest_part(simulate(with_classes(LAYERS.format(own=4), {"0": "Linear", "1": "Norm"})))
    assert found == LargestPart("activation", 604, "Net.blocks", 600, 1)


def test_what_the_model_has_itself_is_named_by_its_operators() -> None:
    timeline = simulate(trace(LAYERS.format(own=900)))
    found = largest_part(timeline)
    assert found == LargestPart("activation", 1500, "Net", 900, 0, ("loss",))
    said = dominates(found, timeline.peak_bytes)
    assert said.endswith("; loss made 900 B of that in Net, outside of its layers.")


def test_a_module_inside_is_named_rather_than_what_is_around_it() -> None:
    """The encoder has nearly all, and its first layer most of that; what is below half of it is not named."""
    text = """
    x              :  10 held
    a = one(x)     : 500 saved @Net.encoder.first
    b = two(a)     : 100 saved @Net.encoder.second
    c = two(b)     :  50 saved @Net.decoder
    y = two(c)     :   4 output @Net
    -- backward
    e = back(c)    :   1 for c @Net.decoder
    f = back(b)    :   1 for b @Net.encoder.second
    g = back(a)    :   1 for a @Net.encoder.first
    """
    found = largest_part(simulate(trace(text)))
    assert found is not None
    assert (found.place, found.place_bytes, found.modules) == ("Net.encoder.first", 500, 1)
    even = largest_part(simulate(trace(text.replace("500", "105").replace(" 50 ", " 99 "))))
    assert even is not None and (even.place, even.place_bytes) == ("Net.encoder.first", 105)


def test_what_is_outside_of_modules_has_operators_or_nothing() -> None:
    text = """
    s              : 900 held optimizer_state
    a = one(s)     :  40 saved @Net
    -- backward
    b = back(a)    :   1 for a @Net
    """
    state = largest_part(simulate(trace(text)))
    assert state == LargestPart("optimizer_state", 900, "", 900, 0, ())
    assert dominates(state, 941).endswith("(96%, predicted).")
    made = largest_part(simulate(trace("x : 1 held\na = foreach(x) : 500\nb = sum(a) : 4 output")))
    assert made is not None and (made.place, made.operators) == ("", ("foreach",))


@pytest.mark.parametrize(
    ("numbers", "name"), [([3], "b.3.c"), ([0, 1, 2], "b.0-2.c"), ([0, 2, 3], "b.{0, 2-3}.c")]
)
def test_numbers_are_written_as_ranges(numbers: list[int], name: str) -> None:
    assert numbered("b.", numbers, ".c") == name
