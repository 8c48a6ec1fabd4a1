from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.op import Op
from harness.core.plan import Plan
from harness.core.problem import ProblemError
from harness.schedule import Schedule
from harness.schedule.builders.message_driven import message_driven
from harness.schedule.policy import RULES, RuleName, pick
from harness.schedule.transfers import Transfer
from harness.schedule.validate import validation_errors
from harness.simulator import Simulation, simulate
from tests.problems import refused, rows
from tests.support.violations import violations

PICKING = [rule for rule in RULES if rule != "in_order"]
READY = [Op.parse(text) for text in ("2B0", "2F3", "2B1", "2F4")]


def chain(stages: int) -> list[Transfer]:
    return [Transfer(j, j + 1, bytes=100) for j in range(stages - 1)]


def run(schedule: Schedule, m: int, n: int) -> Simulation:
    profile = ModelProfile((LayerProfile(forward_s=1, backward_s=2),) * n)
    done = simulate(schedule, Plan.contiguous([1] * n, m), profile, Cluster(devices_per_node=n), MemoryModel())
    assert violations(schedule, done.trace) == []
    return done


def order(done: Simulation, device: int) -> str:
    return " ".join(span.op for span in done.trace.queues()[device, "compute"])


@pytest.mark.parametrize(
    ("rule", "last", "picked"),
    [
        ("fifo", None, "2B0"), ("fifo", "2F2", "2B0"),
        ("forward_first", None, "2F3"), ("backward_first", None, "2B0"),
        ("alternate", None, "2B0"), ("alternate", "2F2", "2B0"), ("alternate", "2B9", "2F3"),
    ],
)  # fmt: skip
def test_what_a_rule_picks(rule: RuleName, last: str | None, picked: str) -> None:
    assert str(READY[pick(rule, READY, Op.parse(last) if last else None)]) == picked


@pytest.mark.parametrize("rule", PICKING)
def test_a_rule_takes_what_is_there(rule: RuleName) -> None:
    """Only forward, or only backward tasks: the first one."""
    assert pick(rule, READY[1::2], READY[1]) == 0
    assert pick(rule, READY[::2], READY[0]) == 0


@pytest.mark.parametrize("rule", PICKING)
def test_a_backward_task_follows_its_own_recomputation(rule: RuleName) -> None:
    assert pick(rule, READY, Op.parse("2R1")) == 2
    assert pick(rule, READY[:1], Op.parse("3R0")) == 0  # of another stage: nothing special


def test_a_fixed_order_is_no_rule() -> None:
    with pytest.raises(ValueError, match="fixed order has no rule"):
        pick("in_order", READY, None)


def test_only_the_stages_in_the_middle_pick() -> None:
    schedule = message_driven(4, range(4), chain(4), "alternate", limit=3)
    compute = [queue for queue in schedule.queues if queue.name == "compute"]
    assert [queue.rule for queue in compute] == ["in_order", "alternate", "alternate", "in_order"]
    assert {queue.rule for queue in schedule.queues if queue.name == "network"} == {"fifo"}
    assert " ".join(map(str, compute[0].ops)) == "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3 0step"
    assert " ".join(map(str, compute[3].ops)) == "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3step"
    assert (schedule.limit, schedule.loss) == (3, "each")


def test_two_stages_on_one_device_are_refused() -> None:
    with pytest.raises(ProblemError) as caught:
        message_driven(2, [0, 1, 0], chain(3))
    assert rows(refused(caught)) == [("stages 0 and 2", None, [])]


@given(
    m=st.integers(1, 8), n=st.integers(1, 5), rule=st.sampled_from(PICKING), limit=st.none() | st.integers(1, 6),
    mode=st.sampled_from(["always", "except_last", "never"]),
)  # fmt: skip
def test_every_rule_and_limit_runs_all_and_keeps_the_limit(
    m: int, n: int, rule: RuleName, limit: int | None, mode: str
) -> None:
    schedule = message_driven(m, range(n), chain(n), rule, limit, mode)
    assert validation_errors(schedule, Plan.contiguous([1] * n, m)) == []
    done = run(schedule, m, n)
    alive = most = 0
    for name in order(done, 0).split():
        alive += {"F": 1, "B": -1}.get(Op.parse(name).kind, 0)
        most = max(most, alive)
    assert most <= (limit or m)


def test_backward_first_with_a_limit_of_n_is_1f1b_in_time() -> None:
    """Myelin's rule comes to 1F1B's step time by itself."""
    assert run(message_driven(8, range(4), chain(4), "backward_first", 4), 8, 4).figures["step_time_s"] == (8 + 3) * 3


def test_a_limit_of_one_lets_one_micro_batch_through_at_a_time() -> None:
    assert run(message_driven(3, range(4), chain(4), "fifo", 1), 3, 4).figures["step_time_s"] == 3 * 4 * 3


def test_recomputations_wait_for_the_gradient() -> None:
    """Without that 1R0 and 1R1 would run at once, and keep all activations."""
    done = run(message_driven(2, range(3), chain(3), "fifo", recompute="always"), 2, 3)
    assert order(done, 1) == "1F0 1F1 1R0 1B0 1R1 1B1 1step"
    begins = {span.op: span.start_s for span in done.trace.spans}
    ends = {span.op: span.end_s for span in done.trace.spans}
    assert begins["1R0"] >= ends["2B0"]


@pytest.mark.parametrize("rule", ["in_order", "lifo"])
def test_other_rules_are_refused(rule: str) -> None:
    with pytest.raises(ProblemError) as caught:
        message_driven(2, range(2), chain(2), rule)  # type: ignore[arg-type]
    assert rows(refused(caught)) == [("rule", rule, ["rule=fifo"])]


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ProblemError) as caught:
        message_driven(2, range(2), chain(2), "fifo", 0)
    assert rows(refused(caught)) == [("limit", 0, ["limit=2"])]
