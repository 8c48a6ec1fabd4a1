"""Ratios of predicted and published figures, their mean and spread, and the notes on them."""

from __future__ import annotations

import math
import re

import pytest

from analysis import cells
from analysis.cells import Cell, Note, compared, judged
from analysis.paper_pages import PAGES
from harness.config.registry import ROOT

TIMES = [Cell("Table 1", "time, s", row, 10.0, own) for row, own in (("a", 5.0), ("b", 20.0), ("c", None), ("d", 80.0))]


def test_a_cell_without_a_record_has_no_ratio_and_one_without_a_published_figure_is_no_cell() -> None:
    assert [one.ratio for one in TIMES] == [0.5, 2.0, None, 8.0]
    assert [*compared("T", "q", {"a": (2.0, None), "b": (None, 1.0)})] == [Cell("T", "q", "a", 2.0, None)]


def test_fitted_cells_are_left_out_of_mean_and_spread_but_may_be_the_worst() -> None:
    (group,) = cells.groups(judged(TIMES, [Note("Table 1", "time, s", "d", "a.yaml: x", "")]))
    assert group.ratios == [0.5, 2.0] and (group.fitted, group.not_predicted) == (1, 1)
    assert cells.mean(group.ratios) == pytest.approx(1.0)
    assert cells.spread(group.ratios) == pytest.approx(math.exp(math.log(4) / math.sqrt(2)))
    assert group.worst and (group.worst.cell.row, group.worst.miss) == ("d", 8.0)
    assert (cells.mean([]), cells.spread([2.0])) == (None, None)


def test_a_note_on_a_row_comes_before_that_on_all_rows() -> None:
    notes = [
        Note("Table 1", "time, s", "", "", "all are late."),
        Note("Table 1", "time, s", "b", "a.yaml: x", ""),
        Note("Table 1", "time, s", "d", "", "d is later."),
        Note("Table 2", "time, s", "", "b.yaml: y", "other."),
    ]
    found = {one.cell.row: (one.fitted, one.reason) for one in judged(TIMES, notes)}
    assert found["a"] == ("", "all are late.") and found["d"] == ("", "d is later.")
    assert found["b"] == ("a.yaml: x", "all are late.")


def test_a_table_that_comes_again_is_one_group() -> None:
    other = Cell("Table 2", "time, s", "a", 1.0, 1.0)
    found = cells.groups(judged([*TIMES[:1], other, *TIMES[1:]], []))
    assert [(group.table, len(group.cells)) for group in found] == [("Table 1", 4), ("Table 2", 1)]


@pytest.mark.parametrize("paper", PAGES)
def test_every_note_is_on_a_cell_and_short(paper: str) -> None:
    """Cells are there without a record, too."""
    known = list(PAGES[paper].cells(PAGES[paper].results([])))
    assert all(one.predicted is None for one in known)
    for note in cells.notes(paper):
        assert any(note.is_on(cell) for cell in known), note
        assert note.fitted or note.reason, note
        assert len(re.findall(r"[.?!](?:\s|$)", note.reason)) <= 2, note
        assert not note.reason or note.reason.endswith("."), note


@pytest.mark.parametrize("paper", PAGES)
def test_every_fitted_constant_is_a_number_of_its_file(paper: str) -> None:
    for note in cells.notes(paper):
        if note.fitted:
            file, names = note.fitted.split(": ")
            text = (ROOT / file).read_text(encoding="utf-8")
            for name in names.split(", "):
                assert re.search(rf"\b{name.rpartition('.')[2]}[=:] ?[\d.]+", text), note


def test_cells_are_those_of_tables_that_the_project_has() -> None:
    counts = {paper: len(page.cells(page.results([]))) for paper, page in PAGES.items()}
    assert counts["madpipe"] == 0 and sum(counts.values()) >= 150
