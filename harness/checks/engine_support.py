"""Problems that an engine reports before the model is profiled, which may take minutes."""

from __future__ import annotations

import math
from dataclasses import replace

from omegaconf import DictConfig

from harness.checks import formats
from harness.checks import request as checks_request
from harness.checks.mesh import given_balance, resolve
from harness.config import registry
from harness.core.cluster import Cluster
from harness.core.plan import Mesh, Plan
from harness.core.problem import LEAVE_OUT, Fix, Problem
from harness.host import open_files
from harness.interfaces import BatchShape, Engine, PlanRequest
from harness.launch import rank_starter
from harness.schedule import action_file


def early(config: DictConfig, engine: Engine, cluster: Cluster | None) -> list[Problem]:
    """All that is wrong with the request: what every engine is asked, and what this one refuses.

    Of two problems whose first fixes set the same keys the engine's stays: its fix takes the other one into account.
    `cluster` None: it is wrong itself.
    """
    own = refused(config, engine, cluster) if cluster else []
    fixed = [problem.fixes[0].keys() for problem in own if problem.fixes]
    asked = checks_request.request(config, engine.capabilities, cluster)
    asked += formats.lacking(config, engine.capabilities, cluster) if cluster else []
    asked += rank_starter.problems(config, engine.capabilities)
    asked += compares(config, engine)
    return [problem for problem in asked if not problem.fixes or problem.fixes[0].keys() not in fixed] + own


def on_any_mesh(config: DictConfig, engine: Engine) -> list[Problem]:
    """What is wrong with the request whatever the mesh and the micro-batches are: those are mode=tune's to choose."""
    found = checks_request.on_any_mesh(config, engine.capabilities)
    return found + rank_starter.problems(config, engine.capabilities) + compares(config, engine)


def compares(config: DictConfig, engine: Engine) -> list[Problem]:
    """A setting that stands for several ones, in a mode that needs one; mode=tune searches some without it."""
    others = engine.alternatives()
    if not others or engine.picks_best or config.mode in ("plan", "simulate"):
        return []
    first = next(iter(others.values()))
    key = next(iter(first))
    message = f"compares {len(others)} settings, which mode=plan and mode=simulate do"
    name = key.removeprefix("engine.")
    keys = getattr(registry.schemas()["engine", config.engine.name], "SEARCHED", {})
    searched = config.mode == "tune" and name in keys
    fixes: tuple[Fix, ...] = ({key: LEAVE_OUT} if searched else first, {"mode": "plan"})
    return [Problem(key, config.engine[name], message, fixes)]


def refused(config: DictConfig, engine: Engine, cluster: Cluster) -> list[Problem]:
    """Return the problems of the engine with a request, whatever the model is.

    How many stages there are may follow from the devices, and there are never more than layers: then only what it
    refuses with two stages, three, and so on up to all devices; and a schedule file with another number of rows than
    devices, which the user can say by mesh.pipeline.
    """
    mesh = resolve(config, engine.capabilities, cluster.devices, layers=cluster.devices)
    fewest = mesh.pipeline if config.mesh.pipeline or given_balance(config) else min(2, mesh.pipeline)
    found: list[Problem] = []
    for stages in range(fewest, mesh.pipeline + 1):
        request = plan_request(config, engine, replace(mesh, pipeline=stages))
        last = engine.refuses(request, config.precision.dtype, cluster)
        known = {problem.key for problem in found}
        found = [problem for problem in last if problem.key in known or stages == fewest]
    found += [problem for problem in last if problem not in found and _asks_for_stages(problem)]
    return found + _unsplit(config, mesh) + _astride(mesh, cluster) + _open_files(config, engine, mesh, cluster)


def _asks_for_stages(problem: Problem) -> bool:
    return problem.key == action_file.KEY and any("mesh.pipeline" in fix for fix in problem.fixes)


def _unsplit(config: DictConfig, mesh: Mesh) -> list[Problem]:
    """Tensor parallelism with a planner that splits no matmuls, known before anything is measured; mode=tune searches
    planners, too."""
    unsplit = mesh.tensor > 1 and config.mode != "tune" and not registry.splits_matmuls(config.planner.name)
    return [no_split(mesh.tensor, config.engine.name)] if unsplit else []


def _open_files(config: DictConfig, engine: Engine, mesh: Mesh, cluster: Cluster) -> list[Problem]:
    """Too few files that each process may open, for the ranks that train on a machine."""
    if config.mode != "run" or config.cluster.name != "local":
        return []
    return open_files.problems(min(mesh.size, cluster.devices_per_node) if engine.capabilities.multi_process else 1)


def _astride(mesh: Mesh, cluster: Cluster) -> list[Problem]:
    """Tensor-parallel groups of some stages span two nodes, those of others one: all must span equally many. What
    divides the model into `shards` divides it into a divisor of them, too."""
    shards, each = mesh.tensor, cluster.devices_per_node
    if mesh.size <= each or cluster.places_equally(shards) or shards > each:  # of more than a node has the planner says
        return []
    message = f"does not divide the {each} devices of a node: some tensor-parallel groups would span two nodes"
    return [Problem("mesh.tensor", shards, message, ({"mesh.tensor": math.gcd(shards, each)},))]


def unsplit(plan: Plan, engine: str) -> list[Problem]:
    """A problem if mesh.tensor is above 1 and the plan has no strategies for tensor parallelism."""
    return [no_split(plan.mesh.tensor, engine)] if plan.mesh.tensor > 1 and not plan.traffic else []


def no_split(shards: int, engine: str) -> Problem:
    """The problem of a planner that splits no matmuls."""
    message = f"needs a plan that says how {shards} devices split each matmul"
    splitting: list[Fix] = [{"planner": name} for name in ("autoddl", "megatron", "data_parallel")]
    return Problem("engine", engine, message, (*splitting, {"mesh.tensor": 1}))


def plan_request(config: DictConfig, engine: Engine, mesh: Mesh, layers: int | None = None) -> PlanRequest:
    """Return the request for planner and engine; `layers` are those of the model."""
    shape = BatchShape(config.batch.size, config.batch.micro_batches)
    recompute = config.engine.get("checkpoint", "never")
    placement = engine.placement(mesh.pipeline)
    return PlanRequest(shape, mesh.pipeline, mesh.data, mesh.tensor, recompute, placement, layers)
