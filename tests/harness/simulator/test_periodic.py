"""A pattern that is simulated keeps its period, its order and its memory."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.core.cluster import Cluster, Device, Link
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.op import Op
from harness.core.pattern import Pattern
from harness.core.plan import Mesh, Plan, Stage
from harness.schedule.builders.periodic import unrolled
from harness.schedule.pattern_validity import replay_pattern
from harness.schedule.validate import validation_errors
from harness.simulator import Deadlock, Simulation, simulate
from tests.support.patterns import Chain, pattern_of, patterns
from tests.support.violations import violations
from tests.tiers import examples

M, FROM, TO = 90, 40, 70
"""Micro-batches of a run, and those between which it is measured: far from both of its ends."""
CROSSED = Chain((0, 1, 0), (1, 1, 3), (1, 2, 2), (0, 1, 4))
"""The first device has the last stage, too; messages take 10 slots of a period, the first device's tasks 7."""


def run(chain: Chain, pattern: Pattern, speed: float = 1.0, message_order: bool = True, m: int = M) -> Simulation:
    """On links that take a slot for each byte, or `speed` times fewer."""
    layers = (LayerProfile(forward_s=f, backward_s=b) for f, b in zip(chain.forward, chain.backward, strict=True))
    plan = Plan(Mesh(), tuple(Stage(j, j, device) for j, device in enumerate(chain.devices)), m)
    cluster = Cluster(devices_per_node=max(chain.devices) + 1, intra=Link(0, 1 / speed, chain.duplex))
    schedule = unrolled(pattern, m, chain.devices, [])
    if not message_order:
        schedule = replace(schedule, message_order=())
    assert validation_errors(schedule, plan) == []
    return simulate(schedule, plan, ModelProfile(tuple(layers)), cluster, MemoryModel())


def period_s(done: Simulation) -> float:
    """The longest mean time between equal ops of micro-batches that follow one another."""
    start = {span.op: span.start_s for span in done.trace.spans}
    ops = [op for op in done.schedule.ops() if op.micro_batch == FROM]
    return max((start[str(replace(op, micro_batch=TO))] - start[str(op)]) / (TO - FROM) for op in ops)


def stored(order: list[Op]) -> dict[int, int]:
    """For each stage the most micro-batches between their F and B."""
    now: dict[int, int] = defaultdict(int)
    most: dict[int, int] = defaultdict(int)
    for op in order:
        if op.kind in ("F", "B"):
            now[op.stage] += 1 if op.kind == "F" else -1
            most[op.stage] = max(most[op.stage], now[op.stage])
    return dict(most)


@settings(max_examples=examples(40))
@given(patterns(), st.sampled_from((1.0, 1.25, 2.0, 50.0)))
def test_a_pattern_keeps_its_period_and_its_order_on_links_that_are_as_fast_or_faster(
    case: tuple[Chain, Pattern], speed: float
) -> None:
    chain, pattern = case
    done = run(chain, pattern, speed)
    reached = period_s(done)
    assert reached <= pattern.period_s * (1 + 1e-6)
    busiest = max(slots for place, slots in chain.loads().items() if len(place) == 1 or speed == 1)
    assert reached >= busiest * (1 - 1e-6)  # so where the pattern wastes nothing, it is the pattern's
    assert violations(done.schedule, done.trace, 1e-9) == []
    planned = sorted(
        (r for r in replay_pattern(pattern, chain.durations()).ran if len(r.place) == 1), key=lambda r: r.start_s
    )
    for device in set(chain.devices):
        queue = [span.op for span in done.trace.queues()[device, "compute"] if "step" not in span.op]
        order = [r.op for r in planned if r.place == (device,)]
        until = min(len(order) // 2, len(queue) // 2)  # before either comes to its end
        assert queue[:until] == list(map(str, order[:until]))
        for stage, count in stored(list(map(Op.parse, queue))).items():
            assert count <= stored(order)[stage]


def test_without_its_order_on_the_link_a_pattern_may_take_longer() -> None:
    """So the line matters: a message that is early takes the link from one that is due."""
    pattern = pattern_of(CROSSED, [0] * 12)
    assert pattern.period_s == 10
    assert period_s(run(CROSSED, pattern)) == pytest.approx(10, rel=1e-6)
    assert period_s(run(CROSSED, pattern, message_order=False)) == pytest.approx(14, rel=1e-6)


def test_who_is_not_in_line_says_for_whom_it_waits() -> None:
    pattern = pattern_of(CROSSED, [0] * 12)
    schedule = unrolled(pattern, 2, CROSSED.devices, [])
    turned = replace(schedule, message_order=(tuple(reversed(schedule.message_order[0])),))
    plan = Plan(Mesh(), tuple(Stage(j, j, device) for j, device in enumerate(CROSSED.devices)), 2)
    profile = ModelProfile((LayerProfile(forward_s=1, backward_s=1),) * 3)
    with pytest.raises(Deadlock, match=r"1copy0<0 waits for 2copy0<1, which is before it in `message_order`"):
        simulate(turned, plan, profile, Cluster(devices_per_node=2, intra=Link(0, 1, "half")), MemoryModel())


def test_updates_cost_their_share_of_the_period_and_are_no_memory() -> None:
    """A step of 2 s after each second backward task is 1 s for each micro-batch, on a device that is always busy."""
    chain = Chain((0, 1), (1, 1), (2, 1), (0, 0))
    pattern = pattern_of(chain, [0] * 6)
    profile = ModelProfile((LayerProfile(forward_s=1, backward_s=2, saved_bytes=5, param_bytes=100),
                            LayerProfile(forward_s=1, backward_s=1, saved_bytes=5)))  # fmt: skip
    plan, memory = Plan.contiguous([1, 1], M), MemoryModel()
    # an update touches the weights twice and their gradients once
    cluster = Cluster(devices_per_node=2, device=Device(memory_bandwidth=150.0))
    done = {
        every: simulate(unrolled(pattern, M, (0, 1), [], every), plan, profile, cluster, memory) for every in (None, 2)
    }
    assert period_s(done[2]) == pytest.approx(pattern.period_s + 1) == 4
    assert violations(done[2].schedule, done[2].trace, 1e-9) == []
    assert sum("0step" in span.op for span in done[2].trace.spans) == M / 2
    assert done[2].figures["peak_memory_bytes"] == done[None].figures["peak_memory_bytes"]
    assert done[2].figures["step_time_s"] == pytest.approx(done[None].figures["step_time_s"] + 2 * (M / 2 - 1))
