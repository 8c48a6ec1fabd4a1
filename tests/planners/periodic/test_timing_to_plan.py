from __future__ import annotations

from dataclasses import replace

import pytest

from harness.cli.compose import compose
from harness.config import registry
from harness.core import memory_model
from harness.core.cluster import Cluster, Device
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.plan import Mesh, Plan
from harness.core.problem import NoPlan
from harness.interfaces import BatchShape, PlanRequest
from planners.periodic.one_f_one_b_star import timing
from planners.periodic.timing_to_plan import FOUND, MOST_LAYERS, memory_error, to_plan
from tests.planners.periodic.contiguous_cases import chain, into
from tests.problems import fixes, row

REQUEST = PlanRequest(BatchShape(12, 3), pipeline=3, data=2, recompute="except_last")


def test_a_plan_has_the_pattern_in_seconds_and_what_each_device_holds() -> None:
    """T = 7, the message 2 + 2 is in group 1 with stage 1, stage 0 in group 2; a tick is half a second.

    tick    0  1  2  3  4  5  6  7  8  9
    0       F                          B
    link       ====        ====
    1                F  B
    """
    two = replace(chain([(1, 1), (1, 1)], [2]), state=(10, 20), buffers=(0, 6, 0), tick_s=0.5)
    plan = to_plan(timing(two, into([1, 1]), 7), REQUEST, {"first_phase_s": 2.5})
    assert plan.mesh == Mesh(data=2, pipeline=3, tensor=1)
    assert plan.stages == into([1, 1])
    assert (plan.micro_batches, plan.recompute) == (3, "except_last")
    assert plan.predicted == {
        "period_s": 3.5, "activations": [2, 1], "pattern_memory_bytes": [10 + 6 + 2, 20 + 6 + 1, 0],
        "memory_limit_bytes": two.memory, "stored_bytes": [1, 1], "fixed_bytes": [10 + 6, 20 + 6, 0],
        "tasks_s": {"0F0": 0.5, "1copy0<0": 1.0, "1F0": 0.5, "1B0": 0.5, "0copy0<1": 1.0, "0B0": 0.5},
        "one_device_s": 2.0, "first_phase_s": 2.5,
    }  # fmt: skip
    assert plan.pattern is not None
    placed = {str(op.op): (op.device, op.start_s, op.shift) for op in plan.pattern.ops}
    assert {name: placed[name] for name in ("0F0", "1F0", "1B0", "0B0")} == {
        "0F0": (0, 0.0, 0), "1F0": (1, 1.5, 0), "1B0": (1, 2.0, 0), "0B0": (0, 0.5, 1),
    }  # fmt: skip
    assert placed["1copy0<0"][1:] == (0.5, 0)
    assert placed["0copy0<1"][1:] == (2.5, 0)
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(("needed", "typed"), [(3_211_000_000, "3.211"), (3_211_000_001, "3.212"), (5, "0.001")])
def test_too_little_memory_is_reported_with_what_works(needed: int, typed: str) -> None:
    cluster = Cluster(devices_per_node=3, device=Device(memory_bytes=3_000_000_000))
    some = replace(chain([(1, 1)]), memory=cluster.device.memory_bytes)
    problem = memory_error(some, needed, cluster, REQUEST).problem
    assert row(problem) == ("cluster.memory_gb", None, [f"cluster.memory_gb={typed}"])
    for one in (problem, memory_error(some, needed, cluster, REQUEST, FOUND).problem):
        assert f"{typed} GB" in one.message and "on 3 devices" in one.message


def test_what_is_kept_free_is_needed_too() -> None:
    cluster = Cluster(device=Device(memory_bytes=10**8))
    error = memory_error(replace(chain([(1, 1)]), memory=10**8 - 5 * 10**8), 10**9, cluster, REQUEST)
    assert fixes(error.problem) == ["cluster.memory_gb=1.5"]


@pytest.mark.parametrize("planner", ["madpipe", "contiguous", "pipedream"])
def test_a_chain_that_would_take_hours_is_refused(planner: str) -> None:
    """The search grows with the square of the layers."""
    layer = LayerProfile("layer", 0.01, 0.02, param_bytes=10, output_bytes=10, saved_bytes=10, flops=10)
    config = compose(["engine=periodic", f"planner={planner}", "mode=plan"])
    profile = ModelProfile((layer,) * (MOST_LAYERS + 1), "deep", 1, input_bytes=10, source="measured")
    cluster = Cluster(devices_per_node=3, device=Device(memory_bytes=10**9))
    with pytest.raises(NoPlan) as caught:
        registry.build("planner", config.planner).plan(profile, cluster, memory_model.named("sgd_fp32"), REQUEST)
    problem = caught.value.problem
    assert row(problem) == ("planner", planner, []) and problem.hint
