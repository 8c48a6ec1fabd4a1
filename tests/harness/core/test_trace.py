from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.core.trace import Span, Trace

#             0    1    2    3    4    5    6
# 0 compute   [0F0      ][0F1 ]     [0B0    ]
# 0 copy in        [0copy0<1]
# 1 compute             [1F0 ][1copy0<0]
SPANS = (
    Span("0F0", 0, "compute", 0, 2),
    Span("0F1", 0, "compute", 2, 3),
    Span("0B0", 0, "compute", 4, 6),
    Span("0copy0<1", 0, "copy in", 1, 3),
    Span("1F0", 1, "compute", 2, 3),
    Span("1copy0<0", 1, "compute", 3, 5),
)
TRACE = Trace(SPANS, ((0.0, 8.0),))


def test_lanes_are_in_order_of_device_compute_first_and_start() -> None:
    shuffled = Trace(SPANS[::-1], TRACE.steps)
    assert list(shuffled.queues()) == [(0, "compute"), (0, "copy in"), (1, "compute")]
    assert [span.op for span in shuffled.queues()[0, "compute"]] == ["0F0", "0F1", "0B0"]
    assert shuffled.queues(step=1) == {}


def test_utilization_counts_tasks_on_the_compute_queue_and_no_copies() -> None:
    assert [TRACE.busy_s(device) for device in (0, 1, 2)] == [5, 1, 0]
    assert TRACE.utilization([0, 1, 2]) == [5 / 8, 1 / 8, 0]


def test_window_is_that_of_the_steps_or_else_of_the_spans() -> None:
    assert TRACE.window_s == 8
    assert Trace(SPANS, ((0.0, 8.0), (9.0, 10.0))).window_s == 9
    assert Trace(SPANS[2:]).window_s == 5
    assert (Trace(()).window_s, Trace(()).utilization([0])) == (0, [0])


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20))))
def test_overlapping_tasks_are_not_counted_twice(intervals: list[tuple[int, int]]) -> None:
    ends = [(min(pair), max(pair)) for pair in intervals]
    seconds = {second for start, end in ends for second in range(start, end)}
    trace = Trace(tuple(Span(f"0F{i}", 0, "compute", start, end) for i, (start, end) in enumerate(ends)))
    assert trace.busy_s(0) == len(seconds)


def test_in_flight_is_between_the_begin_of_forward_and_the_end_of_backward() -> None:
    spans = [
        Span("0F0", 0, "compute", 0.0, 1.0), Span("0F1", 0, "compute", 1.0, 2.0), Span("0B0", 0, "compute", 4.0, 6.0),
        Span("0F2", 0, "compute", 5.9999999, 7.0), Span("0B1", 0, "compute", 7.0, 8.0),
        Span("0B2", 0, "compute", 8.0, 9.0),
        Span("1F0", 1, "compute", 1.0, 2.0), Span("1B0", 1, "compute", 2.0, 4.0), Span("1copy0<0", 1, "copy in", 1, 1),
    ]  # fmt: skip
    trace = Trace(tuple(spans))
    assert [trace.in_flight(device) for device in (0, 1, 2)] == [2, 1, 0], "0B0 ends when 0F2 begins, but for rounding"


def test_one_step_alone_is_a_trace_of_its_own() -> None:
    second = Span("0F0", 0, "compute", 8, 9, step=1)
    alone = Trace((*SPANS, second), ((0.0, 8.0), (8.0, 10.0))).only(1)
    assert alone == Trace((Span("0F0", 0, "compute", 8, 9, step=0),), ((8.0, 10.0),))
    assert alone.only(0) == alone
    assert alone.utilization([0]) == [0.5]


times = st.floats(0, 1e5)
spans = st.builds(
    Span,
    op=st.sampled_from(["0F0", "1B2", "3copy0<0:up", "1step"]),
    device=st.integers(0, 9),
    queue=st.sampled_from(["compute", "copy in", "host"]),
    start_s=times,
    end_s=times,
    step=st.integers(0, 3),
)


@given(st.lists(spans, max_size=20), st.lists(st.tuples(times, times), max_size=4))
def test_file_round_trip(
    tmp_path_factory: pytest.TempPathFactory, found: list[Span], steps: list[tuple[float, float]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "trace.json.gz"
    trace = Trace(tuple(found), tuple(steps))
    trace.save(path)
    read = Trace.load(path)

    def key(span: Span) -> tuple[object, ...]:
        return (span.op, span.device, span.queue, span.step, round(span.start_s, 6), round(span.end_s, 6))

    assert sorted(map(key, read.spans)) == sorted(map(key, found))
    assert [end for _, end in read.steps] == pytest.approx([end for _, end in steps], abs=1e-9)
    assert [start for start, _ in read.steps] == pytest.approx([start for start, _ in steps], abs=1e-9)


def test_file_is_what_perfetto_reads(tmp_path: Path) -> None:
    """Microseconds; a named process for each device; process numbers are unsigned and 0 is taken by the kernel."""
    TRACE.save(tmp_path / "trace.json.gz")
    events = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {1: "device 0", 2: "device 1", 3: "steps"}
    queues = {e["tid"]: (e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    assert queues == {1: (1, "compute"), 2: (1, "copy in"), 3: (2, "compute")}
    timed = {e["name"]: e for e in events if e["ph"] == "X"}
    copy, step = timed["0copy0<1"], timed["step 0"]
    assert (copy["pid"], copy["tid"], copy["ts"], copy["dur"]) == (1, 2, 1e6, 2e6)
    assert (step["pid"], step["tid"], step["ts"], step["dur"]) == (3, 4, 0, 8e6)
    assert len(timed) == len(SPANS) + 1


def test_same_trace_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        TRACE.save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
