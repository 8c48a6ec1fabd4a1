"""The picture of the race, read from its axes."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from analysis.bench import race_plot
from analysis.plots import style

ROWS = [
    {"model": "A", "entry": "single", "step": 2.0, "quartiles": [1.0, 4.0], "speed / single": 1.0},
    {"model": "A", "entry": "gpipe", "step": 1.0, "quartiles": [0.8, 1.25], "speed / single": 2.0},
    {"model": "A", "entry": "other", "failed": "failed in round 1: it ended with exit code 1"},
    {"model": "B", "entry": "single", "step": 2.0, "quartiles": [2.0, 2.0], "speed / single": 1.0},
    {"model": "B", "entry": "other", "step": 4.0, "quartiles": [4.0, 4.0], "speed / single": 0.5},
    {"model": "B", "entry": "gpipe", "note": "mesh.pipeline 2 is more than 1"},
    {"model": "B", "entry": "never", "note": "refused"},
    {"model": "C", "entry": "gpipe", "step": 4.0, "quartiles": [4.0, 4.0]},
]
"""The third model has no speeds: its `single` failed."""


def test_a_panel_for_each_model_and_a_bar_for_each_that_finished() -> None:
    panels = race_plot.figure(ROWS).axes
    assert [axes.get_title() for axes in panels] == ["A", "B"]
    names = [text.get_text() for text in panels[0].get_yticklabels()]
    assert names == ["other", "single", "gpipe"], "the fastest above, those without a speed below"
    assert [text.get_text() for text in panels[1].get_yticklabels()] == ["gpipe", "other", "single"]
    for axes, speeds, written in (
        (panels[0], {1: 1.0, 2: 2.0}, ["failed", "1.00", "2.00"]),
        (panels[1], {1: 0.5, 2: 1.0}, ["refused", "0.50", "1.00"]),
    ):
        bars = {round(bar.get_y() + bar.get_height() / 2): bar.get_width() for bar in axes.patches}
        assert bars == speeds
        assert [text.get_text() for text in axes.texts] == written
        assert [text.get_position()[1] for text in axes.texts] == [0, 1, 2]
    assert all(axes.get_xlim()[1] > 2.0 for axes in panels)


def test_black_lines_are_the_quartiles_as_speeds() -> None:
    lines = race_plot.figure(ROWS).axes[0].get_lines()
    assert [list(line.get_xdata()) for line in lines] == [[0.5, 2.0], [1.6, 2.5], [1.0, 1.0]]
    assert [list(line.get_ydata()) for line in lines[:2]] == [[1, 1], [2, 2]]


def test_colours_distinguish_ours_from_one_device_and_from_other_libraries() -> None:
    first, second = race_plot.figure(ROWS).axes
    colours = [tuple(bar.get_facecolor()) for bar in (*first.patches, *second.patches)]
    assert colours[0] == colours[3]
    assert len(set(colours)) == 3


def test_titles_have_machine_and_batch() -> None:
    machine = {"cores_allowed": 4, "cpu": "Some CPU"}
    rows = [row | {"batch": 16, "micro-batch": 2, "peak memory": 2**20} for row in ROWS]
    drawn = race_plot.figure(rows, {"gpus": [], "machine": machine})
    assert "4 cores (Some CPU)" in " ".join(drawn.get_suptitle().split())
    assert drawn.axes[0].get_title() == "A\nbatch 16, micro-batches of 2"
    assert [text.get_text() for text in drawn.axes[0].texts] == ["failed", "1.00   1.0 MiB", "2.00   1.0 MiB"]
    assert "2 GPUs (H100)" in race_plot.figure(rows, {"gpus": [{"name": "H100"}]}).get_suptitle()


def test_it_is_written_as_a_png(tmp_path: Path) -> None:
    drawn = race_plot.figure(ROWS)
    assert drawn
    style.write(drawn, tmp_path / "race.png")
    with Image.open(tmp_path / "race.png") as image:
        assert image.format == "PNG"
        assert image.width == 920


def test_nothing_is_drawn_of_rows_without_a_speed() -> None:
    assert race_plot.figure(ROWS[-1:]) is None


def test_the_headline_holds_gpipe_against_the_fastest_other_pipeline() -> None:
    rows = [
        {"model": "A", "entry": name, "speed / single": speed}
        for name, speed in (("gpipe", 1.5), ("torchgpipe", 1.0), ("deepspeed, pipeline", 1.2), ("ddp", 9.0))
    ]
    assert race_plot.headline(rows) == [
        {
            "figure": "1.25 x",
            "text": "gpipe's speed on A / that of deepspeed, pipeline, the fastest pipeline of a library",
        }
    ]
    assert race_plot.headline(rows[:1]) == []
