"""The event loop of `harness.simulator.event_loop`, compiled by numba: the same results, to the last bit.

What that module says about nodes, resources, rules and instants holds here, too, as does what
`harness.simulator.fair_sharing` says about flows. Everything is a number: nodes, resources, and the places in
`Tables.needs`, one for each resource that a node needs, which stand in the lines in which nodes wait.

numba keeps the machine code next to this file (or in NUMBA_CACHE_DIR) until the file changes. It looks at no other one
when it decides whether to compile again: so functions that call one another are in one file with their constants, and
numbers of other modules are arguments.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from harness.schedule.policy import RULES
from harness.simulator.compiled.tables import Seconds, Tables
from harness.simulator.event_loop import SAME

TAKES, STARTS, ENDS, ARRIVED = range(4)
"""The rows of `times`, in seconds; a column for each node."""
MISSING, AFTER, NEEDS, BACKWARD, FLOW_OF, IS_URGENT, IS_FORWARD = range(7)
"""The rows of `nodes`: for how many nodes each one waits, and what `Tables` says. What follows node k is
`after[nodes[AFTER, k] : nodes[AFTER, k + 1]]`, and what it needs are places likewise."""
FLOW = np.dtype(
    [(name, np.float64) for name in ("amount", "cap", "left", "rate", "share")]
    + [(name, np.int64) for name in ("node", "uses_at", "grown")]
)
"""A flow, of which `left` bytes are left at `rate`. It is `grown` when its rate is known."""
PLACE = np.dtype([(name, np.int64) for name in ("resource", "owner", "next")])
"""A place in the lines: its node, the resource for which that waits, and the place after it in the same line."""
RESOURCE = np.dtype(
    [(name, np.int64) for name in ("rule", "previous")]
    + [("first", np.int64, 3), ("last", np.int64, 3), ("busy", np.bool_), ("picking", np.bool_)]
)
"""A resource that one node at a time has, the node that a rule picked last, and its three lines: first and last
place."""
EVENT = np.dtype([("at_s", np.float64), ("node", np.int64)])
USE = np.dtype([("shared", np.int64), ("times", np.float64)])
SHARED = np.dtype([(name, np.float64) for name in ("capacity", "alone", "room", "crossing")])
"""A resource that flows share; `room` is what is left of it while rates are computed."""
NO_RULE, FIFO, FORWARD_FIRST, BACKWARD_FIRST, ALTERNATE = range(-1, 4)
CODES = {"fifo": FIFO, "forward_first": FORWARD_FIRST, "backward_first": BACKWARD_FIRST, "alternate": ALTERNATE}
URGENT, FORWARD, OTHER = range(3)
"""The lines: urgent nodes, forward tasks, other tasks."""
PICKING, FLOWING, ENDED, READY, CHANGED, EVENTS, STALE = range(7)
"""What `count` counts: the entries of each of the lists, and events. `STALE` says that flows have come or gone since
rates were computed. The lists are resources with a rule that changed at this instant, flows in progress, the oldest
first, and nodes and resources that one round of the loop deals with."""


def execute(tables: Tables) -> tuple[Seconds, Seconds]:
    """Returns when each node starts and ends; one that never ran ends at -1."""
    count = len(tables.seconds)
    times = np.zeros((ARRIVED + 1, count))
    times[TAKES], times[ENDS] = tables.seconds, -1.0
    nodes = np.zeros((IS_FORWARD + 1, count + 1), dtype=np.int32)
    nodes[AFTER], nodes[NEEDS] = tables.after_at, tables.needs_at
    rows = (MISSING, tables.before), (BACKWARD, tables.backward), (FLOW_OF, tables.flow)
    for row, values in (*rows, (IS_URGENT, tables.urgent), (IS_FORWARD, tables.forward)):
        nodes[row, :count] = values
    flows = _filled(FLOW, len(tables.uses_at), amount=tables.amount, cap=tables.cap, uses_at=tables.uses_at)
    flows["node"][:-1] = np.flatnonzero(tables.flow >= 0)
    places = _filled(PLACE, len(tables.needs), resource=tables.needs, owner=tables.owner)
    places["next"] = -1
    codes = np.array([CODES.get(rule, NO_RULE) for rule in RULES] + [NO_RULE])  # the last one is that of -1
    resources = _filled(RESOURCE, len(tables.rules), rule=codes[tables.rules])
    resources["previous"] = resources["first"] = resources["last"] = -1
    uses = _filled(USE, len(tables.uses), shared=tables.uses, times=tables.times)
    shared = _filled(SHARED, len(tables.capacity), capacity=tables.capacity, alone=tables.alone)
    events = np.zeros(count + 1, dtype=EVENT)
    lists = np.zeros((CHANGED + 1, max(count, 2 * len(places), len(resources))), dtype=np.int64)
    counts, flows_s = np.zeros(STALE + 1, dtype=np.int64), np.zeros(1)
    _run(times, nodes, tables.after, places, resources, events, flows, uses, shared, lists, counts, flows_s, SAME)
    return times[STARTS], times[ENDS]


def _filled(dtype: np.dtype, size: int, **columns: np.ndarray) -> np.ndarray:
    found = np.zeros(size, dtype=dtype)
    for name, column in columns.items():
        found[name][: len(column)] = column
    return found


@njit(cache=True)
def _run(times, nodes, after, places, resources, events, flows, uses, shared, lists, count, flows_s, same):  # type: ignore[no-untyped-def]
    now = 0.0
    for node in range(times.shape[1]):
        if nodes[MISSING, node] == 0:
            _append(lists, count, READY, node)
    _begin(times, nodes, places, resources, events, lists, count, now)
    while count[EVENTS] or count[FLOWING] or count[PICKING]:
        flow_s, flow = _next_flow(flows, uses, shared, lists, count, flows_s) if count[FLOWING] else (np.inf, -1)
        event_s = events[0].at_s if count[EVENTS] else np.inf
        if count[PICKING] and min(flow_s, event_s) > now * same:
            _pick_all(times, nodes, places, resources, events, lists, count, now)
            continue
        count[ENDED] = 0
        if count[EVENTS] and event_s <= flow_s:
            now = event_s
            while count[EVENTS] and events[0].at_s <= now * same:
                node = _pop(events, count)
                flow = nodes[FLOW_OF, node]
                if flow >= 0 and flows[flow].amount > 0:
                    _add_flow(flows, lists, count, flows_s, flow, now)
                else:
                    _append(lists, count, ENDED, node)
        else:
            now = flow_s
            _end_flow(flows, lists, count, flows_s, flow, now)
            _append(lists, count, ENDED, flows[flow].node)
        _end(times, nodes, after, places, resources, events, lists, count, now)


@njit(cache=True)
def _append(lists, count, which, value):  # type: ignore[no-untyped-def]
    lists[which, count[which]] = value
    count[which] += 1


@njit(cache=True)
def _push(events, count, at_s, node):  # type: ignore[no-untyped-def]
    place = count[EVENTS]
    count[EVENTS] += 1
    while place > 0:
        above = (place - 1) >> 1
        if events[above].at_s < at_s or (events[above].at_s == at_s and events[above].node < node):
            break
        events[place].at_s, events[place].node = events[above].at_s, events[above].node
        place = above
    events[place].at_s, events[place].node = at_s, node


@njit(cache=True)
def _pop(events, count):  # type: ignore[no-untyped-def]
    """Removes the first event and returns its node; of two at one moment that of the smaller number is the first."""
    found = events[0].node
    count[EVENTS] -= 1
    size = count[EVENTS]
    at_s, node = events[size].at_s, events[size].node
    place, below = 0, 1
    while below < size:
        left_s, right_s = events[below].at_s, events[below + 1].at_s
        right_is_first = right_s < left_s or (right_s == left_s and events[below + 1].node < events[below].node)
        if below + 1 < size and right_is_first:
            below += 1
        if at_s < events[below].at_s or (at_s == events[below].at_s and node < events[below].node):
            break
        events[place].at_s, events[place].node = events[below].at_s, events[below].node
        place, below = below, 2 * below + 1
    events[place].at_s, events[place].node = at_s, node
    return found


@njit(cache=True, inline="always")
def _end(times, nodes, after, places, resources, events, lists, count, now):  # type: ignore[no-untyped-def]
    count[READY] = count[CHANGED] = 0
    for entry in range(count[ENDED]):
        node = lists[ENDED, entry]
        times[ENDS, node] = now
        for place in range(nodes[NEEDS, node], nodes[NEEDS, node + 1]):
            resource = places[place].resource
            resources[resource].busy = False
            _append(lists, count, CHANGED, resource)
        for edge in range(nodes[AFTER, node], nodes[AFTER, node + 1]):
            following = after[edge]
            nodes[MISSING, following] -= 1
            if nodes[MISSING, following] == 0:
                _append(lists, count, READY, following)
    _begin(times, nodes, places, resources, events, lists, count, now)


@njit(cache=True, inline="always")
def _begin(times, nodes, places, resources, events, lists, count, now):  # type: ignore[no-untyped-def]
    for entry in range(count[READY]):
        node = lists[READY, entry]
        begin, end = nodes[NEEDS, node], nodes[NEEDS, node + 1]
        if begin < end and not _at_once(nodes, places, resources, node):
            _wait(times, nodes, places, resources, node, now)
            for place in range(begin, end):
                _append(lists, count, CHANGED, places[place].resource)
        else:
            _start(times, events, count, node, now)
    for entry in range(count[CHANGED]):
        number = lists[CHANGED, entry]
        resource = resources[number]
        if resource.rule == NO_RULE:
            _serve(times, nodes, places, resources, events, count, number, now)
        elif not resource.picking:
            resource.picking = True
            _append(lists, count, PICKING, number)


@njit(cache=True)
def _start(times, events, count, node, now):  # type: ignore[no-untyped-def]
    times[STARTS, node] = now
    _push(events, count, now + times[TAKES, node], node)


@njit(cache=True, inline="always")
def _pick_all(times, nodes, places, resources, events, lists, count, now):  # type: ignore[no-untyped-def]
    for entry in range(count[PICKING]):
        resource = lists[PICKING, entry]
        resources[resource].picking = False
        _serve(times, nodes, places, resources, events, count, resource, now)
    count[PICKING] = 0


@njit(cache=True)
def _at_once(nodes, places, resources, node):  # type: ignore[no-untyped-def]
    begin, end = nodes[NEEDS, node], nodes[NEEDS, node + 1]
    resource = resources[places[begin].resource]
    if end - begin > 1 or not nodes[IS_URGENT, node] or resource.busy or resource.first[URGENT] >= 0:
        return False
    resource.busy = True
    return True


@njit(cache=True)
def _line(nodes, node):  # type: ignore[no-untyped-def]
    if nodes[IS_URGENT, node]:
        return URGENT
    return FORWARD if nodes[IS_FORWARD, node] else OTHER


@njit(cache=True)
def _wait(times, nodes, places, resources, node, now):  # type: ignore[no-untyped-def]
    times[ARRIVED, node] = now
    line = _line(nodes, node)
    for place in range(nodes[NEEDS, node], nodes[NEEDS, node + 1]):
        resource = resources[places[place].resource]
        if resource.first[line] < 0:
            resource.first[line] = place
        else:
            places[resource.last[line]].next = place
        resource.last[line] = place


@njit(cache=True)
def _heads(times, nodes, places, resources, number):  # type: ignore[no-untyped-def]
    """Returns the first urgent node alone, else the first task of each kind, in order of arrival; -1 for none."""
    resource = resources[number]
    urgent, forward, other = resource.first[URGENT], resource.first[FORWARD], resource.first[OTHER]
    if urgent >= 0:
        return places[urgent].owner, -1
    if forward < 0 or other < 0:
        only = max(forward, other)
        return (places[only].owner if only >= 0 else -1), -1
    forward, other = places[forward].owner, places[other].owner
    if times[ARRIVED, forward] < times[ARRIVED, other]:  # at one moment a forward task comes second
        return forward, other
    return other, forward


@njit(cache=True, inline="always")
def _serve(times, nodes, places, resources, events, count, number, now):  # type: ignore[no-untyped-def]
    node, second = _heads(times, nodes, places, resources, number)
    if node < 0 or resources[number].busy:
        return
    if second >= 0 and _second_is_next(nodes, resources, number, node, second):
        node = second
    begin, end = nodes[NEEDS, node], nodes[NEEDS, node + 1]
    if end - begin > 1:
        for place in range(begin, end):
            needed = places[place].resource
            if resources[needed].busy or _heads(times, nodes, places, resources, needed)[0] != node:
                return
    line = _line(nodes, node)
    for place in range(begin, end):
        needed = resources[places[place].resource]
        needed.first[line] = places[place].next
        needed.busy = True
    resources[number].previous = node
    _start(times, events, count, node, now)


@njit(cache=True)
def _second_is_next(nodes, resources, number, first, second):  # type: ignore[no-untyped-def]
    """Returns whether a rule picks the second of two tasks (`harness.schedule.policy.pick`)."""
    rule, previous = resources[number].rule, resources[number].previous
    if rule == NO_RULE:
        return False
    if previous >= 0 and (nodes[BACKWARD, previous] == first or nodes[BACKWARD, previous] == second):
        return nodes[BACKWARD, previous] == second
    if rule == FIFO:
        return False
    prefer_forward = rule == FORWARD_FIRST or (rule == ALTERNATE and previous >= 0 and not nodes[IS_FORWARD, previous])
    return nodes[IS_FORWARD, first] != prefer_forward and nodes[IS_FORWARD, second] == prefer_forward


@njit(cache=True)
def _add_flow(flows, lists, count, flows_s, flow, now):  # type: ignore[no-untyped-def]
    _advance(flows, lists, count, flows_s, now)
    _append(lists, count, FLOWING, flow)
    flows[flow].left, flows[flow].rate = flows[flow].amount, 0.0
    count[STALE] = 1


@njit(cache=True)
def _end_flow(flows, lists, count, flows_s, flow, now):  # type: ignore[no-untyped-def]
    _advance(flows, lists, count, flows_s, now)
    flowing, kept = lists[FLOWING], 0
    for entry in range(count[FLOWING]):
        if flowing[entry] != flow:
            flowing[kept] = flowing[entry]
            kept += 1
    count[FLOWING], count[STALE] = kept, 1


@njit(cache=True)
def _advance(flows, lists, count, flows_s, now):  # type: ignore[no-untyped-def]
    for flow in lists[FLOWING, : count[FLOWING]]:
        one = flows[flow]
        one.left = max(0.0, one.left - one.rate * (now - flows_s[0]))
    flows_s[0] = now


@njit(cache=True)
def _next_flow(flows, uses, shared, lists, count, flows_s):  # type: ignore[no-untyped-def]
    """Returns when the next flow ends, and its number; of two that end at once that of the smaller node is the
    next."""
    if count[STALE]:
        _fair_rates(flows, uses, shared, lists[FLOWING, : count[FLOWING]])
        count[STALE] = 0
    next_s, found = np.inf, -1
    for flow in lists[FLOWING, : count[FLOWING]]:
        end_s = flows_s[0] + flows[flow].left / flows[flow].rate
        if end_s < next_s or (end_s == next_s and flows[flow].node < flows[found].node):
            next_s, found = end_s, flow
    return next_s, found


@njit(cache=True)
def _cross(flows, uses, shared, flowing):  # type: ignore[no-untyped-def]
    """Computes how often the flows that have no rate yet cross each resource."""
    for number in range(len(shared)):
        shared[number].crossing = 0.0
    for flow in flowing:
        if not flows[flow].grown:
            for use in range(flows[flow].uses_at, flows[flow + 1].uses_at):
                shared[uses[use].shared].crossing += uses[use].times


@njit(cache=True)
def _fair_rates(flows, uses, shared, flowing):  # type: ignore[no-untyped-def]
    for flow in flowing:
        flows[flow].grown = 0
    _cross(flows, uses, shared, flowing)
    for number in range(len(shared)):
        one = shared[number]
        one.room = one.alone if one.alone > 0 and one.crossing == 1 else one.capacity
    growing = len(flowing)
    while growing:
        rate = np.inf
        for flow in flowing:
            one = flows[flow]
            if not one.grown:
                one.share = one.cap
                for use in range(one.uses_at, flows[flow + 1].uses_at):
                    crossed = shared[uses[use].shared]
                    one.share = min(one.share, crossed.room / crossed.crossing)
                rate = min(rate, one.share)
        for flow in flowing:
            one = flows[flow]
            if not one.grown and one.share <= rate:
                one.rate, one.grown = rate, 1
                growing -= 1
                for use in range(one.uses_at, flows[flow + 1].uses_at):
                    crossed = shared[uses[use].shared]
                    crossed.room = max(0.0, crossed.room - rate * uses[use].times)
        _cross(flows, uses, shared, flowing)
