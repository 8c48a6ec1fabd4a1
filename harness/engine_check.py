"""What keeps a run from starting, as soon as it can be told: before the model is measured, which may take minutes."""

from __future__ import annotations

from dataclasses import replace

from omegaconf import DictConfig

from harness import check, divisors, srun
from harness.cluster import Cluster
from harness.interfaces import BatchShape, Engine, PlanRequest
from harness.mesh import Mesh
from harness.plan import Plan
from harness.problem import Problem


def early(config: DictConfig, engine: Engine, cluster: Cluster | None) -> list[Problem]:
    """All that is wrong with the request: what every engine is asked, and what this one refuses.

    Of two problems with the same key the engine's stays, whose mend counts with the other. `cluster` None: it is wrong
    itself.
    """
    own = refused(config, engine, cluster) if cluster else []
    told = {problem.key for problem in own}
    asked = check.request(config, engine.capabilities, cluster) + srun.problems(config, engine.capabilities)
    return [p for p in asked if p.key not in told] + own


def refused(config: DictConfig, engine: Engine, cluster: Cluster) -> list[Problem]:
    """What the engine refuses whatever the model is.

    How many stages there are may follow from the devices, and there are never more than layers: then only what it
    refuses with two stages, three, and so on up to all devices.
    """
    mesh = check.resolve(config, engine.capabilities, cluster.devices, layers=cluster.devices)
    fewest = mesh.pipeline if config.mesh.pipeline or check.stated(config) else min(2, mesh.pipeline)
    found: list[Problem] = []
    for stages in range(fewest, mesh.pipeline + 1):
        request = plan_request(config, engine, replace(mesh, pipeline=stages))
        last = engine.refuses(request, config.precision.dtype, cluster)
        known = {problem.key for problem in found}
        found = [problem for problem in last if problem.key in known or stages == fewest]
    return found + _astride(mesh, cluster)


def _astride(mesh: Mesh, cluster: Cluster) -> list[Problem]:
    """Shards of some stages on two nodes, where those of others are on one: stages and replicas must lie alike."""
    shards, each = mesh.tensor, cluster.devices_per_node
    if mesh.size <= each or each % shards == 0 or shards > each:  # of more than a node has the planner tells
        return []
    what = f"lies unlike on nodes of {each} devices, some of its groups across two nodes"
    return [Problem(f"mesh.tensor {shards}", what, f"mesh.tensor={max(n for n in divisors.of(each) if n < shards)}")]


def unsplit(plan: Plan, engine: str) -> list[Problem]:
    """A plan without traffic is none for tensor parallelism."""
    return [] if plan.mesh.tensor == 1 or plan.traffic else [no_split(plan.mesh.tensor, engine)]


def no_split(shards: int, engine: str) -> Problem:
    """Of a planner that splits no matrix products."""
    what = f"gets a plan that says of no product how {shards} devices split it"
    return Problem(f"engine {engine}", what, "planner=autoddl, megatron or data_parallel")


def plan_request(config: DictConfig, engine: Engine, mesh: Mesh) -> PlanRequest:
    """What planner and engine are asked for."""
    shape = BatchShape(config.batch.size, config.batch.micro_batches)
    recompute = config.engine.get("checkpoint", "never")
    return PlanRequest(shape, mesh.pipeline, mesh.data, mesh.tensor, recompute, engine.placement(mesh.pipeline))
