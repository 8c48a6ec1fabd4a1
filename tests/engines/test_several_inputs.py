"""A first layer and a loss that take several tensors, numbers and whole numbers, train in every engine like on one
device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from engines.ddp import engine as ddp
from engines.deepspeed import engine as deepspeed
from engines.fsdp import engine as fsdp
from engines.gpipe import engine as gpipe
from engines.myelin import engine as myelin
from engines.pipeline import engine as pipeline
from engines.torch_pipelining import engine as torch_pipelining
from engines.torchgpipe import engine as torchgpipe
from harness.core.plan import Mesh, Plan
from harness.interfaces import Engine, OptimizerSpec
from tests.engines import contract
from tests.engines.contract import Case
from tests.engines.networks import Network

STAGES = replace(Plan.contiguous([2, 2], micro_batches=2), mesh=Mesh(pipeline=2))
REPLICAS = replace(Plan.contiguous([4], micro_batches=2), mesh=Mesh(data=2))
ENGINES: dict[str, tuple[Engine, Plan, str]] = {
    "gpipe": (gpipe.build(gpipe.Config()), STAGES, "float64"),
    "torchgpipe": (torchgpipe.build(torchgpipe.Config()), STAGES, "float64"),
    "torch_pipelining": (torch_pipelining.build(torch_pipelining.Config(schedule="1f1b")), STAGES, "float64"),
    "pipeline": (pipeline.build(pipeline.Config()), STAGES, "float64"),
    "myelin": (myelin.build(myelin.Config(transport="torch")), STAGES, "float64"),
    "deepspeed": (deepspeed.build(deepspeed.Config()), STAGES, "float64"),
    "ddp": (ddp.build(ddp.Config()), REPLICAS, "float64"),
    "fsdp": (fsdp.build(fsdp.Config()), REPLICAS, "float64"),
    "zero 2": (deepspeed.build(deepspeed.Config(zero=2)), REPLICAS, "float32"),
}


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.embedding = nn.Linear(4, 6), nn.Embedding(5, 6)

    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        numbers, words = value
        mixed: Tensor = self.linear(numbers) + self.embedding(words)
        return mixed


def network() -> Network:
    def inputs(n: int) -> tuple[Tensor, Tensor]:
        return torch.randn(n, 4), torch.randint(5, (n,))

    def targets(n: int) -> tuple[Tensor, Tensor]:
        return torch.randn(n, 2), torch.randint(4, (n,))

    def loss(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
        near, classes = target
        return (output[:, :2] - near).square().sum() + functional.cross_entropy(output[:, 2:], classes, reduction="sum")

    layers = [Both, nn.Tanh, lambda: nn.Linear(6, 6), lambda: nn.Linear(6, 6)]
    return Network("both", lambda: [make() for make in layers], inputs, targets, loss)


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("name", ENGINES)
def test_losses_and_weights(name: str) -> None:
    engine, plan, dtype = ENGINES[name]
    contract.check_training(Case(engine, network(), plan, dtype, optimizer=OptimizerSpec("sgd", lr=0.05)))
