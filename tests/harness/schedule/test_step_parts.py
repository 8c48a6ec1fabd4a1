"""What a step consists of: traces made up, and simulated ones of every family of schedules."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from harness.core.cluster import Cluster, Link
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.plan import Mesh, Plan, Stage
from harness.core.trace import Span, Trace
from harness.schedule import Schedule
from harness.schedule.builders.data_parallel import data_parallel
from harness.schedule.builders.deepspeed import deepspeed
from harness.schedule.builders.gpipe import gpipe
from harness.schedule.builders.myelin import myelin, split_into_chunks
from harness.schedule.builders.one_f_one_b import one_f_one_b
from harness.schedule.builders.single import single
from harness.schedule.step_parts import parts_s, quickest_computing_s
from harness.schedule.transfers import Transfer
from harness.simulator import simulate

TWO = (Transfer(0, 1, bytes=1000),)


def spans(*rows: tuple[str, int, str, float, float]) -> tuple[Span, ...]:
    return tuple(Span(*row) for row in rows)


def test_a_pipeline() -> None:
    """Device 0 waits for 2 s, has a gradient on its way for 1 s, and does nothing for 0.5 s; device 1 begins late."""
    found = parts_s(
        Trace(
            spans(
                ("0F0", 0, "compute", 1.0, 2.0),
                ("1copy0<0", 1, "network", 2.0, 2.5),
                ("1F0", 1, "compute", 3.0, 4.0),
                ("1B0", 1, "compute", 4.0, 6.0),
                ("0copy0<1", 0, "network", 6.0, 7.0),
                ("0B0", 0, "compute", 7.5, 9.5),
                ("0step", 0, "compute", 9.5, 10.0),
                ("1step", 1, "compute", 6.0, 6.5),
            ),
            ((1.0, 10.25),),
        ),
        one_f_one_b(1, [0, 1], TWO),
    )
    assert found == {
        "computing": (3.5 + 3.5) / 2,
        "communication": (1.0 + 0.5) / 2,
        "waiting": (4.0 + 1.0 + 3.5) / 2,
        "host": (0.5 + 0.25 + 0.5 + 0.25) / 2,
    }


def test_what_computing_takes_in_the_quickest_steps() -> None:
    """Each task in the step that was quickest for it, the update among them, and no messages."""
    taken_s = {"0F0": (3.0, 2.0, 2.5, 9.0, 2.25), "0step": (1.0, 1.0, 0.5, 1.0, 1.0), "1F0": (4.0, 4.0, 8.0, 4.0, 4.0)}
    rows = [
        Span(op, int(op[0]), "compute", 10.0 * step, 10.0 * step + seconds[step], step)
        for step in range(5)
        for op, seconds in {**taken_s, "1copy0<0": (0.1,) * 5}.items()
    ]
    steps = tuple((10.0 * step, 10.0 * step + 10) for step in range(5))
    assert quickest_computing_s(Trace(tuple(rows), steps)) == (2.5 + 4.0) / 2
    assert quickest_computing_s(Trace(tuple(rows), steps[:4])) is None, "four steps say little"
    assert quickest_computing_s(Trace((), steps)) is None, "an engine may leave no trace"
    twenty = tuple(Span("0F0", 0, "compute", float(step), step + 0.5 + 0.01 * step, step) for step in range(20))
    found = quickest_computing_s(Trace(twenty, tuple((float(step), step + 1.0) for step in range(20))))
    assert found == pytest.approx(0.52), "the third of twenty: the quickest one alone may be anything"


def test_the_first_of_two_at_a_message_waits() -> None:
    rows = spans(
        ("0F0", 0, "compute", 0.0, 1.0),
        ("0send0<1", 0, "compute", 1.0, 4.0),
        ("1recv0<0", 1, "compute", 3.0, 4.5),
    )
    found = parts_s(Trace(rows, ((0.0, 4.5),)), deepspeed(1, [0, 1], TWO))
    assert found is not None
    assert found["computing"] == 0.5 and found["communication"] == (1.0 + 1.5) / 2
    assert found["waiting"] == (2.0 + 0.5 + 1.0) / 2, "for the other end; at the end; for the sender's task"
    assert found["host"] == 2.0 / 2


def test_whose_other_end_is_busy_waits() -> None:
    """Engines record a message from when both ends are there: before, the sender has waited."""
    rows = spans(
        ("0F0", 0, "compute", 0.0, 1.0), ("0send0<1", 0, "compute", 1.0, 1.5), ("0F1", 0, "compute", 1.5, 2.0),
        ("1recv0<0", 1, "compute", 1.0, 1.5), ("1F0", 1, "compute", 1.5, 3.0), ("1B0", 1, "compute", 3.0, 6.0),
        ("1send0<0", 1, "compute", 6.5, 7.0), ("0recv0<1", 0, "compute", 6.5, 7.0),
    )  # fmt: skip
    found = parts_s(Trace(rows, ((0.0, 7.0),)), deepspeed(2, [0, 1], TWO))
    assert found == {"computing": 3.0, "communication": 1.0, "waiting": (4.0 + 1.0) / 2, "host": 0.5}


def test_a_gap_after_all_outputs_is_not_waiting() -> None:
    """The last stage's backward passes wait for the outputs of all micro-batches, and no longer."""
    rows = spans(
        ("0F0", 0, "compute", 0.0, 1.0), ("0F1", 0, "compute", 1.0, 2.0),
        ("0B1", 0, "compute", 2.5, 3.0), ("0B0", 0, "compute", 3.0, 4.0), ("0step", 0, "compute", 4.0, 4.0),
    )  # fmt: skip
    found = parts_s(Trace(rows, ((0.0, 4.0),)), gpipe(2, [0], [], "never"))
    assert found == {"computing": 3.5, "communication": 0.0, "waiting": 0.0, "host": 0.5}


def test_of_several_steps_the_median_counts() -> None:
    rows = tuple(Span("0F0", 0, "compute", 10.0 * k, 10.0 * k + s, k) for k, s in enumerate((1, 7, 3)))
    found = parts_s(Trace(rows, tuple((10.0 * k, 10.0 * k + 8) for k in range(3))), single(1))
    assert found == {"computing": 3.0, "communication": 0.0, "waiting": 0.0, "host": 5.0}


def test_without_a_trace_nothing_is_known() -> None:
    assert parts_s(Trace(()), single(1)) is None


CHUNKS = [split_into_chunks(4000, 4, 1000, 1)] * 2
SCHEDULES: dict[str, Callable[[], Schedule]] = {
    "single": lambda: single(4, "always"),
    "gpipe": lambda: gpipe(4, [0, 1], TWO, "except_last"),
    "1f1b": lambda: one_f_one_b(4, [0, 1], TWO),
    "deepspeed": lambda: deepspeed(4, [0, 1], TWO, replicas=2, parameter_bytes=[4000, 4000]),
    "myelin": lambda: myelin(4, [0, 1], TWO, replicas=2, chunks=CHUNKS),
    "zero3": lambda: data_parallel(4, 8000, 2, "zero3"),
}


@pytest.mark.parametrize("jitter", [0.0, 0.3])
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_parts_of_a_simulated_step_are_the_step(name: str, jitter: float) -> None:
    """And a simulated host takes no time."""
    profile = ModelProfile(tuple(LayerProfile(forward_s=1 + k, backward_s=2, param_bytes=4000) for k in range(2)))
    schedule = SCHEDULES[name]()
    stages = tuple(Stage(k, k, k) for k in range(2)) if max(schedule.devices) else (Stage(0, 1, 0),)
    plan = Plan(Mesh(pipeline=len(stages), data=schedule.replicas), stages, 4)
    cluster = Cluster(nodes=2, devices_per_node=2, intra=Link(0.01, 1e-3), node_port=Link(0.02, 1e-3))
    done = simulate(schedule, plan, profile, cluster, MemoryModel(), jitter, 1)
    found = parts_s(done.trace, schedule)
    assert found is not None
    assert sum(found.values()) == pytest.approx(done.figures["step_time_s"])
    assert found["host"] == pytest.approx(0, abs=1e-9)
    assert found["computing"] == pytest.approx(sum(done.figures["utilization"]) / len(stages) * sum(found.values()))
    assert (found["communication"] > 0) == (name != "single")
