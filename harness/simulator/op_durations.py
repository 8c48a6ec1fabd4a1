"""Duration of each op on its own, without contention or jitter."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from harness.core.cluster import Cluster, Held, TaskCost
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.op import Op
from harness.core.plan import Plan

Seconds = dict[str, list[float]]
KERNELS = 12
"""Kernels of an update: Adam's ten (the decay, two moments with two each, the root, its correction, eps, the quotient,
the counter), and what widens gradients and narrows weights."""


class TaskCosts:
    """Seconds of tasks, by kind and stage.

    The optimizer reads gradients, and reads and writes weights and its own state, wherever that is kept between steps.
    Tasks of a pipeline take the cluster's `task_s` beyond their layers' time, and all tasks what the engine takes on
    this machine (`Cluster.engines`). "B" is a whole backward pass. Where the gradients of the weights are a task of
    their own ("W"), the gradients of the inputs ("I") take `input_share` of the whole, W the rest. Where nobody needs
    gradients of the inputs, W is a whole backward pass, and I does nothing. A stage of a frozen prefix has a backward
    pass where one of the schedule's `ops` brings it gradients.
    """

    def __init__(
        self, plan: Plan, profile: ModelProfile, cluster: Cluster, memory: MemoryModel, ops: Iterable[Op] = ()
    ) -> None:
        self.plan, self.profile, self.cluster, self.memory = plan, profile, cluster, memory
        back = {op.peer if op.kind == "send" else op.stage for op in ops if op.peer is not None and not op.forward}
        frozen = (j for j, stage in enumerate(plan.stages) if stage.last < profile.frozen_prefix)
        self.without_backward = {*frozen} - back
        self.chunks_s: dict[tuple[int, int], float] = {}
        """Seconds of the optimizer by stage and bytes: of a thousand chunks nearly all are of one size."""

    @cached_property
    def seconds(self) -> Seconds:
        found = {kind: self._of_stages(kind, each) for kind, each in self.kernels_s.items()}
        return found | {"step": list(map(self._step_s, range(len(self.plan.stages))))}

    @cached_property
    def kernels_s(self) -> Seconds:
        """What the kernels of tasks take by the profile."""
        stages = self.plan.stages
        forward = [self.profile.sum("forward_s", stage.first, stage.last) for stage in stages]
        backward = [self.profile.sum("backward_s", stage.first, stage.last) for stage in stages]
        inputs = [math.fsum(map(_inputs_s, self.profile.layers[stage.first : stage.last + 1])) for stage in stages]
        weights = [whole - part for whole, part in zip(backward, inputs, strict=True)]
        return {"F": forward, "R": forward, "B": backward, "I": inputs, "W": weights}

    def has_halves(self, stage: int) -> bool:
        """Returns whether there are gradients of a stage's inputs to compute."""
        own = self.plan.stages[stage]
        return any(layer.input_share for layer in self.profile.layers[own.first : own.last + 1])

    def _cost(self, kind: str, stage: int) -> TaskCost:
        """Returns what the engine takes for a task of a stage."""
        costs = self.cluster.engine_costs
        if kind in ("I", "W") and not self.has_halves(stage):
            return costs.of("B") if kind == "W" else TaskCost("I", costs.of("I").base_s)
        return costs.of(kind)

    def _of_stages(self, kind: str, kernels_s: Sequence[float]) -> list[float]:
        """Returns the seconds of a task of each stage: its kernels, while other devices compute, if there are any; and
        what the host takes for a task of a pipeline beyond its layers' time, what passes before it included."""
        held, passes_s = self.trained if kind == "W" else self.held, self.cluster.engine_costs.host_s
        host_s, several, found = self.cluster.task_s + passes_s, self.plan.mesh.size > 1, []
        for number, (seconds, one) in enumerate(zip(kernels_s, held, strict=True)):
            if kind in ("B", "I", "W") and number in self.without_backward:
                found.append(seconds + passes_s)
                continue
            own = self._cost(kind, number)
            found.append(seconds * (1 + (own.share if several else 0.0)) + (host_s + own.seconds(one)))
        return found

    @cached_property
    def held(self) -> list[Held]:
        """What each stage holds."""
        return [self.profile.held(stage.first, stage.last) for stage in self.plan.stages]

    @cached_property
    def trained(self) -> list[Held]:
        """What the optimizer updates of each stage."""
        return [self.profile.held(stage.first, stage.last, trained=True) for stage in self.plan.stages]

    def _step_s(self, stage: int) -> float:
        costs, own = self.cluster.engine_costs, self.plan.stages[stage]
        host_s = costs.host_s + costs.of("step").seconds(self.trained[stage])
        return host_s + self.update_s(self.profile.trained_bytes(own.first, own.last))

    def chunk_s(self, stage: int, size: int) -> float:
        """Returns the seconds of the optimizer on a chunk of `size` bytes of a stage's parameters."""
        if (stage, size) not in self.chunks_s:
            self.chunks_s[stage, size] = self._chunk_s(stage, size)
        return self.chunks_s[stage, size]

    def _chunk_s(self, stage: int, size: int) -> float:
        costs, held = self.cluster.engine_costs, self.trained[stage]
        one = costs.of("step")
        return self.update_s(size) + costs.host_s + one.base_s + one.rest_s(held) * size / max(1, size, held.bytes)

    def update_s(self, size: int) -> float:
        """Returns seconds of the optimizer on `size` bytes of parameters: its kernels, and the bytes that they
        touch."""
        memory, device = self.memory, self.cluster.device
        bandwidth = device.memory_bandwidth * device.efficiency_of("elementwise")
        touched = 2 * memory.weights + memory.gradients + 2 * (memory.optimizer + memory.offloaded)
        launched = KERNELS * device.kernel_s if size else 0.0
        return launched + (size * touched / bandwidth if bandwidth else 0.0)

    def bucket_s(self, size: int) -> float:
        """Returns seconds of a copy of optimizer state from or to the host's memory, for `size` bytes of parameters."""
        return self.cluster.host_link.seconds(size * self.memory.offloaded)


def _inputs_s(layer: LayerProfile) -> float:
    return layer.backward_s * layer.input_share


def given_duration(op: Op, durations: Mapping[str, float]) -> float:
    """Returns the duration that the caller passed. Raises ValueError for one that is missing, negative or not
    finite."""
    seconds = durations.get(str(op))
    if seconds is None:
        raise ValueError(f"{op} of stage {op.stage} has no duration -> one for each op of the schedule")
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError(f"{op} of stage {op.stage} takes {seconds} s -> a finite number of at least 0")
    return seconds


def disturbances(count: int, spread: float, seed: int) -> list[float]:
    """Draws a factor for each node: normal around 1, at least 0; the same for the same seed."""
    draw = random.Random(seed)
    return [max(0.0, draw.gauss(1.0, spread)) for _ in range(count)]
