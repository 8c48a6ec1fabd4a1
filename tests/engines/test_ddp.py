"""The contract of tests/engines/contract.py for ddp, in two replicas and more; its buckets, its bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from engines.ddp import engine as ddp_config
from engines.ddp.engine import Config, build
from engines.ddp.session import DDPSession
from harness.core.cluster import Cluster
from harness.core.memory_model import named
from harness.core.plan import Mesh, Plan
from harness.interfaces import Model, OptimizerSpec
from harness.measure.count_model import count
from harness.runtime.training_state import cast_batch
from harness.simulator import simulate
from tests.engines import contract, networks, zoo
from tests.engines.contract import Case, gentle
from tests.engines.networks import Network
from tests.support.allocator import allocator_peak_bytes
from tests.support.sessions import run_session

pytestmark = pytest.mark.usefixtures("ranks")

MODELS: dict[str, Model] = {**networks.ALL, **{name: zoo.model(name) for name in ("unet", "amoebanet", "gpt", "llama")}}
SMALL = 1e-4
"""MiB: every parameter is a bucket."""


def case(model: str, data: int = 2, micro_batches: int = 2, samples: int = 8, **options: Any) -> Case:
    network = MODELS[model]
    plan = replace(Plan.contiguous([len(network.layers())], micro_batches), mesh=Mesh(data=data))
    return Case(build(Config(**options)), network, plan, samples=samples)


@pytest.mark.parametrize("bucket_mb", [25, SMALL])
@pytest.mark.parametrize("model", networks.ALL)
def test_trains_like_single(model: str, bucket_mb: float) -> None:
    contract.check_training(case(model, bucket_mb=bucket_mb))


@pytest.mark.usefixtures("at_length")
@pytest.mark.fast
@pytest.mark.parametrize("model", ["unet", "amoebanet", "gpt", "llama"])
def test_trains_the_zoo_like_single(model: str) -> None:
    contract.check_training(gentle(case(model)))


class Made(nn.Linear):
    """Multiplies by ones, a weight that it makes in its first pass, when the optimizer has those there were."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "made"):
            self.made = nn.Parameter(torch.ones(4, dtype=x.dtype))
        made: Tensor = super().forward(x) * self.made
        return made


def test_a_weight_that_a_first_pass_makes_is_not_trained() -> None:
    def of(layer: type[nn.Linear]) -> Case:
        def layers() -> list[nn.Module]:
            return [nn.Linear(4, 4), nn.Tanh(), layer(4, 4)]

        net = Network("made", layers, lambda n: torch.randn(n, 4), lambda n: torch.randn(n, 4), networks._squares)
        return Case(build(Config()), net, replace(Plan.contiguous([3], 2), mesh=Mesh(data=2)))

    assert contract.run(of(Made)).losses == contract.run(of(nn.Linear)).losses


@pytest.mark.parametrize("model", ["skips", "norms", "tied", "gpt"])
def test_trains_in_float32(model: str) -> None:
    contract.check_training(replace(gentle(case(model)), dtype="float32"))


@pytest.mark.parametrize(("data", "micro_batches"), [(1, 3), (2, 1), (3, 1), (3, 2)])
def test_trains_with_any_number_of_replicas_and_micro_batches(data: int, micro_batches: int) -> None:
    contract.check_training(case("skips", data, micro_batches, samples=12))


@pytest.mark.parametrize("data", [2, 3])
def test_running_statistics_are_the_mean_over_replicas(data: int) -> None:
    contract.check_statistics(case("norms", data, samples=12))


def test_a_replica_follows_its_own_samples() -> None:
    """Step after step: 0s in one, 1s in the other, of which the running mean takes in a tenth."""
    net = Network("norm", lambda: [nn.BatchNorm1d(2)], lambda n: torch.arange(n).mul(2).div(n, rounding_mode="floor")
                  .double().view(n, 1).expand(n, 2), lambda n: torch.zeros(n, 2), networks._squares)  # fmt: skip
    norm = Case(build(Config()), net, replace(Plan.contiguous([1], 1), mesh=Mesh(data=2)))

    def means(session: DDPSession) -> list[float]:
        for _ in range(2):
            session.step(net.sample(8))
        own = session.stage.state_dict()["0.running_mean"]
        found = [torch.empty_like(own) for _ in range(2)]
        dist.all_gather(found, own)
        return [float(mean[0]) for mean in found]

    assert run_session(norm.engine, net, norm.plan, norm.spec, means) == pytest.approx([0.0, 1 - 0.9**2])


@pytest.mark.parametrize("model", ["pairs", "tokens", "shared", "tied", "gpt"])
def test_states_move(model: str) -> None:
    contract.check_state_moves(case(model))


@pytest.mark.parametrize("bucket_mb", [25, SMALL])
@pytest.mark.parametrize(("data", "micro_batches"), [(1, 2), (2, 1), (2, 3)])
def test_runs_its_schedule(data: int, micro_batches: int, bucket_mb: float) -> None:
    contract.check_trace(case("norms", data, micro_batches, 12, bucket_mb=bucket_mb))


@pytest.mark.parametrize("layer", [1, 13])
def test_a_crash_reaches_the_caller(layer: int) -> None:
    contract.check_crash(case("skips"), layer)


def test_accepts_what_it_is_tested_with() -> None:
    contract.check_accepts(case("skips"))


@pytest.mark.parametrize("bucket_mb", [25, SMALL])
@pytest.mark.parametrize(("data", "micro_batches"), [(1, 2), (2, 1), (3, 2)])
def test_sends_what_the_simulator_says(data: int, micro_batches: int, bucket_mb: float) -> None:
    gpt = replace(case("gpt", data, micro_batches, 12, bucket_mb=bucket_mb), dtype="float32")

    def send(session: DDPSession) -> list[dict[str, int]]:
        return [session.step(gpt.model.sample(12)).bytes_sent for _ in range(2)]

    profile = count(gpt.model, 12 // (data * micro_batches), "float32")
    schedule = gpt.engine.schedule(gpt.plan, profile)
    done = simulate(schedule, gpt.plan, profile, Cluster(devices_per_node=data), named("sgd_fp32"))
    first, second = run_session(gpt.engine, gpt.model, gpt.plan, gpt.spec, send)
    assert first == second == done.figures["bytes_sent"]
    whole = profile.parameter_bytes()
    assert first == ({"all_reduce": data * whole} if data > 1 else {})


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_memory_is_what_the_allocator_gave(micro_batches: int) -> None:
    """Weights, their buckets and what a step allocates. The buckets are the gradients, none are kept next to them."""

    def layers() -> list[nn.Module]:
        return [layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh())]

    net = Network("wide", layers, lambda n: torch.randn(n, 64), lambda n: torch.randn(n, 64), networks._squares)
    plan = replace(Plan.contiguous([16], micro_batches), mesh=Mesh(data=2))
    wide = Case(build(Config()), net, plan, "float32", optimizer=OptimizerSpec("adam", lr=0.01))

    def peaks(session: DDPSession) -> tuple[int, int, int, int]:
        batch = net.sample(12)
        for _ in range(3):
            metered = session.step(batch, meter=True).peak_memory_bytes
        assert metered
        share = cast_batch(session.share(batch), "float32")
        held = {
            t.untyped_storage()._cdata: t.untyped_storage() for t in [*session.held_tensors(), *vars(share).values()]
        }
        resident = sum(storage.nbytes() for storage in held.values())
        gradients = sum(p.grad.nbytes for p in session.stage.parameters() if p.grad is not None)
        return metered[0], resident, allocator_peak_bytes(lambda: session.train_step(share, 12)), gradients

    metered, resident, allocated, gradients = run_session(wide.engine, net, plan, wide.spec, peaks)
    assert metered == pytest.approx(resident + allocated, rel=0.005)
    assert resident > 4 * gradients, "weights, gradients and two moments"
    assert allocated < 0.5 * gradients


def test_a_second_step_has_the_gradients_twice_for_a_moment() -> None:
    """Buckets are made in the order in which gradients came; where some may not come, they stay as they were."""
    net = Network(
        "wide",
        lambda: [nn.Linear(256, 256) for _ in range(4)],
        lambda n: torch.randn(n, 256),
        lambda n: torch.randn(n, 256),
        networks._squares,
    )
    wide = Case(build(Config()), net, replace(Plan.contiguous([4], 1), mesh=Mesh(data=2)), "float32")
    profile = count(net, 2, "float32")
    memory = wide.engine.memory(named("sgd_fp32"), wide.plan.mesh, profile)
    done = simulate(wide.engine.schedule(wide.plan, profile), wide.plan, profile, Cluster(devices_per_node=2), memory)

    def peaks(session: DDPSession) -> list[int]:
        metered = [session.step(net.sample(4), meter=True).peak_memory_bytes for _ in range(3)]
        return [one[0] for one in metered if one]

    first, second, third = run_session(wide.engine, net, wide.plan, wide.spec, peaks)
    assert second == pytest.approx(done.peaks[0].bytes, rel=0.02)
    assert second > 1.2 * max(first, third)
    rare = replace(profile.layers[0], traits=replace(profile.layers[0].traits, unused=("weight",)))
    partial = replace(profile, layers=(rare, *profile.layers[1:]))
    assert wide.engine.memory(named("sgd_fp32"), wide.plan.mesh, partial).rebuilt == 0
    assert wide.engine.memory(named("sgd_fp32"), Mesh(), profile).rebuilt == 0


@pytest.mark.parametrize("bucket_mb", [0.0, -1.0, float("nan")])
def test_a_bucket_must_hold_something(bucket_mb: float) -> None:
    assert ddp_config.check(Config()) == []
    (found,) = ddp_config.check(Config(bucket_mb=bucket_mb))
    assert found.key == "engine.bucket_mb" and found.fixes == ({"engine.bucket_mb": 25},)
