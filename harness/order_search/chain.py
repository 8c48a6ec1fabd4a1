"""What an order is searched for: stages on devices, their times and bytes; and what an order takes.

    F(j, i)   from its start the stage keeps what the pass saves ........ until the end of B(j, i), or of W(j, i)
    I(j, i)   works, then keeps what W needs ............................ until the end of W(j, i)

Tasks of a device run one after the other, messages next to them. A device's memory depends on the order of its own
tasks alone, the times on the orders of all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from harness.core.op import Op

Kind = Literal["F", "B", "I", "W", "R"]
Task = tuple[str, int, int]
"""Kind, stage, micro-batch. A whole backward pass is B, its halves are I and W."""
Orders = list[list[Task]]
"""The tasks of each device."""


@dataclass(frozen=True)
class Message:
    """What goes from `source` to a later stage `target` in a forward pass, and its gradient back, in `seconds`."""

    source: int
    target: int
    seconds: float = 0.0


@dataclass(frozen=True)
class Chain:
    """Stages, each on its device, with the seconds of their tasks and the bytes that these keep.

    Saved bytes are kept from F to the end of the backward pass, delayed ones in addition from the end of I to that of
    W; working bytes while B or I runs. Where a stage is recomputed (R, right before B or I) F keeps its checkpoint, and
    R what is saved. `limits` are the bytes of each device; None: no limit.
    """

    devices: tuple[int, ...]
    micro_batches: int
    forward_s: tuple[float, ...]
    input_s: tuple[float, ...]
    weight_s: tuple[float, ...]
    messages: tuple[Message, ...] = ()
    saved_bytes: tuple[int, ...] = ()
    delayed_bytes: tuple[int, ...] = ()
    working_bytes: tuple[int, ...] = ()
    checkpoint_bytes: tuple[int, ...] = ()
    limits: tuple[int | None, ...] = ()

    @property
    def stages(self) -> int:
        return len(self.devices)

    @property
    def width(self) -> int:
        """The number of devices."""
        return max(self.devices) + 1

    @cached_property
    def task_s(self) -> dict[tuple[str, int], float]:
        """Seconds of a task, by kind and stage."""
        found: dict[tuple[str, int], float] = {}
        for j in range(self.stages):
            found |= {("F", j): self.forward_s[j], ("R", j): self.forward_s[j], ("I", j): self.input_s[j]}
            found |= {("W", j): self.weight_s[j], ("B", j): self.input_s[j] + self.weight_s[j]}
        return found

    @cached_property
    def arrivals(self) -> tuple[list[list[tuple[int, float]]], list[list[tuple[int, float]]]]:
        """For each stage, what its forward and what its backward pass waits for: (stage, seconds of the message)."""
        seconds: dict[tuple[int, int], float] = {(j, j + 1): 0.0 for j in range(self.stages - 1)}
        for one in self.messages:
            far = self.devices[one.source] != self.devices[one.target]
            key = (one.source, one.target)
            seconds[key] = max(seconds.get(key, 0.0), one.seconds if far else 0.0)
        forward: list[list[tuple[int, float]]] = [[] for _ in range(self.stages)]
        backward: list[list[tuple[int, float]]] = [[] for _ in range(self.stages)]
        for (source, target), took in seconds.items():
            forward[target].append((source, took))
            backward[source].append((target, took))
        return forward, backward

    def of(self, values: tuple[int, ...], stage: int) -> int:
        """Bytes of a stage; none where none are given."""
        return values[stage] if values else 0

    def limit(self, device: int) -> float:
        found = self.limits[device] if self.limits else None
        return float("inf") if found is None else found


@dataclass(frozen=True)
class Evaluation:
    """When tasks end, the step time, and the peak of each device in bytes; `step_s` is infinite for a deadlock."""

    step_s: float
    peaks: tuple[int, ...]
    ends: dict[Task, float] = field(default_factory=dict)


def fits(chain: Chain, evaluation: Evaluation) -> bool:
    """Whether an order ends, within the limits."""
    within = all(peak <= chain.limit(device) for device, peak in enumerate(evaluation.peaks))
    return within and evaluation.step_s < float("inf")


def evaluate(chain: Chain, orders: Orders) -> Evaluation:
    """Run each task as early as its device and its dependencies allow."""
    step_s, ends = times(chain, orders)
    return Evaluation(step_s, tuple(peak(chain, order) for order in orders), ends)


def times(chain: Chain, orders: Orders) -> tuple[float, dict[Task, float]]:
    """Return the step time and the ends of tasks; an infinite time for a deadlock."""
    ends: dict[Task, float] = {}
    places, free = [0] * len(orders), [0.0] * len(orders)
    task_s, last = chain.task_s, chain.stages - 1
    forward, backward = chain.arrivals
    waiting, left = list(range(len(orders))), sum(map(len, orders))
    while waiting:
        moved = False
        for device in waiting:
            order, place, now = orders[device], places[device], free[device]
            while place < len(order):
                kind, j, i = order[place]
                start = now
                if kind == "F":
                    for source, took in forward[j]:
                        end = ends.get(("F", source, i))
                        if end is None:
                            break
                        start = max(start, end + took)
                    else:
                        end = 0.0
                elif kind in ("B", "I"):
                    end = 0.0 if j < last or ("F", j, i) in ends else None
                    for target, took in backward[j] if end is not None else ():
                        end = ends.get(("I", target, i), ends.get(("B", target, i)))
                        if end is None:
                            break
                        start = max(start, end + took)
                    if ("F", j, i) not in ends:
                        end = None
                else:
                    end = ends.get(("I", j, i) if kind == "W" else ("F", j, i))
                if end is None:
                    break
                now = start + task_s[kind, j]
                ends[kind, j, i] = now
                place += 1
                moved = True
            places[device], free[device] = place, now
        waiting = [device for device in waiting if places[device] < len(orders[device])]
        if waiting and not moved:
            return float("inf"), ends
    assert len(ends) == left
    return max(free), ends


def peak(chain: Chain, order: Iterable[Task]) -> int:
    """Return the most bytes that the tasks of a device keep at once."""
    order = list(order)
    recomputed = {(j, i) for kind, j, i in order if kind == "R"}
    held = highest = 0
    for kind, j, i in order:
        saved, working = chain.of(chain.saved_bytes, j), 0
        checkpoint = chain.of(chain.checkpoint_bytes, j) if (j, i) in recomputed else 0
        if kind == "F":
            held += checkpoint if (j, i) in recomputed else saved
        elif kind == "R":
            held += saved
        elif kind in ("B", "I"):
            working = chain.of(chain.working_bytes, j)
        highest = max(highest, held + working)
        if kind == "B":
            held -= saved + checkpoint
        elif kind == "I":
            held += chain.of(chain.delayed_bytes, j)
            highest = max(highest, held)
        elif kind == "W":
            held -= saved + checkpoint + chain.of(chain.delayed_bytes, j)
    return highest


def tasks_of(ops: Iterable[Op]) -> list[Task]:
    """Return the tasks of a device's ops: a B with a W is an I."""
    ops = [op for op in ops if op.kind in ("F", "B", "W", "R")]
    split = {(op.stage, op.micro_batch) for op in ops if op.kind == "W"}
    kinds = ["I" if op.kind == "B" and (op.stage, op.micro_batch) in split else str(op.kind) for op in ops]
    return [(kind, op.stage, op.micro_batch or 0) for kind, op in zip(kinds, ops, strict=True)]


def by_device(chain: Chain, tasks: Sequence[Task]) -> Orders:
    """Return tasks in the order of each device."""
    rows: dict[int, list[Task]] = defaultdict(list)
    for task in tasks:
        rows[chain.devices[task[1]]].append(task)
    return [rows[device] for device in range(chain.width)]
