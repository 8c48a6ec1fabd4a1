"""What every engine must keep, against engine=single with the same weights, batch and micro-batches.

`Case` describes an engine under test; each `check_*` function raises AssertionError with what differs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from engines.single.engine import Config as SingleConfig
from engines.single.engine import build as build_single
from harness.core.cluster import Cluster
from harness.core.model_profile import LayerProfile, ModelProfile, Skip
from harness.core.plan import Plan
from harness.interfaces import Batch, BatchShape, Engine, Model, OptimizerSpec, PlanRequest, Session, SessionSpec
from harness.nn.skip import layer_skips, named_layers
from harness.nn.tied import ties
from harness.runtime.gradient_norms import PART
from tests.support.sessions import run_session
from tests.support.violations import violations

TOLERANCE = {"float64": 1e-11, "float32": 2e-5}
MOVED = {"float64": 1e-9, "float32": 2e-5}
"""Of a state after four steps of AdamW, which divides by roots of small numbers."""
STEPS = 3
PLAIN = OptimizerSpec("sgd", lr=1.0)


@dataclass(frozen=True)
class Case:
    """An engine, how it splits a model into so many layers, and the model."""

    engine: Engine
    model: Model
    plan: Plan
    dtype: str = "float64"
    dropout: bool = True
    optimizer: OptimizerSpec = PLAIN
    samples: int = 8
    deferred: bool = False
    by_value: bool = False
    channels_last: bool = False
    compile: bool = False

    @property
    def spec(self) -> SessionSpec:
        devices = ("cpu",) * max(self.plan.mesh.size, *(device + 1 for device in self.plan.devices))
        return SessionSpec(
            devices, self.optimizer, self.dtype, None, 7, False, self.by_value, self.channels_last, self.compile
        )

    @property
    def reference(self) -> Case:
        layers = sum(self.plan.balance)
        plan = Plan.contiguous([layers], self.plan.micro_batches * self.plan.mesh.data)
        return replace(self, engine=build_single(SingleConfig(deferred_batch_norm=self.deferred)), plan=plan)


def gentle(case: Case) -> Case:
    """Deep networks take no learning rate of 1."""
    return replace(case, optimizer=OptimizerSpec("sgd", lr=0.05, momentum=0.9))


@dataclass(frozen=True)
class Outcome:
    losses: list[float]
    states: list[dict[str, Any]]


def run(case: Case, steps: int = STEPS, start: dict[str, Any] | None = None) -> Outcome:
    """Train; the loss of each step and the state after it (with lr = 1 the first difference is the gradient)."""
    model = case.model if case.dropout else _WithoutDropout(case.model)

    def train(session: Session) -> Outcome:
        if start is not None:
            session.load_state_dict(start)
        torch.manual_seed(3)
        batches = [case.model.sample(case.samples) for _ in range(steps)]
        layers = _without_memory(case.model)
        states = [session.state_dict()]
        losses = []
        for batch in batches:
            losses.append(session.step(batch).loss)
            states.append(session.state_dict())
            check_gradient_norms(session, case, layers, states)
        return Outcome(losses, states)

    return run_session(case.engine, model, case.plan, case.spec, train)


def reference(case: Case, steps: int = STEPS) -> Outcome:
    """What `single` makes of a case, computed once for all engines and plans; not to be changed."""
    micro_batches = case.plan.micro_batches * case.plan.mesh.data
    key = (case.model, sum(case.plan.balance), micro_batches, case.dtype, case.dropout, case.optimizer, case.samples)
    key += (case.deferred, steps)
    if key not in _REFERENCES:
        _REFERENCES[key] = run(case.reference, steps)
    return _REFERENCES[key]


_REFERENCES: dict[Any, Outcome] = {}


def check_gradient_norms(session: Session, case: Case, layers: nn.Sequential, states: list[dict[str, Any]]) -> None:
    """A session knows those of its gradients, named as in the whole model, each in a stage of the plan.

    In the first step of SGD in float64 they are what the weights have moved by; a shard's are no larger.
    """
    first = case.plan.stages[0]
    if states[-1] and case.dtype != "float16":  # in rank 0; a step that overflows updates nothing
        assert session.gradient_norms() or not any(
            parameter.requires_grad for parameter in layers[first.first : first.last + 1].parameters()
        )
    named, norms = dict(layers.named_parameters()), session.gradient_norms()
    for name, norm in norms.items():
        assert name.removeprefix("a shard of ") in {PART, *named}
        assert session.stage_of(name) in range(len(case.plan.stages))
        exact = case.dtype == "float64" and case.optimizer.name == "sgd" and not case.optimizer.nesterov
        if len(states) == 2 and states[1] and exact and name in named:
            start, end = (state["model"][name] for state in states)
            moved = float((end - start).norm()) / case.optimizer.lr
            assert norm <= moved * 1.001 + 1e-4
            assert norm >= moved * 0.999 - 1e-4 or case.plan.mesh.tensor > 1


def check_training(case: Case) -> None:
    """Loss, every gradient, every parameter and buffer of three steps."""
    got, want = run(case), reference(case)
    tolerance = TOLERANCE[case.dtype]
    own = _buffers(case.model) if case.plan.mesh.data > 1 else set()
    torch.testing.assert_close(got.losses, want.losses, rtol=tolerance, atol=tolerance)
    for step, (mine, theirs) in enumerate(zip(got.states, want.states, strict=True)):
        assert list(mine["model"]) == list(theirs["model"]), "the state dict's keys are those of the Sequential"
        for name, value in theirs["model"].items():
            if name not in own:
                _close(mine["model"][name], value, tolerance, f"{name} after {step} steps")


def _without_memory(model: Model) -> nn.Sequential:
    with torch.device("meta"):
        return model.layers()


def _buffers(model: Model) -> set[str]:
    """Running statistics: those of replicas follow their own samples (`check_statistics`)."""
    return {name for name, _ in _without_memory(model).named_buffers()}


def check_statistics(case: Case) -> None:
    """After a step the running statistics are the mean over what each replica's share alone would have left."""
    case = replace(case, dropout=False)  # whose masks depend on the number of the micro-batch
    got = run(case, steps=1).states[-1]["model"]
    data = case.plan.mesh.data
    alone = replace(case, samples=case.samples // data).reference
    alone = replace(alone, plan=replace(alone.plan, micro_batches=case.plan.micro_batches))
    torch.manual_seed(3)
    batch = case.model.sample(case.samples)
    shares = zip(batch.inputs.tensor_split(data), batch.targets.tensor_split(data), strict=True)
    left = []
    for inputs, targets in shares:
        with alone.engine.session(_WithoutDropout(alone.model), alone.plan, alone.spec) as session:
            session.step(Batch(inputs, targets))
            left.append(session.state_dict()["model"])
    for name in _buffers(case.model):
        want = torch.stack([state[name] for state in left])
        mean = want.mean(0) if want.is_floating_point() else want[0]
        _close(got[name], mean, TOLERANCE[case.dtype], f"{name} after a step")


def check_state_moves(case: Case) -> None:
    """A state dict written here continues there, and the other way round, optimizer state included."""
    adam = replace(case, optimizer=OptimizerSpec("adamw", lr=0.01, weight_decay=0.01))
    straight, tolerance = reference(adam, steps=4), MOVED[case.dtype]
    for first, second in ((adam, adam.reference), (adam.reference, adam)):
        halfway = run(first, steps=2).states[-1]
        resumed = _resume(second, halfway, skip=2, steps=2)
        for name, value in straight.states[-1]["model"].items():
            _close(resumed.states[-1]["model"][name], value, tolerance, f"{name} after moving")
        moments = straight.states[-1]["optimizer"]
        found = resumed.states[-1]["optimizer"]
        assert found.keys() == moments.keys()
        for name, state in moments.items():
            for key, value in state.items():
                _close(found[name][key], value, tolerance, f"{key} of {name} after moving")


def _resume(case: Case, state: dict[str, Any], skip: int, steps: int) -> Outcome:
    def train(session: Session) -> Outcome:
        session.load_state_dict(state)
        torch.manual_seed(3)
        batches = [case.model.sample(case.samples) for _ in range(skip + steps)][skip:]
        losses = [session.step(batch).loss for batch in batches]
        return Outcome(losses, [session.state_dict()])

    return run_session(case.engine, case.model, case.plan, case.spec, train)


def check_trace(case: Case, queues: tuple[str, ...] = ()) -> None:
    """The trace of a step has every op of the schedule, in an order that the schedule allows.

    With `queues` only these are compared: for an engine that cannot see its messages. Where ranks are processes, one
    may lose its core between sending a message and looking at the clock, so that it seems late: what is wrong with the
    order is wrong in every one of three traces.
    """

    def trace(session: Session) -> Any:
        for _ in range(2):
            session.step(case.model.sample(case.samples))
        return session.trace()

    schedule = case.engine.schedule(case.plan, profile_of(case.model))
    compared = tuple(queue for queue in schedule.queues if not queues or queue.name in queues)
    found: list[str] = []
    for _ in range(3 if case.engine.capabilities.multi_process else 1):
        measured = run_session(case.engine, case.model, case.plan, case.spec, trace)
        found = violations(replace(schedule, queues=compared), measured.only(1))
        if not found:
            break
    assert not found, found


def check_crash(case: Case, layer: int) -> None:
    """An error in any layer reaches the caller first, with its place; the process can continue."""

    def train(session: Session) -> None:
        session.step(case.model.sample(case.samples))

    crashing = _Crashing(case.model, layer)
    try:
        run_session(case.engine, crashing, case.plan, case.spec, train)
    except ZeroDivisionError as error:
        assert str(error) == "on purpose"
        if len(case.plan.stages) > 1:
            stage = case.plan.stage_of(layer)
            assert any(f"stage {stage}" in note for note in error.__notes__), error.__notes__
    else:
        raise AssertionError("the error was lost")
    run_session(case.engine, case.model, case.plan, case.spec, train)


def check_accepts(case: Case) -> None:
    """The engine's own check has nothing against a plan that it is tested with."""
    plan, cluster = case.plan, Cluster(devices_per_node=8)
    shape, mesh = BatchShape(case.samples, plan.micro_batches), plan.mesh
    request = PlanRequest(shape, mesh.pipeline, mesh.data, mesh.tensor, plan.recompute)
    assert case.engine.refuses(request, case.spec.dtype, cluster) == []
    assert case.engine.check(plan, profile_of(case.model), cluster, _memory()) == []


def profile_of(model: Model) -> ModelProfile:
    """A profile without costs: as much as a schedule needs."""
    with torch.device("meta"):
        module = model.layers()
    layers, shared = named_layers(module), ties(module)
    skips = tuple(Skip(s.source, s.target, 0, s.name) for s in layer_skips(layers))
    tied = [shared.get(name, ()) for name, _ in layers]
    sizes = [sum(one.bytes for one in own) for own in tied]
    profiles = [LayerProfile(n, param_bytes=b, tied=t) for (n, _), b, t in zip(layers, sizes, tied, strict=True)]
    return ModelProfile(tuple(profiles), model.name, skips=skips)


def _memory() -> Any:
    from harness.core.memory_model import named

    return named("sgd_fp32")


def _close(mine: Tensor, theirs: Tensor, tolerance: float, what: str) -> None:
    torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}")


class _Wrapped:
    """A model with other layers."""

    def __init__(self, model: Model, change: Callable[[nn.Sequential], nn.Sequential]) -> None:
        self._model, self._change = model, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def layers(self) -> nn.Sequential:
        return self._change(self._model.layers())


class _WithoutDropout(_Wrapped):
    def __init__(self, model: Model) -> None:
        super().__init__(model, _dropout_off)


def _dropout_off(layers: nn.Sequential) -> nn.Sequential:
    for module in layers.modules():
        if hasattr(module, "p"):
            module.p = 0.0
    return layers


class _Crash(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any) -> Any:
        raise ZeroDivisionError("on purpose")


class _Crashing(_Wrapped):
    def __init__(self, model: Model, layer: int) -> None:
        def change(layers: nn.Sequential) -> nn.Sequential:
            layers[layer] = _Crash(nn.Identity())
            return layers

        super().__init__(model, change)
