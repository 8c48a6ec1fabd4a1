import json
import math
import os
import threading
import time
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.core.plan import Plan
from harness.core.problem import Problem
from harness.core.trace import Span, Trace
from harness.host.run_queue import CoreTime
from harness.interfaces import StepMetrics
from harness.measure.reference_work import Pace
from harness.worker.checkpoints import Checkpoints
from harness.worker.divergence import Diverged
from harness.worker.race_turns import RaceTurns
from harness.worker.training_loop import (
    LOOKS,
    METRICS,
    Line,
    LineFile,
    Loop,
    NeverUpdated,
    percentile,
    shifted,
    train_steps,
    use_of_devices,
)


class Counting:
    """Batches that say which they are."""

    def batch(self, step: int, size: int):
        return step, size


class Session:
    """A session whose step k takes k + 1 seconds, on a clock that began at 100."""

    pass_modules, plan = torch.nn.Module(), Plan.contiguous([1])
    module_names: ClassVar[dict[str, str]] = {}

    def __init__(self, losses: list[float] | None = None, skips: tuple[int, ...] = ()) -> None:
        self.losses, self.skips = losses, skips
        self.seen: list[tuple] = []
        self.steps: list[tuple[float, float]] = []

    def step(self, batch, meter: bool = False) -> StepMetrics:
        k = len(self.seen)
        self.seen.append((batch, meter))
        start = self.steps[-1][1] + 10 if self.steps else 100.0
        self.steps.append((start, start + k + 1))
        loss = self.losses[k] if self.losses else 1 / (k + 1)
        skipped = Problem("optimizer.lr", 1.0, "is too large", ({"optimizer.lr": 0.1},)) if k in self.skips else None
        return StepMetrics(loss, k + 1.0, {"activations": 7}, [11, 12] if meter else None, skipped)

    def gradient_norms(self) -> dict[str, float]:
        return {}

    def trace(self) -> Trace:
        spans = [Span("0F0", 0, "compute", start, (start + end) / 2, k) for k, (start, end) in enumerate(self.steps)]
        return Trace(tuple(spans), tuple(self.steps))


def test_warm_up_is_left_out_and_metered_at_its_end(tmp_path):
    session = Session()
    metrics, _ = train_steps(session, Counting(), Loop(8, steps=3, warmup=2), tmp_path, Checkpoints(tmp_path))
    assert [batch for batch, _ in session.seen] == [(step, 8) for step in range(5)]
    assert [meter for _, meter in session.seen] == [False, True, False, False, False]
    assert metrics["step_time_s"] == 4.0
    assert metrics["step_time_spread_s"] == pytest.approx([3.2, 4.8])
    assert metrics["throughput"] == 2.0
    assert (metrics["first_loss"], metrics["loss"]) == (1.0, 1 / 5)
    assert metrics["peak_memory_bytes"] == [11, 12]
    assert metrics["bytes_sent"] == {"activations": 7}
    assert 0 <= metrics["data_wait_s"] < 1


@pytest.mark.parametrize("warmup", [0, 1])
def test_without_warm_up_or_in_the_first_step_memory_is_not_known(tmp_path, warmup):
    session = Session()
    metrics, _ = train_steps(session, Counting(), Loop(8, steps=2, warmup=warmup), tmp_path, Checkpoints(tmp_path))
    assert metrics["peak_memory_bytes"] is None
    assert not any(meter for _, meter in session.seen)


def test_a_line_for_each_step(tmp_path):
    train_steps(Session(skips=(1,)), Counting(), Loop(8, steps=2, warmup=1), tmp_path, Checkpoints(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
    assert [line.pop("data_wait_s") >= 0 for line in lines] == [True] * 3
    assert lines == [
        {"step": 0, "phase": "warmup", "loss": 1.0, "step_time_s": 1.0, "skipped": False},
        {"step": 1, "phase": "measured", "loss": 1 / 2, "step_time_s": 2.0, "skipped": True},
        {"step": 2, "phase": "measured", "loss": 1 / 3, "step_time_s": 3.0, "skipped": False},
    ]


def test_waiting_for_cores_counts_in_measured_steps_only(tmp_path, monkeypatch):
    """Each look finds a second of computing and, up to the first measured step, nine of waiting; then one."""
    looks = []

    def of_process():
        looks.append(None)
        return {"1": CoreTime(float(len(looks)), float(len(looks)) if len(looks) > 3 else 9.0 * len(looks) - 24.0)}

    monkeypatch.setattr("harness.host.run_queue.of_process", of_process)
    loop = Loop(8, steps=3, warmup=1)
    summary, _ = train_steps(Session(), Counting(), loop, tmp_path, Checkpoints(tmp_path))
    assert len(looks) == 4, "at the start, before the warm-up and the first measured step, at the end"
    assert summary["slowed"] == pytest.approx(2.0)


def test_in_a_race_known_work_is_done_in_the_turns_of_the_run(tmp_path, monkeypatch):
    """When a race begins and ends all runs compute at the same time, which is not the machine's fault."""
    took = iter([4.0] * LOOKS + [3.0, 2.0])  # at the beginning, after two turns
    monkeypatch.setattr(Pace, "look", lambda pace: next(took))
    monkeypatch.setattr(RaceTurns, "ends_turn", lambda turns, step: step in (2, 4))
    monkeypatch.setattr(RaceTurns, "before", lambda turns, step: vars(turns).update(races=True) or "turn")
    monkeypatch.setattr(RaceTurns, "measures", lambda turns, step: step in (2, 4))
    loop = Loop(8, steps=4, warmup=1)
    summary, _ = train_steps(Session(), Counting(), loop, tmp_path, Checkpoints(tmp_path), quiet_s=1.0)
    assert summary["slowed"] == 2.0 and next(took, None) is None


def test_steps_that_the_optimizer_left_out_are_counted(tmp_path):
    loop, checkpoints = Loop(8, steps=3, warmup=1), Checkpoints(tmp_path)
    assert train_steps(Session(skips=(0, 3)), Counting(), loop, tmp_path, checkpoints)[0]["skipped_steps"] == 2
    assert train_steps(Session(), Counting(), loop, tmp_path, checkpoints)[0]["skipped_steps"] == 0
    with pytest.raises(NeverUpdated, match=r"^none of 4 steps updated a weight: optimizer.lr 1 .*-> optimizer.lr=0.1$"):
        train_steps(Session(skips=(0, 1, 2, 3)), Counting(), loop, tmp_path, checkpoints)


def test_batches_are_made_while_steps_run(tmp_path):
    """Of a batch that takes 60 ms a step of 40 ms waits 20 ms; none is made for a step that there is not."""
    made = []

    class Slow(Counting):
        def batch(self, step: int, size: int):
            time.sleep(0.06)
            made.append(step)
            return super().batch(step, size)

    class Working(Session):
        def step(self, batch, meter: bool = False) -> StepMetrics:
            time.sleep(0.04)
            return super().step(batch, meter)

    metrics, _ = train_steps(Working(), Slow(), Loop(8, steps=5, warmup=1), tmp_path, Checkpoints(tmp_path))
    assert metrics["data_wait_s"] == pytest.approx(0.02, abs=0.015)
    assert made == list(range(6))
    assert not [thread for thread in threading.enumerate() if thread.name == "loader"]


@pytest.mark.parametrize(("quiet_s", "slowed"), [(1e-6, True), (100.0, False)])
def test_known_work_that_takes_longer_before_and_after_the_steps_slows_them_down(tmp_path, quiet_s, slowed):
    """Also where no thread waits for a core: neighbors of a virtual machine take its memory's bandwidth."""
    loop, checkpoints, generator = Loop(8, steps=2, warmup=1), Checkpoints(tmp_path), torch.get_rng_state()
    with torch.no_grad(), torch.device("meta"):  # a user's file may set such a thing for good
        metrics, _ = train_steps(Session(), Counting(), loop, tmp_path, checkpoints, quiet_s=quiet_s)
    assert (metrics["slowed"] > 100) == slowed and metrics["slowed"] >= 1
    assert torch.equal(torch.get_rng_state(), generator)


def test_lines_are_there_while_training_goes_on(tmp_path):
    class Looking(Session):
        def step(self, batch, meter: bool = False) -> StepMetrics:
            assert len((tmp_path / METRICS).read_text().splitlines()) == len(self.seen)
            return super().step(batch, meter)

    train_steps(Looking(), Counting(), Loop(8, steps=3, warmup=0), tmp_path, Checkpoints(tmp_path))


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_ends_the_run(tmp_path, loss):
    with pytest.raises(Diverged, match=rf"the loss is {loss} at step 2, training diverged -> a smaller optimizer.lr"):
        train_steps(
            Session([1.0, 2.0, loss, 1.0]), Counting(), Loop(8, steps=3, warmup=1), tmp_path, Checkpoints(tmp_path)
        )
    assert len((tmp_path / METRICS).read_text().splitlines()) == 2
    assert not [thread for thread in threading.enumerate() if thread.name == "loader"]


def test_the_trace_begins_with_the_first_measured_step(tmp_path):
    _, trace = train_steps(Session(), Counting(), Loop(8, steps=2, warmup=1), tmp_path, Checkpoints(tmp_path))
    #        step 0 (warm-up)     1               2
    #  100 ....... 101     111 ....... 113     123 ....... 126
    assert trace.steps == ((0.0, 2.0), (12.0, 15.0))
    assert [(span.step, span.start_s, span.end_s) for span in trace.spans] == [(0, 0.0, 1.0), (1, 12.0, 13.5)]


def test_an_engine_without_a_trace():
    assert shifted(Trace(()), 2) == Trace(())
    assert use_of_devices(Trace(()), (0, 1)) == {"utilization": None, "bubble_fraction": None, "collective_s": None}


def test_use_of_devices():
    spans = (Span("0F0", 0, "compute", 0, 3), Span("1F0", 1, "compute", 1, 2), Span("1copy0<0", 1, "copy in", 0, 4),
             Span("0collective:all_reduce@weights", 0, "network", 3, 4))  # fmt: skip
    use = use_of_devices(Trace(spans, ((0.0, 2.0), (2.0, 4.0))), (0, 1))
    assert use == {"utilization": [0.75, 0.25], "bubble_fraction": 0.5, "collective_s": 0.25}


def test_a_line_that_does_not_fit_leaves_no_part(tmp_path, monkeypatch):
    path = tmp_path / METRICS
    file = LineFile(path)
    file.write(Line(0, "warmup", 1.0, 1.0, 0.0))
    whole = path.read_bytes()
    write = os.write

    def full(handle: int, data: bytes) -> int:
        """The disk takes 5 more bytes."""
        if len(path.read_bytes()) > len(whole):
            raise OSError(28, "No space left on device")
        return write(handle, data[:5])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        file.write(Line(1, "measured", 1.0, 1.0, 0.0))
    monkeypatch.undo()
    file.close()
    assert path.read_bytes() == whole


def test_a_disk_without_room_for_the_first_line():
    file = LineFile(Path("/dev/full"))
    with pytest.raises(OSError, match="No space left"):
        file.write(Line(0, "warmup", 1.0, 1.0, 0.0))
    file.close()


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 100))
def test_percentiles_are_numpys(values, percent):
    import numpy

    expected = float(numpy.percentile(values, percent))
    assert percentile(values, percent) == pytest.approx(expected, rel=1e-9, abs=1e-6)
