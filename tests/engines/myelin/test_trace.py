"""What the myelin engine says of itself: a trace that its schedule allows, micro-batches in flight, bytes."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from engines.myelin.engine import POLICIES
from engines.myelin.session import MyelinSession
from harness.core.cluster import Cluster
from harness.core.memory_model import named
from harness.core.trace import Span, Trace
from harness.interfaces import Session
from harness.measure.count_model import count
from harness.runtime.transports.merge_spans import joined, together
from harness.simulator import simulate
from tests.engines.contract import Case
from tests.engines.myelin.cases import case, schedule_of, trace_of
from tests.support.sessions import run_session
from tests.support.violations import violations

pytestmark = pytest.mark.usefixtures("ranks")

TRACED = [
    ("skips", 4, 1, {"transport": "mpi"}), ("skips", 3, 1, {"policy": "backward_first", "pipeline_limit": 2}),
    ("tied", 2, 2, {"k": 1, "bsize": 50}), ("tied", 2, 2, {"k": 0}), ("norms", 2, 2, {"k": 0, "barrier": True}),
    ("gpt", 2, 1, {"offload": True, "bsize": 300}),
    ("pairs", 3, 1, {"order": "1f1b"}), ("pairs", 3, 1, {"order": "gpipe", "transport": "mpi"}),
    ("skips", 2, 1, {"checkpoint_every": "2"}),
]  # fmt: skip


def check_schedule(one: Case) -> None:
    """A rank may lose its core between an event and its look at the clock: what is wrong is wrong three times."""
    schedule = schedule_of(one)
    found: list[str] = []
    for _ in range(3):
        found = violations(schedule, trace_of(one))
        if not found:
            break
    assert not found, found


@pytest.mark.parametrize(("model", "pipeline", "data", "keys"), TRACED)
def test_runs_its_schedule(model: str, pipeline: int, data: int, keys: dict[str, str]) -> None:
    one = case(model, pipeline, data, m=4 // data, **keys)
    check_schedule(one)


@pytest.mark.parametrize(("policy", "limit"), [*((policy, 4) for policy in POLICIES), ("fifo", None), ("fifo", 1)])
def test_in_flight_never_more_than_the_limit(policy: str, limit: int | None) -> None:
    one = case("skips", 3, m=8, policy=policy, pipeline_limit=limit)
    trace = trace_of(one)
    found = [trace.in_flight(stage) for stage in range(3)]
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
    assert run_session(one.engine, one.model, one.plan, one.spec, work) == found.figures["bytes_sent"]


def test_both_ends_of_a_message_are_one_span() -> None:
    sent, received = Span("1copy0<0", 0, "network", 2.0, 2.0), Span("1copy0<0", 1, "network", 5.0, 5.0)
    task = Span("0F0", 0, "compute", 1.0, 2.0)
    assert joined([task, sent, received], (0, 1)) == [task, Span("1copy0<0", 1, "network", 2.0, 5.0)]
    assert joined([received, sent], (0, 1)) == [Span("1copy0<0", 1, "network", 2.0, 5.0)]


def test_sums_begin_when_all_are_there() -> None:
    """Over replicas each stage's own, over copies of a parameter those of all stages and replicas."""
    data, tied, task = (
        "collective:all_reduce@data/chunk0",
        "collective:all_reduce@copies/w",
        Span("0F0", 0, "compute", 1, 2),
    )
    first = [task, Span(f"0{data}", 0, "network", 3, 9), Span(f"1{data}", 1, "network", 4, 9),
             Span(f"0{tied}", 0, "compute", 2, 7), Span(f"1{tied}", 1, "compute", 2.5, 6.75)]  # fmt: skip
    second = [replace(task, start_s=0), Span(f"0{data}", 0, "network", 7, 9), Span(f"1{data}", 1, "network", 2, 9),
              Span(f"0{tied}", 0, "compute", 6, 7), Span(f"1{tied}", 1, "compute", 6, 7)]  # fmt: skip
    found = {span.op: (span.start_s, span.end_s) for span in together([first, second])}
    assert found == {
        "0F0": (1, 2),
        f"0{data}": (7, 9),
        f"1{data}": (4, 9),
        f"0{tied}": (6, 7),
        f"1{tied}": (6, 6.75),
    }


def test_a_replica_that_comes_late_is_waited_for_outside_of_its_sums() -> None:
    one = case("pairs", 1, 2, m=2)
    finish_s = 0.3

    def work(session: Any) -> tuple[Trace, float]:
        assert isinstance(session, MyelinSession)
        finish, came = session.updates.finish, [0.0]

        def late() -> int:
            if dist.get_rank() == 1:
                time.sleep(finish_s)
                came[0] = time.perf_counter()
            return finish()

        session.updates.finish = late  # type: ignore[method-assign]
        session.step(one.model.sample(8))
        reported: list[Any] = [None, None]
        dist.all_gather_object(reported, came[0])
        return session.trace(), reported[1]

    trace, came_s = run_session(one.engine, one.model, one.plan, one.spec, work)
    (summed,) = [span for span in trace.spans if "all_reduce" in span.op]
    assert came_s <= summed.start_s <= summed.end_s


def test_a_step_that_overflows_leaves_a_trace_that_the_schedule_allows() -> None:
    one = replace(case("tied", 2, 2, m=2, loss_scale=1e30, offload=True, bsize=50), dtype="float16")
    check_schedule(one)
