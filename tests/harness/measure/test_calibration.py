"""`mode=calibrate` as a user meets it: what it leaves after, that its cluster file can be used, and how it ends."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from harness.cli.compose import compose
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.problem import CannotRun, Problem
from harness.core.record import RunRecord
from harness.host import devices
from harness.launch import fork_server
from harness.measure import calibration
from harness.measure.calibration_result import Calibration
from harness.run import runner
from harness.simulator.routes import STEPS
from tests.harness.measure.calibration_runs import NO_TORCH, TYPED, disturbed, python
from tests.problems import row, rows

pytestmark = pytest.mark.usefixtures("commands", "fork_server")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, cache: None) -> tuple[Path, str]:
    """A complete calibration: its folder, and what it printed."""
    folder = tmp_path_factory.mktemp("run")
    run = python(NO_TORCH, *TYPED, "steps=2", "warmup=0", f"out={folder}")
    out, err = run.communicate()
    assert run.returncode == 0, err
    return folder, out


def test_it_leaves_timings_a_picture_and_a_cluster(done: tuple[Path, str]) -> None:
    folder, _ = done
    assert {path.name for path in folder.iterdir()} == {
        ".lock", "config.yaml", "record.json", "log", "calibration.json", "calibration.png", "cluster"
    }  # fmt: skip
    found = Calibration.load(folder / "calibration.json")
    assert (found.backend, found.rounds, found.groups) == ("gloo", 2, [2])
    assert {t.name for t in found.timings} == set(STEPS) and len(found.timings) == 8 * len(STEPS)
    assert (folder / "calibration.png").read_bytes().startswith(b"\x89PNG")


def test_the_record_has_the_fit(done: tuple[Path, str]) -> None:
    folder, _ = done
    record, found = RunRecord.load(folder / "record.json"), Calibration.load(folder / "calibration.json")
    assert (record.status, record.source, record.plan) == ("ok", "measured", None)
    assert record.metrics == json.loads(json.dumps(found.metrics()))
    assert record.manifest["devices"] == ["cpu", "cpu"]


def test_it_prints_fits_and_the_command_that_uses_them(done: tuple[Path, str]) -> None:
    folder, out = done
    lines = out.splitlines()
    assert sum(line.startswith(tuple(STEPS)) for line in lines) == 3 * len(STEPS)
    assert sum("all together" in line for line in lines) == 2 and sum(" alone " in line for line in lines) == 4
    assert lines[-1] == f"use it: python run.py --config-dir {folder} mode=simulate cluster=calibrated"
    assert f"cluster  {folder}/cluster/calibrated.yaml" in lines


def test_its_cluster_can_be_planned_for(done: tuple[Path, str], tmp_path: Path) -> None:
    """As the file is, in the run's folder."""
    folder, _ = done
    layers = (LayerProfile("a", 0.1, 0.2, output_bytes=10**6), LayerProfile("b", 0.1, 0.2))
    ModelProfile(layers, "tiny", dtype="float32").save(tmp_path / "tiny.json")
    keys = [f"profile={tmp_path / 'tiny.json'}", "cluster=calibrated", "costs=measured", "planner=uniform"]
    run = python(NO_TORCH, "--config-dir", str(folder), "mode=plan", *keys, f"out={tmp_path}")
    _, err = run.communicate()
    assert run.returncode == 0, err
    cluster = RunRecord.load(tmp_path / "record.json").manifest["simulation"]["cluster"]
    chosen = Calibration.load(folder / "calibration.json").chosen
    assert (cluster["name"], cluster["devices_per_node"]) == ("calibrated", 2)
    assert cluster["intra"]["alpha_s"] == pytest.approx(chosen.alpha_s, rel=1e-3)
    assert cluster["intra"]["beta_s_per_byte"] == pytest.approx(chosen.beta_s_per_byte, rel=1e-3)
    assert cluster["host_link"]["beta_s_per_byte"] == pytest.approx(1e-10)


def refused(*typed: str) -> list[Problem]:
    with pytest.raises(CannotRun) as caught:
        calibration.ready(compose(["mode=calibrate", "cluster.device=cpu", *typed]))
    return list(caught.value.problems)


def test_one_device_has_nobody_to_speak_to() -> None:
    cores = devices.cores()
    (alone,) = refused("cluster.devices=1")
    assert row(alone) == ("cluster.devices", 1, ["cluster.devices=2"])
    assert f"({cores} core{'s' * (cores > 1)} found)" in alone.message


def test_all_problems_are_reported_at_once() -> None:
    assert rows(refused("cluster.nodes=2", "cluster.alpha_s=1e-5", "cluster.bandwidth_gb_s=6")) == [
        ("cluster.nodes", 2, ["cluster.nodes=1"]),
        ("cluster.bandwidth_gb_s", 6.0, ["without cluster.bandwidth_gb_s"]),
        ("cluster.alpha_s", 1e-5, ["without cluster.alpha_s"]),
    ]


def test_a_described_cluster_cannot_be_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And it leaves an earlier cluster file where it is."""
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "calibrated.yaml").write_text("mine")
    typed = ["mode=calibrate", "cluster=flat", f"out={tmp_path}"]
    record = runner.run(compose(typed), typed)
    assert record.status == "infeasible"
    assert "-> cluster=local" in capsys.readouterr().err
    assert (tmp_path / "cluster" / "calibrated.yaml").read_text() == "mine"


def test_no_engine_and_no_planner_has_a_say() -> None:
    bad = ["planner=given", "planner.balance=[0]"]
    with pytest.raises(CannotRun):
        compose(["mode=profile", *bad])
    compose(["mode=calibrate", *bad])


@pytest.mark.usefixtures("at_length")
def test_a_rank_that_is_killed_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of a worker that is not forked from a server are known by its command."""
    monkeypatch.delenv(fork_server.VARIABLE, raising=False)
    record = disturbed(tmp_path, lambda found: os.kill(found[-1], signal.SIGKILL))
    assert record.status == "error" and "rank 1 was killed (signal 9), not by the kernel" in record.reason
