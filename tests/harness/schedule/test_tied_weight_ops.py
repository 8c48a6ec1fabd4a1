"""Copies of one parameter on several devices: what is summed where, and what it waits for."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from engines.gpipe.engine import Config, build
from harness.core.cluster import Cluster, Link
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import LayerProfile, ModelProfile, Tied
from harness.core.op import Op
from harness.core.plan import Plan, Stage
from harness.schedule import Schedule
from harness.schedule.builders.one_f_one_b import one_f_one_b
from harness.schedule.tied_weight_ops import Tie, always_tied, plan_ties, tied_stages, with_ties
from harness.schedule.transfers import plan_transfers
from harness.schedule.validate import validation_errors
from harness.simulator import simulate

WEIGHT = (Tied("embedding.weight", 400),)
PROFILE = ModelProfile((
    LayerProfile("embedding", 1, 2, param_bytes=400, tied=WEIGHT),
    LayerProfile("a", 1, 2), LayerProfile("b", 1, 2),
    LayerProfile("head", 1, 2, param_bytes=400, tied=WEIGHT),
))  # fmt: skip
TIE = Tie("embedding.weight", (0, 2), 400)


def ops_in(schedule: Schedule, device: int, queue: str) -> list[str]:
    return [str(op) for op in schedule.by_queue()[device, queue]]  # type: ignore[index]


def test_what_layers_on_different_devices_share() -> None:
    assert plan_ties(Plan.contiguous([1, 2, 1], 2), PROFILE) == [TIE]
    assert plan_ties(Plan.contiguous([4], 2), PROFILE) == []
    folded = Plan.contiguous([4], 2)
    stages = (Stage(0, 0, 0), Stage(1, 2, 1), Stage(3, 3, 0))
    assert plan_ties(Plan(folded.mesh, stages, 2), PROFILE) == [], "one copy for both stages of device 0"


@pytest.mark.parametrize(("streams", "queue"), [(True, "copy in"), (False, "compute")])
def test_the_sum_stands_in_a_queue_of_each_device(streams: bool, queue: str) -> None:
    plan = Plan.contiguous([1, 2, 1], 2)
    schedule = build(Config(streams=streams)).schedule(plan, PROFILE)
    for device in (0, 2):
        own = f"{device}collective:all_reduce@tied/embedding.weight"
        ops = ops_in(schedule, device, queue)
        assert own == (ops[-1] if streams else ops[-2])
        assert ops_in(schedule, device, "compute")[-1] == f"{device}step"
    assert not any("tied" in str(op) for op in schedule.by_queue()[1, "compute"])
    assert validation_errors(schedule, plan) == []


def test_it_waits_for_all_gradients_and_the_optimizer_for_it() -> None:
    schedule = build(Config()).schedule(Plan.contiguous([1, 2, 1], 2), PROFILE)
    before = schedule.dependencies()
    sums = next(op for op in before if op.kind == "collective")
    assert before[sums] == {Op(stage, "B", i) for stage in (0, 2) for i in (0, 1)}
    assert all(sums in before[Op(stage, "step")] for stage in (0, 2))
    assert sums not in before[Op(1, "step")]


def test_it_takes_the_time_of_an_exchange() -> None:
    """Both devices' steps end after the last backward pass and the message of 400 bytes in both directions at once."""
    plan = Plan.contiguous([1, 2, 1], 1, "never")
    schedule = one_f_one_b(1, range(3), plan_transfers(plan, PROFILE, portals=True))
    cluster = Cluster("t", 1, 3, intra=Link(0.5, 1 / 100))

    def step_time_s(ties: list[Tie]) -> float:
        done = simulate(with_ties(schedule, ties, "network"), plan, PROFILE, cluster, MemoryModel())
        assert done.figures["bytes_sent"].get("all_reduce@tied", 0) == 800 * len(ties)
        return float(done.figures["step_time_s"])

    assert step_time_s([TIE]) == pytest.approx(step_time_s([]) + 2 * 0.5 + 400 / 100)


def cuts(layers: int, stages: int) -> list[list[int]]:
    """Returns all ways to cut so many layers into so many stages."""
    inner = itertools.combinations(range(1, layers), stages - 1)
    return [[end - begin for begin, end in itertools.pairwise((0, *ends, layers))] for ends in inner]


@pytest.mark.parametrize("held", [(0, 5), (1, 3), (0, 2, 4), (2, 3), (4, 5)])
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 6])
def test_what_stages_share_wherever_they_are_cut(held: tuple[int, ...], stages: int) -> None:
    layers = [LayerProfile(str(number), 1, 2, param_bytes=400) for number in range(6)]
    for number in held:
        layers[number] = replace(layers[number], tied=WEIGHT)
    profile = ModelProfile(tuple(layers))
    shared = [len(tied_stages(Plan.contiguous(cut), profile)["embedding.weight"]) > 1 for cut in cuts(6, stages)]
    assert always_tied(profile, stages) == ({"embedding.weight"} if all(shared) else set())
