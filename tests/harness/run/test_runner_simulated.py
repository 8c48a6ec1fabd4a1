"""`mode=simulate` and `mode=profile`, from the configuration to the record."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.cli.compose import compose
from harness.config.overrides import quoted
from harness.core.cluster import Cluster, Device, Link
from harness.core.model_profile import LayerProfile, LayerTimes, ModelProfile, Skip
from harness.core.products import Product
from harness.core.record import RunRecord
from harness.core.trace import Trace
from harness.core.units import percent, rate
from harness.host import devices, machine
from harness.host.machine import Machine
from harness.launch.supervisor import Outcome, WorkerFailed
from harness.measure.torch_trace import NODE, PREFIX
from harness.planning import prepare
from harness.planning.profiles import Profiles
from harness.run import runner
from tests.problems import row

pytestmark = pytest.mark.usefixtures("commands", "fork_server")

ROOT = Path(__file__).parents[3]
PEAKS = Device(devices.cpu_model(), 10**10, {"float32": 1e12}, 1e10, kernel_s=1e-6)
TINY = ["model=unet", "model.size=64", "model.channels=4", "model.convs=1"]
FLAT = ["cluster=flat", "cluster.devices=4", "cluster.memory_gb=1", "cluster.bandwidth_gb_s=1"]
KNOWN = ["cluster.peak_tflops.float32=10", "cluster.memory_bandwidth_gb_s=100", "cluster.efficiency=0.5"]
LAYER = LayerProfile("l", 1e-3, 2e-3, 1e9, 1e6, param_bytes=4000, output_bytes=10_000, saved_bytes=20_000)
PROFILE = ModelProfile(
    (LAYER,) * 8, "net_8", 2, input_bytes=100, skips=(Skip(0, 7, 500, "s"),), source="measured on X", times="measured"
)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory):
    """A cache of this module's own, in which the machine is known."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("REGATTA_CACHE", str(folder))
        machine.store(Machine(PEAKS, Link(1e-5, 1e-9), None, 1.8, 1.8))
        yield folder


@pytest.fixture
def file(tmp_path: Path) -> str:
    """An override that gives the profile of a small net."""
    PROFILE.save(tmp_path / "p.json")
    return quoted("profile", str(tmp_path / "p.json"))


def run(folder: Path, *overrides: str) -> RunRecord:
    typed = [*overrides, "tracker=none", quoted("out", str(folder))]
    record = runner.run(compose(typed), typed)
    assert RunRecord.load(folder / "record.json") == record
    return record


def simulate(folder: Path, *overrides: str) -> RunRecord:
    record = run(folder, "mode=simulate", *overrides)
    assert record.status == "ok", record.reason
    return record


def test_a_simulated_run_leaves_what_a_real_one_does(tmp_path: Path, file: str) -> None:
    record = simulate(tmp_path / "run", file, *FLAT, "batch.micro_batches=8")
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "config.yaml", "plan.json", "profile.json", "record.json", "timeline.png", "trace.json.gz", ".lock",
    }  # fmt: skip
    assert (record.source, record.trace) == ("simulated", "trace.json.gz")
    m = record.metrics
    assert m["loss"] is None
    assert m["throughput"] == pytest.approx(16 / m["step_time_s"])
    assert m["bubble_fraction"] == pytest.approx(1 - sum(m["utilization"]) / 4)
    assert m["model_flops_per_s"] == pytest.approx(3 * 8 * 8 * 1e9 / m["step_time_s"])
    assert m["percent_of_peak"] is None, "the cluster has no peak"
    assert m["bytes_sent"]["activations"] == 3 * 8 * 10_000
    assert m["bytes_sent"]["skips"] == 8 * 500
    trace = Trace.load(tmp_path / "run" / "trace.json.gz")
    assert trace.window_s == pytest.approx(m["step_time_s"])
    assert record.predicted["step_time_s"] == m["step_time_s"]


@pytest.mark.parametrize(
    ("typed", "reported"),
    [(["engine=gpipe"], "torch is loaded, and the model built"),
     (["engine=ddp", "mesh.data=3"], "3 ranks load torch and build the model")],
)  # fmt: skip
def test_it_says_how_many_ranks_start(
    tmp_path: Path, typed: list[str], reported: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(folder: Path, title: str, timeout_s: float, action: str, *more: object, **named: object) -> None:
        if action == "train":
            raise WorkerFailed(Outcome("error", "stopped by the test"))

    monkeypatch.setattr(runner.supervisor, "run_worker", stopped)
    monkeypatch.setenv("REGATTA_CACHE", str(tmp_path / "cache"))
    device = Device(devices.cpu_model(), 10**10, {"float32": 1e12}, 1e10)
    machine.store(Machine(device, Link(1e-5, 1e-9), cores=2.0, process_cores=2.0))
    replace(PROFILE, model="unet").save(tmp_path / "p.json")
    file = quoted("profile", str(tmp_path / "p.json"))
    record = run(tmp_path / "run", "model=unet", file, "cluster.device=cpu", "cluster.devices=3", *typed)
    assert record.reason == "stopped by the test"
    assert f"starting  {reported}\n" in capsys.readouterr().out


@pytest.mark.parametrize(("slowed", "reported"), [(1.0, False), (2.5, True)])
@pytest.mark.parametrize("mode", ["plan", "simulate", "profile", "tune"])
def test_times_of_a_busy_machine_are_noted(
    tmp_path: Path, file: str, mode: str, slowed: float, reported: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    replace(PROFILE, slowed=slowed).save(tmp_path / "p.json")
    run(tmp_path / "run", f"mode={mode}", file, *FLAT)
    out = capsys.readouterr().out
    assert (
        "was measured on a busy machine: layers took about 2.50 times what they take alone   -> " in out
    ) == reported
    assert re.search(r"p\.json, \d+ s old", out), "how old the profile is"


def test_a_real_run_has_the_same_names(tmp_path: Path, file: str) -> None:
    real = {"step_time_s", "throughput", "utilization", "peak_memory_bytes", "bubble_fraction", "loss", "bytes_sent",
            "model_flops_per_s", "percent_of_peak"}  # fmt: skip
    assert real <= set(simulate(tmp_path / "run", file, *FLAT).metrics)


def test_each_device_says_when_it_is_fullest_and_of_what(tmp_path: Path, file: str) -> None:
    m = simulate(tmp_path / "run", file, *FLAT).metrics
    assert [peak["bytes"] for peak in m["peaks"]] == m["peak_memory_bytes"]
    for peak in m["peaks"]:
        assert sum(peak["contents"].values()) == peak["bytes"]
        assert 0 <= peak["at_s"] <= m["step_time_s"]


def test_the_record_says_what_the_numbers_rest_on(tmp_path: Path, file: str) -> None:
    record = simulate(tmp_path / "run", file, *FLAT, "cluster.alpha_s=1e-6", "jitter=0.1", "seed=5")
    basis = record.manifest["simulation"]
    cluster = Cluster.from_json(basis.pop("cluster"))
    assert cluster.devices == 4 and cluster.intra == Link(1e-6, 1e-9)
    assert " s old" in basis.pop("profile")
    assert basis == {"costs": "measured", "layer_times": "measured on X", "slowed": 1.0, "lock_share": 0.0,
                     "model": "net_8", "values": "nominal", "note":
                             "layer times   are those of the profile (measured on X), not known to be of flat   -> "
                             "its data sheet's TFLOP/s as cluster.peak_tflops.float32 and "
                             "its data sheet's GB/s as cluster.memory_bandwidth_gb_s, with costs=analytic",
                     "upper_bound": False, "jitter": 0.1, "seed": 5}  # fmt: skip
    assert record.manifest["devices"] == ["flat"] * 4


def test_jitter_follows_from_its_seed_and_leaves_the_prediction_alone(tmp_path: Path, file: str) -> None:
    def step_s(name: str, *more: str) -> float:
        record = simulate(tmp_path / name, file, *FLAT, *more)
        expected.add(record.predicted["step_time_s"])
        return record.metrics["step_time_s"]

    expected: set[float] = set()
    exact, first = step_s("a"), step_s("b", "jitter=0.2", "seed=1")
    assert first == step_s("c", "jitter=0.2", "seed=1")
    assert len({exact, first, step_s("d", "jitter=0.2", "seed=2")}) == 3
    assert expected == {exact}


@pytest.mark.parametrize("cluster", [[], [*FLAT, *KNOWN]], ids=["local", "flat"])
def test_a_stored_profile_needs_no_torch_and_no_measurement(
    tmp_path: Path, file: str, cluster: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REGATTA_CACHE", str(tmp_path / "empty"))
    code = f"""
import sys, run
code = run.main({["mode=simulate", file, *cluster, quoted("out", str(tmp_path / "run"))]})
sys.exit("torch was imported" if "torch" in sys.modules else code)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "empty").exists() and not (tmp_path / "run" / "log").exists(), "no child was started"
    assert "measured on X" in done.stdout and "nominal values" in done.stdout
    assert "net_8: ok (simulated)" in done.stdout.splitlines()[-1]
    assert "measured  predicted" not in done.stdout
    assert "predicted: " not in done.stdout, "the figures are those of the table"
    notes = [line.split()[1:3] for line in done.stdout.splitlines() if line.startswith("note ")]
    assert notes == ([["layer", "times"]] if cluster else [])


def test_a_tracker_is_reported_only_if_the_user_asks_for_one(tmp_path: Path, file: str) -> None:
    typed = ["mode=simulate", file, *FLAT]
    for more, there in (["a"], False), (["b", "tracker=wandb"], True):
        given = [*typed, *more[1:], quoted("out", str(tmp_path / more[0]))]
        assert runner.run(compose(given), given).status == "ok"
        assert (tmp_path / more[0] / "wandb").exists() == there


def test_a_model_is_counted_once_and_priced_on_the_described_device(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = [*TINY, *FLAT, *KNOWN, "batch.size=8", "batch.micro_batches=2"]
    first = simulate(tmp_path / "a", *typed)
    assert "counting  engine=gpipe model=unet cluster=flat, micro-batches of 4\n" in capsys.readouterr().out
    assert first.manifest["simulation"]["costs"] == "analytic"
    profile = ModelProfile.load(tmp_path / "a" / "profile.json")
    assert profile.source.startswith("analytic on flat") and profile.layers[0].forward_s > 0
    assert first.metrics["percent_of_peak"] == pytest.approx(100 * first.metrics["model_flops_per_s"] / 4e13)

    again = simulate(tmp_path / "b", *typed, "cluster.efficiency=0.25")
    sheet = simulate(tmp_path / "c", *typed, "cluster.efficiency=1")
    assert not (tmp_path / "b" / "log").exists(), "no child: the counts are in the cache, without times"
    assert again.metrics["step_time_s"] > 1.5 * first.metrics["step_time_s"]
    bounds = [one.manifest["simulation"]["upper_bound"] for one in (first, again, sheet)]
    assert bounds == [False, False, True], "efficiency 1 is that of a data sheet"
    assert len([path for path in (cache / "profiles").iterdir() if "unet-4-" in path.name]) == 1


@pytest.mark.parametrize("mode", ["plan", "simulate"])
def test_speeds_of_each_device_are_printed(tmp_path: Path, mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a described cluster: four tokens of each of 16 samples, and what the devices reach of their peak."""
    words = replace(LAYER, products=(Product("", "embedding", 4, 10, 8),))
    replace(PROFILE, layers=(words, *PROFILE.layers[1:])).save(tmp_path / "p.json")
    file = quoted("profile", str(tmp_path / "p.json"))
    record = run(tmp_path / "run", f"mode={mode}", file, *FLAT, *KNOWN, "costs=analytic", "batch.size=16")
    step_s = record.predicted["step_time_s"]
    tokens, share = rate(16 * 4 / step_s / 4, "tokens/s"), percent(16 / 2 * 3 * 8e9 / step_s / 4e13)
    out = capsys.readouterr().out
    if mode == "plan":
        assert f" samples/s, {tokens} per device, MFU {share}\n" in out
    else:
        assert re.search(rf"of each device +{re.escape(tokens)}\n", out)
        assert re.search(rf"of devices' peak \(MFU\) +{re.escape(share)}\n", out)


@pytest.mark.usefixtures("commands")
def test_a_profile_from_a_trace_of_torch_profiler(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two passes of three layers, each operator with its node in the backward pass."""
    layers = ["linear_0", "relu_0", "linear_1"]
    events: list[dict[str, Any]] = []
    for number in range(2):
        for layer in range(3):
            at = 1000 * number + 100 * layer
            span = {"ph": "X", "ts": at, "dur": 100, "tid": 1, "name": f"{PREFIX}{layers[layer]}"}
            node = {"ph": "X", "ts": at + 500, "dur": 10 * (1 + layer), "tid": 2, "name": f"{NODE}B"}
            flow = {"cat": "fwdbwd", "id": len(events)}
            begin, end = {"ph": "s", "ts": at + 1, "tid": 1}, {"ph": "f", "ts": at + 501, "tid": 2}
            events += [span, node, flow | begin, flow | end]
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": events}))
    record = run(
        tmp_path / "a", "mode=profile", "model=mlp", "model.widths=[4,4,2]", quoted("trace", str(tmp_path / "t.json"))
    )
    profile = ModelProfile.load(tmp_path / "a" / "profile.json")
    assert [(layer.name, layer.forward_s) for layer in profile.layers] == [
        (name, pytest.approx(1e-4)) for name in layers
    ]
    assert [layer.backward_s for layer in profile.layers] == pytest.approx([1e-5, 2e-5, 3e-5])
    assert (record.status, record.source) == ("ok", "measured")
    assert "torch.profiler, t.json: CPU, 2 forward and backward passes" in capsys.readouterr().out
    stored = quoted("profile", str(tmp_path / "a" / "profile.json"))
    assert simulate(tmp_path / "b", stored, *FLAT, "engine=single").metrics["step_time_s"] > 3e-4


@pytest.mark.usefixtures("commands")
def test_a_profile_of_the_model_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Engine and planner have no say: neither a stage too many nor a dtype that gpipe lacks is looked at."""
    record = run(tmp_path / "a", *TINY, "mode=profile", "batch.micro_batches=8", "mesh.pipeline=99")
    assert (record.status, record.source, record.plan, record.metrics) == ("ok", "measured", None, {})
    measured = ModelProfile.load(tmp_path / "a" / "profile.json")
    assert measured.micro_batch == 2 and measured.device == PEAKS
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "profiling  model=unet, micro-batches of 2"
    assert said[-1] == f"profile: {tmp_path / 'a' / 'profile.json'}"

    record = run(tmp_path / "b", *TINY, "mode=profile", "costs=analytic")
    analytic = ModelProfile.load(tmp_path / "b" / "profile.json")
    assert record.source == "simulated" and (measured.times, analytic.times) == ("measured", "analytic")
    assert [layer.flops for layer in analytic.layers] == [layer.flops for layer in measured.layers]
    assert analytic.skips == measured.skips

    record = simulate(tmp_path / "c", f"profile={tmp_path / 'a' / 'profile.json'}", *FLAT, *KNOWN, "costs=scaled")
    assert record.manifest["simulation"]["costs"] == "scaled"


@pytest.mark.parametrize(("times", "taken"), [("measured", "scaled"), ("analytic", "analytic")])
def test_a_profile_of_another_device_is_not_taken_for_the_clusters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], times: LayerTimes, taken: str
) -> None:
    replace(PROFILE, device=PEAKS, times=times).save(tmp_path / "p.json")
    typed = [quoted("profile", str(tmp_path / "p.json")), *FLAT]
    record = simulate(tmp_path / "a", *typed, *KNOWN)
    assert record.manifest["simulation"]["costs"] == taken
    assert "note  " not in capsys.readouterr().out

    assert run(tmp_path / "b", "mode=plan", *typed).status == "ok"
    said = capsys.readouterr().out.splitlines()
    assert said[-4].startswith("predicted: ") and said[-1].startswith("plan: ")
    assert said[-2].startswith(
        "note: layer times   are those of the profile (measured on X), not of flat   -> its data sheet"
    )


def test_what_a_request_loses_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replace(PROFILE, autocast="float16").save(tmp_path / "p.json")
    typed = [quoted("profile", str(tmp_path / "p.json")), *FLAT, "planner.by=parameters", "precision.autocast=float16"]
    assert run(tmp_path / "a", "mode=plan", *typed).status == "ok"
    assert "note: precision.autocast float16" in capsys.readouterr().out


def test_a_stored_profile_without_times_is_priced_here(tmp_path: Path) -> None:
    timeless = tuple(replace(layer, forward_s=0.0, backward_s=0.0) for layer in PROFILE.layers)
    replace(PROFILE, layers=timeless).save(tmp_path / "p.json")
    record = simulate(tmp_path / "a", quoted("profile", str(tmp_path / "p.json")), "cluster.device=cpu")
    assert record.manifest["simulation"]["costs"] == "analytic"
    assert record.manifest["simulation"]["values"] == "measured"
    assert record.manifest["simulation"]["upper_bound"] is False, "its peaks are measured"


def test_a_profile_of_other_micro_batches_that_does_not_fit_either(tmp_path: Path, file: str) -> None:
    record = run(tmp_path / "run", file, *FLAT, "cluster.memory_gb=0.0001", "batch.size=512", "mode=simulate")
    assert [(one.key, one.value) for one in record.problems] == [
        ("profile", str(tmp_path / "p.json")), ("cluster.memory_gb", 0.0001)
    ]  # fmt: skip
    assert all(problem.fixes or problem.hint for problem in record.problems)
    assert RunRecord.load(tmp_path / "run" / "record.json") == record


def test_a_profile_needs_a_batch_that_divides(tmp_path: Path) -> None:
    record = run(tmp_path, *TINY, "mode=profile", "batch.micro_batches=7")
    assert record.status == "infeasible"
    assert record.reason.startswith("model=unet cannot run:\n  batch.micro_batches 7   ")
    assert record.reason.endswith("-> batch.micro_batches=8, or batch.micro_batches=4")


def test_a_profile_without_the_skips_of_its_model(tmp_path: Path) -> None:
    assert run(tmp_path / "a", *TINY, *FLAT, *KNOWN, "mode=profile").status == "ok"
    profile = ModelProfile.load(tmp_path / "a" / "profile.json")
    replace(profile, skips=()).save(tmp_path / "p.json")
    file = quoted("profile", str(tmp_path / "p.json"))
    record = run(tmp_path / "b", *TINY, *FLAT, file, "mode=simulate")
    assert record.status == "infeasible"
    (problem,) = record.problems
    assert row(problem) == ("profile", str(tmp_path / "p.json"), ["without profile"])
    assert problem.hint.startswith("python run.py mode=profile model=")
    assert simulate(tmp_path / "c", *FLAT, file).status == "ok", "a profile alone stands for itself"


@pytest.mark.parametrize(
    ("typed", "reported"),
    [
        (["costs=scaled"], "costs scaled   "),
        (["costs=scaled", *FLAT, *KNOWN, "profile=FILE"], "does not know the float32 peak"),
        (["costs=analytic", *FLAT, "profile=FILE"], "cluster.peak_tflops.float32 "),
        (["mesh.pipeline=5", *FLAT, "profile=FILE"], "mesh.pipeline 5   "),
        (["mode=run", *FLAT], "cluster flat   "),
    ],
    ids=["scaled here", "unknown device", "no peak", "too few devices", "not here"],
)
def test_what_cannot_be_simulated(tmp_path: Path, file: str, typed: list[str], reported: str) -> None:
    typed = [file if key == "profile=FILE" else key for key in typed]
    record = run(tmp_path / "run", "mode=simulate", *typed)
    assert record.status == "infeasible"
    assert reported in record.reason


@pytest.mark.usefixtures("commands")
def test_this_machine_is_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For real, in a cache in which nothing is known of it; the profile is given, so that only peaks are needed."""
    monkeypatch.setenv("REGATTA_CACHE", str(tmp_path / "cache"))
    PROFILE.save(tmp_path / "p.json")
    typed = [quoted("profile", str(tmp_path / "p.json")), "costs=analytic", "cluster.device=cpu", "cluster.devices=2"]
    record = simulate(tmp_path / "a", *typed)
    assert "measuring this machine" in capsys.readouterr().out
    (kept,) = (tmp_path / "cache" / "machines").iterdir()
    device = Machine.load(kept).device
    assert record.manifest["simulation"]["values"] == "measured"
    assert record.manifest["simulation"]["cluster"]["device"]["peak_flops"] == device.peak_flops
    assert not (tmp_path / "a" / "machine.json").exists()

    simulate(tmp_path / "b", *typed)
    assert "measuring this machine" not in capsys.readouterr().out
    assert json.loads((tmp_path / "b" / "profile.json").read_text())["device"]["name"] == device.name
    assert not Machine.load(kept).knows_processes

    simulate(tmp_path / "c", *typed, "engine=pipeline")
    assert "what processes call" in capsys.readouterr().out
    both = Machine.load(kept)
    assert both.knows_processes and both.device == device
    simulate(tmp_path / "d", *typed, "engine=pipeline")
    assert "measuring this machine" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "parts"),
    [(["mode=profile"], "threads"), (["mode=profile", "remeasure=true"], "threads"), (["mode=plan"], "all")],
)
def test_a_profile_needs_nothing_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: list[str], parts: str
) -> None:
    """Whatever the engine is: it is of none."""
    asked: list[str] = []

    def measure(folder: Path, title: str, limit_s: float, kind: str, tf32: bool, parts: str) -> Machine:
        asked.append(parts)
        return Machine(PEAKS, Link(1e-5, 1e-9), None, 1.8, 0.0 if parts == "threads" else 1.8)

    monkeypatch.setenv("REGATTA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(prepare.supervisor, "measure_machine", measure)
    monkeypatch.setattr(Profiles, "made", lambda self, origin: replace(PROFILE, model="unet", device=PEAKS))
    keys = ["engine=ddp", "cluster.device=cpu", "cluster.devices=2", "cluster.task_s=1e-3", "batch.size=32"]
    record = run(tmp_path / "run", *typed, *keys)
    assert (record.status, asked) == ("ok", [parts]), record.reason
