"""float32, bfloat16, and bfloat16 in autocast: what is rounded is all that differs; bytes are those of what is sent."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from harness.interfaces import OptimizerSpec
from models.gpt.config import Config as GPTConfig
from models.gpt.gpt import build as build_gpt
from models.llama.config import Config as LlamaConfig
from models.llama.llama import build as build_llama
from models.mlp.config import Config as MLPConfig
from models.mlp.mlp import build as build_mlp
from tests.engines import zoo
from tests.support.sbp_plans import planned
from tests.support.sbp_runs import Outcome, Run, alone, check, check_sent, in_ranks

pytestmark = pytest.mark.usefixtures("ranks")

PLAIN = OptimizerSpec("sgd", lr=0.02, momentum=0.9)
UNIT = 2.0**-8
"""Half the distance from 1 to the next bfloat16: what one rounding may be wrong by."""
MODELS = {
    "mlp": build_mlp(MLPConfig(widths=[32, 64, 64, 8])),
    "gpt": build_gpt(GPTConfig(layers=2, hidden=32, heads=4, sequence=4, vocabulary=16)),
    "llama": build_llama(LlamaConfig(layers=2, width=32, heads=4, kv_heads=4, hidden=48, sequence=4, vocabulary=16)),
    "vgg": zoo.model("vgg"),
}


def runs(devices: int, dtype: str, autocast: str | None = None) -> list[Run]:
    found = []
    for model in MODELS.values():
        for ends, m in (("free", 1), ("batch_split", 2)):
            plan = planned(model, devices, 16, ends, m, dtype, 1e-8, autocast)  # type: ignore[arg-type]
            found.append(Run(model, plan, 16, PLAIN, dtype, autocast))
    return found


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("devices", [2, 4])
def test_float32(devices: int) -> None:
    check(runs(devices, "float32"), 2e-5)


def moved(first: dict[str, Tensor], last: dict[str, Tensor]) -> Tensor:
    return torch.cat([(last[name] - value).flatten().float() for name, value in first.items()])


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize(("dtype", "autocast"), [("float32", "bfloat16"), ("bfloat16", None)])
def test_bfloat16(dtype: str, autocast: str | None) -> None:
    """Losses to 4 roundings, how far all weights have moved in three steps to a tenth of that way."""
    some = runs(2, dtype, autocast)
    before = in_ranks([replace(run, steps=0) for run in some])
    for run, start, got in zip(some, before, in_ranks(some), strict=True):
        want: Outcome = alone(run)
        torch.testing.assert_close(got.losses, want.losses, rtol=4 * UNIT, atol=0.0)
        way = moved(start.state["model"], want.state["model"])
        mine = moved(start.state["model"], got.state["model"])
        assert torch.linalg.vector_norm(mine - way) < 0.1 * torch.linalg.vector_norm(way), str(run)
        check_sent(got, run)
