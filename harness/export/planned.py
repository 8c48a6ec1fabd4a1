"""What is exported, and the reasons to refuse it that several systems share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
from harness.schedule.families import FAMILIES, micro_batch_fixes

CHECKPOINT = "engine.checkpoint"
TORCH_SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved1f1b": "Interleaved1F1B", "zbv": "ZBVZeroBubble"}
"""The schedules of torch.distributed.pipelining, which torchtitan runs, too, by our names."""
OTHER: Fix = {"engine": "pipeline", "engine.schedule": "1f1b", "planner": "balance"}
"""A scheme that every system but DeepSpeed has, whatever the number of micro-batches."""


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
        return next(iter(self.orders), None)

    @property
    def orders(self) -> list[str]:
        """All names of that order: with one micro-batch 1F1B is GPipe's."""
        devices, m, n = self.schedule.devices, self.plan.micro_batches, len(self.plan.devices)
        compute = [queue for queue in self.schedule.queues if queue.name == "compute"]
        if any(queue.rule != "in_order" for queue in compute) or self.schedule.limit:
            return []
        candidates: list[tuple[str, Schedule]] = []
        if devices == tuple(range(n)):
            candidates = [("1f1b", one_f_one_b(m, devices, ()))]
            candidates += [("gpipe", fill_drain(m, devices, ())), ("gpipe", gpipe(m, devices, (), "never"))]
        elif devices == (*range(n), *reversed(range(n))):
            candidates = [("zbv", zbv(m, n, ()))]
        elif devices == tuple(range(n)) * self.stages_per_device and m % n == 0:
            candidates = [("interleaved1f1b", interleaved(m, n, self.stages_per_device, ()))]
        own = _passes(self.schedule)
        return list(dict.fromkeys(name for name, schedule in candidates if _passes(schedule) == own))


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
    if engine == "periodic":  # other engines run the stages of a plan that has a pattern, too
        message = f"has a periodic schedule, whose steps overlap, {system} has none"
        return [Problem("engine", engine, message, (fix,))]
    if engine == "delayed":
        message = f"trains with the delays of an asynchronous pipeline, {system} has none"
        return [Problem("engine", engine, message, ({"engine": "single"},))]
    if order in orders or (order == "gpipe" and len(planned.plan.stages) == 1):
        return []
    where = f" on devices {', '.join(map(str, planned.schedule.devices))}" if planned.stages_per_device > 1 else ""
    given = planned.config.engine.get("schedule")
    own = order or (given if given in FAMILIES else "passes in an order of its own")
    message = f"runs {own}{where}, an export to {system} has {', '.join(orders)}"
    if order and given == order:
        also_here = engine == "pipeline" or orders[0] != "1f1b" or not _too_few(planned)
        return [Problem("engine.schedule", order, message, ({"engine.schedule": orders[0]} if also_here else fix,))]
    return [Problem("engine", engine, message, (fix,))]


def _refused_recomputation(planned: Planned, system: str) -> list[Problem]:
    """Some micro-batches or stages only; batch norm that waits for the last one."""
    found = _recomputes_some(planned, system) if planned.plan.order else []
    if planned.plan.recompute == "except_last":
        message = f"recomputes all micro-batches but the last, {system} all or none"
        halves = any(op.kind == "W" for op in planned.schedule.ops())  # nobody recomputes these
        values = ("never",) if halves or len(planned.plan.stages) == 1 else ("never", "always")
        fixes: tuple[Fix, ...] = tuple({CHECKPOINT: value} for value in values)
        found.append(Problem(CHECKPOINT, "except_last", message, fixes))
    if planned.config.engine.get("deferred_batch_norm"):
        key = "engine.deferred_batch_norm"
        found.append(Problem(key, True, f"is torchgpipe's, {system} has no such batch norm", ({key: False},)))
    return found


def _recomputes_some(planned: Planned, system: str) -> list[Problem]:
    """An order of a file, or a searched one, that recomputes some passes and not others."""
    ops = planned.schedule.ops()
    whole, again = ({(op.stage, op.micro_batch) for op in ops if op.kind == kind} for kind in "FR")
    if again in (set(), whole):
        return []
    message = f"recomputes {len(again)} of {len(whole)} passes, {system} all or none"
    fixes = tuple({"engine.schedule": planned.order, CHECKPOINT: one} for one in ("never", "always"))
    return [Problem("engine.schedule", planned.config.engine.schedule, message, fixes)]


def torch_schedule(planned: Planned) -> str:
    """The schedule of torch that has the order of a plan which is not refused."""
    name = str(planned.order)
    return TORCH_SCHEDULES["gpipe" if "gpipe" in planned.orders and _too_few(planned) else name]


def refused_few(planned: Planned, system: str) -> list[Problem]:
    """Fewer micro-batches than torch's 1F1B takes, in an order that none of its other schedules has."""
    m, n = planned.plan.micro_batches, len(planned.plan.stages)
    if planned.order != "1f1b" or "gpipe" in planned.orders or not _too_few(planned):
        return []
    shares = planned.config.batch.size // planned.plan.mesh.data
    message = f"is less than the {n} stages, which 1F1B of {system} needs"
    refuses = Problem("batch.micro_batches", m, message)
    *near, _ = micro_batch_fixes(m, shares, lambda count: refuses if count < n else None)
    other: Fix = {"engine": "torch_pipelining", "engine.schedule": "gpipe"}
    return [replace(refuses, fixes=(*near, other))]


def _too_few(planned: Planned) -> bool:
    return planned.plan.micro_batches < len(planned.plan.stages)


def refused_halves(planned: Planned, how: str) -> list[Problem]:
    """Recomputation with backward passes in halves; `how` is what the system does then."""
    if planned.plan.recompute != "always" or planned.order != "zbv":
        return []
    return [Problem(CHECKPOINT, "always", f"splits backward passes, {how}", ({CHECKPOINT: "never"},))]


def refused_shards(planned: Planned, system: str, most: int = 0) -> list[Problem]:
    """Shards of gradients or weights (ZeRO) beyond those that the system has."""
    if planned.zero <= most:
        return []
    parts = {1: "optimizer state", 2: "gradients, too", 3: "weights, too"}[planned.zero]
    has = "nothing" if most == 0 else "the optimizer state at most"
    message = f"shards {parts}, {system} shards {has}"
    if planned.engine == "fsdp":
        return [Problem("engine", "fsdp", message, ({"engine": "ddp"},))]
    fix: Fix = {"engine.zero": most}
    if planned.config.engine.get("offload"):  # of the shards' state
        fix["engine.offload"] = False
    return [Problem("engine.zero", planned.zero, message, (fix,))]


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
