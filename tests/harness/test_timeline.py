from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib import colors
from PIL import Image

from harness.schedule.gpipe import gpipe
from harness.schedule.hops import Hop
from harness.timeline import STYLES, WIDTH_PX, _places, draw
from harness.trace import Span, Trace

ROOT = Path(__file__).resolve().parents[2]


def pixels_of(image: Path, colour: str) -> int:
    """How many pixels have exactly this colour."""
    picture = np.asarray(Image.open(image).convert("RGB"))
    return int((picture == np.round(np.array(colors.to_rgb(colour)) * 255)).all(axis=2).sum())


def pipelined(micro_batches: int, stages: int) -> Trace:
    """Every op of a GPipe schedule takes 10 ms, one after the other in its lane: enough for a picture."""
    hops = [Hop(j, j + 1) for j in range(stages - 1)]
    schedule = gpipe(micro_batches, range(stages), hops, "except_last")
    spans = [
        Span(str(op), lane.device, lane.queue, 0.01 * index, 0.01 * (index + 1))
        for lane in schedule.lanes
        for index, op in enumerate(lane.ops)
    ]
    return Trace(tuple(spans), ((0.0, max(span.end_s for span in spans)),))


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


def test_lanes_of_a_device_stand_together() -> None:
    lanes = [(0, "compute"), (0, "copy in"), (1, "compute"), (1, "copy in"), (5, "host")]
    assert list(_places(lanes).values()) == [0, 30, 30 + 42, 60 + 42, 60 + 42 + 42]


def test_the_last_step_is_drawn_unless_another_is_asked_for(tmp_path: Path) -> None:
    spans = (Span("0F0", 0, "compute", 0.0, 1.0), Span("0B0", 0, "compute", 1.0, 2.0, step=1))
    trace = Trace(spans, ((0.0, 1.0), (1.0, 2.0)))
    last, first, other = tmp_path / "last.png", tmp_path / "first.png", tmp_path / "new" / "only.png"
    draw(trace, last)
    draw(trace, first, step=0)
    draw(trace.only(1), other)
    for path, drawn, left_out in ((last, "B", "F"), (first, "F", "B"), (other, "B", "F")):
        assert pixels_of(path, STYLES[drawn].fill) > 0 == pixels_of(path, STYLES[left_out].fill)


def test_micro_batch_numbers_only_where_there_is_room(tmp_path: Path) -> None:
    """White digits eat into the blue of a wide box; a narrow box has none."""
    wide, bare, narrow = tmp_path / "wide.png", tmp_path / "bare.png", tmp_path / "narrow.png"
    draw(Trace((Span("0F3", 0, "compute", 0.0, 0.5),), ((0.0, 1.0),)), wide)
    draw(Trace((Span("0F", 0, "compute", 0.0, 0.5),), ((0.0, 1.0),)), bare)
    assert 10 < pixels_of(bare, STYLES["F"].fill) - pixels_of(wide, STYLES["F"].fill) < 200
    draw(Trace((Span("0F3", 0, "compute", 0.0, 0.006),), ((0.0, 1.0),)), narrow)
    draw(Trace((Span("0F", 0, "compute", 0.0, 0.006),), ((0.0, 1.0),)), bare)
    assert pixels_of(bare, STYLES["F"].fill) == pixels_of(narrow, STYLES["F"].fill)


def test_eight_devices_with_two_queues_and_64_micro_batches(tmp_path: Path) -> None:
    path = tmp_path / "timeline.png"
    trace = pipelined(64, 8)
    assert len(trace.lanes()) == 16
    draw(trace, path)
    width, height = Image.open(path).size
    assert (width, height < 900) == (1200, True)
    assert pixels_of(path, STYLES["copy"].fill) > 3000


def test_a_trace_without_noted_steps_is_drawn_from_first_to_last_span(tmp_path: Path) -> None:
    draw(Trace((Span("0F0", 3, "host", 7.0, 7.1),)), tmp_path / "timeline.png")
    assert pixels_of(tmp_path / "timeline.png", STYLES["F"].fill) > 20_000


@pytest.mark.parametrize(("trace", "step"), [(Trace(()), None), (pipelined(2, 1), 4)])
def test_a_step_without_spans_is_refused(trace: Trace, step: int | None, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"no spans of step {step or 0}"):
        draw(trace, tmp_path / "timeline.png", step=step)
    assert list(tmp_path.iterdir()) == []


def test_matplotlib_is_imported_by_drawing_only() -> None:
    code = "import sys, harness.timeline; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
