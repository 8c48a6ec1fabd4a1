"""Engines of two trees take turns; what fails says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.bench import __main__ as bench
from analysis.bench import before
from analysis.bench.results import ROOT
from tests.analysis.bench.conftest import KEYS


def test_turns_of_two_trees(commands: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other tree is a folder with links to what this one has, and each imports its own."""
    for name in ("analysis", "conf", "engines", "harness", "models", "planners"):
        (tmp_path / name).symlink_to(ROOT / name)
    turns: list[Path] = []
    step = before.Entry.step

    def noted(entry: before.Entry) -> float:
        turns.append(Path(f"/proc/{entry.process.pid}/cwd").resolve())
        return step(entry)

    monkeypatch.setattr(before.Entry, "step", noted)
    now, then = before.in_turns([*KEYS, "engine=single"], (ROOT, tmp_path), 3)
    assert len(now) == len(then) == 3 and min(*now, *then) > 0
    assert turns == [tmp_path, ROOT, ROOT, tmp_path, tmp_path, ROOT, ROOT, tmp_path]


def test_an_engine_that_cannot_run_ends_the_benchmark(commands: None) -> None:
    with pytest.raises(RuntimeError, match="engine=nothing has ended"):
        before.in_turns([*KEYS, "engine=nothing"], (ROOT,), 1)


def test_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(before, "in_turns", lambda keys, trees, rounds: [[0.3] * 7, [0.2] * 7])
    assert bench.is_commit("HEAD")
    rows = before.compared("HEAD", 7)
    assert {(row["model"], row["entry"]) for row in rows} == {(m, e) for m in before.MODELS for e in before.ENTRIES}
    assert {round(row["time / HEAD"], 6) for row in rows} == {1.5}, "slower by a half"


def test_what_is_no_commit_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--before", "no-such-commit"], ["--before", "HEAD", "race"]):
        with pytest.raises(SystemExit):
            bench.main(arguments)
    assert "no-such-commit is no commit" in capsys.readouterr().err
