from __future__ import annotations

import io
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness.core.record import RunRecord
from harness.core.units import age, flops, percent, rate, ratio, seconds, size, sizes
from harness.report import searched_order
from harness.report.closing_table import basis_lines, closing_table, file_lines, show
from harness.report.closing_table import summary_line as line


def plain() -> Console:
    """A console that is a file, as in a log."""
    return Console(file=io.StringIO(), width=100)


def text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


CLUSTER = {"nodes": 1, "node_bandwidth_gb_s": None, "values": "nominal", "effective": {"node_bandwidth_gb_s": None}}


def record(**changes: Any) -> RunRecord:
    fields: dict[str, Any] = {
        "id": "x",
        "status": "ok",
        "config": {"engine": {"name": "gpipe"}, "model": {"name": "unet"}, "cluster": CLUSTER},
        "plan": {"stages": [{"first": 0, "last": 1, "device": 0}, {"first": 2, "last": 5, "device": 1}]},
        "metrics": {
            "step_time_s": 0.2,
            "step_time_spread_s": [0.19, 0.25],
            "throughput": 80.0,
            "utilization": [0.75, 0.5],
            "peak_memory_bytes": [300 * 2**20, 200 * 2**20],
            "bubble_fraction": 0.375,
            "loss": 0.25,
            "first_loss": 0.75,
            "bytes_sent": {"copy": 3 * 2**20},
            "model_flops_per_s": 1.5e10,
            "data_wait_s": 0.0005,
        },
        "predicted": {"step_time_s": 0.15, "peak_memory_bytes": [330 * 2**20, 150 * 2**20], "bubble_fraction": 0.3},
        "trace": "trace.json.gz",
    }
    return RunRecord(**{**fields, **changes})


def test_a_simulated_speed_of_a_device_that_is_not_calibrated_says_so() -> None:
    basis = {"simulation": {"upper_bound": True}}
    bound = record(source="simulated", manifest=basis)
    assert ["throughput", "80 samples/s (upper bound: not calibrated)"] in [row[:2] for row in rows(bound)]
    assert "80 samples/s (upper bound: not calibrated), 200.0 ms a step" in line(bound, Path("x"))
    assert "upper bound" not in line(record(manifest=basis), Path("x")), "a measured one is none"


def rows(shown: RunRecord) -> list[list[str]]:
    """The cells of the closing table: columns are at least two spaces apart."""
    console = plain()
    console.print(closing_table(shown))
    return [re.split(r" {2,}", row.strip()) for row in text(console).splitlines() if row.strip()]


def test_closing_table_has_measured_next_to_predicted() -> None:
    assert rows(record()) == [
        ["measured", "predicted", "predicted / measured"],
        ["throughput", "80 samples/s", "106.7 samples/s", "1.33"],
        ["step time", "200.0 ms", "150.0 ms", "0.75"],
        ["p10 to p90", "190.0 ms to 250.0 ms"],
        ["bubble", "38 %", "30 %"],
        ["loss, first step", "0.7500"],
        ["loss, last step", "0.2500"],
        ["model FLOP/s", "15.0 GFLOP/s"],
        ["wait for data", "500.0 us"],
        ["sent: copy", "3.0 MiB", "-", "-"],
        ["device", "utilization", "bubble", "peak memory", "predicted", "predicted / measured"],
        ["0", "75 %", "25 %", "300.0 MiB", "330.0 MiB", "1.10"],
        ["1", "50 %", "50 %", "200.0 MiB", "150.0 MiB", "0.75"],
    ]


def test_what_a_step_consists_of_is_listed_with_ratios_where_it_matters() -> None:
    found = record()
    found.metrics["parts_s"] = {"computing": 0.12, "communication": 0.0005, "waiting": 0.0, "host": 0.0695}
    found.predicted["parts_s"] = {"computing": 0.12, "communication": 0.03, "waiting": 0.0, "host": 0.0}
    assert rows(found)[4:7] == [
        ["computing", "120.0 ms", "120.0 ms", "1.00"],
        ["communication", "500.0 us", "30.0 ms"],
        ["host", "69.5 ms", "0.0 ms", "0.00"],
    ]
    found.metrics["parts_s"] = None
    assert ["communication", "-", "30.0 ms"] in rows(found), "an engine may leave no trace"


def test_messages_that_are_neither_sent_nor_predicted_have_no_row() -> None:
    found = record()
    found.metrics["bytes_sent"] = {"copy": 0, "skips": 0, "skip_gradients": 0, "gradients": 5}
    found.predicted["bytes_sent"] = {"copy": 7, "skips": 0, "all_reduce": 0}
    found.metrics["collectives"] = {"gradients": 640}
    assert [row for row in rows(found) if row[0].startswith("sent")] == [
        ["sent: copy", "0 B", "7 B", "-"],
        ["sent: gradients in 640 calls", "5 B", "-", "-"],
    ]


def test_a_repeated_pattern_has_a_row_for_its_period() -> None:
    found = record()
    found = replace(found, metrics=found.metrics | {"period_s": 0.02}, predicted=found.predicted | {"period_s": 0.015})
    assert ["period, without filling", "20.0 ms", "15.0 ms", "0.75"] in rows(found)
    none = replace(found, metrics=found.metrics | {"period_s": None})
    assert not any(row[0].startswith("period") for row in rows(none)), "another engine, with the same planner"


def test_a_simulated_period_stands_next_to_that_of_the_planner() -> None:
    found = simulated()
    found = replace(found, metrics=found.metrics | {"period_s": 0.021})
    assert ["period, without filling", "21.0 ms"] in rows(found)
    assert any("period 20.0 ms" in line for line in basis_lines(found))


def test_waiting_for_data_is_reported_as_a_share_where_it_matters() -> None:
    slow = replace(record(), metrics=record().metrics | {"data_wait_s": 0.05})
    assert ["wait for data", "50.0 ms (+25 % of a step)"] in rows(slow)


BASIS = {
    "costs": "analytic",
    "layer_times": "analytic on P40",
    "model": "net_5",
    "cluster": {"name": "p40x8"},
    "values": "nominal",
    "jitter": 0.0,
    "seed": 3,
}


def simulated(jitter: float = 0.0, **changes: Any) -> RunRecord:
    """A record that a simulation leaves."""
    kept = ("step_time_s", "throughput", "utilization", "peak_memory_bytes", "bubble_fraction")
    metrics: dict[str, Any] = {key: record().metrics[key] for key in kept}
    contents = {"weights": 60 * 2**20, "saved": 239 * 2**20, "working": 2**20}
    metrics |= {"loss": None, "peaks": [{"device": 4, "at_s": 0.5, "bytes": 300 * 2**20, "contents": contents}]}
    predicted = {"step_time_s": 0.19, "bubble_fraction": 0.3, "balance": 0.5, "period_s": 0.02, "stage_cost": [1.0]}
    manifest = {"simulation": BASIS | {"jitter": jitter}}
    return record(source="simulated", metrics=metrics, predicted=predicted, manifest=manifest, **changes)


def test_a_simulated_record_is_compared_with_nothing() -> None:
    assert rows(simulated()) == [
        ["simulated"],
        ["throughput", "80 samples/s"],
        ["step time", "200.0 ms"],
        ["bubble", "38 %"],
        ["device", "utilization", "bubble", "peak memory"],
        ["0", "75 %", "25 %", "300.0 MiB"],
        ["1", "50 %", "50 %", "200.0 MiB"],
        ["device", "peak at", "with"],
        ["4", "500.0 ms", "saved 239.0 MiB, weights 60.0 MiB"],  # the working set is less than a hundredth
    ]


def test_jitter_is_shown_next_to_what_is_without() -> None:
    assert rows(simulated(jitter=0.1))[:4] == [
        ["simulated", "without jitter"],
        ["throughput", "80 samples/s", "84.21 samples/s"],
        ["step time", "200.0 ms", "190.0 ms"],
        ["bubble", "38 %", "30 %"],
    ]


def test_what_a_simulation_rests_on() -> None:
    assert basis_lines(simulated()) == [
        "layer times  analytic on P40",
        "cluster      p40x8, nominal values",
        "planner      balance 0.5, period 20.0 ms",
    ]
    assert "jitter       0.1, seed 3" in basis_lines(simulated(jitter=0.1))
    assert basis_lines(record(source="simulated", predicted={})) == []


def test_where_a_profile_is_from_and_how_old_it_is(tmp_path: Path) -> None:
    """Of a measured record, too: the prediction in the table is based on it."""
    expected = "made here 3 min ago, cached"
    made = simulated()
    made.manifest["simulation"]["profile"] = expected
    assert basis_lines(made)[1] == f"profile      {expected}"
    console = plain()
    show(record(manifest={"simulation": BASIS | {"profile": expected}}), tmp_path, console)
    assert f"profile  {expected}" in text(console).splitlines()


@pytest.mark.parametrize(
    ("passed_s", "expected"), [(0.4, "0 s"), (59, "59 s"), (180, "3 min"), (3600 * 5, "5 h"), (86400 * 12, "12 d")]
)
def test_an_age(passed_s: float, expected: str) -> None:
    assert age(passed_s) == expected


def test_times_of_another_device_have_a_line_of_their_own() -> None:
    made = simulated()
    made.manifest["simulation"]["note"] = "layer times are those of the profile"
    assert basis_lines(made)[:2] == [
        "layer times  analytic on P40",
        "note         layer times are those of the profile",
    ]


def test_what_was_changed_of_a_cluster_is_named_as_it_was_typed() -> None:
    made = simulated()
    made.manifest["overrides"] = ["cluster=p40x8", "cluster.bandwidth_gb_s=3", "batch.size=4", "cluster.nodes=2"]
    assert basis_lines(made)[1] == ("cluster      p40x8, nominal values, with cluster.bandwidth_gb_s=3 cluster.nodes=2")


@pytest.mark.parametrize(
    ("changes", "assumed"),
    [
        ({}, False),
        ({"nodes": 2}, True),
        ({"nodes": 2, "node_bandwidth_gb_s": 1.0}, False),
        ({"nodes": 2, "effective": {"node_bandwidth_gb_s": 1.0}}, True),
        ({"nodes": 2, "effective": {"node_bandwidth_gb_s": 1.0}, "values": "effective"}, False),
        ({"nodes": 2, "values": "effective"}, True),
    ],
)
def test_the_network_port_that_is_assumed(changes: dict[str, Any], assumed: bool) -> None:
    expected = "; network port of a node as fast as its links (cluster.node_bandwidth_gb_s is not set)"
    config = {**record().config, "cluster": CLUSTER | changes}
    (_, cluster, *_) = basis_lines(simulated(config=config))
    assert cluster == f"cluster      p40x8, nominal values{expected if assumed else ''}"


def test_a_simulated_number_is_not_taken_for_a_measured_one(tmp_path: Path) -> None:
    console = plain()
    show(simulated(), tmp_path, console)
    assert "measured" not in text(console)
    assert "loss" not in text(console)
    assert "analytic on P40" in text(console)
    assert text(console).splitlines()[-1].startswith("gpipe net_5: ok (simulated), 80 samples/s, ")


def test_percent_of_peak_has_a_row_where_it_is_known() -> None:
    both = {"percent_of_peak": 25.0, "data_sheet_percent_of_peak": 20.0}
    found = rows(record(metrics={**record().metrics, **both}))
    assert ["of devices' peak (MFU)", "25 %"] in found and ["of their data sheet's peak", "20 %"] in found


def test_the_hardware_has_a_row_where_something_is_recomputed() -> None:
    for hardware, printed in ((25.0, False), (33.0, True)):
        both = {"percent_of_peak": 25.0, "hardware_percent_of_peak": hardware}
        found = rows(record(metrics={**record().metrics, **both}))
        assert (["and with recomputation", "33 %"] in found) == printed
        assert ("and with recomputation" in [row[0] for row in found]) == printed


def test_device_rows_carry_the_devices_of_the_plan() -> None:
    """Two stages on device 5, one on device 2: two rows, in the order of `Plan.devices`."""
    stages = [{"device": 5}, {"device": 2}, {"device": 5}]
    assert [row[0] for row in rows(record(plan={"stages": stages}))[-2:]] == ["2", "5"]
    assert [row[0] for row in rows(record(plan=None))[-2:]] == ["0", "1"]


def test_what_a_gpus_allocator_has_taken_has_a_column() -> None:
    taken = record(metrics=record().metrics | {"reserved_memory_bytes": [2**30, 2**29]})
    assert [row[-1] for row in rows(taken)[-3:]] == ["reserved", "1.0 GiB", "512.0 MiB"]
    assert [row[:-1] for row in rows(taken)[-3:]] == rows(record())[-3:]


def test_anything_may_be_null() -> None:
    nothing = dict.fromkeys(record().metrics)
    empty = record(metrics=nothing, predicted={"step_time_s": None, "peak_memory_bytes": None}, plan=None, trace=None)
    assert rows(empty) == [
        ["measured", "predicted", "predicted / measured"],
        ["step time", "-", "-", "-"],
        ["bubble", "-", "-"],
    ]
    assert line(empty, Path("run")) == "gpipe unet: ok, -, - a step, loss - -> -, bubble -, peak - (run)"
    assert rows(record(metrics={}, predicted={})) == []
    half = record(metrics={"peak_memory_bytes": [None, 2**20], "utilization": None}, predicted={})
    assert rows(half)[-2:] == [["0", "-", "-", "-", "-", "-"], ["1", "-", "-", "1.0 MiB", "-", "-"]]


def test_tokens_have_a_row_where_there_are_some() -> None:
    both = {"tokens_per_s": 40960.0, "tokens_per_s_per_device": 20480.0}
    found = rows(record(metrics={**record().metrics, **both}))
    assert ["tokens", "40,960 tokens/s"] in found and ["of each device", "20,480 tokens/s"] in found


def test_summary_is_one_line() -> None:
    assert line(record(), Path("runs/x")) == (
        "gpipe unet: ok, 80 samples/s, 200.0 ms a step, loss 0.7500 -> 0.2500, bubble 38 %, peak 300.0 MiB (runs/x)"
    )
    assert " ok (simulated), " in line(record(source="simulated"), Path("runs/x"))
    failed = record(status="oom", reason="stage 1 [gpipe]: no memory\nTraceback ...", config={})
    assert line(failed, Path("runs/x")) == "- -: oom, stage 1 [gpipe]: no memory (runs/x)"


def test_steps_without_an_update_have_a_row_where_there_are_some() -> None:
    some, none = (replace(record(), metrics=record().metrics | {"skipped_steps": count}) for count in (3, 0))
    assert ["steps without an update", "3"] in rows(some)
    assert rows(none) == rows(record()), "nor has a record that does not know"


def test_files_that_are_there_are_listed(tmp_path: Path) -> None:
    assert file_lines(record(), tmp_path) == []
    for name in ("record.json", "trace.json.gz", "timeline.png"):
        (tmp_path / name).touch()
    listed = file_lines(record(), tmp_path)
    assert [entry.split()[0] for entry in listed] == ["record", "trace", "picture"]
    assert [Path(entry.split()[1]).name for entry in listed] == ["record.json", "trace.json.gz", "timeline.png"]
    assert len(file_lines(record(trace=None), tmp_path)) == 2


def test_show_ends_with_the_summary_unbroken_and_takes_brackets_as_they_are(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=40)
    folder = tmp_path / "[bold]a[/bold] :smile:"
    show(record(), folder, console)
    assert text(console).splitlines()[-1] == line(record(), folder)
    assert "[bold]a[/bold] :smile:" in text(console)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, "-"), (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (851443712, "812.0 MiB"), (2**30, "1.0 GiB"),
     (5 * 2**40, "5.0 TiB"), (3000 * 2**40, "3000.0 TiB")],
)  # fmt: skip
def test_size(value: float | None, expected: str) -> None:
    assert size(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, "-"), (0.0, "0.0 ms"), (85e-6, "85.0 us"), (0.1297, "129.7 ms"), (1.0, "1.00 s"), (103.456, "103.46 s")],
)
def test_seconds(value: float | None, expected: str) -> None:
    assert seconds(value) == expected


def test_other_numbers() -> None:
    assert [rate(x) for x in (None, 0.01234, 123.44, 123456.7)] == [
        "-", "0.01234 samples/s", "123.4 samples/s", "123,457 samples/s"
    ]  # fmt: skip
    assert [flops(x) for x in (5.0, 12.3e9, 1.5e15, 2e18)] == [
        "5.0 FLOP/s", "12.3 GFLOP/s", "1.5 PFLOP/s", "2000.0 PFLOP/s"
    ]  # fmt: skip
    assert [percent(x) for x in (None, 0.0, 0.876, 1.0)] == ["-", "0 %", "88 %", "100 %"]
    assert [ratio(*x) for x in ((None, 1), (1, None), (1, 0), (3, 4), (0, 4))] == ["-", "-", "-", "0.75", "0.00"]
    assert "nan" in line(record(metrics={"loss": math.nan}), Path("x"))


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (3 << 30, 1 << 30, ("3.0 GiB", "1.0 GiB")),
        ((22 << 30) + (30 << 20), 22 << 30, ("22.03 GiB", "22.00 GiB")),
        ((22 << 30) + (5 << 20), 22 << 30, ("22.005 GiB", "22.000 GiB")),
        ((22 << 30) + 1, 22 << 30, ("23622320129 B", "23622320128 B")),
        (10**24 + 1, 10**24, (f"{10**24 + 1} B", f"{10**24} B")),
    ],
)
def test_two_sizes_differ(one: int, other: int, expected: tuple[str, str]) -> None:
    assert sizes(one, other) == expected


@pytest.mark.parametrize(
    ("gap", "devices", "said"),
    [
        (0.03, [0, 1, 1, 0], "searched (v, local search), at most 3.1 % above the least possible"),
        (0.5, [0, 1, 0, 1], "searched (loop, local search), at most 100.0 % above the least possible"),
        (0.0, [0, 1, 2], "searched (one, local search), no order of these stages is faster"),
        (1.0, [0, 1], "searched (one, local search)"),
        (None, [0, 1], ""),
    ],
)
def test_a_searched_schedule_says_where_its_stages_are_and_how_good_it_is(
    gap: float | None, devices: list[int], said: str, tmp_path: Path
) -> None:
    figures = {} if gap is None else {"search_gap": gap, "searched_by": "local search"}
    assert searched_order.line(figures, devices) == said
    stages = [{"first": number, "last": number, "device": device} for number, device in enumerate(devices)]
    for made in (record(), simulated()):
        found = replace(made, predicted=made.predicted | figures, plan={"stages": stages})
        console = plain()
        show(found, tmp_path, console)
        lines = [one for one in text(console).splitlines() if one.startswith("schedule ")]
        assert [one.partition(" ")[2].strip() for one in lines] == ([said] if said else [])
        assert "search gap" not in text(console)
