"""All published families: valid for any numbers, with the bubble and the memory of their papers.

F, B (for the inputs) and W are units of time; n devices, m micro-batches. What a device keeps is counted in
micro-batches of its stages, from the beginning of F to the end of W.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.op import Op
from harness.core.plan import Mesh, Plan, Stage
from harness.core.problem import ProblemError
from harness.core.trace import Trace
from harness.report.schedule_files import kept_activations
from harness.schedule import Schedule
from harness.schedule.dependency_graph import build_graph
from harness.schedule.families import FAMILIES, Family
from harness.schedule.transfers import transfers
from harness.schedule.validate import validation_errors
from harness.simulator import simulate

CHUNKS = 2
SIZES = [(n, m) for n in (4, 8) for m in (2 * n, 4 * n)]
KINDS = {"F": "F", "B": "B", "I": "B", "W": "W"}


def built(family: Family, n: int, m: int, chunks: int = CHUNKS) -> Schedule:
    stages = len(family.placement(n, chunks))
    return family.build(m, n, chunks, transfers([0] * (stages - 1), (), portals=True))


def trace_of(schedule: Schedule, m: int, durations: dict[str, float]) -> Trace:
    """A step in which tasks take so long, and messages nothing; a whole backward pass takes B and W."""
    plan = Plan(Mesh(), tuple(Stage(j, j, device) for j, device in enumerate(schedule.devices)), m)
    profile = ModelProfile((LayerProfile(),) * len(schedule.devices))
    split = {(op.stage, op.micro_batch) for op in schedule.ops() if op.kind == "W"}
    times = {}
    for op in schedule.ops():
        whole = op.kind == "B" and (op.stage, op.micro_batch) not in split
        times[str(op)] = durations["B"] + durations["W"] if whole else durations.get(op.kind, 0.0)
    cluster = Cluster(devices_per_node=max(schedule.devices) + 1)
    return simulate(schedule, plan, profile, cluster, MemoryModel(), durations=times).trace


def bubbles(trace: Trace) -> tuple[float, float]:
    """The idle time of the step's longest device, until the step ends; the longest between its first and last task."""
    tasks: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for span in trace.spans:
        if span.parsed.kind in ("F", "B", "W", "R"):
            tasks[span.device].append((span.start_s, span.end_s))
    busy = {device: sum(end - start for start, end in own) for device, own in tasks.items()}
    length = max(end for own in tasks.values() for _, end in own)
    inside = max(max(e for _, e in own) - min(s for s, _ in own) - busy[device] for device, own in tasks.items())
    return length - max(busy.values()), inside


def measured(name: str, n: int, m: int, F: float = 1, B: float = 1, W: float = 1) -> tuple[float, float, int]:
    """Bubble of the step, bubble within a device, the most that a device keeps."""
    trace = trace_of(built(FAMILIES[name], n, m), m, {"F": F, "B": B, "W": W})
    whole, inside = bubbles(trace)
    return round(whole, 9), round(inside, 9), max(kept_activations(trace).values())


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
def test_every_family_is_valid_for_any_numbers(name: str, n: int) -> None:
    family = FAMILIES[name]
    for m in (1, 2, 3, 5, 8, 2 * n, 4 * n):
        if family.refuses(m, n) is not None:
            with pytest.raises(ProblemError):
                built(family, n, m)
            continue
        schedule = built(family, n, m)
        assert schedule.devices == family.placement(n, CHUNKS)
        assert validation_errors(schedule) == []
        counts: dict[str, int] = defaultdict(int)
        for op in schedule.ops():
            counts[op.kind] += 1
        stages = len(schedule.devices)
        assert counts["F"] == counts["B"] == stages * m
        assert (counts["W"] > 0) == family.split
        assert counts["W"] == stages * m or not family.split or name == "dualpipev"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_fix_for_the_micro_batches_is_one(name: str) -> None:
    family = FAMILIES[name]
    for n in (2, 3):
        for m in range(1, 7):
            problem = family.refuses(m, n)
            for fix in problem.fixes if problem else ():
                other = FAMILIES[str(fix.get("engine.schedule", name))]
                assert other.refuses(int(fix.get("batch.micro_batches", m)), n) is None


@pytest.mark.parametrize(("n", "m"), SIZES)
@pytest.mark.parametrize("times", [(1, 1, 1), (2, 3, 1), (1, 1.5, 1)])
def test_bubble_and_memory_are_those_of_the_papers(n: int, m: int, times: tuple[float, float, float]) -> None:
    F, B, W = times
    assert measured("gpipe", n, m, *times) == ((n - 1) * (F + B + W), (n - 1) * (F + B + W), m)
    assert measured("1f1b", n, m, *times) == ((n - 1) * (F + B + W), (n - 1) * (F + B + W), n)
    assert measured("eager_1f1b", n, m, *times)[1:] == ((n - 1) * (F + B + W), 2 * n - 1)
    bubble, _, kept = measured("zb_h1", n, m, *times)
    assert (bubble, kept) == ((n - 1) * (F + B - W), n)
    assert measured("interleaved1f1b", n, m, *times)[0] == (n - 1) * (F + B + W), "of one of two chunks: half of 1F1B's"
    assert measured("looped_bfs", n, m, *times)[0] == (n - 1) * (F + B + W)
    assert measured("looped_bfs", n, m)[2] == CHUNKS * m


@pytest.mark.parametrize(("n", "m"), SIZES)
def test_zero_bubbles(n: int, m: int) -> None:
    """Inside of a device there are none; devices begin, and end, one after the other."""
    assert measured("zb_h2", n, m) == (n - 1, 0, 2 * n - 1)
    assert measured("zbv", n, m) == (n - 1, 0, 2 * n)
    assert measured("interleaved_zb", n, m)[0] == n - 1
    assert measured("dualpipev", n, m)[0] == n - 1


@pytest.mark.parametrize(("n", "m"), SIZES)
@pytest.mark.parametrize(("name", "life", "part"), [("v_min", 4, 2 / 3), ("v_half", 6, 1 / 2)])
def test_v_schedules_come_near_the_papers_numbers(name: str, n: int, m: int, life: int, part: float) -> None:
    """A block lives for about life * n units, six of which pass for each micro-batch; the bubble is a part of 1F1B's,
    which has stages of twice the size. The numbers are asymptotic."""
    bubble, _, kept = measured(name, n, m)
    assert life * n / 6 <= kept <= life * n / 6 + 3
    assert part * 6 * (n - 1) - 6 <= bubble <= part * 6 * (n - 1) + 3
    assert measured(name, n, 8 * n)[0] == bubble, "each further micro-batch takes six units"


def theirs(kind: str, m: int, n: int, chunks: int) -> list[list[str]]:
    """The order of each rank of a schedule class of torch in our notation."""
    from torch.distributed.pipelining import schedules

    made: Any = object.__new__(getattr(schedules, kind))
    made.pp_group_size, made._n_microbatches, made._stages = n, m, [None] * chunks
    made.num_stages = made._num_stages = n * chunks
    made.n_local_stages, made.microbatches_per_round = chunks, m // max(1, m // n)
    rows = []
    for rank in range(n):
        cells = [action for action in made._calculate_single_rank_operations(rank) if action is not None]
        single = [one for cell in cells for one in (cell.sub_actions or (cell,))]
        rows.append([f"{a.stage_index}{KINDS[a.computation_type.value]}{a.microbatch_index}" for a in single])
    return rows


@pytest.mark.parametrize(
    ("name", "kind", "chunks"),
    [
        ("looped_bfs", "ScheduleLoopedBFS", 2),
        ("looped_bfs", "ScheduleLoopedBFS", 3),
        ("interleaved_zb", "ScheduleInterleavedZeroBubble", 1),
        ("interleaved_zb", "ScheduleInterleavedZeroBubble", 2),
        ("interleaved_zb", "ScheduleInterleavedZeroBubble", 3),
        ("zb_h1", "ScheduleInterleavedZeroBubble", 1),
        ("dualpipev", "ScheduleDualPipeV", 2),
        ("zbv", "ScheduleZBVZeroBubble", 2),
        ("interleaved1f1b", "ScheduleInterleaved1F1B", 2),
    ],
)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_the_order_is_that_of_torch(name: str, kind: str, chunks: int, n: int) -> None:
    for m in (2 * n, 3 * n, 4 * n):
        schedule = built(FAMILIES[name], n, m, chunks)
        found = [[str(op) for op in schedule.by_queue()[r, "compute"] if op.kind != "step"] for r in range(n)]
        assert found == theirs(kind, m, n, chunks)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_graph_can_be_built_where_messages_block(name: str) -> None:
    assert build_graph(built(FAMILIES[name], 2, 4), blocking=True).ops


def test_zb_h1_keeps_as_many_as_1f1b_on_each_device() -> None:
    order = [op for op in built(FAMILIES["zb_h1"], 4, 8).by_queue()[3, "compute"] if op.kind != "step"]
    assert order[:7] == [Op(3, "F", 0), Op(3, "B", 0), Op(3, "F", 1), Op(3, "B", 1), Op(3, "F", 2), Op(3, "B", 2),
                         Op(3, "F", 3)]  # fmt: skip
