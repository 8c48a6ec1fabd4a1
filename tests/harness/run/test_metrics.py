"""What follows from a step's time: work per second, share of the peak, predicted over measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from omegaconf import OmegaConf

from harness.core.cluster import Cluster, Device
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.plan import Mesh, Plan
from harness.core.products import Product
from harness.host.devices import Kind
from harness.planning.draft import Draft
from harness.run import metrics
from harness.schedule.builders.gpipe import gpipe
from harness.simulator import simulate

PROFILE = ModelProfile(
    (LayerProfile("l", 1.0, 2.0, flops=1e9),) * 2, "net_2", 3, source="analytic on X", times="analytic"
)
PEAKS = {"float32": 1e11, "bfloat16": 4e11}
CLUSTER = Cluster("flat", 1, 2, Device(peak_flops=PEAKS))
RESULT: dict[str, Any] = {"step_time_s": 2.0, "peak_memory_bytes": [50, 100], "loss": 0.5}


def draft(**changes: Any) -> Draft:
    """Two stages of one layer, four micro-batches: 8 GFLOP forward."""
    plan = Plan.contiguous((1, 1), 4)
    schedule = gpipe(4, [0, 1], [], "never")
    simulation = simulate(schedule, plan, PROFILE, CLUSTER, MemoryModel())
    plan = replace(plan, predicted={"step_time_s": 3.0, "peak_memory_bytes": [100, 100]})
    return replace(Draft(plan, schedule, PROFILE, CLUSTER, MemoryModel(), simulation), **changes)


def config(threads: int | None = None) -> Any:
    made = OmegaConf.create({"engine": {"name": "x"}, "mode": "run", "jitter": 0.5, "seed": 3,
                             "cluster": {"name": "flat"}, "profile": None, "precision": {"tf32": False}})  # fmt: skip
    if threads is not None:
        made.engine.threads = threads
    return made


def test_predicted_over_measured() -> None:
    found = metrics.measured(RESULT, draft(), config(), "cpu")
    assert found["predicted_over_measured"] == {"step_time_s": 1.5, "peak_memory_bytes": [2.0, 1.0]}
    assert (found["loss"], found["threads"]) == (0.5, 1)
    unmetered = metrics.measured(RESULT | {"peak_memory_bytes": None}, draft(), config(), "cpu")
    assert unmetered["predicted_over_measured"]["peak_memory_bytes"] is None


@pytest.mark.parametrize(("cores", "kind", "slowed"), [(2, "cpu", 1.5), (1, "cpu", None), (1, "cuda", 1.5)])
def test_devices_that_are_more_than_cores_wait_for_one_another(
    cores: int, kind: Kind, slowed: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.host.devices.cores", lambda: cores)
    assert draft().devices == 2
    assert metrics.measured(RESULT | {"slowed": 1.5}, draft(), config(), kind)["slowed"] == slowed


def test_share_of_the_peak() -> None:
    """24 GFLOP in 2 s on two devices of 100 GFLOP/s: 6 %."""
    found = metrics.measured(RESULT, draft(), config(), "cpu")
    assert found["model_flops_per_s"] == pytest.approx(12e9)
    assert found["percent_of_peak"] == pytest.approx(6.0)


@pytest.mark.parametrize(
    ("changes", "threads", "kind", "percent"),
    [
        ({}, 2, "cpu", 3.0),
        ({}, 2, "cuda", 6.0),
        ({"profile": replace(PROFILE, autocast="bfloat16")}, 1, "cpu", 1.5),
        ({"profile": replace(PROFILE, dtype="float64")}, 1, "cpu", None),
        ({"cluster": Cluster()}, 1, "cpu", None),
        ({"profile": ModelProfile((LayerProfile(),) * 2)}, 1, "cpu", None),
        ({"plan": replace(draft().plan, mesh=Mesh(2, 2, 1))}, 1, "cpu", 6.0),  # twice the work on twice the devices
    ],
    ids=["threads", "threads of a GPU's host", "autocast", "no peak", "no peaks", "no work", "replicas"],
)
def test_the_peak_is_that_of_format_threads_and_devices(
    changes: dict[str, Any], threads: int, kind: Any, percent: float | None
) -> None:
    found = metrics.measured(RESULT, draft(**changes), config(threads), kind)["percent_of_peak"]
    assert found == (None if percent is None else pytest.approx(percent))


@pytest.mark.parametrize(
    ("autocast", "tf32", "tflops"), [(None, False, 67), (None, True, 494), ("bfloat16", True, 989)]
)
def test_the_share_of_the_peak_in_the_data_sheet(autocast: str | None, tf32: bool, tflops: float) -> None:
    made = config()
    made.precision.tf32 = tf32
    there = replace(CLUSTER, device=replace(CLUSTER.device, name="NVIDIA H100 80GB HBM3"))
    of_h100 = draft(cluster=there, profile=replace(PROFILE, autocast=autocast))
    found = metrics.measured(RESULT, of_h100, made, "cuda")["data_sheet_percent_of_peak"]
    assert found == pytest.approx(100 * 12e9 / (2e12 * tflops))
    assert metrics.measured(RESULT, draft(), made, "cuda")["data_sheet_percent_of_peak"] is None
    assert "data_sheet_percent_of_peak" not in metrics.measured(RESULT, of_h100, made, "cpu")


def test_the_hardware_does_what_is_recomputed_too() -> None:
    """8 GFLOP forward once more, as whole stages, or inside backward passes; three quarters of it but for the last."""
    assert metrics.measured(RESULT, draft(), config(), "cpu")["hardware_flops_per_s"] == pytest.approx(12e9)
    found = metrics.measured(RESULT, draft(schedule=gpipe(4, [0, 1], [], "always")), config(), "cpu")
    assert (found["hardware_flops_per_s"], found["model_flops_per_s"]) == (pytest.approx(16e9), pytest.approx(12e9))
    assert (found["hardware_percent_of_peak"], found["percent_of_peak"]) == (pytest.approx(8.0), pytest.approx(6.0))
    some = metrics.measured(RESULT, draft(schedule=gpipe(4, [0, 1], [], "except_last")), config(), "cpu")
    assert some["hardware_flops_per_s"] == pytest.approx(15e9)
    one = replace(PROFILE, layers=(replace(PROFILE.layers[0], recomputed_flops=1e9), PROFILE.layers[1]))
    inside = metrics.measured(RESULT, draft(profile=one), config(), "cpu")
    assert inside["hardware_flops_per_s"] == pytest.approx(14e9)


def test_simulated_figures_have_no_loss_but_peaks() -> None:
    made = draft()
    found = metrics.simulated(made.simulation, made, config())
    assert found["loss"] is None
    assert found["throughput"] == pytest.approx(12 / found["step_time_s"])
    assert [peak["device"] for peak in found["peaks"]] == [0, 1]
    assert "predicted_over_measured" not in found


def test_tokens_are_those_of_each_device_too() -> None:
    """Twelve samples of eight tokens each on two devices."""
    words = LayerProfile("e", 1.0, 2.0, flops=1e9, products=(Product("", "embedding", 8, 100, 4),))
    made = draft(profile=replace(PROFILE, layers=(words, PROFILE.layers[1])))
    found = metrics.simulated(made.simulation, made, config())
    assert found["tokens_per_s"] == pytest.approx(96 / found["step_time_s"])
    assert found["tokens_per_s_per_device"] == found["tokens_per_s"] / 2
    assert metrics.simulated(made.simulation, draft(), config())["tokens_per_s_per_device"] is None
    real = metrics.measured(RESULT | {"tokens_per_s": 50.0}, made, config(), "cpu")
    assert real["tokens_per_s_per_device"] == 25.0


@pytest.mark.parametrize(("cores", "share"), [(0.0, 1.0), (2.0, 0.5)])
def test_cpu_devices_have_the_threads_of_their_engine_in_simulations(cores: float, share: float) -> None:
    made = draft(cluster=replace(CLUSTER, cores=cores))
    one, two = (metrics.simulated(made.simulation, made, config(count))["percent_of_peak"] for count in (1, 2))
    assert two == pytest.approx(share * one)


def test_what_numbers_rest_on() -> None:
    basis = metrics.basis(draft(), config(), "effective")
    assert (basis["costs"], basis["values"], basis["model"]) == ("analytic", "effective", "net_2")
    assert basis["jitter"] == 0.0, "only mode=simulate disturbs"
    unknown = draft(profile=replace(PROFILE, times="as given"))
    assert metrics.basis(unknown, config(), "nominal")["costs"] == "as given"


def test_times_of_another_device_are_noted_on_a_described_cluster() -> None:
    chosen = config()
    assert metrics.basis(draft(), chosen, "nominal")["note"].startswith("layer times   are those of this machine (")
    chosen.profile = "p.json"
    assert metrics.basis(draft(), chosen, "nominal")["note"].startswith("layer times   are those of the profile (")
    own = draft(profile=replace(PROFILE, device=CLUSTER.device))
    assert metrics.basis(own, chosen, "nominal")["note"] == ""
    chosen.cluster.name = "local"
    assert metrics.basis(draft(), chosen, "nominal")["note"] == ""
