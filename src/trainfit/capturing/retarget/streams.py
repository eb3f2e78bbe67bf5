"""Streams and events of a GPU that is not there: they order the operators of a capture, and do nothing else.

A stream is a queue of the trace. An event is the moment that a stream had reached when it was recorded; a
stream that waits for it goes on when all of that is done.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch

from trainfit.capturing.own_gpu import own_device, own_number, refuse_second_gpu
from trainfit.capturing.plain_tensors import strided_parts
from trainfit.capturing.queues import QueueMoment
from trainfit.traces.trace import COMPUTE

if TYPE_CHECKING:
    from trainfit.capturing.recorder import Recorder


class Streams:
    """The streams of one capture. The first is that which everything is on that names none."""

    def __init__(self, recorder: Recorder) -> None:
        """Order the operators of `recorder`."""
        self.recorder = recorder
        self._by_name: dict[str, PretendedStream] = {}
        # Classes, because code asks whether something is an instance of `torch.cuda.Stream`.
        self.stream_class = type("Stream", (PretendedStream,), {"_streams": self})
        self.event_class = type("Event", (PretendedEvent,), {"_streams": self})
        self.default: PretendedStream = self.stream_class()
        self.rename(self.default, COMPUTE)

    def rename(self, stream: PretendedStream, name: str) -> None:
        """Name a stream by what it is for; a second one of that name gets a number."""
        self._by_name.pop(stream.name, None)
        numbered = (f"{name} {number}" for number in itertools.count(2))
        stream.name = next(one for one in itertools.chain((name,), numbered) if one not in self._by_name)
        self._by_name[stream.name] = stream

    def current(self, device: Any = None) -> PretendedStream:
        """Return the stream that the program is on."""
        refuse_second_gpu(device)
        return self._by_name[self.recorder.ledger.stream]

    def first(self, device: Any = None) -> PretendedStream:
        """Return the default stream."""
        refuse_second_gpu(device)
        return self.default

    def enter(self, stream: Any) -> None:
        """Be on a stream from now on, as `torch.cuda.set_stream` says."""
        if stream is not None:
            self.recorder.ledger.stream = stream.name

    def on(self, stream: Any) -> StreamBlock:
        """Be on a stream for a while, as `with torch.cuda.stream(...)` says."""
        return StreamBlock(self, stream)


class StreamBlock:
    """A block that runs on a stream; None leaves the program where it is."""

    def __init__(self, streams: Streams, stream: Any) -> None:
        self._streams, self.stream = streams, stream
        self._before: list[str] = []

    def __enter__(self) -> Any:
        self._before.append(self._streams.recorder.ledger.stream)
        self._streams.enter(self.stream)
        return self.stream

    def __exit__(self, *exception: Any) -> None:
        self._streams.recorder.ledger.stream = self._before.pop()


class PretendedStream:
    """A stream of the GPU."""

    _streams: Streams

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        refuse_second_gpu(device)
        self.name = ""
        self._streams.rename(self, "stream")
        self._block = StreamBlock(self._streams, self)
        self.priority = priority
        self.stream_id = self.cuda_stream = 0

    @property
    def device(self) -> torch.device:
        return own_device()

    @property
    def device_index(self) -> int:
        return own_number()

    def moment(self) -> QueueMoment:
        return self._streams.recorder.queues.moment(self.name)

    def wait_event(self, event: PretendedEvent) -> None:
        self._streams.recorder.queues.wait(event.moment, self.name)

    def wait_stream(self, stream: PretendedStream) -> None:
        self._streams.recorder.queues.wait(stream.moment(), self.name)

    def record_event(self, event: PretendedEvent | None = None) -> PretendedEvent:
        event = self._streams.event_class() if event is None else event
        event.moment = self.moment()
        return event

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def __enter__(self) -> Any:
        return self._block.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._block.__exit__(*exception)


class PretendedEvent:
    """An event of the GPU."""

    _streams: Streams

    def __init__(self, *flags: Any, **named: Any) -> None:
        self.moment = QueueMoment()
        self.device = own_device()

    def record(self, stream: PretendedStream | None = None) -> None:
        (stream or self._streams.current()).record_event(self)

    def wait(self, stream: PretendedStream | None = None) -> None:
        (stream or self._streams.current()).wait_event(self)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def elapsed_time(self, other: Any) -> float:
        return 0.0


def record_stream_for(streams: Streams) -> Any:
    """Make `Tensor.record_stream`: the memory is not used again before that stream is done with it."""

    def record_stream(tensor: torch.Tensor, stream: Any) -> None:
        for part in strided_parts(tensor):
            live = streams.recorder.ledger.find(part)
            if live is not None and stream.name not in (live.stream, *live.also_used_on):
                live.also_used_on.append(stream.name)

    return record_stream


def answers_about_streams(streams: Streams) -> dict[str, Any]:
    """Return the functions of `torch.cuda` that are about streams, by name."""
    return {
        "Stream": streams.stream_class,
        "Event": streams.event_class,
        "stream": streams.on,
        "current_stream": streams.current,
        "default_stream": streams.first,
        "set_stream": streams.enter,
    }
