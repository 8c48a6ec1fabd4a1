from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from harness.core.pattern import Pattern
from harness.core.plan import Mesh, Plan, Stage
from harness.core.record import RunRecord
from harness.report import pattern_plot, pattern_text
from harness.report.pattern_plot import draw, figure, headline, label, trace
from harness.report.pattern_text import SHOWN
from harness.report.timeline_layout import WIDTH_PX
from harness.report.timeline_plot import STYLES
from harness.schedule.pattern_validity import Replay
from tests.support.patterns import TWO, TWO_S, Chain, pattern_of

CHAIN = Chain((0, 1, 0, 2), (3, 4, 2, 3), (6, 8, 4, 6), (0, 1, 2, 1))


def test_boxes_and_labels_are_where_the_pattern_has_them() -> None:
    timeline = figure(TWO, TWO_S, [5, 7], [10, 20], 40).axes[0]
    places = {(round(text.get_position()[0]), text.get_text()) for text in timeline.texts}
    for at_ms, name in [(500, "0F0"), (2000, "0B1"), (1500, "1F0"), (2500, "1B0")]:
        shown = {(at_ms, name), (at_ms + 3000, name)} if name != "1B0" else {(500, name), (3000, name), (5500, name)}
        assert shown <= places, "1B goes over the end of a period, and on from the one before"


def test_devices_have_their_utilization_in_the_steady_state() -> None:
    """Of 3 s device 0 is busy for 1 + 2 s; in a period of 4 s that is 75 %."""
    late = Pattern(4, TWO.ops)
    for pattern, percent in ((TWO, "100 %"), (late, "75 %")):
        texts = [text.get_text() for text in figure(pattern, TWO_S, [5, 7], [10, 20], 40).axes[0].texts]
        assert texts.count(percent) == 2 and {"device 0", "device 1"} <= {*texts}


def test_the_timeline_has_all_messages_and_ends_with_the_last_period() -> None:
    replay = Replay(pattern_of(CHAIN, [0] * 16), CHAIN.durations(), SHOWN)
    spans = trace(replay).spans
    assert all(0 <= span.start_s < span.end_s <= SHOWN * replay.pattern.period_s for span in spans)
    messages = {label(span.parsed) for span in spans if span.queue == "network"}
    assert messages == {"0>1", "1>2", "2>3", "3>2", "2>1", "1>0"}


def test_memory_is_a_curve_below_its_limit() -> None:
    """Device 0 holds 1 or 2 micro-batches: 0F0 at 0 begins before 0B of the one before has ended, at 3."""
    first, second = figure(TWO, TWO_S, [5, 7], [10, 20], {0: 40, 1: 25}).axes[1:]
    curve, limit = first.get_lines()[:2]
    assert list(zip(*curve.get_data(), strict=True)) == [(0, 20), (3000, 20), (6000, 20)]
    assert set(limit.get_ydata()) == {40}
    curve, limit = second.get_lines()[:2]
    steps = [(round(float(at_ms), 6), held) for at_ms, held in zip(*curve.get_data(), strict=True)]
    assert steps == [(0, 27), (1000, 27), (4000, 27), (6000, 27)]
    assert [text.get_text() for text in second.texts] == ["limit 25 B", "max 27 B"]


def test_what_is_stored_falls_and_rises() -> None:
    late = Pattern(4, TWO.ops)
    axes = figure(late, TWO_S, [5, 7], [10, 20], 10**9).axes[2]
    steps = [(float(at_ms), held) for at_ms, held in zip(*axes.get_lines()[0].get_data(), strict=True)]
    assert steps == [(0, 20), (1000, 27), (4000, 20), (5000, 27), (8000, 27)]
    assert [text.get_text() for text in axes.texts] == ["limit 1 GB", "max 27 B"]
    assert axes.get_ylabel() == "device 1\nB" and axes.get_ylim()[1] < 40, "the limit is out of sight"


def test_axes_are_right_for_small_models_too() -> None:
    """All devices have one scale; a limit that one of them comes near to is in sight."""
    tiny = Pattern(3e-6, tuple(replace(p, start_s=p.start_s * 1e-6) for p in TWO.ops))
    seconds = {name: 1e-6 * took for name, took in TWO_S.items()}
    axes = figure(tiny, seconds, [500, 3000], [1000, 2000], 10**9).axes
    assert [one.get_xlabel() for one in axes] == ["", "", "time (ms)"] and axes[-1].get_xlim() == pytest.approx(
        (0, 0.006)
    )
    assert [one.get_ylabel() for one in axes[1:]] == ["device 0\nkB", "device 1\nkB"]
    assert axes[1].get_ylim() == axes[2].get_ylim() == (0, 1.15 * 5000)
    near = figure(tiny, seconds, [500, 3000], [1000, 2000], {0: 10**6, 1: 10**4}).axes
    assert [one.get_ylabel() for one in near[1:]] == ["device 0\nMB", "device 1\nkB"]
    assert near[2].get_ylim()[1] > 10**4


def test_the_title_reports_the_plan_and_its_lower_bound() -> None:
    reported = {"period_s": 3.0, "least_s": 2.5}
    plan = Plan(Mesh(pipeline=2), (Stage(0, 1, 0), Stage(2, 3, 1)), 4, pattern=TWO, predicted=reported)
    assert headline(plan, "model=net") == "model=net, 2 devices, period 3.00 s, lower bound 2.50 s"
    assert headline(replace(plan, predicted=reported | {"least_s": None}), "") == "2 devices, period 3.00 s"


def test_a_run_is_named_in_the_picture_of_its_folder(tmp_path: Path) -> None:
    assert pattern_plot._title(tmp_path / "record.json") == ""
    config = {group: {"name": name} for group, name in (("engine", "gpipe"), ("model", "unet"), ("cluster", "flat"))}
    config |= {"profile": "a/net.json", "mode": "plan"}
    RunRecord("x", "ok", config=config, manifest={"overrides": ["engine=gpipe"]}).save(tmp_path / "record.json")
    assert pattern_plot._title(tmp_path / "record.json") == "engine=gpipe model=net cluster=flat"


@pytest.mark.usefixtures("computation")
def test_the_png_has_boxes_of_both_passes_and_messages(tmp_path: Path) -> None:
    from PIL import Image

    path = tmp_path / "pattern.png"
    draw(pattern_of(CHAIN, [0] * 16), CHAIN.durations(), path, [4] * 4, [9] * 3, 30, "a $title$")
    pixels = np.asarray(Image.open(path).convert("RGB"))
    assert pixels.shape[1] == WIDTH_PX
    for kind in ("F", "B", "copy"):
        wanted = np.round(np.array(to_rgb(STYLES[kind].fill)) * 255)
        assert (np.abs(pixels - wanted).max(axis=2) <= 1).sum() > 500


def test_no_text_overlaps_another_one() -> None:
    drawn = figure(pattern_of(CHAIN, [0] * 16), CHAIN.durations(), [4] * 4, [9] * 3, 12, "planner=madpipe, 3 devices")
    drawn.canvas.draw()
    texts = [text for axes in drawn.axes for text in axes.texts if text.get_text()]
    texts += [*drawn.texts, *drawn.axes[0].get_legend().get_texts(), *drawn.legends[0].get_texts()]
    assert {pattern_text.LEGEND, "memory of micro-batches"} <= {text.get_text() for text in texts}
    extents = [text.get_window_extent() for text in texts]
    width = drawn.bbox.width
    assert all(extent.x0 >= 0 and extent.x1 <= width for extent in extents)
    for number, extent in enumerate(extents):
        assert not any(extent.overlaps(other) for other in extents[:number]), texts[number].get_text()


def test_an_op_without_a_duration_is_named(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="1B0"):
        draw(TWO, {"0F0": 1.0, "1F0": 1.0, "0B0": 2.0}, tmp_path / "x.png", [1, 1], [0, 0], 9)
    assert not (tmp_path / "x.png").exists()
