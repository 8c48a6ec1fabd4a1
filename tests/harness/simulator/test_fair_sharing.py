"""Fair shares of ports and cores."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.simulator.fair_sharing import Flow, Flows, fair_rates


def test_two_flows_share_a_port_and_the_one_that_is_left_has_it_alone():
    flows = Flows({"port": 12.0})
    flows.add(0, Flow(12.0, 100.0, {"port": 1}), now=0.0)
    assert flows.next() == (1.0, 0)
    flows.add(1, Flow(6.0, 100.0, {"port": 1}), now=0.5)  # 6 of flow 0 are left; both run at 6 now
    assert flows.next() == (1.5, 0)
    flows.end(0, 1.5)
    assert flows.next() == (1.5, 1)


def test_a_flow_that_cannot_take_its_share_leaves_the_rest_to_the_others():
    flows = {0: Flow(1.0, 2.0, {"port": 1}), 1: Flow(1.0, 100.0, {"port": 1}), 2: Flow(1.0, 100.0, {"port": 1})}
    assert fair_rates(flows, {"port": 12.0}) == {0: 2.0, 1: 5.0, 2: 5.0}


def test_a_flow_through_a_full_port_leaves_room_in_its_other_port():
    flows = {k: Flow(1.0, 100.0, {"a": 1}) for k in range(3)} | {3: Flow(1.0, 100.0, {"a": 1, "b": 1}),
                                                                4: Flow(1.0, 100.0, {"b": 1})}  # fmt: skip
    assert fair_rates(flows, {"a": 4.0, "b": 4.0}) == {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0, 4: 3.0}


def test_replicas_that_are_not_simulated_take_their_share():
    assert fair_rates({0: Flow(1.0, 100.0, {"port": 6})}, {"port": 12.0}) == {0: 2.0}


def test_one_flow_alone_gets_more_than_several_together():
    flows = {0: Flow(1.0, 100.0, {"port": 1}), 1: Flow(1.0, 100.0, {"port": 1, "other": 1})}
    capacity, alone = {"port": 10.0, "other": 10.0}, {"port": 12.5, "other": 12.5}
    assert fair_rates(flows, capacity, alone) == {0: 5.0, 1: 5.0}
    assert fair_rates({0: flows[0]}, capacity, alone) == {0: 12.5}
    assert fair_rates({0: Flow(1.0, 100.0, {"port": 2})}, capacity, alone) == {0: 5.0}, "it crosses the port twice"


RESOURCES = "abc"
flow = st.builds(
    Flow, st.just(1.0), st.floats(0.1, 20), st.dictionaries(st.sampled_from(RESOURCES), st.integers(1, 4), max_size=3)
)


@given(st.lists(flow, min_size=1, max_size=6), st.lists(st.floats(0.5, 30), min_size=3, max_size=3))
def test_rates_are_max_min_fair(flows, capacities):
    """No port is over-full; each flow has its cap, or crosses a full port in which no other flow has more than it."""
    capacity = dict(zip(RESOURCES, capacities, strict=True))
    rates = fair_rates(dict(enumerate(flows)), capacity)
    used = {r: sum(rates[k] * f.uses.get(r, 0) for k, f in enumerate(flows)) for r in RESOURCES}
    assert all(used[r] <= capacity[r] * (1 + 1e-9) for r in RESOURCES)
    for k, one in enumerate(flows):
        full = [r for r in one.uses if math.isclose(used[r], capacity[r], rel_tol=1e-6)]
        most = [max(rates[o] for o, other in enumerate(flows) if r in other.uses) for r in full]
        assert rates[k] == pytest.approx(one.cap) or any(rates[k] >= top * (1 - 1e-6) for top in most)
