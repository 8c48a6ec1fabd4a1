"""Where the traffic of tensor parallelism stands in a schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.core.cluster import Cluster
from harness.core.memory_model import NAMED
from harness.core.plan import Mesh, Plan, Stage, Traffic
from harness.schedule.builders.single import single
from harness.schedule.builders.tensor_parallel import with_traffic
from harness.schedule.validate import validation_errors
from harness.simulator import simulate
from tests.harness.sbp.nets import dense

TRAFFIC = (
    Traffic("all_gather", "forward", 1.0, 100), Traffic("reduce_scatter", "forward", 2.0, 10),
    Traffic("all_gather", "backward", 4.0, 20), Traffic("all_reduce", "weights", 8.0, 40),
)  # fmt: skip
PLAN = Plan(Mesh(tensor=4), (Stage(0, 1, 0),), 2, traffic=(TRAFFIC,))


def test_what_is_sent_follows_its_pass_and_sums_of_weights_are_before_the_step():
    schedule = with_traffic(single(2, "never"), PLAN)
    (queue,) = [queue for queue in schedule.queues if queue.name == "compute"]
    forward = ["{}collective{}:all_gather@forward/0", "{}collective{}:reduce_scatter@forward/0"]
    assert [str(op) for op in queue.ops] == [
        "0F0", *(one.format(0, 0) for one in forward), "0B0", "0collective0:all_gather@backward/0",
        "0F1", *(one.format(0, 1) for one in forward), "0B1", "0collective1:all_gather@backward/0",
        "0collective:all_reduce@weights/0", "0step",
    ]  # fmt: skip
    assert schedule.tensor == 4
    assert validation_errors(schedule, PLAN) == []


def test_it_takes_the_seconds_and_sends_the_bytes_of_the_plan():
    schedule = with_traffic(single(2, "never"), PLAN)
    figures = simulate(schedule, PLAN, dense((8, 8, 8), 4), Cluster(devices_per_node=4), NAMED["sgd_fp32"]).figures
    assert figures["step_time_s"] == pytest.approx(2 * (1 + 2 + 4) + 8)
    assert figures["bytes_sent"] == {
        "all_gather@backward": 4 * 2 * 20, "all_gather@forward": 4 * 2 * 100, "all_reduce@weights": 4 * 40,
        "reduce_scatter@forward": 4 * 2 * 10,
    }  # fmt: skip


def test_what_is_computed_again_is_sent_again_with_the_backward_pass():
    again = (*TRAFFIC, Traffic("all_gather", "recompute", 16.0, 100))
    (queue,) = with_traffic(single(1, "never"), replace(PLAN, traffic=(again,))).queues
    assert [str(op).partition(":")[2] or str(op) for op in queue.ops][3:6] == [
        "0B0", "all_gather@recompute/0", "all_gather@backward/0",
    ]  # fmt: skip


def test_a_plan_without_traffic_leaves_the_schedule_as_it_is():
    plain = Plan(Mesh(), (Stage(0, 1, 0),), 2)
    assert with_traffic(single(2, "never"), plain) == single(2, "never")
