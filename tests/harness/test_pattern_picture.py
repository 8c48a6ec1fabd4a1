from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from harness import pattern_picture
from harness.mesh import Mesh
from harness.op import Op
from harness.pattern import Pattern
from harness.pattern_grid import Box
from harness.pattern_picture import PALETTE, WIDTH_PX, _label, colour, draw, figure, headline
from harness.plan import Plan, Stage
from harness.record import RunRecord
from tests.harness.patterns import TWO, TWO_S, Chain, pattern_of

CHAIN = Chain((0, 1, 0, 2), (3, 4, 2, 3), (6, 8, 4, 6), (0, 1, 2, 1))


def test_boxes_and_labels_are_where_the_pattern_has_them() -> None:
    rows = figure(TWO, TWO_S, [5, 7], [10, 20], 40).axes[0]
    assert [label.get_text() for label in rows.get_yticklabels()] == ["device 0", "device 1"]
    places = {(round(text.get_position()[0], 6), text.get_text()) for text in rows.texts}
    third = 1 / 3
    expected = [(third / 2, "0F0"), (2 * third, "0B1"), (1.5 * third, "1F0"), (2.5 * third + third / 2, "1B0")]
    for at, label in expected:
        assert (round(at, 6), label) in places
    assert (round(third / 2, 6), "1B0") in places  # what goes on from the period before
    assert (round(1 + third / 2, 6), "0F0") in places


def test_memory_is_a_curve_below_its_limit() -> None:
    """Device 0 holds 1 or 2 micro-batches: 0F0 at 0 begins before 0B of the one before has ended, at 3."""
    first, second = figure(TWO, TWO_S, [5, 7], [10, 20], {0: 40, 1: 25}).axes[1:]
    curve, limit = first.get_lines()[:2]
    assert list(zip(*curve.get_data(), strict=True)) == [(0, 20), (1, 20), (2, 20)]
    assert set(limit.get_ydata()) == {40}
    curve, limit = second.get_lines()[:2]
    steps = [(round(float(at), 6), held) for at, held in zip(*curve.get_data(), strict=True)]
    assert steps == [(0, 27), (0.333333, 27), (1.333333, 27), (2, 27)]
    assert [text.get_text() for text in second.texts] == ["limit 25 bytes", "fullest 27 bytes"]


def test_what_is_stored_falls_and_rises() -> None:
    late = Pattern(4, TWO.ops)
    axes = figure(late, TWO_S, [5, 7], [10, 20], 10**9).axes[2]
    steps = [(float(at), held) for at, held in zip(*axes.get_lines()[0].get_data(), strict=True)]
    assert steps == [(0, 20), (0.25, 27), (1, 20), (1.25, 27), (2, 27)]
    assert [text.get_text() for text in axes.texts] == ["limit 1 GB", "fullest 27 bytes"]
    assert axes.get_ylabel() == "device 1\nbytes" and axes.get_ylim()[1] < 40, "the limit is out of sight"


def test_every_stage_has_a_colour_of_its_own_light_forward_and_dark_backward() -> None:
    looks = {colour(Op(j, kind, 0))[0] for j in range(len(PALETTE)) for kind in ("F", "B")}  # type: ignore[arg-type]
    assert len(looks) == 2 * len(PALETTE)
    for j in range(len(PALETTE)):
        forward, backward = (sum(to_rgb(colour(Op(j, kind, 0))[0])) for kind in ("F", "B"))  # type: ignore[arg-type]
        assert forward > backward + 0.5
    assert colour(Op(2, "copy", 0, "", 1)) == colour(Op(2, "F", 0))
    assert colour(Op(1, "copy", 0, "", 2)) == colour(Op(2, "B", 0))


def test_axes_have_the_units_of_small_models_too() -> None:
    """All devices have one scale; a limit that one of them comes near to is in sight."""
    tiny = Pattern(3e-6, tuple(replace(p, start_s=p.start_s * 1e-6) for p in TWO.ops))
    seconds = {name: 1e-6 * took for name, took in TWO_S.items()}
    axes = figure(tiny, seconds, [500, 3000], [1000, 2000], 10**9).axes
    assert axes[-1].get_xlabel() == "us"
    assert [one.get_ylabel() for one in axes[1:]] == ["device 0\nkB", "device 1\nkB"]
    assert axes[1].get_ylim() == axes[2].get_ylim() == (0, 1.15 * 5000)
    near = figure(tiny, seconds, [500, 3000], [1000, 2000], {0: 10**6, 1: 10**4}).axes
    assert [one.get_ylabel() for one in near[1:]] == ["device 0\nMB", "device 1\nkB"]
    assert near[2].get_ylim()[1] > 10**4


def test_stages_that_share_a_colour_have_numbers() -> None:
    """Twelve stages on a device each; where there is little room, boxes have names that are turned, or stages alone."""
    chain = Chain(tuple(range(12)), (1,) * 12, (9,) * 12, (1,) * 12)
    drawn = figure(pattern_of(chain, [0] * 48), chain.durations(), [1] * 12, [0] * 12, 99)
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == ["0, 10", "1, 11", *map(str, range(2, 10))]
    wide = Box(Op(11, "B", 0), 3, 0.0, 1.0)
    assert _label(wide, 40, 36) == ("11B3", False)
    assert _label(wide, 20, 36) == ("11B3", True)
    assert _label(wide, 20, 20) == ("11", False)
    assert _label(wide, 9, 36) == ("", False)
    assert _label(Box(Op(2, "copy", 0, "", 1), 3, 0.0, 1.0), 12, 22) == (">", False)


def test_the_title_tells_of_what_and_how_good_the_plan_is() -> None:
    told = {"period_s": 3.0, "least_s": 2.5}
    plan = Plan(Mesh(pipeline=2), (Stage(0, 1, 0), Stage(2, 3, 1)), 4, pattern=TWO, predicted=told)
    assert headline(plan, "model=net") == "model=net, 2 devices, period 3.00 s, lower bound 2.50 s"
    assert headline(replace(plan, predicted=told | {"least_s": None}), "") == "2 devices, period 3.00 s"


def test_a_run_is_named_in_the_picture_of_its_folder(tmp_path: Path) -> None:
    assert pattern_picture._title(tmp_path / "record.json") == ""
    config = {group: {"name": name} for group, name in (("engine", "gpipe"), ("model", "unet"), ("cluster", "flat"))}
    config |= {"profile": "a/net.json", "mode": "plan"}
    RunRecord("x", "ok", config=config, manifest={"overrides": ["engine=gpipe"]}).save(tmp_path / "record.json")
    assert pattern_picture._title(tmp_path / "record.json") == "engine=gpipe model=net cluster=flat"


def test_the_png_has_the_colours_of_all_stages(tmp_path: Path) -> None:
    from PIL import Image

    path = tmp_path / "pattern.png"
    draw(pattern_of(CHAIN, [0] * 16), CHAIN.durations(), path, [4] * 4, [9] * 3, 30, "a $title$")
    pixels = np.asarray(Image.open(path).convert("RGB"))
    assert pixels.shape[1] == WIDTH_PX
    for j in range(4):
        for kind in ("F", "B"):
            wanted = np.round(np.array(to_rgb(colour(Op(j, kind, 0))[0])) * 255)  # type: ignore[arg-type]
            assert (np.abs(pixels - wanted).max(axis=2) <= 1).sum() > 500


def test_no_text_lies_upon_another_one() -> None:
    drawn = figure(pattern_of(CHAIN, [0] * 16), CHAIN.durations(), [4] * 4, [9] * 3, 12, "planner=madpipe, 3 devices")
    drawn.canvas.draw()
    texts = [text for axes in drawn.axes for text in axes.texts if text.get_text()]
    texts += [*drawn.texts, *drawn.legends[0].get_texts()]
    extents = [text.get_window_extent() for text in texts]
    width = drawn.bbox.width
    assert all(extent.x0 >= 0 and extent.x1 <= width for extent in extents)
    for number, extent in enumerate(extents):
        assert not any(extent.overlaps(other) for other in extents[:number]), texts[number].get_text()


def test_an_op_without_a_duration_is_named(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="1B0"):
        draw(TWO, {"0F0": 1.0, "1F0": 1.0, "0B0": 2.0}, tmp_path / "x.png", [1, 1], [0, 0], 9)
    assert not (tmp_path / "x.png").exists()
