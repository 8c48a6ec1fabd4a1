"""Data that the project ships: published numbers, and profiles that were counted once."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from analysis import paper_data, paper_pages
from analysis.paper_data import TABLES, printed, texts, value

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
    table = "torchgpipe_table2_amoebanet_speed"
    assert value(table, "relative_speedup", scheme="torchgpipe", devices=4, micro_batches=32) == 2.71
    assert printed(table, "relative_speedup", scheme="GPipe [11]", devices=4, micro_batches=32) == 1.84
    assert value(table, "relative_speedup", scheme="torchgpipe", devices=3, micro_batches=32) is None
    with pytest.raises(KeyError, match="has no relative_speedup with"):
        printed(table, "relative_speedup", devices=3)
    assert texts("myelin_fig8_coarsening", "optimal_k") == ["2", "4"]


@pytest.fixture
def fresh() -> Iterator[None]:
    """Files are read again, and forgotten."""
    paper_data.numbers.cache_clear()
    yield
    paper_data.numbers.cache_clear()


@pytest.mark.usefixtures("computation")
@pytest.mark.usefixtures("fresh")
def test_every_file_is_read_by_a_page_or_is_said_not_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """README.md of the files lists those that are not, with a reason."""
    read, whole = set(), paper_data._read
    monkeypatch.setattr(paper_data, "_read", lambda file: read.add(file) or whole(file))  # type: ignore[func-returns-value]
    for name in paper_pages.PAGES:
        paper_pages.report(name)
    made = dict(
        re.findall(r"^\| (\w+) \| (.{20,}) \|$", (TABLES / "README.md").read_text().split("## Not shown")[1], re.M)
    )
    assert read | {*made} == {path.stem for path in TABLES.glob("*.csv")}
    assert not read & {*made}
