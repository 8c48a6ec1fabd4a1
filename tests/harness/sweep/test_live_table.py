"""The table of a sweep: what it shows, and as CSV."""

import csv
import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from harness.core.plan import Mesh, Plan, Stage
from harness.core.record import RunRecord
from harness.sweep.live_table import Display, Row, as_csv, close, differing, duration, summary
from harness.sweep.points import Point, expand

PLAN = Plan(Mesh(data=2, pipeline=2), (Stage(0, 0, 0), Stage(1, 1, 1), Stage(2, 2, 0))).to_json()
FIGURES = {"throughput": 1 / 3, "step_time_s": 0.1 + 0.2, "peak_memory_bytes": [1, 1024], "bubble_fraction": 0.25}
PREDICTED = {name: value for name, value in FIGURES.items() if name != "throughput"}


def shown(rows: list[Row]) -> list[list[str]]:
    """The closing table, in cells, and what stands below it."""
    output = io.StringIO()
    close(rows, Path("here"), Console(file=output, width=200))
    return [re.split(r" {2,}", line.strip()) for line in output.getvalue().splitlines()]


def rows_of(*records: RunRecord | None, typed: str = "steps=range(1,9)") -> list[Row]:
    return [Row(point, record=record) for point, record in zip(expand([typed]), records, strict=False)]


def test_a_simulated_or_planned_point_says_so_in_the_table() -> None:
    simulated = RunRecord("x", "ok", "simulated", metrics=FIGURES, plan=PLAN)
    planned = RunRecord("x", "ok", "simulated", config={"mode": "plan"}, predicted=PREDICTED)
    does_not_fit = RunRecord("x", "infeasible", "simulated")
    rows = rows_of(simulated, planned, RunRecord("x", "ok", metrics=FIGURES), does_not_fit)
    rows[2].before = True
    title, *lines = shown(rows)
    names = ["id", "steps", "status", "samples/s", "step time", "memory", "devices", "bubble"]
    assert title == names
    assert [line[2:] for line in lines[:4]] == [
        ["ok (simulated)", "0.3333 *", "300.0 ms", "1.0 KiB", "4", "25 %"],
        ["ok (planned)", "-", "~300.0 ms", "~1.0 KiB", "-", "~25 %"],
        ["ok, before", "0.3333 *", "300.0 ms", "1.0 KiB", "-", "25 %"],
        ["infeasible", "-", "-", "-", "-", "-"],
    ]
    assert lines[4:6] == [["* best throughput"], ["~ predicted"]]
    assert ["~ predicted"] not in shown(rows_of(simulated)), "only where there is one"
    assert shown(rows_of(does_not_fit, None))[0] == names[:6], "devices and bubble are not known of any"


def test_a_planned_period_has_a_column() -> None:
    """Next to a step, which has filling and draining. "~" as for all that is only predicted."""
    planned = RunRecord("x", "ok", "simulated", predicted={"step_time_s": 9.0, "period_s": 0.5})
    ran = RunRecord("x", "ok", metrics={"step_time_s": 9.5, "period_s": 0.25}, predicted={"period_s": 0.5})
    title, *lines = shown(rows_of(planned, ran, RunRecord("x", "ok", metrics=FIGURES)))
    assert title[-1] == "period"
    assert [line[-1] for line in lines[:3]] == ["~500.0 ms", "250.0 ms", "-"]
    rows = csv.DictReader(as_csv(rows_of(planned, ran)).splitlines())
    assert [row["period_s"] for row in rows] == ["0.5", "0.25"]


def test_the_best_of_the_points_that_are_ok_is_marked() -> None:
    slow, fast, failed = (
        RunRecord("x", status, metrics={"throughput": speed})
        for status, speed in (("ok", 1.0), ("ok", 2.0), ("oom", 3.0))
    )
    lines = shown(rows_of(slow, fast, failed, None))
    assert [line[3] for line in lines[1:5]] == ["1", "2 *", "3", "-"]
    assert lines[5] == ["* best throughput"]
    assert not any("*" in cell for line in shown(rows_of(fast, failed)) for cell in line), "there is no choice"


@pytest.mark.parametrize(
    ("values", "cells"),
    [
        ("'a/one.json','a/two.json'", ["one.json", "two.json"]),
        ("'a/one.json','b/one.json'", ["'a/one.json'", "'b/one.json'"]),
        ("null,'a b/one.json'", ["null", "one.json"]),
    ],
)
def test_a_path_is_shown_by_its_last_part_where_that_is_enough(values: str, cells: list[str]) -> None:
    rows = rows_of(None, None, typed=f"profile={values}")
    assert [line[1] for line in shown(rows)[1:3]] == cells


def test_the_table_as_csv_holds_everything_in_full() -> None:
    simulated = RunRecord("x", "ok", "simulated", metrics=FIGURES, plan=PLAN)
    planned = RunRecord("x", "ok", "simulated", config={"mode": "plan"}, predicted=PREDICTED)
    measured = RunRecord("x", "oom", predicted=PREDICTED, plan=PLAN, metrics={"peak_memory_bytes": [None, 7]})
    typed = "profile='a/1.json','a/2.json',c,d"
    text = as_csv(rows_of(simulated, planned, measured, None, typed=typed))
    rows = list(csv.DictReader(text.splitlines()))
    ids = [point.id for point in expand([typed])]
    names = ["status", "source", "throughput", "step_time_s", "peak_memory_bytes", "bubble_fraction", "devices",
             "period_s"]  # fmt: skip
    assert text.splitlines()[0].split(",") == ["id", "profile", *names]
    full = ["0.3333333333333333", "0.30000000000000004", "1024", "0.25"]
    assert [list(row.values()) for row in rows] == [
        [ids[0], "'a/1.json'", "ok", "simulated", *full, "4", ""],
        [ids[1], "'a/2.json'", "ok", "simulated", "", *full[1:], "", ""],
        [ids[2], "c", "oom", "measured", "", "", "7", "", "4", ""],
        [ids[3], "d", "not run", "", "", "", "", "", "", ""],
    ]


def test_differing_keys_and_summary() -> None:
    rows = [Row(point) for point in expand(["engine=gpipe", "steps=1,2,3"])]
    assert differing(rows) == ["steps"]
    rows[0].record, rows[0].before = RunRecord("a", "ok"), True
    rows[1].record = RunRecord("b", "oom")
    assert summary(rows) == "3 points: 1 ok, 1 not run, 1 oom; 1 of them done before"


def test_a_point_that_waits_says_for_what() -> None:
    """As Slurm says it; only the state counts in the summary and in the file."""
    row = Row(Point.of(["steps=1"]), waits="pending", waits_for="Priority")
    assert row.status == "pending (Priority)"
    assert summary([row]) == "1 points: 1 pending"
    assert next(csv.DictReader(as_csv([row]).splitlines()))["status"] == "pending"


def test_progress_of_a_sweep() -> None:
    rows = rows_of(RunRecord("x", "ok", metrics={"throughput": 2.0}), RunRecord("x", "ok", metrics={"throughput": 3.0}))
    rows += [Row(Point.of(["steps=9"])), Row(Point.of(["steps=10"]))]
    display = Display(rows, Console(file=io.StringIO()))
    assert (
        display.progress(display.began_s + 60)
        == f"2 of 4 points, best 3 samples/s ({rows[1].point.id}), about 60 s left"
    )
    rows[0].before = rows[1].before = True
    assert "left" not in display.progress(display.began_s + 60), "nothing ran yet, so nothing is known"


def test_a_long_table_shows_where_the_sweep_is() -> None:
    rows = [Row(point) for point in expand(["steps=range(1,201)"])]
    for row in rows[:100]:
        row.record = RunRecord("x", "ok")
    rows[100].began_s = 0.0
    output = io.StringIO()
    with Display(rows, Console(file=output, force_terminal=True, width=100, height=20)) as display:
        display.refresh()
    assert "running" in output.getvalue()
    assert "100 of 200 points" in output.getvalue()


@pytest.mark.parametrize(("length_s", "text"), [(45, "45 s"), (720, "12 min"), (12000, "3 h 20 min")])
def test_duration(length_s: float, text: str) -> None:
    assert duration(length_s) == text
