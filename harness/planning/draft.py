"""Draft a plan with its prediction: the planner places the layers, the simulator runs the schedule."""

from __future__ import annotations

from dataclasses import dataclass, replace

from omegaconf import DictConfig

from harness.checks import engine_support, layer_traits, plan_fits
from harness.checks.mesh import resolve
from harness.core import shared_buffers
from harness.core.cluster import SEND, Cluster
from harness.core.memory_model import MemoryModel, named
from harness.core.model_profile import ModelProfile
from harness.core.plan import Mesh, Plan
from harness.core.problem import CannotRun, NoPlan, Problem, ProblemError, refuse
from harness.interfaces import Engine, Planner
from harness.sbp.matmul_chain import chain_from_profile
from harness.sbp.route_to_plan import device_share, with_exchanges
from harness.schedule import Schedule
from harness.schedule.validate import validation_errors
from harness.simulator import Deadlock, Simulation, no_collection, simulate

SHOWN = 8
"""Faults of a schedule that are listed; one mistake may show in every op."""


@dataclass(frozen=True)
class Layout:
    """A plan before it is simulated, with what it was made from; `profile` is what one device has of each layer."""

    plan: Plan
    profile: ModelProfile
    cluster: Cluster
    memory: MemoryModel


@dataclass(frozen=True)
class Draft:
    """A plan, what it was made from, and one simulated step. `plan.predicted` holds the planner's figures and these."""

    plan: Plan
    schedule: Schedule
    profile: ModelProfile
    cluster: Cluster
    memory: MemoryModel
    simulation: Simulation

    @property
    def samples(self) -> int:
        """Samples of one step, over all replicas."""
        return self.profile.micro_batch * self.plan.micro_batches * self.plan.mesh.data

    @property
    def devices(self) -> int:
        """Devices that are at work, over all replicas and shards."""
        return len(self.plan.devices) * self.plan.mesh.data * self.plan.mesh.tensor

    def disturbed(self, jitter: float, seed: int) -> Simulation:
        """Simulate the same step with random op times; without jitter return `simulation`."""
        if not jitter:
            return self.simulation
        return simulate(self.schedule, self.plan, self.profile, self.cluster, self.memory, jitter, seed)


def mesh(config: DictConfig, engine: Engine, profile: ModelProfile, cluster: Cluster) -> Mesh:
    """The mesh that is planned for."""
    return resolve(config, engine.capabilities, cluster.devices, len(profile.layers))


def memory_model(config: DictConfig, engine: Engine, mesh: Mesh, profile: ModelProfile) -> MemoryModel:
    """The one that the user names; else the optimizer's, as the engine keeps it."""
    optimizer = config.optimizer
    model = named(config.memory, optimizer.name, optimizer.momentum)
    return engine.memory(model, mesh, profile) if config.memory == "auto" else model


def draft(config: DictConfig, engine: Engine, planner: Planner, profile: ModelProfile, cluster: Cluster) -> Draft:
    """Plan and simulate. Whether it fits into memory is not asked here.

    Raises `CannotRun` where there is no plan, where the engine refuses it, or its schedule cannot be executed.
    """
    try:
        return drafted(config, engine, laid_out(config, engine, planner, profile, cluster))
    except NoPlan as error:
        raise CannotRun([error.problem]) from error
    except ProblemError as error:  # of a search, or of a schedule file
        raise CannotRun(error.problems) from error


def optimizer_kind(config: DictConfig) -> str:
    """What of the optimizer's keys decides how long its steps take: "sgd momentum fused"."""
    keys = config.optimizer
    return " ".join([keys.name, *(key for key in ("momentum", "nesterov", "fused") if keys[key])])


def used_by(engine: Engine, cluster: Cluster) -> Cluster:
    """The cluster as an engine uses it: devices that are threads of one process call no library to communicate, and
    messages of MPI are not gloo's."""
    capabilities = engine.capabilities
    if capabilities.serial_cpu_devices and cluster.cores:
        cluster = replace(cluster, cores=1.0)
    if not capabilities.multi_process:
        return replace(cluster, calls=())
    calls = tuple(one for one in cluster.calls if one.name != SEND or not capabilities.mpi)
    return replace(cluster, calls=calls, cores=cluster.process_cores or cluster.cores)


def locked(engine: Engine, cluster: Cluster, profile: ModelProfile, devices: int) -> Cluster:
    """The cluster with as many cores as this model's layers can use on so many devices, where these are threads of one
    Python: each further one that computes makes the others wait for the interpreter's lock. Where the user says how
    many cores there are, that counts."""
    capabilities = engine.capabilities
    if capabilities.multi_process or capabilities.serial_cpu_devices or not cluster.process_cores:
        return cluster
    return replace(cluster, cores=min(cluster.cores, devices / (1 + profile.lock_share * (devices - 1))))


def laid_out(
    config: DictConfig, engine: Engine, planner: Planner, profile: ModelProfile, cluster: Cluster, compares: bool = True
) -> Layout:
    """Plan, without simulating; `compares` as in a request. Raises `NoPlan` where there is none, `CannotRun` where the
    engine refuses it."""
    cluster = used_by(engine, cluster).used_with(config.engine.name, optimizer_kind(config))
    wanted = mesh(config, engine, profile, cluster)
    cluster = locked(engine, cluster, profile, wanted.size)
    model = memory_model(config, engine, wanted, profile)
    request = engine_support.plan_request(config, engine, wanted, len(profile.layers))
    refuse([*engine.refuses(request, profile.dtype, cluster), *engine.refuses_layers(request, profile)])

    def refused(one: Plan) -> list[Problem]:
        return plan_fits.check_plan(config, one, wanted, len(profile.layers), cluster) or [
            *shared_buffers.refused(one, profile),
            *layer_traits.refused(config, engine.capabilities, one, profile),
            *engine.check(one, profile, cluster, model),
        ]

    plan = planner.plan(profile, cluster, model, replace(request, refused=refused, compares=compares))
    refuse(refused(plan))
    plan = engine.ordered(plan, profile, cluster, model, refused)
    if config.memory == "auto":
        model = replace(model, copies=engine.copies(plan))
    if plan.mesh.tensor > 1:
        chain = chain_from_profile(profile)
        profile = with_exchanges(device_share(profile, plan, chain), plan, chain)
    return Layout(plan, engine.layers(plan, profile), cluster, model)


@no_collection()
def drafted(config: DictConfig, engine: Engine, layout: Layout, validated: bool = False) -> Draft:
    """Simulate one step of a plan; `validated` says that its schedule was, with fewer micro-batches. Raises `CannotRun`
    where it cannot be executed."""
    plan, profile, cluster, model = layout.plan, layout.profile, layout.cluster, layout.memory
    schedule = engine.schedule(plan, profile)
    if not validated:
        refuse_invalid(config.engine.name, schedule, plan)
    simulation = _simulated(config, schedule, plan, profile, cluster, model)
    plan = replace(plan, predicted={**plan.predicted, **simulation.figures})
    return Draft(plan, schedule, profile, cluster, model, simulation)


def refuse_invalid(engine: str, schedule: Schedule, plan: Plan) -> None:
    """Errors of the schedule are errors of the engine. Raises `CannotRun`."""
    found = validation_errors(schedule, plan)
    if found:
        more = [Problem("engine", engine, f"has {len(found) - SHOWN} more of these")] if len(found) > SHOWN else []
        raise CannotRun([*(of_engine(engine, fault) for fault in found[:SHOWN]), *more])


def _simulated(
    config: DictConfig, schedule: Schedule, plan: Plan, profile: ModelProfile, cluster: Cluster, model: MemoryModel
) -> Simulation:
    """Simulate one step. A schedule that cannot be executed is an error of the engine."""
    try:
        return simulate(schedule, plan, profile, cluster, model)
    except (Deadlock, ValueError) as error:
        message = " ".join(f"has a schedule that cannot be executed: {error}".split())
        raise CannotRun([Problem("engine", config.engine.name, message)]) from error


def of_engine(engine: str, fault: Problem) -> Problem:
    """A fault of a schedule, under the engine's key."""
    return Problem("engine", engine, f"schedules {fault.statement}", hint=fault.hint)
