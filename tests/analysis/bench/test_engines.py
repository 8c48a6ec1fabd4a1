"""The race of all engines: what its rows say of those that finish, that are refused and that fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from analysis.bench import engines, worker
from analysis.bench import race_plot as race_picture
from analysis.bench.engines import Row, run_entries
from analysis.bench.round_robin import Times
from analysis.bench.worker import Entry
from harness.interfaces import Batch, OptimizerSpec
from tests.analysis.bench.conftest import ENTRIES, HERE, KEYS
from tests.analysis.bench.stumbling import fails, hangs, is_killed, stumbles

pytestmark = pytest.mark.usefixtures("ranks")


def noted(rows: list[Row]) -> dict[str, str]:
    """Why rows have no times: they are refused ("note"), or have "failed"."""
    assert all(sum(key in row for key in ("note", "failed", "step")) == 1 for row in rows)
    return {row["entry"]: row.get("note") or row["failed"] for row in rows if "step" not in row}


def test_a_race_has_a_row_for_each_whose_engine_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "ENTRIES", ENTRIES)
    rows = engines.benchmark_model("tiny", KEYS, HERE, rounds=3)
    assert [row["entry"] for row in rows] == ["single", "gpipe", "ddp", "zbv"]
    assert noted(rows) == {"zbv": "mesh.pipeline 4 needs 4 devices, the cluster has 2"}
    assert {row["model"] for row in rows} == {"tiny"}
    for row in rows[:3]:
        low, high = row["quartiles"]
        assert 0 < low <= row["step"] <= high
        assert row["peak memory"] > 1000
    assert rows[0]["speed / single"] == 1.0
    drawn = race_picture.figure(rows)
    assert drawn
    upwards = sorted(rows[:3], key=lambda row: row["speed / single"])
    assert [text.get_text() for text in drawn.axes[0].get_yticklabels()] == [row["entry"] for row in upwards]
    assert {(row["batch"], row["micro-batch"]) for row in rows} == {(8, 2)}


def test_the_figures_of_a_row() -> None:
    times = {"single": Times((4.0, 6.0, 8.0)), "other": Times((1.0, 3.0, 2.0))}
    row = engines._row("tiny", "other", times, [5, 7], "")
    assert row == {
        "model": "tiny", "entry": "other", "step": 2.0, "quartiles": [1.5, 2.5],
        "speed / single": 4.0, "peak memory": 7,
    }  # fmt: skip


def test_what_each_runs(entries: dict[str, Entry]) -> None:
    """Micro-batches of the same size for all: two replicas have half as many each."""
    plans = {title: entry.plan for title, entry in entries.items()}
    assert {title: (len(plan.stages), plan.mesh.data, plan.micro_batches) for title, plan in plans.items()} == {
        "single": (1, 1, 4), "gpipe": (2, 1, 4), "ddp": (1, 2, 2),
    }  # fmt: skip
    assert {plan.recompute for plan in plans.values()} == {"never"}


def test_one_that_fails_to_begin_is_a_row(entries: dict[str, Entry], batch: Batch) -> None:
    wrong = replace(entries["ddp"], spec=replace(entries["ddp"].spec, optimizer=OptimizerSpec("nix")))
    rows = run_entries("tiny", {"wrong": wrong, "single": entries["single"]}, batch, rounds=2)
    assert noted(rows) == {"wrong": "failed to begin: KeyError: 'nix'"}


@pytest.mark.parametrize(
    ("title", "at", "when"), [("gpipe", 0, "in its warm-up"), ("ddp", 2, "in round 2"), ("single", 1, "in round 1")]
)
def test_one_that_fails_in_the_middle_ends_for_itself(
    entries: dict[str, Entry], batch: Batch, title: str, at: int, when: str
) -> None:
    rows = run_entries("tiny", entries | {title: stumbles(entries[title], fails, at)}, batch, rounds=2)
    assert noted(rows) == {title: f"failed {when}: ArithmeticError: nothing adds up"}
    assert all(("speed / single" in row) == (title != "single") for row in rows if row["entry"] != title)


def test_one_that_fails_when_its_memory_is_counted_keeps_its_times(entries: dict[str, Entry], batch: Batch) -> None:
    (row,) = run_entries("tiny", {"single": stumbles(entries["single"], fails, 3)}, batch, rounds=2)
    assert row["failed"] == "failed in the step that counts memory: ArithmeticError: nothing adds up"
    assert row["step"] > 0 and row["speed / single"] == 1.0 and "peak memory" not in row


@pytest.mark.parametrize(
    ("what", "patience_s", "why"), [(hangs, 5.0, "no answer in 5 s"), (is_killed, 60.0, "it ended with exit code -9")]
)
@pytest.mark.timeout(40)
def test_one_that_says_nothing_ends_for_itself(
    entries: dict[str, Entry], batch: Batch, monkeypatch: pytest.MonkeyPatch,
    what: Callable[[], None], patience_s: float, why: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(worker, "PATIENCE_S", patience_s)
    mute = {"mute": stumbles(entries["gpipe"], what, at=1)}
    assert noted(run_entries("tiny", mute | entries, batch, rounds=2)) == {"mute": f"failed in round 1: {why}"}


def test_a_rank_that_hangs_or_is_killed_ends_its_entry(
    entries: dict[str, Entry], batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "PATIENCE_S", 5.0)
    several = {"hangs": stumbles(entries["ddp"], hangs, 1), "killed": stumbles(entries["ddp"], is_killed, 2)}
    notes = noted(run_entries("tiny", several | entries, batch, rounds=2))
    assert notes.pop("hangs") == "failed in round 1: no answer in 5 s"
    assert notes.pop("killed").startswith("failed in round 2: RankKilled: rank 1 was killed (signal 9)")
    assert not notes
