"""The pipeline engine: any schedule, executed by ranks.

    python run.py engine=pipeline engine.schedule=zb_h1 model=gpt         a published family
    python run.py engine=pipeline engine.schedule=own.csv model=unet      the order of a file
    python run.py engine=pipeline engine.schedule=search model=unet       the best that is found in half a minute
    python run.py engine=pipeline engine.schedule=search engine.boundaries=search model=unet       and stages with it
    python run.py mode=plan engine=pipeline engine.schedule=all model=unet    all of these side by side

    rank 0   F F F . . I W I F . .      the tasks of its stages in their order, each when its messages have come
    rank 1   . F F I . F W I . . .      messages go by themselves; skips go straight to the stage that pops them

A schedule is data (`harness.schedule`): forward passes, backward passes whole (B) or in halves (I for the inputs, W for
the weights), recomputations. Each is what the simulator predicts, the validator checks, and the ranks execute.

What it cannot do:

* No tensor parallelism inside a stage.
* The first stage's inputs have no gradient, so its I is empty, and its W is the whole backward pass. With a frozen
  prefix that is so of the first stage with a trained layer; those before it have no backward pass.
* A custom autograd function that takes a matrix as weight computes all its gradients in each half; both halves call
  the hooks of tensors in a stage.
* Times of messages are differences of two ranks' clocks: right on one machine.
* On GPUs (untested) messages of transport=mpi pass through the host, unless MPI takes GPUs' memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import ClassVar

from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import ModelProfile
from harness.core.plan import Mesh, Plan
from harness.core.problem import LEAVE_OUT, Fix, Problem, ProblemError
from harness.core.value_checks import at_least, one_of
from harness.interfaces import (
    Capabilities,
    Engine,
    Model,
    PlanRequest,
    Refused,
    Searched,
    Session,
    SessionSpec,
)
from harness.launch import mpi
from harness.schedule import Schedule, action_check, action_file, plan_order
from harness.schedule.builders.data_parallel import with_replicas
from harness.schedule.builders.gpipe import RECOMPUTE, with_recomputation
from harness.schedule.families import FAMILIES, chunks_of_file, micro_batch_fixes, wrong_chunks
from harness.schedule.frozen_stages import without_frozen
from harness.schedule.tied_weight_ops import plan_ties, with_ties
from harness.schedule.transfers import Transfer, plan_transfers

TRANSPORTS = ("torch", "mpi")
CHUNKS = 2
SEARCH, ALL = "search", "all"
AUTO = "auto"
PLANNER = "planner"
PLACED: dict[str, str] = {"one": "1f1b", "v": "zbv", "loop": "looped_bfs"}
"""Where the search puts stages, by a family that has them there."""
HERE = "local"


@dataclass
class Config:
    """`engines.pipeline.engine` says what it executes; `harness.schedule.families` what each schedule is."""

    SEARCHED: ClassVar[dict[str, Searched]] = {
        "schedule": Searched(("1f1b", "interleaved1f1b", "zb_h1", "zbv", "v_half", "v_min"), "pipeline"),
        "checkpoint": Searched(("never", "always")),
    }

    name: str = "pipeline"
    """The engine."""
    schedule: str = "1f1b"
    """Order of the tasks: a published one; all, to compare these in mode=plan; search, for the least step time within
    the memory of the devices; or a .csv or .json file with the actions of each device."""
    chunks: int = CHUNKS
    """Number of stages on each device, for schedules of any number: interleaved1f1b, looped_bfs, interleaved_zb, and a
    search in a loop."""
    placement: str = AUTO
    """Where the search has its stages: one on each device; v, two, down the devices and up again; loop,
    engine.chunks, in turn; or auto, which searches all three and takes the fastest."""
    boundaries: str = PLANNER
    """Where the search has the boundaries of stages: planner, where the planner says; or search, which begins there
    and moves layers to the stage before or after theirs as long as that makes a step faster."""
    checkpoint: str = "never"
    """Which micro-batches are recomputed in the backward pass: always, except_last or never. A file says so itself."""
    transport: str = "torch"
    """What sends messages between stages: torch (torch.distributed), or mpi."""


def check(config: Config) -> list[Problem]:
    """Values that no run can have."""
    found = one_of("engine.transport", config.transport, TRANSPORTS)
    found += one_of("engine.checkpoint", config.checkpoint, RECOMPUTE, "always")
    found += one_of("engine.placement", config.placement, (AUTO, *PLACED))
    found += one_of("engine.boundaries", config.boundaries, (PLANNER, SEARCH))
    if config.schedule not in (SEARCH, ALL):
        where = "has its stages in places of its own"
        found += [_without_search("placement", config, where)] * (config.placement in PLACED)
        found += [_without_search("boundaries", config, "has the planner's stages")] * (config.boundaries == SEARCH)
    if action_file.is_file(config.schedule):
        found += [*plan_order.refused(config.schedule), *chunks_of_file(config.chunks, CHUNKS)]
        return [*found, *_without_checkpoint(config, "a file, whose actions say")]
    if config.schedule in (SEARCH, ALL):
        found += at_least("engine.chunks", config.chunks, 1)
    if config.schedule == SEARCH:
        return [*found, *_without_checkpoint(config, "the search, which finds out")]
    found += one_of("engine.schedule", config.schedule, (*FAMILIES, SEARCH, ALL))
    return [*found, *wrong_chunks(config.schedule, config.chunks, CHUNKS, least=1)]


def _without_search(key: str, config: Config, why: str) -> Problem:
    """A key that only the search follows."""
    message = f"has no effect, engine.schedule={config.schedule} {why}"
    fixes: tuple[Fix, ...] = ({f"engine.{key}": LEAVE_OUT}, {"engine.schedule": SEARCH})
    return Problem(f"engine.{key}", getattr(config, key), message, fixes)


def _without_checkpoint(config: Config, what: str) -> list[Problem]:
    """A key that a file, or the search, takes the place of."""
    if config.checkpoint == "never":
        return []
    message = f"has no effect on {what} what is recomputed"
    return [Problem("engine.checkpoint", config.checkpoint, message, ({"engine.checkpoint": LEAVE_OUT},))]


def build(config: Config) -> PipelineEngine:
    return PipelineEngine(config)


class PipelineEngine(Engine):
    def __init__(self, config: Config) -> None:
        self.config = config
        self.file = config.schedule if action_file.is_file(config.schedule) else None
        self.family = FAMILIES.get(config.schedule, FAMILIES[PLACED.get(config.placement, "1f1b")])
        self.picks_best = config.schedule == SEARCH
        self.may_recompute = bool(self.file) or self.picks_best
        self.capabilities = Capabilities(
            data=True,
            multi_process=True,
            mpi=config.transport == "mpi",
            complex=False,
            compiled=config.schedule in FAMILIES and not self.family.split,  # a graph's backward pass has no halves
            sharded_checkpoints=True,
            halves="zb_h1",
        )

    def refuses(self, request: PlanRequest, dtype: str, cluster: Cluster) -> list[Problem]:
        """Numbers of devices and micro-batches that the schedule does not have, and MPI where it cannot start."""
        here = self.capabilities.mpi and cluster.name == HERE
        found = mpi.problems("engine.transport", "mpi", instead="torch") if here else []
        m, n = request.batch.micro_batches, request.pipeline
        if self.file:
            refused = plan_order.refused(self.file, n, m, request.layers)
            return [*found, *plan_order.whole(refused, request.batch.size, request.data, cluster.devices)]
        problem = self.family.refuses(m, n)
        if problem is None:
            return found
        shares = request.batch.size // request.data
        return [*found, replace(problem, fixes=micro_batch_fixes(m, shares, lambda one: self.family.refuses(one, n)))]

    def check(self, plan: Plan, profile: ModelProfile, cluster: Cluster, memory: MemoryModel) -> list[Problem]:
        if plan.order:  # of a run that goes on: its search has chosen the places, too
            return []
        return plan_order.misplaced(plan, self.placement(plan.mesh.pipeline), self.config.schedule)

    def notes(self, plan: Plan, profile: ModelProfile, cluster: Cluster, memory: MemoryModel) -> list[Problem]:
        """Warn of an order in which messages that block would never end, in a fixed order of messages.

        The simulator lets a message that blocks begin between any two tasks of the other end.
        """
        if not cluster.blocking_messages:
            return []
        actions = action_file.from_schedule(self.order(plan))
        if self.file:  # as it stands there
            actions = action_file.read(self.file).only_passes()
        return action_check.problems(actions, self.config.schedule, blocking=True)

    def alternatives(self) -> dict[str, Fix]:
        placed = PLACED if self.config.placement == AUTO else (self.config.placement,)
        searched: dict[str, Fix] = {
            f"{SEARCH} ({where})": {"engine.schedule": SEARCH, "engine.placement": where} for where in placed
        }
        if self.config.schedule == ALL:
            return {name: {"engine.schedule": name} for name in FAMILIES} | searched
        return searched if self.config.schedule == SEARCH and len(searched) > 1 else {}

    def ordered(
        self, plan: Plan, profile: ModelProfile, cluster: Cluster, memory: MemoryModel, refused: Refused
    ) -> Plan:
        if self.file:
            return self._ordered_by_file(plan, self.file, refused)
        if self.config.schedule != SEARCH or plan.order:
            return plan
        from harness.order_search.plan_chain import Judge, searched
        from harness.order_search.stage_search import searched_stages

        judge = Judge(
            cluster,
            memory,
            lambda one: self.layers(one, profile),
            lambda one: plan_transfers(one, profile, portals=True),
            lambda one: self.schedule(one, profile),
            recomputes=not refused(replace(plan, recompute="always")),
        )
        found = searched_stages(plan, judge, refused) if self.config.boundaries == SEARCH else searched(plan, judge)
        return found.plan

    def _ordered_by_file(self, plan: Plan, file: str, refused: Refused) -> Plan:
        """Return the plan with the order of a file. Raises ProblemError for recomputations that the model's layers do
        not allow: the request knows none."""
        found = plan_order.read_into(plan, file)
        if found.recompute != plan.recompute and (problems := refused(found)):
            fix: Fix = {"engine.schedule": "1f1b"}
            raise ProblemError(*(replace(one, fixes=(fix,), hint="a file without R") for one in problems))
        return found

    def order(self, plan: Plan, transfers: Sequence[Transfer] = ()) -> Schedule:
        """Return the passes of each device, with messages for `transfers`."""
        if plan.order:
            return plan_order.schedule(plan, transfers)
        found = self.family.build(plan.micro_batches, plan.mesh.pipeline, self.config.chunks, transfers)
        return with_recomputation(found, plan.micro_batches, plan.recompute)

    def schedule(self, plan: Plan, profile: ModelProfile) -> Schedule:
        found = self.order(plan, plan_transfers(plan, profile, portals=True))
        found = with_ties(with_replicas(found, plan, profile), plan_ties(plan, profile), "compute")
        return without_frozen(found, plan, profile)

    def layers(self, plan: Plan, profile: ModelProfile) -> ModelProfile:
        return profile.without_input_gradients(plan.stages[plan.stage_of(profile.frozen_prefix)].last)

    def memory(self, model: MemoryModel, mesh: Mesh, profile: ModelProfile) -> MemoryModel:
        return replace(model, messages="posted", reducing=1.0)

    def placement(self, pipeline: int) -> tuple[int, ...]:
        if self.file:
            return plan_order.placement(self.file, pipeline)
        return self.family.placement(pipeline, self.config.chunks)

    def session(self, model: Model, plan: Plan, spec: SessionSpec) -> AbstractContextManager[Session]:
        from engines.pipeline.session import PipelineSession

        return PipelineSession(model, plan, spec, self.config, self.order(plan))
