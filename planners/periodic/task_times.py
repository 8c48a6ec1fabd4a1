"""The timing of a periodic pipeline: when each task of a micro-batch starts; the next one starts a period later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Literal

from harness.core.op import Op
from harness.core.pattern import Pattern, Placed
from harness.core.plan import Stage
from planners.periodic.layer_ticks import BUFFERS, Chain

Kind = Literal["F", "sent", "B", "returned"]
Resource = tuple[int, ...]
"""(device,), or a link: (lower, higher) device in half duplex, ("from", "to") device as (0, from, to) in full."""


@dataclass(frozen=True)
class Task:
    """A task of each micro-batch: forward or backward of a stage, or a message between `stage` - 1 and `stage`."""

    stage: int
    kind: Kind
    ticks: int
    resource: Resource


def path(chain: Chain, stages: Sequence[Stage]) -> tuple[Task, ...]:
    """Returns the tasks of a micro-batch in order: each waits for the previous one. No message inside a device.

        stage 0   F0                                B0
        message      sent1                returned1
        stage 1            F1  (...)  B1

    A task has exclusive use of its device, or of the link of its two devices.
    """
    forward_path: list[Task] = []
    backward_path: list[Task] = []
    for number, stage in enumerate(stages):
        previous = stages[number - 1].device if number else stage.device
        if previous != stage.device:
            forward_path.append(Task(number, "sent", chain.sent[stage.first], _link(chain, previous, stage.device)))
            backward_path.append(
                Task(number, "returned", chain.returned[stage.first], _link(chain, stage.device, previous))
            )
        forward, backward = (sum(ticks[stage.first : stage.last + 1]) for ticks in (chain.forward, chain.backward))
        forward_path.append(Task(number, "F", forward, (stage.device,)))
        backward_path.append(Task(number, "B", backward, (stage.device,)))
    return (*forward_path, *reversed(backward_path))


def task_positions(tasks: Sequence[Task]) -> dict[tuple[int, str], int]:
    """Maps (stage, kind) to the position in the path of each forward ("F") and backward ("B") task of a stage."""
    return {(task.stage, task.kind): place for place, task in enumerate(tasks)}


def _link(chain: Chain, source: int, target: int) -> Resource:
    return (min(source, target), max(source, target)) if chain.duplex == "half" else (0, source, target)


@dataclass(frozen=True)
class Timing:
    """`starts[n]` is when task n of `path(chain, stages)` starts for micro-batch 0, in ticks; for micro-batch i it
    starts i periods later."""

    chain: Chain
    stages: tuple[Stage, ...]
    period: Fraction
    starts: tuple[Fraction, ...]

    @cached_property
    def tasks(self) -> tuple[Task, ...]:
        return path(self.chain, self.stages)

    @cached_property
    def _places(self) -> dict[tuple[int, str], int]:
        return task_positions(self.tasks)

    @property
    def period_s(self) -> float:
        return self.chain.seconds(float(self.period))

    def step(self, micro_batches: int) -> Fraction:
        """Returns the ticks from the first task of so many micro-batches to the end of the last one."""
        return (micro_batches - 1) * self.period + self.starts[-1] + self.tasks[-1].ticks - self.starts[0]

    def activations(self) -> tuple[int, ...]:
        """Returns for each stage how many micro-batches it stores at its peak."""
        counts = []
        for number in range(len(self.stages)):
            start, end = self._stored(number)
            counts.append(max(1, -((start - end) // self.period)))
        return tuple(counts)

    def memory(self) -> dict[int, int]:
        """Returns the peak bytes of each device: state, buffers of its cuts, stored activations.

        A stage stores activations from the start of its forward task to the end of its backward task; what is freed at
        an instant is gone before what begins at the same instant.
        """
        peaks = {}
        for device, size in sorted(self.fixed().items()):
            numbers = [number for number, stage in enumerate(self.stages) if stage.device == device]
            stored = max(self._at(self._stored(number)[0], numbers) for number in numbers)
            peaks[device] = stored + size
        return peaks

    def fixed(self) -> dict[int, int]:
        """Returns the bytes of each device that are always allocated: state, shared state once, buffers of its cuts."""
        sizes: dict[int, int] = {}
        for number, stage in enumerate(self.stages):
            sizes[stage.device] = sizes.get(stage.device, 0) + self._fixed(number)
        for device in sizes:
            ranges = [range(stage.first, stage.last + 1) for stage in self.stages if stage.device == device]
            sizes[device] -= self.chain.counted_twice(ranges)
        return sizes

    def stored(self) -> tuple[int, ...]:
        """Returns the bytes that each stage stores of a micro-batch."""
        return tuple(self.chain.kept(stage.first, stage.last) for stage in self.stages)

    def tasks_s(self) -> dict[str, float]:
        """Returns the seconds of each task, by the notation of its op."""
        return {str(self._op(task)): self.chain.seconds(task.ticks) for task in self.tasks}

    def _fixed(self, number: int) -> int:
        chain, stage = self.chain, self.stages[number]
        cuts = 0
        if number and self.stages[number - 1].device != stage.device:
            cuts += chain.buffers[stage.first]
        if number + 1 < len(self.stages) and self.stages[number + 1].device != stage.device:
            cuts += chain.buffers[stage.last + 1]
        return chain.states[stage.last + 1] - chain.states[stage.first] + cuts

    def _at(self, moment: Fraction, numbers: Sequence[int]) -> int:
        """Returns the bytes that the stages store at one instant of any period, including what starts then."""
        total = 0
        for number in numbers:
            start, end = self._stored(number)
            begun, ended = (moment - start) // self.period, (moment - end) // self.period
            stage = self.stages[number]
            total += (begun - ended) * self.chain.kept(stage.first, stage.last)
        return total

    def _stored(self, number: int) -> tuple[Fraction, Fraction]:
        """Returns from when to when the stage stores micro-batch 0."""
        forward, backward = self._places[number, "F"], self._places[number, "B"]
        return self.starts[forward], self.starts[backward] + self.tasks[backward].ticks

    def pattern(self) -> Pattern:
        """Returns the timing in seconds, as engines and the simulator read it."""
        placed = []
        for task, start in zip(self.tasks, self.starts, strict=True):
            shift = start // self.period
            start_s = self.chain.seconds(float(start - shift * self.period))
            op = self._op(task)
            placed.append(Placed(op, self.stages[op.stage].device, start_s, int(shift)))
        return Pattern(self.period_s, tuple(placed))

    def _op(self, task: Task) -> Op:
        if task.kind == "F" or task.kind == "B":
            return Op(task.stage, task.kind, 0)
        to, source = (task.stage, task.stage - 1) if task.kind == "sent" else (task.stage - 1, task.stage)
        size = self.chain.buffers[self.stages[task.stage].first] // BUFFERS
        return Op(to, "copy", 0, "", source, bytes=size, queue="network")
