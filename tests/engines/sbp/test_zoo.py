"""Every model of the zoo on two ranks against `single`, in float64."""

from __future__ import annotations

import pytest

from tests.engines import zoo
from tests.engines.sbp.plans import planned
from tests.engines.sbp.runs import GENTLE, Run, check

SAMPLES = 8
CHAINS = ("unet",), ("amoebanet",), ("gpt", "gpt with dropout, untied", "mlp", "vgg"), (
    "resnet", "resnet, elementary layers", "densenet"), ("inception",)  # fmt: skip
"""Those that share a group of ranks."""


@pytest.mark.parametrize("names", CHAINS, ids=", ".join)
def test_trains_like_single(names: tuple[str, ...]) -> None:
    """Inception's first gradients are of a size of 50, and grow: so does what is rounded."""
    runs = []
    for name in names:
        model = zoo.model(name)
        plans = planned(model, 2, SAMPLES, "free"), planned(model, 2, SAMPLES, "batch_split", 2)
        runs += [Run(model, plan, SAMPLES, GENTLE) for plan in plans]
    check(runs, 1e-9 if names == ("inception",) else 1e-10)


def test_no_model_is_left_out() -> None:
    assert sorted(name for names in CHAINS for name in names) == sorted(zoo.SIZES)
