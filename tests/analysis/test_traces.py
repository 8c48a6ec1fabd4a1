"""Which traces are chosen for the report page, and that they come back as they were."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from analysis.torchgpipe import traces
from harness.core.record import RunRecord
from harness.core.trace import Span, Trace


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs of two steps; the second one has no trace."""
    monkeypatch.setattr(traces, "TRACES", tmp_path / "chosen")
    folder = tmp_path / "runs" / "traces-local" / "a"
    RunRecord("a", "ok", trace="trace.json.gz").save(folder / "record.json")
    spans = tuple(Span("0F0", 0, "compute", start, start + 0.5, step) for step, start in enumerate((7.0, 8.0)))
    Trace(spans, ((7.0, 8.0), (8.0, 9.0))).save(folder / "trace.json.gz")
    RunRecord("b", "infeasible", reason="no").save(folder.parent / "b" / "record.json")
    return folder.parent


def test_the_last_step_is_taken_and_begins_at_0(sweep: Path) -> None:
    assert traces.choose("traces-local", sweep) == 1
    (found,) = traces.load("traces-local")
    assert found.trace == Trace((Span("0F0", 0, "compute", 0.0, 0.5),), ((0.0, 1.0),))
    assert found.title == "a, measured"
    assert json.loads((traces.TRACES / "traces-local" / "index.json").read_text())[0]["file"] == "0.trace.json.gz"


def test_sweeps_that_were_not_run_are_reported(
    sweep: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(traces, "RUNS", sweep.parent)
    assert traces.main([]) == 2
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [f"{traces.TRACES / 'traces-local'}: 1 traces"]
    assert [line.split("   ")[0] for line in printed.err.splitlines() if line.startswith(str(sweep.parent))] == [
        str(sweep.parent / name) for name in ("traces-paper", "torchgpipe_table1-paper")
    ]


def test_what_was_not_chosen_is_not_there(sweep: Path) -> None:
    assert traces.load("traces-local") == []


@pytest.mark.parametrize("name", traces.TITLES)
def test_the_chosen_traces_are_committed_and_small(name: str) -> None:
    found = traces.load(name)
    assert found and all(one.trace.spans and len(one.trace.steps) == 1 for one in found)
    assert sum(path.stat().st_size for path in (traces.TRACES / name).iterdir()) < 500_000
