"""precision.channels_last: engines train as without it, with weights in this order from the first step to the last."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from engines.ddp.engine import Config as DDPConfig
from engines.ddp.engine import build as build_ddp
from engines.gpipe.engine import Config as GPipeConfig
from engines.gpipe.engine import build as build_gpipe
from engines.pipeline.engine import Config as PipelineConfig
from engines.pipeline.engine import build as build_pipeline
from engines.torch_pipelining.engine import Config as PipeliningConfig
from engines.torch_pipelining.engine import build as build_pipelining
from engines.torchgpipe.engine import Config as TorchgpipeConfig
from engines.torchgpipe.engine import build as build_torchgpipe
from harness.checks.request import request
from harness.cli.compose import compose
from harness.config import registry
from harness.measure.layer_chain import Chain
from harness.measure.profile_model import measure
from harness.runtime.silent_writes import SilentWrites
from harness.runtime.training_state import put_channels_last
from tests.engines import contract, networks
from tests.engines.contract import Case
from tests.engines.test_resuming import MOMENTUM, flat, periodic

pytestmark = pytest.mark.usefixtures("ranks")
NET = networks.ALL["norms"]
CONVOLUTIONS = {"0.weight", "4.weight"}
CASES: dict[str, Callable[[], Case]] = {
    "single": lambda: flat(build_gpipe, GPipeConfig(), 2, model=NET).reference,
    "gpipe": lambda: flat(build_gpipe, GPipeConfig(), 3, mode="always", model=NET),
    "torchgpipe": lambda: flat(build_torchgpipe, TorchgpipeConfig(), 2, model=NET),
    "periodic": lambda: periodic(4),
    "pipeline": lambda: flat(build_pipeline, PipelineConfig(schedule="1f1b"), 2, data=2, model=NET),
    "pipeline, halves": lambda: flat(build_pipeline, PipelineConfig(schedule="zbv"), 2, model=NET),
    "torch_pipelining": lambda: flat(build_pipelining, PipeliningConfig(schedule="1f1b"), 2, data=2, model=NET),
    "ddp": lambda: flat(build_ddp, DDPConfig(), data=2, model=NET),
}


@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_without(name: str) -> None:
    case = replace(CASES[name](), optimizer=MOMENTUM)
    want, got = contract.run(case, steps=2), contract.run(replace(case, channels_last=True), steps=2)
    assert got.losses == pytest.approx(want.losses, rel=contract.TOLERANCE[case.dtype])
    torch.testing.assert_close(got.states[-1]["model"], want.states[-1]["model"], rtol=1e-9, atol=1e-9)
    for outcome, expected in ((want, set()), (got, CONVOLUTIONS)):
        for state in outcome.states:
            assert {key for key, one in state["model"].items() if _is_last(one)} == expected


def _is_last(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 4 and not tensor.is_contiguous()


def test_layers_are_measured_so() -> None:
    chain = Chain(NET, 2, torch.float32, torch.device("cpu"), channels_last=True)
    assert {name for name, one in chain.layers.named_parameters() if _is_last(one)} == CONVOLUTIONS
    assert all(one.grad is not None and one.grad.stride() == one.stride() for one in chain.layers.parameters())
    plain, last = (measure(NET, 2, "float32", "cpu", repeats=1, channels_last=choice) for choice in (False, True))
    assert [one.flops for one in plain.layers] == [one.flops for one in last.layers]


def test_convolutions_alone_are_reordered_and_shared_memory_stays_shared() -> None:
    table = nn.Module()
    table.register_parameter("weight", nn.Parameter(torch.ones(1, 2, 3, 4)))
    one, two, three = (nn.Conv2d(2, 2, 3) for _ in range(3))
    two.weight = nn.Parameter(one.weight.detach())
    kept = three.weight
    put_channels_last(nn.ModuleList([table, one, two, three]))
    assert [_is_last(layer.weight) for layer in (one, two, three)] == [False, False, True]
    assert not _is_last(table.get_parameter("weight"))
    assert three.weight is kept and one.weight.data_ptr() == two.weight.data_ptr()


def test_a_write_to_a_reordered_weight_is_noticed() -> None:
    weight = nn.Parameter(torch.randn(2, 4, 3, 3).to(memory_format=torch.channels_last))
    in_memory, writes = weight.data.permute(0, 2, 3, 1).view(-1), SilentWrites()
    for place in range(0, 64, 4):  # 16 of 72 elements are compared
        changed = writes.before([weight])
        in_memory[place] += 1
        assert changed() is weight


@pytest.mark.parametrize("engine", ["single", "gpipe", "myelin", "fsdp", "deepspeed", "sbp"])
def test_engines_that_flatten_weights_refuse_it(engine: str) -> None:
    config = compose([f"engine={engine}", "model=unet", "precision.channels_last=true"])
    found = [one for one in request(config, registry.build("engine", config.engine).capabilities, None)
             if one.key == "precision.channels_last"]  # fmt: skip
    assert bool(found) is (engine in ("myelin", "fsdp", "deepspeed", "sbp"))
    assert all(one.fixes == ({"precision.channels_last": False},) for one in found)
