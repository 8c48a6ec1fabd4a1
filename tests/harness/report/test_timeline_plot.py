"""What timelines show, read from the pixels of the pictures and from the places of their texts."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import colors
from PIL import Image

from harness.core.trace import Span, Trace
from harness.report import timeline_layout, timeline_plot
from harness.report.timeline_layout import INNER_PX, LEFT_PX, WIDTH_PX, Box, lay_out
from harness.report.timeline_plot import STYLES, draw, draw_panels
from harness.schedule.builders.gpipe import gpipe
from harness.schedule.transfers import Transfer
from tests.support.quick import within_s

ROOT = Path(__file__).resolve().parents[3]
QUEUES = ("copy in", "copy out", "network", "host")


def equals(image: Path, colour: str) -> np.ndarray:
    """Which pixels (rows, columns) have exactly this colour."""
    picture = np.asarray(Image.open(image).convert("RGB"))
    return (picture == np.round(np.array(colors.to_rgb(colour)) * 255)).all(axis=2)


def pixels_of(image: Path, colour: str) -> int:
    return int(equals(image, colour).sum())


def pipelined(micro_batches: int, stages: int) -> Trace:
    """Every op of a GPipe schedule takes 10 ms, one after the other in its lane: enough for a picture."""
    transfers = [Transfer(j, j + 1) for j in range(stages - 1)]
    schedule = gpipe(micro_batches, range(stages), transfers, "except_last")
    spans = [
        Span(str(op), queue.device, queue.name, 0.01 * index, 0.01 * (index + 1))
        for queue in schedule.queues
        for index, op in enumerate(queue.ops)
    ]
    return Trace(tuple(spans), ((0.0, max(span.end_s for span in spans)),))


def busy(micro_batches: int, devices: int, queues: Sequence[str]) -> Trace:
    """Forward and backward tasks without a gap, and in each other queue a message at the same time as each of them."""
    spans = []
    for device, (number, kind) in itertools.product(range(devices), enumerate("FB")):
        for i in range(micro_batches):
            start = number * micro_batches + i
            spans.append(Span(f"{device}{kind}{i}", device, "compute", start, start + 1))
            spans += [Span(f"{device}copy{i}<{device + 1}", device, queue, start, start + 1.9) for queue in queues]
    return Trace(tuple(spans))


def test_picture_is_1200_pixels_wide_and_shows_every_kind(tmp_path: Path) -> None:
    path = tmp_path / "timeline.png"
    draw(pipelined(4, 2), path, "a title")
    assert Image.open(path).size[0] == WIDTH_PX == 1200
    assert all(pixels_of(path, STYLES[kind].fill) > 300 for kind in ("F", "B", "R", "copy", "step"))
    assert pixels_of(path, STYLES["W"].fill) == pixels_of(path, STYLES["collective"].fill) == 0


def test_area_of_a_box_is_its_share_of_the_step(tmp_path: Path) -> None:
    """One lane: a forward task for a quarter of the step, a backward task for half of it."""
    path = tmp_path / "timeline.png"
    spans = (Span("0F", 0, "compute", 5.0, 5.25), Span("0B", 0, "compute", 5.5, 6.0))
    draw(Trace(spans, ((5.0, 6.0),)), path)
    forward, backward = pixels_of(path, STYLES["F"].fill), pixels_of(path, STYLES["B"].fill)
    assert backward / forward == pytest.approx(2, rel=0.03)


def test_panels_share_one_axis_from_the_beginning_of_each_step(tmp_path: Path) -> None:
    """On other clocks, one step twice as long as the other: the shorter one's box is half as wide, both begin at 0."""
    path = tmp_path / "panels.png"
    long = Trace((Span("0F", 0, "compute", 100.0, 102.0),), ((100.0, 102.0),))
    short = Trace((Span("0B", 0, "compute", -7.0, -6.0),), ((-7.0, -6.0),))
    draw_panels([("measured", long), ("simulated", short)], path)
    for kind, width_px in (("F", INNER_PX), ("B", INNER_PX / 2)):
        columns = np.flatnonzero(equals(path, STYLES[kind].fill)[:, LEFT_PX:].sum(axis=0) > 10)
        assert columns[0] <= 1
        assert len(columns) == pytest.approx(width_px, abs=3)
    below = np.flatnonzero(equals(path, STYLES["B"].fill)[:, LEFT_PX:].any(axis=1))[0]
    assert below > np.flatnonzero(equals(path, STYLES["F"].fill)[:, LEFT_PX:].any(axis=1))[-1]


def test_queues_stand_in_their_order_below_compute() -> None:
    trace = Trace(
        tuple(Span(f"{d}copy0<9", d, queue, 0.0, 1.0) for d in (5, 0) for queue in (*QUEUES[::-1], "compute"))
    )
    lanes = lay_out("", trace, 0.0).lanes
    assert [(lane.device, lane.queue) for lane in lanes] == [(d, q) for d in (0, 5) for q in ("compute", *QUEUES)]
    gaps = [below.top_px - above.bottom_px for above, below in itertools.pairwise(lanes)]
    assert min(gaps) >= 0
    assert gaps.index(max(gaps)) == 4


def test_facts_are_step_time_mean_utilization_and_spans() -> None:
    spans = (Span("0F0", 0, "compute", 1.0, 1.5), Span("1F0", 1, "compute", 1.0, 2.0))
    panel = lay_out("a title", Trace(spans, ((1.0, 2.0),)), 0.0)
    assert [line.split("     ") for line in panel.lines] == [
        ["a title"],
        ["step 1,000 ms", "mean utilization 75 %", "2 spans"],
    ]
    assert [lane.utilization for lane in panel.lanes] == [0.5, 1.0]


def test_boxes_of_several_stages_on_a_device_have_the_stage_above_the_micro_batch() -> None:
    ops = ("0F0", "3F0", "3B12", "3copy0<2", "0step")
    for known, text, named in ((ops, ["0\n0", "3\n0", "3\n12", "0", ""], True), (ops[1:4], ["0", "12", "0"], False)):
        spans = tuple(Span(op, 0, "compute", number, number + 1) for number, op in enumerate(known))
        panel = lay_out("t", Trace(spans), 0)
        assert [box.text for lane in panel.lanes for row in lane.rows for box in row] == text
        assert ("stage above micro-batch" in panel.lines[-1]) == named


def test_only_16_devices_have_lanes_and_the_rest_is_reported() -> None:
    panel = lay_out("", busy(2, 20, ()), 0.0)
    assert [lane.device for lane in panel.lanes] == list(range(16))
    assert panel.lines[-1].endswith("80 spans     the first 16 of 20 devices")
    assert "devices" not in lay_out("", busy(2, 16, ()), 0.0).lines[-1]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8))))
def test_concurrent_messages_lie_in_as_few_rows_as_possible(times: list[tuple[int, int]]) -> None:
    boxes = [Box("send", "", float(start), float(start + length), "1send0<0") for start, length in sorted(times)]
    rows = timeline_layout._rows(boxes) if boxes else []
    assert sorted(map(id, itertools.chain(*rows))) == sorted(map(id, boxes))
    for row in rows:
        assert all(one.end_ms <= following.start_ms for one, following in itertools.pairwise(row))
    long = [box for box in boxes if box.end_ms > box.start_ms]
    most = max((sum(box.start_ms <= t < box.end_ms for box in long) for t in range(40)), default=0)
    assert len(rows) <= most + 1 if len(long) < len(boxes) else len(rows) == most


def test_queues_are_lower_than_compute_and_rows_thinner_where_there_are_many() -> None:
    spans = [Span("0F0", 0, "compute", 0.0, 1.0), Span("0copy0<1", 0, "copy in", 0.0, 1.0)]
    heights = {1: (30, 18, 18), 2: (30, 18, 18), 8: (30, 18, 9), 30: (30, 18, 3)}
    for concurrent, expected in heights.items():
        network = [Span(f"0send{i}<1", 0, "network", 0.0, 1.0) for i in range(concurrent)]
        lanes = lay_out("", Trace((*spans, *network)), 0.0).lanes
        assert tuple(lane.row_px for lane in lanes) == expected


def test_concurrent_messages_do_not_hide_each_other(tmp_path: Path) -> None:
    """Thirty messages at once, the whole step long: thirty strips, so that nearly all of the lane is theirs."""
    path = tmp_path / "network.png"
    spans = tuple(Span(f"0send{i}<1", 0, "network", 0.0, 1.0) for i in range(30))
    draw(Trace(spans), path)
    (lane,) = lay_out("", Trace(spans), 0.0).lanes
    rows = equals(path, "white")[:, LEFT_PX + 5 : LEFT_PX + INNER_PX - 5].mean(axis=1)
    assert (len(lane.rows), lane.row_px) == (30, 3)
    assert pixels_of(path, STYLES["send"].fill) > 0.3 * INNER_PX * lane.row_px * 30
    assert (rows < 1).sum() >= 90


def test_the_last_step_is_drawn_unless_another_is_asked_for(tmp_path: Path) -> None:
    spans = (Span("0F0", 0, "compute", 0.0, 1.0), Span("0B0", 0, "compute", 1.0, 2.0, step=1))
    trace = Trace(spans, ((0.0, 1.0), (1.0, 2.0)))
    last, first, other, panels = (
        tmp_path / "last.png",
        tmp_path / "first.png",
        tmp_path / "new" / "1.png",
        tmp_path / "2",
    )
    draw(trace, last)
    draw(trace, first, step=0)
    draw(trace.only(1), other)
    draw_panels([("", trace)], panels)
    for path, drawn, left_out in ((last, "B", "F"), (first, "F", "B"), (other, "B", "F"), (panels, "B", "F")):
        assert pixels_of(path, STYLES[drawn].fill) > 20_000
        assert pixels_of(path, STYLES[left_out].fill) == 0


def test_micro_batch_numbers_only_where_there_is_room(tmp_path: Path) -> None:
    """White digits eat into the blue of a wide box; a narrow box has none."""
    wide, bare, narrow = tmp_path / "wide.png", tmp_path / "bare.png", tmp_path / "narrow.png"
    draw(Trace((Span("0F3", 0, "compute", 0.0, 0.5),), ((0.0, 1.0),)), wide)
    draw(Trace((Span("0F", 0, "compute", 0.0, 0.5),), ((0.0, 1.0),)), bare)
    assert 10 < pixels_of(bare, STYLES["F"].fill) - pixels_of(wide, STYLES["F"].fill) < 200
    draw(Trace((Span("0F3", 0, "compute", 0.0, 0.006),), ((0.0, 1.0),)), narrow)
    draw(Trace((Span("0F", 0, "compute", 0.0, 0.006),), ((0.0, 1.0),)), bare)
    assert pixels_of(bare, STYLES["F"].fill) == pixels_of(narrow, STYLES["F"].fill)


def test_an_op_without_duration_is_seen_at_the_very_end_too(tmp_path: Path) -> None:
    path = tmp_path / "timeline.png"
    draw(Trace((Span("0F", 0, "compute", 0.0, 1.0), Span("0step", 0, "compute", 1.0, 1.0)), ((0.0, 1.0),)), path)
    column = np.asarray(Image.open(path).convert("RGB"))[:, LEFT_PX + INNER_PX - 1]
    assert (column.max(axis=1) < 120).sum() > 15


@pytest.mark.usefixtures("computation")
def test_a_lane_of_very_many_ops_mixes_their_colours_by_their_share(tmp_path: Path) -> None:
    """Per millisecond half forward, a quarter backward, a quarter idle: one colour from end to end."""
    path = tmp_path / "dense.png"
    spans = [Span(f"0F{i}", 0, "compute", 4 * i, 4 * i + 2) for i in range(20 * INNER_PX)]
    spans += [Span(f"0B{i}", 0, "compute", 4 * i + 2, 4 * i + 3) for i in range(20 * INNER_PX)]
    draw(Trace(tuple(spans), ((0.0, 80.0 * INNER_PX),)), path)
    parts = [np.array(colors.to_rgb(colour)) for colour in (STYLES["F"].fill, STYLES["B"].fill, timeline_plot._GROUND)]
    expected = 255 * (0.5 * parts[0] + 0.25 * parts[1] + 0.25 * parts[2])
    picture = np.asarray(Image.open(path).convert("RGB"))[:, LEFT_PX + 5 : LEFT_PX + INNER_PX - 5]
    mixed = (np.abs(picture - expected) < 2).all(axis=2)
    assert mixed.all(axis=1).sum() >= 24
    assert lay_out("", Trace(tuple(spans)), 0.0).lines[-1].endswith("colours mix where boxes are narrower than a pixel")


@pytest.mark.usefixtures("computation")
@pytest.mark.parametrize(("devices", "micro_batches"), [(2, 8), (4, 8), (8, 8), (8, 32), (40, 2)])
def test_texts_neither_overlap_nor_leave_the_picture(devices: int, micro_batches: int) -> None:
    title = " ".join(f"engine.some_key_{i}=some_$value_{i}" for i in range(9))
    every_kind = [
        Span(f"0{kind}", 0, "compute", 2 * micro_batches + i, 2 * micro_batches + i)
        for i, kind in enumerate(kind for kind in STYLES if kind != "I")
    ]
    trace = Trace((*busy(micro_batches, devices, ("copy in", "network")).spans, *every_kind))
    figure = timeline_plot.figure([("engine=gpipe model=unet, measured", trace), (title, trace)])
    figure.canvas.draw()
    (axes,) = figure.axes
    ticks = [tick for tick in axes.get_xticklabels() if tick.get_position()[0] <= axes.get_xlim()[1]]
    texts = [*axes.texts, *axes.get_legend().get_texts(), axes.xaxis.label, *ticks]
    extents = np.array([text.get_window_extent().extents for text in texts if text.get_text()])
    assert len(extents) > 2 * 5 * min(devices, 16)
    left, bottom, right, top = extents.T
    assert min(left.min(), bottom.min()) >= 0
    assert right.max() <= WIDTH_PX
    assert top.max() <= figure.bbox.height
    overlaps = (left[:, None] < right) & (left < right[:, None]) & (bottom[:, None] < top) & (bottom < top[:, None])
    assert overlaps.sum() == len(extents)


@pytest.mark.usefixtures("at_length")
@pytest.mark.usefixtures("computation")
def test_a_hundred_thousand_ops_are_drawn_in_seconds(tmp_path: Path) -> None:
    trace = busy(1024, 16, ("network", "copy in"))
    assert len(trace.spans) > 98_000
    within_s(3, lambda: draw(trace, tmp_path / "large.png"))


def test_a_trace_without_noted_steps_is_drawn_from_first_to_last_span(tmp_path: Path) -> None:
    draw(Trace((Span("0F0", 3, "compute", 7.0, 7.1),)), tmp_path / "timeline.png")
    assert pixels_of(tmp_path / "timeline.png", STYLES["F"].fill) > 20_000


@pytest.mark.parametrize(("trace", "step"), [(Trace(()), None), (pipelined(2, 1), 4)])
def test_a_step_without_spans_is_refused(trace: Trace, step: int | None, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"no spans of step {step or 0}"):
        draw(trace, tmp_path / "timeline.png", step=step)
    assert list(tmp_path.iterdir()) == []


def test_panels_that_cannot_be_drawn_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one trace"):
        draw_panels([], tmp_path / "none.png")
    with pytest.raises(ValueError, match="a title: the trace has no spans"):
        draw_panels([("a title", Trace(()))], tmp_path / "none.png")
    with pytest.raises(ValueError, match=r"100 traces make a picture [0-9]+ pixels high, 30000 at most"):
        draw_panels([("", busy(1, 16, ()))] * 100, tmp_path / "none.png")
    assert list(tmp_path.iterdir()) == []


def test_matplotlib_is_imported_by_drawing_only() -> None:
    code = "import sys, harness.report.timeline_plot; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
