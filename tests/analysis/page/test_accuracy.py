"""The accuracy of predictions, as the report page shows it."""

from __future__ import annotations

import pytest

from analysis import scheme_comparison
from analysis.bench import results
from analysis.page import accuracy

ROWS = [
    {"entry": "1 micro-batches, never", "step": 0.5, "quartiles": [0.4, 0.6], "predicted": 0.45,
     "predicted / measured": 0.9, "memory, device 0": 1.0, "memory, device 1": 0.95},
    {"entry": "median absolute error", "error of time": 0.1, "error of memory": 0.025},
]  # fmt: skip


def test_the_table_has_simulated_and_measured_of_each_run() -> None:
    table = accuracy.table(ROWS)
    assert table
    assert table.rows == (
        ("1 micro-batches, never", "500.0 ms", "400.0 ms - 600.0 ms", "450.0 ms", "0.90", "1.00", "0.95"),
    )
    found = accuracy.headline(ROWS)
    assert found and found["figure"] == "10.0 %" and ": 1 runs" in found["text"]


def test_without_the_benchmark_and_without_records_there_is_nothing() -> None:
    assert accuracy.table([]) is accuracy.headline([]) is accuracy.figure(accuracy.ratios([])) is None


def test_the_committed_benchmark_is_shown() -> None:
    rows = results.load()["prediction"]["rows"]
    table = accuracy.table(rows)
    assert table and len(table.rows) == len(rows) - 1


def test_ratios_are_those_of_the_newest_measured_records() -> None:
    loaded = scheme_comparison.load("measured").records
    found = accuracy.ratios([*loaded, *scheme_comparison.load("simulated").records])
    ran = [one for one in loaded if one.status == "ok"]
    assert found == accuracy.ratios(loaded) == accuracy.ratios([*loaded, *loaded])
    assert sum(len(values) for of_engine in found.values() for values in of_engine.values()) == len(ran)
    (single,) = [
        one for one in ran if one.config["engine"]["name"] == "single" and one.config["model"]["name"] == "gpt"
    ]
    expected = single.predicted["step_time_s"] / single.metrics["step_time_s"]
    assert found["single"]["gpt"] == [pytest.approx(expected)]


def test_the_figure_has_a_dot_for_each_run() -> None:
    drawn = accuracy.figure({"gpipe": {"unet": [0.9, 1.0], "gpt": [0.4]}, "single": {"unet": [1.3]}})
    assert drawn
    (axes,) = drawn.get_axes()
    dots = [(x, round(y, 1)) for one in axes.collections for x, y in one.get_offsets().tolist()]
    assert dots == [(1.3, 0.1), (0.9, 1.1), (1.0, 1.1), (0.4, 0.9)]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["single (1)", "gpipe (3)"]
    assert axes.get_xlim()[0] < 0.4 and axes.get_xlim()[1] > 1.3
    assert axes.get_title().startswith("4 runs")
