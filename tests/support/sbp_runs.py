"""Many short trainings in one group of ranks, each held against engine=single with the same weights and batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engines.sbp.engine import Config, build
from engines.single.engine import Config as SingleConfig
from engines.single.engine import build as build_single
from harness.core.plan import Plan
from harness.interfaces import Batch, Model, OptimizerSpec, Session, SessionSpec
from harness.launch.forked_ranks import run_on_ranks

SGD = OptimizerSpec("sgd", lr=0.05, momentum=0.9)
GENTLE = OptimizerSpec("sgd", lr=0.002, momentum=0.9)
"""For deep networks: their first gradients are of a size of 100."""
ADAM = OptimizerSpec("adam", lr=0.01)
UNPLANNED = {"all_gather@statistics", "all_reduce@statistics", "all_reduce@small parameters"}
"""Kinds of bytes that no plan names: sums in norms, and gradients of all that is no matrix."""


@dataclass(frozen=True)
class Run:
    """One training: three steps on so many samples."""

    model: Model
    plan: Plan
    samples: int
    optimizer: OptimizerSpec = SGD
    dtype: str = "float64"
    autocast: str | None = None
    overlap: bool = True
    steps: int = 3

    @property
    def devices(self) -> int:
        return self.plan.mesh.tensor

    def spec(self, devices: int) -> SessionSpec:
        return SessionSpec(("cpu",) * devices, self.optimizer, self.dtype, self.autocast, seed=3)

    def batches(self) -> list[Batch]:
        torch.manual_seed(5)
        return [self.model.sample(self.samples) for _ in range(self.steps)]

    def __str__(self) -> str:
        strategies = f"{self.plan.strategy}, {self.plan.layouts}"[:2000]
        reported = f"{self.plan.micro_batches} micro-batches, {strategies}"
        return f"{self.model.name} on {self.devices} ranks, {self.optimizer.name}: {reported}"


@dataclass(frozen=True)
class Outcome:
    losses: list[float]
    sent: list[dict[str, int]]
    state: dict[str, Any]


def train(session: Session, run: Run) -> Outcome:
    steps = [session.step(batch) for batch in run.batches()]
    return Outcome([one.loss for one in steps], [one.bytes_sent for one in steps], session.state_dict())


def alone(run: Run) -> Outcome:
    """On one device."""
    plan = Plan.contiguous([sum(run.plan.balance)], run.plan.micro_batches)
    with build_single(SingleConfig()).session(run.model, plan, run.spec(1)) as session:
        return train(session, run)


def opened(run: Run) -> Any:
    """Its session, to be entered in ranks."""
    return build(Config(overlap=run.overlap)).session(run.model, run.plan, run.spec(run.devices))


def in_ranks(runs: Sequence[Run], what: Callable[[Any, Run], Any] = train) -> list[Any]:
    """What `what` made of each of them in rank 0; all have as many devices. An error says which one it was."""
    (devices,) = {run.devices for run in runs}
    sessions = [opened(run) for run in runs]

    def work() -> list[Any]:
        found = []
        for run, session in zip(runs, sessions, strict=True):
            try:
                with session as entered:
                    found.append(what(entered, run))
            except Exception as error:
                error.add_note(str(run))
                raise
        return found

    return run_on_ranks(devices, work, ("cpu",) * devices)


def check(runs: Sequence[Run], tolerance: float = 1e-10) -> None:
    """Losses, parameters, buffers and optimizer state as `single` has them after three steps; bytes as planned."""
    assert runs
    for run, got in zip(runs, in_ranks(runs), strict=True):
        try:
            check_equal(got, alone(run), tolerance)
            check_sent(got, run)
        except AssertionError as error:
            error.add_note(str(run))
            raise


def check_equal(got: Outcome, want: Outcome, tolerance: float) -> None:
    torch.testing.assert_close(got.losses, want.losses, rtol=tolerance, atol=tolerance)
    assert list(got.state["model"]) == list(want.state["model"])
    for name, value in want.state["model"].items():
        close(got.state["model"][name], value, tolerance, name)
    mine, theirs = got.state["optimizer"], want.state["optimizer"]
    assert mine.keys() == theirs.keys()
    for name, values in theirs.items():
        assert mine[name].keys() == values.keys()
        for key, value in values.items():
            close(mine[name][key], value, tolerance, f"{key} of {name}")


def close(mine: Any, theirs: Any, tolerance: float, what: str) -> None:
    """To so much of 1, or of the largest number in it."""
    size = max(1.0, float(theirs.abs().max())) if isinstance(theirs, torch.Tensor) and theirs.numel() else 1.0
    torch.testing.assert_close(mine, theirs, rtol=0, atol=tolerance * size, msg=lambda text: f"{what}: {text}")


def predicted(plan: Plan) -> dict[str, int]:
    """Bytes that all devices send in a step, by kind."""
    (traffic,) = plan.traffic
    return {
        f"{one.algorithm}@{one.phase}": one.bytes * plan.mesh.tensor
        * (1 if one.phase == "weights" else plan.micro_batches)
        for one in traffic
    }  # fmt: skip


def check_sent(got: Outcome, run: Run) -> None:
    """In every step, and by every kind, exactly."""
    for sent in got.sent:
        assert {kind: size for kind, size in sent.items() if kind not in UNPLANNED} == predicted(run.plan)
