"""Weights and layers that a stage uses without having them: refused, where another process would train a copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from engines.ddp.engine import Config as DDP
from engines.ddp.engine import build as build_ddp
from engines.fsdp.engine import Config as FSDP
from engines.fsdp.engine import build as build_fsdp
from engines.gpipe.gpipe_module import GPipe
from engines.myelin.engine import Config as Myelin
from engines.myelin.engine import build as build_myelin
from engines.pipeline.engine import Config as Pipeline
from engines.pipeline.engine import build as build_pipeline
from engines.torch_pipelining.engine import Config as TorchPipelining
from engines.torch_pipelining.engine import build as build_torch_pipelining
from harness.core.plan import Mesh, Plan
from harness.core.problem import ProblemError
from harness.interfaces import Engine
from tests.engines import contract
from tests.engines.contract import Case, gentle
from tests.engines.networks import Network, _squares

pytestmark = pytest.mark.usefixtures("ranks")
WIDTH = 4
PIPELINES: dict[str, Engine] = {
    "myelin": build_myelin(Myelin(transport="torch")),
    "pipeline": build_pipeline(Pipeline()),
    "torch_pipelining": build_torch_pipelining(TorchPipelining(schedule="1f1b")),
}
REPLICAS: dict[str, Engine] = {"ddp": build_ddp(DDP()), "fsdp": build_fsdp(FSDP())}


class Uses(nn.Module):
    """Adds what `function` makes of `held`, which torch does not see, to its own layer's output."""

    def __init__(self, held: Any, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.own, self.held, self.function = nn.Linear(WIDTH, WIDTH), held, function

    def forward(self, x: Tensor) -> Tensor:
        return self.own(x) + self.function(self.held, x)


HIDDEN: dict[str, Callable[[nn.Module], nn.Module]] = {
    "a module in a list": lambda first: Uses([first], lambda held, x: held[0](x)),
    "a weight in a tuple": lambda first: Uses((first.weight,), lambda held, x: functional.linear(x, held[0])),
    "a closure": lambda first: Uses(None, lambda _, x: functional.linear(x, first.weight)),  # type: ignore[arg-type]
}


def network(last: Callable[[nn.Module], nn.Module], kind: Callable[[], nn.Module]) -> Network:
    def layers() -> list[nn.Module]:
        first = kind()
        return [first, nn.Tanh(), last(first), nn.Linear(WIDTH, WIDTH)]

    return Network("hidden", layers, lambda n: torch.randn(n, WIDTH), lambda n: torch.randn(n, WIDTH), _squares)


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def pipeline(engine: str, model: Network) -> Case:
    plan = replace(Plan.contiguous([2, 2], 2), mesh=Mesh(pipeline=2))
    return gentle(Case(PIPELINES[engine], model, plan))


def replicas(engine: str, model: Network) -> Case:
    return gentle(Case(REPLICAS[engine], model, replace(Plan.contiguous([4], 2), mesh=Mesh(data=2))))


@pytest.mark.parametrize("engine", PIPELINES)
@pytest.mark.parametrize("way", HIDDEN)
def test_weights_of_another_stage_are_refused(way: str, engine: str) -> None:
    with pytest.raises(ProblemError, match=r"stage 1 +uses the (weight '0.weight'|module '0'), which is none of its"):
        contract.run(pipeline(engine, network(HIDDEN[way], linear)))


@pytest.mark.parametrize("engine", PIPELINES)
def test_a_batch_norm_of_another_stage_is_refused(engine: str) -> None:
    """It has no weights, and its statistics would be those of one stage."""
    way = HIDDEN["a module in a list"]
    with pytest.raises(ProblemError, match=r"stage 1 +uses the module '0'"):
        contract.run(pipeline(engine, network(way, lambda: nn.BatchNorm1d(WIDTH, affine=False))))


@pytest.mark.parametrize("way", HIDDEN)
def test_replicas_have_all_layers(way: str) -> None:
    contract.check_training(replicas("ddp", network(HIDDEN[way], linear)))


def test_fsdp_refuses_a_weight_that_it_has_replaced_by_shards() -> None:
    with pytest.raises(ProblemError, match=r"uses the weight '0.weight'"):
        contract.run(replicas("fsdp", network(HIDDEN["a weight in a tuple"], linear)))


class Copies(nn.Module):
    """A second parameter in the memory of the first layer's weight."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.copy = nn.Parameter(weight.data[0])

    def forward(self, x: Tensor) -> Tensor:
        return x * self.copy


@pytest.mark.parametrize("engine", ["myelin", "fsdp"])
def test_weights_of_one_memory_are_refused_where_they_get_two(engine: str) -> None:
    model = network(lambda first: Copies(first.weight), linear)  # type: ignore[arg-type]
    case = pipeline(engine, model) if engine in PIPELINES else replicas(engine, model)
    with pytest.raises(ProblemError, match=r"weight '0.weight' +shows the memory of '2.copy', too"):
        contract.run(replace(case, dtype="float32"))


def test_weights_of_one_memory_train_where_they_keep_it() -> None:
    model = network(lambda first: Copies(first.weight), linear)  # type: ignore[arg-type]
    contract.check_training(replace(replicas("ddp", model), dtype="float32"))


class Twice(nn.Module):
    """Looks up once more in the embedding of the first layer."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first = first

    def forward(self, x: Tensor) -> Tensor:
        return x + self.first((x[:, 0] > 0).long())


def look_ups(last: Callable[[nn.Module], nn.Module]) -> Network:
    def layers() -> list[nn.Module]:
        first = nn.Embedding(7, WIDTH, max_norm=0.5)
        return [first, nn.Tanh(), last(first), nn.Linear(WIDTH, WIDTH)]

    return Network("renormed", layers, lambda n: torch.randint(7, (n,)), lambda n: torch.randn(n, WIDTH), _squares)


@pytest.mark.parametrize("engine", ["myelin", "ddp", "fsdp"])
def test_an_embedding_that_scales_its_rows_is_refused_in_several_processes(engine: str) -> None:
    case = pipeline(engine, look_ups(Twice)) if engine in PIPELINES else replicas(engine, look_ups(Twice))
    with pytest.raises(ProblemError, match=r"layer '0' +has max_norm, which changes the weight"):
        contract.run(case)


def test_an_embedding_of_two_devices_of_gpipe_is_refused() -> None:
    layers = look_ups(Twice).layers()
    with pytest.raises(ProblemError, match=r"layer '2' +has max_norm"):
        GPipe(layers, [2, 2], ["cpu", "cpu"], checkpoint="never")
    GPipe(layers, [2, 2], ["cpu"], checkpoint="never", placement=[0, 0]).close()


def test_an_embedding_of_one_stage_may_scale_its_rows() -> None:
    model = look_ups(lambda _: nn.Linear(WIDTH, WIDTH))
    contract.check_training(replace(pipeline("myelin", model), dtype="float32"))
