"""The event loop against a slow simulation that looks at every instant at every op."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from harness.core.cluster import Cluster, Link
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import LayerProfile, ModelProfile, Skip
from harness.core.plan import Plan
from harness.schedule import Schedule
from harness.schedule.builders.gpipe import gpipe
from harness.schedule.builders.one_f_one_b import one_f_one_b
from harness.schedule.transfers import plan_transfers
from harness.simulator import simulate
from tests.support.violations import violations

UNIT = 0.25
"""All durations are multiples of it, so that sums are exact."""


def brute_force(schedule: Schedule, forward: list[int], backward: list[int], latency: int) -> dict[str, float]:
    """When each op ends. A message takes `latency` on the link of its pair and direction, first come first served."""
    cost = {"F": forward, "R": forward, "B": backward, "step": [0] * len(forward)}
    before, homes = schedule.dependencies(), {op: [] for op in schedule.ops()}
    for queue in schedule.queues:
        for op in queue.ops:
            homes[op].append(queue)
    done: dict = {}
    running: dict = {}
    waiting: list = []
    now = 0.0
    while len(done) < len(homes):
        moved = True
        while moved:  # everything that can end or start at this instant
            moved = False
            for op, end in sorted(running.items(), key=lambda item: str(item[0])):
                if end == now:
                    done[op] = now
                    del running[op]
                    moved = True
            for op in homes:
                if op in done or op in running or op in waiting or not before[op] <= done.keys():
                    continue
                turn = all(
                    queue.name == "network" or all(earlier in done for earlier in queue.ops[: queue.ops.index(op)])
                    for queue in homes[op]
                )
                if turn:
                    waiting.append(op)
            for op in list(waiting):
                link = (op.peer, op.stage) if op.kind == "copy" else None
                if link and any(o.kind == "copy" and (o.peer, o.stage) == link for o in running):
                    continue
                waiting.remove(op)
                running[op] = now + (latency if link else cost[op.kind][op.stage]) * UNIT
                moved = True
        now += UNIT
    return {str(op): end for op, end in done.items()}


times = st.integers(1, 4).flatmap(
    lambda n: st.tuples(*[st.lists(st.integers(0, 5), min_size=n, max_size=n) for _ in range(2)])
)


@given(
    times,
    st.integers(1, 4),
    st.integers(0, 4),
    st.sampled_from(["gpipe", "1f1b"]),
    st.sampled_from(["always", "except_last", "never"]),
    st.tuples(*[st.booleans()] * 4),
)
@example(([0, 0, 0], [0, 0, 0]), 3, 1, "1f1b", "never", (False, False, False, False))  # messages wait for one link
def test_every_op_ends_when_the_slow_simulation_says(times, m, latency, name, recompute, switches):
    long_skip, portals, barrier, streams = switches
    forward, backward = times
    n = len(forward)
    layers = tuple(
        LayerProfile(f"l{j}", forward_s=f * UNIT, backward_s=b * UNIT, output_bytes=1)
        for j, (f, b) in enumerate(zip(forward, backward, strict=True))
    )
    skips = (Skip(0, n - 1, 1, "long"),) if n > 2 and long_skip else ()
    profile, plan = ModelProfile(layers, skips=skips), Plan.contiguous([1] * n, m)
    transfers = plan_transfers(plan, profile, portals)
    if name == "gpipe":
        schedule = gpipe(m, range(n), transfers, recompute, barrier, streams)
    else:
        schedule = one_f_one_b(m, list(range(n)), transfers, recompute)
    done = simulate(schedule, plan, profile, Cluster("t", 1, n, intra=Link(0, latency * UNIT)), MemoryModel())
    assert {span.op: span.end_s for span in done.trace.spans} == brute_force(schedule, forward, backward, latency)
    assert violations(schedule, done.trace) == []
    assert done.figures["utilization"] == [
        sum(
            s.end_s - s.start_s
            for s in done.trace.spans
            if (s.device, s.queue) == (d, "compute") and "copy" not in s.op
        )
        / (done.trace.window_s or 1)
        for d in range(n)
    ]
