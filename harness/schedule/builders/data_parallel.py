"""Data parallelism without a pipeline (DDP, ZeRO, FSDP): gradient accumulation with whole or sharded training state.

ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, sections 5 and 7 (stages 1, 2, 3); stage 3 is what
PyTorch calls FSDP. The orders are those of DeepSpeed 0.19 and of torch 2.13 (`fully_shard`), seen running.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

from harness.core.model_profile import ModelProfile
from harness.core.op import Op
from harness.core.plan import Plan
from harness.core.problem import Problem, ProblemError
from harness.schedule import Schedule, collect_queues
from harness.schedule.builders.one_f_one_b import backward
from harness.schedule.dependency_graph import DATA

Sharding = Literal["all_reduce", "zero1", "zero2", "zero3"]
SHARDINGS: tuple[Sharding, ...] = get_args(Sharding)
Reduction = Literal["all_reduce", "reduce_scatter"]


def over_replicas(stage: int, algorithm: str, size: int, micro_batch: int | None = None, bucket: str = "") -> Op:
    """Returns a collective of the replicas of a stage, on a buffer of `size` bytes, in the compute queue."""
    part = f"{algorithm}@{DATA}/{bucket}" if bucket else f"{algorithm}@{DATA}"
    return Op(stage, "collective", micro_batch, part, bytes=size)


def data_parallel(
    micro_batches: int,
    parameter_bytes: int,
    replicas: int,
    kind: Sharding = "all_reduce",
    recompute: str = "never",
    reduction: Reduction = "reduce_scatter",
    reshard: bool = True,
    frozen_bytes: int = 0,
) -> Schedule:
    """Returns the step of `replicas` of the whole model, each with its own micro-batches; all in the compute queue.

    all_reduce  F0 B0 F1 B1 all_reduce step                                                     DDP; ZeRO 0
    zero1       F0 B0 F1 B1 reduce step all_gather                                              optimizer in shards
    zero2       F0 B0 reduce0 F1 B1 reduce1 step all_gather                                     and gradients
    zero3       gather0 F0 gather0 B0 reduce_scatter0 gather1 F1 gather1 B1 reduce_scatter1 step   and weights; FSDP

    `kind` says what is sharded. Whole gradients are accumulated and reduced once; sharded ones are reduced after the
    backward pass of every micro-batch, since only a shard is kept in between. The owner of a shard of the optimizer
    updates it, then an all-gather distributes the weights. Sharded weights are gathered before every pass and freed
    after it: a recomputation and its backward pass share them.

    `reduction` is the collective of zero1 and zero2: "reduce_scatter" to the owners of the shards, as in the paper
    (DeepSpeed has a reduce for each owner, with zero_optimization.use_multi_rank_bucket_allreduce=false), or
    "all_reduce", after which each rank discards what it does not own (DeepSpeed's default: twice the bytes). Without
    `reshard` zero3 keeps the weights from the forward to the backward pass of a micro-batch and gathers them once, as
    does `fully_shard(reshard_after_forward=False)`, and DeepSpeed by default with a model that fits into
    stage3_prefetch_bucket_size or stage3_max_reuse_distance. Small parameters, which DeepSpeed may keep whole, are
    sharded like the others: this is stage3_param_persistence_threshold=0. `frozen_bytes` of the parameters are not
    trained: they are gathered for passes, but neither reduced nor updated.

    One buffer holds all parameters, and every collective blocks, as on gloo. The schedule does not overlap collectives
    with computation, as libraries do layer by layer: on GPUs it is an upper bound of the time, not of the bytes. One
    replica has no collectives. Raises ProblemError for an unknown `kind`.
    """
    if kind not in SHARDINGS:
        raise ProblemError(Problem("kind", kind, f"is none of {', '.join(SHARDINGS)}", ({"kind": SHARDINGS[0]},)))

    def reduce_over_replicas(algorithm: str, micro_batch: int | None = None, bucket: str = "") -> list[Op]:
        size = parameter_bytes - (0 if bucket else frozen_bytes)
        return [over_replicas(0, algorithm, size, micro_batch, bucket)] if replicas > 1 else []

    ops: list[Op] = []
    for i in range(micro_batches):
        ops += reduce_over_replicas("all_gather", i, "forward") if kind == "zero3" else []
        ops.append(Op(0, "F", i))
        ops += reduce_over_replicas("all_gather", i, "backward") if kind == "zero3" and reshard else []
        ops += backward(0, i, micro_batches, recompute)
        if kind in ("zero2", "zero3"):
            ops += reduce_over_replicas("reduce_scatter" if kind == "zero3" else reduction, i)
    if kind in ("all_reduce", "zero1"):
        ops += reduce_over_replicas("all_reduce" if kind == "all_reduce" else reduction)
    ops.append(Op(0, "step"))
    ops += reduce_over_replicas("all_gather") if kind in ("zero1", "zero2") else []
    return Schedule(collect_queues(((0, "compute"), op) for op in ops), devices=(0,), replicas=replicas)


def with_replicas(schedule: Schedule, plan: Plan, profile: ModelProfile) -> Schedule:
    """Returns a pipeline's schedule with the sums over replicas, stage by stage, before the optimizer.

    device 0   0B1  2B1  |0collective:all_reduce@data  2collective:all_reduce@data|  0step  2step
    """
    if plan.mesh.data == 1:
        return schedule
    queues = []
    for queue in schedule.queues:
        if queue.name == "compute":
            tasks = tuple(op for op in queue.ops if op.kind != "step")
            steps = queue.ops[len(tasks) :]
            sums = (over_replicas(op.stage, "all_reduce", _own_bytes(plan, profile, op.stage)) for op in steps)
            queue = replace(queue, ops=(*tasks, *sums, *steps))
        queues.append(queue)
    return replace(schedule, queues=tuple(queues), replicas=plan.mesh.data)


def _own_bytes(plan: Plan, profile: ModelProfile, number: int) -> int:
    """Bytes of a stage's trained parameters, less those that an earlier stage of its device has."""
    stage = plan.stages[number]
    earlier = [k for s in plan.stages[:number] if s.device == stage.device for k in range(s.first, s.last + 1)]
    own = range(stage.first, stage.last + 1)
    return profile.trained_bytes_of([*earlier, *own]) - profile.trained_bytes_of(earlier)
