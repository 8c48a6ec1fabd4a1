"""What the tests of the deepspeed engine run: a model in stages and replicas, on the CPU."""

from __future__ import annotations

from dataclasses import replace

from engines.deepspeed.engine import Config, build
from harness.core.plan import Mesh, Plan
from harness.interfaces import Model, OptimizerSpec
from planners.block_partition import even
from tests.engines import networks, zoo
from tests.engines.contract import Case

MODELS: dict[str, Model] = {**networks.ALL, **{name: zoo.model(name) for name in zoo.SIZES}}
GENTLE = OptimizerSpec("sgd", lr=0.02, momentum=0.9)
SHARDED = [(1, 1, 2), (2, 1, 2), (3, 1, 2), (1, 2, 1), (1, 2, 2)]
"""(zero, stages, data) of every way in which DeepSpeed keeps its own float32 copy of the weights."""


def case(model: str, stages: int = 2, data: int = 1, zero: int = 0, checkpoint: str = "never", m: int = 4) -> Case:
    """The layers as evenly over the stages as they go, `m` micro-batches for each replica, in float32."""
    network = MODELS[model]
    balance = even(len(network.layers()), stages)
    plan = replace(Plan.contiguous(balance, m, checkpoint), mesh=Mesh(data=data, pipeline=stages))
    return Case(build(Config(zero=zero, checkpoint=checkpoint)), network, plan, "float32", optimizer=GENTLE)
