from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from harness.config import registry
from harness.core.cluster import Cluster, Link
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import LayerProfile, ModelProfile, Skip
from harness.core.plan import Plan
from harness.core.problem import CannotRun, NoPlan
from harness.interfaces import BatchShape, PlanRequest
from planners import balance, stage_costs
from planners.balance import BY, METHODS, Config
from tests.planners.strategies import cuttings, profiles
from tests.problems import refused, row, rows

ROOT = Path(__file__).parents[2]
CLUSTER = Cluster(devices_per_node=8, intra=Link(0.0, 1.0))


def chain(times: list[float], outputs: list[int], skips: tuple[Skip, ...] = ()) -> ModelProfile:
    """Layers whose backward takes twice their forward: a stage costs three times the forward seconds."""
    layers = tuple(
        LayerProfile(f"layer_{i}", seconds, 2 * seconds, output_bytes=size)
        for i, (seconds, size) in enumerate(zip(times, outputs, strict=True))
    )
    return ModelProfile(layers, "chain", skips=skips, source="analytic on paper")


def plan(profile: ModelProfile, stages: int, config: Config | None = None, recompute: str = "never") -> Plan:
    request = PlanRequest(BatchShape(8, 4), stages, recompute=recompute)
    return balance.build(config or Config()).plan(profile, CLUSTER, MemoryModel(), request)


def test_by_default_the_slowest_stage_is_as_fast_as_possible() -> None:
    found = plan(chain([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [0] * 11), 4)
    assert max(found.predicted["stage_cost"]) == 3 * 14
    assert sum(found.predicted["stage_cost"]) == 3 * 44
    assert found.predicted["balance"] == pytest.approx(11 / 14)
    assert [stage.device for stage in found.stages] == [0, 1, 2, 3]
    assert Plan.from_json(found.to_json()) == found


def test_a_boundary_too_large_for_its_link_is_not_cut() -> None:
    assert plan(chain([1, 1, 1, 1], [0, 0, 0, 0]), 2).balance == (2, 2)
    assert plan(chain([1, 1, 1, 1], [0, 99, 0, 0]), 2).balance in {(1, 3), (3, 1)}


def test_a_skip_too_large_for_its_link_is_not_cut() -> None:
    skip = Skip(1, 2, 99)
    found = plan(chain([1, 1, 1, 1], [0] * 4, (skip,)), 2)
    assert found.balance in {(1, 3), (3, 1)}
    heuristic = plan(chain([1, 1, 1, 1], [0] * 4, (skip,)), 2, Config(method="barany_grinberg"))
    assert heuristic.balance == (2, 2)
    assert heuristic.predicted["stage_cost"] == [6, 99]  # it does not look at skips, but their cost is reported


def test_equal_times_go_to_the_plan_that_sends_less() -> None:
    times = [4.0, 0.0, 0.0, 4.0]  # the cut may stand before layer 1, 2 or 3
    assert plan(chain(times, [3, 2, 1, 0]), 2).balance == (3, 1)
    assert plan(chain(times, [1, 2, 3, 0]), 2).balance == (1, 3)
    assert plan(chain(times, [1, 2, 2, 0], (Skip(0, 2, 4),)), 2).balance == (3, 1)


def test_recomputation_shifts_the_balance() -> None:
    """Forward 2 0 0, backward 0 2 2: without recomputation 2 | 4 or 4 | 2, with it 4 | 4 is best."""
    layers = (LayerProfile("a", 2.0, 0.0), LayerProfile("b", 0.0, 2.0), LayerProfile("c", 0.0, 2.0))
    never, last, always = (plan(ModelProfile(layers), 2, None, r) for r in ("never", "except_last", "always"))
    assert max(never.predicted["stage_cost"]) == 4
    assert last.predicted["stage_cost"] == [2 * 1.75, 4]
    assert always.predicted["stage_cost"] == [4, 4]


@given(profiles(), st.data())
def test_exact_is_the_least_maximum_and_never_worse_than_the_heuristic(
    profile: ModelProfile, data: st.DataObject
) -> None:
    stages = data.draw(st.integers(1, len(profile.layers)))
    by = data.draw(st.sampled_from(BY))
    recompute = data.draw(st.sampled_from(["never", "except_last", "always"]))
    exact, heuristic = (plan(profile, stages, Config(by=by, method=method), recompute) for method in METHODS)
    request = PlanRequest(BatchShape(8, 4), stages, recompute=recompute)
    costs = {
        "time": lambda: stage_costs.by_time(profile, CLUSTER, request),
        "memory": lambda: stage_costs.by_memory(profile, MemoryModel(), request),
        "parameters": lambda: stage_costs.by_parameters(profile, request),
    }[by]()
    best = min(max(costs.for_sizes(sizes)) for sizes in cuttings(len(profile.layers), stages))
    assert max(exact.predicted["stage_cost"]) == pytest.approx(best)
    assert max(heuristic.predicted["stage_cost"]) >= best * (1 - 1e-9)
    assert len(exact.stages) == len(heuristic.stages) == stages
    assert 0 < exact.predicted["balance"] <= 1


@pytest.mark.parametrize("method", METHODS)
def test_a_model_without_parameters_is_cut_all_the_same(method: str) -> None:
    found = plan(chain([1, 1, 1], [0, 0, 0]), 3, Config(by="parameters", method=method))
    assert found.balance == (1, 1, 1)
    assert found.predicted == {"stage_cost": [0, 0, 0], "balance": 1}


def test_unknown_choices_are_named_both_at_once() -> None:
    config = Config(by="speed", method="magic")
    with pytest.raises(CannotRun) as caught:
        balance.build(config)
    assert rows(refused(caught)) == [
        ("planner.by", "speed", ["planner.by=time"]),
        ("planner.method", "magic", ["planner.method=exact"]),
    ]
    assert registry.problems("planner", OmegaConf.structured(config)) == list(caught.value.problems)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(NoPlan) as caught:
        plan(chain([1, 1, 1], [0, 0, 0]), 16)
    assert row(caught.value.problem) == ("mesh.pipeline", 16, ["mesh.pipeline=3"])


@pytest.mark.parametrize("name", ["uniform", "balance"])
def test_the_yaml_says_what_it_is_and_takes_its_schema(name: str) -> None:
    file = ROOT / "conf" / "planner" / f"{name}.yaml"
    assert file.read_text().startswith("# ")
    assert f"planner={name}" in file.read_text()
    assert OmegaConf.load(file) == {"defaults": [f"_{name}", "_self_"]}


def test_planning_does_not_import_torch() -> None:
    code = "import sys, planners.uniform, planners.balance; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
