"""The peak memory of each device: a ledger of what the ops of a trace allocate and free.

    copy    |== input or skip ================================|      until its stage's backward task ends
    F          |== saved, or checkpoint ======================|
    R                                |== saved ===============|
    copy                         |== a skip's gradient =======|
    B                                         |== working ====|

Of two changes at the same moment the free comes first. Where the memory model counts only the inputs of layers, as
MadPipe's does, copies and the working set of a backward task cost nothing: so it is in that paper.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from harness.memory import MemoryModel
from harness.op import Op
from harness.plan import Plan, Stage
from harness.profile import ModelProfile
from harness.schedule import Schedule
from harness.trace import Span, Trace

Change = tuple[float, int, int]
"""(time in seconds, bytes, device)"""


def peak_memory_bytes(
    trace: Trace, schedule: Schedule, plan: Plan, profile: ModelProfile, memory: MemoryModel
) -> list[int]:
    """The largest number of live bytes on each of `plan.devices`, if the ops of `schedule` run as in `trace`."""
    copied = {op: op.bytes for op in schedule.ops() if op.kind == "copy"}
    brought: dict[tuple[int, int | None], set[str]] = defaultdict(set)
    for op in copied:
        if op.forward:
            brought[(op.stage, op.micro_batch)].add(op.part)
    spans = {Op.parse(span.op): span for span in trace.spans}
    ledger = _Ledger(spans, copied, brought, schedule.loss == "gathered", plan, profile, memory)
    live = {device: ledger.resident(device) for device in plan.devices}
    peak = dict(live)
    for _, change, device in sorted(ledger.changes()):
        live[device] += change
        peak[device] = max(peak[device], live[device])
    return [peak[device] for device in plan.devices]


def working_bytes(profile: ModelProfile, first: int, last: int) -> int:
    """What the backward pass of `first`..`last` needs at its peak beyond what it frees on the way, layer by layer:

    saved by   first ... l | gradients of l's output and input, and of skips inside the stage that pass over l
    """
    inside = [s for s in profile.skips if first <= s.source and s.target <= last]
    saved = beyond = 0
    for layer in reversed(range(first, last + 1)):
        gradients = profile.layers[layer].output_bytes + (profile.boundary_bytes(layer) if layer else 0)
        gradients += sum(s.bytes for s in inside if s.source < layer <= s.target)
        beyond = max(beyond, gradients - saved)
        saved += profile.layers[layer].saved_bytes
    return beyond


@dataclass(frozen=True)
class _Ledger:
    spans: dict[Op, Span]
    copied: dict[Op, int]
    brought: dict[tuple[int, int | None], set[str]]  # what copies bring a task, "" being the stage's input
    gathered: bool
    plan: Plan
    profile: ModelProfile
    memory: MemoryModel

    @property
    def whole(self) -> bool:
        """Whether all that autograd saves is counted, and not only the inputs of layers."""
        return self.memory.activations == "saved"

    def resident(self, device: int) -> int:
        """What is there all the time: model state, and on the first stage's device the whole mini-batch."""
        held = [stage for stage in self.plan.stages if stage.device == device]
        size = sum(self.memory.state_bytes(self.profile, stage.first, stage.last) for stage in held)
        batch = self.plan.micro_batches * self.profile.input_bytes
        return size + (batch if self.whole and self.plan.stages[0] in held else 0)

    def changes(self) -> Iterator[Change]:
        for op, span in self.spans.items():
            stage = self.plan.stages[op.stage]
            end = self.spans.get(Op(op.stage, "B", op.micro_batch), span)
            if op.kind in ("F", "R"):
                yield from _held(span.start_s, end.end_s, self.kept(op, stage), stage.device)
            elif op.kind == "copy" and self.whole:
                boundary_gradient = not op.forward and not op.part  # the task's working set takes its place
                until = end.start_s if boundary_gradient else end.end_s
                yield from _held(span.start_s, until, self.copied[op], stage.device)
            elif op.kind == "B" and self.whole:
                working = working_bytes(self.profile, stage.first, stage.last)
                yield from _held(span.start_s, span.end_s, working, stage.device)

    def kept(self, op: Op, stage: Stage) -> int:
        """What a forward task or a recomputation keeps until the backward task."""
        again = Op(op.stage, "R", op.micro_batch) in self.spans
        if not self.whole:
            size = self.memory.checkpoint_bytes if op.kind == "F" and again else self.memory.task_bytes
            return size(self.profile, stage.first, stage.last)
        output = self.output_bytes(op, stage)
        return output + (self.here(op, stage) if op.kind == "F" and again else self.saved(op, stage))

    def here(self, op: Op, stage: Stage) -> int:
        """The part of a checkpoint that no copy brought: it was made on this device by an earlier stage."""
        brought = self.brought[(op.stage, op.micro_batch)]
        size = 0 if "" in brought or stage.first == 0 else self.profile.boundary_bytes(stage.first)
        skips = self.profile.skips_into(stage.first, stage.last)
        return size + sum(skip.bytes for skip in skips if skip.name not in brought)

    def saved(self, op: Op, stage: Stage) -> int:
        """What autograd saves; the stage's input, which its first layer saves, counts where it lies already."""
        size = self.memory.task_bytes(self.profile, stage.first, stage.last)
        if stage.first == 0 or "" in self.brought[(op.stage, op.micro_batch)]:
            size -= min(self.profile.boundary_bytes(stage.first), self.profile.layers[stage.first].saved_bytes)
        return size

    def output_bytes(self, op: Op, stage: Stage) -> int:
        """The model's output, which waits for the loss; gathered it has a gradient of the same size beside it."""
        if op.kind == "R" or stage != self.plan.stages[-1]:
            return 0
        return self.profile.layers[-1].output_bytes * (2 if self.gathered else 1)


def _held(start_s: float, end_s: float, size: int, device: int) -> Iterator[Change]:
    yield start_s, size, device
    yield end_s, -size, device
