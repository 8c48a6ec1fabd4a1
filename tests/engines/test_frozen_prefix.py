"""Layers before all that are trained: they save nothing, have no backward pass, and get no message of gradients.

The cut is inside: stage 0 is frozen, stage 1 begins frozen. Layers there refuse a backward pass.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any, Literal

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from engines.myelin.engine import MyelinEngine
from engines.myelin.session import _profile
from harness.config import registry
from harness.core.cluster import Cluster, EngineCosts, TaskCost
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.plan import Mesh, Plan, Stage
from harness.interfaces import OptimizerSpec
from harness.measure.count_model import count
from harness.nn.skip import frozen_prefix, named_layers
from harness.runtime.stage_module import stage_modules
from harness.runtime.stage_passes import StagePasses
from harness.sbp.collective_volume import messages
from harness.sbp.matmul_chain import chain_from_profile
from harness.sbp.repeated_layers import entering
from harness.sbp.route import Move, Route
from harness.sbp.shortest_path import Ends
from harness.schedule.builders.one_f_one_b import one_f_one_b
from harness.schedule.frozen_stages import without_frozen
from harness.simulator import simulate
from harness.simulator.stage_bytes import HeldBytes
from tests.engines import contract, networks
from tests.engines.contract import Case
from tests.engines.networks import Network
from tests.engines.periodic import patterns
from tests.engines.test_frozen_weights import Adapted, measured, predicted
from tests.support.sbp_plans import costs_of, drawn, flat
from tests.support.sbp_runs import GENTLE, Run, check

pytestmark = pytest.mark.usefixtures("ranks")


class Refuse(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise RuntimeError("a backward pass of a frozen layer")


class Refusing(nn.Module):
    """A layer that has no backward pass."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)

    def forward(self, x: Any) -> Any:
        out = self.layer(x)
        return out if isinstance(out, tuple) else Refuse.apply(out)


def frozen(whole: Network, first: int) -> Network:
    """The network with its first layers frozen."""

    def layers() -> list[nn.Module]:
        found = whole.layers()
        refusing = [Refusing(one) if isinstance(one, nn.Linear | nn.Embedding) else one for one in found[:first]]
        for layer in refusing:
            layer.requires_grad_(False)
        return [*refusing, *found[first:]]

    return Network(f"{whole.name}, {first} frozen", layers, whole._inputs, whole._targets, whole._loss)


NETWORKS: dict[str, tuple[Network, list[int]]] = {
    "skips": (frozen(networks.skips(), 7), [5, 4, 5]),
    "into a stage": (frozen(networks.skips(), 5), [4, 5, 5]),
    "last alone": (frozen(networks.skips(), 13), [5, 5, 4]),
    "embedding": (frozen(networks.tokens(), 2), [1, 3, 2]),
    "pairs": (frozen(networks.pairs(), 4), [3, 3, 2]),
    "norms": (frozen(networks.norms(), 3), [2, 2, len(networks.norms().layers()) - 4]),
    "at the cut": (frozen(networks.skips(), 4), [5, 5, 4]),
}


class Shifted(nn.Module):
    """Token ids to others."""

    def forward(self, ids: Tensor) -> Tensor:
        return (ids + 3) % 11


def shifted() -> Network:
    """No weights are frozen, and of what leaves the first two layers, integers, there is no gradient."""
    whole = networks.tokens()
    return Network(
        "shifted", lambda: [Shifted(), Shifted(), *whole.layers()], whole._inputs, whole._targets, whole._loss
    )


ENGINES: dict[str, tuple[str, dict[str, Any], str]] = {
    "1f1b": ("pipeline", {}, "never"),
    "1f1b, recomputed": ("pipeline", {"checkpoint": "always"}, "always"),
    "zb_h1": ("pipeline", {"schedule": "zb_h1"}, "never"),
    "gpipe": ("gpipe", {"checkpoint": "never"}, "never"),
    "gpipe, recomputed": ("gpipe", {"checkpoint": "always"}, "always"),
    "gpipe, no portals": ("gpipe", {"checkpoint": "except_last", "portals": False}, "except_last"),
    "gpipe, no streams": ("gpipe", {"checkpoint": "never", "streams": False, "dependency": False}, "never"),
    "myelin": ("myelin", {"transport": "torch"}, "never"),
    "myelin, recomputed": ("myelin", {"transport": "torch", "checkpoint_every": "1"}, "never"),
    "torch_pipelining": ("torch_pipelining", {}, "never"),
    "torch 1f1b": ("torch_pipelining", {"schedule": "1f1b"}, "never"),
    "deepspeed": ("deepspeed", {}, "never"),
    "deepspeed, recomputed": ("deepspeed", {"checkpoint": "always"}, "always"),
    "torchgpipe": ("torchgpipe", {"checkpoint": "never"}, "never"),
    "torchgpipe, recomputed": ("torchgpipe", {"checkpoint": "always"}, "always"),
    "periodic": ("periodic", {"versions": "flush"}, "never"),
    "delayed": ("delayed", {"stages": 3, "versions": "flush"}, "never"),
}


def plan(engine: str, balance: list[int], mode: str, m: int = 4) -> Plan:
    if engine == "periodic":
        return patterns.plan(balance, m)
    found = Plan.contiguous(balance, m, mode)
    if engine == "delayed":
        return replace(found, mesh=Mesh(), stages=tuple(Stage(one.first, one.last, 0) for one in found.stages))
    return found


def case(engine: str, network: Network, balance: list[int], m: int = 4, **kept: Any) -> Case:
    name, keys, mode = ENGINES[engine]
    built = registry.build("engine", OmegaConf.create({"name": name, **keys}))
    return Case(built, network, plan(name, balance, mode, m), **kept)


@pytest.mark.full
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("engine", ENGINES)
def test_it_trains_like_single_and_refuses_no_backward_pass(engine: str, network: str) -> None:
    contract.check_training(contract.gentle(case(engine, *NETWORKS[network])))


@pytest.mark.full
@pytest.mark.parametrize("balance", [[1, 1, 6], [2, 3, 3]])
@pytest.mark.parametrize("engine", [name for name in ENGINES if not name.startswith("deepspeed")])
def test_integers_alone_go_between_stages(engine: str, balance: list[int]) -> None:
    """DeepSpeed asserts that there are gradients."""
    contract.check_training(contract.gentle(case(engine, shifted(), balance)))


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["interleaved1f1b", "zbv", "interleaved_zb"])
@pytest.mark.parametrize("engine", ["pipeline", "torch_pipelining"])
@pytest.mark.parametrize("first", [3, 9, 13])
def test_devices_with_several_stages(engine: str, schedule: str, first: int) -> None:
    built = registry.build("engine", OmegaConf.create({"name": engine, "schedule": schedule}))
    homes = built.placement(2)
    parts = [4, 4, 3, 3]
    stages = tuple(Stage(sum(parts[:j]), sum(parts[: j + 1]) - 1, device) for j, device in enumerate(homes))
    chosen = Plan(Mesh(pipeline=2), stages, 4)
    contract.check_training(contract.gentle(Case(built, frozen(networks.skips(), first), chosen)))


# -- memory and bytes -------------------------------------------------------------------------------------------------

WIDTH, DEPTH, SAMPLES, MICRO_BATCHES = 24, 6, 6144, 24
TENSOR = SAMPLES // MICRO_BATCHES * WIDTH * 4
"""Bytes of what goes from layer to layer. A forward pass that saves nothing works with some, which no profile has, and
some are on their way."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(functional.relu(self.one(x)))


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Adapted(WIDTH), Adapted(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(functional.relu(self.one(x)))


def wide(kind: str) -> Network:
    """Activations, not weights, take the memory."""
    trained: dict[str, Callable[[int], bool]] = {
        "half": lambda number: number >= DEPTH // 2,
        "last": lambda number: number == DEPTH - 1,
        "first": lambda number: number == 0,
        "all": lambda number: True,
    }

    def layers() -> list[nn.Module]:
        if kind == "lora":
            return [*(Lora() for _ in range(DEPTH - 1)), nn.Linear(WIDTH, 1)]
        found: list[nn.Module] = [*(Block() for _ in range(DEPTH - 1)), nn.Linear(WIDTH, 1)]
        for number, layer in enumerate(found):
            layer.requires_grad_(trained[kind](number))
        return found

    def draw(n: int) -> Tensor:
        return torch.randn(n, WIDTH)

    return Network(f"wide, {kind}", layers, draw, lambda n: torch.randn(n, 1), networks._squares)


MEASURED = [name for name in ENGINES if not name.startswith("torchgpipe")]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["half", "last", "first", "lora", "all"])
@pytest.mark.parametrize("engine", MEASURED)
def test_memory_and_bytes_of_activations_are_predicted(engine: str, kind: str) -> None:
    """A stage that keeps a tensor of each micro-batch is seen. Only Myelin's frozen stages run ahead of all others."""
    adam = OptimizerSpec("adam", lr=1e-3)
    one = case(engine, wide(kind), [2, 2, 2], MICRO_BATCHES, dtype="float32", optimizer=adam, samples=SAMPLES)
    expected, (peaks, sent) = predicted(one), measured(one)
    assert {kind: size for kind, size in expected["bytes_sent"].items() if size} == sent
    prefix = count(one.model, 1, "float32").frozen_prefix
    more = MICRO_BATCHES + 2 if engine.startswith("myelin") and prefix else MICRO_BATCHES // 2
    for bytes_, peak in zip(expected["peak_memory_bytes"], peaks, strict=False):
        assert bytes_ == pytest.approx(peak, rel=0.06, abs=more * TENSOR)


@pytest.mark.parametrize("kind", ["half", "last", "first"])
@pytest.mark.parametrize("ends", ["free", "batch_split"])
def test_sbp_sends_what_is_planned(kind: str, ends: Ends) -> None:
    """Also moves, of which those within the prefix have no way back."""
    network = wide(kind)
    profile, dice = count(network, 8, "float64"), random.Random(4)
    runs = [Run(network, drawn(profile, 4, ends, 2, dice), 16, GENTLE) for _ in range(4)]
    check(runs)


def test_what_comes_from_a_frozen_stage_is_released() -> None:
    layers = wide("last").layers()
    frozen_stage, last = stage_modules(layers, Plan.contiguous([3, 3], 1), [0, 1])
    assert (frozen_stage.has_backward, last.has_backward) == (False, True)
    passes = StagePasses(last)
    passes.arrived(0, "", [torch.randn(5, WIDTH)], forward=True)
    passes.forward(0, None)
    assert passes.inputs == {0: {}}


def test_moves_within_a_frozen_prefix_go_one_way() -> None:
    profile = count(wide("half"), 8, "float64")
    costs = costs_of(profile, flat(4), 1)
    places, chain = costs.places, chain_from_profile(profile)
    source, target = places[0], places[-1]
    moves = [Move(entering(item), source, target) for item in chain.items]
    phases = [[message.phase for message in messages(Route((move,), 0.0), costs)] for move in moves]
    assert phases == [["forward"]] * 7 + [["forward", "backward"]] * 4
    seconds = [costs.moving(move.elements)[0, -1] for move in moves]
    assert seconds == [pytest.approx(seconds[-1] / 2)] * 7 + [seconds[-1]] * 4


def test_a_schedule_without_what_a_frozen_prefix_does_not_need() -> None:
    """Of 0, frozen, nothing is recomputed; to 0 and its skip no gradient goes, of 1 those of its own output do."""
    network, balance = NETWORKS["skips"]
    profile = count(network, 2, "float32")
    assert profile.frozen_prefix == 8
    one = case("gpipe, recomputed", network, balance)
    ops = {str(op) for op in one.engine.schedule(one.plan, profile).ops()}
    assert {"0B0", "1R0", "1copy0<2", "1copy0<0:a"} <= ops
    assert not {"0R0", "0copy0<1", "0copy0<1:a", "0copy0<2:b", "1copy0<2:c"} & ops
    whole = count(networks.skips(), 2, "float32")
    assert whole.frozen_prefix == 0
    schedule = one.engine.schedule(one.plan, whole)
    assert without_frozen(schedule, one.plan, whole) is schedule
    assert {"0R0", "0copy0<1"} <= {str(op) for op in schedule.ops()}


@pytest.mark.parametrize("rule", ["fifo", "forward_first"])
@pytest.mark.parametrize("limit", [1, 2, 3])
def test_the_first_stage_with_a_backward_pass_keeps_the_limit(rule: str, limit: int) -> None:
    """Myelin's rank of it takes its order from the schedule, and so does the simulation; ranks of frozen stages wait
    for nothing."""
    m, keys = 9, {"name": "myelin", "transport": "torch", "policy": rule, "pipeline_limit": limit}
    engine = registry.build("engine", OmegaConf.create(keys))
    assert isinstance(engine, MyelinEngine)
    frozen_layer = LayerProfile(forward_s=0.01, param_bytes=4, weights=1, frozen_bytes=4, frozen_weights=1)
    trained = LayerProfile(forward_s=1.0, backward_s=2.0, param_bytes=4, weights=1)
    profile, whole = ModelProfile((frozen_layer, *[trained] * 3)), Plan.contiguous([1] * 4, m)
    schedule = engine.schedule(whole, profile)
    queues = {queue.device: queue for queue in schedule.queues if queue.name == "compute"}
    assert [queues[device].rule for device in range(4)] == ["in_order", "in_order", rule, "in_order"]
    alive = [1 if op.kind == "F" else -1 for op in queues[1].ops if op.kind in ("F", "B")]
    assert max(accumulate(alive)) == limit
    done = simulate(schedule, whole, profile, Cluster(devices_per_node=4), MemoryModel())
    ran = [span.parsed.kind for span in done.trace.queues()[1, "compute"]]
    assert max(accumulate({"F": 1, "B": -1}.get(kind, 0) for kind in ran)) <= limit
    assert [op.kind for op in queues[1].ops] == ran
    assert without_frozen(schedule, whole, ModelProfile((trained,) * 4)) is schedule


ZEROS = ["deepspeed", "torchgpipe, recomputed"]


@pytest.mark.parametrize("engine", [*ZEROS, "gpipe, recomputed", "torchgpipe"])
def test_what_a_frozen_stage_takes(engine: str) -> None:
    """Where zeros come back, its backward tasks take what the engine takes for one; elsewhere nothing. Spans do
    not have what the host takes before them."""
    one = case(engine, wide("last"), [2, 2, 2])
    costs = EngineCosts(one.engine.config.name, "sgd", (TaskCost("B", 8.0),), host_s=4.0)
    cluster = Cluster(devices_per_node=3, engines=(costs,))
    profile = ModelProfile(tuple(replace(layer, forward_s=1.0) for layer in count(one.model, 1, "float32").layers))
    schedule = one.engine.schedule(one.plan, profile)
    done = simulate(schedule, one.plan, profile, cluster, MemoryModel())
    [taken] = [span.end_s - span.start_s for span in done.trace.spans if span.op == "0B0"]
    assert taken == pytest.approx(8.0 if engine in ZEROS else 0.0)


@pytest.mark.parametrize("messages", ["copied", "passing"])
def test_what_a_library_copies_it_keeps(messages: Literal["copied", "passing"]) -> None:
    """Until the backward task, whether its gradient is needed or not."""
    network, balance = NETWORKS["into a stage"]
    profile, memory = count(network, 1, "float32"), MemoryModel(messages=messages)
    one = Plan.contiguous(balance, 2)
    held = HeldBytes(without_frozen(one_f_one_b(2, range(3), []), one, profile), one, profile, memory, {})
    assert [held.used_once(stage, "") for stage in range(3)] == [messages == "passing"] * 2 + [False]


@pytest.mark.parametrize("shape", [(0,), (3,)])
def test_a_trained_weight_without_elements_ends_the_prefix(shape: tuple[int, ...]) -> None:
    layers = wide("last").layers()
    layers[2].register_parameter("more", nn.Parameter(torch.zeros(shape)))
    network = Network("more", lambda: layers, lambda n: torch.randn(n, WIDTH), lambda n: torch.randn(n, 1), max)
    assert frozen_prefix(named_layers(network.layers())) == 2
    assert count(network, 1, "float32").frozen_prefix == 2
    assert _profile(network.layers(), "float32").frozen_prefix == 2
