"""The ops of a schedule as columns: what would be a dictionary of tuples is a table of numbers.

Ops that differ in their micro-batch alone have the same template. Ops that are one node (`harness.schedule.
dependency_graph`) have the same identity and micro-batch, and `table` says which node that is:

    table          no micro-batch   0    1    2            templates and identities are few: what depends on these
    0F                   -          0    2    4            is computed once for each, in Python; the rest is
    1F                   -          8    9   11            arithmetic on columns
    1copy<0              -         16   17   18
    0step               30          -    -    -

Updates in chunks, and copies of the optimizer's state, are in no row (`harness.simulator.compiled.chunks`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress, count
from operator import attrgetter

import numpy as np

from harness.core.op import Op
from harness.schedule import Schedule
from harness.schedule.dependency_graph import Key, node_key, sender
from harness.simulator.compiled import chunks
from harness.simulator.compiled.chunks import Chunks
from harness.simulator.compiled.tables import Numbers

SPARSE = 8
"""Largest number of templates, and of places in `table`, for each op, of which there may be many more or fewer."""
LARGEST = 2**31
"""Micro-batches beyond it are none that a table has."""
NO_ROW = -1
_TEMPLATE = attrgetter("kind", "stage", "peer", "part", "bytes", "seconds")
_OF_COLLECTIVES = attrgetter("buffers", "overlaps")
_MICRO_BATCH = attrgetter("micro_batch")


@dataclass(frozen=True)
class Columns:
    """`queues` are the nodes of each queue. Of each node: its `template`, and its `column` in `table`, which is one
    more than its micro-batch, 0 if it has none. `templates` are ops that stand for all others with the same one, and
    `identity_of` are the identities of these, `NO_ROW` of those that are in `chunks`."""

    queues: list[Numbers]
    template: Numbers
    column: Numbers
    table: Numbers
    identities: dict[Key, int]
    templates: list[Op]
    identity_of: list[int]
    chunks: Chunks

    def identity(self, *key: object) -> int:
        """Returns the row in `table` of a key as of `node_key`, without its micro-batch; -1 where there is none."""
        return self.identities.get(key, -1)

    def nodes(self, identities: list[int]) -> Numbers:
        """Returns all nodes of some rows."""
        rows = self.table[[one for one in identities if one >= 0]].ravel()
        return rows[rows >= 0]


def columns(schedule: Schedule, rendezvous: bool) -> Columns | None:
    """Returns the columns of a schedule; None where it has too many templates, or an op twice in a queue."""
    entries = list(chain.from_iterable(queue.ops for queue in schedule.queues))
    size = len(entries)
    batch = np.array(list(map(_MICRO_BATCH, entries)), dtype=np.float64)  # nan where there is none
    column = np.where(np.isnan(batch), 0, batch + 1).astype(np.int64)
    parts = np.array([k for k in np.flatnonzero(np.isnan(batch)).tolist() if chunks.is_one(entries[k])], dtype=np.int64)
    in_rows = np.ones(size, dtype=np.bool_)
    in_rows[parts] = False
    of_chunks = chunks.numbered([entries[place] for place in parts.tolist()])
    if not size or ((batch < 0) | (batch > LARGEST)).any() or of_chunks is None:
        return None
    template = np.empty(size, dtype=np.int64)
    template[in_rows], templates = _templates(list(compress(entries, in_rows.tolist())))
    keys = [node_key(replace(op, micro_batch=None), rendezvous) for op in templates]
    identities = {key: place for place, key in enumerate(dict.fromkeys(keys))}
    identity_of, width = [identities[key] for key in keys], int(column.max()) + 1
    found, template[parts], priced = of_chunks
    template[parts] += len(templates)
    identity_of += [NO_ROW] * len(priced)
    if rendezvous:  # a node is the send, also where its receive is listed first
        templates = [sender(op) if op.kind == "recv" else op for op in templates]
    templates += priced
    rows = len(identities) * width
    if SPARSE * len(templates) > size + 1000 or rows > SPARSE * (size + 1000):
        return None
    place = np.array(identity_of)[template] * width + column
    place[parts] = rows + np.arange(len(parts))
    first = _first(place, rows + len(parts))
    own = first[place] == np.arange(size)
    number = np.cumsum(own) - 1
    ends = np.cumsum([len(queue.ops) for queue in schedule.queues])[:-1]
    queues = np.split(number[first[place]], ends)
    if not own.all() and any(len(np.unique(nodes)) < len(nodes) for nodes in queues):
        return None
    table = np.where(first[:rows] >= 0, number[first[:rows]], -1).reshape(len(identities), width)
    found = replace(found, nodes=number[parts])
    return Columns(queues, template[own], column[own], table, identities, templates, identity_of, found)


def _templates(entries: Sequence[Op]) -> tuple[Numbers, list[Op]]:
    """Returns the template of each op, and for each one the first op that has it."""
    numbers: defaultdict[tuple[object, ...], int] = defaultdict(count().__next__)
    template = np.fromiter(map(numbers.__getitem__, map(_TEMPLATE, entries)), dtype=np.int64, count=len(entries))
    collectives = [number for key, number in numbers.items() if key[0] == "collective"]
    for place in np.flatnonzero(np.isin(template, collectives)).tolist() if collectives else ():
        op = entries[place]
        template[place] = numbers[template[place], *_OF_COLLECTIVES(op)]
    first = _first(template, len(numbers))
    used = first >= 0
    return (np.cumsum(used) - 1)[template], [entries[place] for place in first[used]]


def _first(values: Numbers, size: int) -> Numbers:
    """Returns where each of the numbers below `size` comes first in `values`; -1 for one that does not."""
    found = np.full(size, -1, dtype=np.int64)
    found[values[::-1]] = np.arange(len(values) - 1, -1, -1)
    return found
