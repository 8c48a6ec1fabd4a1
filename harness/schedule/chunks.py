"""The end of a step in chunks: which sum, update and copy waits for which.

    gradients, sums over copies of a parameter  ->  sum(chunk0) -> step(chunk0)
                                                ->  sum(chunk1) -> step(chunk1)

Where what the optimizer needs lies in the host's memory, each bucket of a chunk visits the device, in two halves (a and
b). There is room for one bucket, a place for each half: one is updated while the other one comes or goes. They begin to
come when the gradients are there, beside the first sum; then a half needs nothing but its place.

    gradients -> in(0a) -> step(0a) -> out(0a) -> in(1a) ...         sum(chunk) -> steps of its halves
              -> in(0b) -> step(0b) -> out(0b) -> in(1b) ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from harness.op import Op

IN, OUT = "in", "out"
"""The ways of half a bucket, last in the part of a copy: "chunk0/bucket1a/in"."""
HALVES = "ab"
"""The halves of a bucket, and the places that they visit."""


def way(op: Op) -> tuple[str, str]:
    """Half a bucket ("chunk0/bucket1a") and its way, of a copy from or to the host's memory; else ("", "")."""
    if op.kind != "copy" or op.peer is not None:
        return "", ""
    of, _, found = op.part.rpartition("/")
    return (of, found) if found in (IN, OUT) else ("", "")


class Chunks:
    """The nodes of a graph that belong to chunks; all others are as if there were none."""

    def __init__(self, ops: Sequence[Op]) -> None:
        self.ops = ops
        self.steps = [node for node, op in enumerate(ops) if op.kind == "step" and op.part]
        self.sums: dict[tuple[int, str], list[int]] = {(ops[node].stage, _chunk(ops[node])): [] for node in self.steps}
        self.copies: dict[tuple[int, str, str], int] = {}
        for node, op in enumerate(ops) if self.steps else ():
            of, found = way(op)
            if found:
                self.copies[op.stage, of, found] = node

    def takes(self, node: int) -> bool:
        """Whether a sum over replicas is that of a chunk; then it belongs here."""
        op = self.ops[node]
        own = self.sums.get((op.stage, op.part.partition("@")[2].partition("/")[2]))
        if own is None:
            return False
        own.append(node)
        return True

    def draw(self, before: list[list[int]], gradients: Callable[[int], list[int]]) -> None:
        """The edges of all chunks, into `before`. After the nodes `gradients(stage)` its gradients are there."""
        ready = {stage: gradients(stage) for stage, _ in self.sums}
        for (stage, _), nodes in self.sums.items():
            for node in nodes:
                before[node] += ready[stage]
        for node in self.steps:
            op = self.ops[node]
            place = (op.stage, op.part)
            before[node] += self.sums[op.stage, _chunk(op)] or ready[op.stage]
            if (*place, IN) in self.copies:
                before[node].append(self.copies[*place, IN])
            if (*place, OUT) in self.copies:
                before[self.copies[*place, OUT]].append(node)
        self.make_room(before, ready)

    def make_room(self, before: list[list[int]], ready: Mapping[int, list[int]]) -> None:
        """Half a bucket comes when the one before it has left its place, the first ones when gradients are `ready`."""
        there: dict[tuple[int, str], str] = {}
        for (stage, of, found), node in self.copies.items():
            if found == IN:
                earlier = self.copies.get((stage, there.get((stage, of[-1]), ""), OUT))
                before[node] += ready.get(stage, []) if earlier is None else [earlier]
                there[stage, of[-1]] = of


def _chunk(op: Op) -> str:
    """The chunk of a step: "chunk0" of "chunk0/bucket1a"."""
    return op.part.partition("/")[0]
