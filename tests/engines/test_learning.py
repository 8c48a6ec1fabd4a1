"""Real training on real data, and the same on every engine: what three steps of the contract cannot show."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from engines.gpipe.engine import Config as GPipeConfig
from engines.gpipe.engine import build as build_gpipe
from engines.single.engine import Config as SingleConfig
from engines.single.engine import build as build_single
from harness.config import registry
from harness.core.plan import Plan
from harness.interfaces import Data, Engine, Model, OptimizerSpec, Session, SessionSpec
from tests.support.sessions import run_session

pytestmark = pytest.mark.usefixtures("ranks")

ADAMW = OptimizerSpec("adamw", lr=0.005, weight_decay=0.01)


def built(group: str, name: str, *extra: Any, **keys: Any) -> Any:
    return registry.build(group, OmegaConf.create({"name": name, **keys}), *extra)


def losses(
    engine: Engine, model: Model, data: Data, balance: list[int], steps: int, size: int, dtype: str = "float64"
) -> list[float]:
    plan = Plan.contiguous(balance, 4, "except_last")
    spec = SessionSpec(("cpu",) * len(balance), ADAMW, dtype, seed=1)

    def train(session: Session) -> list[float]:
        return [session.step(data.batch(step, size)).loss for step in range(steps)]

    return run_session(engine, model, plan, spec, train)


@pytest.mark.usefixtures("at_length")
def test_gpt_learns_english_the_same_way_in_one_piece_and_in_a_pipeline() -> None:
    """200 steps in float64: the same losses to 1e-9, and far below what the bytes' frequencies alone would give."""
    model = built("model", "gpt", layers=2, hidden=32, heads=2, sequence=32)
    data = built("data", "text", model, 0)
    alone = losses(build_single(SingleConfig()), model, data, [6], 200, 16)
    split = losses(build_gpipe(GPipeConfig()), model, data, [2, 2, 2], 200, 16)
    assert max(abs(a - b) / a for a, b in zip(alone, split, strict=True)) < 1e-9
    assert sum(split[-20:]) / 20 < data.corpus.unigram_entropy() - 0.3


@pytest.mark.usefixtures("at_length")
def test_amoebanet_learns_digits() -> None:
    model = built("model", "amoebanet", layers=3, channels=16, size=64)
    data = built("data", "images", model, 0)
    found = losses(build_gpipe(GPipeConfig()), model, data, [4, 5], 30, 16, "float32")
    assert sum(found[-5:]) / 5 < 0.6 * found[0]
