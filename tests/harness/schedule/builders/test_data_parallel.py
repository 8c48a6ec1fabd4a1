"""Data parallelism and ZeRO: orders, bytes and seconds of each kind."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.core.cluster import Cluster, Link
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.plan import Mesh, Plan, Stage
from harness.core.problem import ProblemError
from harness.schedule import Schedule
from harness.schedule.builders.data_parallel import SHARDINGS, data_parallel
from harness.schedule.builders.single import single
from harness.schedule.validate import validation_errors
from harness.simulator import simulate
from tests.problems import refused, rows
from tests.support.violations import violations

KINDS = st.sampled_from(SHARDINGS)
REDUCTIONS = st.sampled_from(["all_reduce", "reduce_scatter"])
SHORT = {
    "reduce_scatter@data": "scatter", "all_gather@data": "gather", "all_gather@data/forward": "gather>",
    "all_gather@data/backward": "gather<", "all_reduce@data": "sum",
}  # fmt: skip


def drawn(schedule: Schedule) -> str:
    words = []
    for op in schedule.by_queue()[0, "compute"]:
        i = "" if op.micro_batch is None else op.micro_batch
        words.append(f"{SHORT[op.part]}{i}" if op.kind == "collective" else str(op).removeprefix("0"))
    return " ".join(words)


def figures(schedule: Schedule, m: int, link: Link) -> dict[str, Any]:
    model = ModelProfile((LayerProfile(forward_s=1.0, backward_s=2.0),))
    plan = Plan(Mesh(data=schedule.replicas), (Stage(0, 0, 0),), m)
    assert validation_errors(schedule, plan) == []
    done = simulate(schedule, plan, model, Cluster(devices_per_node=schedule.replicas, intra=link), MemoryModel())
    assert violations(schedule, done.trace) == []
    return done.figures


@pytest.mark.parametrize(
    ("kind", "order"),
    [
        ("all_reduce", "F0 B0 F1 B1 sum step"),
        ("zero1", "F0 B0 F1 B1 scatter step gather"),
        ("zero2", "F0 B0 scatter0 F1 B1 scatter1 step gather"),
        ("zero3", "gather>0 F0 gather<0 B0 scatter0 gather>1 F1 gather<1 B1 scatter1 step"),
    ],
)
def test_the_orders_of_the_picture(kind: Any, order: str) -> None:
    schedule = data_parallel(2, 100, 3, kind)
    assert drawn(schedule) == order
    assert {op.bytes for op in schedule.ops() if op.kind == "collective"} == {100}
    assert (schedule.replicas, schedule.devices) == (3, (0,))


def test_the_variants_that_libraries_have() -> None:
    assert drawn(data_parallel(2, 8, 2, "zero1", reduction="all_reduce")) == "F0 B0 F1 B1 sum step gather"
    assert drawn(data_parallel(2, 8, 2, "zero2", reduction="all_reduce")) == "F0 B0 sum0 F1 B1 sum1 step gather"
    assert drawn(data_parallel(1, 8, 2, "zero3", reshard=False)) == "gather>0 F0 B0 scatter0 step"
    assert drawn(data_parallel(1, 8, 2, "zero3", reduction="all_reduce")).endswith("B0 scatter0 step")
    assert drawn(data_parallel(1, 8, 2, "all_reduce", reduction="reduce_scatter")) == "F0 B0 sum step"


def test_a_recomputation_shares_the_weights_of_its_backward_task() -> None:
    assert drawn(data_parallel(2, 8, 2, "zero3", "except_last")) == (
        "gather>0 F0 gather<0 R0 B0 scatter0 gather>1 F1 gather<1 B1 scatter1 step"
    )
    assert drawn(data_parallel(1, 8, 2, "zero2", "always")) == "F0 R0 B0 scatter0 step gather"


@given(m=st.integers(1, 5), kind=KINDS, mode=st.sampled_from(["always", "except_last", "never"]))
def test_one_replica_is_plain_gradient_accumulation(m: int, kind: Any, mode: str) -> None:
    assert data_parallel(m, 8, 1, kind, mode).queues == single(m, mode).queues


@given(
    m=st.integers(1, 5), g=st.integers(2, 6), size=st.integers(0, 1000), kind=KINDS, reduction=REDUCTIONS,
    reshard=st.booleans(),
)  # fmt: skip
def test_bytes_and_seconds_are_the_closed_forms(
    m: int, g: int, size: int, kind: Any, reduction: Any, reshard: bool
) -> None:
    """A ring's edge carries (g - 1) / g of the buffer in g - 1 messages, for an all-reduce twice that."""
    whole = {"all_reduce": 1, "zero1": 1, "zero2": m, "zero3": m}[kind]
    algorithm = {"all_reduce": "all_reduce", "zero3": "reduce_scatter"}.get(kind, reduction)
    gathers = {"all_reduce": 0, "zero1": 1, "zero2": 1, "zero3": 2 * m if reshard else m}[kind]
    times = {algorithm: whole, "all_gather": gathers}

    found = figures(data_parallel(m, size, g, kind, "never", reduction, reshard), m, Link(0.5, 0.01))
    assert found["bytes_sent"] == {name: count * g * size for name, count in times.items() if count}
    rounds = sum(count * (2 if name == "all_reduce" else 1) for name, count in times.items())
    assert found["step_time_s"] == pytest.approx(3 * m + rounds * (g - 1) * (0.5 + size / g * 0.01))


def test_shards_send_as_much_as_an_all_reduce_and_weights_in_shards_half_as_much_again() -> None:
    """Section 7 of the paper, for one micro-batch: 2, 2 and 3 times the parameters through each edge."""
    link = Link(0.0, 1.0)
    seconds = [figures(data_parallel(1, 30, 3, kind), 1, link)["step_time_s"] - 3 for kind in SHARDINGS]
    assert seconds == pytest.approx([2 * 20, 2 * 20, 2 * 20, 3 * 20])


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ProblemError) as caught:
        data_parallel(1, 8, 2, "zero4")  # type: ignore[arg-type]
    assert rows(refused(caught)) == [("kind", "zero4", ["kind=all_reduce"])]
