"""The base of sessions in one process, seen from the smallest engine: a step in three lines."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from harness.core.op import Op
from harness.core.plan import Plan
from harness.interfaces import Batch, OptimizerSpec, SessionSpec
from harness.runtime.device_clock import DeviceClock
from harness.runtime.local_session import LocalSession
from tests.engines import networks
from tests.engines.contract import Case
from tests.support import fake_cuda
from tests.support.sessions import run_session

NET = networks.tokens()
PLAN = Plan.contiguous([len(NET.layers())], 3)
SPEC = SessionSpec(("cpu",), OptimizerSpec("adam", lr=0.01), "float64", seed=7)


class Smallest(LocalSession):
    """Gradient accumulation."""

    def __init__(self) -> None:
        super().__init__(NET, PLAN, SPEC)

    def train_step(self, batch: Batch) -> Tensor:
        self.optimizer.zero_grad()
        total = torch.zeros(())
        for i, (inputs, targets) in enumerate(self.micro_batches(batch)):
            with self.span("F", i):
                loss = self.model.loss(self.stage(inputs), targets) / len(batch)
            with self.span("B", i):
                loss.backward()
            total = total + loss.detach()
        self.bytes_sent["activations"] += 5
        with self.span("step"):
            self.optimizer.step()
        return total


def batches(count: int, samples: int = 8) -> list[Batch]:
    torch.manual_seed(3)
    return [NET.sample(samples) for _ in range(count)]


def test_it_trains_like_single_and_their_states_move() -> None:
    single = Case(None, NET, PLAN).reference.engine  # type: ignore[arg-type]
    want = run_session(single, NET, PLAN, SPEC, lambda session: [session.step(one).loss for one in batches(4)])
    with Smallest() as session:
        losses = [session.step(one).loss for one in batches(4)[:2]]
        state = session.state_dict()
    assert losses == pytest.approx(want[:2], rel=1e-12)
    assert state["step"] == 2
    assert list(state["model"]) == list(NET.layers().state_dict())
    with Smallest() as resumed:
        resumed.load_state_dict(state)
        assert [resumed.step(one).loss for one in batches(4)[2:]] == pytest.approx(want[2:], rel=1e-12)
        assert resumed.steps == 4


def test_a_step_is_traced_and_counted() -> None:
    with Smallest() as session:
        for one in batches(2):
            metrics = session.step(one)
        trace = session.trace()
    ran = [span.op for span in trace.only(1).spans]
    assert ran == [str(op) for i in range(3) for op in (Op(0, "F", i), Op(0, "B", i))] + ["0step"]
    (start, end), spans = trace.steps[1], trace.only(1).spans
    times = [start, *(time for span in spans for time in (span.start_s, span.end_s)), end]
    assert times == sorted(times)
    assert metrics.step_time_s == pytest.approx(end - start)
    assert metrics.bytes_sent == {"activations": 5}, "of one step"
    assert metrics.peak_memory_bytes is None


def test_the_memory_of_a_step() -> None:
    """Weights, gradients and two moments of Adam at least, and nothing where it is not metered."""
    with Smallest() as session:
        (one,) = batches(1)
        session.step(one)
        (peak,) = session.step(one, meter=True).peak_memory_bytes or [0]
        held = sum(tensor.nbytes for tensor in session.held_tensors())
        gradients = sum(parameter.nbytes for parameter in session.stage.parameters())
        assert session.step(one).peak_memory_bytes is None
    assert held + gradients < peak < 3 * (held + gradients)


def test_no_micro_batch_is_empty() -> None:
    with Smallest() as session:
        (two,) = batches(1, samples=2)
        assert [len(inputs) for inputs, _ in session.micro_batches(two)] == [1, 1]


def test_a_collective_of_replicas_is_an_op_of_the_stage() -> None:
    with Smallest() as session:
        with session.span("all_reduce"):
            pass
        with session.span("all_gather", 1, stage=0):
            pass
    assert [span.op for span in session.recorded_spans()] == [
        "0collective:all_reduce@data",
        "0collective1:all_gather@data",
    ]


def test_a_gpu_is_waited_for_at_the_ends_of_a_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """First of all: what was loaded or moved before is there for every stream. Passes are timed by events."""
    cuda, gpu = fake_cuda.install(monkeypatch), torch.device("cuda:0")
    with Smallest() as session:
        session.devices, session.on_cpu, session.clock = {0: gpu}, False, DeviceClock(gpu)
        plain = session.train_step

        def train_step(batch: Batch) -> Tensor:
            cuda.log.append(("step",))
            loss = plain(batch)
            cuda.log.append(("stepped",))
            return loss

        monkeypatch.setattr(session, "train_step", train_step)
        session.step(*batches(1))
        spans = session.trace().spans
    waits = [entry[0] for entry in cuda.log if entry[0] != "mark"]
    assert waits == ["synchronize", "synchronize", "step", "stepped", "synchronize", "synchronize"]
    assert len(spans) == 7 and cuda.log.count(("mark", cuda.current(gpu))) == 2 + 2 * 7
