"""`mode=plan export=FILE`, from the command line to the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.cli.compose import compose
from harness.core.model_profile import ModelProfile
from harness.core.problem import CannotRun
from harness.core.record import RunRecord
from harness.run import runner
from harness.sweep import local
from tests.harness.export.made import FLAT, LAYER


def run(folder: Path, *overrides: str) -> RunRecord:
    profile = ModelProfile((LAYER,) * 8, "net_8", 2, input_bytes=100, source="measured on X", times="measured")
    profile.save(folder / "p.json")
    typed = [f"profile={folder / 'p.json'}", *FLAT, "costs=measured", f"out={folder / 'run'}", *overrides]
    return runner.run(compose(typed), typed)


def test_the_file_is_written_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export = tmp_path / "a plan.py"
    record = run(tmp_path, "engine=torch_pipelining", "mesh.pipeline=2", "mesh.data=1", f"export='{export}'")
    assert record.status == "ok" and "STAGES = [(0, 3, 0), (4, 7, 1)]" in export.read_text()
    assert f"torchrun --nproc-per-node 2 '{export}'" in capsys.readouterr().out.replace("\n", "")


def test_a_refused_plan_leaves_no_file_and_says_all_that_is_wrong(tmp_path: Path) -> None:
    export = tmp_path / "plan.py"
    record = run(tmp_path, "engine=gpipe", "mesh.pipeline=2", "cluster.memory_gb=1e-5", f"export={export}")
    assert record.status == "infeasible"
    assert {problem.key for problem in record.problems} >= {"engine.checkpoint", "cluster.memory_gb"}, record.reason
    assert not export.exists() and not (tmp_path / "run" / "plan.json").exists()


def test_points_of_a_sweep_do_not_share_a_file() -> None:
    with pytest.raises(CannotRun, match=r"export a\.py   is one file for 2 points"):
        local.rows_of(["mode=plan", "engine=gpipe,single", "export=a.py"])
    assert len(local.rows_of(["mode=plan", "engine=single", "export=a.py,b.py"])) == 2
