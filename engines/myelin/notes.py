"""What the user should know of a run that is possible all the same: settings that do nothing, readings of the paper."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engines.myelin.config import Config
from harness import checkpointing, display
from harness.cluster import Cluster
from harness.memory import DTYPE_BYTES, MemoryModel
from harness.plan import Plan
from harness.problem import Problem
from harness.profile import ModelProfile
from harness.simulate.ledger import working_bytes

DRIVEN = "message_driven"
DEFAULT = Config()
BUCKETS, CHUNKS = 16, 4
"""So many buckets, or chunks, of a stage's parameters are offered where one holds them all."""


def idle(config: Config, plan: Plan, profile: ModelProfile, cluster: Cluster, memory: MemoryModel) -> list[Problem]:
    """Settings that differ from the default ones, and do nothing."""
    most = max(profile.parameter_bytes(stage.first, stage.last) for stage in plan.stages)
    return [
        *_scheduling(config, plan, _two("pipeline", plan, cluster)),
        *_updating(config, plan, profile.dtype, _two("data", plan, cluster)),
        *_bucketing(config, plan, most // DTYPE_BYTES[profile.dtype]),
        *_offloading(config, profile.dtype, most, memory),
    ]


def _two(degree: str, plan: Plan, cluster: Cluster) -> str:
    """What to type for two of what the mesh has one of: with more devices, where there are too few."""
    needed = 2 * plan.mesh.size
    return f"mesh.{degree}=2" + (f" cluster.devices={needed}" if needed > cluster.devices else "")


def _scheduling(config: Config, plan: Plan, stages: str) -> Iterator[Problem]:
    m, limit, policy = plan.micro_batches, config.pipeline_limit, config.policy
    given = [f"engine.pipeline_limit {limit}"] if limit is not None else []
    given += [f"engine.policy {policy}"] if policy != DEFAULT.policy else []
    if config.order != DRIVEN:
        does_nothing, mend = f"does nothing with the fixed order {config.order}", f"engine.order={DRIVEN}"
        yield from (Problem(key, does_nothing, mend) for key in given)
    elif len(plan.stages) == 1:
        yield from (Problem(key, "does nothing in a pipeline of 1 stage", stages) for key in given)
    elif limit is not None and limit > m:
        what = f"is more than the {m} micro-batches of a step"
        yield Problem(f"engine.pipeline_limit {limit}", what, f"engine.pipeline_limit={m}")


def _updating(config: Config, plan: Plan, dtype: str, replicas: str) -> Iterator[Problem]:
    k, bsize, summed = config.k, config.bsize, plan.mesh.data > 1
    if k != DEFAULT.k and not summed:
        yield Problem(f"engine.k {k}", "does nothing with 1 replica: no gradients are summed", replicas)
    if bsize != DEFAULT.bsize and not config.offload and not (summed and k):
        why = "all gradients are summed at once (engine.k 0)" if summed else "no gradients are summed (1 replica)"
        what = f"does nothing: no optimizer's state visits the device (engine.offload false), and {why}"
        yield Problem(f"engine.bsize {bsize}", what, "engine.offload=true")
    if config.loss_scale is not None and dtype != "float16":
        what = f"does nothing in {dtype}, only losses of float16 are scaled"
        yield Problem(f"engine.loss_scale {config.loss_scale:g}", what, "precision=fp16")


def _bucketing(config: Config, plan: Plan, most: int) -> Iterator[Problem]:
    """A chunk that has all `most` parameters of a stage: they are summed first, and updated then, as with k = 0."""
    k, bsize = config.k or DEFAULT.k, config.bsize
    if plan.mesh.data == 1 or not k < most <= k * bsize:
        return
    held = f"{k} bucket{'s' * (k > 1)} of engine.bsize {bsize} hold{'s' * (k == 1)} the {most} parameters"
    what = f"{held} of the largest stage: no update overlaps with a sum"
    mend = f"engine.bsize={max(1, most // (k * CHUNKS))}"
    if config.k != DEFAULT.k:
        does = "does nothing" if config.k else f"does what engine.k {k} does here"
        yield Problem(f"engine.k {config.k}", f"{does}: {what}", mend)
    elif bsize != DEFAULT.bsize and not config.offload:
        yield Problem(f"engine.bsize {bsize}", f"is too much: {what}", mend)


def _offloading(config: Config, dtype: str, most: int, memory: MemoryModel) -> Iterator[Problem]:
    """Buckets on the device that take as much as what they keep off it, or more: of a stage of `most` bytes.

    Buckets have weight and gradient of a parameter beside its optimizer's state, which without offloading are there
    anyway, except in half precision.
    """
    if not (config.offload and most and memory.buckets_bytes):
        return
    width, half = DTYPE_BYTES[dtype], dtype in ("bfloat16", "float16")
    off = round(most * (memory.bucketed - (0 if half else 2)))
    buckets = min(memory.buckets_bytes, round(most * memory.bucketed))
    if off > buckets:
        return
    kept = f"it keeps {display.size(off)} off the device and puts buckets of {display.size(buckets)} there"
    what = f"saves no memory: of the largest stage {kept} (engine.bsize {config.bsize})"
    mend = f"engine.bsize={_smaller(most // width)}" if off else "engine.offload=false"
    yield Problem("engine.offload true", what, mend)


def _smaller(most: int) -> int:
    """Parameters of a bucket, of which a stage has several."""
    return max(1, most // BUCKETS)


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


def wasted(config: Config, plan: Plan, profile: ModelProfile) -> list[Problem]:
    """Stages that compute layers again and keep no less for it, as many small segments do, whose inputs are kept."""
    every, layers = config.checkpoint_every, len(profile.layers)
    again = [bool(checkpointing.segments(stage, every, layers)) for stage in plan.stages]
    plain, held = (_held(config, plan, profile, one) for one in ("never", every))
    found = [j for j, one in enumerate(again) if one and held[j] >= plain[j] > 0]
    if not found:
        return []
    most = max(found, key=lambda j: held[j])
    own = plan.stages[most].layers
    what = (
        f"saves no memory on stage {', '.join(map(str, found))}, and computes layers again: with a checkpoint every "
        f"{checkpointing.distance(every, own, layers)} of the {own} layers of stage {most} its tasks keep "
        f"{display.size(held[most])}, without any {display.size(plain[most])}"
    )
    steps = [str(step) for step in range(1, max(stage.layers for stage in plan.stages) + 1)]
    best = min(steps, key=lambda step: max(_held(config, plan, profile, step)))
    saves = all(_held(config, plan, profile, best)[j] < plain[j] for j in found)
    return [Problem(f"engine.checkpoint_every {every}", what, f"engine.checkpoint_every={best if saves else 'never'}")]


def _held(config: Config, plan: Plan, profile: ModelProfile, every: str) -> list[int]:
    """What the tasks of each stage keep at most: what waits for its backward pass, and what one of these works with."""
    kept = checkpointing.checkpointed(profile, plan, every)
    return [
        _flying(config, plan, j) * round(kept.sum("saved_bytes", stage.first, stage.last))
        + working_bytes(kept, stage.first, stage.last)
        for j, stage in enumerate(plan.stages)
    ]


def _flying(config: Config, plan: Plan, j: int) -> int:
    """Micro-batches of a stage that wait for their backward pass, at most."""
    m, stages = plan.micro_batches, len(plan.stages)
    if config.order == "gpipe":
        return m
    if config.order == DRIVEN and j < stages - 1:
        return min(m, config.pipeline_limit or stages)
    return min(m, stages - j)


def _listed(numbers: Sequence[int]) -> str:
    """One number where all are the same."""
    return ", ".join(map(str, numbers if len(set(numbers)) > 1 else numbers[:1]))
