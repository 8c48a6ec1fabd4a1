"""Every model of the zoo on two ranks against `single`, in float64."""

from __future__ import annotations

import pytest

from harness.interfaces import OptimizerSpec
from tests.engines import zoo
from tests.support.sbp_plans import planned
from tests.support.sbp_runs import GENTLE, Run, check

pytestmark = pytest.mark.usefixtures("ranks")

SAMPLES = 8
CHAINS = ("unet",), ("amoebanet",), ("gpt", "gpt with dropout, untied", "llama", "mlp", "vgg"), (
    "resnet", "resnet, elementary layers", "densenet"), ("inception",)  # fmt: skip
"""Those that share a group of ranks."""
SLOW = ("amoebanet", "inception")
TINY = OptimizerSpec("sgd", lr=2e-5, momentum=0.9)
"""Inception's gradients are of a size of 50, and with larger steps they grow: so does what is rounded."""


@pytest.mark.usefixtures("at_length")
@pytest.mark.fast
@pytest.mark.parametrize("names", CHAINS, ids=", ".join)
def test_trains_like_single(names: tuple[str, ...]) -> None:
    runs = []
    for name in names:
        model = zoo.model(name)
        plans = [planned(model, 2, SAMPLES, "batch_split", 2)]
        if name not in SLOW:
            plans.append(planned(model, 2, SAMPLES, "free"))
        runs += [Run(model, plan, SAMPLES, TINY if name == "inception" else GENTLE) for plan in plans]
    check(runs)


def test_no_model_is_left_out() -> None:
    assert sorted(name for names in CHAINS for name in names) == sorted(zoo.SIZES)
