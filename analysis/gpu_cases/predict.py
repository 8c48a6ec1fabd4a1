"""The step of a published case by the simulator: counted work, the cluster's file, the engine's schedule.

A case's model is a `gpt`. Its blocks are equal: one is counted, and taken as often as there are layers. All is counted
in the format of the matmuls: mixed precision in these publications gathers weights in bfloat16, or keeps a copy in
float16, and the float32 state is sharded or small. Counted attention is one kernel (FlashAttention). Where a
publication is older, the kernels of its attention move these bytes of each score (2 bytes of a number, 1 of the
dropout's mask), at full bandwidth, since each is one long stream:

    write    read  write    read  write  mask    read
    |scores| |   softmax  | |    dropout       | |values|     13 bytes, in 3 more kernels
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from omegaconf import DictConfig

from analysis.gpu_cases.cases import Case
from engines.fsdp.engine import Config as FSDPConfig
from engines.fsdp.engine import FSDPEngine
from harness.cli.compose import compose
from harness.config import cluster_config, registry
from harness.core.cluster import Cluster, Device
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import ModelProfile
from harness.core.op import Op
from harness.core.plan import Mesh, Plan, Stage
from harness.interfaces import Engine, Planner, PlanRequest
from harness.planning import draft
from harness.schedule import Schedule
from harness.simulator import layer_times

CLUSTERS = {"a100_40": "dgx_a100_40", "a100_80": "dgx_a100_80", "h100": "dgx_h100"}
NODE = 8
BLOCK = "block_0"
SCORE_BYTES, SCORE_KERNELS = 13, 3
EAGER = ("megatron",)
"""Publications from before FlashAttention."""


class _EachParameter(FSDPEngine):
    """ZeRO-3 as it was compared with PTD-P: DeepSpeed gathered and reduced each parameter by a call of its own (it has
    gathered several together since version 0.5.5). Twelve of a block, four of which are large.

        weights   |---qkv---|-proj-|----up----|---down---|      biases, and both layer norms: eight calls
    """

    def __init__(self, config: FSDPConfig, hidden: int) -> None:
        super().__init__(config)
        self.block = tuple(
            2 * hidden * size for size in (3 * hidden, 3, hidden, 1, 4 * hidden, 4, 4 * hidden, *(1,) * 5)
        )

    def schedule(self, plan: Plan, profile: ModelProfile) -> Schedule:
        whole = super().schedule(plan, profile)
        queues = (replace(queue, ops=tuple(map(self._each, queue.ops))) for queue in whole.queues)
        return replace(whole, queues=tuple(queues))

    def _each(self, op: Op) -> Op:
        own = sum(self.block)
        return replace(op, buffers=tuple(b for size in op.buffers for b in (self.block if size == own else (size,))))


class _Recomputing:
    """A planner: all layers on one device, computed again for the backward pass."""

    def plan(self, profile: ModelProfile, cluster: Cluster, memory: MemoryModel, request: PlanRequest) -> Plan:
        stages = (Stage(0, len(profile.layers) - 1, 0),)
        return Plan(Mesh(data=request.data), stages, request.batch.micro_batches, recompute="always")


def step_s(case: Case, **changes: float) -> float:
    """Returns the predicted seconds of a step; `changes` are other values of keys of the cluster."""
    config = configuration(case, **changes)
    engine, planner = registry.build("engine", config.engine), registry.build("planner", config.planner)
    if case.compared and case.engine == "fsdp":
        engine = _EachParameter(engine.config, case.hidden)
    if case.recompute and case.engine == "fsdp":  # which has no key for it
        planner = _Recomputing()
    return simulated_s(config, lambda device: counted(case, device), engine, planner)


def simulated_s(config: DictConfig, count: Callable[[Device], ModelProfile], engine: Engine, planner: Planner) -> float:
    """Returns the seconds of a step whose work on a device is what `count` returns for it."""
    cluster = cluster_config.build(cluster_config.from_group(config.cluster))
    profile = layer_times.analytic(count(cluster.device), cluster.device)
    return float(draft.draft(config, engine, planner, profile, cluster).plan.predicted["step_time_s"])


def configuration(case: Case, **changes: float) -> DictConfig:
    """Returns the configuration of a case; `changes` are other values of keys of the cluster."""
    replicas = case.devices // (case.pipeline * case.tensor)
    words = {
        "mode": "plan",
        "engine": case.engine,
        "model": "gpt",
        **{f"model.{key}": getattr(case, key) for key in ("layers", "hidden", "heads", "sequence", "vocabulary")},
        "cluster": CLUSTERS[case.gpu],
        "cluster.values": "effective" if case.gpu == "a100_40" else "nominal",
        "cluster.nodes": case.devices // NODE,
        "precision": "fp16" if case.precision == "fp16" else "bf16",
        "batch.size": case.micro_batch * case.micro_batches * replicas,
        "batch.micro_batches": case.micro_batches,
    }
    if case.tensor > 1:
        words |= {"planner": "megatron"}
    if case.engine != "fsdp":
        words |= {
            "mesh.pipeline": case.pipeline,
            "mesh.tensor": case.tensor,
            "mesh.data": replicas,
            "engine.checkpoint": "always",
        }
    words |= {f"cluster.{key}": value for key, value in changes.items()}
    return compose([f"{key}={value}" for key, value in words.items()])


def counted(case: Case, device: Device) -> ModelProfile:
    """Returns the counted work of a micro-batch."""
    shape = (case.hidden, case.heads, case.sequence, case.vocabulary, case.micro_batch)
    one = _counted(*shape, configuration(case).precision.dtype)
    place = next(number for number, layer in enumerate(one.layers) if layer.name == BLOCK)
    block = one.layers[place]
    if case.publication in EAGER:
        scores = SCORE_BYTES * case.micro_batch * case.heads * case.sequence**2
        scores = round(scores * device.efficiency_of("elementwise"))
        block = replace(
            block,
            bytes_moved=block.bytes_moved + scores,
            elementwise_bytes=block.elementwise_bytes + scores,
            kernels=block.kernels + SCORE_KERNELS,
        )
    blocks = tuple(replace(block, name=f"block_{number}") for number in range(case.layers))
    return replace(one, layers=(*one.layers[:place], *blocks, *one.layers[place + 1 :]))


@cache
def _counted(hidden: int, heads: int, sequence: int, vocabulary: int, micro_batch: int, dtype: str) -> ModelProfile:
    from harness.measure.count_model import count

    words = {"layers": 1, "hidden": hidden, "heads": heads, "sequence": sequence, "vocabulary": vocabulary}
    config = compose(["model=gpt", *(f"model.{key}={value}" for key, value in words.items())])
    return count(registry.build("model", config.model), micro_batch, dtype)
