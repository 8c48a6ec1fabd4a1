"""The bytes that tasks and messages of each stage hold, and those that are always there on a device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from harness.core.memory_model import MemoryModel
from harness.core.model_profile import ModelProfile
from harness.core.plan import Plan, Stage
from harness.schedule import Schedule

Arriving = dict[tuple[int, bool], dict[str, int]]
"""The bytes that messages bring a stage in a forward pass (True) and in a backward pass, by their part: "" is its
input, and the gradient of its output."""


def working_bytes(profile: ModelProfile, first: int, last: int, accumulated: float = 0.0, kept: float = 0.0) -> int:
    """Returns the bytes that the backward pass of `first`..`last` needs at its peak beyond what it frees, layer by
    layer:

    saved by   first ... l | gradients of l's output, input and parameters, and of inner skips that pass over l
                           | what else l works with (`LayerProfile.working_bytes`)

    The new gradient of parameters (`accumulated` times their bytes) coexists with the one that it is added to. Where
    there are none yet, `kept` times their bytes stay of each layer. Where it was measured by how much the memory grows
    (`LayerProfile.backward_bytes`), that is what l needs beyond the gradient of its output.
    """
    saved = beyond = parameters = 0
    for number, leaving, entering in _gradients(profile, first, last):
        layer = profile.layers[number]
        parameters += layer.trained_bytes
        if layer.backward_bytes:
            grown = layer.backward_bytes - round(layer.new_gradient_bytes * (1 - accumulated))
            needed = leaving + max(entering, grown) + round(parameters * kept)
        else:
            made = round(layer.trained_bytes * accumulated + parameters * kept)
            needed = leaving + entering + made + layer.working_bytes
        beyond = max(beyond, needed - saved)
        saved += layer.saved_bytes
    return beyond


def inputs_working_bytes(memory: MemoryModel, profile: ModelProfile, first: int, last: int) -> int:
    """Returns the bytes of the half of a backward pass for the inputs at its peak: it frees nothing, and keeps what
    that for the weights needs. Where no gradient of the stage's inputs is needed, there is nothing to do."""
    delayed = beyond = 0
    for number, leaving, entering in _gradients(profile, first, last) if first > profile.frozen_prefix else ():
        beyond = max(beyond, delayed + leaving + entering + profile.layers[number].working_bytes)
        delayed += memory.delayed_of(profile, number)
    return max(beyond, delayed)


def _gradients(profile: ModelProfile, first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """Yields layers, the last one first, with the bytes of the gradients of their output and of inner skips over them,
    and of those that they make: of their input and of inner skips that they pop; none of a frozen prefix."""
    prefix = profile.frozen_prefix
    inside = [s for s in profile.skips if max(first, prefix) <= s.source and s.target <= last]
    for number in reversed(range(max(first, prefix), last + 1)):
        over = sum(s.bytes for s in inside if s.source < number < s.target)
        popped = sum(s.bytes for s in inside if s.target == number)
        entering = profile.boundary_bytes(number) if number > prefix else 0
        yield number, profile.layers[number].output_bytes + over, entering + popped


@dataclass(frozen=True)
class StageBytes:
    """Bytes that the tasks of one stage hold, for one micro-batch.

    `checkpoint` is that of a task that will be recomputed, `delayed` what a backward task leaves for that of the
    weights, `first_working` that of the first backward task, which finds no gradients to add to (but a flat buffer),
    `inputs_working` that of one for the inputs alone. Where updates free the gradients, `gradients` are those of a
    stage; there `updating` is what an update works with.
    """

    checkpoint: int
    saved: int
    outputs: int
    delayed: int
    first_working: int
    working: int
    inputs_working: int
    gradients: int = 0
    updating: int = 0


class HeldBytes:
    """The bytes of a schedule's stages and devices. `whole` says that all is counted, not the inputs of layers
    alone."""

    def __init__(
        self, schedule: Schedule, plan: Plan, profile: ModelProfile, memory: MemoryModel, arriving: Arriving
    ) -> None:
        self.schedule, self.plan, self.profile, self.memory = schedule, plan, profile, memory
        self.whole = memory.activations == "saved"
        self.arriving = arriving
        self.stages = [self.stage_bytes(number, stage) for number, stage in enumerate(plan.stages)]

    def messages(self, stage: int, forward: bool) -> dict[str, int]:
        """Returns the bytes of what arrives at a stage, by its part."""
        return self.arriving.get((stage, forward), {})

    def has_backward(self, number: int) -> bool:
        """Returns whether a stage has layers after a frozen prefix."""
        return self.plan.stages[number].last >= self.profile.frozen_prefix

    def has_input_gradient(self, number: int) -> bool:
        """Returns whether the gradient of a stage's input is needed."""
        return self.plan.stages[number].first > self.profile.frozen_prefix

    def used_once(self, number: int, part: str) -> bool:
        """Returns whether what arrives at a stage in a forward pass is freed after it: it comes from a frozen prefix,
        which saves nothing. A library that copies messages keeps them for the backward pass."""
        if self.memory.messages == "copied":
            return False
        if part:
            return any(skip.name == part and not self.profile.needed_gradient(skip) for skip in self.profile.skips)
        return self.plan.stages[number].first < self.profile.frozen_prefix

    def reducing(self, number: int) -> int:
        """Returns the bytes of further gradients while those of a stage are summed over replicas."""
        stage = self.plan.stages[number]
        return round(self.memory.reducing * self.profile.trained_bytes(stage.first, stage.last))

    def rebuilt(self, number: int) -> int:
        """Returns the bytes of further gradients of a stage between two steps."""
        stage = self.plan.stages[number]
        return round(self.memory.rebuilt * self.profile.trained_bytes(stage.first, stage.last))

    def stage_bytes(self, number: int, stage: Stage) -> StageBytes:
        """Returns the bytes of a stage's tasks; a memory model of layer inputs counts nothing else."""
        profile, memory = self.profile, self.memory
        task = memory.task_bytes(profile, stage.first, stage.last)
        if not self.whole:
            return StageBytes(memory.checkpoint_bytes(profile, stage.first, stage.last), task, 0, 0, 0, 0, 0)
        brought = self.messages(number, True)
        counted = (stage.first == 0 or "" in brought) and memory.messages != "copied"
        first = profile.layers[stage.first]
        if counted and (first.trained_bytes or not first.param_bytes):  # the input, which it saves, is counted already
            task -= min(profile.boundary_bytes(stage.first), profile.layers[stage.first].saved_bytes)
        checkpoint = 0 if "" in brought or stage.first == 0 else profile.boundary_bytes(stage.first)
        checkpoint += sum(s.bytes for s in profile.skips_into(stage.first, stage.last) if s.name not in brought)
        checkpoint += sum(brought.values()) if memory.messages == "copied" else 0
        accumulated = min(1.0, memory.gradients)
        return StageBytes(
            checkpoint,
            task,
            self.output_bytes(number),
            memory.delayed_bytes(profile, stage.first, stage.last),
            working_bytes(
                profile,
                stage.first,
                stage.last,
                accumulated if memory.flat else 0.0,
                memory.gradients if memory.freed else 0.0,
            ),
            working_bytes(profile, stage.first, stage.last, accumulated),
            inputs_working_bytes(memory, profile, stage.first, stage.last),
            *self.update_bytes(stage),
        )

    def update_bytes(self, stage: Stage) -> tuple[int, int]:
        """Returns the bytes of a stage's gradients, which an update frees, and of what it works with."""
        if not self.memory.freed:
            return 0, 0
        parameters = self.profile.trained_bytes(stage.first, stage.last)
        largest = self.profile.largest_parameter(stage.first, stage.last)
        of_all, of_largest = self.memory.updating
        return round(self.memory.gradients * parameters), round(of_all * parameters + of_largest * largest)

    def output_bytes(self, number: int) -> int:
        """Returns the bytes of the model's output, which waits for the loss, or of what the loss keeps of it.

        A gathered output has a gradient of the same size. Engines that keep messages keep the output in addition, those
        that copy messages also the previous one.
        """
        if number != len(self.plan.stages) - 1:
            return 0
        copies = 2 if self.schedule.loss == "gathered" else {"kept": 2, "copied": 3}.get(self.memory.messages, 1)
        return self.profile.layers[-1].output_bytes * copies

    def resident(self, device: int) -> dict[str, int]:
        """Returns what is always allocated: model state, and on the first stage's device the whole mini-batch."""
        held = [stage for stage in self.plan.stages if stage.device == device]
        layers = [number for stage in held for number in range(stage.first, stage.last + 1)]
        numbers = [number for number, stage in enumerate(self.plan.stages) if stage.device == device]
        parts = self.memory.state_parts(self.profile, layers)
        if self.memory.freed:
            parts["gradients"] = 0
        if self.memory.copies:
            parts["weights"] = sum(self.copies(number) for number in numbers)
        if self.whole and self.plan.stages[0] in held:
            parts["mini-batch"] = self.plan.micro_batches * self.profile.input_bytes
        parts["buffers of messages"] = sum(map(self.buffers, numbers)) if self.whole else 0
        return parts

    def copies(self, number: int) -> int:
        """Returns the bytes of all copies of a stage's weights."""
        stage = self.plan.stages[number]
        own = self.profile.parameter_bytes_of(range(stage.first, stage.last + 1))
        return round(own * self.memory.weights * self.memory.copies[number])

    def buffers(self, number: int) -> int:
        """Returns the bytes of permanent buffers for what arrives at a stage."""
        if self.memory.messages == "passing":
            return 0
        each = sum(sum(self.messages(number, forward).values()) for forward in (True, False))
        if self.memory.messages in ("copied", "posted"):
            return each
        return self.plan.micro_batches * (each + 2 * self.from_same_device(number))

    def from_same_device(self, number: int) -> int:
        """Returns the bytes that a stage gets from the previous one on the same device, for one micro-batch.

        Skips that only pass through the previous stage are in its own buffers."""
        previous, stage = self.plan.stages[max(0, number - 1)], self.plan.stages[number]
        if number == 0 or previous.device != stage.device:
            return 0
        skips = (s.bytes for s in self.profile.skips if previous.first <= s.source < stage.first <= s.target)
        return self.profile.boundary_bytes(stage.first) + sum(skips)
