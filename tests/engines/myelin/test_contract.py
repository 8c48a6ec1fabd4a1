"""The contract of tests/engines/contract.py for myelin."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from engines.myelin.engine import POLICIES
from harness.interfaces import OptimizerSpec
from harness.schedule.builders.myelin import ORDERS
from tests.engines import contract, networks
from tests.engines.myelin.cases import case
from tests.engines.networks import Network

pytestmark = pytest.mark.usefixtures("ranks")


@pytest.mark.fast
@pytest.mark.parametrize(("pipeline", "data"), [(2, 1), (4, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("model", networks.ALL)
def test_trains_like_single(model: str, pipeline: int, data: int) -> None:
    contract.check_training(case(model, pipeline, data, m=2 if data > 1 else 4))


@pytest.mark.parametrize(("model", "pipeline", "data"), [("pairs", 2, 1), ("skips", 4, 1), ("tied", 2, 2)])
def test_trains_like_single_over_mpi(model: str, pipeline: int, data: int) -> None:
    contract.check_training(case(model, pipeline, data, m=2, transport="mpi"))


@pytest.mark.parametrize(("policy", "limit"), [*((policy, 2) for policy in POLICIES), ("fifo", 1), ("alternate", 9)])
def test_policies_and_limits(policy: str, limit: int) -> None:
    contract.check_training(case("skips", 3, policy=policy, pipeline_limit=limit))


@pytest.mark.parametrize("order", ORDERS[1:])
def test_orders(order: str) -> None:
    contract.check_training(case("norms", order=order))


def test_one_device() -> None:
    contract.check_training(case("tied", 1, transport="mpi"))


def test_micro_batches_of_two_sizes() -> None:
    """Seven samples: two, two, two and one."""
    contract.check_training(replace(case("pairs"), samples=7))


def test_as_many_micro_batches_as_samples() -> None:
    contract.check_training(case("skips", m=8))


@pytest.mark.parametrize("keys", [{"offload": True, "bsize": 7}, {"k": 0, "barrier": True}, {"k": 1, "bsize": 11}])
def test_ends_of_a_step(keys: dict[str, int]) -> None:
    contract.check_training(case("tied", 2, 2, m=2, **keys))


def test_in_float32() -> None:
    contract.check_training(replace(case("norms"), dtype="float32", optimizer=OptimizerSpec("sgd", lr=0.1)))


def test_statistics_of_replicas() -> None:
    contract.check_statistics(case("norms", 2, 2, m=2))


@pytest.mark.parametrize(("data", "keys"), [(1, {}), (2, {"offload": True, "bsize": 100})])
def test_states_move_between_engines(data: int, keys: dict[str, int]) -> None:
    contract.check_state_moves(case("gpt", 2, data, m=2, **keys))


def test_a_crash_reaches_the_caller() -> None:
    contract.check_crash(case("skips"), 9)


@pytest.mark.parametrize("transport", ["mpi", "torch"])
def test_accepts_what_it_is_tested_with(transport: str) -> None:
    contract.check_accepts(case("skips", transport=transport))


class Idle(nn.Module):
    """Has a parameter that it does not use."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_a_model_of_several_outputs() -> None:
    contract.check_training(case(networks.outputs()))


@pytest.mark.parametrize("data", [1, 2])
def test_a_tied_parameter_that_nobody_uses_is_not_decayed(data: int) -> None:
    def layers() -> list[nn.Module]:
        weight = nn.Parameter(torch.ones(3))
        return [nn.Linear(4, 4), Idle(weight), nn.Tanh(), Idle(weight), nn.Linear(4, 2)]

    pairs = networks.pairs()
    one = case(Network("idle", layers, pairs._inputs, pairs._targets, pairs._loss), 2, data, m=2)
    contract.check_training(replace(one, optimizer=OptimizerSpec("adamw", lr=0.01, weight_decay=0.1)))


@pytest.mark.parametrize(("pipeline", "data"), [(2, 1), (1, 2)])
def test_sparse_gradients(pipeline: int, data: int) -> None:
    def layers() -> list[nn.Module]:
        return [nn.Embedding(11, 8, sparse=True), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 11)]

    tokens = networks.tokens()
    one = case(Network("sparse", layers, tokens._inputs, tokens._targets, tokens._loss), pipeline, data, m=2)
    contract.check_training(replace(one, optimizer=OptimizerSpec("sgd", lr=0.5)))


class Marked(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x, x > 0, x.argmax(-1)


class Masked(nn.Module):
    def forward(self, value: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, mask, largest = value
        return x * mask + largest.unsqueeze(-1)


def test_integers_and_masks_go_between_stages() -> None:
    def layers() -> list[nn.Module]:
        return [nn.Linear(4, 4), Marked(), Masked(), nn.Linear(4, 2)]

    pairs = networks.pairs()
    contract.check_training(case(Network("masked", layers, pairs._inputs, pairs._targets, pairs._loss), 2, m=2))


def test_the_scale_of_the_loss_is_part_of_a_state() -> None:
    """Of float16; of a state without one it starts from scratch, and other engines leave it alone."""
    one = replace(case("pairs", 2, m=2), dtype="float16")
    state = contract.run(one, steps=1).states[-1]
    assert state["loss_scale"] == {"value": 2.0**16, "good": 1}
    state["loss_scale"] = {"value": 8.0, "good": 5}
    assert contract.run(one, steps=1, start=state).states[-1]["loss_scale"] == {"value": 8.0, "good": 6}
    del state["loss_scale"]
    assert contract.run(one, steps=1, start=state).states[-1]["loss_scale"] == {"value": 2.0**16, "good": 1}
    wide = replace(one, dtype="float32")
    assert "loss_scale" not in contract.run(wide, steps=1, start=state).states[-1]
    contract.run(wide.reference, steps=1, start=state | {"loss_scale": {"value": 8.0, "good": 5}})
