"""The live table of a sweep, and its lines where there is no terminal."""

import io

import pytest
from rich.console import Console

from harness.core.record import RunRecord
from harness.sweep.live_table import Display, duration
from harness.sweep.points import Point, expand
from harness.sweep.row import Row


def rows_of(*records: RunRecord | None, typed: str = "steps=range(1,9)") -> list[Row]:
    return [Row(point, record=record) for point, record in zip(expand([typed]), records, strict=False)]


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


def test_a_line_of_a_point_has_no_key_that_it_does_not_set() -> None:
    rows = [Row(Point.of(texts), record=RunRecord("x", "ok")) for texts in (["engine=single"], ["engine=gpipe", "a=1"])]
    output = io.StringIO()
    display = Display(rows, Console(file=output))
    for row in rows:
        display.ended(row)
    ids = [row.point.id for row in rows]
    assert output.getvalue().splitlines() == [
        f"[1/2] {ids[0]}  engine=single  ok",
        f"[2/2] {ids[1]}  engine=gpipe a=1  ok",
    ]


def test_the_live_table_fits_a_small_terminal() -> None:
    """It leaves out columns instead of cutting numbers, and no line is broken."""
    figures = {"throughput": 18.6, "step_time_s": 0.8584, "peak_memory_bytes": [92694118], "bubble_fraction": 0.1}
    record = RunRecord("x", "ok", metrics=figures | {"first_loss": 0.6734, "loss": 0.4918})
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=60, height=20, color_system=None)
    with Display(rows_of(record, record), console) as display:
        display.refresh()
        lines = [line for line in output.getvalue().splitlines() if "858.4 ms" in line]
    assert len(lines) == 2 and all("18.6" in line and "88.4 MiB" in line and "0.6734" not in line for line in lines)
    assert max(map(len, lines)) <= 60
