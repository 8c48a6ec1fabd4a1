"""Parameters that ranks share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from harness.core.op import Op
from harness.core.plan import Mesh, Plan
from harness.launch import forked_ranks
from harness.runtime.tied_weights import TiedWeights
from harness.schedule.dependency_graph import COPIES, TIED
from tests.engines import networks

# layers of "tied": 0 embedding, 1 and 5 the same linear layer, 7 the head with the embedding's weight
SPLIT = replace(Plan.contiguous([4, 4], 2), mesh=Mesh(data=2, pipeline=2))


def summed(
    layers: nn.Sequential, plan: Plan, missing: tuple[int, ...] = (), communicator: str = TIED
) -> list[dict[str, Any]]:
    """What each rank has after the sum; the gradient of every parameter on rank r is r + 1, or missing."""

    def work() -> list[dict[str, Any]]:
        rank = dist.get_rank()
        ties = TiedWeights(layers, plan, rank, communicator)
        for parameter in layers.parameters():
            if parameter.requires_grad and rank not in missing:
                parameter.grad = torch.full_like(parameter, rank + 1.0)
        noted: list[Op] = []
        sent = ties.sum_gradients(lambda: 0.0, lambda op, start, end: noted.append(op))
        grads = {copy.tie.name: copy.parameter.grad for copy in ties.copies}
        found = {
            "sums": {name: None if grad is None else float(grad.unique()) for name, grad in grads.items()},
            "ops": [(str(op), op.bytes) for op in noted],
            "sent": sent,
            "members": [dist.get_process_group_ranks(group) for _, group in ties.weights_and_groups()],
        }
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, found)
        return gathered

    return forked_ranks.run_on_ranks(plan.mesh.size, work, ["cpu"] * plan.mesh.size)


def test_copies_get_the_sum_over_their_replica() -> None:
    found = summed(networks.tied().layers(), SPLIT)
    names = ["0.weight", "1.weight", "1.bias"]
    assert [rank["sums"] for rank in found] == [dict.fromkeys(names, value) for value in (3.0, 3.0, 7.0, 7.0)]
    assert [rank["members"] for rank in found] == [[[0, 1]] * 3] * 2 + [[[2, 3]] * 3] * 2
    sizes = [11 * 8 * 4, 8 * 8 * 4, 8 * 4]
    assert [rank["sent"] for rank in found] == [sum(sizes)] * 4
    for rank, stage in zip(found, (0, 1, 0, 1), strict=True):
        expected = [f"{stage}collective:all_reduce@tied/{name}" for name in names]
        assert rank["ops"] == list(zip(expected, sizes, strict=True))


def test_copies_get_the_sum_over_all_replicas_at_once() -> None:
    found = summed(networks.tied().layers(), SPLIT, missing=(3,), communicator=COPIES)
    assert [rank["sums"]["0.weight"] for rank in found] == [6.0] * 4
    assert [rank["members"] for rank in found] == [[[0, 1, 2, 3]] * 3] * 4
    assert found[1]["ops"][0] == ("1collective:all_reduce@copies/0.weight", 11 * 8 * 4)


def test_a_copy_without_a_gradient_adds_nothing() -> None:
    plan = replace(SPLIT, mesh=Mesh(pipeline=2))
    found = summed(networks.tied().layers(), plan, missing=(0,))
    assert [rank["sums"]["0.weight"] for rank in found] == [2.0, 2.0]


def test_where_no_copy_has_a_gradient_none_gets_one() -> None:
    """So that an optimizer with weight decay leaves it alone, as it does of an unsplit model."""
    found = summed(networks.tied().layers(), SPLIT, missing=(2, 3))
    assert [rank["sums"]["0.weight"] for rank in found] == [3.0, 3.0, None, None]


def test_frozen_copies_are_left_alone() -> None:
    layers = networks.tied().layers()
    layers[1].requires_grad_(False)
    found = summed(layers, replace(SPLIT, mesh=Mesh(pipeline=2)))
    assert [rank["sums"] for rank in found] == [{"0.weight": 3.0}] * 2
    assert [rank["sent"] for rank in found] == [11 * 8 * 4] * 2


def test_only_devices_with_a_copy_take_part() -> None:
    """Three devices, the second has no part of the embedding; layers 1 and 5 are on the first two."""
    found = summed(networks.tied().layers(), Plan.contiguous([2, 5, 1], 2))
    assert [list(rank["sums"]) for rank in found] == [
        ["0.weight", "1.weight", "1.bias"], ["1.weight", "1.bias"], ["0.weight"],
    ]  # fmt: skip
    assert [rank["sums"].get("0.weight") for rank in found] == [4.0, None, 4.0]
    assert [rank["sums"].get("1.bias") for rank in found] == [3.0, 3.0, None]


def test_stages_on_one_device_share_without_a_sum() -> None:
    plan = Plan.contiguous([2, 5, 1], 2)
    first, second, third = plan.stages
    folded = replace(plan, mesh=Mesh(pipeline=2), stages=(first, second, replace(third, device=0)))
    assert [list(rank["sums"]) for rank in summed(networks.tied().layers(), folded)] == [["1.weight", "1.bias"]] * 2
