"""Published against predicted: the command's tables, from committed records and from none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from analysis import cells, pack, published
from analysis.cells import Cell, Judged
from analysis.paper_pages import PAGES
from analysis.records import Loaded
from harness.core.record import RunRecord


@pytest.fixture(scope="module")
def torchgpipe() -> Loaded:
    """The committed records."""
    return PAGES["torchgpipe"].load(pack.archives_of_sweeps(PAGES["torchgpipe"].sweeps))


def of(records: Sequence[RunRecord]) -> dict[tuple[str, str, str], Judged]:
    page = PAGES["torchgpipe"]
    found = published.judged("torchgpipe", page.results(records))
    return {(one.cell.table, one.cell.quantity, one.cell.row): one for one in found}


def judged(row: str, ratio: float, fitted: str = "", reason: str = "") -> Judged:
    return Judged(Cell(f"Table {row}", "time, s", row, 10.0, 10.0 * ratio), fitted, reason)


def test_a_prediction_is_that_of_its_record(torchgpipe: Loaded) -> None:
    """Nothing is written down: twice as fast a record gives twice the ratio."""
    faster = [
        replace(one, metrics=one.metrics | {"throughput": 2 * one.metrics["throughput"]})
        if one.source == "simulated" and one.metrics.get("throughput")
        else one
        for one in torchgpipe.records
    ]
    before, after = of(torchgpipe.records), of(faster)
    for row in ("n=2 m=1", "n=8 m=32"):
        name = ("Table 2", "throughput, samples/s", row)
        assert after[name].ratio == pytest.approx(2 * (before[name].ratio or 0))
        assert after[name].cell.published == before[name].cell.published


def test_ratios_are_those_of_the_papers_own_tables(torchgpipe: Loaded) -> None:
    page = PAGES["torchgpipe"]
    results = page.results(torchgpipe.records)
    names = {"throughput": "throughput, samples/s", "utilization": "utilization, %", "memory": "memory, GiB"}
    found, compared = of(torchgpipe.records), 0
    for section in page.sections(results)[:4]:
        assert section.columns[4] == "simulated / paper"
        row = ""
        for line in section.rows:
            row = line[0] or row
            one = found.get((section.title.partition(":")[0], names.get(line[1], line[1]), row))
            if one is not None:
                compared += 1
                assert line[4] == ("-" if one.ratio is None else f"{one.ratio:.2f}"), line
    assert compared >= 40


def test_cells_that_a_constant_was_fitted_on_are_marked(torchgpipe: Loaded) -> None:
    own = list(of(torchgpipe.records).values())
    section = published.of_paper("torchgpipe", own)
    marked = [row for row in section.rows if row[-1] == "fitted"]
    assert [row[:3] for row in marked][:1] == [("Table 4", "throughput, samples/s", "Naive-1")]
    assert section.notes[0].startswith("Fitted: conf/cluster/p40x8.yaml: convolution_efficiency")


def test_the_worst_come_first_with_their_reason() -> None:
    found = {"x": [judged("a", 1.1), judged("b", 0.5, reason="it waits."), judged("c", 4.0), judged("d", 3.0, "k")]}
    each, worst = published.summary(found)
    assert [(row[4], row[7], row[8]) for row in worst.rows] == [
        ("c", "4.00", ""), ("d", "3.00", "fitted"), ("b", "0.50", "")
    ]  # fmt: skip
    assert worst.notes == ("1, 2: No reason is known.", "3: it waits.")
    assert [row[6] for row in each.rows] == ["1.10", "0.50", "4.00", "-"]
    counted = "4 cells: 1 fitted on, 0 not run; of the others 1 of 3 within a factor 1.1, 1 of 3 within a factor 1.25"
    assert f"{counted}, 2 of 3 within a factor 2." in each.notes


def test_half_and_twice_the_published_figure_miss_equally() -> None:
    assert judged("a", 0.5).miss == judged("b", 2.0).miss == 2.0
    assert published.near([judged("a", 0.81), judged("b", 1.24)])[1.25] == "2 of 2"


@pytest.mark.usefixtures("computation")
def test_every_cell_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert published.main(["myelin", "madpipe"]) == 0
    out = capsys.readouterr().out
    assert "myelin: 60 cells" in out and "madpipe: 0 cells" in out and "torchgpipe" not in out
    assert "madpipe: It prints no absolute figure" in out
    with pytest.raises(SystemExit):
        published.main(["nobody"])


@pytest.mark.usefixtures("computation")
def test_what_was_not_run_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pack, "ARCHIVES", tmp_path)
    assert published.main(["--format", "markdown"]) == 0
    out = capsys.readouterr().out
    count = sum(len(page.cells(page.results([]))) for page in PAGES.values())
    fitted = sum(bool(one.fitted) for name, page in PAGES.items()
                 for one in cells.judged(page.cells(page.results([])), cells.notes(name)))  # fmt: skip
    assert f"{count} cells: {fitted} fitted on, {count} not run; of the others 0 of 0 within a factor 1.1" in out
    assert "The worst cell" not in out
