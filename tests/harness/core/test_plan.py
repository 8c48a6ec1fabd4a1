from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.core.plan import Mesh, Plan, Stage


def test_mesh_size_is_the_product() -> None:
    assert Mesh().size == 1
    assert Mesh(data=2, pipeline=3, tensor=4).size == 24


def test_contiguous_plan_looks_like_the_picture() -> None:
    """
    layer   0 1 2 | 3 | 4 5
    stage     0     1    2      on devices 0, 1, 2
    """
    plan = Plan.contiguous([3, 1, 2], micro_batches=4, recompute="always")
    assert plan.stages == (Stage(0, 2, 0), Stage(3, 3, 1), Stage(4, 5, 2))
    assert (plan.mesh, plan.micro_batches, plan.recompute) == (Mesh(pipeline=3), 4, "always")
    assert [plan.stage_of(layer) for layer in range(6)] == [0, 0, 0, 1, 2, 2]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=10))
def test_every_layer_is_in_the_stage_whose_span_holds_it(balance: list[int]) -> None:
    plan = Plan.contiguous(balance)
    assert plan.balance == tuple(balance)
    assert plan.devices == tuple(range(len(balance)))
    owners = [stage for stage, layers in enumerate(balance) for _ in range(layers)]
    assert [plan.stage_of(layer) for layer in range(sum(balance))] == owners


@pytest.mark.parametrize("layer", [-1, 6])
def test_a_layer_in_no_stage_is_refused(layer: int) -> None:
    with pytest.raises(IndexError, match=f"layer {layer} is not one of the plan's 6 layers"):
        Plan.contiguous([3, 1, 2]).stage_of(layer)


def test_a_device_may_own_several_stages() -> None:
    plan = Plan(Mesh(pipeline=2), (Stage(0, 0, 1), Stage(1, 1, 0), Stage(2, 4, 1)))
    assert plan.devices == (0, 1)
    assert plan.balance == (1, 1, 3)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ((), "at least one stage"),
        ((Stage(1, 2, 0),), "stage 0 holds layers 1..2, it must begin with layer 0"),
        ((Stage(0, 2, 0), Stage(4, 5, 1)), "stage 1 holds layers 4..5, it must begin with layer 3"),
        ((Stage(0, 2, 0), Stage(2, 5, 1)), "stage 1 holds layers 2..5, it must begin with layer 3"),
        ((Stage(0, 2, 0), Stage(3, 2, 1)), "stage 1 holds layers 3..2"),
    ],
)
def test_gaps_overlaps_and_empty_stages_are_refused(stages: tuple[Stage, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan(Mesh(), stages)


def test_the_mesh_that_is_used_leaves_out_idle_devices() -> None:
    plan = Plan(Mesh(data=2, pipeline=4), (Stage(0, 0, 0), Stage(1, 1, 2), Stage(2, 2, 0)))
    assert plan.used == Mesh(data=2, pipeline=2) and Plan.contiguous([1, 1]).used == Mesh(pipeline=2)


@pytest.mark.parametrize(
    ("strategies", "only"),
    [
        ([], False),
        ([(8, 1, 1)], True),
        ([(8, 1, 1), (4, 2, 1)], False),
        ([(8, 1, 1), (4, 1, 2)], False),
        ([(2, 4, 1, 1, 1, 1)], True),  # nodes, and devices of each
        ([(2, 2, 1, 1, 1, 2)], False),
        ([(8, 1)], True),  # SUMMA, rows x columns
        ([(4, 2)], False),
        ([(2, 4, 1, 1)], True),
        ([(2, 2, 1, 2)], False),
    ],
)
def test_whether_tensor_parallel_devices_split_samples_only(strategies: list[tuple[int, ...]], only: bool) -> None:
    named = {f"matmul_{number}": one for number, one in enumerate(strategies)}
    assert Plan(Mesh(tensor=8), (Stage(0, 0, 0),), strategy=named).splits_samples_only == only
