"""What is refused before anything runs: all problems together, and no folder that nobody has named."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.cli.compose import compose
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.problem import CannotRun
from harness.core.record import RunRecord
from harness.core.run_files import RECORD
from harness.run import runner
from tests.problems import keys

SHARDED = ["engine=gpipe", "model=mlp", "launch.sharded_checkpoints=true"]


def run(*overrides: str) -> RunRecord:
    return runner.run(compose(overrides), overrides)


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def test_a_folder_that_is_refused_comes_with_what_the_keys_say(tmp_path: Path) -> None:
    (tmp_path / "swept" / "run").mkdir(parents=True)
    (tmp_path / "swept" / "run" / RECORD).write_text("{}")
    with pytest.raises(CannotRun) as caught:
        run(*SHARDED, "out=swept")
    assert keys(caught.value.problems) == ["out", "launch.sharded_checkpoints"]
    assert caught.value.title == "engine=gpipe model=mlp"
    with pytest.raises(CannotRun) as caught:
        run("engine=gpipe", "model=mlp", "out=swept")
    assert keys(caught.value.problems) == ["out"]


def test_a_refused_run_leaves_a_record_only_where_its_folder_was_named(runs: Path) -> None:
    assert run(*SHARDED).status == "infeasible" and not list(runs.glob("*/*"))
    assert run(*SHARDED, "out=named").status == "infeasible"
    assert RunRecord.load(Path("named") / RECORD).status == "infeasible"


def test_a_search_that_finds_nothing_leaves_its_table(runs: Path) -> None:
    profile = ModelProfile((LayerProfile("layer", 0.1, 0.2, param_bytes=2 * 10**9),), "net", 1, input_bytes=8)
    profile.save(Path("p.json"))
    found = run("profile=p.json", "mode=tune", "engine=single", "cluster=flat", "cluster.devices=1",
                "cluster.memory_gb=1", "cluster.bandwidth_gb_s=1", "batch.size=1")  # fmt: skip
    assert found.status == "infeasible" and len(list(runs.glob("*/*/tune.csv"))) == 1


def test_a_run_that_ends_well_leaves_its_folder(runs: Path) -> None:
    ModelProfile((LayerProfile("layer", 0.1, 0.2, output_bytes=8),), "net", 1, input_bytes=8).save(Path("p.json"))
    found = run("profile=p.json", "mode=plan", "cluster=flat", "cluster.devices=1", "cluster.memory_gb=1",
                "cluster.bandwidth_gb_s=1", "batch.size=1", "batch.micro_batches=1")  # fmt: skip
    assert found.status == "ok" and len(list(runs.glob("*/*/record.json"))) == 1
