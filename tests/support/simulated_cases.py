"""Schedules of all builders, with plans, profiles, clusters and memory models: cases for what simulates them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from harness.core.cluster import SEND, CallTimes, Cluster, Device, EngineCosts, Link, TaskCost
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import LayerProfile, ModelProfile, Skip
from harness.core.plan import Mesh, Plan, Stage
from harness.schedule import Schedule
from harness.schedule.builders.data_parallel import SHARDINGS, data_parallel, with_replicas
from harness.schedule.builders.deepspeed import deepspeed
from harness.schedule.builders.gpipe import RECOMPUTE, gpipe
from harness.schedule.builders.message_driven import message_driven
from harness.schedule.builders.myelin import ORDERS, myelin, split_into_chunks
from harness.schedule.builders.one_f_one_b import one_f_one_b
from harness.schedule.families import FAMILIES
from harness.schedule.policy import RULES
from harness.schedule.tied_weight_ops import Tie, with_ties
from harness.schedule.transfers import Transfer, plan_transfers

Case = tuple[Schedule, Plan, ModelProfile]
PICKING = [rule for rule in RULES if rule != "in_order"]
SECONDS = st.sampled_from([0.0, 0.25, 1.0, 1.5, 0.1, 1 / 3])
SIZES = st.sampled_from([0, 1, 3, 10])
TIE = Tie("embedding.weight", (0, 1), 40)


def layers(draw: Callable[..., Any], count: int) -> tuple[LayerProfile, ...]:
    return tuple(
        LayerProfile(
            f"l{j}", draw(SECONDS), draw(SECONDS), output_bytes=draw(SIZES), saved_bytes=draw(SIZES),
            param_bytes=draw(SIZES), working_bytes=draw(SIZES), input_share=draw(st.sampled_from([0.5, 0.3])),
        )
        for j in range(count)
    )  # fmt: skip


@st.composite
def cases(draw: Callable[..., Any]) -> Case:
    """A schedule of some builder, with its plan and its profile."""
    m, n, replicas = draw(st.integers(1, 8)), draw(st.integers(1, 4)), draw(st.sampled_from([1, 1, 2]))
    kinds = ["family", "gpipe", "message_driven", "myelin", "deepspeed", "1f1b", "data_parallel"]
    kind = draw(st.sampled_from(kinds))
    chunks = draw(st.integers(1, 3))
    family = FAMILIES[draw(st.sampled_from(sorted(FAMILIES)))]
    if kind == "family" and family.refuses(m, n) is not None:
        m = max(m // n, 1) * 2 * n
    placement = {"family": family.placement(n, chunks), "data_parallel": (0,)}.get(kind, tuple(range(n)))
    stages = len(placement)
    skips = (Skip(0, stages - 1, draw(SIZES), "long"),) if stages > 2 and draw(st.booleans()) else ()
    profile = ModelProfile(layers(draw, stages), skips=skips)
    plan = Plan(Mesh(data=replicas), tuple(Stage(j, j, device) for j, device in enumerate(placement)), m)
    sent = plan_transfers(plan, profile, portals=kind != "deepspeed" and draw(st.booleans()))
    schedule = build(draw, kind, m, placement, sent, replicas, lambda: family.build(m, n, chunks, sent))
    if kind in ("family", "gpipe", "1f1b", "message_driven"):
        schedule = with_replicas(schedule, plan, profile)
        if n > 1 and draw(st.booleans()):
            schedule = with_ties(schedule, [TIE], draw(st.sampled_from(["compute", "network"])))
        limit = draw(st.none() | st.none() | st.integers(2, 6)) if schedule.limit is None else schedule.limit
        schedule = replace(schedule, limit=limit, barrier=draw(st.booleans()))
        schedule = replace(schedule, loss=draw(st.sampled_from([schedule.loss] * 3 + ["gathered"])))
    return schedule, plan, profile


def build(
    draw: Callable[..., Any], kind: str, m: int, devices: Sequence[int], sent: list[Transfer], replicas: int,
    family: Callable[[], Schedule],
) -> Schedule:  # fmt: skip
    recompute, rule, n = draw(st.sampled_from(RECOMPUTE)), draw(st.sampled_from(PICKING)), len(devices)
    limit, switches = draw(st.none() | st.integers(1, 4)), draw(st.tuples(st.booleans(), st.booleans()))
    if kind == "gpipe":
        return gpipe(m, devices, sent, recompute, *switches)
    if kind == "1f1b":
        return one_f_one_b(m, devices, sent, recompute)
    if kind == "message_driven":
        return message_driven(m, devices, sent, rule, limit, recompute)
    if kind == "myelin":
        parts = [split_into_chunks(draw(st.integers(0, 9)), 2, 2, draw(st.integers(0, 2)), switches[0])] * n
        order, chunks = draw(st.sampled_from(ORDERS)), parts if draw(st.booleans()) else ()
        return myelin(m, devices, sent, order, rule, limit, (), replicas, chunks, switches[1], draw(st.booleans()))
    if kind == "deepspeed":
        ties, zero = [TIE] if n > 1 and switches[0] else [], draw(st.sampled_from([0, 1]))
        return deepspeed(m, devices, sent, recompute, ties, replicas, [8] * n, zero)
    if kind == "data_parallel":
        return data_parallel(m, 24, replicas, draw(st.sampled_from(SHARDINGS)), recompute, reshard=switches[0])
    return family()


COSTS = EngineCosts("e", "sgd", (TaskCost("F", 0.25), TaskCost("collective", 0.5)), host_s=0.125, step_s=0.5)
LINKS = st.builds(
    Link, st.sampled_from([0.0, 0.5]), st.sampled_from([0.0, 0.25, 0.1]), st.sampled_from(["half", "full"])
)
CLUSTERS = st.builds(
    Cluster, st.just("t"), st.just(32), st.sampled_from([1, 2, 4, 16]),
    st.sampled_from([Device(), Device(memory_bandwidth=7.0, kernel_s=0.1)]), LINKS, LINKS, LINKS, st.booleans(),
    cores=st.sampled_from([0.0, 0.0, 0.5, 1.0, 1.5, 3.0]),
    calls=st.sampled_from([(), (CallTimes(SEND, 2, (1, 8), (0.5, 1.5)),)]),
    slow=st.sampled_from([(), ((1, 2.0),), ((0, 1.5), (3, 3.0))]),
    task_s=st.sampled_from([0.0, 0.1]), alone_bandwidth=st.sampled_from([0.0, 15.0]),
    engines=st.sampled_from([(), (COSTS,)]),
)  # fmt: skip
MEMORIES = st.builds(
    MemoryModel, optimizer=st.just(2.0), offloaded=st.sampled_from([0.0, 2.0]), reducing=st.sampled_from([0.0, 0.5]),
    flat=st.booleans(), activations=st.sampled_from(["saved", "saved", "saved", "inputs"]),
    messages=st.sampled_from(["passing", "posted", "copied", "kept"]),
)  # fmt: skip
