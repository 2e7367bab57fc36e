"""Timeline of lanes: recorded spans, for Chrome's trace viewer and for measurements."""

import json
import os
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

NO_SUB_BATCH = -1
MAX_SPANS = 200_000  # some 50 MB of memory and as much of JSON


class Stage(NamedTuple):
    """A piece of work of one lane."""

    name: str
    layer: int
    sub_batch: int  # or NO_SUB_BATCH
    tokens: int  # rows, or tokens of the blocks that are copied

    @property
    def words(self) -> str:
        """Description for messages."""
        where = "" if self.sub_batch == NO_SUB_BATCH else f" of sub-batch {self.sub_batch}"
        return f"{self.name!r} in layer {self.layer}{where}"


class Span(NamedTuple):
    """The time that a lane spent on a stage, on the clock of `time.perf_counter_ns`."""

    lane: str
    stage: Stage
    iteration: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class TimedEvents:
    """A span on a CUDA stream, with times still to be read."""

    lane: str
    stage: Stage
    start: torch.cuda.Event
    end: torch.cuda.Event


def timed_event(*, in_graph: bool = False) -> torch.cuda.Event:
    """Make a CUDA event with a time; in a captured graph, each launch updates the time."""
    return torch.cuda.Event(enable_timing=True, external=in_graph)  # type: ignore[no-untyped-call]


class Timeline:
    """A recorder of spans that keeps the newest `max_spans`.

    Recording costs one list append. Any thread may call `add`; only the thread that runs the iterations may
    call the other methods.

    Args:
        path: Target of the trace, which `close` writes. The constructor writes an empty trace, so that a path
            without write access fails early.
        max_spans: Number of spans to keep.
        is_continuous: True: record every iteration. False: record only iterations requested by `record_next`,
            and capture CUDA graphs without events, so that their iterations have only CPU spans.

    Raises:
        OSError: `path` cannot be written.
    """

    def __init__(
        self, path: str | Path | None = None, max_spans: int = MAX_SPANS, *, is_continuous: bool = True
    ) -> None:
        self.is_continuous = is_continuous
        self.is_recording = is_continuous  # state of the current iteration
        self.last: tuple[Span, ...] = ()  # spans of the newest completed and recorded iteration
        self._is_next_wanted = False
        self._path = None if path is None else Path(path)
        self._spans: deque[Span] = deque(maxlen=max_spans)
        self._num_recorded = 0
        self._new: list[tuple[str, Stage, int, int]] = []  # spans of this iteration
        self._new_events: list[TimedEvents] = []
        self._iteration = 0
        self._origin_ns = time.perf_counter_ns()
        self._anchor: tuple[torch.cuda.Event, int] | None = None
        if self._path is not None:
            self.write_chrome_trace(self._path)

    @property
    def spans(self) -> list[Span]:
        """The spans of ended iterations, ordered by start within an iteration."""
        return list(self._spans)

    def take(self) -> list[Span]:
        """Return and clear the spans."""
        taken = self.spans
        self._spans.clear()
        self._num_recorded = 0
        return taken

    @property
    def is_recording_next(self) -> bool:
        """True if the current iteration is recorded, or the next one will be."""
        return self.is_recording or self._is_next_wanted

    def record_next(self) -> None:
        """Record the next iteration, even if the timeline is not continuous."""
        self._is_next_wanted = True

    def begin_iteration(self, device: torch.device) -> None:
        """Start an iteration; a CUDA device must be idle."""
        self.is_recording = self.is_continuous or self._is_next_wanted
        self._is_next_wanted = False
        if self.is_recording and device.type == "cuda":
            # The idle device reaches this event now, which relates its clock to the CPU's.
            event = timed_event()
            event.record()
            self._anchor = event, time.perf_counter_ns()

    def add(self, lane: str, stage: Stage, start_ns: int, end_ns: int) -> None:
        """Record a span of the running iteration."""
        self._new.append((lane, stage, start_ns, end_ns))

    def add_events(self, lane: str, stage: Stage, start: torch.cuda.Event, end: torch.cuda.Event) -> None:
        """Record a span between two timed CUDA events; their times are read when the iteration ends."""
        self._new_events.append(TimedEvents(lane, stage, start, end))

    def end_iteration(self, completed: bool = True) -> None:
        """Store the iteration's spans after all its work has ended; a failed iteration has no event times."""
        new, events = self._new, self._new_events
        self._new, self._new_events = [], []
        if completed and self._anchor is not None:
            anchor, anchor_ns = self._anchor
            for pair in events:
                start_ns = anchor_ns + round(anchor.elapsed_time(pair.start) * 1e6)
                end_ns = anchor_ns + round(anchor.elapsed_time(pair.end) * 1e6)
                new.append((pair.lane, pair.stage, start_ns, end_ns))
        new.sort(key=lambda span: span[2])
        spans = tuple(
            Span(lane, stage, self._iteration, start_ns, end_ns) for lane, stage, start_ns, end_ns in new
        )
        self._spans.extend(spans)
        self._num_recorded += len(spans)
        self._iteration += 1
        if self.is_recording and completed:
            self.last = spans

    def write_chrome_trace(self, path: str | Path) -> None:
        """Write all spans in Chrome's trace-event format (chrome://tracing, ui.perfetto.dev).

        Times are microseconds since the timeline's creation. The file is replaced atomically.

        Raises:
            OSError: The file cannot be written.
        """
        spans = self.spans
        tracks = {lane: number for number, lane in enumerate(dict.fromkeys(span.lane for span in spans))}
        events: list[dict[str, object]] = [
            {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "neo-desktop"}}
        ]
        for lane, number in tracks.items():
            track = {"ph": "M", "pid": 1, "tid": number}
            events.append(track | {"name": "thread_name", "args": {"name": lane}})
            events.append(track | {"name": "thread_sort_index", "args": {"sort_index": number}})
        for span in spans:
            stage = span.stage
            events.append(
                {
                    "ph": "X",
                    "name": stage.name if stage.sub_batch < 0 else f"{stage.name} {stage.sub_batch}",
                    "cat": span.lane,
                    "pid": 1,
                    "tid": tracks[span.lane],
                    "ts": (span.start_ns - self._origin_ns) / 1000,
                    "dur": (span.end_ns - span.start_ns) / 1000,
                    "args": {
                        "iteration": span.iteration,
                        "layer": stage.layer,
                        "sub_batch": stage.sub_batch,
                        "tokens": stage.tokens,
                    },
                }
            )
        trace = {
            "displayTimeUnit": "ms",
            "otherData": {
                "iterations": self._iteration,
                "dropped_spans": self._num_recorded - len(spans),
                "note": "dropped_spans counts the oldest spans, dropped in favour of newer ones",
            },
            "traceEvents": events,
        }
        path = Path(path)
        partial = path.with_name(f"{path.name}.partial")
        partial.write_text(json.dumps(trace))
        os.replace(partial, path)

    def close(self) -> None:
        """Write the trace, if a path was given."""
        if self._path is not None:
            self.write_chrome_trace(self._path)


def busy_ns(spans: Iterable[Span], *lanes: str) -> int:
    """Return the nanoseconds in which any of these lanes was busy."""
    total_ns = until_ns = 0
    for start_ns, end_ns in sorted((span.start_ns, span.end_ns) for span in spans if span.lane in lanes):
        total_ns += max(end_ns - max(start_ns, until_ns), 0)
        until_ns = max(end_ns, until_ns)
    return total_ns


def busy_shares(spans: Iterable[Span]) -> dict[str, float]:
    """Return `lane -> busy share of the time` between the first start and the last end."""
    spans = list(spans)
    if not spans:
        return {}
    period_ns = max(span.end_ns for span in spans) - min(span.start_ns for span in spans)
    lanes = dict.fromkeys(span.lane for span in spans)
    return {lane: busy_ns(spans, lane) / max(period_ns, 1) for lane in lanes}


def overlap_ns(spans: Iterable[Span], first: str, second: str) -> int:
    """Return the nanoseconds in which both lanes were busy."""
    spans = list(spans)
    return busy_ns(spans, first) + busy_ns(spans, second) - busy_ns(spans, first, second)
