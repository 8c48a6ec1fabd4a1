"""The myelin engine: stages run what has arrived, replicas sum their gradients while they update (Myelin, published
later as AxoNN).

    python run.py engine=myelin mesh.pipeline=2 mesh.data=2      G_inter x G_data in the paper's words, a rank for each

    stage 0   F0 F1 .. .. B0 F2 B1 F3 ..      whatever has arrived, by `engine.policy`; `engine.pipeline_limit` at once
    stage 1   .. F0 B0 F1 B1 .. F2 B2 ..      the last stage runs backward right after forward

What it cannot do:

* One stage on each device, no tensor parallelism inside a stage.
* Times of messages are differences of two ranks' clocks: right on one machine.
* On GPUs messages of transport=mpi pass through the host.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import cast

from engines.myelin import notes
from engines.myelin.config import Config
from harness import checkpointing, mpi
from harness.cluster import Cluster
from harness.interfaces import Capabilities, Engine, Model, PlanRequest, Session, SessionSpec
from harness.memory import DTYPE_BYTES, MemoryModel
from harness.mesh import Mesh
from harness.plan import Plan
from harness.problem import Problem
from harness.profile import ModelProfile
from harness.schedule import Schedule
from harness.schedule.graph import COPIES
from harness.schedule.hops import plan_hops
from harness.schedule.myelin import Order, chunks_of, myelin
from harness.schedule.rule import RuleName
from harness.schedule.ties import plan_ties

DTYPES = ("float32", "float64", "bfloat16", "float16")
HERE = "local"
STATE = {"float64": 8}
"""Bytes of a number of the optimizer, which has float32 otherwise."""


class MyelinEngine(Engine):
    def __init__(self, config: Config) -> None:
        self.config = config
        self.capabilities = Capabilities(dtypes=DTYPES, data=True, ranks=True, mpi=config.transport == "mpi")

    def refuses(self, request: PlanRequest, dtype: str, cluster: Cluster) -> list[Problem]:
        """What cannot start here; planned for and simulated on described clusters it needs no MPI."""
        here = self.capabilities.mpi and cluster.name == HERE
        return mpi.problems("engine.transport mpi", "engine.transport=torch") if here else []

    def check(self, plan: Plan, profile: ModelProfile, cluster: Cluster, memory: MemoryModel) -> list[Problem]:
        """Stages in other places than one on each device; a plan that says itself what is recomputed."""
        devices = [stage.device for stage in plan.stages]
        wanted = list(range(plan.mesh.pipeline))
        found = []
        if devices != wanted:
            what = f"has its stages on devices {_listed(devices)}, engine=myelin on {_listed(wanted)}"
            found.append(Problem("the plan", what, "planner=balance, or planner=contiguous"))
        if plan.recompute != "never":
            what = "asks for recomputation of whole stages, engine=myelin has segments of them"
            found.append(Problem(f"recompute {plan.recompute}", what, "engine.checkpoint_every=auto"))
        return found

    def notes(self, plan: Plan, profile: ModelProfile, cluster: Cluster, memory: MemoryModel) -> list[Problem]:
        """Settings that do nothing, or only cost time, and how the paper's formula was read."""
        read = self.config.checkpoint_every == "auto"
        return [
            *notes.idle(self.config, plan, profile, cluster, memory),
            *([notes.readings(plan)] if read else []),
            *notes.wasted(self.config, plan, profile),
        ]

    def schedule(self, plan: Plan, profile: ModelProfile) -> Schedule:
        config, width = self.config, DTYPE_BYTES[profile.dtype]
        ties = plan_ties(plan, profile, COPIES)
        sizes = [profile.parameter_bytes_of(range(stage.first, stage.last + 1)) // width for stage in plan.stages]
        tied = [sum(tie.bytes for tie in ties if j in tie.stages) // width for j in range(len(sizes))]
        return myelin(
            plan.micro_batches,
            [stage.device for stage in plan.stages],
            plan_hops(plan, profile, portals=True),
            cast(Order, config.order),
            cast(RuleName, config.policy),
            config.pipeline_limit,
            ties,
            plan.mesh.data,
            [
                chunks_of(elements, width, config.bsize, config.k, config.offload, shared)
                for elements, shared in zip(sizes, tied, strict=True)
            ],
            config.k > 0,
        )

    def memory(self, model: MemoryModel, mesh: Mesh, profile: ModelProfile) -> MemoryModel:
        """In half precision 20 bytes a parameter with Adam: 2 + 2 of weight and gradient, 4 + 4 of both in float32, 8
        of moments. With offloading 4, and buckets of 16 bytes for each of `bsize` parameters (Myelin, section V-B)."""
        model = replace(model, messages="posted", flat=True)
        width, moments = DTYPE_BYTES[profile.dtype], model.optimizer
        state, half = STATE.get(profile.dtype, 4), profile.dtype in ("float16", "bfloat16")
        if self.config.offload:
            each = state * (2 + moments)
            return replace(model, optimizer=0.0, offloaded=state * (1 + moments) / width, bucketed=each / width,
                           buckets_bytes=round(self.config.bsize * each))  # fmt: skip
        return replace(model, optimizer=state * (2 + moments) / width) if half else model

    def layers(self, plan: Plan, profile: ModelProfile) -> ModelProfile:
        return checkpointing.checkpointed(profile, plan, self.config.checkpoint_every)

    def session(self, model: Model, plan: Plan, spec: SessionSpec) -> AbstractContextManager[Session]:
        from engines.myelin.session import MyelinSession

        return MyelinSession(model, plan, spec, self.config, self.schedule)


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
