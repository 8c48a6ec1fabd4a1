"""precision.grad_scaler: under autocast float16 small gradients stay, and large ones cost a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from engines.ddp.engine import Config as DDPConfig
from engines.ddp.engine import build as build_ddp
from engines.gpipe.engine import Config as GPipeConfig
from engines.gpipe.engine import build as build_gpipe
from harness.checks.request import notes, request
from harness.cli.compose import compose
from harness.config import registry
from harness.interfaces import OptimizerSpec, Session, StepMetrics
from harness.runtime.loss_scale import START
from tests.engines import networks, zoo
from tests.engines.contract import Case
from tests.engines.networks import Network
from tests.engines.test_resuming import flat
from tests.problems import row
from tests.support.sessions import run_session

pytestmark = pytest.mark.usefixtures("ranks")


def net(factor: float) -> Network:
    """Losses times a factor, by which gradients of activations leave float16's range."""

    def layers() -> list[nn.Module]:
        return [nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)]

    return Network("scaled", layers, lambda n: torch.randn(n, 6), lambda n: torch.randn(n, 3),
                   lambda output, target: factor * networks._squares(output.float(), target))  # fmt: skip


SMALL, LARGE = net(1e-7), net(16.0)
INSTEAD = ({"precision": "fp32"},)
CASES: dict[str, Callable[[Network], Case]] = {
    "single": lambda model: flat(build_gpipe, GPipeConfig(), 2, model=model).reference,
    "gpipe": lambda model: flat(build_gpipe, GPipeConfig(), 2, model=model),
    "ddp": lambda model: flat(build_ddp, DDPConfig(), data=2, model=model),
}


def _trained(
    case: Case, steps: int, scaler: bool, autocast: str | None = "float16", start: dict[str, Any] | None = None
) -> tuple[list[StepMetrics], list[dict[str, Any]]]:
    spec = replace(case.spec, dtype="float32", autocast=autocast, grad_scaler=scaler, instead=INSTEAD)

    def train(session: Session) -> tuple[list[StepMetrics], list[dict[str, Any]]]:
        if start is not None:
            session.load_state_dict(start)
        torch.manual_seed(3)
        batch = case.model.sample(case.samples)
        states, metrics = [session.state_dict()], []
        for _ in range(steps):
            metrics.append(session.step(batch))
            states.append(session.state_dict())
        return metrics, states

    return run_session(case.engine, case.model, case.plan, spec, train)


def _moved(states: list[dict[str, Any]], name: str = "0.weight") -> torch.Tensor:
    first, last = (states[number]["model"][name] for number in (0, -1))
    return last - first  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", CASES)
def test_small_gradients_stay(name: str) -> None:
    case = replace(CASES[name](SMALL), optimizer=OptimizerSpec("sgd", lr=1e7))
    _, exact = _trained(case, 1, False, autocast=None)
    _, lost = _trained(case, 1, False)
    metrics, scaled = _trained(case, 1, True)
    assert metrics[0].skipped is None
    torch.testing.assert_close(_moved(scaled), _moved(exact), rtol=0.05, atol=0.01 * float(_moved(exact).abs().max()))
    assert float((_moved(lost) - _moved(exact)).norm()) > 0.2 * float(_moved(exact).norm())


@pytest.mark.parametrize("name", CASES)
def test_a_step_that_overflows_is_none_and_the_scale_falls(name: str) -> None:
    """Until gradients fit; and a run that resumes has the scale of the one before."""
    case = replace(CASES[name](LARGE), optimizer=OptimizerSpec("sgd", lr=1e-3))
    metrics, states = _trained(case, 8, True)
    skipped = [step.skipped is not None for step in metrics]
    fell = sum(skipped)
    assert 0 < fell < 8 and skipped == [True] * fell + [False] * (8 - fell), "and then it stays"
    assert states[-1]["loss_scale"] == {"value": START / 2**fell, "good": 8 - fell}
    for before, after, skip in zip(states, states[1:], skipped, strict=False):
        same = all(torch.equal(before["model"][key], one) for key, one in after["model"].items())
        assert same is skip
    assert metrics[0].skipped is not None
    assert row(metrics[0].skipped) == ("precision.autocast", "float16", ["precision=fp32"]), "those of the run"
    again, _ = _trained(case, 1, True, start=states[-1])
    assert again[0].skipped is None


@pytest.mark.parametrize("name", CASES)
def test_a_cross_entropy_begins_with_the_first_scale(name: str) -> None:
    """Its own gradient is at most 1 / samples: times 65536 it would leave float16, were the loss in it."""
    metrics, states = _trained(CASES[name](zoo.model("mlp")), 2, True)
    assert [step.skipped for step in metrics] == [None, None]
    assert states[-1]["loss_scale"] == {"value": START, "good": 2}


def test_a_loss_of_many_tokens_stays_in_range() -> None:
    """64 x 512 times log 1000 is more than float16 has."""
    model, tokens = zoo.model("gpt"), torch.zeros(64, 512, dtype=torch.int64)
    assert torch.isfinite(model.loss(torch.zeros(64, 512, 1000, dtype=torch.float16), tokens))


@pytest.mark.parametrize(
    "overrides, fixes",
    [
        (["engine=gpipe", "precision.autocast=float16"], None),
        (["engine=gpipe", "precision=mixed"], 2),
        (["engine=gpipe", "precision=fp32"], 2),
        (["engine=pipeline", "precision.autocast=float16"], 1),
    ],
)
def test_where_it_is_refused(overrides: list[str], fixes: int | None) -> None:
    config = compose([*overrides, "model=unet", "precision.grad_scaler=true"])
    can = registry.build("engine", config.engine).capabilities
    found = [one for one in request(config, can, None) if one.key == "precision.grad_scaler"]
    assert [len(one.fixes) for one in found] == ([] if fixes is None else [fixes])
    assert not notes(config, can)
