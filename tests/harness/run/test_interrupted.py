"""What the user reads after Ctrl-C: how it ended, and that it can be started again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.cli.compose import compose
from harness.planning import prepare, tune
from harness.run import metrics, runner


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt("ended by SIGINT")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_run_that_is_stopped_while_it_measures_is_to_be_started_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prepare, "prepare", interrupted)
    typed = ["engine=gpipe", "model=mlp", "out=a"]
    assert runner.run(compose(typed), typed).status == "preempted"
    said = capsys.readouterr().err.splitlines()
    assert said[0].endswith("preempted: ended by SIGINT") and said[-1].startswith("start it again")


def test_a_search_that_is_interrupted_says_that_it_has_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = SimpleNamespace(to_json=dict, predicted={})
    found = SimpleNamespace(
        layout=SimpleNamespace(plan=plan), ground=SimpleNamespace(values="", origin=""), metrics=dict, interrupted=True
    )
    monkeypatch.setattr(tune, "tune", lambda *_: found)
    monkeypatch.setattr(tune, "report", lambda *_: None)
    monkeypatch.setattr(metrics, "basis", lambda *_: {})
    typed = ["mode=tune", "engine=gpipe", "model=mlp", "out=a"]
    assert runner.run(compose(typed), typed).status == "preempted"
    said = capsys.readouterr().err
    assert "the search has ended" in said and "start it again" in said
