from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from harness.config import registry
from harness.core.cluster import Cluster, Device, Duplex, Link
from harness.core.memory_model import NAMED
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.plan import Plan
from harness.core.problem import CannotRun, NoPlan
from harness.interfaces import BatchShape, PlanRequest
from planners import contiguous
from planners.contiguous import Config
from tests.problems import refused, row, rows

ROOT = Path(__file__).parents[2]
GB = 10**9
PROFILE = ModelProfile(
    tuple(
        LayerProfile(f"layer_{i}", seconds / 3, 2 * seconds / 3, param_bytes=GB // 10, output_bytes=size)
        for i, (seconds, size) in enumerate([(1.0, 2 * GB), (1.0, GB), (1.0, GB), (3.0, GB // 2)])
    ),
    "four",
    input_bytes=GB,
    source="analytic on paper",
)


def plan(gb: float, devices: int = 2, bandwidth: float = 100.0, duplex: Duplex = "half") -> Plan:
    device = Device(memory_bytes=round(gb * GB))
    cluster = Cluster(devices_per_node=devices, device=device, intra=Link(0.0, 1 / (bandwidth * GB), duplex))
    planner = contiguous.build(Config(duplex="cluster"))
    return planner.plan(PROFILE, cluster, NAMED["madpipe_paper"], PlanRequest(BatchShape(4, 4), devices))


def test_with_memory_the_loads_are_balanced() -> None:
    found = plan(100)
    assert found.balance == (3, 1)
    assert [stage.device for stage in found.stages] == [0, 1]
    assert found.predicted["period_s"] == pytest.approx(3.0)
    assert found.predicted["activations"] == [3, 1]  # the message, too, is in a group of its own
    held = [0.9 + 3 * (1 + 2 + 1) + 2 * 1, 0.3 + 1 + 2 * 1]  # 3 W + g a + buffers, in GB
    assert found.predicted["pattern_memory_bytes"] == pytest.approx([GB * each for each in held])
    assert Plan.from_json(found.to_json()) == found


def test_with_less_memory_the_period_is_longer_and_every_device_fits() -> None:
    """Two stored micro-batches of layers 0 to 2 need 10.9 GB, two of layers 0 and 1 need 8.6 GB."""
    periods = {gb: plan(gb) for gb in (10.9, 10.8, 8.6, 8.5, 7.0)}
    assert [periods[gb].balance for gb in (10.9, 10.8, 8.6)] == [(3, 1), (2, 2), (2, 2)]
    times = [found.predicted["period_s"] for found in periods.values()]
    assert times == sorted(times) and times[1] == pytest.approx(4.0) and times[3] > 4.01
    for gb, found in periods.items():
        assert max(found.predicted["pattern_memory_bytes"]) <= gb * GB


def test_too_little_memory_says_how_much_works() -> None:
    with pytest.raises(NoPlan) as caught:
        plan(3)
    problem = caught.value.problem
    assert row(problem) == ("cluster.memory_gb", None, ["cluster.memory_gb=5.6"])
    works = problem.fixes[0]["cluster.memory_gb"]
    assert plan(works).predicted["period_s"] > 3
    with pytest.raises(NoPlan):
        plan(works - 0.001)


def test_a_device_that_does_not_help_is_left_idle() -> None:
    """Each message takes at least 10 s."""
    found = plan(100, devices=3, bandwidth=0.1)
    assert found.mesh.pipeline == 3 and found.balance == (4,)
    assert found.predicted["pattern_memory_bytes"][1:] == [0, 0]


def test_a_full_duplex_link_is_busy_for_half_the_time() -> None:
    """At 0.6 GB/s a GB takes 1.67 s, 3.33 s with its gradient."""
    half, full = plan(100, bandwidth=0.6), plan(100, bandwidth=0.6, duplex="full")
    assert half.predicted["period_s"] == pytest.approx(2 / 0.6)
    assert full.predicted["period_s"] == pytest.approx(3.0)


def test_more_devices_than_layers_are_refused() -> None:
    with pytest.raises(NoPlan) as caught:
        plan(100, devices=5)
    assert row(caught.value.problem) == ("mesh.pipeline", 5, ["mesh.pipeline=4"])


def test_a_profile_without_times_is_refused() -> None:
    counted = ModelProfile((LayerProfile(), LayerProfile()), source="counted on paper")
    request = PlanRequest(BatchShape(4, 4), 2)
    with pytest.raises(NoPlan, match="profile   needs layer times"):
        contiguous.build(Config()).plan(counted, Cluster(devices_per_node=2), NAMED["madpipe_paper"], request)


def test_an_unknown_duplex_is_named() -> None:
    config = Config(duplex="both")
    with pytest.raises(CannotRun) as caught:
        contiguous.build(config)
    assert rows(refused(caught)) == [("planner.duplex", "both", ["planner.duplex=cluster"])]
    assert registry.problems("planner", OmegaConf.structured(config)) == refused(caught)


@pytest.mark.parametrize("name", ["contiguous", "pipedream"])
def test_the_yaml_says_what_it_is_and_takes_its_schema(name: str) -> None:
    file = ROOT / "conf" / "planner" / f"{name}.yaml"
    first, second = file.read_text().splitlines()[:2]
    assert first == "# @package _global_" and second.startswith("# ")
    assert f"planner={name}" in file.read_text()
    assert OmegaConf.load(file) == {"defaults": [f"_{name}@planner", "_self_", {"override /engine": "periodic"}]}


def test_planning_does_not_import_torch() -> None:
    code = "import sys, planners.contiguous, planners.pipedream; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
