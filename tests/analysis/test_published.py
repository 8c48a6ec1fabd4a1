"""Data that the project ships: published numbers, and profiles that were counted once."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from analysis.published import TABLES, numbers, value

RELATIONS = {"=", "~", ">", ">=", "up_to", "range_low", "range_high"}
SOURCES = {"paper-table", "paper-text", "public-figure", "public-repository", "derived"}


@pytest.mark.parametrize("path", sorted(TABLES.glob("*.csv")), ids=lambda path: path.stem)
def test_a_cell_of_a_table_is_verbatim_and_nothing_else_is(path: Path) -> None:
    with path.open(encoding="utf-8", newline="") as opened:
        for row in csv.DictReader(opened):
            assert row["relation"] in RELATIONS
            assert row["source"] in SOURCES
            assert (row["verbatim"] == "true") == (row["source"] == "paper-table")


def test_a_number_is_found_by_its_row() -> None:
    table = numbers("torchgpipe_table2_amoebanet_speed")
    assert value(table, "relative_speedup", "torchgpipe", devices=4, micro_batches=32) == 2.71
    assert value(table, "relative_speedup", "GPipe [11]", devices=4, micro_batches=32) == 1.84
    assert value(table, "relative_speedup", "torchgpipe", devices=3, micro_batches=32) is None
