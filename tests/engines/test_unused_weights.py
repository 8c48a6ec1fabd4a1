"""Replicas that use other weights each, by the values of their samples, train like one device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engines.ddp import engine as ddp
from engines.deepspeed import engine as deepspeed
from engines.fsdp import engine as fsdp
from engines.myelin import engine as myelin
from harness.core.plan import Mesh, Plan
from harness.interfaces import Engine, OptimizerSpec
from tests.engines import contract, networks
from tests.engines.contract import Case

pytestmark = pytest.mark.usefixtures("ranks")
SGD, ADAM = OptimizerSpec("sgd", lr=0.5), OptimizerSpec("adamw", lr=0.01)
ENGINES: dict[str, tuple[Engine, str, OptimizerSpec]] = {
    "ddp": (ddp.build(ddp.Config()), "float64", ADAM),
    "fsdp": (fsdp.build(fsdp.Config()), "float64", SGD),
    "myelin": (myelin.build(myelin.Config(transport="torch")), "float64", SGD),
    **{f"zero {zero}": (deepspeed.build(deepspeed.Config(zero=zero)), "float32", SGD) for zero in range(4)},
}


@pytest.mark.parametrize("name", ENGINES)
def test_losses_and_weights(name: str) -> None:
    engine, dtype, optimizer = ENGINES[name]
    plan = replace(Plan.contiguous([5], micro_batches=2), mesh=Mesh(data=2))
    contract.check_training(Case(engine, networks.ways(), plan, dtype, optimizer=optimizer, by_value=True))
