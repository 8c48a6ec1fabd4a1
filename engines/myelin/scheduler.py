"""The loop of a stage: it runs what has arrived (Myelin, Algorithms 1 and 2), or what a fixed order says.

    stage 0   F0 F1 .. .. B0 F2 B1 F3 B2 .. B3       limit 2: two forwards are injected, and one after each backward
    stage 1   .. F0 .. F1 .. B0 .. F2                the first of those whose messages have come, by the policy
    stage 2   .. .. F0 B0 F1 B1 ..                   each backward task at once

The first and the last stage have a fixed order (`harness.schedule.builders.message_driven`); which ready task the
others run is `harness.schedule.policy.pick`, as in the simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from harness.core.op import Op
from harness.runtime.transports.transport import Arrival, Transport
from harness.schedule.policy import RuleName, pick


class ReadyTasks:
    """The tasks of one stage in one step: which are ready, and which of them is next.

    A forward task waits for messages on `inputs` channels, a backward task for its forward task and messages on
    `outputs` channels. With `rule` "in_order" the tasks of `order` run one after the other.
    """

    def __init__(self, order: Sequence[Op], inputs: int, outputs: int, rule: RuleName) -> None:
        self.rule, self.order = rule, order
        self.left = len(order)
        self.last: Op | None = None
        self._needs = {op: (inputs if op.kind == "F" else outputs + 1) for op in order}
        self.ready = [op for op, needed in self._needs.items() if not needed]

    def arrived(self, stage: int, micro_batch: int, forward: bool) -> None:
        """A message is there: data with `forward`, else gradients."""
        self._have(Op(stage, "F" if forward else "B", micro_batch))

    def next(self) -> Op | None:
        """The task to run now; None if that must wait for a message."""
        if self.rule == "in_order":
            wanted = self.order[-self.left]
            if wanted not in self.ready:
                return None
            self.ready.remove(wanted)
            return wanted
        return self.ready.pop(pick(self.rule, self.ready, self.last)) if self.ready else None

    def done(self, op: Op) -> None:
        """The task has ended: its backward task may be ready."""
        self.left, self.last = self.left - 1, op
        if op.kind == "F":
            self._have(Op(op.stage, "B", op.micro_batch))

    def _have(self, op: Op) -> None:
        """Something that a task waits for."""
        self._needs[op] -= 1
        if not self._needs[op]:
            self.ready.append(op)


def run(
    ready_tasks: ReadyTasks, transport: Transport, take: Callable[[Arrival], None], execute: Callable[[Op], None]
) -> None:
    """All tasks of a step. What arrives while a task runs is ready before what that task makes ready; of messages that
    were seen at the same moment, gradients are first."""
    while ready_tasks.left:
        op = ready_tasks.next()
        if op is not None:
            execute(op)
        for arrival in sorted(transport.arrived(wait=op is None), key=_in_time):
            take(arrival)
            ready_tasks.arrived(arrival.channel.target, arrival.micro_batch, arrival.channel.forward)
        if op is not None:
            ready_tasks.done(op)


def _in_time(arrival: Arrival) -> tuple[float, bool]:
    return arrival.at_s or 0.0, arrival.channel.forward
