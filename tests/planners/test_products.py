"""What all planners of matrix products share: what a device holds, what is told beside a plan, and what mends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.mesh import Mesh
from harness.plan import Plan
from harness.problem import NoPlan
from harness.sbp.chain import chain_of
from harness.sbp.planned import of_device
from planners.autoddl.config import Config
from planners.autoddl.planner import AutoDDL
from planners.products import total
from tests.harness.sbp.nets import dense, transformer
from tests.planners.products_cases import ADAM, cluster, request

NET = transformer(layers=3)


def plan(profile=NET, devices: int = 8, micro_batches: int = 1, memory_bytes: int = 10**12, **config) -> Plan:
    planner = AutoDDL(Config(**config))
    there = cluster(devices, memory_bytes=memory_bytes)
    return planner.plan(profile, there, ADAM, request(profile, devices, micro_batches))


def problem(**asked) -> tuple[str, str, str]:
    with pytest.raises(NoPlan) as caught:
        plan(**asked)
    found = caught.value.problem
    return found.key, found.what, found.mend


def test_what_is_told_of_products_adds_up():
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


def test_the_baselines_stand_beside_a_plan():
    found = plan().predicted["baselines"]
    assert set(found) == {"megatron", "data_parallel"}
    assert found["data_parallel"]["bytes"].keys() == {"all_reduce"}
    assert plan().predicted["communication_s"] <= min(one["communication_s"] for one in found.values())
    few = plan(transformer(samples=4)).predicted["baselines"]["data_parallel"]
    assert few == {"why": "cannot split embedding (4 samples in a micro-batch, 256 x 64)"}


def test_baselines_that_do_not_fit_say_so():
    whole = plan().predicted["baselines"]["data_parallel"]["held_bytes"]
    told = plan(memory_bytes=whole)  # activations come on top
    assert told.predicted["baselines"]["data_parallel"]["why"].startswith("does not fit: needs at least ")


def needed(found: Plan, micro_batches: int) -> float:
    """What a device needs for its state and for what it saves, at least."""
    share = of_device(NET, found, chain_of(NET))
    last = len(NET.layers) - 1
    return ADAM.state_bytes(share, 0, last) + ADAM.task_bytes(share, 0, last)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_plan_fits_into_the_memory_that_there_is(micro_batches):
    free = needed(plan(micro_batches=micro_batches), micro_batches)
    fits = plan(micro_batches=micro_batches, memory_bytes=round(0.7 * free))
    assert needed(fits, micro_batches) <= 0.7 * free
    assert fits.predicted["communication_s"] > plan(micro_batches=micro_batches).predicted["communication_s"]


def test_too_little_memory_names_the_least_need_and_what_would_fit():
    key, what, mend = problem(memory_bytes=600_000)
    assert key == "a device's memory"
    assert what.startswith("needs at least ") and what.endswith("there are 585.9 KiB")
    assert mend.startswith("batch.micro_batches=")
    count = int(mend.partition("=")[2].partition(",")[0])
    assert plan(NET.of_samples(16 // count), micro_batches=count, memory_bytes=600_000)


def test_planner_memory_gb_is_mended_by_what_is_enough():
    key, _, mend = problem(memory_gb=1e-4)
    assert key == "planner.memory_gb 0.0001"
    enough = float(mend.partition("=")[2].partition(",")[0])
    assert plan(memory_gb=enough)
    assert problem(memory_gb=enough * 0.99)[0].startswith("planner.memory_gb")
    _, _, other = problem(memory_gb=1e-4, memory_bytes=200_000)
    assert "planner.memory_gb" not in other, "devices have not so much"


def test_whatever_is_more_than_enough_is_enough():
    """Stages, of which the fullest depends on how products are split."""
    net, asked = dense((16, 32, 24, 8), 4), replace(request(dense((16, 32, 24, 8), 4), 4, 4), pipeline=2)

    def with_memory(size: float) -> Plan:
        return AutoDDL(Config(memory_gb=size / 1e9)).plan(net, cluster(8), ADAM, asked)

    with pytest.raises(NoPlan) as caught:
        with_memory(1)
    enough = float(caught.value.problem.mend.partition("=")[2].partition(",")[0]) * 1e9
    slowest = with_memory(enough).predicted["communication_s"]
    for more in range(0, 100, 5):
        assert with_memory(enough * (1 + more / 100)).predicted["communication_s"] <= slowest


@pytest.mark.parametrize(
    ("profile", "devices", "micro_batches", "what", "mend"),
    [
        (dense((30, 20, 10), 3), 7, 1, "cannot split linear_0 (3 samples in a micro-batch, 30 x 20)",
         "batch.size=7, or mesh.tensor=1"),
        (dense((30, 20, 10), 1), 6, 14, "cannot split linear_0 (1 sample in a micro-batch, 30 x 20)",
         "batch.size=84, or mesh.tensor=2"),
        (transformer(heads=3, hidden=48, samples=1), 4, 1,
         "cannot split attention (3 heads, 1 sample in a micro-batch)", "batch.size=4, or mesh.tensor=1"),
    ],
)  # fmt: skip
def test_what_cannot_be_split_is_named_with_what_was_tried_and_works(profile, devices, micro_batches, what, mend):
    told = problem(profile=profile, devices=devices, micro_batches=micro_batches)
    assert told == (f"mesh.tensor {devices}", what, mend)


def test_micro_batches_that_are_too_small_are_mended_by_fewer():
    whole = replace(dense((30, 20, 10), 1))
    key, what, mend = problem(profile=whole, devices=7, micro_batches=14)
    assert (key, what) == ("mesh.tensor 7", "cannot split linear_0 (1 sample in a micro-batch, 30 x 20)")
    assert mend == "batch.micro_batches=2, or batch.size=98"


def test_devices_that_fill_no_whole_nodes():
    planner = AutoDDL(Config())
    with pytest.raises(NoPlan) as caught:
        planner.plan(NET, cluster(8, local=4), ADAM, request(NET, 6))
    found = caught.value.problem
    assert found.key == "mesh.tensor 6"
    assert (found.what, found.mend) == ("6 devices fill no whole number of nodes of 4", "mesh.tensor=4")


def test_stages_have_parts_of_the_chain():
    asked = replace(request(NET, 4), pipeline=2)
    found = AutoDDL(Config()).plan(NET, cluster(8), ADAM, asked)
    assert found.mesh == Mesh(pipeline=2, tensor=4)
    assert found.balance == (3, 2)
    assert len(found.traffic) == 2 and all(found.traffic)
