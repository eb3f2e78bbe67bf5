"""The cheapest way to have every needed value in backward, for one price per byte: a minimum cut.

A group of ops makes values (storages). Of each value it is decided whether backward needs it, and of each
group whether it is recomputed. A needed value of a group that is not recomputed is kept, which costs its
bytes times the price. Recomputing a group costs its seconds, and what it reads becomes needed. The cheapest
decision is the smaller side of a minimum cut (`maximum_flow.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from trainfit.basics.maximum_flow import UNLIMITED, FlowNetwork
from trainfit.planning.groups import Group
from trainfit.plans.plan import InputPlace


@dataclass(frozen=True)
class Choice:
    """Which groups are kept, recomputed or copied to the host; the others are none of that."""

    kept: frozenset[int]
    repeated: frozenset[int]
    bytes: int
    """What is kept on the device."""
    seconds: float
    """What the step takes longer: recomputation, and copies as far as they do not overlap with anything."""
    offloaded: frozenset[int] = frozenset()
    host_inputs: tuple[InputPlace, ...] = ()
    """Inputs of the region that are copied to the host (`region_inputs.py`)."""

    @property
    def copies(self) -> bool:
        """Whether anything is copied to the host."""
        return bool(self.offloaded or self.host_inputs)

    @property
    def restored(self) -> frozenset[int]:
        """The groups whose results are there in backward without running again."""
        return self.kept | self.offloaded


def cheapest(groups: Sequence[Group], seconds_per_byte: float) -> Choice | None:
    """Return the choice with the least `seconds + bytes * price`; None if some value cannot be had at all."""
    first_value = list(accumulate((len(group.sizes) for group in groups), initial=len(groups)))
    source, sink = first_value[-1], first_value[-1] + 1
    network = FlowNetwork(first_value[-1] + 2, _ROUNDING)
    for repeated, group in enumerate(groups):
        network.connect(repeated, sink, group.seconds if group.repeatable else UNLIMITED)
        for place, (size, saved) in enumerate(zip(group.sizes, group.saved)):
            value = first_value[repeated] + place
            if saved:
                network.connect(source, value, UNLIMITED)
            network.connect(value, repeated, size * seconds_per_byte if group.keepable else UNLIMITED)
        for maker, place in group.reads:
            network.connect(repeated, first_value[maker] + place, UNLIMITED)
    network.fill(source, sink)
    if network.sent == UNLIMITED:
        return None
    reached = network.reached_from(source)
    return choice_of(groups, frozenset(n for n in range(len(groups)) if reached[n]))


def choice_of(
    groups: Sequence[Group], repeated: frozenset[int], offloaded: frozenset[int] = frozenset()
) -> Choice:
    """Return the choice that computes some groups again, has some on the host, and keeps what else is needed.

    What is offloaded and not needed is left out; the seconds are those of recomputation.
    """
    needed = {
        (n, place) for n, group in enumerate(groups) for place, saved in enumerate(group.saved) if saved
    }
    needed = needed.union(*(groups[n].reads for n in repeated))
    restored = {(n, place) for n, place in needed if n not in repeated}
    kept = {(n, place) for n, place in restored if n not in offloaded}
    return Choice(
        frozenset(n for n, _ in kept),
        repeated,
        bytes=sum(groups[n].sizes[place] for n, place in kept),
        seconds=sum(groups[n].seconds for n in repeated),
        offloaded=frozenset(n for n, _ in restored) & offloaded,
    )


_ROUNDING = 1e-15
"""Seconds: less than this is rounding."""
