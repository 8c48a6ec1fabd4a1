"""The loop of a stage: it runs what has arrived (Myelin, Algorithms 1 and 2), or what a fixed order says.

    stage 0   F0 F1 .. .. B0 F2 B1 F3 B2 .. B3       limit 2: two forwards are injected, and one after each backward
    stage 1   .. F0 B0 F1 B1 ..                      a task is ready when all its messages have come

Which ready task runs is `harness.schedule.policy.pick`, as in the simulator. Beyond the paper's algorithms: nothing is
injected when no micro-batch is left, there may be fewer than the limit, and one stage alone needs no message.
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

    def __init__(
        self, stage: int, order: Sequence[Op], inputs: int, outputs: int, rule: RuleName, limit: int | None
    ) -> None:
        self.rule, self.order = rule, order
        self.left = len(order)
        self.limit = limit or self.left
        self.last: Op | None = None
        self.ready: list[Op] = []
        permits = stage == 0
        self._needs = {op: (inputs + permits if op.kind == "F" else outputs + 1) for op in order}
        for i in range(min(self.limit, self.left // 2)) if permits else ():
            self._have(Op(stage, "F", i))

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
        """The task has ended: its backward task, or another micro-batch, may be ready."""
        assert op.micro_batch is not None
        self.left, self.last = self.left - 1, op
        if op.kind == "F":
            self._have(Op(op.stage, "B", op.micro_batch))
        elif op.stage == 0:
            self._have(Op(0, "F", op.micro_batch + self.limit))

    def _have(self, op: Op) -> None:
        """Something that a task waits for; one that there is not, since no micro-batch is left, waits for nothing."""
        if op in self._needs:
            self._needs[op] -= 1
            if not self._needs[op]:
                self.ready.append(op)


def run(
    ready_tasks: ReadyTasks, transport: Transport, take: Callable[[Arrival], None], execute: Callable[[Op], None]
) -> None:
    """All tasks of a step. What arrives while a task runs is ready before what that task makes ready."""
    while ready_tasks.left:
        op = ready_tasks.next()
        if op is not None:
            execute(op)
        for arrival in transport.arrived(wait=op is None):
            take(arrival)
            ready_tasks.arrived(arrival.channel.target, arrival.micro_batch, arrival.channel.forward)
        if op is not None:
            ready_tasks.done(op)
