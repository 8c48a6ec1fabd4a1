"""The loop of a stage: Algorithms 1 and 2 with their guards, against the simulator's order of the same schedule."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.myelin.engine import POLICIES
from engines.myelin.scheduler import ReadyTasks
from harness.core.cluster import Cluster
from harness.core.memory_model import named
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.op import Op
from harness.core.plan import Plan
from harness.schedule.builders.message_driven import message_driven
from harness.schedule.policy import RuleName
from harness.schedule.transfers import transfers
from harness.simulator import simulate


def tasks(stage: int, m: int) -> list[Op]:
    return [Op(stage, kind, i) for kind in ("F", "B") for i in range(m)]  # type: ignore[arg-type]


def names(ready_tasks: ReadyTasks) -> list[str]:
    """All that can run without another message."""
    found = []
    while (op := ready_tasks.next()) is not None:
        found.append(str(op))
        ready_tasks.done(op)
    return found


def test_the_first_stage_injects_up_to_the_limit_and_one_more_after_each_backward() -> None:
    ready_tasks = ReadyTasks(0, tasks(0, 4), 0, 1, "fifo", 2)
    assert names(ready_tasks) == ["0F0", "0F1"]
    ready_tasks.arrived(0, 0, forward=False)
    assert names(ready_tasks) == ["0B0", "0F2"]
    ready_tasks.arrived(0, 1, forward=False)
    ready_tasks.arrived(0, 2, forward=False)
    assert names(ready_tasks) == ["0B1", "0B2", "0F3"], "nothing is injected when no micro-batch is left"
    ready_tasks.arrived(0, 3, forward=False)
    assert names(ready_tasks) == ["0B3"]
    assert ready_tasks.left == 0


def test_fewer_micro_batches_than_the_limit() -> None:
    ready_tasks = ReadyTasks(0, tasks(0, 2), 0, 1, "fifo", 5)
    assert names(ready_tasks) == ["0F0", "0F1"]


def test_one_stage_needs_no_message() -> None:
    assert names(ReadyTasks(0, tasks(0, 3), 0, 0, "fifo", 1)) == ["0F0", "0B0", "0F1", "0B1", "0F2", "0B2"]
    assert names(ReadyTasks(0, tasks(0, 2), 0, 0, "forward_first", 2)) == ["0F0", "0F1", "0B0", "0B1"]


def test_a_task_waits_for_all_its_messages() -> None:
    """A boundary and a skip; the gradients of an output and of a skip."""
    ready_tasks = ReadyTasks(1, tasks(1, 1), 2, 2, "fifo", None)
    ready_tasks.arrived(1, 0, forward=True)
    assert names(ready_tasks) == []
    ready_tasks.arrived(1, 0, forward=True)
    assert names(ready_tasks) == ["1F0"]
    ready_tasks.arrived(1, 0, forward=False)
    assert names(ready_tasks) == []
    ready_tasks.arrived(1, 0, forward=False)
    assert names(ready_tasks) == ["1B0"]


def test_a_fixed_order_waits_for_what_it_says() -> None:
    order = [Op(1, "F", 0), Op(1, "B", 0), Op(1, "F", 1), Op(1, "B", 1)]
    ready_tasks = ReadyTasks(1, order, 1, 1, "in_order", 1)
    ready_tasks.arrived(1, 0, forward=True)
    ready_tasks.arrived(1, 1, forward=True)
    assert names(ready_tasks) == ["1F0"], "1F1 is there, and has to wait"
    ready_tasks.arrived(1, 0, forward=False)
    assert names(ready_tasks) == ["1B0", "1F1"]


TIMES = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4)


@given(TIMES, st.integers(1, 7), st.sampled_from(POLICIES), st.integers(1, 5))
def test_in_the_order_of_the_simulator(times: list[tuple[int, int]], m: int, policy: RuleName, limit: int) -> None:
    """A loop of all stages on one clock, with messages that take no time, runs what the simulator runs.

    Odd times, so that no two events but those that follow from each other are at the same instant.
    """
    count = len(times)
    seconds = [(f + 0.1371 * j, b + 0.0917 * j) for j, (f, b) in enumerate(times)]
    got = played(seconds, m, policy, limit)
    schedule = message_driven(m, range(count), transfers([0] * (count - 1), [], portals=True), policy, limit)
    durations = {str(op): seconds[op.stage][op.kind == "B"] for op in schedule.ops() if op.kind in ("F", "B")}
    durations |= {str(op): 0.0 for op in schedule.ops() if op.kind in ("copy", "step")}
    profile = ModelProfile(tuple(LayerProfile(str(j)) for j in range(count)))
    plan = Plan.contiguous([1] * count, m)
    found = simulate(schedule, plan, profile, Cluster(devices_per_node=8), named("sgd_fp32"), durations=durations)
    for stage, order in enumerate(got):
        spans = sorted((s for s in found.trace.spans if s.device == stage), key=lambda s: s.start_s)
        ran = [s.op for s in spans if s.queue == "compute" and not s.op.endswith("step")]
        assert ran == order
    assert all(Counter(order) == Counter(map(str, tasks(j, m))) for j, order in enumerate(got))


def played(seconds: list[tuple[float, float]], m: int, policy: RuleName, limit: int) -> list[list[str]]:
    """What each stage runs, event by event."""
    last = len(seconds) - 1
    agendas = [ReadyTasks(j, tasks(j, m), int(j > 0), int(j < last), policy, limit) for j in range(last + 1)]
    ran: list[list[str]] = [[] for _ in agendas]
    busy: dict[int, tuple[float, Op]] = {}
    now = 0.0
    while any(ready_tasks.left for ready_tasks in agendas):
        for j, ready_tasks in enumerate(agendas):
            op = None if j in busy else ready_tasks.next()
            if op is not None:
                ran[j].append(str(op))
                busy[j] = now + seconds[j][op.kind == "B"], op
        stage = min(busy, key=lambda j: busy[j][0])
        now, op = busy.pop(stage)
        neighbour = stage + (1 if op.forward else -1)
        if 0 <= neighbour <= last:
            agendas[neighbour].arrived(neighbour, op.micro_batch or 0, op.forward)
        agendas[stage].done(op)
    return ran


@pytest.mark.parametrize("policy", POLICIES)
def test_the_policy_decides(policy: str) -> None:
    """A forward message came first, then gradients, while another forward task ran."""
    ready_tasks = ReadyTasks(1, tasks(1, 3), 1, 1, policy, None)  # type: ignore[arg-type]
    ready_tasks.arrived(1, 0, forward=True)
    ready_tasks.arrived(1, 1, forward=True)
    first = ready_tasks.next()
    assert first == Op(1, "F", 0)
    ready_tasks.done(first)
    ready_tasks.arrived(1, 0, forward=False)
    wanted = {"fifo": "1F1", "forward_first": "1F1", "backward_first": "1B0", "alternate": "1B0"}
    assert str(ready_tasks.next()) == wanted[policy]
