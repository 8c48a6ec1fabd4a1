"""The benchmarks of torchgpipe's public documentation: their points, published figures and tables."""

from __future__ import annotations

import csv
import functools
from dataclasses import replace
from typing import Any

import pytest
from omegaconf import OmegaConf

from analysis import pack, published
from analysis.cells import Judged
from analysis.match_records import points_of
from analysis.paper_data import TABLES, numbers, printed
from analysis.torchgpipe import benchmarks
from analysis.torchgpipe.benchmarks import BENCHMARKS, Benchmark
from analysis.torchgpipe.page import PAGE
from analysis.torchgpipe.quantities import GIB, p40_gib
from analysis.torchgpipe.sweep_results import PUBLIC, Results
from harness.cli.compose import compose

AMOEBANET, SPEED, ACCURACY = BENCHMARKS
SMALL_POINTS = points_of("torchgpipe_resnet101_speed", "local")
PARTIAL = {"pipeline-2": 25005}
"""Batches that differ: torchgpipe's last micro-batch may be smaller than the others, ours may not."""


@functools.cache
def configs(sweep: str, scale: str) -> tuple[dict[str, Any], ...]:
    points = points_of(f"torchgpipe_{sweep}", scale)
    return tuple(OmegaConf.to_container(compose(one.overrides), resolve=True) for one in points)  # type: ignore[misc]


@pytest.fixture(scope="module")
def committed() -> Results:
    return Results(PAGE.load(pack.archives_of_sweeps(PAGE.sweeps)).records)


@pytest.mark.usefixtures("computation")
@pytest.mark.parametrize("one", BENCHMARKS, ids=lambda one: one.sweep)
def test_points_have_the_published_settings(one: Benchmark) -> None:
    for row, config in zip(one.rows, configs(one.sweep, "paper"), strict=True):
        own = [number for number in numbers(one.file) if number.scheme == one.prefix + row]
        balances = [number.value for number in own if number.metric == "balance"]
        layers = " ".join(map(str, config["planner"]["balance"]))
        assert balances == [layers] or (row == "baseline" and not balances), row
        assert {number.devices for number in own} == {len(config["planner"]["balance"])}, row
        counts = {number.micro_batches for number in own} - {None}
        assert counts <= {config["batch"]["micro_batches"]}, row
        micro_batch = -(-_batch(one, row) // config["batch"]["micro_batches"])
        assert config["batch"]["size"] == PARTIAL.get(row if one is SPEED else "", _batch(one, row)), row
        assert config["batch"]["size"] == micro_batch * config["batch"]["micro_batches"], row


def _batch(one: Benchmark, row: str) -> int:
    """From the column that `Number` leaves out."""
    with (TABLES / f"{one.file}.csv").open(encoding="utf-8", newline="") as opened:
        return next(int(line["batch_size"]) for line in csv.DictReader(opened) if line["scheme"] == one.prefix + row)


@pytest.mark.usefixtures("computation")
@pytest.mark.parametrize("one", (AMOEBANET, SPEED), ids=lambda one: one.sweep)
def test_rows_in_small_have_the_same_layers_and_stages(one: Benchmark) -> None:
    for ours, local in zip(configs(one.sweep, "paper"), configs(one.sweep, "local"), strict=True):
        assert (ours["engine"], ours["planner"]) == (local["engine"], local["planner"])
        assert ours["model"]["name"] == local["model"]["name"] and local["mode"] == "run"
        for key in ("layers", "blocks", "cut"):
            assert ours["model"].get(key) == local["model"].get(key)


def test_parameters_and_model_memory_are_exact(committed: Results) -> None:
    """12 bytes a parameter: the documentation rounds both."""
    for row, record in AMOEBANET.records(committed, "simulated").items():
        lines = {line.figure.metric: line for line in benchmarks._lines(committed, AMOEBANET, row)}
        count = printed(AMOEBANET.file, "parameters_exact", scheme=f"torchgpipe {row}")
        assert lines["parameters"].simulated == count
        assert lines["model_memory"].simulated == 12 * count / GIB
        assert lines["model_memory"].simulated == pytest.approx(lines["model_memory"].published or 0, abs=0.0051)
        peaks = sum(record.metrics["peak_memory_bytes"])
        assert lines["peak_activation_memory"].simulated == (peaks - 12 * count) / GIB


def test_what_was_out_of_memory_needs_more_than_the_card_has(committed: Results) -> None:
    table = next(one for one in benchmarks.sections(committed) if "AmoebaNet" in one.title)
    (line,) = [row for row in table.rows if row[2] == "Out of memory"]
    assert line[1] == "peak activation memory" and float(line[3].split()[0]) > p40_gib() and line[4] == "-"
    assert [row[0] for row in table.rows if row[0]] == list(AMOEBANET.rows)


def test_what_is_only_published_has_no_figure_of_ours(committed: Results) -> None:
    table = next(one for one in benchmarks.sections(committed) if "accuracy" in one.title)
    errors = [row for row in table.rows if row[1] == "top-1 error"]
    assert len(errors) == 7 and all(row[2].endswith(" %") and row[3:] == ("-", "-") for row in errors)
    assert len(table.columns) == 5 and any("published only" in note for note in table.notes)


def test_cells_are_predictions_of_numbers(committed: Results) -> None:
    found = {
        (one.cell.table, one.cell.quantity, one.cell.row): one
        for one in published.judged("torchgpipe", committed)
        if one.cell.table.startswith("Public")
    }
    memory, speed = "peak activation memory, GiB", "throughput, samples/s"
    assert (AMOEBANET.titles[1], memory, "baseline") not in found
    assert (SPEED.titles[1], "speed-up", "baseline") not in found
    fitted = [name for name, one in found.items() if one.fitted]
    assert fitted == [(SPEED.titles[1], speed, "baseline")]
    assert len(found) == 5 + 5 + 4 + 5 + 4 + 3
    assert all(isinstance(one, Judged) and one.ratio for one in found.values())


@pytest.mark.usefixtures("computation")
def test_a_run_that_failed_is_named_and_nothing_else_is_lost(committed: Results) -> None:
    (first, *others) = SPEED.records(committed, "simulated").values()
    failed = replace(first, status="infeasible", reason="no\nroom")
    table = benchmarks.sections(Results([failed, *others]))[0]
    assert "baseline, simulated: infeasible: no room" in table.notes
    speeds = [row[3] for row in table.rows if row[1] == "throughput"]
    assert speeds[0] == "-" and "-" not in speeds[1:]


@pytest.mark.usefixtures("computation")
def test_a_busy_machine_is_said(committed: Results) -> None:
    slow = []
    for one, point in zip(SPEED.records(committed, "simulated").values(), SMALL_POINTS, strict=True):
        manifest = one.manifest | {"overrides": list(point.overrides)}
        slow.append(replace(one, source="measured", manifest=manifest, metrics=one.metrics | {"slowed": 3.0}))
    (table,) = benchmarks.sections(Results(slow))
    assert [row[3] for row in table.rows] == ["-"] * 10 and table.rows[0][5] == "95.862 /s"
    assert any(note.startswith("In small 5 of 5 runs had a busy machine") for note in table.notes)


def test_nothing_run_is_no_table() -> None:
    assert benchmarks.sections(Results([])) == []
    assert [one.sweep for one in BENCHMARKS] == list(PUBLIC)
