"""The dependencies of `harness.schedule.dependency_graph` and the orders of queues, on columns.

A rule says which rows of the table wait for which: that 1F waits for 0F and 1copy<0 holds for all micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from harness.core.op import Op
from harness.schedule import Schedule
from harness.schedule.dependency_graph import DATA, REDUCING, split_part
from harness.simulator.compiled.chunks import Chunk, chunk_number
from harness.simulator.compiled.columns import NO_ROW, Columns
from harness.simulator.compiled.tables import Numbers

EMPTY = np.zeros(0, dtype=np.int64)
NODE_BITS = 31
"""Two nodes fit into one number, which is what is sorted."""


def has_edges(columns: Columns) -> bool:
    """Whether this module knows all dependencies of a schedule: those of updates within a step, and of copies from and
    to the host's memory that are of no chunk, it does not."""
    for op, identity in zip(columns.templates, columns.identity_of, strict=True):
        if identity == NO_ROW:
            continue
        if op.kind == "step" and (columns.table[identity, 1:] >= 0).any():
            return False
        if op.kind == "copy" and op.peer is None:
            return False
    return True


def _chunk(op: Op) -> Chunk:
    """Returns the chunk of an all-reduce over replicas; one without any updates where it has none."""
    return op.stage, chunk_number(op.part.partition("/")[2])


@dataclass
class Edges:
    """Collects the edges between nodes. `count` is that of nodes, which include the barrier, if there is one."""

    schedule: Schedule
    columns: Columns
    count: int = 0
    earlier: list[Numbers] = field(default_factory=lambda: [EMPTY])
    later: list[Numbers] = field(default_factory=lambda: [EMPTY])

    def draw(self) -> tuple[Numbers, Numbers, Numbers]:
        """Returns how many nodes each one waits for, where those that follow it begin, and these, in the order in which
        the reference lists them: dependencies by their number, then what follows in each queue."""
        self.count = len(self.columns.template)
        self.tasks_and_messages()
        self.limit()
        if self.schedule.loss == "gathered":
            self.gather()
        self.reductions()
        return self.listed(np.concatenate(self.earlier), np.concatenate(self.later))

    def add(self, earlier: Numbers, later: Numbers) -> None:
        """Adds the edges between nodes; -1 is none."""
        there = (earlier >= 0) & (later >= 0)
        self.earlier.append(earlier[there])
        self.later.append(later[there])

    def all_before(self, earlier: Numbers, later: Numbers) -> None:
        """Adds an edge from each of the earlier nodes to each of the later ones."""
        self.earlier.append(np.tile(earlier, len(later)))
        self.later.append(np.repeat(later, len(earlier)))

    def tasks_and_messages(self) -> None:
        columns, row = self.columns, self.columns.identity
        messages, arriving = self.arrivals()
        ruled = self.ruled()
        pairs: list[tuple[int, int]] = []
        arrive: list[tuple[int, int]] = []
        for op, own in self.each_identity():
            j, kind, peer = op.stage, op.kind, op.peer
            if kind == "F":
                tasks = [row("F", j - 1, None)] if j else []
            elif kind == "B":
                tasks = [row("F", j, None), row("R", j, None), row("B", j + 1, None)]
            elif kind == "R":
                tasks = [row("F", j, None), *([row("B", j + 1, None)] if j in ruled else [])]
            elif kind == "W":
                tasks = [row("B", j, None)]
            elif kind == "copy" and peer is not None:
                tasks = [row("F" if peer < j else "B", peer, None)]
            elif kind == "send" and peer is not None:
                tasks = [row("F" if peer > j else "B", j, None)]
            elif kind == "recv":
                tasks = [row("send", peer, None, op.part, j)]
            else:
                tasks = []
            pairs += [(task, own) for task in tasks if task >= 0]
            if kind in ("F", "B") or (kind == "R" and j in ruled):
                arrive += [(message, own) for message in messages.get((j, kind == "F"), [])]
        for table, found in ((columns.table, pairs), (arriving, arrive)):
            if found:
                before, after = np.array(found).T
                self.add(table[before], columns.table[after])

    def each_identity(self) -> list[tuple[Op, int]]:
        """Returns each row of the table with an op that stands for it: its first one."""
        first: dict[int, Op] = {}
        for op, identity in zip(self.columns.templates, self.columns.identity_of, strict=True):
            if identity != NO_ROW:
                first.setdefault(identity, op)
        return [(op, identity) for identity, op in first.items()]

    def arrivals(self) -> tuple[dict[tuple[int, bool], list[int]], Numbers]:
        """Maps (stage, forward) to the rows of messages that its tasks wait for, in a table without those sends that a
        receive stands for."""
        rows: dict[tuple[int, bool], list[int]] = {}
        table = self.columns.table
        for op, own in self.each_identity():
            if op.peer is None:
                continue
            if op.kind in ("copy", "recv"):
                rows.setdefault((op.stage, op.peer < op.stage), []).append(own)
            elif op.kind == "send":
                rows.setdefault((op.peer, op.stage < op.peer), []).append(own)
                receive = self.columns.identity("recv", op.peer, None, op.part, op.stage)
                if receive >= 0:
                    table = table.copy() if table is self.columns.table else table
                    table[own, self.columns.table[receive] >= 0] = -1
        return rows, table

    def ruled(self) -> set[int]:
        """Returns the stages without a fixed order."""
        queues = (queue for queue in self.schedule.queues if queue.name == "compute" and queue.rule != "in_order")
        return {op.stage for queue in queues for op in queue.ops}

    def limit(self) -> None:
        limit, row = self.schedule.limit, self.columns.identity
        forward, backward = row("F", 0, None), row("B", 0, None)
        if limit is not None and forward >= 0 and backward >= 0:
            table, width = self.columns.table, self.columns.table.shape[1]
            begins = min(width, 1 + limit)
            self.add(table[backward, 1 : 1 + width - begins], table[forward, begins:])

    def gather(self) -> None:
        last, barrier = len(self.schedule.devices) - 1, np.array([self.count])
        self.count += 1
        self.all_before(self.columns.nodes([self.columns.identity("F", last, None)]), barrier)
        self.all_before(barrier, self.columns.nodes([self.columns.identity("B", last, None)]))

    def reductions(self) -> None:
        columns, row = self.columns, self.columns.identity
        stages = range(len(self.schedule.devices))
        both = {stage: (row("B", stage, None), row("W", stage, None)) for stage in stages}
        halves = {stage: [one for one in rows if one >= 0] for stage, rows in both.items()}
        complete = {stage: columns.nodes(rows) for stage, rows in halves.items()}
        if self.schedule.barrier:
            complete = self.with_all_stages(complete, halves)
        updates = columns.chunks.updates()
        of_chunk: dict[Chunk, list[Numbers]] = {}
        reduced: dict[int, list[Numbers]] = {stage: [EMPTY] for stage in stages}
        ties = []
        for op, own in self.each_identity():
            if op.kind != "collective" or split_part(op.part) not in REDUCING:
                continue
            nodes = columns.table[own]
            if split_part(op.part)[1] != DATA:
                ties += nodes[nodes >= 0].tolist()
            elif _chunk(op) in updates:
                of_chunk.setdefault(_chunk(op), []).append(nodes[nodes >= 0])
            else:
                self.all_before(complete[op.stage], nodes[:1][nodes[:1] >= 0])
                for half in halves[op.stage]:
                    self.add(columns.table[half, 1:], nodes[1:])
                reduced[op.stage].append(nodes[nodes >= 0])
        ready = self.with_ties(ties, complete, reduced)
        for (stage, _), sums in of_chunk.items():
            self.all_before(ready[stage], np.concatenate(sums))
        for op, own in self.each_identity():
            if op.kind == "step":
                self.all_before(ready[op.stage], columns.nodes([own]))
        for chunk, nodes in updates.items():
            self.all_before(np.concatenate(of_chunk.get(chunk, [ready[chunk[0]]])), nodes)
        if updates:
            for earlier, later in columns.chunks.copied(ready, {stage for stage, _ in updates}):
                self.add(earlier, later)

    def with_ties(
        self, ties: list[int], complete: dict[int, Numbers], reduced: dict[int, list[Numbers]]
    ) -> dict[int, Numbers]:
        """Adds what all-reduces over copies of a parameter wait for: the gradients of all stages on their devices, and
        the sums of these over replicas, but those that are later in their queues. Returns after which nodes the
        gradients of each stage are complete."""
        sums = {stage: np.concatenate(nodes) for stage, nodes in reduced.items()}
        ready = {stage: [complete[stage], sums[stage]] for stage in complete}
        for tie in ties:
            queues = [
                (queue, int(np.argmax(nodes == tie)), nodes)
                for queue, nodes in zip(self.schedule.queues, self.columns.queues, strict=True)
                if (nodes == tie).any()
            ]
            ordered = [
                nodes[at:] for queue, at, nodes in queues if queue.name != "network" and queue.rule == "in_order"
            ]
            later, devices = np.concatenate([EMPTY, *ordered]), {queue.device for queue, _, _ in queues}
            for stage in (stage for stage, device in enumerate(self.schedule.devices) if device in devices):
                earlier = sums[stage][~np.isin(sums[stage], later)]
                self.all_before(np.concatenate([complete[stage], earlier]), np.array([tie]))
                ready[stage].append(np.array([tie]))
        return {stage: np.concatenate(nodes) for stage, nodes in ready.items()}

    def with_all_stages(self, complete: dict[int, Numbers], halves: dict[int, list[int]]) -> dict[int, Numbers]:
        """Adds the last gradients of all stages to the complete ones of each stage."""
        table = self.columns.table
        used = (table[[row for rows in halves.values() for row in rows], 1:] >= 0).any(axis=0)
        last = 1 + int(np.flatnonzero(used).max(initial=0))
        ends = {stage: table[rows, last] for stage, rows in halves.items() if rows and last < table.shape[1]}
        found = dict(complete)
        for stage in ends:
            all_nodes = [complete[stage], *(nodes for other, nodes in ends.items() if other != stage)]
            found[stage] = np.concatenate([nodes[nodes >= 0] for nodes in all_nodes])
        return found

    def chains(self) -> list[Numbers]:
        """Returns the nodes that run one after the other, of each queue with an order, and of each communicator in the
        network."""
        found = []
        communicators = [split_part(op.part)[1] if op.kind == "collective" else None for op in self.columns.templates]
        numbers = {name: place for place, name in enumerate(dict.fromkeys(communicators))}
        own = np.array([numbers[name] for name in communicators])
        for queue, nodes in zip(self.schedule.queues, self.columns.queues, strict=True):
            if queue.name != "network":
                found += [nodes] if queue.rule == "in_order" else []
                continue
            of_nodes = own[self.columns.template[nodes]]
            found += [nodes[of_nodes == place] for name, place in numbers.items() if name is not None]
        return found

    def listed(self, earlier: Numbers, later: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        both = np.sort((earlier << NODE_BITS) | later)
        earlier, later = both >> NODE_BITS, both & ((1 << NODE_BITS) - 1)
        of_graph = np.bincount(earlier, minlength=self.count)
        chains = [EMPTY, *self.chains()]
        following = np.concatenate([chain[1:] for chain in chains])
        of_queues = np.bincount(np.concatenate([chain[:-1] for chain in chains]), minlength=self.count)
        before = np.bincount(later, minlength=self.count) + np.bincount(following, minlength=self.count)
        at = np.zeros(self.count + 1, dtype=np.int64)
        np.cumsum(of_graph + of_queues, out=at[1:])
        after = np.empty(at[-1], dtype=np.int64)
        after[np.arange(len(earlier)) + (np.cumsum(of_queues) - of_queues)[earlier]] = later
        free = at[:-1] + of_graph  # the next place of each node
        for chain in chains:
            after[free[chain[:-1]]] = chain[1:]
            free[chain[:-1]] += 1
        return before, at, after
