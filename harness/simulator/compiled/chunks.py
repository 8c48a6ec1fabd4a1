"""The end of a step in chunks (`harness.schedule.optimizer_chunks`), on columns.

What updates and copies the optimizer's state is most of a schedule that keeps it in the host's memory, and each such op
has a name of its own. So here names are numbers, and there is no row of a table for each:

    part of a copy     "chunk0/bucket1a/in"     the half "chunk0/bucket1a", its slot "a", its direction
    part of an update  "chunk0/bucket1a"        the same half, its chunk "chunk0"
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from operator import attrgetter

import numpy as np

from harness.core.op import Op
from harness.schedule.optimizer_chunks import IN, copy_direction
from harness.simulator.compiled.tables import Numbers

UPDATE, INTO, OUT_OF = range(3)
"""What an op of a chunk does: it updates half a bucket, copies it to the device, or from it."""
Chunk = tuple[int, int]
"""The stage, and the number of the chunk's name."""
_numbers: defaultdict[str, int] = defaultdict(count().__next__)
"""The numbers of names: those of halves and chunks, the same for all schedules."""
_PART = attrgetter("kind", "part")
_PRICED = attrgetter("stage", "bytes", "seconds")


@dataclass(frozen=True)
class Chunks:
    """The ops of chunks, in the order of their nodes, each in one queue. `does` is one of `UPDATE`, `INTO` and
    `OUT_OF`, `half` and `name` are numbers of names: `name` is that of an update's chunk, and of a copy the letter of
    its slot."""

    nodes: Numbers
    does: Numbers
    stage: Numbers
    half: Numbers
    name: Numbers

    def updates(self) -> dict[Chunk, Numbers]:
        """Maps each chunk to its updates."""
        nodes, (stage, name) = self._of(UPDATE, self.stage, self.name)
        order = np.lexsort((name, stage))
        nodes, stage, name = nodes[order], stage[order], name[order]
        begins = np.flatnonzero(np.diff(stage, prepend=-1) | np.diff(name, prepend=-1))
        chunks = zip(stage[begins].tolist(), name[begins].tolist(), strict=True)
        return dict(zip(chunks, np.split(nodes, begins[1:]), strict=True)) if len(nodes) else {}

    def copied(self, ready: Mapping[int, Numbers], stages: Collection[int]) -> Iterator[tuple[Numbers, Numbers]]:
        """Yields pairs of nodes of which the first must end before the second: what copies wait for, and who waits for
        them. The first copies to the device wait until gradients are `ready`, on the `stages` that have updates."""
        keys, into = self._halves(INTO)
        out_keys, out_of = self._halves(OUT_OF)
        update_keys, updates = self._halves(UPDATE)
        yield _match(update_keys, keys, into), updates
        yield updates, _match(update_keys, out_keys, out_of)
        _, (stage, slot) = self._of(INTO, self.stage, self.name)
        order = np.lexsort((slot, stage))
        stage, slot, keys, into = stage[order], slot[order], keys[order], into[order]
        first = (np.diff(stage, prepend=-1) != 0) | (np.diff(slot, prepend=-1) != 0)
        left = np.where(first, -1, _match(np.roll(keys, 1), out_keys, out_of))
        yield left, into
        for place in np.flatnonzero(left < 0).tolist():
            if (own := int(stage[place])) in stages:
                yield ready[own], np.repeat(into[place], len(ready[own]))

    def _of(self, does: int, *columns: Numbers) -> tuple[Numbers, tuple[Numbers, ...]]:
        chosen = self.does == does
        return self.nodes[chosen], tuple(column[chosen] for column in columns)

    def _halves(self, does: int) -> tuple[Numbers, Numbers]:
        """Returns a number for each half of each stage, and the node that does something with it."""
        nodes, (stage, half) = self._of(does, self.stage, self.half)
        return stage * len(_numbers) + half, nodes


def _match(wanted: Numbers, keys: Numbers, nodes: Numbers) -> Numbers:
    """Returns the node that has each wanted key; -1 where none has."""
    if not len(keys):
        return np.full(len(wanted), -1, dtype=np.int64)
    order = np.argsort(keys, kind="stable")
    place = order[np.minimum(np.searchsorted(keys, wanted, sorter=order), len(keys) - 1)]
    return np.where(keys[place] == wanted, nodes[place], -1)


def is_one(op: Op) -> bool:
    """Whether an op without a micro-batch is one of a chunk."""
    copies = op.kind == "copy" and op.peer is None
    return bool(op.part) and (op.kind == "step" or (copies and _read("copy", op.part)[0] != UPDATE))


@cache
def _read(kind: str, part: str) -> tuple[int, int, int]:
    """Returns what an op of a chunk does, and the numbers of its half and of its chunk or slot. A copy that is of no
    chunk updates nothing, and would be `UPDATE`."""
    if kind == "step":
        return UPDATE, _numbers[part], chunk_number(part.partition("/")[0])
    half, direction = copy_direction(Op(0, "copy", None, part))
    return (INTO if direction == IN else OUT_OF, _numbers[half], ord(half[-1])) if half else (UPDATE, 0, 0)


def chunk_number(name: str) -> int:
    """Returns the number of a chunk's name."""
    return _numbers[name]


def numbered(ops: Sequence[Op]) -> tuple[Chunks, Numbers, list[Op]] | None:
    """Returns the ops of chunks by their places in `ops`, the template of each, and for each template an op that has
    it: those of a template take equal. None where an op comes twice."""
    read = np.array([_read(*one) for one in map(_PART, ops)], dtype=np.int64).reshape(-1, 3)
    does, half, name = read.T
    templates: defaultdict[tuple[object, ...], int] = defaultdict(count().__next__)
    keys = zip(does.tolist(), map(_PRICED, ops), strict=True)
    template = np.fromiter(map(templates.__getitem__, keys), dtype=np.int64, count=len(ops))
    _, first = np.unique(template, return_index=True)
    stage = np.fromiter((op.stage for op in ops), dtype=np.int64, count=len(ops))
    if len(np.unique((stage * len(_numbers) + half) * 3 + does)) < len(ops):
        return None
    return Chunks(np.arange(len(ops)), does, stage, half, name), template, [ops[place] for place in first.tolist()]
