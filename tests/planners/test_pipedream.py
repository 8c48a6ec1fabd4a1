from __future__ import annotations

from typing import get_args

import pytest
from omegaconf import OmegaConf

from harness.config import registry
from harness.core.cluster import Cluster, Device, Link
from harness.core.memory_model import NAMED
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.plan import Plan
from harness.core.problem import CannotRun, NoPlan
from harness.interfaces import BatchShape, PlanRequest
from planners import contiguous, pipedream
from planners.periodic.pipedream_partition import Estimate
from planners.pipedream import Config
from tests.problems import fixes, refused, row, rows

GB = 10**9
PAPER = NAMED["madpipe_paper"]
PROFILE = ModelProfile(
    tuple(LayerProfile(f"layer_{i}", 1.0, 2.0, output_bytes=GB) for i in range(6)),
    "six",
    input_bytes=GB,
    source="analytic on paper",
)
LINK = Link(0.0, 1 / (100 * GB), "half")


def plan(gb: float, devices: int = 2, config: Config | None = None) -> Plan:
    planner = pipedream.build(config or Config())
    return planner.plan(PROFILE, cluster(gb, devices), PAPER, PlanRequest(BatchShape(4, 4), devices))


def best(gb: float, devices: int = 2) -> Plan:
    request = PlanRequest(BatchShape(4, 4), devices)
    return contiguous.build(contiguous.Config()).plan(PROFILE, cluster(gb, devices), PAPER, request)


def cluster(gb: float, devices: int) -> Cluster:
    return Cluster(devices_per_node=devices, device=Device(memory_bytes=round(gb * GB)), intra=LINK)


def test_with_memory_it_is_the_best_partition() -> None:
    found = plan(100)
    assert found.balance == (3, 3)
    assert found.predicted["first_phase_s"] == found.predicted["period_s"] == pytest.approx(9.0)
    assert found.predicted == {**best(100).predicted, "first_phase_s": found.predicted["first_phase_s"]}


def test_with_little_memory_it_hopes_for_what_it_does_not_get() -> None:
    """Two stored micro-batches of three layers need 8 GB, of two layers 6 GB; 7 GB are there."""
    found = plan(7)
    assert found.balance == (3, 3)
    assert found.predicted["first_phase_s"] == pytest.approx(9.0)
    assert found.predicted["period_s"] == pytest.approx(18.02)  # all in one group, with the message
    assert found.predicted["activations"] == [1, 1]
    assert best(7).balance == (2, 4)
    assert best(7).predicted["period_s"] == pytest.approx(12.0)


@pytest.mark.parametrize(("estimate", "balance"), [("optimizer", (3, 3)), ("position", (2, 4)), ("none", (3, 3))])
def test_the_estimate_decides(estimate: str, balance: tuple[int, ...]) -> None:
    assert plan(7, config=Config(estimate=estimate)).balance == balance


def test_an_estimate_that_allows_nothing_is_named() -> None:
    with pytest.raises(NoPlan) as caught:
        plan(7, config=Config(estimate="devices"))
    assert row(caught.value.problem) == ("planner.estimate", "devices", ["planner=contiguous"])
    assert "with 7 GB, it wants 8 GB" in caught.value.problem.message
    assert plan(8, config=Config(estimate="devices")).balance == (3, 3)
    assert best(7).balance == (2, 4)


def test_a_partition_that_fits_with_no_period_was_estimated_wrong() -> None:
    """The last stage is balanced in time, but its layers store most: 9 GB and buffers of 2 GB."""
    sizes = [0.1, 0.1, 1, 4, 4]
    layers = tuple(LayerProfile(f"{i}", 1.0, 2.0, output_bytes=round(size * GB)) for i, size in enumerate([*sizes, 0]))
    profile = ModelProfile(layers, input_bytes=GB // 10, source="analytic on paper")
    request = PlanRequest(BatchShape(4, 4), 2)
    with pytest.raises(NoPlan) as caught:
        pipedream.build(Config()).plan(profile, cluster(10.5, 2), PAPER, request)
    assert row(caught.value.problem) == ("planner.estimate", "optimizer", ["planner=contiguous"])
    assert {"11", "0", "10.5"} <= set(caught.value.problem.message.split())
    with pytest.raises(NoPlan, match="each contiguous plan on 2 devices needs a device with"):
        pipedream.build(Config()).plan(profile, cluster(4, 2), PAPER, request)


def test_too_little_memory_for_any_partition_says_how_much_works() -> None:
    for estimate in get_args(Estimate):
        with pytest.raises(NoPlan) as caught:
            plan(4, config=Config(estimate=estimate))
        assert fixes(caught.value.problem) == ["cluster.memory_gb=5"]


def test_unknown_choices_are_named_both_at_once() -> None:
    config = Config(estimate="guess", duplex="both")
    with pytest.raises(CannotRun) as caught:
        pipedream.build(config)
    assert rows(refused(caught)) == [
        ("planner.duplex", "both", ["planner.duplex=cluster"]),
        ("planner.estimate", "guess", ["planner.estimate=optimizer"]),
    ]
    assert registry.problems("planner", OmegaConf.structured(config)) == refused(caught)


def test_more_devices_than_layers_are_refused() -> None:
    with pytest.raises(NoPlan) as caught:
        plan(100, devices=7)
    assert row(caught.value.problem) == ("mesh.pipeline", 7, ["mesh.pipeline=6"])
