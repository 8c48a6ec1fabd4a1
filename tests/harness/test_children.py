"""What the parent hears of a process that it started."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from harness import children, machine
from harness.children import ChildFailed
from harness.compose import compose
from harness.problem import CannotRun
from harness.profile import LayerProfile, ModelProfile


def folder(path: Path, *typed: str) -> Path:
    """A run's folder with its configuration."""
    (path / "config.yaml").write_text(OmegaConf.to_yaml(compose(typed), resolve=True))
    return path


def test_problems_come_back_as_problems(tmp_path: Path) -> None:
    ModelProfile((LayerProfile(),), "other").save(tmp_path / "p.json")
    run = folder(tmp_path, f"profile={tmp_path / 'p.json'}")
    ModelProfile.load(tmp_path / "p.json").save(tmp_path / "profile.json")
    with pytest.raises(CannotRun) as caught:
        children.work(run, "this title", 60, "check")
    assert caught.value.title == "this title"
    assert caught.value.problems[0].what == "is of other, the model is unet_2_16_128"


def test_another_end_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(ChildFailed) as caught:
        children.work(folder(tmp_path), "title", 60, "count", "many")
    assert caught.value.outcome.status == "error"
    assert "ValueError: invalid literal" in caught.value.outcome.reason


def test_this_machine_is_measured_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGATTA_CACHE", str(tmp_path / "cache"))
    run = folder(tmp_path, "cluster.device=cpu")
    found = children.measured_machine(run, "title", 60, "cpu")
    assert found.device.peak_flops["float32"] > 0 and found.link.beta_s_per_byte > 0
    assert machine.stored("cpu") == found
    assert not (run / children.MACHINE).exists()
