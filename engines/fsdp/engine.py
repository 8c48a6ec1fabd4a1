"""The fsdp engine: `torch.distributed.fsdp.fully_shard` (FSDP2) over all devices, in groups of neighbouring layers.

    F   gather 0, layers 0, free 0, gather 1, layers 1, free 1, ...
    B   ... gather 1, layers 1, free 1, reduce_scatter 1, gather 0, layers 0, free 0, reduce_scatter 0

Layers that share a parameter (GPT's embedding and head) are one group, the root's: gathered when the forward pass
begins and kept until the backward pass has ended, as torch does by default. All others are gathered again, also the
last one. In mixed precision weights are gathered and gradients summed in the dtype of the weights, as autocast has it
in every other engine. With `engine.mixed_precision=policy` weights are gathered in the dtype that layers compute in.

The schedule, and the trace, have all that a pass gathers as one block before it and all that it reduces as one after
it, since a schedule's tasks are whole stages. On gloo a collective blocks, so the length of a block is what its
collectives took in all, waiting for other ranks included. On CUDA they overlap with layers: the blocks are all but
empty, what cannot overlap is inside the passes, and a prediction is too slow by what does.

Next to its shards a device holds the root's weights and those of a group: twice while they are copied out of the buffer
that they have arrived in, a third time on their way through gloo, or as gradients on their way out. The memory model
has that for the largest group, at the fullest moment of the pass: 0.9 to 1.1 of what is measured on two CPU devices,
0.8 to 1.1 on four. It is too much where that group's turn is far from that moment (1.2: gpt's blocks in one group, and
a large vocabulary). With the policy all of these are halved but gradients on their way out; it is 0.8 to 1.1, too. A
predicted time is too short where groups are small: a collective takes its time even for a few bytes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import ClassVar

from engines.fsdp.layer_groups import groups, own_bytes
from harness.core.memory_model import DTYPE_BYTES, MemoryModel
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.op import Kind, Op
from harness.core.plan import Mesh, Plan
from harness.core.problem import Problem
from harness.core.value_checks import at_least, one_of
from harness.interfaces import Capabilities, Engine, Model, Searched, Session, SessionSpec
from harness.schedule import Schedule
from harness.schedule.builders.data_parallel import data_parallel

MIXED_PRECISION = ("autocast", "policy")


@dataclass
class Config:
    SEARCHED: ClassVar[dict[str, Searched]] = {
        "reshard_after_forward": Searched((True, False), "data"),
        "reduce_each": Searched((True, False), "data"),
    }

    name: str = "fsdp"
    """The engine."""
    group_mb: float = 0.25
    """Consecutive layers are all-gathered together, up to this many MiB of weights; 0: each layer by itself."""
    reshard_after_forward: bool = True
    """Free gathered weights after the forward pass of a layer and gather them again for its backward pass (ZeRO-3).
    false keeps them in between: fewer bytes to send, more memory."""
    reduce_each: bool = True
    """Reduce-scatter the gradients of each micro-batch, as torch does by default. false reduce-scatters once for the
    whole batch and keeps full gradients until then: fewer bytes to send, more memory."""
    mixed_precision: str = "autocast"
    """With precision=mixed, how layers compute in the format of precision.autocast. autocast: torch.autocast casts
    weights for matmuls and convolutions, once they are gathered. policy: FSDP2's MixedPrecisionPolicy casts them
    before, so half of the bytes are gathered, and all of a layer computes in that format, norms too. Shards, sums of
    gradients, optimizer state and running statistics stay in precision.dtype."""


def check(config: Config) -> list[Problem]:
    """Values that no run can have."""
    return [
        *at_least("engine.group_mb", config.group_mb, 0, fix=0.25),
        *one_of("engine.mixed_precision", config.mixed_precision, MIXED_PRECISION),
    ]


def build(config: Config) -> FSDPEngine:
    return FSDPEngine(config)


class FSDPEngine(Engine):
    capabilities = Capabilities(
        optimizers=("sgd", "adam", "adamw"),
        fused=("adam", "adamw"),  # torch has none of SGD for sharded tensors
        pipeline=False,
        data=True,
        multi_process=True,
        same_memory=False,
        sparse=False,
        scalars=False,
        empty=False,
        changed_weights=False,  # gathered for the pass alone
        complex_weights=False,
        strided_weights=False,
        channels_last=False,
        compiled=True,
        sharded_checkpoints=True,
    )

    def __init__(self, config: Config) -> None:
        self.config = config

    def schedule(self, plan: Plan, profile: ModelProfile) -> Schedule:
        own = own_bytes(profile)
        together = groups(own, self.config)
        grouped = [sum(own[number] for number in group) for group in together]
        root = profile.parameter_bytes() - sum(own)
        every = [*grouped, root] if root else grouped
        again = grouped[_first_gathered(profile, together) :]
        whole = data_parallel(
            plan.micro_batches,
            sum(every),
            plan.mesh.data,
            "zero3",
            plan.recompute,
            reshard=self.config.reshard_after_forward,
        )
        last, cast = plan.micro_batches - 1, self._gathered_share(profile)
        reduced = _trained(profile, together)

        def adapted(op: Op) -> Op:
            if op.kind != "collective":
                return op
            if op.part.startswith("all_gather"):
                gathered = again if op.part.endswith("/backward") else every
                buffers = tuple(round(size * cast) for size in gathered)
            else:
                buffers = tuple(reduced)
            task: Kind = "F" if op.part.endswith("/forward") else "B"
            share = 0.5 if task == "B" and self.config.reshard_after_forward else 1.0  # gathers and reductions
            return replace(op, bytes=sum(buffers), buffers=buffers, overlaps=(task, share))

        def left_out(op: Op) -> bool:
            return op.part.startswith("reduce_scatter") and op.micro_batch != last and not self.config.reduce_each

        queues = [
            replace(queue, ops=tuple(adapted(op) for op in queue.ops if not left_out(op))) for queue in whole.queues
        ]
        return replace(whole, queues=tuple(queues))

    def memory(self, model: MemoryModel, mesh: Mesh, profile: ModelProfile) -> MemoryModel:
        """Shards; and whole, all counted with the weights, what the root has and three times the largest group."""
        size, own = profile.parameter_bytes(), own_bytes(profile)
        largest = max((sum(own[number] for number in group) for group in groups(own, self.config)), default=0)
        whole = size - sum(own) + 2 * largest if self.config.reshard_after_forward else size
        shard, gathered = 1 / mesh.data, whole * self._gathered_share(profile)
        return replace(
            model,
            weights=model.weights * (shard + (gathered + largest) / (size or 1)),
            gradients=model.gradients * (shard if self.config.reduce_each else 1.0),
            optimizer=model.optimizer * shard,
        )

    def layers(self, plan: Plan, profile: ModelProfile) -> ModelProfile:
        """With the policy autocast's copies of weights are not kept for the backward pass: weights are gathered so.

        All else is as under autocast, where layers are profiled: their times, and what norms keep, twice the bytes."""
        if (share := self._gathered_share(profile)) == 1.0:
            return profile

        def gathered(layer: LayerProfile) -> LayerProfile:
            cast = {one.name: one.weight_bytes for one in layer.products if one.kind != "embedding"}
            return replace(layer, saved_bytes=max(0, layer.saved_bytes - round(share * sum(cast.values()))))

        return replace(profile, layers=tuple(map(gathered, profile.layers)))

    def _gathered_share(self, profile: ModelProfile) -> float:
        """Bytes of a gathered weight for each byte of its shards together."""
        if self.config.mixed_precision != "policy" or not profile.autocast:
            return 1.0
        return DTYPE_BYTES[profile.autocast] / DTYPE_BYTES[profile.dtype]

    def session(self, model: Model, plan: Plan, spec: SessionSpec) -> AbstractContextManager[Session]:
        from engines.fsdp.session import FSDPSession

        return FSDPSession(model, plan, spec, self.config)


def _trained(profile: ModelProfile, together: list[list[int]]) -> list[int]:
    """The bytes of gradients that each group of layers, and then the root, reduces; none of one without."""
    sizes = [sum(profile.layers[number].trained_bytes for number in group) for group in together]
    root = profile.trained_bytes() - sum(sizes)
    return [size for size in (*sizes, root) if size]


def _first_gathered(profile: ModelProfile, together: list[list[int]]) -> int:
    """The first group of layers that a backward pass gathers: the one before those that are trained, or come after
    some that are, since torch gathers the next group while one computes."""
    needed = (number for number, group in enumerate(together) if group[-1] >= profile.first_trained)
    return max(0, next(needed, len(together)) - 1)
