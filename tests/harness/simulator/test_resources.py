"""Links, ports, collectives, blocking messages, cores: each against its closed form."""

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import simulator
from harness.core.cluster import SEND, CallTimes, Cluster, Device, Link
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.op import Op
from harness.core.plan import Plan, Stage
from harness.core.problem import CannotRun
from harness.schedule import QueueOps, Schedule
from harness.schedule.builders.gpipe import gpipe
from harness.schedule.transfers import plan_transfers
from harness.simulator import Deadlock, simulate
from tests.problems import refused, rows

MEMORY = MemoryModel()


def profile(*forward_s: float, backward_s: float = 0.0) -> ModelProfile:
    return ModelProfile(
        tuple(LayerProfile(f"l{j}", forward_s=f, backward_s=backward_s) for j, f in enumerate(forward_s))
    )


def run(queues, devices, cluster, *forward_s, **options):
    """Spans by (op, device) of a schedule with one layer on each stage."""
    forward_s = forward_s or (0.0,) * len(devices)
    stages = tuple(Stage(j, j, d) for j, d in enumerate(devices))
    plan = Plan(Plan.contiguous([1]).mesh, stages)
    replicas, limit = options.pop("replicas", 1), options.pop("limit", None)
    schedule = Schedule(tuple(QueueOps(*queue) for queue in queues), tuple(devices), limit=limit, replicas=replicas)
    backward_s = options.pop("backward_s", 0.0)
    done = simulate(schedule, plan, profile(*forward_s, backward_s=backward_s), cluster, MEMORY, **options)
    return {(span.op, span.device): (span.start_s, span.end_s) for span in done.trace.spans}, done.figures


def nodes(count: int, each: int, beta: float = 1.0, alpha: float = 0.0, **options) -> Cluster:
    """Inside a node links take no time, so that only ports count."""
    return Cluster("test", count, each, Device(), node_port=Link(alpha, beta), **options)


def message(source: int, target: int, size: int, i: int = 0, part: str = "") -> Op:
    return Op(target, "copy", i, part, source, size, "network")


def test_one_link_carries_one_message_at_a_time_first_come_first_served():
    queues = [
        (0, "compute", (Op(0, "F", 0), Op(0, "F", 1))),
        (1, "network", (message(0, 1, 5, 1), message(0, 1, 5, 0), message(0, 1, 2, 0, "skip"))),
    ]
    spans, _ = run(queues, [0, 1], Cluster("t", 1, 2, intra=Link(0, 1.0)), 1.0, 0.0)
    assert spans["1copy0<0", 1] == (1, 6)
    assert spans["1copy0<0:skip", 1] == (6, 8)  # came at 1, too, but stands later
    assert spans["1copy1<0", 1] == (8, 13)  # came at 2


@pytest.mark.parametrize(("duplex", "ends"), [("full", (3, 3)), ("half", (3, 6))])
def test_both_directions_share_a_link_that_is_half_duplex(duplex, ends):
    queues = [(1, "network", (message(0, 1, 3),)), (0, "network", (message(1, 0, 3),))]
    spans, _ = run(queues, [0, 1], Cluster("t", 1, 2, intra=Link(0, 1.0, duplex)))
    assert (spans["1copy0<0", 1][1], spans["0copy0<1", 0][1]) == ends


def test_links_of_different_pairs_do_not_disturb_each_other():
    queues = [(d, "network", (message(0, d, 3),)) for d in (1, 2, 3)]
    spans, _ = run(queues, [0, 1, 2, 3], Cluster("t", 1, 4, intra=Link(0, 1.0)))
    assert [span[1] for span in spans.values()] == [3, 3, 3]


def test_a_copy_engine_serves_one_message_at_a_time_from_whomever():
    queues = [(2, "copy in", (message(0, 2, 3), message(1, 2, 3)))]
    spans, _ = run(queues, [0, 1, 2], Cluster("t", 1, 3, intra=Link(0, 1.0)))
    assert spans["2copy0<1", 2] == (3, 6)


def test_transfers_that_leave_a_node_share_its_port_fairly():
    """Node 0 holds devices 0-2; each sends 6 bytes to node 1, where they share a port, too."""
    queues = [(3 + d, "network", (message(d, 3 + d, 6),)) for d in range(3)]  # three pairs
    spans, _ = run(queues, range(6), nodes(2, 3))
    assert [span[1] for span in spans.values()] == [18, 18, 18]


def test_a_port_pays_its_latency_before_the_bytes():
    spans, _ = run([(1, "network", (message(0, 1, 6),))], [0, 1], nodes(2, 1, alpha=0.5))
    assert spans["1copy0<0", 1] == (0, 6.5)


def test_transfers_to_different_nodes_share_only_the_port_of_the_sender():
    queues = [(1, "network", (message(0, 1, 6),)), (2, "network", (message(0, 2, 2),))]
    spans, _ = run(queues, [0, 1, 2], nodes(3, 1))
    assert spans["2copy0<0", 2][1] == pytest.approx(4)  # half of the port for 2 bytes
    assert spans["1copy0<0", 1][1] == pytest.approx(8)


def collective(name: str, size: int, stage: int = 0, communicator: str = "tp") -> Op:
    return Op(stage, "collective", None, f"{name}@{communicator}", bytes=size, queue="network")


RINGS = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1}


@given(st.sampled_from(sorted(RINGS)), st.integers(1, 8), st.integers(0, 1000))
def test_a_ring_inside_a_node_costs_what_the_textbook_says(name, g, size):
    queues = [(d, "network", (collective(name, size, d),)) for d in range(g)]
    _, figures = run(queues, range(g), Cluster("t", 1, g, intra=Link(0.5, 0.01)))
    rounds = RINGS[name] * (g - 1)
    assert figures["step_time_s"] == pytest.approx(rounds * (0.5 + 0.01 * size / g))


@given(st.sampled_from(sorted(RINGS)), st.integers(2, 6), st.integers(1, 1000))
def test_a_ring_over_nodes_costs_the_same_through_ports(name, g, size):
    queues = [(d, "network", (collective(name, size, d),)) for d in range(g)]
    _, figures = run(queues, range(g), nodes(g, 1, beta=0.01, alpha=0.5))
    assert figures["step_time_s"] == pytest.approx(RINGS[name] * (g - 1) * (0.5 + 0.01 * size / g))


def test_a_ring_over_two_nodes_crosses_each_port_once():
    """4 devices on 2 nodes: each ring edge carries 2 * 3/4 * n; only one of them leaves each node."""
    queues = [(d, "network", (collective("all_reduce", 400, d),)) for d in range(4)]
    _, figures = run(queues, range(4), nodes(2, 2))
    assert figures["step_time_s"] == pytest.approx(600)


def test_one_ring_alone_uses_more_of_a_port_than_several_together():
    cluster = replace(nodes(2, 2), alone_bandwidth=1.25)
    queues = [(d, "network", (collective("all_reduce", 400, d),)) for d in range(4)]
    assert run(queues, range(4), cluster)[1]["step_time_s"] == pytest.approx(600 / 1.25)
    several = [(d, "network", (collective("all_reduce", 400, d, "data"),)) for d in range(2)]
    assert run(several, range(2), cluster, replicas=2)[1]["step_time_s"] == pytest.approx(2 * 400)


def test_a_network_port_that_six_rings_share_gives_each_a_sixth():
    """6 stages on a node, 8 replicas on 8 nodes: six all-reduces at once (Myelin, figure 6)."""
    queues = [(d, "network", (collective("all_reduce", 800, d, "data"),)) for d in range(6)]
    _, shared = run(queues, range(6), nodes(8, 6), replicas=8)
    _, alone = run(queues[:1], [0], nodes(8, 1), replicas=8)
    assert alone["step_time_s"] == pytest.approx(2 * 7 / 8 * 800)
    assert shared["step_time_s"] == pytest.approx(6 * alone["step_time_s"])


def test_one_simulated_replica_stands_for_all():
    """Against the same two replicas written out: 2 devices each, on nodes of 4, sending to the next node."""
    one = [(4, "network", (message(0, 1, 6),))]
    _, once = run(one, [0, 4], nodes(4, 2), replicas=1)
    both = [(4, "network", (message(0, 2, 6),)), (5, "network", (message(1, 3, 6),))]
    _, written_out = run(both, [0, 1, 4, 5], nodes(4, 2))
    assert written_out["step_time_s"] == 2 * once["step_time_s"]


def test_replicas_on_one_node_share_its_port_as_if_they_were_simulated():
    """Pipelines of 2 stages on nodes of 1: replica 0 sends from node 0 to node 1, replica 1 from node 2 to node 3."""
    queues = [(1, "network", (message(0, 1, 6),))]
    for replicas in (1, 2):
        _, figures = run(queues, [0, 1], nodes(4, 1), replicas=replicas)
        assert figures["step_time_s"] == 6


@pytest.mark.parametrize(("cluster", "fixes"), [(nodes(2, 1), ["mesh.data=1"]), (nodes(3, 3), [])])
def test_replicas_that_are_not_there_or_span_nodes_unevenly_are_refused(cluster, fixes):
    with pytest.raises(CannotRun) as caught:
        run([(1, "network", (message(0, 1, 6),))], [0, 1], cluster, replicas=2)
    assert rows(refused(caught)) == [("mesh.data", 2, fixes)]


def test_messages_of_one_pair_of_devices_arrive_in_turn_between_nodes_too():
    """They would all arrive at the end, if they shared the port with one another."""
    queues = [(1, "network", tuple(message(0, 1, 6, i) for i in range(3)))]
    spans, _ = run(queues, [0, 1], nodes(2, 1))
    assert [span[1] for span in spans.values()] == [6, 12, 18]


def test_collectives_of_one_communicator_run_in_turn_those_of_two_at_once():
    def queues(second: str):
        return [(d, "network", (collective("all_gather", 20, d), collective("all_reduce", 20, d, second)))
                for d in range(2)]  # fmt: skip

    def start(second: str) -> float:
        spans, _ = run(queues(second), [0, 1], nodes(2, 1))
        return spans[f"0collective:all_reduce@{second}", 0][0]

    assert start("tp") == 10
    assert start("other") == 0


def test_members_of_a_collective_wait_for_the_last_one():
    queues = [(d, "compute", (Op(d, "F", 0), collective("all_reduce", 10, d))) for d in range(2)]
    spans, figures = run(queues, [0, 1], Cluster("t", 1, 2, intra=Link(0, 1.0)), 0.0, 7.0)
    assert [spans[f"{d}collective:all_reduce@tp", d] for d in range(2)] == [(7, 17), (7, 17)]
    assert figures["bytes_sent"] == {"all_reduce@tp": 20}  # the buffers of both


def test_each_call_of_a_collective_costs_something_of_its_own():
    each = tuple(Op(d, "collective", None, "all_reduce@tp", bytes=10, buffers=(4, 6)) for d in range(2))
    queues = [(d, "compute", (Op(d, "F", 0), each[d])) for d in range(2)]
    cluster = Cluster("t", 1, 2, intra=Link(0, 1.0), collective_call_s=3.0)
    spans, _ = run(queues, [0, 1], cluster)
    assert spans["0collective:all_reduce@tp", 0] == (0, 10 + 2 * 3)


def test_two_communicators_entered_in_different_orders_are_a_deadlock():
    a, b = "a", "b"
    queues = [
        (0, "compute", (collective("all_reduce", 1, 0, a), collective("all_reduce", 1, 0, b))),
        (1, "compute", (collective("all_reduce", 1, 1, b), collective("all_reduce", 1, 1, a))),
    ]
    with pytest.raises(Deadlock, match="0collective:all_reduce@a waits for its turn in device 1 compute, which is at"):
        run(queues, [0, 1], Cluster("t", 1, 2))


def test_an_unknown_collective_is_refused():
    with pytest.raises(ValueError, match="'gossip' is not a collective -> one of all_reduce"):
        run([(0, "network", (collective("gossip", 1, 0),))], [0], Cluster())


def sends():
    """Stage 0 computes twice, 1 s each; stage 1, which takes 3 s, receives after each of its own tasks."""
    send = [Op(0, "send", i, "", 1, 2, "compute") for i in range(2)]
    recv = [Op(1, "recv", i, "", 0, 2, "compute") for i in range(2)]
    return [
        (0, "compute", (Op(0, "F", 0), send[0], Op(0, "F", 1), send[1])),
        (1, "compute", (recv[0], Op(1, "F", 0), recv[1], Op(1, "F", 1))),
    ]


def test_an_eager_send_does_not_wait_for_its_receive():
    spans, _ = run(sends(), [0, 1], Cluster("t", 1, 2, intra=Link(0, 1.0)), 1.0, 3.0)
    assert [spans[f"0send{i}<1", 0] for i in range(2)] == [(1, 3), (4, 6)]
    assert [spans[f"1F{i}", 1] for i in range(2)] == [(3, 6), (6, 9)]


def test_a_rendezvous_waits_for_both_ends():
    cluster = Cluster("t", 1, 2, intra=Link(0, 1.0), blocking_messages=True)
    spans, _ = run(sends(), [0, 1], cluster, 1.0, 3.0)
    assert spans["0send1<1", 0] == spans["1recv1<0", 1] == (6, 8)
    assert spans["1F1", 1] == (8, 11)


def pipeline(n: int, m: int, size: int, cluster: Cluster, **options) -> dict:
    layers = tuple(LayerProfile(f"l{j}", forward_s=1.0, backward_s=2.0, output_bytes=size) for j in range(n))
    model, plan = ModelProfile(layers), Plan.contiguous([1] * n, m)
    schedule = gpipe(m, range(n), plan_transfers(plan, model, True), "never", **options)
    return simulate(schedule, plan, model, cluster, MEMORY).figures


@given(st.integers(1, 6), st.integers(1, 6))
def test_blocking_messages_lengthen_every_round_of_a_balanced_pipeline(n, m):
    """Eager messages overlap with the next task; blocking ones run between all tasks."""
    blocking = Cluster("t", 1, n, intra=Link(0, 1.0), blocking_messages=True)
    figures = pipeline(n, m, 1, blocking)
    assert figures["step_time_s"] >= pipeline(n, m, 1, Cluster("t", 1, n, intra=Link(0, 1.0)))["step_time_s"]
    if n == 2:  # F, message, F ...: both devices take part in each message
        assert figures["step_time_s"] == (1 + m * 2) + (2 + m * 3)
    assert pipeline(n, m, 0, blocking)["step_time_s"] == (m + n - 1) * 3


def test_blocking_messages_in_both_directions_do_not_deadlock():
    queues = [
        (0, "compute", (Op(0, "F", 0), Op(0, "F", 1))),
        (1, "compute", (Op(1, "B", 0), Op(1, "B", 1))),
        (1, "network", tuple(message(0, 1, 1, i) for i in range(2))),
        (0, "network", tuple(message(1, 0, 1, i) for i in range(2))),
    ]
    cluster = Cluster("t", 1, 2, intra=Link(0, 1.0), blocking_messages=True)
    _, figures = run(queues, [0, 1], cluster, 1.0, 1.0, backward_s=1.0)
    assert figures["step_time_s"] == 6  # 2 tasks on each, at once, and 4 messages, one after the other


def test_devices_share_cores():
    queues = [(d, "compute", (Op(d, "F", d),)) for d in range(4)]
    spans, _ = run(queues, range(4), Cluster("t", 1, 4, cores=2), 1.0, 1.0, 1.0, 3.0)
    assert [spans[f"{d}F{d}", d][1] for d in range(4)] == pytest.approx([2, 2, 2, 4])  # the last 2 s alone
    spans, _ = run(queues, range(4), Cluster("t", 1, 4, cores=4), 1.0, 1.0, 1.0, 3.0)
    assert [spans[f"{d}F{d}", d][1] for d in range(4)] == [1, 1, 1, 3]


def test_offloading_goes_over_the_host_link_in_a_queue_of_its_own():
    out = Op(0, "copy", 0, "offload", bytes=8, queue="copy out")
    queues = [(0, "compute", (Op(0, "F", 0),)), (0, "copy out", (out,))]
    spans, figures = run(queues, [0], Cluster(host_link=Link(0, 0.5)), 3.0)
    assert spans["0copy0:offload", 0] == (0, 4)
    assert figures["bytes_sent"] == {}


@pytest.mark.parametrize(
    ("rule", "order"),
    [
        ("fifo", "0F0 0F1 0F2 0B0 0B1 0B2"),
        ("forward_first", "0F0 0F1 0F2 0B0 0B1 0B2"),
        ("backward_first", "0F0 0B0 0F1 0B1 0F2 0B2"),
        ("alternate", "0F0 0B0 0F1 0B1 0F2 0B2"),
    ],
)
def test_a_rule_picks_among_what_is_ready(rule, order):
    ops = tuple(Op(0, kind, i) for i in range(3) for kind in "FB")
    spans, _ = run([(0, "compute", ops, rule)], [0], Cluster(), 1.0, backward_s=1.0)
    assert sorted(spans, key=lambda k: spans[k][0]) == [(op, 0) for op in order.split()]


def test_a_limit_keeps_micro_batches_out_until_others_are_done():
    ops = tuple(Op(0, kind, i) for i in range(3) for kind in "FB")
    spans, _ = run([(0, "compute", ops, "forward_first")], [0], Cluster(), 1.0, backward_s=1.0, limit=2)
    assert sorted(spans, key=lambda k: spans[k][0]) == [(op, 0) for op in ["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"]]


def test_jitter_is_reproducible_and_around_1():
    ops = tuple(Op(0, "F", i) for i in range(400))
    times = [run([(0, "compute", ops)], [0], Cluster(), 1.0, jitter=0.1, seed=s)[1]["step_time_s"] for s in (1, 1, 2)]
    assert times[0] == times[1] != times[2]
    assert times[0] == pytest.approx(400, rel=0.02)


def test_durations_replace_all_costs():
    queues = [(0, "compute", (Op(0, "F", 0),)), (1, "copy in", (message(0, 1, 5),))]
    slow = Cluster("t", 1, 2, intra=Link(0, 1.0))
    _, figures = run(queues, [0, 1], slow, 1.0, 0.0, durations={"0F0": 3.0, "1copy0<0": 0.25})
    assert figures["step_time_s"] == 3.25


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_impossible_durations_are_refused(seconds):
    with pytest.raises(ValueError, match=f"0F0 of stage 0 takes {seconds} s"):
        run([(0, "compute", (Op(0, "F", 0),))], [0], Cluster(), durations={"0F0": seconds})
    with pytest.raises(ValueError, match="0F0 of stage 0 has no duration"):
        run([(0, "compute", (Op(0, "F", 0),))], [0], Cluster(), durations={})


@pytest.mark.parametrize("start_ops", [10**9, 0], ids=["reference", "compiled"])
def test_rules_and_ports_take_time_linear_in_the_ops(start_ops, monkeypatch):
    monkeypatch.setattr(simulator, "START_OPS", start_ops)

    def seconds(m: int) -> float:
        ops = [tuple(Op(d, kind, i) for i in range(m) for kind in "FB") for d in range(2)]
        queues = [(d, "compute", ops[d], "alternate") for d in range(2)]
        queues.append((1, "network", tuple(message(0, 1, 5, i) for i in range(m))))
        began = time.process_time()
        run(queues, [0, 1], nodes(2, 1), 1.0, 1.0, backward_s=1.0)
        return time.process_time() - began

    seconds(1000)  # numba starts
    assert min(seconds(4000) for _ in range(2)) < 4 * 2.5 * min(seconds(1000) for _ in range(2))


CALLS = (
    CallTimes(SEND, 2, (10, 100), (0.5, 1.0)),
    CallTimes("all_reduce", 2, (10, 100), (1.0, 10.0)),
    CallTimes("all_reduce", 4, (10, 100), (2.0, 20.0)),
)


@pytest.mark.parametrize(
    ("name", "members", "size", "seconds"),
    [
        (SEND, 2, 0, 0.5),
        (SEND, 2, 55, 0.75),
        (SEND, 2, 190, 1.5),
        ("all_reduce", 2, 10, 1.0),
        ("all_reduce", 3, 10, 1.5),
        ("all_reduce", 4, 100, 20.0),
        ("all_reduce", 7, 100, 40.0),
        ("all_gather", 2, 100, None),
    ],
)
def test_calls_that_were_measured_are_on_straight_lines(name, members, size, seconds):
    assert Cluster(calls=CALLS).call_s(name, members, size) == seconds


@pytest.mark.parametrize(
    ("size", "seconds", "expected"),
    [((10,), (1.0,), "two"), ((10, 10), (1.0, 2.0), "ascend"), ((10, 20), (1.0,), "time"), ((1, 2), (0.0, -1.0), "0")],
)
def test_impossible_calls(size, seconds, expected):
    with pytest.raises(ValueError, match=expected):
        CallTimes(SEND, 2, size, seconds)


def test_messages_and_collectives_of_a_node_take_what_was_measured():
    """A collective that stands for several calls takes the time of each; between nodes links and ports count."""
    cluster = Cluster("t", 2, 2, intra=Link(0, 7.0), node_port=Link(0, 1.0), calls=CALLS)
    both = tuple(Op(0, "collective", None, "all_reduce@tied/w", bytes=110, buffers=(10, 100)) for _ in range(2))
    queues = [(0, "compute", both[:1]), (1, "network", (message(0, 1, 55),)), (1, "compute", both[1:])]
    spans, _ = run(queues, [0, 1, 2], cluster)
    assert spans["1copy0<0", 1][1] - spans["1copy0<0", 1][0] == 0.75
    assert spans["0collective:all_reduce@tied/w", 0][1] - spans["0collective:all_reduce@tied/w", 0][0] == 11
    spans, _ = run([(2, "network", (message(0, 2, 55),))], [0, 1, 2], cluster)
    assert spans["2copy0<0", 2] == (0, 55)


@pytest.mark.parametrize(
    ("forward_s", "buffers", "share", "exposed", "overlap"),
    [
        (8.0, (2, 2), 1.0, 2.0, 1.0),
        (1.0, (2, 2), 1.0, 3.5, 1.0),
        (8.0, (), 1.0, 4.0, 1.0),
        (1.0, (1,) * 4, 0.5, 3.625, 1.0),
        (0.0, (2, 2), 1.0, 4.0, 1.0),
        (8.0, (2, 2), 1.0, 3.0, 0.5),
        (8.0, (2, 2), 1.0, 4.0, 0.0),
    ],
)
def test_calls_that_overlap_a_task_are_exposed_but_for_its_time(forward_s, buffers, share, exposed, overlap):
    """All but one run while the task computes, and a part of their time is hidden; on CPU devices nothing is."""
    op = Op(0, "collective", None, "all_gather@data", bytes=4, buffers=buffers, overlaps=("F", share))
    for cluster, seconds in (
        (Cluster("t", 1, 2, intra=Link(0, 2.0), overlap=overlap), exposed),
        (Cluster("t", 2, 1, node_port=Link(0, 2.0), overlap=overlap), exposed),
        (Cluster("t", 1, 2, intra=Link(0, 2.0), cores=2.0), 4.0),
    ):
        spans, _ = run([(0, "compute", (op, Op(0, "F", 0)))], [0], cluster, forward_s, replicas=2)
        start_s, end_s = spans["0collective:all_gather@data", 0]
        assert end_s - start_s == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("slow", "step_s"),
    [
        ((), 3.0),
        (((0, 2.0),), 4.0),
        (((1, 2.0),), 5.0),
        (((2, 2.0),), 4.0),
        (((3, 3.0), (0, 2.0)), 7.0),
        (((0, 2.0), (1, 2.0)), 6.0),
        (((4, 9.0),), 3.0),
    ],
)
def test_the_slowest_replica_counts(slow, step_s):
    """Two replicas, devices 0 and 1, 2 and 3; device 4 has no work. Tasks take 1 and 2 seconds."""
    queues = [(0, "compute", (Op(0, "F", 0),)), (1, "network", (message(0, 1, 1),)), (1, "compute", (Op(1, "F", 0),))]
    _, figures = run(queues, [0, 1], Cluster("t", 1, 6, slow=slow), 1.0, 2.0, replicas=2)
    assert figures["step_time_s"] == step_s


@pytest.mark.parametrize("slow", [1, 2, 3])
def test_all_shards_wait_for_a_slow_one(slow):
    queues = [(0, "compute", (Op(0, "F", 0), Op(0, "step")))]
    schedule = Schedule(tuple(QueueOps(*queue) for queue in queues), (0,), tensor=4)
    plan = Plan(Plan.contiguous([1]).mesh, (Stage(0, 0, 0),))
    cluster = Cluster("t", 1, 4, slow=((slow, 1.5), (0, 1.25)))
    assert simulate(schedule, plan, profile(1.0), cluster, MEMORY).figures["step_time_s"] == 1.5
