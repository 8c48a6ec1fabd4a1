"""What the myelin engine says of itself: a trace that its schedule allows, micro-batches in flight, bytes."""

from __future__ import annotations

import pytest

from engines.myelin.config import POLICIES
from engines.myelin.session import joined
from harness.cluster import Cluster
from harness.counting import count
from harness.interfaces import Session
from harness.launch import call
from harness.memory import named
from harness.schedule import violations
from harness.simulate import simulate
from harness.trace import Span, Trace
from tests.engines.myelin.cases import case, schedule_of, trace_of

TRACED = [
    ("skips", 4, 1, {"transport": "mpi"}), ("skips", 3, 1, {"policy": "backward_first", "pipeline_limit": 2}),
    ("tied", 2, 2, {"k": 1, "bsize": 50}), ("tied", 2, 2, {"k": 0}), ("gpt", 2, 1, {"offload": True, "bsize": 300}),
    ("pairs", 3, 1, {"order": "1f1b"}), ("pairs", 3, 1, {"order": "gpipe", "transport": "mpi"}),
    ("skips", 2, 1, {"checkpoint_every": "2"}),
]  # fmt: skip


@pytest.mark.parametrize(("model", "pipeline", "data", "keys"), TRACED)
def test_runs_its_schedule(model: str, pipeline: int, data: int, keys: dict[str, str]) -> None:
    """A rank may lose its core between an event and its look at the clock: what is wrong is wrong three times."""
    one = case(model, pipeline, data, m=4 // data, **keys)
    schedule = schedule_of(one)
    found: list[str] = []
    for _ in range(3):
        found = violations(schedule, trace_of(one))
        if not found:
            break
    assert not found, found


def in_flight(trace: Trace, stage: int) -> int:
    """The most micro-batches between the begin of their forward and the end of their backward pass at once."""
    events = []
    for span in trace.spans:
        if span.device == stage and span.queue == "compute" and span.op[1] in "FB":
            forward = span.op[1] == "F"
            events.append((span.start_s if forward else span.end_s, 1 if forward else -1))
    most = now = 0
    for _, change in sorted(events):
        now += change
        most = max(most, now)
    assert now == 0 and events
    return most


@pytest.mark.parametrize(("policy", "limit"), [*((policy, 4) for policy in POLICIES), ("fifo", None), ("fifo", 1)])
def test_in_flight_never_more_than_the_limit(policy: str, limit: int | None) -> None:
    one = case("skips", 3, m=8, policy=policy, pipeline_limit=limit)
    trace = trace_of(one)
    found = [in_flight(trace, stage) for stage in range(3)]
    assert max(found) <= (limit or 3), found
    assert found[0] == min(limit or 3, 8), "the first stage fills the pipeline"


@pytest.mark.parametrize(("model", "data"), [("skips", 1), ("gpt", 2)])
def test_sends_what_is_predicted(model: str, data: int) -> None:
    one = case(model, 3, data, m=2)

    def work(session: Session) -> dict[str, int]:
        return session.step(one.model.sample(one.samples)).bytes_sent

    profile = count(one.model, one.samples // (2 * data), one.dtype)
    planned = schedule_of(one)
    seconds = dict.fromkeys(map(str, planned.ops()), 1.0)
    found = simulate(planned, one.plan, profile, Cluster(devices_per_node=6), named("sgd_fp32"), durations=seconds)
    assert call(one.engine, one.model, one.plan, one.spec, work) == found.figures["bytes_sent"]


def test_both_ends_of_a_message_are_one_span() -> None:
    sent, received = Span("1copy0<0", 0, "network", 2.0, 2.0), Span("1copy0<0", 1, "network", 5.0, 5.0)
    task = Span("0F0", 0, "compute", 1.0, 2.0)
    assert joined([task, sent, received]) == [task, Span("1copy0<0", 1, "network", 2.0, 5.0)]
    assert joined([received, sent]) == [Span("1copy0<0", 1, "network", 2.0, 5.0)]
