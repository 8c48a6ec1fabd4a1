"""precision.compile: engines train as without it, by kernels that torch.compile has made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from engines.ddp.engine import Config as DDPConfig
from engines.ddp.engine import build as build_ddp
from engines.fsdp.engine import Config as FSDPConfig
from engines.fsdp.engine import build as build_fsdp
from engines.gpipe.engine import Config as GPipeConfig
from engines.gpipe.engine import build as build_gpipe
from engines.pipeline.engine import Config as PipelineConfig
from engines.pipeline.engine import build as build_pipeline
from engines.single.engine import Config as SingleConfig
from harness.capture.split import split
from harness.checks.request import request
from harness.cli.compose import compose
from harness.config import registry
from harness.interfaces import Session
from harness.measure.profile_model import measure
from harness.nn.batchnorm import DeferredBatchNorm
from harness.nn.dropout import Dropout
from harness.nn.skip import Stash
from harness.runtime.compiled_layers import compilable, compile_layers
from tests.engines import contract, networks
from tests.engines.contract import Case
from tests.engines.myelin.cases import case as myelin
from tests.engines.networks import Network, Recall
from tests.engines.test_resuming import MOMENTUM, flat
from tests.support.sessions import run_session

pytestmark = pytest.mark.usefixtures("ranks")


class Block(nn.Module):
    """Several operations, among them random numbers of torch's and buffers that change."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Linear(12, 6)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.detach().sum(0)
        hidden = functional.dropout(functional.gelu(self.norm(self.up(x))), 0.25, self.training)
        return torch.tanh(self.down(hidden)) + x * torch.sigmoid(x)


def blocks() -> Network:
    """Blocks, among them one with a mask of the harness and one between a skip's ends."""

    def layers() -> list[nn.Module]:
        return [nn.Linear(6, 6), Block(), Stash("a"), nn.Sequential(Dropout(0.2), Block()), Recall("a"), Block()]

    return Network("blocks", layers, lambda n: torch.randn(n, 6), lambda n: torch.randn(n, 6), networks._squares)


NET = blocks()
CASES: dict[str, Callable[[], Case]] = {
    "single": lambda: flat(build_gpipe, GPipeConfig(), 2, model=NET).reference,
    "single, recomputed": lambda: flat(contract.build_single, SingleConfig(), 1, mode="always", model=NET),
    "gpipe": lambda: flat(build_gpipe, GPipeConfig(), 3, mode="except_last", model=NET),
    "myelin": lambda: myelin(NET, 2, 2, m=2),
    "pipeline": lambda: flat(build_pipeline, PipelineConfig(schedule="1f1b"), 2, data=2, model=NET),
    "pipeline, recomputed": lambda: flat(build_pipeline, PipelineConfig(), 2, mode="always", model=NET),
    "ddp": lambda: flat(build_ddp, DDPConfig(), data=2, model=NET),
    "fsdp": lambda: flat(build_fsdp, FSDPConfig(group_mb=0), data=2, model=NET),
}


def _trained(case: Case) -> tuple[list[float], dict[str, Any], int]:
    """The losses, the weights, and how many graphs rank 0 has compiled."""

    def train(session: Session) -> tuple[list[float], dict[str, Any], int]:
        from torch._dynamo.utils import counters

        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(3)
        batches = [case.model.sample(case.samples) for _ in range(3)]
        torch.manual_seed(4)
        losses = [session.step(batch).loss for batch in batches]
        return losses, session.state_dict().get("model", {}), counters["stats"]["unique_graphs"]

    return run_session(case.engine, case.model, case.plan, case.spec, train)


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_it_trains_as_without(name: str, dtype: str) -> None:
    case = replace(CASES[name](), optimizer=MOMENTUM, dtype=dtype, samples=64)
    (want, weights, none), (got, compiled, graphs) = _trained(case), _trained(replace(case, compile=True))
    assert none == 0 < graphs
    exact = dtype == "float64"
    assert got == pytest.approx(want, rel=1e-10 if exact else 1e-5)
    tolerance = 1e-9 if exact else 1e-4
    torch.testing.assert_close(compiled, weights, rtol=tolerance, atol=tolerance)


def test_what_depends_on_more_than_tensors_is_left_as_it_is() -> None:
    hooked, plain = nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    hooked.register_forward_hook(lambda *_: None)
    inner = nn.Sequential(nn.Tanh(), Dropout(0.1))
    stage = nn.Sequential(plain, hooked, inner, Dropout(0.0), DeferredBatchNorm(6, 2), Stash("a"), plain)
    assert [*compilable(stage)] == [plain, *hooked, inner[0], stage[3]]


def test_layers_of_a_captured_model_are_compiled_but_those_that_draw() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6), nn.Tanh())
    layers = split(model, (torch.randn(2, 6),))
    found = [*compilable(layers)]
    assert any(layer in found for layer in layers) and not any(getattr(layer, "draws", False) for layer in found)


def test_names_and_weights_stay() -> None:
    stage = nn.Sequential(Block())
    before = stage.state_dict()
    compile_layers(stage)
    after = stage.state_dict()
    assert list(before) == list(after) and all(before[name].data_ptr() == after[name].data_ptr() for name in before)


@pytest.mark.full
def test_layers_are_measured_so() -> None:
    from torch._dynamo.utils import counters

    plain = measure(NET, 4, "float32", "cpu", repeats=1)
    torch._dynamo.reset()
    counters.clear()
    compiled = measure(NET, 4, "float32", "cpu", repeats=1, compiled=True)
    assert counters["stats"]["unique_graphs"] > 0
    assert [one.flops for one in compiled.layers] == [one.flops for one in plain.layers]
    assert [one.saved_bytes for one in compiled.layers] == [one.saved_bytes for one in plain.layers]


@pytest.mark.parametrize(
    "overrides, refused",
    [
        (["engine=single"], False),
        (["engine=gpipe"], False),
        (["engine=pipeline", "engine.schedule=interleaved1f1b"], False),
        (["engine=pipeline", "engine.schedule=zb_h1"], True),
        (["engine=periodic"], True),
        (["engine=torch_pipelining"], True),
        (["engine=sbp"], True),
    ],
)
def test_engines_that_cannot_refuse_it(overrides: list[str], refused: bool) -> None:
    config = compose([*overrides, "model=unet", "precision.compile=true"])
    found = [one for one in request(config, registry.build("engine", config.engine).capabilities, None)
             if one.key == "precision.compile"]  # fmt: skip
    assert bool(found) is refused
    assert all(one.fixes[0] == {"precision.compile": False} and config.engine.name in str(one) for one in found)
