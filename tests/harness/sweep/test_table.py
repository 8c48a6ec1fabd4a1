"""The table of a sweep: what it shows, and as CSV."""

import csv
import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness.core.plan import Mesh, Plan, Stage
from harness.core.record import RunRecord
from harness.sweep.closing import close, summary
from harness.sweep.live_table import Display
from harness.sweep.points import Point, expand
from harness.sweep.row import FURTHER, Row
from harness.sweep.table import as_csv, differing

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
    names = ["id", "steps", "status", "samples/s", "step time", "memory", "mesh", "bubble"]
    assert title == names
    assert [line[2:] for line in lines[:4]] == [
        ["ok (simulated)", "0.3333 *", "300.0 ms", "1.0 KiB", "2x2x1", "25 %"],
        ["ok (planned)", "-", "~300.0 ms", "~1.0 KiB", "-", "~25 %"],
        ["ok, before", "0.3333 *", "300.0 ms", "1.0 KiB", "-", "25 %"],
        ["infeasible", "-", "-", "-", "-", "-"],
    ]
    assert lines[4:7] == [["* best throughput"], ["~ predicted"], ["mesh: pipeline x data x tensor parallel size"]]
    assert ["~ predicted"] not in shown(rows_of(simulated)), "only where there is one"
    assert shown(rows_of(does_not_fit, None))[0] == names[:6], "mesh and bubble are not known of any"


def test_speeds_of_a_device_that_is_not_calibrated_are_marked_as_upper_bounds() -> None:
    basis = {"simulation": {"upper_bound": True}}
    simulated = RunRecord("x", "ok", "simulated", metrics=FIGURES, plan=PLAN, manifest=basis)
    measured = RunRecord("x", "ok", metrics=FIGURES, plan=PLAN, manifest=basis)
    _, first, second, *below = shown(rows_of(simulated, measured))
    assert (first[3], second[3]) == ("<=0.3333 *", "0.3333 *")
    assert ["<= upper bound: not calibrated"] in below
    assert ["<= upper bound: not calibrated"] not in shown(rows_of(measured))


def test_a_planned_period_has_a_column() -> None:
    """Next to a step, which has filling and draining. "~" as for all that is only predicted."""
    planned = RunRecord("x", "ok", "simulated", predicted={"step_time_s": 9.0, "period_s": 0.5})
    ran = RunRecord("x", "ok", metrics={"step_time_s": 9.5, "period_s": 0.25}, predicted={"period_s": 0.5})
    title, *lines = shown(rows_of(planned, ran, RunRecord("x", "ok", metrics=FIGURES)))
    assert title[-1] == "period"
    assert [line[-1] for line in lines[:3]] == ["~500.0 ms", "250.0 ms", "-"]
    rows = csv.DictReader(as_csv(rows_of(planned, ran)).splitlines())
    assert [row["period_s"] for row in rows] == ["0.5", "0.25"]


def test_the_best_of_each_model_is_marked() -> None:
    """Samples of two models are not the same work."""
    speeds = {"unet": (4.0, 8.0), "gpt": (2.0, 1.0), "mlp": (9.0,)}
    rows = rows_of(
        *(
            RunRecord("x", "ok", config={"model": {"name": name}}, metrics={"throughput": speed})
            for name, ran in speeds.items()
            for speed in ran
        )
    )
    lines = shown(rows)
    assert [line[3] for line in lines[1:6]] == ["4", "8 *", "2 *", "1", "9"]
    assert lines[6] == ["* best throughput of its model"]
    assert "best" not in Display(rows, Console(file=io.StringIO())).progress(1.0)


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
    assert text.splitlines()[0].split(",") == ["id", "profile", *names, *FURTHER, "speed_over_single"]
    full = ["0.3333333333333333", "0.30000000000000004", "1024", "0.25"]
    assert [list(row.values())[: 2 + len(names)] for row in rows] == [
        [ids[0], "'a/1.json'", "ok", "simulated", *full, "4", ""],
        [ids[1], "'a/2.json'", "ok", "simulated", "", *full[1:], "", ""],
        [ids[2], "c", "oom", "measured", "", "", "7", "", "4", ""],
        [ids[3], "d", "not run", "", "", "", "", "", "", ""],
    ]


def ran(engine: str, data: int = 1, pipeline: int = 1, **changes: Any) -> RunRecord:
    """A measured run of 16 samples in 8 micro-batches for each replica, of 1/2 s."""
    config = {"engine": {"name": engine}, "mode": "run", "batch": {"size": 16, "micro_batches": 8}}
    metrics = {"throughput": 32.0, "step_time_s": 0.5, "first_loss": 0.75, "loss": 0.25, "peak_memory_bytes": [2**30]}
    stages = tuple(Stage(k, k, k) for k in range(pipeline))
    fields: dict[str, Any] = {
        "config": config, "metrics": metrics | {"predicted_over_measured": {"step_time_s": 0.8}},
        "predicted": {"step_time_s": 0.4}, "plan": Plan(Mesh(data, pipeline), stages, 8).to_json(),
    }  # fmt: skip
    return RunRecord("x", "ok", **fields | changes)


def simulated(record: RunRecord) -> RunRecord:
    metrics = {key: value for key, value in record.metrics.items() if key in ("throughput", "step_time_s")}
    return replace(record, source="simulated", metrics=metrics | {"loss": None})


def test_engines_are_compared_in_the_table() -> None:
    """Two devices: the columns of the mesh and of the micro-batches distinguish replicas from stages."""
    single, gpipe, ddp = ran("single"), ran("gpipe", pipeline=2), ran("ddp", data=2)
    ddp.metrics["throughput"] = 48.0
    first, title, *lines = shown(
        rows_of(single, gpipe, ddp, RunRecord("x", "oom"), typed="engine=single,gpipe,ddp,fsdp")
    )
    assert first == ["speed /", "predicted", "micro-"]
    assert title[5:] == ["memory", "loss", "single", "/ measured", "mesh", "batch"]
    assert [line[5:] for line in lines[:4]] == [
        ["1.0 GiB", "0.7500 -> 0.2500", "1.00", "0.80", "1x1x1", "2"],
        ["1.0 GiB", "0.7500 -> 0.2500", "1.00", "0.80", "2x1x1", "2"],
        ["1.0 GiB", "0.7500 -> 0.2500", "1.50", "0.80", "1x2x1", "1"],
        ["-"] * 6,
    ]
    notes = [line for (line, *_) in lines if line.startswith("note: ")]
    assert len(notes) == 1 and notes[0].startswith("note: micro-batches have 1 and 2 samples")


def test_what_nobody_measured_has_no_column() -> None:
    title = shown(rows_of(simulated(ran("gpipe")), simulated(ran("gpipe"))))[1]
    assert title == ["id", "steps", "status", "samples/s", "step time", "memory", "batch", "devices"]
    assert "single" not in shown(rows_of(ran("single")))[1], "the reference alone is compared with nothing"


def test_the_mesh_is_that_of_the_devices_that_are_used() -> None:
    """MadPipe puts several stages on a device, and may leave others idle; the key has the value that was given."""
    plan = Plan(Mesh(pipeline=3), (Stage(0, 0, 0), Stage(1, 1, 1), Stage(2, 2, 0)), 8).to_json()
    rows = rows_of(ran("periodic", plan=plan))
    title, first = (shown(rows)[line] for line in (1, 2))
    assert title[-2:] == ["mesh", "batch"] and first[-2:] == ["2x1x1", "2"]
    assert rows[0].devices == 2 and rows[0].used("mesh.pipeline") == "3"


@pytest.mark.parametrize(
    ("width", "left_out"),
    [(120, ""), (110, "loss"), (90, "loss, micro-batch"), (20, None)],
)
def test_a_narrow_table_leaves_out_columns_and_says_which(width: int, left_out: str | None) -> None:
    output = io.StringIO()
    rows = rows_of(ran("single"), ran("gpipe", pipeline=2), typed="engine=single,gpipe")
    close(rows, Path("here"), Console(file=output, width=width))
    lines = output.getvalue().splitlines()
    table = [line for line in lines[: lines.index("* best throughput")] if line]
    assert max(map(len, table)) <= width
    if left_out is not None:
        assert len(table) == 4, "no cell is broken"
        assert [line for line in lines if line.startswith("no room")] == (
            [f"no room on {width} columns for: {left_out}"] if left_out else []
        )


def test_the_csv_says_what_is_predicted_and_what_is_compared() -> None:
    rows = rows_of(ran("single"), ran("ddp", data=2), simulated(ran("gpipe", pipeline=2)), typed="seed=1,2,3")
    one, two, three = (
        [row[name] for name in (*FURTHER, "speed_over_single")] for row in csv.DictReader(as_csv(rows).splitlines())
    )
    assert one == ["0.75", "0.25", "0.4", "0.8", "1", "1", "1", "2", "1.0"]
    assert two == ["0.75", "0.25", "0.4", "0.8", "1", "2", "1", "1", "1.0"]
    assert three == ["", "", "0.4", "", "2", "1", "1", "2", ""], "simulated: nothing is measured, nor compared with it"


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
    assert summary([row]) == "1 point: 1 pending"
    assert next(csv.DictReader(as_csv([row]).splitlines()))["status"] == "pending"


def test_of_tuned_points_the_reasons_and_the_command_of_the_fastest_are_printed() -> None:
    def tuned(speed: float, **found: Any) -> RunRecord:
        figures = {"throughput": speed, "step_time_s": 1 / speed}
        return RunRecord("x", "ok", "simulated", config={"mode": "tune"}, metrics=figures | {"tuned": found})

    slow = tuned(1.0, command="python run.py slow", impossible=[{"candidates": 21, "reason": "engine sbp   needs"}])
    fast = tuned(2.0, command="python run.py fast")  # of an earlier version
    rows = rows_of(slow, fast)
    lines = [" ".join(line) for line in shown(rows)]
    assert f"{rows[0].point.id} 21 impossible: engine sbp needs" in lines
    assert lines[-2] == f"{rows[1].point.id} is the fastest, run it: python run.py fast"


def test_a_best_throughput_of_a_busy_machine_has_the_caution() -> None:
    slow, fast = ran("gpipe"), ran("gpipe")
    fast.metrics.update(throughput=64.0, slowed=2.5)
    assert ["* best throughput, but on a busy machine"] in shown(rows_of(slow, fast))
    assert any(line[0].startswith("note: 1 of 2 runs had a busy machine") for line in shown(rows_of(slow, fast)))
    slow.metrics["slowed"], fast.metrics["slowed"] = 2.5, 1.0
    assert ["* best throughput"] in shown(rows_of(slow, fast))


def test_engines_that_differ_in_recomputation_are_noted() -> None:
    single, gpipe = ran("single"), ran("gpipe", pipeline=2)
    gpipe.config["engine"]["checkpoint"] = "except_last"
    lines = shown(rows_of(single, gpipe, typed="engine=single,gpipe"))
    notes = [cell for line in lines for cell in line if "engine.checkpoint=never where engine=gpipe" in cell]
    assert len(notes) == 1


def test_a_key_that_a_run_did_not_set_has_the_value_that_it_used() -> None:
    single, ddp, refused = ran("single"), ran("ddp", data=2), RunRecord("x", "infeasible")
    ddp.config["batch"]["micro_batches"] = 4
    ddp.plan["micro_batches"] = 4  # type: ignore[index]
    points = [Point.of(typed) for typed in (["engine=single"], ["engine=ddp", "batch.micro_batches=4"], ["engine=ddp"])]
    rows = [Row(point, record=record) for point, record in zip(points, (single, ddp, refused), strict=True)]
    title, *lines = shown(rows)[1:]
    assert title[2] == "micro_batches"
    assert [line[2] for line in lines[:3]] == ["8", "4", "-"]


def test_what_mesh_and_micro_batch_repeat_gives_way_first() -> None:
    rows = rows_of(ran("ddp", data=2), ran("ddp", data=1), typed="mesh.data=2,1")
    for row in rows:
        assert row.record
        row.record.metrics["bubble_fraction"] = 0.25

    def titles(width: int) -> str:
        output = io.StringIO()
        close(rows, Path("here"), Console(file=output, width=width))
        return output.getvalue()

    whole = titles(200)
    assert "data" in whole.splitlines()[1].split() and "bubble" in whole
    width = max(map(len, (line.rstrip() for line in whole.splitlines()[:4])))
    assert f"no room on {width - 2} columns for: data\n" in titles(width - 2)
