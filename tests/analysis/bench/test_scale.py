"""How cost grows: each piece of work runs, and what takes too long or fails is no figure."""

from __future__ import annotations

import subprocess

import pytest

from analysis.bench import results, scale, scale_work


def test_every_subject_has_its_work() -> None:
    assert {one.work for one in scale.SUBJECTS.values()} == set(scale_work.SUBJECTS)


@pytest.mark.parametrize("work", ["stages", "autoddl", "sweep", "records"])
def test_the_smallest_size(work: str) -> None:
    found = scale.measured(work, 4)
    assert found and 0 < found[0] < 60 and 2**24 < found[1] < 2**32


@pytest.mark.full
@pytest.mark.parametrize("work", ["simulation", "tuning", "madpipe"])
def test_the_smallest_size_of_what_takes_longer(work: str) -> None:
    assert scale.measured(work, 8)


def test_what_fails_is_raised_and_what_takes_long_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        scale.measured("simulation", 7)  # no node
    monkeypatch.setattr(scale, "LIMIT_S", 0.05)
    assert scale.measured("stages", 1) is None


def test_rows_and_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quadratic subject, of which the last size takes too long."""
    taken = {1: (1.0, 2**30), 10: (100.0, 2**31), 100: None}
    monkeypatch.setattr(scale, "SUBJECTS", {"work": scale.Subject("things", "stages", (1, 10, 100, 1000))})
    monkeypatch.setattr(scale, "measured", lambda work, size: taken[size])
    rows = scale.scale(1)
    assert [row["size"] for row in rows] == [1, 10, 100]
    assert rows[0]["exponent"] is None and rows[1]["exponent"] == pytest.approx(2)
    assert "300 s" in rows[2]["ended"] and "step" not in rows[2]
    drawn = scale.figure(rows)
    assert drawn and [list(line.get_ydata()) for line in drawn.axes[0].lines] == [[1.0, 100.0]]
    assert [list(line.get_ydata()) for line in drawn.axes[1].lines] == [[1.0, 2.0]]
    assert scale.figure(rows[2:]) is None


def test_the_committed_figures_have_every_subject() -> None:
    assert {row["entry"] for row in results.load()["scale"]["rows"]} == set(scale.SUBJECTS)
