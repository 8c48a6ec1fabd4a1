"""Data that the project ships: published numbers, and profiles that were counted once."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from analysis.published import TABLES, numbers, value
from harness.profile import ModelProfile
from harness.registry import ROOT

RELATIONS = {"=", "~", ">", ">=", "up_to", "range_low", "range_high"}
SOURCES = {"paper-table", "paper-text", "public-repository", "derived"}
PROFILES = sorted((ROOT / "analysis" / "profiles").glob("amoebanetd_18_256_*.json"))


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


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_the_stored_amoebanet_is_the_published_one(path: Path) -> None:
    profile = ModelProfile.load(path)
    assert path.stem == f"amoebanetd_18_256_{profile.micro_batch}"
    assert (len(profile.layers), profile.dtype, profile.source[:7]) == (24, "float32", "counted")
    assert profile.sum("param_bytes", 0, 23) == 4 * 122_470_120
    assert profile.sum("flops", 0, 23) == pytest.approx(2 * 15.170e9 * profile.micro_batch, rel=1e-4)
    assert profile.input_bytes == 4 * 3 * 224 * 224 * profile.micro_batch
    assert profile.layers[1].output_bytes == 4 * 2_007_040 * profile.micro_batch, "a pair of tensors"
