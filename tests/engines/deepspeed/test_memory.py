"""What a device holds, as it is predicted and as it is counted."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from engines.deepspeed.engine import Config, build
from harness.config import registry
from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel, named
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.plan import Mesh
from harness.interfaces import Session
from harness.measure import count_model
from harness.simulator import simulate
from tests.engines.deepspeed import cases
from tests.engines.deepspeed.cases import case
from tests.support.sessions import run_session

pytestmark = pytest.mark.usefixtures("ranks")

NETS: dict[str, dict[str, Any]] = {
    "unet": {"convs": 1, "channels": 8, "size": 64},
    "gpt": {"layers": 3, "hidden": 32, "heads": 4, "sequence": 32, "vocabulary": 64},
}


@pytest.mark.usefixtures("no_workspaces")
@pytest.mark.parametrize(
    ("net", "stages", "data", "zero", "checkpoint"),
    [
        ("unet", 2, 1, 0, "never"),
        ("unet", 2, 1, 0, "always"),
        ("gpt", 1, 2, 2, "never"),
        ("gpt", 1, 2, 3, "never"),
    ],
)
def test_predicted_and_counted_memory(
    net: str, stages: int, data: int, zero: int, checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 15 %, on every device."""
    model = registry.build("model", OmegaConf.create({"name": net, **NETS[net]}))
    monkeypatch.setitem(cases.MODELS, net, model)
    one = case(net, stages, data, zero, checkpoint)

    def train(session: Session) -> list[int] | None:
        session.step(one.model.sample(one.samples))
        return session.step(one.model.sample(one.samples), meter=True).peak_memory_bytes

    counted = run_session(one.engine, one.model, one.plan, one.spec, train)
    profile = count_model.count(one.model, one.samples // (4 * data), one.dtype)
    schedule = one.engine.schedule(one.plan, profile)
    memory = one.engine.memory(named("sgd_momentum_fp32"), one.plan.mesh, profile)
    seconds = dict.fromkeys(map(str, schedule.ops()), 1.0)
    found = simulate(schedule, one.plan, profile, Cluster(devices_per_node=8), memory, durations=seconds)
    ratios = [p.bytes / m for p, m in zip(found.peaks, counted or [], strict=True)]
    assert all(0.85 < ratio < 1.15 for ratio in ratios), (ratios, [peak.contents for peak in found.peaks])


@pytest.mark.parametrize(
    ("zero", "weights", "gradients", "reducing", "optimizer"),
    [(0, 1, 1, 1, 2), (1, 1, 2, 1, 3 / 4), (2, 1, 1.25, 1.25, 3 / 4), (3, 2.25, 1.25, 0, 3 / 4)],
)
def test_a_model_that_fits_into_a_bucket(
    zero: int, weights: float, gradients: float, reducing: float, optimizer: float
) -> None:
    """Over four replicas, in multiples of its weights: shards are a quarter, buckets a whole."""
    profile = ModelProfile((LayerProfile("l", param_bytes=4 * 10**6),))
    found = build(Config(zero=zero)).memory(MemoryModel(optimizer=2.0), Mesh(data=4), profile)
    assert (found.weights, found.gradients, found.reducing, found.optimizer) == (
        weights, gradients, reducing, optimizer
    )  # fmt: skip


def test_a_model_that_is_larger_than_what_zero_3_keeps_whole() -> None:
    """10^10 elements: a tenth of them lives, a twentieth fits into a bucket, 1 / 200 is gathered at once."""
    profile = ModelProfile((LayerProfile("l", param_bytes=4 * 10**10),))
    found = build(Config(zero=3)).memory(MemoryModel(), Mesh(data=4), profile)
    assert found.weights == pytest.approx(0.25 + 0.1 + 0.005)
    assert found.gradients == pytest.approx(0.05 + 0.25)
