"""Archives of records: the same bytes for the same records, and those of earlier versions are read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as some

from analysis import record_archive, records
from analysis.pack import ARCHIVES
from analysis.record_archive import _merged, as_bytes, readings

EARLIER = {
    "common": {"schema": 1, "manifest": {"machine": {"cpus": 2}}, "config": {"mode": "simulate"}},
    "left_out": ["trace"],
    "groups": [
        {
            "common": {"status": "ok", "metrics": {"losses": [1.0, 0.5]}, "manifest": {"overrides": {"mode": "plan"}}},
            "records": [
                {"id": "a", "manifest": {"overrides": {"batch.size": "8", "~tracker": None}}},
                {
                    "id": "b",
                    "manifest": {"machine": {"cpus": 4}, "overrides": {"mode": "run"}},
                    "metrics": {"step_time_s": 1},
                },
            ],
        },
        {"common": {}, "records": [{"id": "c", "status": "infeasible", "metrics": {}}]},
    ],
}
"""An archive as earlier versions wrote it: what records share is there once."""
LEAVES = some.none() | some.booleans() | some.integers(0, 2) | some.sampled_from([0.0, 1.0, "", "a"])
VALUES = some.recursive(
    LEAVES | some.just({}) | some.lists(LEAVES, max_size=2),
    lambda inner: some.dictionaries(some.sampled_from("abc"), inner, max_size=3),
)
DOCUMENTS = some.lists(some.dictionaries(some.sampled_from("abc"), VALUES, max_size=3), max_size=4)


def test_an_archive_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    path.write_text(json.dumps(EARLIER))
    a, b, c = records.load([path]).records
    assert (a.id, a.status, a.metrics, a.config) == ("a", "ok", {"losses": [1.0, 0.5]}, {"mode": "simulate"})
    assert a.manifest["overrides"] == ["mode=plan", "batch.size=8", "~tracker"] and a.manifest["machine"] == {"cpus": 2}
    assert b.manifest["overrides"] == ["mode=run"] and b.manifest["machine"] == {"cpus": 4}
    assert b.metrics == {"losses": [1.0, 0.5], "step_time_s": 1}
    assert (c.id, c.status, c.metrics, c.manifest["overrides"]) == ("c", "infeasible", {}, [])


@given(DOCUMENTS)
def test_an_archive_has_the_same_documents_and_bytes_again(documents: list[dict[str, Any]]) -> None:
    """As JSON, in which 1, 1.0 and true are not the same."""
    data = as_bytes(documents)
    read = [json.loads(line) for line in gzip.decompress(data).splitlines()]
    assert [json.dumps(one, sort_keys=True) for one in read] == [json.dumps(one, sort_keys=True) for one in documents]
    assert as_bytes([dict(reversed(one.items())) for one in read]) == data, "the order of keys does not matter"
    assert data[4:8] == b"\0\0\0\0", "no time is stored"


def test_records_that_are_merged_share_no_dictionary() -> None:
    common = {"a": {"b": 1}}
    _merged(common, {})["a"]["b"] = 2
    assert common == {"a": {"b": 1}}


def test_every_committed_archive_is_read_whole_and_is_as_it_would_be_written() -> None:
    archives = sorted(ARCHIVES.glob("*"))
    assert len(archives) > 30
    for path in archives:
        assert record_archive.is_archive(path) and path.name.endswith(record_archive.SUFFIX)
        lines = gzip.decompress(path.read_bytes()).splitlines()
        for line in {lines[0], lines[-1]}:
            assert json.dumps(json.loads(line), sort_keys=True, separators=(",", ":")).encode() == line
        assert len(lines) == len([*readings(path)])
