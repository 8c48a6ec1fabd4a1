"""What the user should know of a run that is possible all the same: settings that do nothing, readings of the paper."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engines.myelin.config import Config
from harness import checkpointing
from harness.plan import Plan
from harness.problem import Problem

DRIVEN = "message_driven"
DEFAULT = Config()


def idle(config: Config, plan: Plan, dtype: str) -> list[Problem]:
    """Settings that differ from the default ones, and do nothing."""
    return [*_scheduling(config, plan), *_updating(config, plan, dtype)]


def _scheduling(config: Config, plan: Plan) -> Iterator[Problem]:
    m, limit, policy = plan.micro_batches, config.pipeline_limit, config.policy
    given = [f"engine.pipeline_limit {limit}"] if limit is not None else []
    given += [f"engine.policy {policy}"] if policy != DEFAULT.policy else []
    if config.order != DRIVEN:
        does_nothing, mend = f"does nothing with the fixed order {config.order}", f"engine.order={DRIVEN}"
        yield from (Problem(key, does_nothing, mend) for key in given)
    elif len(plan.stages) == 1:
        yield from (Problem(key, "does nothing in a pipeline of 1 stage", "mesh.pipeline=2") for key in given)
    elif limit is not None and limit > m:
        what = f"is more than the {m} micro-batches of a step"
        yield Problem(f"engine.pipeline_limit {limit}", what, f"engine.pipeline_limit={m}")


def _updating(config: Config, plan: Plan, dtype: str) -> Iterator[Problem]:
    k, bsize, summed = config.k, config.bsize, plan.mesh.data > 1
    if k != DEFAULT.k and not summed:
        yield Problem(f"engine.k {k}", "does nothing with 1 replica: no gradients are summed", "mesh.data=2")
    if bsize != DEFAULT.bsize and not config.offload and not (summed and k):
        why = "all gradients are summed at once (engine.k 0)" if summed else "no gradients are summed (1 replica)"
        what = f"does nothing: no optimizer's state visits the device (engine.offload false), and {why}"
        yield Problem(f"engine.bsize {bsize}", what, "engine.offload=true")
    if config.loss_scale is not None and dtype != "float16":
        what = f"does nothing in {dtype}, only losses of float16 are scaled"
        yield Problem(f"engine.loss_scale {config.loss_scale:g}", what, "precision=fp16")


def readings(plan: Plan) -> Problem:
    """Where checkpoints come by the paper's formula, and where they would by the formula as it is printed."""
    layers, own = plan.stages[-1].last + 1, [stage.layers for stage in plan.stages]
    meant, printed = checkpointing.readings(layers, len(own))
    taken, other = ([checkpointing.nearest(n, reading.optimum) for n in own] for reading in (meant, printed))
    what = (
        f"is every {_listed(taken)} layers of the stages, the factors nearest to {meant.optimum:.3g}, where "
        f"{meant.formula} is least; as printed, {printed.formula}, nearest to {printed.optimum:.3g}: {_listed(other)}"
    )
    alike = len(set(other)) == 1
    mend = f"engine.checkpoint_every={other[0]} for that one" if alike else "planner=uniform for stages alike"
    return Problem("engine.checkpoint_every auto", what, mend)


def _listed(numbers: Sequence[int]) -> str:
    """One number where all are the same."""
    return ", ".join(map(str, numbers if len(set(numbers)) > 1 else numbers[:1]))
