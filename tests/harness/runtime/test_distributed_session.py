"""What sessions in ranks have in common, seen from a session that trains nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.core.op import Op
from harness.core.plan import Mesh, Plan
from harness.core.trace import Span, Trace
from harness.interfaces import Batch, SessionSpec, StepMetrics
from harness.launch import forked_ranks
from harness.runtime.distributed_session import DistributedSession, without_waiting
from harness.runtime.memory_meter import DeviceMemory
from tests.engines.networks import Network

NET = Network("two layers", lambda: [nn.BatchNorm1d(2), nn.Linear(2, 2)], lambda n: torch.ones(n, 2),
              lambda n: torch.zeros(n, 2), lambda output, target: output.sum())  # fmt: skip
PLAN = replace(Plan.contiguous([1, 1], 3), mesh=Mesh(data=2, pipeline=2))
SPEC = SessionSpec(("cpu",) * 4, dtype="float64", seed=1)
SAMPLES = 7
FLOAT = 8


class Toy(DistributedSession):
    """Rank r says that it lost r, sent 10 r bytes, took 10 r ms more than rank 0 and allocated 1000 (r + 1) numbers."""

    def build(self, layers: nn.Sequential) -> None:
        self.layers = layers
        self.own = layers[self.pipeline_rank]
        self.batches: list[Batch] = []

    def train_step(self, batch: Batch, batch_size: int) -> float:
        self.batches.append(batch)
        start = self.now()
        scratch = torch.zeros(1000 * (self.rank + 1), dtype=torch.float64)
        time.sleep(0.01 * self.rank)
        end = self.now()
        self.record_in_sequence(
            [Op(self.pipeline_rank, "F", 0, bytes=1), Op(self.pipeline_rank, "B", 0, bytes=3)], start, end
        )
        self.bytes_sent["activations"] += 10 * self.rank
        for tensor in self.own.state_dict().values():
            tensor.add_(self.rank + 1)
        return float(self.rank) + 0.0 * float(scratch[0])

    def held_tensors(self) -> list[Tensor]:
        return []

    def local_state(self) -> dict[str, Any]:
        name = str(self.pipeline_rank)
        state = {f"{name}.{key}": value.clone() for key, value in self.own.state_dict().items()}
        return {"model": state, "optimizer": {f"{name}.weight": {"rank": self.rank}}}

    def load_local_state(self, state: dict[str, Any]) -> None:
        prefix = f"{self.pipeline_rank}."
        self.own.load_state_dict({k[len(prefix) :]: v for k, v in state["model"].items() if k.startswith(prefix)})


def toys(work: Callable[[Toy], Any], plan: Plan = PLAN) -> list[Any]:
    """What `work` comes to in each rank."""

    def run() -> list[Any]:
        with Toy(NET, plan, SPEC) as session:
            found: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(found, work(session))
            return found

    return forked_ranks.run_on_ranks(plan.mesh.size, run, SPEC.devices)


def stepped(work: Callable[[Toy, StepMetrics], Any], meter: bool = False) -> list[Any]:
    return toys(lambda session: work(session, session.step(NET.sample(SAMPLES), meter)))


def test_replicas_are_pipelines_side_by_side() -> None:
    places = toys(
        lambda session: (session.replica, session.pipeline_rank, [session.global_micro_batch(i) for i in range(3)])
    )
    assert places == [(0, 0, [0, 1, 2]), (0, 1, [0, 1, 2]), (1, 0, [3, 4, 5]), (1, 1, [3, 4, 5])]


def test_each_replica_trains_on_its_share() -> None:
    numbers = torch.arange(2.0 * SAMPLES).view(SAMPLES, 2)
    whole = Batch(numbers, -numbers)

    def share(session: Toy) -> tuple[list[float], list[float], bool]:
        session.step(whole)
        own = session.batches[0]
        return own.inputs[:, 0].tolist(), own.targets[:, 0].tolist(), own.inputs.dtype == torch.float64

    found = toys(share)
    first, second = [0.0, 2.0, 4.0, 6.0], [8.0, 10.0, 12.0]
    assert [inputs for inputs, _, _ in found] == [first, first, second, second]
    assert [targets for _, targets, _ in found] == [[-x for x in inputs] for inputs, _, _ in found]
    assert all(double for _, _, double in found)


def test_a_step_is_reported_whole() -> None:
    """The loss and what was sent are sums over ranks; a step is as long as in the slowest rank."""
    for metrics in stepped(lambda session, metrics: metrics):
        assert metrics.loss == 0 + 1 + 2 + 3
        assert metrics.bytes_sent == {"activations": 0 + 10 + 20 + 30}
        assert metrics.step_time_s >= 0.03
        assert metrics.peak_memory_bytes is None


def test_memory_of_a_device_is_that_of_its_fullest_replica() -> None:
    peaks = stepped(lambda session, metrics: metrics.peak_memory_bytes, meter=True)[0]
    share = 3 * 2 * 2 * FLOAT  # inputs and targets of three samples: the second replica's
    assert peaks == pytest.approx([3000 * FLOAT + share, 4000 * FLOAT + share], abs=64)


def test_what_allocators_have_taken_is_that_of_the_fullest_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    metered = stepped(lambda session, metrics: metrics.reserved_memory_bytes, meter=True)
    assert metered == [None] * 4, "CPUs have no such allocator"
    monkeypatch.setattr(DeviceMemory, "reserved_bytes", lambda _: 10 * (dist.get_rank() + 1))
    assert stepped(lambda session, metrics: metrics.reserved_memory_bytes, meter=True) == [[30, 40]] * 4


def test_the_trace_is_that_of_the_first_replica() -> None:
    trace: Trace = stepped(lambda session, metrics: session.trace())[0]
    assert [(span.op, span.device) for span in trace.spans] == [("0F0", 0), ("0B0", 0), ("1F0", 1), ("1B0", 1)]
    assert len(trace.steps) == 1
    start, end = trace.steps[0]
    assert all(start <= span.start_s <= span.end_s <= end for span in trace.spans)
    forward, backward = trace.spans[2:]
    assert forward.end_s == pytest.approx(backward.start_s)
    assert (backward.end_s - backward.start_s) / (forward.end_s - forward.start_s) == pytest.approx(3.0, rel=1e-3)


def test_a_state_is_whole_in_the_first_rank() -> None:
    """Parameters and counters are the first replica's, running statistics the mean over replicas."""
    states = stepped(lambda session, metrics: session.state_dict())
    assert states[1:] == [{}, {}, {}]
    state = states[0]
    assert list(state["model"]) == list(NET.layers().state_dict())
    assert state["step"] == 1
    assert state["optimizer"] == {"0.weight": {"rank": 0}, "1.weight": {"rank": 1}}
    torch.testing.assert_close(state["model"]["0.weight"], torch.full((2,), 1.0 + 1, dtype=torch.float64))
    torch.testing.assert_close(state["model"]["0.running_mean"], torch.full((2,), (1 + 3) / 2, dtype=torch.float64))
    assert int(state["model"]["0.num_batches_tracked"]) == 1


def test_replicas_send_no_second_copy_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would fill rank 0's memory: the first replica sends all, the others what is averaged."""
    sent: list[Any] = []
    plain = dist.gather_object

    def gather(own: Any, states: Any) -> None:
        sent.append(own)
        plain(own, states)

    monkeypatch.setattr(dist, "gather_object", gather)

    def names(session: Toy) -> tuple[list[str], list[str]]:
        session.state_dict()
        return list(sent[0]["model"]), list(sent[0]["optimizer"])

    statistics = [f"0.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")]
    found = toys(names)
    assert found[:2] == [(["0.weight", "0.bias", *statistics], ["0.weight"]), (["1.weight", "1.bias"], ["1.weight"])]
    assert found[2:] == [(statistics, []), ([], [])]


def test_a_state_goes_on_in_all_ranks() -> None:
    state = stepped(lambda session, metrics: session.state_dict())[0]

    def resume(session: Toy) -> tuple[int, dict[str, Tensor]]:
        session.load_state_dict(state)
        return session.steps, dict(session.own.state_dict())

    for rank, (steps, own) in enumerate(toys(resume)):
        assert steps == 1
        torch.testing.assert_close(own, {name: state["model"][f"{rank % 2}.{name}"] for name in own})


def test_all_ranks_begin_equal() -> None:
    weights = toys(lambda session: session.layers[1].weight.detach())
    assert all(torch.equal(weight, weights[0]) for weight in weights)


def test_parameters_go_by_their_first_name() -> None:
    def names(session: Toy) -> list[str]:
        session.stage = nn.Sequential(session.layers[1], nn.Tanh())
        return list(session.named_parameters())

    assert toys(names, Plan.contiguous([2], 1)) == [["1.weight", "1.bias"]]


def test_an_error_names_rank_stage_and_micro_batch() -> None:
    """Of the innermost span or phase; so does the host of a rank that is killed."""

    def notes(session: Toy) -> tuple[list[str], str]:
        try:
            with session.phase("between the passes of a step"), session.span("B", 2):
                raise ZeroDivisionError
        except ZeroDivisionError as error:
            found = error.__notes__
        with session.span("all_reduce"):
            return found, session.last_seen(session.rank)

    for rank, (found, seen) in enumerate(toys(notes)):
        where = f"in rank {rank}, stage {rank % 2}, in "
        assert found == [f"{where}the backward pass of micro-batch {rank // 2 * 3 + 2}"]
        assert seen == f"{where}all_reduce"


def test_waiting_for_the_other_end_is_no_work() -> None:
    """A message begins when both ends are there; each end continues when it is through."""
    send, receive = str(Op(0, "send", 1, peer=1)), str(Op(1, "recv", 1, peer=0))
    noted = [Span(send, 0, "compute", 1.0, 5.0), Span(receive, 1, "compute", 4.0, 6.0)]
    assert [(span.start_s, span.end_s) for span in without_waiting(noted)] == [(4.0, 5.0), (4.0, 6.0)]
    late = [Span(send, 0, "compute", 3.0, 5.0), Span(receive, 1, "compute", 1.0, 6.0)]
    assert [(span.start_s, span.end_s) for span in without_waiting(late)] == [(3.0, 5.0), (3.0, 6.0)]


def test_an_end_that_was_through_before_the_other_came_took_no_time() -> None:
    send, receive = str(Op(0, "send", 1, peer=1)), str(Op(1, "recv", 1, peer=0))
    buffered = [Span(send, 0, "compute", 1.0, 2.0), Span(receive, 1, "compute", 4.0, 6.0)]
    assert [(span.start_s, span.end_s) for span in without_waiting(buffered)] == [(2.0, 2.0), (4.0, 6.0)]


def test_only_the_two_ends_of_a_message_wait_for_each_other() -> None:
    """The other micro-batch's, another tensor's, the way back, and what is no message stay as they are."""
    ops = [Op(0, "send", 1, peer=1), Op(1, "recv", 2, peer=0), Op(1, "recv", 1, "up", 0), Op(1, "send", 1, peer=0),
           Op(0, "F", 1)]  # fmt: skip
    noted = [Span(str(op), op.stage, "compute", float(i), i + 10.0) for i, op in enumerate(ops)]
    assert without_waiting(noted) == noted
