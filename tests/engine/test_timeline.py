"""The timeline keeps the spans it promised, and writes traces that viewers can read."""

import json
import random
from pathlib import Path

import pytest
from seeds import seeds

from neo_desktop.engine.execute.timeline import Span, Stage, Timeline, busy_ns, busy_shares, overlap_ns

STAGE = Stage("linear", 3, 1, 17)


def span(lane: str, start_ns: int, end_ns: int) -> Span:
    return Span(lane, STAGE, 0, start_ns, end_ns)


def test_the_trace_has_a_named_track_per_lane_and_all_figures(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "trace.json")
    timeline.add("device", STAGE, 5_000_000, 7_500_000)
    timeline.add("cpu", Stage("CPU attention", 3, 0, 4), 6_000_000, 7_000_000)
    timeline.end_iteration()
    timeline.add("device", Stage("sample", 4, -1, 2), 8_000_000, 8_000_500)
    timeline.end_iteration()
    timeline.close()

    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["otherData"]["dropped_spans"] == 0
    assert trace["otherData"]["iterations"] == 2
    events = trace["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(tracks.values()) == ["device", "cpu"]
    linear, attention, sample = (e for e in events if e["ph"] == "X")
    assert tracks[linear["tid"]] == tracks[sample["tid"]] == "device"
    assert tracks[attention["tid"]] == "cpu"
    assert linear["name"] == "linear 1"
    assert linear["args"] == {"iteration": 0, "layer": 3, "sub_batch": 1, "tokens": 17}
    assert (linear["dur"], attention["dur"], sample["dur"]) == (2500.0, 1000.0, 0.5)
    assert attention["ts"] - linear["ts"] == pytest.approx(1000.0)
    assert (sample["name"], sample["args"]["iteration"]) == ("sample", 1)


def test_only_the_newest_spans_are_kept_and_the_trace_says_so(tmp_path: Path) -> None:
    timeline = Timeline(max_spans=10)
    for iteration in range(4):
        for number in range(4):
            timeline.add("device", STAGE, 10 * iteration + number, 10 * iteration + number + 1)
        timeline.end_iteration()
    assert [s.start_ns for s in timeline.spans] == [12, 13, 20, 21, 22, 23, 30, 31, 32, 33]
    timeline.write_chrome_trace(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"]["dropped_spans"] == 6


def test_a_trace_is_there_from_the_start_and_survives_a_failed_iteration(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    timeline = Timeline(path)
    assert not [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    timeline.add("device", STAGE, 1, 2)
    timeline.end_iteration(completed=False)
    timeline.add("device", STAGE, 3, 4)  # an interrupt ends the next iteration
    timeline.close()
    assert len([e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]


def test_a_path_that_cannot_be_written_is_known_at_once(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        Timeline(tmp_path / "nowhere" / "trace.json")


@pytest.mark.parametrize("seed", seeds(2, 4))
def test_busy_time_and_overlap_count_each_nanosecond_once(seed: int) -> None:
    rng = random.Random(seed)
    spans, busy = [], {"a": set(), "b": set()}
    for _ in range(rng.randint(0, 12)):
        lane, start = rng.choice("ab"), rng.randrange(50)
        end = start + rng.randrange(12)
        spans.append(span(lane, start, end))
        busy[lane] |= set(range(start, end))
    assert busy_ns(spans, "a") == len(busy["a"])
    assert overlap_ns(spans, "a", "b") == overlap_ns(spans, "b", "a") == len(busy["a"] & busy["b"])
    shares = busy_shares(spans)
    if spans:
        period = max(max(s.end_ns for s in spans) - min(s.start_ns for s in spans), 1)
        assert shares == {lane: len(busy[lane]) / period for lane in dict.fromkeys(s.lane for s in spans)}
    else:
        assert shares == {}
