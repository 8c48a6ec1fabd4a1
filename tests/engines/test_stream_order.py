"""Every engine orders its work on GPUs, gives no memory back too early, and its collectives would end on NCCL.

The GPUs are those of tests/support/fake_gpus.py: the engines run the code that they run on real ones. Sessions only
train; the module of engine=gpipe evaluates, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from engines.gpipe.engine import Config as GPipeConfig
from engines.gpipe.engine import build as build_gpipe
from engines.gpipe.gpipe_module import GPipe
from engines.periodic.engine import Config as PeriodicConfig
from engines.periodic.engine import build as build_periodic
from engines.single.engine import Config as SingleConfig
from engines.single.engine import build as build_single
from engines.torch_pipelining.engine import SCHEDULES
from harness.core import staleness
from harness.core.plan import Plan
from harness.interfaces import Batch, Engine, Model, Session, SessionSpec
from harness.nn import dropout
from harness.schedule.builders.myelin import ORDERS
from harness.schedule.families import FAMILIES
from planners.block_partition import even
from tests.engines import networks, test_ddp, test_fsdp, test_periodic, test_pipeline, test_sbp, test_torch_pipelining
from tests.engines.contract import Case
from tests.engines.deepspeed import cases as deepspeed
from tests.engines.delayed import test_engine as test_delayed
from tests.engines.myelin import cases as myelin
from tests.engines.periodic.patterns import plan as pattern_plan
from tests.support import collective_order
from tests.support.collective_log import recording, step_recorded
from tests.support.fake_gpus import fake_gpus
from tests.support.fake_libraries import deepspeed_on_gpus
from tests.support.fake_machine import MACHINE
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
    """Fails in its call number `at` of a kind, if it is not 0."""

    kind, at, calls = "forward", 0, 0

    def forward(self, x: Tensor) -> Tensor:
        Fails.called("forward")
        return _Backward.apply(x)  # type: ignore[no-any-return]

    @classmethod
    def called(cls, kind: str) -> None:
        cls.calls += kind == cls.kind
        if kind == cls.kind and cls.calls == cls.at:
            raise ZeroDivisionError("on purpose")


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        Fails.called("backward")
        return gradient


FAILING = networks.Network(
    "failing",
    lambda: [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), Fails(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)],
    lambda n: torch.randn(n, 4), lambda n: torch.randn(n, 2), lambda output, target: (output - target).square().sum(),
)  # fmt: skip


def on_gpus(case: Case) -> SessionSpec:
    """A GPU for each device of the plan."""
    count = max(case.plan.mesh.size, *(device + 1 for device in case.plan.devices))
    return replace(case.spec, devices=tuple(f"cuda:{number}" for number in range(count)))


def faults_of(case: Case, steps: int = 2, prepared: Callable[[Session], None] = lambda session: None) -> list[str]:
    """Those of the streams of all ranks, of which each has a GPU, and of what they call of torch.distributed.

    In each rank the session is `prepared`.
    """

    def train(session: Session) -> tuple[list[int], list[str]]:
        prepared(session)
        with step_recorded() as log:
            for _ in range(steps):
                session.step(case.model.sample(case.samples))
                session.state_dict()
        own = len(MACHINE.order.clocks), list(MACHINE.order.faults), log
        every: list[Any] = [own]
        if dist.is_initialized():
            every = [None] * dist.get_world_size()
            dist.all_gather_object(every, own)
        of_calls = collective_order.faults([log for *_, log in every])
        return [streams for streams, *_ in every], [*(fault for _, found, _ in every for fault in found), *of_calls]

    with recording(), fake_gpus():
        streams, faults = run_session(case.engine, case.model, case.plan, on_gpus(case), train)
    assert min(streams) > 1, "the GPUs were used"
    return faults


def stages(engine: Engine, model: Model, mode: str = "never", count: int = 3) -> Case:
    return Case(engine, model, Plan.contiguous(even(len(model.layers()), count), 4, mode))


def torchgpipe(model: Model, mode: str) -> Case:
    from tests.engines import test_torchgpipe  # skipped where the package is not installed

    return stages(test_torchgpipe.build(test_torchgpipe.Config(checkpoint=mode)), model, mode)


def periodic(model: Model, versions: str) -> Case:
    """Two of its three stages are on one device."""
    chosen = pattern_plan(even(len(model.layers()), 3), 4, test_periodic.PLACES[3], slack=1)
    return Case(build_periodic(PeriodicConfig(versions=versions)), model, chosen)


def delayed(model: Model, versions: str) -> Case:
    return Case(test_delayed.engine(3, versions), model, test_delayed.plan(even(len(model.layers()), 3), 4))


ALONE: dict[str, tuple[Callable[[Model, str], Case], Sequence[str], Sequence[str]]] = {
    "single": (lambda model, mode: stages(build_single(SingleConfig()), model, mode, 1), MODES, list(networks.ALL)),
    "gpipe": (
        lambda model, mode: stages(build_gpipe(GPipeConfig(checkpoint=mode)), model, mode),
        MODES,
        ["tied", "skips"],
    ),
    "torchgpipe": (torchgpipe, MODES, test_periodic.UNTIED),
    "periodic": (periodic, staleness.VERSIONS, test_periodic.UNTIED),
    "delayed": (delayed, staleness.VERSIONS, list(networks.ALL)),
}
"""Engines of one process: a case of a model and of a mode of recomputation, or of weights; which, and the networks."""


@pytest.mark.parametrize(
    ("engine", "model", "mode"),
    [
        (engine, models[number % len(models)], modes[number % len(modes)])
        for engine, (_, modes, models) in ALONE.items()
        for number in range(max(len(models), len(modes)))
    ],
)
@pytest.mark.filterwarnings("ignore:TypedStorage")
def test_engines_of_one_process(engine: str, model: str, mode: str) -> None:
    assert faults_of(ALONE[engine][0](networks.ALL[model], mode)) == []


@pytest.mark.parametrize(("name", "stages", "micro_batches"), [("pairs", 2, 4), ("skips", 3, 4), ("tokens", 2, 2)])
def test_queues_of_periodic(name: str, stages: int, micro_batches: int) -> None:
    assert faults_of(test_periodic.case(name, stages, micro_batches)) == []


@cache
def losses_after_an_error(engine: str, mode: str, kind: str = "forward", at: int = 0) -> list[float]:
    """Of two steps of three stages after one that has failed, if `at` is not 0; without faults."""
    case = ALONE[engine][0](FAILING, mode)
    with fake_gpus() as order, case.engine.session(case.model, case.plan, on_gpus(case)) as session:
        torch.manual_seed(1)
        batch = FAILING.sample(case.samples)
        Fails.kind, Fails.at, Fails.calls = kind, at, 0
        with pytest.raises(ZeroDivisionError) if at else nullcontext():
            session.step(batch) if at else None
        Fails.at = 0
        losses = [session.step(batch).loss for _ in range(2)]
        assert order.faults == []
    return losses


@pytest.mark.parametrize(("kind", "at"), [("forward", 1), ("forward", 3), ("backward", 3)])
@pytest.mark.parametrize(
    ("engine", "mode"),
    [
        (engine, mode)
        for engine, (_, modes, _) in ALONE.items()
        for mode in (modes if "flush" in modes else (modes[0], modes[-1]))
    ],
)
def test_a_step_after_one_that_failed(engine: str, mode: str, kind: str, at: int) -> None:
    """It is as if there had been none, but where some stages were updated before the error, which stays."""
    at = 6 if (kind, at, mode) == ("forward", 3, "always") else at  # in a recomputation
    losses = losses_after_an_error(engine, mode, kind, at)
    updated = mode in ("2bw", "stash", "none") and (kind == "backward" or at > 1)
    updated |= (engine, kind) == ("periodic", "backward")  # each stage after its own last backward pass
    assert losses == losses_after_an_error(engine, mode) or updated


ON_RANKS: dict[str, Callable[[], Case]] = {
    **{f"myelin {order}": (lambda order=order: myelin.case("skips", 2, order=order)) for order in ORDERS},
    **{f"myelin {order}, replicas": (lambda o=order: myelin.case("tied", 2, 2, m=2, order=o)) for order in ORDERS},
    "myelin, recomputed": lambda: myelin.case("norms", 2, 1, checkpoint_every="2"),
    "myelin, offload": lambda: myelin.case("tied", 2, 2, m=2, offload=True, bsize=7),
    "myelin, offload, 1f1b": lambda: myelin.case("pairs", 2, 1, offload=True, order="1f1b", checkpoint_every="auto"),
    "myelin, chunks": lambda: myelin.case("tied", 2, 2, m=2, k=1, bsize=11),
    **{
        f"pipeline {name}": (lambda n=n, name=name: scheduled(list(networks.ALL)[n % 6], name, (n + n // 6) % 3))
        for n, name in enumerate(FAMILIES)
    },
    "pipeline, skips, split": lambda: test_pipeline.case("skips", "zb_h1"),
    "pipeline, replicas": lambda: test_pipeline.case("tied", "1f1b", data=2),
    "pipeline, replicas, split": lambda: test_pipeline.case("tied", "zb_h1", data=2),
    "sbp, micro-batches": lambda: test_sbp.case("gpt", 2, 2),
    "sbp": lambda: test_sbp.case("vgg", 4, 1),
    "sbp, tied": lambda: test_sbp.case("tied", 2, 2),
    "sbp, norms": lambda: test_sbp.case("norms", 2, 1),
}
OF_LIBRARIES: dict[str, Callable[[], Case]] = {
    "ddp, tied": lambda: test_ddp.case("tied"),
    "ddp, norms": lambda: test_ddp.case("norms", bucket_mb=test_ddp.SMALL),
    **{
        f"fsdp, {name}": (lambda model=model, options=options: test_fsdp.case(model, **options))
        for model, (name, options) in zip(networks.ALL, test_fsdp.OPTIONS.items(), strict=False)
    },
    **{f"deepspeed, zero {zero}": (lambda z=zero: deepspeed.case("pairs", 1, 2, z, m=2)) for zero in range(4)},
    "deepspeed, stages": lambda: deepspeed.case("tied", 2, 1),
    "deepspeed, stages, recomputed": lambda: deepspeed.case("norms", 2, 2, 1, "always", m=2),
    **{
        f"torch_pipelining {name}": (lambda model=model, name=name: test_torch_pipelining.case(model, name))
        for model, name in zip(["skips", "pairs", "tokens", "shared"] * 2, SCHEDULES, strict=False)
    },
    "torch_pipelining, replicas": lambda: test_torch_pipelining.case("tied", "1f1b", data=2),
}
AT_LENGTH: dict[str, Callable[[], Case]] = {
    f"pipeline {name}, {model}, {MODES[mode]}": (lambda m=model, s=name, mode=mode: scheduled(m, s, mode))
    for name in FAMILIES
    for number, model in enumerate(networks.ALL)
    for mode in {number % 3, (number + 1) % 3}
}


def scheduled(model: str, schedule: str, mode: int) -> Case:
    return test_pipeline.case(model, schedule, checkpoint=MODES[mode])


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize(
    "name", [*ON_RANKS, *OF_LIBRARIES, *(pytest.param(name, marks=pytest.mark.soak) for name in AT_LENGTH)]
)
def test_engines_of_ranks(name: str) -> None:
    """An error ends the process of a rank: nothing runs there after it."""
    with deepspeed_on_gpus() if name.startswith("deepspeed") else nullcontext():
        assert faults_of((ON_RANKS | OF_LIBRARIES | AT_LENGTH)[name]()) == []
