"""The fsdp engine: `torch.distributed.fsdp.fully_shard` (FSDP2) over all devices, in groups of neighbouring layers.

    F   gather 0, layers 0, free 0, gather 1, layers 1, free 1, ...
    B   ... gather 1, layers 1, free 1, reduce_scatter 1, gather 0, layers 0, free 0, reduce_scatter 0

Layers that share a parameter (GPT's embedding and head) are one group, the root's: gathered when the forward pass
begins and kept until the backward pass has ended, as torch does by default. All others are gathered again, also the
last one. In mixed precision weights are gathered and gradients summed in the dtype of the weights, as autocast has it
in every other engine.

The schedule, and the trace, have all that a pass gathers as one block before it and all that it reduces as one behind
it, since a schedule's tasks are whole stages. On gloo a collective blocks, so the length of a block is what its
collectives took in all, waiting for other ranks included. On CUDA they overlap with layers: the blocks are all but
empty, what cannot overlap is inside the passes, and a prediction is too slow by what does.

The memory model has the shards. Beside them a device holds a whole group, twice while it is copied from where it has
arrived, its gradients, and the root's weights: a prediction is too low by that. It is also too fast where groups are
small: a collective takes its time even for a few bytes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace

from engines.fsdp.config import Config
from harness.cluster import Cluster
from harness.interfaces import Capabilities, Model, Session, SessionSpec
from harness.memory import MemoryModel
from harness.mesh import Mesh
from harness.op import Op
from harness.plan import Plan
from harness.problem import Problem
from harness.profile import ModelProfile
from harness.schedule import Schedule
from harness.schedule.zero import data_parallel


class FSDPEngine:
    capabilities = Capabilities(pipeline=False, data=True, ranks=True)

    def __init__(self, config: Config) -> None:
        self.config = config

    def check(self, plan: Plan, profile: ModelProfile, cluster: Cluster, memory: MemoryModel) -> list[Problem]:
        return []

    def schedule(self, plan: Plan, profile: ModelProfile) -> Schedule:
        numbers = range(len(profile.layers))
        size = profile.parameter_bytes_of(numbers)
        root = profile.parameter_bytes_of([number for number in numbers if profile.layers[number].tied])
        whole = data_parallel(
            plan.micro_batches, size, plan.mesh.data, "zero3", plan.recompute,
            reshard=self.config.reshard_after_forward,
        )  # fmt: skip
        last = plan.micro_batches - 1

        def adapted(op: Op) -> Op:
            return replace(op, bytes=size - root) if op.part.endswith("/backward") else op

        def left_out(op: Op) -> bool:
            return op.part.startswith("reduce_scatter") and op.micro_batch != last and not self.config.reduce_each

        lanes = [replace(lane, ops=tuple(adapted(op) for op in lane.ops if not left_out(op))) for lane in whole.lanes]
        return replace(whole, lanes=tuple(lanes))

    def placement(self, pipeline: int) -> tuple[int, ...]:
        return ()

    def memory(self, model: MemoryModel, mesh: Mesh, profile: ModelProfile) -> MemoryModel:
        """Shards, and of the largest layer all of the weights and of their gradients: it is gathered as a whole."""
        sizes = [layer.param_bytes for layer in profile.layers]
        largest = max(sizes) / sum(sizes) if sum(sizes) else 0.0
        whole = largest if self.config.reshard_after_forward else 1.0
        return replace(
            model,
            weights=model.weights * (1 / mesh.data + whole),
            gradients=model.gradients * (1 / mesh.data + largest if self.config.reduce_each else 1),
            optimizer=model.optimizer / mesh.data,
        )

    def session(self, model: Model, plan: Plan, spec: SessionSpec) -> AbstractContextManager[Session]:
        from engines.fsdp.session import FSDPSession

        return FSDPSession(model, plan, spec, self.config)
