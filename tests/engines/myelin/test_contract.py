"""The contract of tests/engines/contract.py for myelin."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engines.myelin.config import POLICIES
from harness.interfaces import OptimizerSpec
from harness.schedule.myelin import ORDERS
from tests.engines import contract, networks
from tests.engines.myelin.cases import case

GRIDS = [(model, *grid) for model in networks.ALL for grid in ((4, 1), (2, 2))]


@pytest.mark.parametrize(("model", "pipeline", "data"), [*GRIDS, ("pairs", 2, 1), ("norms", 1, 2), ("tied", 1, 2)])
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


@pytest.mark.parametrize("keys", [{"offload": True, "bsize": 7}, {"k": 0}, {"k": 1, "bsize": 11}])
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
