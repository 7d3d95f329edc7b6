"""Streams and events by their rules, with a logical clock each: which work is over when other work begins.

Work on one stream runs in order. Work on two streams is ordered by an event alone that one records and the other waits
for; the host knows that work is over when it has waited for it. A tensor may be read after it is written, and written
again after it is read. When it is freed, the next tensor of the stream that it belongs to may take its memory: after
all uses, those on other streams included, but for streams that `record_stream` has told the allocator of (Lamport's
clocks, as in `torch.cuda._sanitizer`, which knows nothing of freed memory).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

HOST = "host"
DEFAULT = "default stream"

Clock = dict[str, int]
"""By stream, how much of its work is known to be over."""


@dataclass
class Block:
    """The memory of a tensor: where it belongs, and by which work it was last written and since then read."""

    owner: str
    write: tuple[str, int] | None = None
    reads: Clock = field(default_factory=dict)
    recorded: set[str] = field(default_factory=set)
    earlier: Clock = field(default_factory=dict)  # the uses of tensors that had this memory before, perhaps


class Timeline:
    """The clocks of all streams and of the host; `races` are the sentences on what is not ordered."""

    def __init__(self) -> None:
        self.clocks: dict[str, Clock] = {HOST: {}, DEFAULT: {}}
        self.current = DEFAULT
        self.races: dict[str, int] = {}
        self.num_streams = 0
        self._pools: dict[str, Clock] = {}  # by stream, the uses of the memory that was freed
        self.num_ordered = 0  # accesses to memory last used by another stream, which were in order

    def new_stream(self) -> str:
        self.num_streams += 1
        name = f"stream {self.num_streams}"
        self.clocks[name] = {}
        return name

    def new_block(self) -> Block:
        """Return memory of the current stream."""
        return Block(self.current, earlier=dict(self._pools.get(self.current, {})))

    def work(self, operation: str, *, reads: list[Block], writes: list[Block], stream: str | None = None) -> None:
        """Queue work on a stream, the current one by default: it begins after all that the host knows to be over."""
        stream = stream or self.current
        clock = self.clocks[stream]
        if stream != HOST:
            _merge(clock, self.clocks[HOST])
        for block in reads:
            self._require(block.write, stream, f"{operation} reads what is not yet written")
        for block in writes:
            self._require(block.write, stream, f"{operation} writes what is not yet written")
            for use in block.reads.items():
                self._require(use, stream, f"{operation} writes what is still read")
            for use in block.earlier.items():
                self._require(use, stream, f"{operation} takes memory that is still in use")
        clock[stream] = now = clock.get(stream, 0) + 1
        for block in reads:
            block.reads[stream] = now
        for block in writes:
            block.write, block.reads, block.earlier = (stream, now), {}, {}

    def free(self, block: Block) -> None:
        """Give the memory back to its stream's pool: the allocator knows of the streams that were recorded alone."""
        uses = dict(block.reads)
        if block.write is not None:
            _merge(uses, dict([block.write]))
        kept = {stream: time for stream, time in uses.items() if stream not in block.recorded | {HOST}}
        if block.owner != HOST:
            _merge(self._pools.setdefault(block.owner, {}), kept)

    def wait(self, stream: str, other: Mapping[str, int]) -> None:
        """Have the work that is queued from now on wait for all that is over at that time of another clock."""
        _merge(self.clocks[stream], other)

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def _require(self, use: tuple[str, int] | None, stream: str, problem: str) -> None:
        if use is None or use[0] == stream:
            return
        if self.clocks[stream].get(use[0], 0) < use[1]:
            sentence = f"{problem}: {stream} does not wait for {use[0]}"
            self.races[sentence] = self.races.get(sentence, 0) + 1
        else:
            self.num_ordered += 1


def _merge(clock: Clock, other: Mapping[str, int]) -> None:
    for stream, time in other.items():
        clock[stream] = max(time, clock.get(stream, 0))


class FakeEvent:
    """`torch.cuda.Event` and `torch.Event` on a timeline."""

    timeline: Timeline

    def __init__(self, *_: Any, **__: Any) -> None:
        self._clock: Clock = {}

    def record(self, stream: Any = None) -> None:
        self._clock = dict(self.timeline.clocks[_name(stream, self.timeline)])

    def wait(self, stream: Any = None) -> None:
        self.timeline.wait(_name(stream, self.timeline), self._clock)

    def query(self) -> bool:
        self.synchronize()
        return True

    def synchronize(self) -> None:
        self.timeline.wait(HOST, self._clock)

    def elapsed_time(self, other: "FakeEvent") -> float:
        return 1.0


class FakeStream:
    """`torch.cuda.Stream` on a timeline; as a context, the current stream."""

    timeline: Timeline
    event: type[FakeEvent]
    stream_id = device_index = 0

    def __init__(self, *_: Any, name: str | None = None, **__: Any) -> None:
        self.name = name or self.timeline.new_stream()
        self._contexts: list[Any] = []

    def wait_stream(self, other: Any) -> None:
        self.timeline.wait(self.name, self.timeline.clocks[other.name])

    def wait_event(self, event: FakeEvent) -> None:
        event.wait(self)

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = event or self.event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.timeline.wait(HOST, self.timeline.clocks[self.name])

    def query(self) -> bool:
        self.synchronize()
        return True

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> "FakeStream":
        self._contexts.append(self.timeline.on(self.name))
        self._contexts[-1].__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._contexts.pop().__exit__(*error)


def _name(stream: Any, timeline: Timeline) -> str:
    return timeline.current if stream is None else stream.name
