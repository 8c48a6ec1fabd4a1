"""The shared base of tensor-parallel planners: what a device holds, what a plan reports, and fixes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.core.plan import Mesh, Plan
from harness.core.problem import NoPlan, Problem
from harness.sbp.matmul_chain import chain_from_profile
from harness.sbp.route_to_plan import device_share, with_exchanges
from harness.simulator.memory_timeline import working_bytes
from planners.autoddl.planner import AutoDDL, Config
from planners.megatron import Config as Megatron
from planners.megatron import build as megatron
from planners.tensor_parallel_base import total
from tests.harness.sbp.nets import dense, transformer
from tests.planners.tensor_parallel_cases import ADAM, cluster, request
from tests.problems import row

NET = transformer(layers=3)


def plan(profile=NET, devices: int = 8, micro_batches: int = 1, memory_bytes: int = 10**12, **config) -> Plan:
    planner = AutoDDL(Config(**config))
    there = cluster(devices, memory_bytes=memory_bytes)
    return planner.plan(profile, there, ADAM, request(profile, devices, micro_batches))


def problem(**asked) -> Problem:
    with pytest.raises(NoPlan) as caught:
        plan(**asked)
    return caught.value.problem


def test_what_is_reported_products_adds_up():
    found = plan(micro_batches=2)
    own, predicted = found.predicted["products"], found.predicted
    assert list(own) == list(found.strategy)
    assert sum(predicted["communication_by_phase_s"].values()) == pytest.approx(predicted["communication_s"])
    assert total(own, "seconds") == pytest.approx(predicted["communication_by_phase_s"])
    assert sum(one["held_bytes"] for one in own.values()) == predicted["held_bytes"]
    assert own["embedding"]["held_bytes"] == 0, "it has the head's weight"
    times = {"forward": 2, "backward": 2, "weights": 1}
    sent = sum(one.bytes * times[one.phase] for one in found.traffic[0])
    assert sum(total(own, "bytes").values()) == sent
    assert found.mesh == Mesh(tensor=8)


def test_the_baselines_stand_next_to_a_plan():
    found = plan().predicted["baselines"]
    assert set(found) == {"megatron", "data_parallel"}
    assert found["data_parallel"]["bytes"].keys() == {"all_reduce"}
    assert plan().predicted["communication_s"] <= min(one["communication_s"] for one in found.values())
    few = plan(transformer(samples=4)).predicted["baselines"]["data_parallel"]
    assert few == {"why": "cannot split embedding (4 samples in a micro-batch, 256 x 64)"}


def test_baselines_that_do_not_fit_say_so():
    whole = plan().predicted["baselines"]["data_parallel"]["held_bytes"]
    planned = plan(memory_bytes=whole)  # activations come on top
    assert planned.predicted["baselines"]["data_parallel"]["why"].startswith("does not fit: needs at least ")


def needed(found: Plan, micro_batches: int) -> float:
    """What a device needs for its state and for what it saves, at least."""
    share = device_share(NET, found, chain_from_profile(NET))
    last = len(NET.layers) - 1
    return ADAM.state_bytes(share, 0, last) + ADAM.task_bytes(share, 0, last)


@pytest.mark.parametrize(("micro_batches", "share"), [(1, 1.0), (4, 0.7)])
def test_a_plan_fits_into_the_memory_that_there_is(micro_batches, share):
    """What it exchanges while gradients are computed is counted, as in a simulation."""
    free = needed(plan(micro_batches=micro_batches), micro_batches)
    fits = plan(micro_batches=micro_batches, memory_bytes=round(share * free))
    chain = chain_from_profile(NET)
    exchanging = with_exchanges(device_share(NET, fits, chain), fits, chain)
    accumulated = float(micro_batches > 1)
    working = working_bytes(exchanging, 0, len(NET.layers) - 1, accumulated)
    assert needed(fits, micro_batches) + working <= share * free
    assert fits.predicted["communication_s"] > plan(micro_batches=micro_batches).predicted["communication_s"]


def test_too_little_memory_names_the_least_need_and_what_would_fit():
    found = problem(memory_bytes=600_000)
    assert (found.key, found.value) == ("cluster.memory_gb", None) and found.message.endswith("585.9 KiB")
    count = found.fixes[0]["batch.micro_batches"]
    assert plan(NET.for_samples(16 // count), micro_batches=count, memory_bytes=600_000)


@pytest.mark.usefixtures("computation")
def test_planner_memory_gb_has_a_fix_that_is_enough():
    found = problem(memory_gb=1e-4)
    assert (found.key, found.value) == ("planner.memory_gb", 1e-4)
    enough = found.fixes[0]["planner.memory_gb"]
    assert plan(memory_gb=enough)
    assert problem(memory_gb=enough * 0.99).key == "planner.memory_gb"
    other = problem(memory_gb=1e-4, memory_bytes=200_000)
    assert not any("planner.memory_gb" in fix for fix in other.fixes), "devices have less"


@pytest.mark.usefixtures("computation")
def test_whatever_is_more_than_enough_is_enough():
    """Stages, of which the fullest depends on how products are split."""
    net, asked = dense((16, 32, 24, 8), 4), replace(request(dense((16, 32, 24, 8), 4), 4, 4), pipeline=2)

    def with_memory(size: float) -> Plan:
        return AutoDDL(Config(memory_gb=size / 1e9)).plan(net, cluster(8), ADAM, asked)

    with pytest.raises(NoPlan) as caught:
        with_memory(1)
    enough = caught.value.problem.fixes[0]["planner.memory_gb"] * 1e9
    slowest = with_memory(enough).predicted["communication_s"]
    for more in range(0, 100, 5):
        assert with_memory(enough * (1 + more / 100)).predicted["communication_s"] <= slowest


@pytest.mark.parametrize(
    ("profile", "devices", "micro_batches", "named", "fixes"),
    [
        (dense((30, 20, 10), 3), 7, 1, "linear_0 (3 samples in a micro-batch, 30 x 20)",
         ["batch.size=7", "mesh.tensor=6"]),
        (dense((30, 20, 10), 1), 6, 14, "linear_0 (1 sample in a micro-batch, 30 x 20)",
         ["batch.size=84", "mesh.tensor=5"]),
        (transformer(heads=3, hidden=48, samples=1), 4, 1, "attention (3 heads, 1 sample in a micro-batch)",
         ["batch.size=4", "mesh.tensor=1 mesh.data=1"]),
        (dense((30, 20, 10), 1), 7, 14, "linear_0 (1 sample in a micro-batch, 30 x 20)",
         ["batch.micro_batches=2", "batch.size=98"]),
    ],
)  # fmt: skip
def test_what_cannot_be_split_is_named_with_what_was_tried_and_works(profile, devices, micro_batches, named, fixes):
    found = problem(profile=profile, devices=devices, micro_batches=micro_batches)
    assert row(found) == ("mesh.tensor", devices, fixes) and found.message.endswith(named)


@pytest.mark.parametrize(
    ("heads", "hidden", "devices", "fixes"),
    [(12, 48, 7, ["mesh.tensor=6"]), (16, 64, 7, ["mesh.tensor=4"]), (15, 60, 8, ["mesh.tensor=5"]),
     (5, 40, 3, ["mesh.tensor=1 mesh.data=1"])],
)  # fmt: skip
def test_the_most_devices_that_divide_a_model_are_offered(heads, hidden, devices, fixes):
    """And not only those that divide the number that was asked for. There is room for more replicas then, which may be
    open: the batch is for two, and not for eight."""
    net = transformer(heads=heads, hidden=hidden, samples=2)
    with pytest.raises(NoPlan) as caught:
        megatron(Megatron(dimensions=1)).plan(net, cluster(8), ADAM, request(net, devices, 8))
    found = caught.value.problem
    assert row(found)[:2] == ("mesh.tensor", devices) and row(found)[2][-1:] == fixes
    fixed = replace(request(net, devices, 8), tensor=found.fixes[-1]["mesh.tensor"])
    assert megatron(Megatron(dimensions=1)).plan(net, cluster(8), ADAM, fixed)


def test_devices_that_fill_no_whole_nodes():
    planner = AutoDDL(Config())
    with pytest.raises(NoPlan) as caught:
        planner.plan(NET, cluster(8, local=4), ADAM, request(NET, 6))
    assert row(caught.value.problem) == ("mesh.tensor", 6, ["mesh.tensor=2"]), "by which the model divides, if by 6"


def test_fewer_devices_fill_nodes_equally():
    """4 heads and 12 devices on nodes of 6: groups of 4 would be on one node, or on two."""
    net = transformer(heads=4, hidden=48, samples=1)
    for local, fewer in ((6, 2), (4, 4), (12, 4)):
        with pytest.raises(NoPlan) as caught:
            AutoDDL(Config()).plan(net, cluster(12, local=local), ADAM, request(net, 12))
        assert row(caught.value.problem) == ("mesh.tensor", 12, ["batch.size=12", f"mesh.tensor={fewer} mesh.data=1"])


def test_stages_have_parts_of_the_chain():
    asked = replace(request(NET, 4), pipeline=2)
    found = AutoDDL(Config()).plan(NET, cluster(8), ADAM, asked)
    assert found.mesh == Mesh(pipeline=2, tensor=4)
    assert found.balance == (3, 2)
    assert len(found.traffic) == 2 and all(found.traffic)
