"""What is said of a finished plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.checks import plan_fits
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.plan import Mesh, Plan
from tests.problems import rows


@pytest.mark.parametrize(("pipeline", "said"), [(2, ""), (3, "1 stays idle"), (8, "6 stay idle")])
def test_devices_without_a_stage_are_noted(pipeline: int, said: str) -> None:
    plan = replace(Plan.contiguous([2, 2]), mesh=Mesh(pipeline=pipeline))
    found = plan_fits.idle(plan)
    assert rows(found) == ([("mesh.pipeline", pipeline, ["mesh.pipeline=2"])] if said else [])
    assert all(said in one.message and "are of 2" in one.message for one in found)


def test_a_frozen_beginning_is_noted() -> None:
    trained = LayerProfile("c", param_bytes=8, weights=1)
    frozen = LayerProfile("a", param_bytes=8, weights=1, frozen_bytes=8, frozen_weights=1)
    profile = ModelProfile((frozen, LayerProfile("b"), trained), "net")
    (found,) = plan_fits.frozen(Plan.contiguous([1, 1, 1]), profile)
    assert found.message == "its first 2 layers are frozen and have no backward pass: that of stages 0 and 1 is empty"
    (found,) = plan_fits.frozen(Plan.contiguous([3]), profile)
    assert found.message == "its first 2 layers are frozen and have no backward pass"
    assert plan_fits.frozen(Plan.contiguous([3]), ModelProfile((trained, frozen, trained))) == []
