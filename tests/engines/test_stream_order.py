"""Every engine that uses streams itself orders its work on GPUs, and gives no memory back too early.

The GPUs are those of tests/support/fake_gpus.py: the engines run the code that they run on real ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from engines.gpipe.gpipe_module import GPipe
from harness.interfaces import Batch, Session
from harness.nn import dropout
from harness.schedule.builders.myelin import ORDERS
from harness.schedule.families import FAMILIES
from tests.engines import networks, test_ddp, test_periodic, test_pipeline, test_sbp
from tests.engines.contract import Case
from tests.engines.myelin import cases as myelin
from tests.support.fake_gpus import MACHINE, fake_gpus
from tests.support.sessions import run_session

MODES = ("never", "except_last", "always")
COMPONENTS = ("streams", "portals", "dependency")


def placed(batch: Batch, last: str) -> tuple[Tensor, Tensor]:
    inputs, targets = (one.double() if one.is_floating_point() else one for one in (batch.inputs, batch.targets))
    return inputs.to("cuda:0"), targets.to(last)


def pipeline(name: str, mode: str = "never", **options: Any) -> tuple[GPipe, networks.Network]:
    torch.manual_seed(0)
    network = networks.ALL[name]
    layers = network.layers().double()
    dropout.number(layers)
    third = len(layers) // 3
    balance = [len(layers) - 2 * third, third, third]
    return GPipe(layers, balance, [f"cuda:{k}" for k in range(3)], 4, mode, **options), network


@pytest.mark.parametrize(
    ("name", "mode", "options"),
    [
        *((name, MODES[number % 3], {}) for number, name in enumerate(networks.ALL)),
        *(("skips", mode, {}) for mode in MODES),
        *((name, "except_last", {key: False}) for name in ("skips", "tied") for key in COMPONENTS),
    ],
)
def test_gpipe_trains(name: str, mode: str, options: dict[str, bool]) -> None:
    with fake_gpus() as order:
        pipe, network = pipeline(name, mode, **options)
        for _ in range(2):
            inputs, targets = placed(network.sample(8), "cuda:2")
            network.loss(pipe(inputs), targets).backward()
            pipe.zero_grad()
        assert len(order.clocks) > 3
        assert order.faults == []


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("name", networks.ALL)
def test_gpipe_evaluates(name: str, streams: bool) -> None:
    with fake_gpus() as order, torch.no_grad():
        pipe, network = pipeline(name, streams=streams)
        for _ in range(2):
            inputs, targets = placed(network.sample(8), "cuda:2")
            network.loss(pipe.eval()(inputs), targets)
        assert order.faults == []


class Fails(nn.Module):
    """Raises in one of its calls."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.calls, self.call = 0, call

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.call:
            raise ValueError("as it should")
        return x


@pytest.mark.parametrize("call", [1, 3, 6])
@pytest.mark.parametrize("mode", ["never", "always"])
def test_a_pass_after_one_that_failed(mode: str, call: int) -> None:
    """With recomputation the sixth call is in the backward pass."""
    with fake_gpus() as order:
        layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), Fails(call), nn.Linear(4, 4), nn.Tanh())
        pipe = GPipe(layers.double(), [2, 2, 2], [f"cuda:{k}" for k in range(3)], 4, mode)
        failed = 0
        for _ in range(3):
            x = torch.randn(8, 4, dtype=torch.float64).to("cuda:0")
            try:
                pipe(x).square().sum().backward()
            except ValueError:
                failed += 1
        assert failed == 1
        assert order.faults == []


def faults_of(case: Case, steps: int = 2, prepared: Callable[[Session], None] = lambda session: None) -> list[str]:
    """Those of all ranks, where each GPU has one; in each the session is `prepared`."""
    count = max(case.plan.mesh.size, *(device + 1 for device in case.plan.devices))
    spec = replace(case.spec, devices=tuple(f"cuda:{number}" for number in range(count)))

    def train(session: Session) -> tuple[int, list[str]]:
        prepared(session)
        for _ in range(steps):
            session.step(case.model.sample(case.samples))
            session.state_dict()
        own = len(MACHINE.order.clocks), list(MACHINE.order.faults)
        if not dist.is_initialized():
            return own
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, own)
        return min(streams for streams, _ in every), [fault for _, faults in every for fault in faults]

    with fake_gpus():
        streams, faults = run_session(case.engine, case.model, case.plan, spec, train)
    assert streams > 1, "the GPUs were used"
    return faults


@pytest.mark.parametrize(("name", "stages", "micro_batches"), [("pairs", 2, 4), ("skips", 3, 4), ("tokens", 2, 2)])
def test_queues_of_periodic(name: str, stages: int, micro_batches: int) -> None:
    assert faults_of(test_periodic.case(name, stages, micro_batches)) == []


@pytest.mark.parametrize("name", networks.ALL)
def test_single(name: str) -> None:
    assert faults_of(test_ddp.case(name).reference) == []


ON_RANKS: dict[str, Callable[[], Case]] = {
    **{f"myelin {order}": (lambda order=order: myelin.case("skips", 2, order=order)) for order in ORDERS},
    "myelin, replicas": lambda: myelin.case("tied", 2, 2, m=2),
    "myelin, offload": lambda: myelin.case("tied", 2, 2, m=2, offload=True, bsize=7),
    "myelin, chunks": lambda: myelin.case("norms", 2, 2, m=2, k=1, bsize=11),
    **{f"pipeline {name}": (lambda name=name: test_pipeline.case("skips", name)) for name in FAMILIES},
    "pipeline, recomputed": lambda: test_pipeline.case("norms", "zbv", checkpoint="always"),
    "pipeline, replicas": lambda: test_pipeline.case("tied", "1f1b", data=2),
    "sbp, micro-batches": lambda: test_sbp.case("gpt", 2, 2),
    "sbp": lambda: test_sbp.case("vgg", 4, 1),
}


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("name", ON_RANKS)
def test_engines_of_ranks(name: str) -> None:
    assert faults_of(ON_RANKS[name]()) == []
