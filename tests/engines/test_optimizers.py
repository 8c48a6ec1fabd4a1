"""Every engine trains with the optimizers that it takes as single does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.interfaces import OptimizerSpec
from tests import tiers
from tests.engines import contract
from tests.engines.test_resuming import CASES, FURTHER

pytestmark = pytest.mark.usefixtures("ranks")
LEFT_OUT = {"myelin, float16", "periodic, two versions", "delayed, stash"}
"""Rounded too coarsely to be compared; with several updates in a step."""
OPTIMIZERS = {
    "nadam": OptimizerSpec("nadam", lr=0.01, weight_decay=0.01, beta1=0.8),
    "muon": OptimizerSpec("muon", lr=0.01, weight_decay=0.01),
    "adamw": OptimizerSpec("adamw", lr=0.01, beta1=0.5),
    "nesterov": OptimizerSpec("sgd", lr=0.05, momentum=0.9, nesterov=True),
}
SHARDS = ("deepspeed", "fsdp", "myelin", "sbp")
"""Engines whose optimizers see parts of matrices."""
LOSS = 1e-3
"""As tests/engines/test_fused.py has it; Muon computes in bfloat16."""


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", tiers.split(sorted(CASES.keys() - LEFT_OUT), CASES.keys() - FURTHER))
def test_it_trains_as_single(name: str, optimizer: str) -> None:
    case = replace(CASES[name](), optimizer=OPTIMIZERS[optimizer], dropout=False)
    if case.optimizer.name not in case.engine.capabilities.optimizers:
        assert name.partition(",")[0] in SHARDS  # such a run is refused
        return
    got, want = contract.run(case), contract.reference(case)
    assert got.losses == pytest.approx(want.losses, rel=LOSS)
    assert got.losses[-1] != pytest.approx(got.losses[0], rel=LOSS)
