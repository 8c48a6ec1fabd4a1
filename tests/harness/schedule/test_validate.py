from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.op import Op
from harness.core.plan import Plan
from harness.schedule import QueueOps, Schedule, validate
from harness.schedule.builders.gpipe import gpipe
from harness.schedule.builders.one_f_one_b import one_f_one_b
from harness.schedule.builders.single import single
from harness.schedule.transfers import Transfer
from harness.simulator import Deadlock, simulate
from tests import problems
from tests.support.quick import within_s

Fault = tuple[str, str]
CHAIN = [Transfer(0, 1, bytes=8)]


def faults(schedule: Schedule, plan: Plan | None = None) -> list[Fault]:
    return problems.faults(validate.validation_errors(schedule, plan))


def schedule(text: str, devices: tuple[int, ...] = (0, 1), loss: str = "each", rule: str = "in_order") -> Schedule:
    """A queue for each line, as `Schedule.text` writes them."""
    queues = []
    for line in text.strip().splitlines():
        _, device, *rest = line.split()
        queue = " ".join(rest[:2]) if rest[0] == "copy" else rest[0]
        names = rest[len(queue.split()) :]
        queues.append(QueueOps(int(device), queue, tuple(map(Op.parse, names)), rule))  # type: ignore[arg-type]
    return Schedule(tuple(queues), devices, loss)  # type: ignore[arg-type]


@pytest.mark.parametrize("recompute", ["always", "except_last", "never"])
@pytest.mark.parametrize("streams", [True, False])
def test_good_schedules_have_none(recompute: str, streams: bool) -> None:
    plan = Plan.contiguous([1, 1], 3)
    assert faults(gpipe(3, [0, 1], CHAIN, recompute, streams=streams), plan) == []
    assert faults(gpipe(3, [0, 1, 0], [*CHAIN, Transfer(1, 2)], recompute, streams=streams)) == []
    assert faults(one_f_one_b(3, [0, 1], CHAIN, recompute), plan) == []
    assert faults(single(3, recompute), Plan.contiguous([2], 3)) == []


def test_the_text_of_a_schedule_reads_back() -> None:
    for good in (gpipe(2, [0, 1], CHAIN), single(2)):
        assert schedule(good.text(), good.devices, good.loss) == good


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("device 0 compute 0F0 0B0 0F0", [("0F0 of stage 0", "once")]),
        ("device 0 compute 0F0 0B0 \n device 0 host 0B0",
         [("0B0 of stage 0", "in one of them")]),
        ("device 0 compute 0F0", [("0F0 of stage 0", "add 0B0, or leave out 0F0")]),
        ("device 0 compute 0B0", [("0B0 of stage 0", "add 0F0, or leave out 0B0")]),
        ("device 0 compute 0F0 0B0 0R1", [("0R1 of stage 0", "add 0F1, or leave out 0R1")]),
        ("device 0 compute 0F0 0B0 0W1", [("0W1 of stage 0", "add 0B1, or leave out 0W1")]),
        ("device 0 compute 0F0 0B0 \n device 0 copy in 0copy0<0",
         [("0copy0<0 of stage 0", "another one of the stages 0..0")]),
        ("device 0 compute 0F0 0B0 3F0", [("3F0 of stage 3", "a stage of 0..0")]),
        ("device 0 compute 0F0 0F 0B0", [("0F of stage 0", "0F0")]),
        ("device 0 compute 0B0 0F0",
         [("0B0 of stage 0", "another order in device 0 compute")]),
    ],
)  # fmt: skip
def test_a_fault_on_one_stage(text: str, expected: list[Fault]) -> None:
    assert faults(schedule(text, (0,))) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("device 0 compute 0F0 0F1 0B1 0B0 \n device 1 compute 1F0 1B0",
         [("1F1 and 1B1 of stage 1", "add micro-batch 1 to stage 1")]),
        ("device 0 compute 0F0 0B0 1B0 \n device 1 compute 1F0",
         [("1B0 of stage 1", "device 1")]),
        ("device 0 compute 0F0 0B0 \n device 1 compute 1F0 1B0 \n device 1 copy in 1copy0<2",
         [("1copy0<2 of stage 1", "another one of the stages 0..1")]),
        ("device 0 compute 0F0 0B0 \n device 1 compute 1F0 1B0 \n device 1 copy in 1recv0",
         [("1recv0 of stage 1", "another one of the stages 0..1")]),
        ("device 0 compute 0F0 0B0 \n device 1 compute 1F0 1B0 \n device 0 copy in 1copy0<0",
         [("1copy0<0 of stage 1", "device 1")]),
        ("device 0 compute 0F0 0B0 \n device 1 compute 1F0 1B0 \n device 1 copy out 1copy0<0",
         [("1copy0<0 of stage 1", "device 0")]),
        ("device 0 compute 0F0 1copy0<0 0B0 \n device 1 compute 1F0 1B0",
         [("1copy0<0 of stage 1", "add it there")]),
        ("device 0 compute 0F0 0B0 \n device 1 compute 1F0 1B0 \n device 1 copy in 1copy7<0",
         [("1copy7<0 of stage 1", "add 0F7, or leave out 1copy7<0")]),
        ("device 0 compute 0F0 0B0 \n device 1 compute 1F0 1B0 \n device 0 copy in 0copy7<1",
         [("0copy7<1 of stage 0", "add 1B7, or leave out 0copy7<1")]),
        ("device 0 compute 0F0 0B0 \n device 1 compute 1F0 1B0 \n device 1 network 1recv0<0",
         [("1recv0<0 of stage 1", "add 0send0<1, or leave out 1recv0<0")]),
        ("device 0 compute 0F0 0B0 \n device 1 compute 1F0 1B0 \n"
         "device 0 copy in 1copy0<0 \n device 1 copy out 1copy0<0",
         [("1copy0<0 of stage 1", "in one of them")]),
    ],
)  # fmt: skip
def test_a_fault_between_two_stages(text: str, expected: list[Fault]) -> None:
    assert set(expected) <= set(faults(schedule(text)))
    assert len(faults(schedule(text))) <= len(expected) + 2


def test_sends_and_receives_that_meet_are_none() -> None:
    text = (
        "device 0 compute 0F0 0B0 \n device 0 network 0send0<1 \n device 1 compute 1F0 1B0 \n device 1 network 1recv0<0"
    )
    assert faults(schedule(text)) == []


def test_against_a_plan() -> None:
    good = gpipe(2, [0, 1], CHAIN, "never")
    assert faults(good, Plan.contiguous([1, 1, 1], 2)) == [("mesh.pipeline", "mesh.pipeline=2")]
    assert faults(good, Plan.contiguous([1, 1], 3)) == [
        ("0F2 and 0B2 of stage 0", "add micro-batch 2 to stage 0"),
        ("1F2 and 1B2 of stage 1", "add micro-batch 2 to stage 1"),
    ]
    assert faults(good, Plan.contiguous([1, 1], 1)) == [("micro-batch 1", "batch.micro_batches=2")]
    assert faults(replace(gpipe(2, [1, 0], CHAIN, "never"), limit=0), Plan.contiguous([1, 1], 2))[:3] == [
        ("limit 0", "1 or more"),
        ("stage 0", "device 0"),
        ("stage 1", "device 1"),
    ]


def test_a_circle_through_two_devices() -> None:
    """Each device waits for the other's forward task of another micro-batch."""
    crossed = schedule("""
        device 0 compute  0F1 0F0 0B0 0B1
        device 1 compute  1F0 1B0 1F1 1B1
        device 0 copy in  0copy0<1 0copy1<1
        device 1 copy in  1copy0<0 1copy1<0
    """)
    assert faults(crossed) == []
    waiting = schedule("""
        device 0 compute  0F0 0B0 0F1 0B1
        device 1 compute  1F0 1F1 1B0 1B1
    """)
    assert faults(waiting) == [
        ("0B0 of stage 0", "another order in device 0 compute or device 1 compute")
    ]  # fmt: skip
    assert validate.cycle(waiting) == ([Op.parse(name) for name in ("0B0", "0F1", "1F1", "1B0")],
                                       ["device 0 compute", "device 1 compute"])  # fmt: skip


def test_a_circle_through_the_gathering_of_outputs() -> None:
    """With the loss of all micro-batches no backward pass may come before the last forward pass."""
    text = "device 0 compute  0F0 0B0 0F1 0B1"
    assert faults(schedule(text, (0,))) == []
    assert faults(schedule(text, (0,), loss="gathered")) == [("0B0 of stage 0", "another order in device 0 compute")]


def test_a_rule_has_no_order_that_could_be_wrong() -> None:
    assert faults(schedule("device 0 compute  0B0 0F0", (0,), rule="fifo")) == []


def test_a_long_circle_is_shortened() -> None:
    first = " ".join(f"0F{i}" for i in range(1, 40))
    long = schedule(f"device 0 compute  0B0 {first} 0F0 " + " ".join(f"0B{i}" for i in range(1, 40)), (0,))
    found = validate.cycle(long)
    assert found and len(found[0]) > validate.SHOWN
    (problem,) = validate.find_cycle(long)
    assert problem.message.count(" -> ") == validate.SHOWN + 1


def test_collectives_of_one_communicator_in_two_orders() -> None:
    """Device 0 reduces a, then b; device 1 b, then a."""
    crossed = schedule("""
        device 0 compute  0F0 0B0
        device 0 network  0collective:all_reduce@all/a 0collective:all_reduce@all/b
        device 1 compute  1F0 1B0
        device 1 network  1collective:all_reduce@all/b 1collective:all_reduce@all/a
    """)
    ((_, advised),) = faults(crossed)
    assert advised == "another order in device 0 network or device 1 network"


@given(m=st.integers(1, 4), n=st.integers(1, 4), data=st.data())
def test_a_shuffled_schedule_has_a_circle_just_when_it_cannot_end(m: int, n: int, data: st.DataObject) -> None:
    """The simulator is the brute force. Each op of the named circle waits for the one before it."""
    transfers = [Transfer(j, j + 1) for j in range(n - 1)]
    good = gpipe(m, range(n), transfers, "always")
    queues = tuple(replace(queue, ops=tuple(data.draw(st.permutations(queue.ops)))) for queue in good.queues)
    shuffled = replace(good, queues=queues, loss=data.draw(st.sampled_from(["each", "gathered"])))
    found = faults(shuffled)
    profile = ModelProfile((LayerProfile(forward_s=1, backward_s=2),) * n)
    try:
        simulate(shuffled, Plan.contiguous([1] * n, m), profile, Cluster(devices_per_node=n), MemoryModel())
    except Deadlock:
        ops, _ = validate.cycle(shuffled) or ([], [])
        assert len(found) == 1 and len(set(ops)) == len(ops) > 0
    else:
        assert found == []


@given(m=st.integers(1, 4), n=st.integers(1, 4), data=st.data())
def test_every_op_that_is_left_out_or_doubled_is_noticed(m: int, n: int, data: st.DataObject) -> None:
    good = one_f_one_b(m, range(n), [Transfer(j, j + 1) for j in range(n - 1)], "always")
    places = [(number, op) for number, queue in enumerate(good.queues) if queue.name == "compute" for op in queue.ops]
    number, op = data.draw(st.sampled_from([place for place in places if place[1].kind in ("F", "B")]))
    plan = Plan.contiguous([1] * n, m)

    def with_ops(ops: tuple[Op, ...]) -> Schedule:
        return replace(
            good, queues=(*good.queues[:number], replace(good.queues[number], ops=ops), *good.queues[number + 1 :])
        )

    ops = good.queues[number].ops
    assert any(str(op) in key + advised for key, advised in faults(with_ops(tuple(o for o in ops if o != op)), plan))
    assert faults(with_ops((*ops, op)), plan) == [(f"{op} of stage {op.stage}", "once")]


@pytest.mark.usefixtures("computation")
def test_a_large_schedule_is_looked_through_in_a_second() -> None:
    """About 100,000 ops; 0.6 s of one core when it was written."""
    large = gpipe(512, range(48), [Transfer(j, j + 1) for j in range(47)], "never")
    assert sum(len(queue.ops) for queue in large.queues) > 97_000
    assert within_s(0.8, lambda: faults(large)) == []


def test_a_copy_without_another_end_goes_to_the_host() -> None:
    assert (
        faults(schedule("device 0 compute 0F0 0B0 \n device 1 compute 1F0 1B0 \n device 0 copy out 0copy0:offload"))
        == []
    )
