"""engine.mixed_precision=policy: shards in float32, of which layers get bfloat16, and sums of gradients in float32."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.func import functional_call

from engines.fsdp import engine as fsdp_config
from engines.fsdp.engine import Config, build
from harness.config import registry
from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel, named
from harness.core.model_profile import LayerProfile, ModelProfile, Tied
from harness.core.plan import Mesh, Plan
from harness.core.problem import ProblemError
from harness.core.products import Product
from harness.interfaces import Batch, Model, OptimizerSpec, Session, SessionSpec
from harness.measure.count_model import count
from harness.nn import dropout
from harness.nn.skip import named_layers
from harness.runtime.training_state import initial_layers, split_batch
from harness.simulator import simulate
from tests.engines import networks, zoo
from tests.engines.contract import Case
from tests.engines.networks import Network
from tests.engines.test_resuming import ADAM, DRAWS, STEPS, check, flat, losses
from tests.support.sessions import run_session

pytestmark = pytest.mark.usefixtures("ranks")

MOMENTUM = OptimizerSpec("sgd", lr=0.05, momentum=0.9)


@dataclass(frozen=True)
class Mixed(Case):
    """A case in mixed precision."""

    autocast: str = "bfloat16"

    @property
    def spec(self) -> SessionSpec:
        return replace(super().spec, autocast=self.autocast)


def mixed(model: Model, data: int = 2, autocast: str = "bfloat16", **options: Any) -> Mixed:
    plan = replace(Plan.contiguous([len(model.layers())], 2), mesh=Mesh(data=data))
    engine = build(Config(**{"mixed_precision": "policy", **options}))
    return Mixed(engine, model, plan, "float32", optimizer=MOMENTUM, samples=16, autocast=autocast)


def batches(case: Case, steps: int) -> list[Batch]:
    torch.manual_seed(3)
    return [case.model.sample(case.samples) for _ in range(steps)]


@dataclass
class Trained:
    """Losses, and the state after the first step and after the last one."""

    losses: list[float]
    states: list[dict[str, Tensor]]


def trained(case: Case, steps: int) -> Trained:
    def work(session: Session) -> Trained:
        found, states = [], []
        for batch in batches(case, steps):
            found.append(session.step(batch).loss)
            states.append(session.state_dict().get("model", {}))
        return Trained(found, [states[0], states[-1]])

    return run_session(case.engine, case.model, case.plan, case.spec, work)


def by_hand(case: Mixed, steps: int) -> Trained:
    """The same in one process: weights in float32, a copy of them in bfloat16 for each micro-batch of each replica.

    Batch norms get these copies in float32, in which their statistics are.
    """
    low, whole = getattr(torch, case.autocast), initial_layers(case.model, case.spec)
    replicas = [deepcopy(whole) for _ in range(case.plan.mesh.data)]
    weights = {name: one.detach().clone() for name, one in whole.named_parameters()}
    speed: dict[str, Tensor] = {}
    norms = {name for name, one in whole.named_modules() if isinstance(one, nn.modules.batchnorm._BatchNorm)}
    for replica in replicas:
        for layer in dict.fromkeys(layer for _, layer in named_layers(replica)):
            if [*layer.parameters()]:
                layer.register_forward_pre_hook(lambda _, arrived: cast(arrived, low))
    found, states = [], []
    for step, batch in enumerate(batches(case, steps)):
        sums = {name: torch.zeros_like(one) for name, one in weights.items()}
        total, micro_batches = 0.0, case.plan.micro_batches
        for i, (replica, share) in enumerate(zip(replicas, split_batch(batch, len(replicas)), strict=True)):
            for j, part in enumerate(split_batch(share, micro_batches)):
                copies = {name: one.to(low).requires_grad_() for name, one in weights.items()}
                given = {name: one.float() if name.rpartition(".")[0] in norms else one for name, one in copies.items()}
                with dropout.keyed(case.spec.seed, step, i * micro_batches + j):
                    output = functional_call(replica, given, (cast(part.inputs, low),))
                loss = case.model.loss(output, part.targets) / case.samples
                loss.backward()
                total += float(loss.detach())
                for name, one in copies.items():
                    sums[name] += 0.0 if one.grad is None else one.grad.float()
        for name, gradient in sums.items():
            speed[name] = gradient if name not in speed else 0.9 * speed[name] + gradient
            if dict(whole.named_parameters())[name].requires_grad:
                weights[name] -= 0.05 * speed[name]
        found.append(total)
        states.append({name: one.clone() for name, one in weights.items()} | statistics(replicas))
    return Trained(found, [states[0], states[-1]])


def cast(value: Any, low: torch.dtype) -> Any:
    if isinstance(value, tuple):
        return tuple(cast(one, low) for one in value)
    return value.to(low) if value.is_floating_point() else value


def statistics(replicas: list[nn.Sequential]) -> dict[str, Tensor]:
    buffers = [dict(replica.named_buffers()) for replica in replicas]
    names = [name for name in buffers[0] if "running" in name]
    return {name: torch.stack([own[name] for own in buffers]).mean(0) for name in names}


def shares_weights() -> Network:
    """Two layers with the same weight, which the root gathers; the second one gets float32 of the one before."""

    class Widened(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.float().tanh()

    def layers() -> list[nn.Module]:
        twice = nn.Linear(8, 8)
        return [twice, nn.LayerNorm(8), Widened(), twice, nn.BatchNorm1d(8), nn.Linear(8, 3)]

    return Network("shares", layers, lambda n: torch.randn(n, 8), lambda n: torch.randn(n, 3), networks._squares)


MODELS: dict[str, Model] = {
    "shares": shares_weights(),
    **{name: networks.ALL[name] for name in ("norms", "pairs", "tied", "skips")},
    **{name: zoo.model(name) for name in ("gpt", "llama", "resnet")},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "torch's own": {},
    "kept": {"group_mb": 0, "reshard_after_forward": False},
    "at once": {"group_mb": 0, "reduce_each": False},
    "kept, at once": {"reshard_after_forward": False, "reduce_each": False},
}


def agree(case: Mixed) -> None:
    """To the last bits after a step; then a weight may be rounded to another bfloat16 number."""
    got, want = trained(case, 4), by_hand(case, 4)
    assert got.losses[0] == pytest.approx(want.losses[0], rel=1e-6)
    assert got.losses == pytest.approx(want.losses, rel=2**-7)
    for mine, theirs, atol in zip(got.states, want.states, (1e-6, 2**-8), strict=True):
        assert {one.dtype for one in mine.values()} <= {torch.float32, torch.int64}
        for name, value in theirs.items():
            torch.testing.assert_close(mine[name], value, rtol=1e-5, atol=atol, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("model", MODELS)
def test_trains_as_weights_that_are_cast_by_hand(model: str) -> None:
    agree(mixed(MODELS[model]))


@pytest.mark.parametrize("data", [1, 2, 4])
@pytest.mark.parametrize("options", OPTIONS)
def test_with_any_settings_and_number_of_ranks(options: str, data: int) -> None:
    agree(mixed(MODELS["shares"], data, **OPTIONS[options]))


def test_losses_fall() -> None:
    """As those of autocast do, which are near."""

    def of(mixed_precision: str) -> list[float]:
        case = mixed(zoo.model("gpt"), mixed_precision=mixed_precision)
        (batch,) = batches(case, 1)
        steps = range(12)
        return run_session(
            case.engine, case.model, case.plan, case.spec, lambda one: [one.step(batch).loss for _ in steps]
        )

    found = of("policy")
    assert found[-1] < 0.95 * found[0] and found == pytest.approx(of("autocast"), rel=0.01)


def test_takes_float16() -> None:
    agree(mixed(MODELS["shares"], autocast="float16"))


@pytest.mark.parametrize("sharded", [False, True])
def test_losses_are_those_of_a_run_that_was_not_stopped(sharded: bool, tmp_path: Path) -> None:
    own = flat(build, Config(mixed_precision="policy"), 1, 2, model=DRAWS)
    case = Mixed(own.engine, own.model, own.plan, "float32", optimizer=ADAM)
    if not sharded:
        return check(case, tmp_path)
    straight, stopped = losses(case, tmp_path / "a"), losses(case, tmp_path / "b", stops=True, sharded=True)
    assert 0 < len(stopped) < STEPS and stopped == straight[: len(stopped)]
    assert losses(case, tmp_path / "b", sharded=True) == straight


class Doubled(nn.Module):
    """A buffer in float32, and a matmul with what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("two", torch.full((4,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x * self.two)
        return found


def test_a_layer_that_computes_in_another_dtype_is_refused_with_a_fix() -> None:
    net = Network("buffers", lambda: [Doubled()], lambda n: torch.randn(n, 4), lambda n: torch.randn(n, 4),
                  networks._squares)  # fmt: skip
    case = mixed(net)
    with pytest.raises(ProblemError, match="one computes with another dtype, too") as error:
        trained(case, 1)
    (problem,) = error.value.problems
    assert (problem.key, problem.fixes) == ("engine.mixed_precision", ({"engine.mixed_precision": "autocast"},))
    assert any("layer '0'" in str(note) for note in error.value.__notes__)
    assert trained(replace(case, engine=build(Config())), 1).losses, "the fix works"


class Unknown(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("unknown token type 7")


@pytest.mark.parametrize(("layer", "text"), [(nn.Linear(5, 4), "shapes"), (Unknown(4, 4), "unknown token type 7")])
def test_another_error_of_a_layer_stays_as_it_is(layer: nn.Module, text: str) -> None:
    net = Network("wrong", lambda: [layer], lambda n: torch.randn(n, 4), lambda n: torch.randn(n, 4), networks._squares)
    with pytest.raises(RuntimeError, match=text):
        trained(mixed(net), 1)


def predicted(case: Mixed) -> dict[str, Any]:
    """The figures of a simulated step, each task of which takes a second."""
    profile = count(case.model, case.samples // 2 // case.plan.mesh.data, "float32", case.autocast)
    memory = case.engine.memory(named("sgd_fp32"), case.plan.mesh, profile)
    schedule = case.engine.schedule(case.plan, profile)
    seconds = dict.fromkeys(map(str, schedule.ops()), 1.0)
    layers, cluster = case.engine.layers(case.plan, profile), Cluster(devices_per_node=case.plan.mesh.data)
    return simulate(schedule, case.plan, layers, cluster, memory, durations=seconds).figures


@pytest.mark.fast
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_gathers_half_of_the_bytes(options: dict[str, Any]) -> None:
    """As the simulator says; sums of gradients stay."""

    def layers() -> list[nn.Module]:
        twice = nn.Linear(8, 8)
        return [twice, nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 8), twice]

    net = Network("even", layers, lambda n: torch.randn(n, 8), lambda n: torch.randn(n, 8), networks._squares)
    case = mixed(net, **options)
    plain = replace(case, engine=build(Config(**options)))

    def sent(one: Mixed) -> dict[str, int]:
        return run_session(one.engine, net, one.plan, one.spec, lambda session: session.step(net.sample(16)).bytes_sent)

    found, whole = sent(case), sent(plain)
    assert found == Counter(all_gather=whole["all_gather"] // 2, reduce_scatter=whole["reduce_scatter"])
    assert found == predicted(case)["bytes_sent"] and whole == predicted(plain)["bytes_sent"]


@pytest.mark.parametrize(
    ("options", "weights", "gradients"),
    [
        ({"group_mb": 0}, 1 / 4 + (2 + 2 * 8) / 2 / 16 + 8 / 16, 1 / 4),
        ({}, 1 / 4 + (2 + 2 * 14) / 2 / 16 + 14 / 16, 1 / 4),
        ({"reshard_after_forward": False}, 1 / 4 + 1 / 2 + 14 / 16, 1 / 4),
        ({"reduce_each": False}, 1 / 4 + (2 + 2 * 14) / 2 / 16 + 14 / 16, 1),
    ],
)
def test_the_memory_model_has_half_of_what_is_gathered(
    options: dict[str, Any], weights: float, gradients: float
) -> None:
    """And the gradients of a group in float32, on their way out."""
    tied = LayerProfile("tied", param_bytes=2, tied=(Tied("tied.weight", 2),))
    layers = (tied, LayerProfile("a", param_bytes=6), LayerProfile("b", param_bytes=8), tied)
    engine, mesh = build(Config(mixed_precision="policy", **options)), Mesh(data=4)
    model = engine.memory(MemoryModel(optimizer=2.0), mesh, ModelProfile(layers, autocast="bfloat16"))
    assert (model.weights, model.gradients, model.optimizer) == (weights, gradients, 0.5)
    whole = build(Config(**options)).memory(MemoryModel(optimizer=2.0), mesh, ModelProfile(layers))
    assert engine.memory(MemoryModel(optimizer=2.0), mesh, ModelProfile(layers)) == whole


def test_no_copies_of_weights_are_kept_for_the_backward_pass() -> None:
    """Autocast makes one of each weight of a matmul, of a look-up none."""
    twice = Product("up", weight_bytes=64)
    products = (Product("table", "embedding", weight_bytes=400), twice, twice, Product("scores", "attention"))
    layer = LayerProfile("block", param_bytes=464, saved_bytes=100, products=products)
    profile, plan = ModelProfile((layer,), autocast="bfloat16"), Plan.contiguous([1], 2)
    (kept,) = build(Config(mixed_precision="policy")).layers(plan, profile).layers
    assert kept == replace(layer, saved_bytes=100 - 32)
    assert build(Config()).layers(plan, profile) == profile


@pytest.mark.usefixtures("no_workspaces")
@pytest.mark.parametrize(
    ("model", "keys", "tolerance"),
    [
        ("gpt", {}, 0.2),
        ("unet", {"channels": 8, "size": 64, "convs": 1}, 0.15),
        ("resnet", {"size": 64}, 0.15),
    ],
)
def test_memory_is_what_is_predicted(model: str, keys: dict[str, int], tolerance: float) -> None:
    """Up to what norms keep: float32 under autocast, which the profile has."""
    case = replace(mixed(registry.build("model", OmegaConf.create({"name": model, **keys}))), samples=8)
    case = replace(case, optimizer=OptimizerSpec("sgd", lr=0.01))

    def fullest(session: Session) -> int:
        session.step(case.model.sample(8))
        steps = [session.step(case.model.sample(8), meter=True) for _ in range(2)]
        return max(peak for step in steps for peak in step.peak_memory_bytes or [])

    measured = run_session(case.engine, case.model, case.plan, case.spec, fullest)
    assert predicted(case)["peak_memory_bytes"] == [pytest.approx(measured, rel=tolerance)]


def test_a_way_of_mixing_that_nobody_knows() -> None:
    (found,) = fsdp_config.check(Config(mixed_precision="polcy"))
    assert found.key == "engine.mixed_precision" and found.fixes == ({"engine.mixed_precision": "policy"},)
