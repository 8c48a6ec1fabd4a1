"""The end of a step in chunks: which all-reduce, update and copy waits for which.

    gradients, all-reduces over copies of a parameter  ->  all-reduce(chunk0) -> step(chunk0)
                                                       ->  all-reduce(chunk1) -> step(chunk1)

With the optimizer state in the host's memory, each bucket of a chunk is copied to the device, in two halves (a and b).
The device has a buffer for one bucket, a slot for each half: one is updated while the other one is copied in or out.
Copies begin when the gradients are complete, at the same time as the first all-reduce; after that a half waits only
for its slot.

    gradients -> in(0a) -> step(0a) -> out(0a) -> in(1a) ...         all-reduce(chunk) -> steps of its halves
              -> in(0b) -> step(0b) -> out(0b) -> in(1b) ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from harness.core.op import Op

IN, OUT = "in", "out"
"""The directions of half a bucket, last in the part of a copy: "chunk0/bucket1a/in"."""
HALVES = "ab"
"""The halves of a bucket, and the slots on the device."""


def copy_direction(op: Op) -> tuple[str, str]:
    """Returns half a bucket ("chunk0/bucket1a") and its direction, for a copy from or to the host's memory; else ("",
    "")."""
    if op.kind != "copy" or op.peer is not None:
        return "", ""
    half, _, direction = op.part.rpartition("/")
    return (half, direction) if direction in (IN, OUT) else ("", "")


class Chunks:
    """The nodes of a graph that belong to chunks; it does not change the edges of other nodes."""

    def __init__(self, ops: Sequence[Op]) -> None:
        self.ops = ops
        self.steps = [node for node, op in enumerate(ops) if op.kind == "step" and op.part]
        self.reductions: dict[tuple[int, str], list[int]] = {
            (ops[node].stage, _chunk(ops[node])): [] for node in self.steps
        }
        self.copies: dict[tuple[int, str, str], int] = {}
        for node, op in enumerate(ops) if self.steps else ():
            half, direction = copy_direction(op)
            if direction:
                self.copies[op.stage, half, direction] = node

    def add_reduction(self, node: int) -> bool:
        """Adds an all-reduce over replicas, if it is that of a chunk; returns whether it is."""
        op = self.ops[node]
        reductions = self.reductions.get((op.stage, op.part.partition("@")[2].partition("/")[2]))
        if reductions is None:
            return False
        reductions.append(node)
        return True

    def draw(self, before: list[list[int]], gradients: Callable[[int], list[int]]) -> None:
        """Adds the edges of all chunks to `before`. After the nodes `gradients(stage)` the gradients of a stage are
        complete."""
        ready = {stage: gradients(stage) for stage, _ in self.reductions}
        for (stage, _), nodes in self.reductions.items():
            for node in nodes:
                before[node] += ready[stage]
        for node in self.steps:
            op = self.ops[node]
            place = (op.stage, op.part)
            before[node] += self.reductions[op.stage, _chunk(op)] or ready[op.stage]
            if (*place, IN) in self.copies:
                before[node].append(self.copies[*place, IN])
            if (*place, OUT) in self.copies:
                before[self.copies[*place, OUT]].append(node)
        self.make_room(before, ready)

    def make_room(self, before: list[list[int]], ready: Mapping[int, list[int]]) -> None:
        """Half a bucket is copied in when the previous one has left its slot, the first ones when gradients are
        `ready`."""
        in_slot: dict[tuple[int, str], str] = {}
        for (stage, half, direction), node in self.copies.items():
            if direction == IN:
                earlier = self.copies.get((stage, in_slot.get((stage, half[-1]), ""), OUT))
                before[node] += ready.get(stage, []) if earlier is None else [earlier]
                in_slot[stage, half[-1]] = half


def _chunk(op: Op) -> str:
    """Returns the chunk of a step: "chunk0" for "chunk0/bucket1a"."""
    return op.part.partition("/")[0]
