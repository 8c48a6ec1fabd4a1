"""The loop of a stage, and the simulator of the same schedule, against the paper's Algorithm 2, written out again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.myelin.engine import POLICIES
from engines.myelin.scheduler import ReadyTasks, run
from harness.core.cluster import Cluster
from harness.core.memory_model import named
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.op import Op
from harness.core.plan import Plan
from harness.runtime.transports.transport import Arrival, Channel
from harness.schedule import Schedule
from harness.schedule.builders.message_driven import message_driven
from harness.schedule.policy import RuleName
from harness.schedule.transfers import transfers
from harness.simulator import simulate


def tasks(stage: int, m: int) -> list[Op]:
    return [Op(stage, kind, i) for kind in ("F", "B") for i in range(m)]  # type: ignore[arg-type]


def queue_of(stages: int, m: int, stage: int, policy: RuleName = "fifo", limit: int | None = None) -> ReadyTasks:
    """What a stage of a pipeline has to do."""
    schedule = driven(stages, m, policy, limit)
    queue = next(queue for queue in schedule.queues if (queue.device, queue.name) == (stage, "compute"))
    order = [op for op in queue.ops if op.kind in ("F", "B")]
    return ReadyTasks(order, int(stage > 0), int(stage < stages - 1), queue.rule)


def driven(stages: int, m: int, policy: RuleName, limit: int | None) -> Schedule:
    return message_driven(m, range(stages), transfers([0] * (stages - 1), [], portals=True), policy, limit)


def names(ready_tasks: ReadyTasks) -> list[str]:
    """All that can run without another message."""
    found = []
    while ready_tasks.left and (op := ready_tasks.next()) is not None:
        found.append(str(op))
        ready_tasks.done(op)
    return found


@pytest.mark.parametrize("policy", POLICIES)
def test_the_first_stage_injects_up_to_the_limit_and_one_more_after_each_backward(policy: RuleName) -> None:
    """Also where another gradient is there: the next micro-batch is sent in at once."""
    ready_tasks = queue_of(3, 4, 0, policy, limit=2)
    assert names(ready_tasks) == ["0F0", "0F1"]
    ready_tasks.arrived(0, 0, forward=False)
    ready_tasks.arrived(0, 1, forward=False)
    assert names(ready_tasks) == ["0B0", "0F2", "0B1", "0F3"]
    ready_tasks.arrived(0, 2, forward=False)
    ready_tasks.arrived(0, 3, forward=False)
    assert names(ready_tasks) == ["0B2", "0B3"], "nothing is injected when no micro-batch is left"
    assert ready_tasks.left == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_the_last_stage_goes_back_at_once(policy: RuleName) -> None:
    """Also where other micro-batches wait."""
    ready_tasks = queue_of(3, 3, 2, policy)
    for i in range(3):
        ready_tasks.arrived(2, i, forward=True)
    assert names(ready_tasks) == ["2F0", "2B0", "2F1", "2B1", "2F2", "2B2"]


def test_fewer_micro_batches_than_the_limit() -> None:
    assert names(queue_of(2, 2, 0, limit=5)) == ["0F0", "0F1"]


def test_one_stage_needs_no_message() -> None:
    assert names(queue_of(1, 3, 0, limit=2)) == ["0F0", "0B0", "0F1", "0B1", "0F2", "0B2"]


def test_a_task_waits_for_all_its_messages() -> None:
    """A boundary and a skip; the gradients of an output and of a skip."""
    ready_tasks = ReadyTasks(tasks(1, 1), 2, 2, "fifo")
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
    ready_tasks = ReadyTasks(order, 1, 1, "in_order")
    ready_tasks.arrived(1, 0, forward=True)
    ready_tasks.arrived(1, 1, forward=True)
    assert names(ready_tasks) == ["1F0"], "1F1 is there, and has to wait"
    ready_tasks.arrived(1, 0, forward=False)
    assert names(ready_tasks) == ["1B0", "1F1"]


@dataclass
class Node:
    """A stage of the oracle: its inbox, and what it runs before it looks there again."""

    inbox: list[tuple[float, bool, int]] = field(default_factory=list)  # when, forward, micro-batch
    next: list[Op] = field(default_factory=list)
    ran: list[str] = field(default_factory=list)
    last: bool | None = None
    busy: bool = False


class Algorithm2:
    """Myelin's Algorithm 2 on a clock of whole numbers.

    first stage    sends `limit` micro-batches in; then, for each gradient: backward, and the next micro-batch
    last stage     for each message: forward and backward
    others         for each message, forward or backward; the policy picks among those that have come
    """

    def __init__(self, seconds: list[tuple[int, int]], message_s: int, m: int, policy: str, limit: int) -> None:
        self.seconds, self.message_s, self.m, self.policy = seconds, message_s, m, policy
        self.nodes = [Node() for _ in seconds]
        self.sent_in = min(limit, m)
        self.nodes[0].next = [Op(0, "F", i) for i in range(self.sent_in)]
        if len(seconds) == 1:
            self.nodes[0].next = [Op(0, kind, i) for i in range(m) for kind in ("F", "B")]  # type: ignore[arg-type]
        self.events: list[
            tuple[float, int, Op, bool]
        ] = []  # when, number, task, it has ended (or its message is there)
        self.number = count()

    def run(self) -> float:
        now = 0.0
        while True:
            for stage, node in enumerate(self.nodes):
                self.begin(stage, node, now)
            if not self.events:
                return now
            now = self.events[0][0]
            while self.events and self.events[0][0] == now:
                _, _, op, ended = heappop(self.events)
                self.ended(op, now) if ended else self.arrived(op, now)

    def begin(self, stage: int, node: Node, now: float) -> None:
        if not node.busy and not node.next and node.inbox:
            node.next = self.program(stage, *self.take(node))
        if not node.busy and node.next:
            op = node.next.pop(0)
            node.busy, node.last = True, op.forward
            node.ran.append(str(op))
            heappush(self.events, (now + self.seconds[stage][not op.forward], next(self.number), op, True))

    def take(self, node: Node) -> tuple[bool, int]:
        """The message that is handled next, by the policy: forward or not, and its micro-batch."""
        waiting = sorted(node.inbox)
        wanted = {"forward_first": True, "backward_first": False, "alternate": node.last is False}.get(self.policy)
        message = next((one for one in waiting if one[1] == wanted), waiting[0])
        node.inbox.remove(message)
        return message[1:]

    def program(self, stage: int, forward: bool, i: int) -> list[Op]:
        if stage == len(self.nodes) - 1:
            return [Op(stage, "F", i), Op(stage, "B", i)]
        if stage == 0 and self.sent_in < self.m:
            self.sent_in += 1
            return [Op(0, "B", i), Op(0, "F", self.sent_in - 1)]
        return [Op(stage, "F" if forward else "B", i)]

    def ended(self, op: Op, now: float) -> None:
        self.nodes[op.stage].busy = False
        target = op.stage + (1 if op.forward else -1)
        if 0 <= target < len(self.nodes):
            message = Op(target, op.kind, op.micro_batch)
            heappush(self.events, (now + self.message_s, next(self.number), message, False))

    def arrived(self, op: Op, now: float) -> None:
        self.nodes[op.stage].inbox.append((now, op.forward, op.micro_batch or 0))


SECONDS = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=8)
"""Small whole numbers: many messages arrive at the same moment."""


@given(SECONDS, st.integers(0, 2), st.integers(1, 9), st.sampled_from(POLICIES), st.integers(1, 8))
def test_simulator_and_engine_run_algorithm_2(
    seconds: list[tuple[int, int]], message_s: int, m: int, policy: RuleName, limit: int
) -> None:
    oracle = Algorithm2(seconds, message_s, m, policy, limit)
    step_s = oracle.run()
    theirs = [node.ran for node in oracle.nodes]
    found_s, simulated = of_simulator(seconds, message_s, m, policy, limit)
    assert (found_s, simulated) == (step_s, theirs)
    assert Loops(seconds, message_s, m, policy, limit).run() == theirs
    assert all(Counter(order) == Counter(map(str, tasks(j, m))) for j, order in enumerate(theirs))


@given(SECONDS, st.integers(0, 2), st.integers(1, 9), st.sampled_from(POLICIES), st.integers(1, 8))
def test_the_unit_of_time_is_no_matter(
    seconds: list[tuple[int, int]], message_s: int, m: int, policy: RuleName, limit: int
) -> None:
    """In milliseconds and in thirds, whose sums are rounded, messages meet as in whole numbers."""
    step_s, orders = of_simulator(seconds, message_s, m, policy, limit)
    for unit in (1e-3, 1 / 3):
        scaled_s, scaled = of_simulator(seconds, message_s, m, policy, limit, unit)
        assert (pytest.approx(unit * step_s), orders) == (scaled_s, scaled)


def of_simulator(
    seconds: list[tuple[int, int]], message_s: int, m: int, policy: RuleName, limit: int, unit: float = 1.0
) -> tuple[float, list[list[str]]]:
    stages = len(seconds)
    schedule = driven(stages, m, policy, limit)
    durations = {str(op): unit * seconds[op.stage][op.kind == "B"] for op in schedule.ops() if op.kind in ("F", "B")}
    durations |= {
        str(op): unit * message_s * (op.kind == "copy") for op in schedule.ops() if op.kind in ("copy", "step")
    }
    profile = ModelProfile(tuple(LayerProfile(str(j)) for j in range(stages)))
    plan = Plan.contiguous([1] * stages, m)
    found = simulate(schedule, plan, profile, Cluster(devices_per_node=8), named("sgd_fp32"), durations=durations)
    queues = found.trace.queues()
    orders = [[s.op for s in queues[j, "compute"] if not s.op.endswith("step")] for j in range(stages)]
    return found.figures["step_time_s"], orders


class Loops:
    """The ready tasks of all stages on one clock, each handled as `run` does: first what has arrived, then the end."""

    def __init__(self, seconds: list[tuple[int, int]], message_s: int, m: int, policy: RuleName, limit: int) -> None:
        self.seconds, self.message_s = seconds, message_s
        self.stages = [queue_of(len(seconds), m, j, policy, limit) for j in range(len(seconds))]
        self.ran: list[list[str]] = [[] for _ in seconds]
        self.ends: dict[int, tuple[float, Op]] = {}
        self.mail: list[tuple[float, bool, int, int]] = []  # when, forward, micro-batch, stage

    def run(self) -> list[list[str]]:
        now = 0.0
        while any(stage.left for stage in self.stages):
            for j, stage in enumerate(self.stages):
                op = None if j in self.ends or not stage.left else stage.next()
                if op is not None:
                    self.ran[j].append(str(op))
                    self.ends[j] = now + self.seconds[j][not op.forward], op
            now = min([end for end, _ in self.ends.values()] + [one[0] for one in self.mail])
            ended = {j: self.ends.pop(j)[1] for j in list(self.ends) if self.ends[j][0] == now}
            for op in ended.values():
                target = op.stage + (1 if op.forward else -1)
                if 0 <= target < len(self.stages):
                    self.mail.append((now + self.message_s, op.forward, op.micro_batch or 0, target))
            for one in sorted(one for one in self.mail if one[0] == now):
                self.mail.remove(one)
                self.stages[one[3]].arrived(one[3], one[2], one[1])
            for j, op in ended.items():
                self.stages[j].done(op)
        return self.ran


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("message_s", [0, 1])
@pytest.mark.parametrize("m", [16, 64])
@pytest.mark.parametrize("stages", [4, 8])
def test_equal_stages(stages: int, m: int, message_s: int, policy: RuleName) -> None:
    oracle = Algorithm2([(1, 2)] * stages, message_s, m, policy, stages)
    step_s = oracle.run()
    assert of_simulator([(1, 2)] * stages, message_s, m, policy, stages)[0] == step_s
    if policy == "backward_first" and not message_s:
        assert step_s == (m + stages - 1) * 3, "1F1B's time"


@pytest.mark.parametrize("policy", POLICIES)
def test_the_policy_decides(policy: RuleName) -> None:
    """A forward message came first, then gradients, while another forward task ran."""
    ready_tasks = ReadyTasks(tasks(1, 3), 1, 1, policy)
    ready_tasks.arrived(1, 0, forward=True)
    ready_tasks.arrived(1, 1, forward=True)
    first = ready_tasks.next()
    assert first == Op(1, "F", 0)
    ready_tasks.done(first)
    ready_tasks.arrived(1, 0, forward=False)
    wanted = {"fifo": "1F1", "forward_first": "1F1", "backward_first": "1B0", "alternate": "1B0"}
    assert str(ready_tasks.next()) == wanted[policy]


class Looks:
    """A transport whose messages are seen in these looks."""

    def __init__(self, *looks: list[tuple[float, int, bool]]) -> None:
        self.looks = list(looks)

    def arrived(self, wait: bool) -> Iterable[Arrival]:
        found = self.looks.pop(0) if self.looks else []
        ends = {True: Channel(0, 1, ""), False: Channel(2, 1, "")}
        return [Arrival(ends[forward], i, [], at_s) for at_s, i, forward in found]


@pytest.mark.parametrize(("forward_s", "second"), [(3.0, "1B0"), (2.0, "1F2")])
def test_of_messages_at_the_same_moment_the_gradient_is_first(forward_s: float, second: str) -> None:
    """Both come while F1 runs; the transport sees the forward message first."""
    ready_tasks, ran = ReadyTasks(tasks(1, 3), 1, 1, "fifo"), []
    looks = Looks(
        [(0.0, 0, True)], [(1.0, 1, True)], [(forward_s, 2, True), (3.0, 0, False)], [], [], [(5.0, 1, False)],
        [(6.0, 2, False)],
    )  # fmt: skip
    run(ready_tasks, looks, lambda _: None, lambda op: ran.append(str(op)))  # type: ignore[arg-type]
    assert ran[:3] == ["1F0", "1F1", second]
    assert len(ran) == 6
