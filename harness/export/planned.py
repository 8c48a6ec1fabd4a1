"""What is exported, and the reasons to refuse it that several systems share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from omegaconf import DictConfig

from harness.core.model_profile import ModelProfile
from harness.core.op import Op
from harness.core.plan import Plan
from harness.core.problem import Fix, Problem
from harness.schedule import Schedule
from harness.schedule.builders.fill_drain import fill_drain
from harness.schedule.builders.gpipe import gpipe
from harness.schedule.builders.interleaved import interleaved
from harness.schedule.builders.one_f_one_b import one_f_one_b
from harness.schedule.builders.zero_bubble import zbv

CHECKPOINT = "engine.checkpoint"
OTHER: Fix = {"engine": "torch_pipelining", "engine.schedule": "1f1b", "planner": "balance"}
"""A scheme that every system but DeepSpeed has."""


@dataclass(frozen=True)
class Planned:
    """A plan with what it was made from: the configuration, the profile of the whole model, the schedule of a step."""

    config: DictConfig
    plan: Plan
    profile: ModelProfile
    schedule: Schedule

    @property
    def engine(self) -> str:
        return str(self.config.engine.name)

    @property
    def zero(self) -> int:
        """What is sharded over the replicas, as a ZeRO stage: 0 nothing, 3 all, as the engine fsdp does."""
        return 3 if self.engine == "fsdp" else int(self.config.engine.get("zero", 0))

    @property
    def stages_per_device(self) -> int:
        return len(self.plan.stages) // len(self.plan.devices)

    @property
    def order(self) -> str | None:
        """The order of each device's passes: gpipe, 1f1b, interleaved1f1b, zbv; None for any other one."""
        devices, m, n = self.schedule.devices, self.plan.micro_batches, len(self.plan.devices)
        compute = [queue for queue in self.schedule.queues if queue.name == "compute"]
        if any(queue.rule != "in_order" for queue in compute) or self.schedule.limit:
            return None
        candidates: list[tuple[str, Schedule]] = []
        if devices == tuple(range(n)):
            candidates = [("1f1b", one_f_one_b(m, devices, ()))]
            candidates += [("gpipe", fill_drain(m, devices, ())), ("gpipe", gpipe(m, devices, (), "never"))]
        elif devices == (*range(n), *reversed(range(n))):
            candidates = [("zbv", zbv(m, n, ()))]
        elif devices == tuple(range(n)) * self.stages_per_device and m % n == 0:
            candidates = [("interleaved1f1b", interleaved(m, n, self.stages_per_device, ()))]
        own = _passes(self.schedule)
        return next((name for name, schedule in candidates if _passes(schedule) == own), None)


def _passes(schedule: Schedule) -> list[list[Op]]:
    """The forward and backward passes of each device, in order."""
    queues = [queue for queue in schedule.queues if queue.name == "compute"]
    return [[op for op in queue.ops if op.kind in ("F", "B", "W")] for queue in queues]


def refused_passes(planned: Planned, system: str, orders: Sequence[str], fix: Fix = OTHER) -> list[Problem]:
    """A schedule that the system does not have; with one that it has, a recomputation that it has not. `fix` is a
    scheme that the system has."""
    return _refused_order(planned, system, orders, fix) or _refused_recomputation(planned, system)


def _refused_order(planned: Planned, system: str, orders: Sequence[str], fix: Fix) -> list[Problem]:
    order, engine = planned.order, planned.engine
    if planned.plan.pattern:
        message = f"has a periodic schedule, whose steps overlap, {system} has none"
        return [Problem("engine", engine, message, (fix,))]
    if order in orders or (order == "gpipe" and len(planned.plan.stages) == 1):
        return []
    where = f" on devices {', '.join(map(str, planned.schedule.devices))}" if planned.stages_per_device > 1 else ""
    message = f"runs {order or 'passes in an order of its own'}{where}, {system} has {', '.join(orders)}"
    if order and planned.config.engine.get("schedule") == order:
        return [Problem("engine.schedule", order, message, ({"engine.schedule": orders[0]},))]
    return [Problem("engine", engine, message, (fix,))]


def _refused_recomputation(planned: Planned, system: str) -> list[Problem]:
    """Some micro-batches only; batch norm that waits for the last one."""
    found = []
    if planned.plan.recompute == "except_last":
        message = f"recomputes all micro-batches but the last, {system} all or none"
        found.append(Problem(CHECKPOINT, "except_last", message, ({CHECKPOINT: "never"}, {CHECKPOINT: "always"})))
    if planned.config.engine.get("deferred_batch_norm"):
        key = "engine.deferred_batch_norm"
        found.append(Problem(key, True, f"is torchgpipe's, {system} has no such batch norm", ({key: False},)))
    return found


def refused_shards(planned: Planned, system: str, most: int = 0) -> list[Problem]:
    """Shards of gradients or weights (ZeRO) beyond those that the system has."""
    if planned.zero <= most:
        return []
    parts = {1: "optimizer state", 2: "gradients, too", 3: "weights, too"}[planned.zero]
    has = "nothing" if most == 0 else "the optimizer state at most"
    message = f"shards {parts}, {system} shards {has}"
    if planned.engine == "fsdp":
        return [Problem("engine", "fsdp", message, ({"engine": "ddp"},))]
    return [Problem("engine.zero", planned.zero, message, ({"engine.zero": most},))]


def refused_tensor(planned: Planned, system: str) -> list[Problem]:
    """Any tensor parallelism."""
    if planned.plan.mesh.tensor == 1:
        return []
    message = f"splits matmuls, {system} has no tensor parallelism"
    fix: Fix = {"mesh.tensor": 1, "planner": "balance", "engine": "torch_pipelining"}
    return [Problem("mesh.tensor", planned.plan.mesh.tensor, message, (fix,))]


def refused_strategies(planned: Planned) -> list[Problem]:
    """Matmuls that are split in another way than Megatron-LM splits them: in a layer of attention or of the MLP the
    first by columns, the last by rows; look-ups and logits by the vocabulary."""
    shards = planned.plan.mesh.tensor
    for name, numbers in planned.plan.strategy.items():
        part = name.rpartition(".")[2]
        by_rows = part in ("embedding", "projection", "down")
        wanted = (1, 1, shards) if by_rows else (1, shards, 1)
        if (there := _degrees(numbers)) != wanted:
            message = f"splits {name} as {there}, Megatron-LM as {wanted}"
            fix: Fix = {"planner": "megatron", "planner.dimensions": 1}
            return [Problem("planner", planned.config.planner.name, message, (fix,))]
    return []


def _degrees(numbers: Sequence[int]) -> tuple[int, ...]:
    """(p0, p1, p2), or the rows and columns of a mesh, each over nodes and devices."""
    each = 1 if len(numbers) in (2, 3) else 2
    return tuple(math.prod(numbers[first : first + each]) for first in range(0, len(numbers), each))
