"""DeepSpeed's pipeline, held against the instructions of the library itself."""

from __future__ import annotations

import os
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.core.cluster import Cluster, Link
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import LayerProfile, ModelProfile, Skip
from harness.core.plan import Plan
from harness.core.problem import ProblemError
from harness.schedule import Schedule
from harness.schedule.builders.deepspeed import deepspeed
from harness.schedule.builders.one_f_one_b import one_f_one_b
from harness.schedule.tied_weight_ops import Tie
from harness.schedule.transfers import Transfer, plan_transfers
from harness.schedule.validate import validation_errors
from harness.simulator import Simulation, simulate
from tests.problems import refused, rows
from tests.support.violations import violations

MODES = st.sampled_from(["always", "except_last", "never"])
TIE = Tie("embedding.weight", (0, 1), 400)


def chain(stages: int, size: int = 0) -> list[Transfer]:
    return [Transfer(j, j + 1, bytes=size) for j in range(stages - 1)]


def run(
    schedule: Schedule, m: int, forward_s: float = 1, backward_s: float = 2, link: Link | None = None, saved: int = 0,
    output: int = 0,
) -> Simulation:  # fmt: skip
    n = len(schedule.devices)
    layer = LayerProfile(forward_s=forward_s, backward_s=backward_s, saved_bytes=saved, output_bytes=output)
    cluster = Cluster(devices_per_node=n * schedule.replicas, intra=link or Link())
    done = simulate(schedule, Plan.contiguous([1] * n, m), ModelProfile((layer,) * n), cluster, MemoryModel())
    assert violations(schedule, done.trace) == []
    return done


def step_s(schedule: Schedule, m: int, link: Link | None = None) -> float:
    return float(run(schedule, m, link=link).figures["step_time_s"])


def spans(done: Simulation) -> dict[str, tuple[float, float]]:
    return {span.op: (span.start_s, span.end_s) for span in done.trace.spans}


def ending(schedule: Schedule, device: int) -> str:
    ops = [str(op) for op in schedule.by_queue()[device, "compute"]]
    return " ".join(ops[1 + max(place for place, op in enumerate(ops) if "B" in op or "send" in op) :])


@pytest.fixture(scope="module")
def library() -> Any:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.pipe import schedule

    return schedule


def instructions(library: Any, m: int, n: int, j: int) -> list[str]:
    """What the library does on stage j, in our notation; its buffers are counted through to micro-batches."""
    kinds = {
        "ForwardPass": "{j}F{i}", "BackwardPass": "{j}B{i}",
        "SendActivation": "{j}send{i}<{following}", "RecvActivation": "{j}recv{i}<{previous}",
        "SendGrad": "{j}send{i}<{previous}", "RecvGrad": "{j}recv{i}<{following}",
        "ReduceTiedGrads": "{j}collective:all_reduce@tied/w", "ReduceGrads": "{j}collective:all_reduce@data",
        "OptimizerStep": "{j}step",
    }  # fmt: skip
    train = library.TrainSchedule(m, n, j)
    seen: dict[str, int] = {}
    found = []
    for command in (command for step in train for command in step if command.name != "LoadMicroBatch"):
        i = seen[command.name] = seen.get(command.name, -1) + 1
        assert getattr(command, "buffer_id", i) in (i, i % train.num_pipe_buffers())
        found.append(kinds[command.name].format(i=i, j=j, previous=j - 1, following=j + 1))
    return found


@pytest.mark.parametrize("n", range(1, 5))
@pytest.mark.parametrize("m", range(1, 10))
def test_every_stage_does_what_the_library_does(library: Any, n: int, m: int) -> None:
    """Tasks, messages, sums over copies and replicas, optimizer: all of it, in this order."""
    tie = Tie("w", tuple(range(n)), 4)
    schedule = deepspeed(m, range(n), chain(n), ties=[tie], replicas=2, parameter_bytes=[8] * n)
    for j, queue in enumerate(schedule.queues):
        assert [str(op) for op in queue.ops] == instructions(library, m, n, j)
        assert queue.name == "compute"
    assert schedule.rendezvous
    assert [queue.device for queue in schedule.queues] == list(range(n))


def test_the_picture_in_its_documentation() -> None:
    """F of micro-batch i in column 2i + j, B in column 2i + 2n - 1 - j, as many messages as there are."""
    assert deepspeed.__doc__ is not None
    rows = [line.strip() for line in deepspeed.__doc__.splitlines()]
    rows = rows[next(k for k, row in enumerate(rows) if row.startswith("step ")) :]
    columns = {rows[0].index(f" {step} ") + 1: step for step in range(9)} | {rows[0].index("9"): 9}
    for j in range(3):
        drawn = rows[2 * j + 1]
        place = {op: columns[drawn.index(op)] for op in drawn.split()[2:]}
        assert place == {f"{j}F{i}": 2 * i + j for i in range(3)} | {f"{j}B{i}": 2 * i + 5 - j for i in range(3)}
        tasks = [str(op) for op in deepspeed(3, range(3), []).queues[j].ops]
        assert drawn.split()[2:] == tasks[:-1]
    assert [rows[k].count(arrow) for k in (2, 4) for arrow in "><"] == [3, 3, 3, 3]


def test_a_hand_checked_step_with_messages_of_a_second() -> None:
    """
    stage 0  F0 > F1 . . < > B0 B0 . < B1 B1        13 s; without waiting for each other, as 1F1B may, 11 s
    stage 1  . > F0 B0 B0 < > F1 B1 B1 < . .
    """
    second = Link(1.0, 0.0)
    done = run(deepspeed(2, range(2), chain(2)), 2, link=second)
    assert spans(done) == {
        "0F0": (0, 1), "0send0<1": (1, 2), "1recv0<0": (1, 2), "0F1": (2, 3), "1F0": (2, 3), "1B0": (3, 5),
        "1send0<0": (5, 6), "0recv0<1": (5, 6), "0send1<1": (6, 7), "1recv1<0": (6, 7), "0B0": (7, 9), "1F1": (7, 8),
        "1B1": (8, 10), "1send1<0": (10, 11), "0recv1<1": (10, 11), "0B1": (11, 13), "0step": (13, 13),
        "1step": (11, 11),
    }  # fmt: skip
    assert step_s(one_f_one_b(2, range(2), chain(2)), 2, second) == 11


def test_hand_checked_memory() -> None:
    """Stage 0 keeps two micro-batches; what 0F1 made waits there until stage 1 has sent the gradient of 1B0."""
    done = run(deepspeed(2, range(2), chain(2, 10)), 2, link=Link(1.0, 0.0), saved=100, output=10)
    parts = [peak.contents for peak in done.peaks]
    assert parts[0]["saved"] == 200
    assert parts[1]["saved"] == 90, "the input, 10 bytes of what the first layer saves, counts as received"
    assert parts[1]["received"] == 10
    assert parts[0]["to be sent"] == 10
    assert (parts[0].get("received"), done.peaks[0].at_s) == (10, 5), "a gradient comes while 0F1 still waits"
    assert done.figures["bytes_sent"] == {"activations": 20, "gradients": 20}


@given(m=st.integers(1, 12), n=st.integers(1, 6), forward=st.integers(1, 8), backward=st.integers(1, 16))
def test_with_free_messages_it_is_1f1b(m: int, n: int, forward: int, backward: int) -> None:
    schedule = deepspeed(m, range(n), chain(n))
    done = run(schedule, m, forward, backward, saved=1000)
    assert done.figures["step_time_s"] == (m + n - 1) * (forward + backward)
    assert [peak.contents.get("saved", 0) for peak in done.peaks] == [1000 * min(m, n - j) for j in range(n)]
    for queue, eager in zip(schedule.queues, one_f_one_b(m, range(n), []).queues, strict=True):
        assert tuple(op for op in queue.ops if op.kind in ("F", "B", "step")) == eager.ops
        assert max(accumulate({"F": 1, "B": -1}.get(op.kind, 0) for op in queue.ops)) == min(m, n - queue.device)


@given(m=st.integers(1, 8), n=st.integers(2, 5), seconds=st.integers(1, 5))
def test_blocking_messages_are_never_faster(m: int, n: int, seconds: int) -> None:
    link = Link(seconds, 0.0)
    assert step_s(deepspeed(m, range(n), chain(n)), m, link) >= step_s(one_f_one_b(m, range(n), chain(n)), m, link)


@given(m=st.integers(1, 9), n=st.integers(1, 5), mode=MODES, zero=st.sampled_from([0, 1]), tied=st.booleans())
def test_nothing_is_wrong_with_it(m: int, n: int, mode: str, zero: Any, tied: bool) -> None:
    """Skips, recomputation, ties and replicas together: no fault, no deadlock."""
    skips = (Skip(0, n - 1, 7, "up"),) if n > 1 else ()
    model = ModelProfile((LayerProfile(forward_s=1, backward_s=2, output_bytes=5),) * n, skips=skips)
    plan = Plan.contiguous([1] * n, m, mode)
    transfers = plan_transfers(plan, model, portals=False)
    ties = [Tie("w", (0, n - 1), 4)] if tied and n > 1 else []
    schedule = deepspeed(m, range(n), transfers, mode, ties, 2, [8] * n, zero)
    assert validation_errors(schedule, plan) == []
    done = simulate(schedule, plan, model, Cluster(devices_per_node=2 * n), MemoryModel())
    assert violations(schedule, done.trace) == []
    sent = done.figures["bytes_sent"]
    assert sent.get("activations", 0) == sent.get("gradients", 0) == 2 * 5 * m * (n - 1)
    assert sent.get("skips", 0) == sent.get("skip_gradients", 0) == 2 * 7 * m * (n - 1)


def test_each_tensor_is_a_message_and_a_recomputation_follows_them() -> None:
    transfers = [Transfer(0, 1, "up", 7), Transfer(0, 1, "", 5)]
    assert deepspeed(1, [4, 6], transfers, "always").text() == (
        "device 4 compute  0F0 0send0<1:up 0send0<1 0recv0<1:up 0recv0<1 0R0 0B0 0step\n"
        "device 6 compute  1recv0<0:up 1recv0<0 1F0 1R0 1B0 1send0<0:up 1send0<0 1step"
    )
    assert [op.bytes for op in deepspeed(1, [4, 6], transfers).ops() if op.kind in ("send", "recv")] == [7, 5] * 4


def test_how_a_step_ends() -> None:
    def built(**keys: Any) -> Schedule:
        return deepspeed(2, range(2), chain(2), replicas=2, parameter_bytes=[100, 800], **keys)

    for zero in (0, 1):
        assert ending(deepspeed(2, range(2), chain(2), zero=zero), 0) == "0step", "one replica has nobody to meet"
    assert ending(built(), 0) == "0collective:all_reduce@data 0step"
    assert ending(built(ties=[TIE]), 1) == (
        "1collective:all_reduce@tied/embedding.weight 1collective:all_reduce@data 1step"
    )
    assert ending(built(zero=1), 0) == "0collective:reduce_scatter@data 0step 0collective:all_gather@data"
    assert ending(built(zero=1, reduction="all_reduce"), 0) == (
        "0collective:all_reduce@data 0step 0collective:all_gather@data"
    )
    assert ending(built(reduction="reduce_scatter"), 0) == "0collective:all_reduce@data 0step", "whole optimizers"


def test_a_tie_belongs_to_its_own_stages() -> None:
    schedule = deepspeed(1, range(3), chain(3), ties=[Tie("w", (0, 2), 4)])
    assert ["tied" in queue for queue in schedule.text().splitlines()] == [True, False, True]


@pytest.mark.parametrize(
    ("keys", "seconds"),
    [({}, 6 + 4 + 8), ({"zero": 1}, 6 + 4 + 4 + 4), ({"zero": 1, "reduction": "all_reduce"}, 6 + 4 + 8 + 4)],
)
def test_replicas_are_summed_after_copies(keys: dict[str, Any], seconds: float) -> None:
    """Stage 1 is ready at 4 s, but its 8 s over the replicas begin when the tie of 4 s is through, from 6 s to 10 s."""
    schedule = deepspeed(1, range(2), chain(2), ties=[TIE], replicas=2, parameter_bytes=[100, 800], **keys)
    done = run(schedule, 1, link=Link(0.0, 0.01))
    assert done.figures["step_time_s"] == pytest.approx(seconds)
    assert spans(done)["1collective:all_reduce@tied/embedding.weight"] == pytest.approx((6, 10))
    assert done.figures["bytes_sent"]["all_reduce@tied"] == 2 * 2 * 400


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (([0, 1, 0], chain(3)), "stages 0 and 2"),
        ((range(3), [Transfer(0, 2, "up")]), "skip up"),
        ((range(3), chain(3), "never", (), 2, [1, 2]), "parameter_bytes"),
    ],
)
def test_what_the_library_cannot_do_is_refused(arguments: Any, key: str) -> None:
    with pytest.raises(ProblemError) as caught:
        deepspeed(2, *arguments)
    assert rows(refused(caught)) == [(key, None, [])]
