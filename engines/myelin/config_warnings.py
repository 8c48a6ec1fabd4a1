"""Warnings about runs that are possible: settings without effect, interpretations of the paper."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from harness.core import activation_checkpointing, units
from harness.core.cluster import Cluster
from harness.core.memory_model import DTYPE_BYTES, MemoryModel
from harness.core.model_profile import ModelProfile
from harness.core.plan import Plan
from harness.core.problem import Fix, Problem
from harness.simulator.memory_timeline import working_bytes

if TYPE_CHECKING:
    from engines.myelin.engine import Config

DRIVEN = "message_driven"
BUCKETS, CHUNKS = 16, 4
"""Numbers of buckets, and of chunks, that a fix offers where one would hold all parameters of a stage."""


def _default(config: Config) -> Config:
    return type(config)()


def idle(config: Config, plan: Plan, profile: ModelProfile, cluster: Cluster, memory: MemoryModel) -> list[Problem]:
    """Settings that differ from the default ones, and do nothing."""
    most = max(profile.trained_bytes(stage.first, stage.last) for stage in plan.stages)
    return [
        *_scheduling(config, plan, cluster),
        *_updating(config, plan, profile.dtype, _more("data", 2, plan, cluster)),
        *_bucketing(config, plan, most // DTYPE_BYTES[profile.dtype]),
        *_offloading(config, profile.dtype, most, memory),
    ]


def _more(degree: str, size: int, plan: Plan, cluster: Cluster) -> Fix:
    """Return the fix that sets a parallel size, with more devices if there are too few."""
    needed = plan.mesh.size // getattr(plan.mesh, degree) * size
    return {f"mesh.{degree}": size} | ({"cluster.devices": needed} if needed > cluster.devices else {})


def _scheduling(config: Config, plan: Plan, cluster: Cluster) -> Iterator[Problem]:
    m, limit, policy = plan.micro_batches, config.pipeline_limit, config.policy
    given: dict[str, Any] = {"engine.pipeline_limit": limit} if limit is not None else {}
    given |= {"engine.policy": policy} if policy != _default(config).policy else {}
    if config.order != DRIVEN:
        message, fix = f"does nothing with the fixed order {config.order}", {"engine.order": DRIVEN}
        yield from (Problem(key, value, message, (fix,)) for key, value in given.items())
        return
    if "engine.policy" in given and len(plan.stages) < 3:
        message = "does nothing without a stage in the middle: the first one and the last one have no choice"
        yield Problem("engine.policy", policy, message, (_more("pipeline", 3, plan, cluster),))
    if limit is not None and len(plan.stages) == 1:
        message = "does nothing in a pipeline of 1 stage"
        yield Problem("engine.pipeline_limit", limit, message, (_more("pipeline", 2, plan, cluster),))
    elif limit is not None and limit > m:
        message = f"is more than the {m} micro-batches of a step"
        yield Problem("engine.pipeline_limit", limit, message, ({"engine.pipeline_limit": m},))


def _updating(config: Config, plan: Plan, dtype: str, two_replicas: Fix) -> Iterator[Problem]:
    k, bsize, reduced = config.k, config.bsize, plan.mesh.data > 1
    if k != _default(config).k and not reduced:
        yield Problem("engine.k", k, "does nothing with 1 replica: no gradients are all-reduced", (two_replicas,))
    if bsize != _default(config).bsize and not config.offload and not (reduced and k):
        why = "all gradients are all-reduced at once (engine.k 0)" if reduced else "no gradients are all-reduced"
        message = f"does nothing: the optimizer's state stays on the device (engine.offload false), and {why}"
        yield Problem("engine.bsize", bsize, message, ({"engine.offload": True},))
    if config.loss_scale is not None and dtype != "float16":
        message = f"does nothing in {dtype}, only losses of float16 are scaled"
        yield Problem("engine.loss_scale", config.loss_scale, message, ({"precision.dtype": "float16"},))


def _bucketing(config: Config, plan: Plan, most: int) -> Iterator[Problem]:
    """A chunk with all `most` parameters of a stage: they are all-reduced first, and updated then, as with k = 0."""
    k, bsize = config.k or _default(config).k, config.bsize
    if plan.mesh.data == 1 or not k < most <= k * bsize:
        return
    held = f"{k} bucket{'s' * (k > 1)} of engine.bsize {bsize} hold{'s' * (k == 1)} the {most} parameters"
    why = f"{held} of the largest stage: no update overlaps with an all-reduce"
    fix = {"engine.bsize": max(1, most // (k * CHUNKS))}
    if config.k != _default(config).k:
        does = "does nothing" if config.k else f"does what engine.k {k} does here"
        yield Problem("engine.k", config.k, f"{does}: {why}", (fix,))
    elif bsize != _default(config).bsize and not config.offload:
        yield Problem("engine.bsize", bsize, f"is too large: {why}", (fix,))


def _offloading(config: Config, dtype: str, most: int, memory: MemoryModel) -> Iterator[Problem]:
    """Buckets on the device that take as much as what they keep off it, or more: of a stage of `most` bytes.

    Buckets have weight and gradient of a parameter in addition to its optimizer's state; without offloading both are
    on the device anyway, except in half precision.
    """
    if not (config.offload and most and memory.buckets_bytes):
        return
    width, half = DTYPE_BYTES[dtype], dtype in ("bfloat16", "float16")
    off = round(most * (memory.bucketed - (0 if half else 2)))
    buckets = min(memory.buckets_bytes, round(most * memory.bucketed))
    if off > buckets:
        return
    kept = f"it keeps {units.size(off)} off the device and puts buckets of {units.size(buckets)} there"
    message = f"saves no memory: of the largest stage {kept} (engine.bsize {config.bsize})"
    fix: Fix = {"engine.bsize": max(1, most // width // BUCKETS)} if off else {"engine.offload": False}
    yield Problem("engine.offload", True, message, (fix,))


def interpretations(plan: Plan) -> Problem:
    """Return a note with the checkpoints by the paper's formula, and by that formula as it is printed."""
    layers, own = plan.stages[-1].last + 1, [stage.layers for stage in plan.stages]
    meant, printed = activation_checkpointing.interpretations(layers, len(own))
    taken, other = ([activation_checkpointing.nearest(n, reading.optimum) for n in own] for reading in (meant, printed))
    message = (
        f"is every {_listed(taken)} layers of the stages, the factors nearest to {meant.optimum:.3g}, where "
        f"{meant.formula} is least; as printed, {printed.formula}, nearest to {printed.optimum:.3g}: {_listed(other)}"
    )
    fix: Fix = {"engine.checkpoint_every": other[0]} if len(set(other)) == 1 else {"planner": "uniform"}
    numbers = {"optimum": meant.optimum, "printed_optimum": printed.optimum}
    return Problem("engine.checkpoint_every", "auto", message, (fix,), numbers=numbers)


def through_the_host(config: Config, plan: Plan, cluster: Cluster) -> list[Problem]:
    """Messages between GPUs of this machine by MPI: CPU devices share cores, GPUs do not."""
    if config.transport != "mpi" or cluster.name != "local" or cluster.cores or len(plan.stages) == 1:
        return []
    message = "copies each message to the host's memory, unless MPI takes GPU memory (mpich of PyPI does not)"
    return [Problem("engine.transport", "mpi", message, ({"engine.transport": "torch"},))]


def wasted(config: Config, plan: Plan, profile: ModelProfile) -> list[Problem]:
    """Stages that compute layers again and keep no less for it, as many small segments do, whose inputs are kept."""
    every, layers = config.checkpoint_every, len(profile.layers)
    again = [bool(activation_checkpointing.segments(stage, every, layers)) for stage in plan.stages]
    plain, held = (_held(config, plan, profile, one) for one in ("never", every))
    found = [j for j, one in enumerate(again) if one and held[j] >= plain[j] > 0]
    if not found:
        return []
    most = max(found, key=lambda j: held[j])
    own = plan.stages[most].layers
    message = (
        f"saves no memory on stage {', '.join(map(str, found))}, and recomputes layers: with a checkpoint every "
        f"{activation_checkpointing.distance(every, own, layers)} of the {own} layers of stage {most} its tasks keep "
        f"{units.size(held[most])}, without any {units.size(plain[most])}"
    )
    steps = [str(step) for step in range(1, max(stage.layers for stage in plan.stages) + 1)]
    best = min(steps, key=lambda step: max(_held(config, plan, profile, step)))
    saves = all(_held(config, plan, profile, best)[j] < plain[j] for j in found)
    fix: Fix = {"engine.checkpoint_every": int(best) if saves else "never"}
    return [Problem("engine.checkpoint_every", every, message, (fix,))]


def _held(config: Config, plan: Plan, profile: ModelProfile, every: str) -> list[int]:
    """Return, for each stage, the most bytes that its tasks keep: for pending backward passes, and while one of these
    runs."""
    kept = activation_checkpointing.checkpointed(profile, plan, every)
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
    """Join numbers for a message; equal ones are written once."""
    return ", ".join(map(str, numbers if len(set(numbers)) > 1 else numbers[:1]))
