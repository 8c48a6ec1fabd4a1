"""Models of which a part is not trained: memory and bytes are predicted as they are measured, for every engine.

half    the first half of the layers, as a backbone that is kept
last    all layers but the last
lora    all weights but small matrices next to each, as adapters are
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.nn import functional

from harness.config import registry
from harness.core.cluster import Cluster
from harness.core.memory_model import named
from harness.core.plan import Mesh, Plan
from harness.interfaces import OptimizerSpec, Session
from harness.measure.count_model import count
from harness.simulator import simulate
from tests.engines import networks
from tests.engines.contract import Case
from tests.engines.networks import Network
from tests.support.sessions import run_session

pytestmark = pytest.mark.usefixtures("ranks")

WIDTH, DEPTH, SAMPLES = 96, 6, 16


class Adapted(nn.Module):
    """A linear layer that is not trained, with two small matrices next to it that are."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Block(nn.Module):
    def __init__(self, adapted: bool) -> None:
        super().__init__()
        self.one, self.two = (Adapted() if adapted else nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.two(functional.relu(self.one(x)))


def layers(kind: str) -> list[nn.Module]:
    found: list[nn.Module] = [Block(kind == "lora") for _ in range(DEPTH)]
    for layer in {"half": found[: DEPTH // 2], "last": found[:-1]}.get(kind, []):
        layer.requires_grad_(False)
    return found


def net(kind: str) -> Network:
    def rows(count: int) -> Tensor:
        return torch.randn(count, WIDTH)

    return Network(f"frozen_{kind}", lambda: layers(kind), rows, rows, networks._squares)


def case(kind: str, engine: str, mesh: dict[str, int], **keys: Any) -> Case:
    model, shape = net(kind), Mesh(**mesh)
    built = registry.build("engine", OmegaConf.create({"name": engine, **keys}))
    balance = [DEPTH // shape.pipeline] * shape.pipeline
    plan = replace(Plan.contiguous(balance, 2), mesh=shape)
    return Case(built, model, plan, "float32", optimizer=OptimizerSpec("adam", lr=1e-3), samples=SAMPLES)


def predicted(one: Case) -> dict[str, Any]:
    """The figures of a simulated step, each task of which takes a second."""
    plan = one.plan
    profile = count(one.model, one.samples // plan.micro_batches // plan.mesh.data, "float32")
    memory = replace(one.engine.memory(named("adam_fp32"), plan.mesh, profile), copies=one.engine.copies(plan))
    schedule = one.engine.schedule(plan, profile)
    seconds = dict.fromkeys(map(str, schedule.ops()), 1.0)
    cluster = Cluster(devices_per_node=plan.mesh.size)
    return simulate(schedule, plan, one.engine.layers(plan, profile), cluster, memory, durations=seconds).figures


def measured(one: Case) -> tuple[list[int], dict[str, int]]:
    """The peak of each device, and the bytes of a step."""

    def train(session: Session) -> tuple[list[int], dict[str, int]]:
        for _ in range(2):
            session.step(one.model.sample(one.samples))
        steps = [session.step(one.model.sample(one.samples), meter=True) for _ in range(2)]
        return [max(peaks) for peaks in zip(*(step.peak_memory_bytes or [] for step in steps), strict=True)], {
            kind: size for kind, size in steps[-1].bytes_sent.items() if size
        }

    return run_session(one.engine, one.model, one.plan, one.spec, train)


DATA, PIPELINE = {"data": 2}, {"pipeline": 2}
ENGINES: list[tuple[str, dict[str, int], dict[str, Any], float]] = [
    ("single", {}, {}, 0.05),
    ("ddp", DATA, {}, 0.05),
    ("fsdp", DATA, {"group_mb": 0}, 0.25),
    ("fsdp", DATA, {"group_mb": 0, "reshard_after_forward": False}, 0.25),
    ("fsdp", DATA, {"group_mb": 0, "reduce_each": False}, 0.25),
    ("deepspeed", DATA, {}, 0.1),
    ("deepspeed", DATA, {"zero": 1}, 0.15),
    ("deepspeed", DATA, {"zero": 2}, 0.1),
    ("deepspeed", DATA, {"zero": 3}, 0.3),
    ("deepspeed", PIPELINE, {}, 0.05),
    ("gpipe", PIPELINE, {"checkpoint": "never"}, 0.05),
    ("myelin", PIPELINE, {"transport": "torch"}, 0.12),
    ("myelin", DATA, {"transport": "torch"}, 0.12),
    ("pipeline", PIPELINE, {}, 0.05),
    ("pipeline", PIPELINE, {"schedule": "zb_h1"}, 0.1),
    ("pipeline", PIPELINE | DATA, {}, 0.08),
    ("torch_pipelining", PIPELINE, {}, 0.05),
]


@pytest.mark.parametrize("kind", ["half", "last", "lora"])
@pytest.mark.parametrize(
    ("engine", "mesh", "keys", "tolerance"),
    ENGINES,
    ids=[" ".join([name, *mesh, *map(str, keys.values())]) for name, mesh, keys, _ in ENGINES],
)
def test_memory_and_bytes_are_what_is_predicted(
    kind: str, engine: str, mesh: dict[str, int], keys: dict[str, Any], tolerance: float
) -> None:
    one = case(kind, engine, mesh, **keys)
    expected, (peaks, sent) = predicted(one), measured(one)
    assert sent or engine == "single"
    assert {kind: size for kind, size in expected["bytes_sent"].items() if size} == sent
    assert expected["peak_memory_bytes"] == pytest.approx(peaks, rel=tolerance)
