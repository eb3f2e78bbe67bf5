"""What a rank has whole for a while of parameters that are divided: FSDP gathers them, and lets go again."""

from __future__ import annotations

from trainfit.traces.simulate import Timeline


def gathered_bytes(timeline: Timeline) -> int:
    """Return the bytes of gathered parameters that are alive at the peak."""
    trace, peak = timeline.trace, timeline.peak_op
    return sum(
        trace.occupied_at(number, peak)
        for number, storage in enumerate(trace.storages)
        if storage.gathered and storage.alive_at(peak)
    )
