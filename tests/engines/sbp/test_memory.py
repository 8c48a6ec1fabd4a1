"""Peak memory of the fullest rank as it is simulated, where products are split in every way and where there are many
samples; and of a batch each device has its own part only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from engines.sbp.engine import Config, build
from harness.core.memory_model import named
from harness.core.plan import Plan
from harness.interfaces import Model, SessionSpec
from harness.launch.forked_ranks import run_on_ranks
from harness.measure.count_model import count
from harness.sbp.device_grid import Grid
from harness.sbp.matmul_chain import chain_from_profile
from harness.sbp.route_to_plan import device_share
from harness.simulator import simulate
from models.mlp.config import Config as MLPConfig
from models.mlp.mlp import build as build_mlp
from models.vgg.config import Config as VGGConfig
from models.vgg.vgg import build as build_vgg
from tests.support.sbp_plans import flat, planned, with_strategies

pytestmark = pytest.mark.usefixtures("ranks")

ENGINE = build(Config())
MLP = build_mlp(MLPConfig(widths=[128] * 5))
VGG = build_vgg(VGGConfig())
SAMPLES = 16


def simulated(model: Model, plan: Plan, samples: int) -> int:
    profile = count(model, samples // plan.micro_batches, "float32")
    timed = replace(profile, layers=tuple(replace(one, forward_s=1e-3, backward_s=2e-3) for one in profile.layers))
    share = device_share(timed, plan, chain_from_profile(profile))
    found = simulate(ENGINE.schedule(plan, share), plan, share, flat(plan.mesh.tensor), named("sgd_fp32"))
    bytes_: int = found.figures["peak_memory_bytes"][0]
    return bytes_


def metered(model: Model, plan: Plan, samples: int) -> int:
    devices = ("cpu",) * plan.mesh.tensor
    session: Any = ENGINE.session(model, plan, SessionSpec(devices))

    def work() -> int:
        with session as entered:
            batch = model.sample(samples)
            entered.step(batch)
            found: int = entered.step(batch, meter=True).peak_memory_bytes[0]
            return found

    return run_on_ranks(len(devices), work, devices)


@pytest.mark.parametrize(("devices", "m", "alpha_s"), [(2, 1, 1e-4), (4, 1, 1e-9), (4, 2, 1e-4)])
def test_as_the_planner_splits_it(devices: int, m: int, alpha_s: float) -> None:
    plan = planned(VGG, devices, SAMPLES, "free", m, "float32", alpha_s)
    assert simulated(VGG, plan, SAMPLES) == pytest.approx(metered(VGG, plan, SAMPLES), rel=0.1)


def by_numbers(numbers: Sequence[tuple[int, int, int]], samples: int) -> Plan:
    profile, devices = count(MLP, samples, "float32"), numbers[0][0] * numbers[0][1] * numbers[0][2]
    names = [item.name for item in chain_from_profile(profile).matmuls]
    given = {name: Grid(1, devices).strategy(one) for name, one in zip(names, numbers, strict=True)}
    return with_strategies(profile, flat(devices), given, "free")


@pytest.mark.parametrize(
    "numbers",
    [[(2, 1, 1)] * 4, [(2, 1, 1), (1, 2, 1), (1, 2, 1), (1, 2, 1)], [(4, 1, 1), (2, 2, 1), (2, 2, 1), (1, 2, 2)]],
    ids=["samples", "gathered", "both"],
)
def test_inputs_that_are_gathered_are_kept(numbers: list[tuple[int, int, int]]) -> None:
    """To a quarter: what an exchange has twice while it brings blocks into order is not simulated."""
    plan = by_numbers(numbers, 1024)
    assert simulated(MLP, plan, 1024) == pytest.approx(metered(MLP, plan, 1024), rel=0.25)


@pytest.mark.parametrize("m", [1, 2])
def test_a_device_has_its_part_of_the_batch(m: int) -> None:
    plan = planned(VGG, 2, SAMPLES, "batch_split", m, "float32")
    session: Any = ENGINE.session(VGG, plan, SessionSpec(("cpu",) * 2))

    def work() -> bool:
        with session as entered:
            batch = VGG.sample(SAMPLES)
            mine = entered.share(batch)
            half = [part.chunk(2)[entered.tensor_rank] for part in batch.inputs.chunk(m)]
            return mine.inputs.untyped_storage().nbytes() == batch.inputs.nbytes // 2 and all(
                own.equal(want) for own, want in zip(mine.inputs.chunk(m), half, strict=True)
            )

    assert run_on_ranks(2, work, ("cpu", "cpu"))
