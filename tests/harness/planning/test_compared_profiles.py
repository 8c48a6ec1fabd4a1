"""A stored profile is compared with the model that the user chose, in every mode that takes one."""

from __future__ import annotations

from pathlib import Path

import pytest

import run
from harness.core.record import RunRecord
from harness.core.run_files import RECORD

pytestmark = [pytest.mark.usefixtures("commands"), pytest.mark.full]
FLAT = ("cluster=flat", "cluster.devices=2", "cluster.memory_gb=1", "cluster.bandwidth_gb_s=1", "tracker=none")


@pytest.mark.parametrize("mode", ["plan", "tune", "profile"])
def test_a_stored_profile_is_compared_with_the_model(
    mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = ("batch.size=8", "batch.micro_batches=2")
    assert run.main(["mode=profile", "model=mlp", *batch, "cluster.device=cpu", f"out={tmp_path}/p"], {}) == 0
    typed = [f"mode={mode}", f"profile={tmp_path}/p/profile.json", *FLAT, *batch, "costs=measured", "engine=gpipe"]
    assert run.main([*typed, "model=mlp", f"out={tmp_path}/own"], {}) == 0, capsys.readouterr()
    capsys.readouterr()
    wider = "model.widths=[64,256,128,10]"
    assert run.main([*typed, "model=mlp", wider, f"out={tmp_path}/other"], {}) == 2
    assert RunRecord.load(tmp_path / "other" / RECORD).status == "infeasible"
    assert "profile" in capsys.readouterr().out
