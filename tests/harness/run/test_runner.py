"""Whole runs of a tiny U-Net: what they leave after, and how they end."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from harness.cli.compose import compose
from harness.config import registry
from harness.core import files, run_files
from harness.core.model_profile import ModelProfile
from harness.core.plan import Plan
from harness.core.problem import CannotRun
from harness.core.record import RunRecord
from harness.core.run_files import REFUSED
from harness.core.trace import Trace
from harness.launch import supervisor
from harness.launch.failure import DISK_FULL
from harness.run import metrics as run_metrics
from harness.run import runner
from harness.run.run_folder import NEW
from harness.trackers import none
from tests.support import known_machine, processes
from tests.support.recorder import Recorder
from tests.support.violations import violations

pytestmark = pytest.mark.usefixtures("commands", "fork_server")

ROOT = Path(__file__).parents[3]
TINY = ["model.size=64", "model.channels=4", "model.convs=1", "batch.size=4", "batch.micro_batches=2",
        "cluster.device=cpu", "cluster.devices=2", "tracker=none", "steps=2", "warmup=2"]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """A cache of this module's own: the tiny model is profiled once, the machine is known."""
    with known_machine.known(tmp_path_factory):
        yield


def run(folder: Path, *overrides: str) -> RunRecord:
    """One run; what is on disk is what was returned."""
    typed = [*TINY, *overrides, f"out={folder}"]
    record = runner.run(compose(typed), typed)
    assert RunRecord.load(folder / "record.json") == RunRecord.from_json(record.to_json())
    return record


@pytest.fixture(scope="module")
def tracker():
    return Recorder()


@pytest.fixture(scope="module")
def done(tmp_path_factory, cache, tracker):
    """A complete run: its folder."""
    folder = tmp_path_factory.mktemp("sweep") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(none, "build", lambda config: tracker)
        assert run(folder, "engine=gpipe").status == "ok"
    return folder


def test_a_run_leaves_all_its_files(done):
    assert {path.name for path in done.iterdir()} == {
        "config.yaml", "plan.json", "profile.json", "record.json", "log", "metrics.jsonl", "simulated.json.gz",
        "timeline.png", "trace.json.gz", ".lock", "checkpoints",
    }  # fmt: skip
    assert (done / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_the_record_reports_all(done):
    record = RunRecord.load(done / "record.json")
    assert (record.status, record.source, record.reason, record.trace) == ("ok", "measured", "", "trace.json.gz")
    assert record.config["model"]["channels"] == 4
    assert record.manifest["overrides"][0] == "model.size=64"
    assert (record.manifest["devices"], record.manifest["threads"]) == (["cpu", "cpu"], 1)
    plan = Plan.load(done / "plan.json")
    assert record.plan == plan.to_json() and len(plan.stages) == 2
    assert record.predicted.items() >= plan.predicted.items()
    assert record.predicted["parts_s"].keys() == record.metrics["parts_s"].keys()
    assert record.predicted["step_time_s"] > 0


def test_measured_and_predicted_side_by_side(done):
    record = RunRecord.load(done / "record.json")
    m, p = record.metrics, record.predicted
    assert m["throughput"] == pytest.approx(4 / m["step_time_s"])
    assert len(m["utilization"]) == len(m["peak_memory_bytes"]) == len(p["peak_memory_bytes"]) == 2
    assert m["bubble_fraction"] == pytest.approx(1 - sum(m["utilization"]) / 2)
    assert m["bytes_sent"] and m["model_flops_per_s"] > 0 and m["threads"] == 1
    assert m["loss"] != m["first_loss"]
    ratios = m["predicted_over_measured"]
    assert ratios["step_time_s"] == pytest.approx(p["step_time_s"] / m["step_time_s"])
    assert all(0.6 < one < 1.1 for one in ratios["peak_memory_bytes"]), "less than 0.9 where a device is late"
    assert m["percent_of_peak"] == pytest.approx(100 * m["model_flops_per_s"] / 2e12)


def test_what_the_prediction_rests_on(done):
    record = RunRecord.load(done / "record.json")
    basis = record.manifest["simulation"]
    assert (basis["costs"], basis["values"], basis["jitter"]) == ("measured", "measured", 0.0)
    cores = min(1.8, 2 / (1 + basis["lock_share"]))
    assert basis["cluster"]["intra"]["alpha_s"] == 1e-5 and basis["cluster"]["cores"] == cores
    profile = ModelProfile.load(done / "profile.json")
    assert basis["layer_times"] == profile.source
    assert profile.device == known_machine.MACHINE.device, "so that it can be scaled to another device"


def test_the_prediction_is_a_trace_too(done):
    predicted = RunRecord.load(done / "record.json").predicted
    trace = Trace.load(done / "simulated.json.gz")
    assert trace.window_s == pytest.approx(predicted["step_time_s"])
    assert trace.utilization([0, 1]) == pytest.approx(predicted["utilization"])


def test_a_line_for_each_step(done):
    lines = [json.loads(line) for line in (done / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["phase"]) for line in lines] == [
        (0, "warmup"), (1, "warmup"), (2, "measured"), (3, "measured")
    ]  # fmt: skip


def test_the_trace_is_what_the_schedule_allows(done):
    trace = Trace.load(done / "trace.json.gz")
    assert len(trace.steps) == 2 and trace.steps[0][0] == 0
    config = OmegaConf.load(done / "config.yaml")
    engine = registry.build("engine", config.engine)
    schedule = engine.schedule(Plan.load(done / "plan.json"), ModelProfile.load(done / "profile.json"))
    for step in (0, 1):
        assert violations(schedule, trace.only(step), tolerance_s=1e-6) == []


def test_the_tracker_mirrors_the_run(done, tracker):
    record = RunRecord.load(done / "record.json")
    kinds = [kind for kind, *_ in tracker.reported]
    assert kinds == ["start", "log", "log", "log", "log", "finish"]
    _, record_id, group, job_type, tags, config, folder = tracker.reported[0]
    assert (record_id, group, job_type, folder) == (record.id, done.parent.name, "gpipe", done)
    assert tags == ["unet", "local", "measured"] and config == record.config
    assert [step for _, step, _ in tracker.reported[1:5]] == [0, 1, 2, 3]
    assert tracker.reported[1][2]["throughput"] == pytest.approx(4 / tracker.reported[1][2]["step_time_s"])
    assert tracker.reported[5][1:] == (record.metrics, {"timeline": done / "timeline.png"}, "ok")


def test_the_written_configuration_runs_again(done):
    typed = [*TINY, "engine=gpipe", f"out={done}", "launch.end_checkpoint=true"]
    assert OmegaConf.load(done / "config.yaml") == compose(typed)


def test_a_plan_stops_after_the_prediction_and_needs_no_torch(done, tmp_path):
    code = f"""
import sys
from harness.cli import compose
from harness.run import runner
typed = {[*TINY, "mode=plan", f"out={tmp_path}"]}
assert runner.run(compose.compose(typed), typed).status == "ok"
print("torch" in sys.modules)
"""
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "False"
    assert "stage  device  layers" in out and f"plan: {tmp_path / 'plan.json'}" in out
    record = RunRecord.load(tmp_path / "record.json")
    assert (record.status, record.source, record.metrics) == ("ok", "simulated", {})
    assert record.predicted["peak_memory_bytes"] and not (tmp_path / "metrics.jsonl").exists()


def test_a_stored_profile_stands_for_its_model(done, tmp_path):
    typed = ["mode=plan", f"profile={done / 'profile.json'}", "cluster=flat", "cluster.devices=4"]
    typed.append("batch.micro_batches=64")
    record = runner.run(compose([*typed, f"out={tmp_path}"]), typed)
    assert record.status == "ok"
    assert len(record.plan["stages"]) == 4
    samples = ModelProfile.load(done / "profile.json").micro_batch
    assert record.config["batch"]["size"] == 64 * samples, "the batch follows from the profile"


def test_all_problems_are_printed_at_once(done, tmp_path, capsys):
    """The profile is there already, so that the memory of each stage is checked too."""
    record = run(tmp_path, "mesh.pipeline=16", "batch.size=5", "cluster.memory_gb=0.0001")
    assert record.status == "infeasible"
    reported = capsys.readouterr().err.splitlines()
    assert reported[0] == "engine=gpipe model=unet cannot run:"
    assert [line.split("  ")[1] for line in reported[1:] if not line.startswith("   ")] == [
        "mesh.pipeline 16", "batch.micro_batches 2", "cluster.memory_gb 0.0001",
    ]  # fmt: skip
    assert record.reason.splitlines() == reported


def test_problems_of_a_profile_that_cannot_be_read(tmp_path, capsys):
    (tmp_path / "p.json").write_text('{"layers": [{"forward_s": "soon"}]}')
    assert run(tmp_path / "run", f"profile={tmp_path / 'p.json'}", "mode=plan").status == "infeasible"
    printed = " ".join(capsys.readouterr().err.split())
    assert "layers[0].forward_s: expected a number, got 'soon'" in printed


@pytest.mark.parametrize(("key", "name"), [("model.channels=8", "unet_1_8_64"), ("model.size=128", "unet_1_4_128")])
def test_a_profile_of_another_size_is_found_out_by_the_rank(done, tmp_path, key, name):
    """Its family fits, its sizes don't, even where they leave the parameters as they are."""
    record = run(tmp_path, f"profile={done / 'profile.json'}", key)
    assert record.status == "infeasible"
    reason = " ".join(record.reason.split())
    assert f" profile {done / 'profile.json'} " in reason
    assert f"the model is {name} -> without profile" in reason


@pytest.fixture
def copied(done, tmp_path):
    """A folder with the complete run."""
    return Path(shutil.copytree(done, tmp_path / "run"))


def contents(folder: Path) -> dict[str, bytes]:
    """All files but the record of the last start, which was refused."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != REFUSED]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_a_run_that_cannot_run_keeps_an_earlier_good_one(copied, capsys):
    before = contents(copied)
    typed = [*TINY, "mesh.pipeline=16", f"out={copied}"]
    assert runner.run(compose(typed), typed).status == "infeasible"
    assert contents(copied) == before
    assert capsys.readouterr().err.splitlines()[-1] == f"the earlier run in {copied} is kept"


@pytest.mark.parametrize("mode", ["plan", "simulate", "tune", "profile", "calibrate"])
def test_no_other_mode_takes_the_place_of_a_run_that_has_trained(mode, copied, capsys):
    before = contents(copied)
    typed = [*TINY, f"mode={mode}", f"out={copied}"]
    assert runner.run(compose(typed), typed).status == "infeasible"
    assert contents(copied) == before
    assert f"-> out={copied}-{mode}" in " ".join(capsys.readouterr().err.split())


def test_another_mode_takes_the_place_of_a_run_without_a_checkpoint(done, copied):
    shutil.rmtree(copied / "checkpoints")
    replace(RunRecord.load(copied / "record.json"), status="error").save(copied / "record.json")
    typed = [*TINY, "mode=plan", f"out={copied}"]
    assert runner.run(compose(typed), typed).status == "infeasible", "the losses of its steps are in metrics.jsonl"
    (copied / "metrics.jsonl").unlink()
    assert run(copied, "mode=plan").status == "ok"
    assert run(copied, "mode=simulate").status == "ok"


def test_a_run_that_cannot_run_keeps_one_that_failed(done, copied):
    shutil.rmtree(copied / "checkpoints")
    replace(RunRecord.load(copied / "record.json"), status="error").save(copied / "record.json")
    before = contents(copied)
    typed = [*TINY, "mesh.pipeline=16", f"out={copied}"]
    record = runner.run(compose(typed), typed)
    assert record.status == "infeasible" and record == RunRecord.load(copied / REFUSED)
    assert contents(copied) == before


def test_a_start_that_fails_before_its_plan_keeps_an_earlier_run(copied, monkeypatch, capsys):
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    before = contents(copied)
    monkeypatch.setattr(runner.prepare, "prepare", broken)
    typed = [*TINY, "steps=9", f"out={copied}"]
    assert runner.run(compose(typed), typed).status == "error"
    assert "Traceback" in (copied / "refused.log").read_text()
    assert f"the ranks' output: {copied / 'refused.log'}" in capsys.readouterr().err
    (copied / "refused.log").unlink()
    assert contents(copied) == before


def test_a_run_that_cannot_run_takes_the_place_of_another_such(done, tmp_path):
    first = run(tmp_path, "mesh.pipeline=16")
    second = run(tmp_path, "mesh.pipeline=8")
    assert first.reason != second.reason
    assert set(contents(tmp_path)) == {".lock", "config.yaml", "profile.json", "record.json"}


def test_an_earlier_run_outlives_one_that_was_killed(copied):
    before = contents(copied)
    (copied / NEW).mkdir()
    (copied / NEW / "record.json").write_text("of the run that was killed")
    typed = [*TINY, "mesh.pipeline=16", f"out={copied}"]
    assert runner.run(compose(typed), typed).status == "infeasible"
    assert contents(copied) == before


def test_files_are_strict_json(done, tmp_path, monkeypatch):
    measured = run_metrics.measured
    monkeypatch.setattr(run_metrics, "measured", lambda *given: measured(*given) | {"loss": float("nan")})
    assert run(tmp_path).metrics["loss"] is None

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    json.loads((tmp_path / "record.json").read_text(), parse_constant=refuse)


def test_a_value_that_is_not_finite_is_a_problem_and_no_error(tmp_path):
    assert run(tmp_path, "cluster.memory_gb=inf").status == "infeasible"


def test_more_stages_than_devices_and_layers_is_one_problem(done, tmp_path):
    record = run(tmp_path, "mesh.pipeline=200")
    assert record.reason.count("mesh.pipeline 200") == 1 and "-> mesh.pipeline=2" in record.reason


def test_a_failing_rank_ends_the_run_with_its_reason(done, tmp_path, capsys):
    record = run(tmp_path, "optimizer.lr=1e30", "steps=20")
    assert record.status == "error"
    assert record.reason.startswith("Diverged: ") and "step" in record.reason and "rank 0, stage" in record.reason
    reported = capsys.readouterr().err
    assert record.reason in reported and f"the ranks' output: {tmp_path / 'log'}" in reported
    assert "Traceback" in (tmp_path / "log").read_text()
    assert not (tmp_path / "trace.json.gz").exists()


def test_a_rank_that_ends_after_the_last_step_leaves_no_result(done, tmp_path, monkeypatch):
    trained = supervisor.run_worker

    def ended(folder: Path, title: str, timeout_s: float | None, *action: str, **more: Any) -> None:
        trained(folder, title, timeout_s, *action, **more)
        if action[0] == "train":
            raise supervisor.WorkerFailed(supervisor.Outcome("error", "rank 0 ended by signal 2 (SIGINT)"))

    monkeypatch.setattr(supervisor, "run_worker", ended)
    assert run(tmp_path).status == "error"
    assert (tmp_path / "metrics.jsonl").exists() and not (tmp_path / "result.json").exists()


def test_a_signal_in_the_middle(done, tmp_path):
    def interrupt() -> None:
        for _ in range(1000):
            with suppress(FileNotFoundError):
                if (tmp_path / "metrics.jsonl").read_bytes():
                    break
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    record = run(tmp_path, "steps=100000")
    thread.join()
    assert (record.status, record.reason.partition(" after ")[0]) == ("preempted", "ended by SIGTERM")
    assert not processes.running(str(tmp_path))


def test_a_second_run_in_a_folder_begins_from_scratch(done, tmp_path):
    for name in run_files.ALL:
        (tmp_path / name).write_text("old")
    (tmp_path / "notes.txt").write_text("mine")
    assert run(tmp_path, "mode=plan").status == "ok"
    assert {path.name for path in tmp_path.iterdir()} == {
        "config.yaml", "plan.json", "profile.json", "record.json", "notes.txt", ".lock"
    }  # fmt: skip


def test_a_folder_that_is_none(tmp_path):
    (tmp_path / "file").write_text("")
    typed = [*TINY, f"out={tmp_path / 'file'}"]
    with pytest.raises(CannotRun, match="cannot be made a folder"):
        runner.run(compose(typed), typed)


@pytest.mark.parametrize("inside", ["sub", "checkpoints", "sub/deeper"])
def test_a_folder_in_that_of_a_run(copied, inside):
    before = contents(copied)
    typed = [*TINY, "mode=plan", f"out={copied / inside}"]
    with pytest.raises(CannotRun) as caught:
        runner.run(compose(typed), typed)
    (problem,) = caught.value.problems
    assert problem.fixes == ({"out": f"{copied}-2"},) and str(copied) in problem.message
    assert contents(copied) == before and not (copied / "sub").exists()


def test_runs_without_a_folder_of_their_own_lie_under_their_date(done, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    typed = [*TINY, "mode=plan"]
    ids = [runner.run(compose(typed), typed).id for _ in range(2)]
    assert len(set(ids)) == 2
    found = sorted(path.parent.relative_to(tmp_path) for path in tmp_path.glob("runs/*/*/record.json"))
    assert found == sorted(Path("runs", f"{i[:4]}-{i[4:6]}-{i[6:8]}", i) for i in ids)


@pytest.mark.parametrize("name", ["config.yaml", "profile.json", "plan.json"])
def test_a_full_disk(done, tmp_path, monkeypatch, name):
    """The file does not fit, the record still does."""
    write = files.write_bytes

    def write_bytes(path: Path, data: bytes) -> None:
        if path.name == name:
            raise OSError(28, "No space left on device")
        write(path, data)

    monkeypatch.setattr(files, "write_bytes", write_bytes)
    record = run(tmp_path, "mode=plan")
    assert (record.status, record.reason) == ("error", DISK_FULL)
    assert not (tmp_path / name).exists()


def test_a_record_that_does_not_fit_takes_the_place_of_the_profile(done, tmp_path, monkeypatch):
    write = files.write_bytes

    def write_bytes(path: Path, data: bytes) -> None:
        if path.name == "record.json" and (tmp_path / "plan.json").exists() and (tmp_path / "profile.json").exists():
            raise OSError(28, "No space left on device")
        write(path, data)

    monkeypatch.setattr(files, "write_bytes", write_bytes)
    assert run(tmp_path, "mode=plan").status == "error"
    assert not (tmp_path / "profile.json").exists()
