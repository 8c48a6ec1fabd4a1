"""The training loop: warm-up steps, measured steps, and their metrics."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from harness.core import files, problem
from harness.core.run_files import METRICS, RESULT, TRACE
from harness.core.trace import Trace
from harness.host import run_queue
from harness.interfaces import Data, Model, Session, StepMetrics
from harness.launch.process_group import is_first_rank
from harness.measure.reference_work import Pace
from harness.run.metrics import period_s, phases_s
from harness.runtime import output_check
from harness.worker.checkpoints import Checkpoints
from harness.worker.divergence import DivergenceCheck
from harness.worker.prefetch import Loader
from harness.worker.race_turns import RaceTurns
from harness.worker.step_profiler import profiled

LOOKS = 3
"""How often known work is done before and after the steps, in a race once in each turn; the quickest counts."""


class NeverUpdated(RuntimeError):
    """The optimizer skipped every step."""


@dataclass(frozen=True)
class Loop:
    """Number of training steps, and of samples in a step; those `profiled` get a trace of torch.profiler."""

    batch_size: int
    steps: int
    warmup: int
    profiled: tuple[int, ...] = ()


@dataclass(frozen=True)
class Line:
    """A step in `metrics.jsonl`. `step` counts from 0, warm-up included; one that is `skipped` updated nothing.

    `checkpoint_error` says why there is no checkpoint after it that should be; other lines do not have it.
    """

    step: int
    phase: Literal["warmup", "measured"]
    loss: float
    step_time_s: float
    data_wait_s: float
    skipped: bool = False
    checkpoint_error: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        return json.dumps({name: value for name, value in vars(self).items() if value is not None})


class LineFile:
    """A file of JSON lines, each written at once. One that does not fit (a full disk) leaves no part of it.

    With `append` the lines that are there stay.
    """

    def __init__(self, path: Path, append: bool = False) -> None:
        self.handle = os.open(path, os.O_WRONLY | os.O_CREAT | (os.O_APPEND if append else os.O_TRUNC), 0o644)
        self.size = os.fstat(self.handle).st_size

    def close(self) -> None:
        os.close(self.handle)

    def write(self, line: Line) -> None:
        data = f"{line.text}\n".encode()
        try:
            rest = data
            while rest:
                rest = rest[os.write(self.handle, rest) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(self.handle, self.size)
            raise
        self.size += len(data)


class _Others:
    """Other programs, and neighbors of a virtual machine: by how much they slow down what this process does.

    Known work takes `quiet_s` on a quiet machine (`harness.measure.reference_work`); 0: nobody knows."""

    def __init__(self, quiet_s: float) -> None:
        self._pace, self._known, self._least = Pace(quiet_s), bool(quiet_s), math.inf
        self.look()
        self.begin()

    def begin(self) -> None:
        self._began = run_queue.of_process()

    def look(self, times: int = LOOKS) -> None:
        """Do known work, at a moment when no other rank computes and no other run has its turn."""
        self._least = min(self._least, *(self._pace.look() for _ in range(times)))

    def after_step(self, ends_turn: bool, is_last: bool) -> None:
        """Look again, in a race once in each turn, since all runs compute when it begins and ends; else at the end."""
        if ends_turn or is_last:
            self.look(1 if ends_turn else LOOKS)

    def slowed(self) -> float | None:
        """What threads waited for a core since `begin`, or, if that is more, what known work has taken at least: 1 for
        nothing."""
        waited = run_queue.slowed(self._began, run_queue.of_process())
        return max(waited or 1.0, self._least) if self._known else waited


def train_steps(
    session: Session,
    data: Data,
    loop: Loop,
    folder: Path,
    checkpoints: Checkpoints,
    say: Callable[[str], None] = lambda text: None,
    quiet_s: float = 0.0,
) -> tuple[dict[str, Any], Trace] | None:
    """Train, with a line for each step in `folder/metrics.jsonl`; the metrics and trace of the measured steps.

    Of several ranks that train, rank 0 alone writes lines and says what it does. Training resumes where `checkpoints`
    start: lines are appended, the trace holds the steps from there on. Returns None if it is stopped before the last.

    The next batch is made while a step runs; `data_wait_s` is what a step still waited for its own. `slowed` is by how
    much other programs slowed the measured steps down; known work takes `quiet_s` on a quiet machine, 0: not known. In
    a race each step waits for its turn, and training ends with the race (`harness.worker.race_turns`). Memory is
    metered in the last warm-up step, since that costs time; not in the very first one, where optimizers have no state
    yet: it is known for a warm-up of 2 and more. Raises `Diverged` at the first loss or gradient that is not finite,
    and `NeverUpdated` at the end, if the optimizer has skipped every step.
    """
    reports = is_first_rank()
    last: StepMetrics | None = None
    total = loop.warmup + loop.steps
    start, memory = checkpoints.start, checkpoints.load(session)
    path = folder / METRICS if reports else Path(os.devnull)
    lines = _stored(folder / METRICS) if start else []
    texts = [one.text for one in lines]
    finite, turns = DivergenceCheck(session), RaceTurns(folder, loop.warmup)
    others = _Others(quiet_s if reports else 0.0)
    with closing(LineFile(path, start > 0)) as out, Loader(data, loop.batch_size, range(start, total)) as batches:
        for step, (batch, waited) in enumerate(batches, start):
            if (word := turns.before(step)) == "stop":
                return None
            if word == "end":
                break
            if step <= loop.warmup:
                others.begin()
            with profiled(folder, loop.profiled, step, say):
                last = session.step(batch, meter=step == loop.warmup - 1 and step > 0)
            finite.after_step(step, last)
            output_check.raise_differences()
            memory = memory.after(last)
            line = _line(step, turns.measures(step), last, waited)
            if reports:
                say(f"step {step}: loss {last.loss:.6g}, {last.step_time_s:.4f} s")
            texts.append(line.text)
            stop = checkpoints.after_step(session, step + 1, total, memory, texts)
            lines.append(replace(line, checkpoint_error=checkpoints.error))
            texts[-1] = lines[-1].text
            out.write(lines[-1])
            others.after_step(turns.ends_turn(step), step == total - 1)
            turns.ended(step, line.step_time_s)
            if stop:
                return None
    _check_updated(lines, last)
    slowed = others.slowed() if last else None
    summary = {**_summary(lines, loop), **_of_session(session, last), "slowed": slowed, **vars(memory)}
    if last is None:  # the checkpoint is that of the last step
        return summary, Trace(())
    return summary, _after_warmup(session.trace(), len(lines), loop)


def _of_session(session: Session, last: StepMetrics | None) -> dict[str, Any]:
    """What an engine says of itself, and of its last step's messages."""
    sent = {name: getattr(last, name) if last else {} for name in ("bytes_sent", "collectives")}
    return {"facts": getattr(session, "facts", {}), **sent}


def _check_updated(lines: Sequence[Line], last: StepMetrics | None) -> None:
    if last and last.skipped and all(one.skipped for one in lines):
        raise NeverUpdated(f"none of {len(lines)} steps updated a weight: {problem.line(last.skipped)}")


def _after_warmup(kept: Trace, steps: int, loop: Loop) -> Trace:
    """The trace of a run of so many steps, without its warm-up. A long run has kept its last steps only."""
    gone = steps - len(kept.steps)
    return shifted(kept, max(0, loop.warmup - gone))


def save_result(metrics: dict[str, Any], trace: Trace, folder: Path, devices: Sequence[int], model: Model) -> None:
    """Write `trace.json.gz` and `result.json`: the metrics, with what follows from the trace and the model."""
    metrics = metrics | use_of_devices(trace, devices) | {"period_s": period_s(trace), "phases_s": phases_s(trace)}
    if model.task == "text":
        metrics["tokens_per_s"] = metrics["throughput"] * model.input_shape[0]
    trace.save(folder / TRACE)
    files.write_text(folder / RESULT, json.dumps(metrics))


def _stored(path: Path) -> list[Line]:
    return [Line(**json.loads(line)) for line in path.read_text().splitlines()]


def _line(step: int, measured: bool, metrics: StepMetrics, waited: float) -> Line:
    phase: Literal["warmup", "measured"] = "measured" if measured else "warmup"
    return Line(step, phase, float(metrics.loss), metrics.step_time_s, waited, bool(metrics.skipped))


def _summary(lines: Sequence[Line], loop: Loop) -> dict[str, Any]:
    measured = [line for line in lines if line.phase == "measured"]
    times = [line.step_time_s for line in measured]
    median = statistics.median(times)
    return {
        "step_time_s": median,
        "step_time_spread_s": [percentile(times, 10), percentile(times, 90)],
        "throughput": loop.batch_size / median,
        "measured_steps": len(measured),
        "loss": lines[-1].loss,
        "first_loss": lines[0].loss,
        "skipped_steps": sum(line.skipped for line in lines),
        "data_wait_s": statistics.median(line.data_wait_s for line in measured),
    }


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the values lie, linear between neighbours."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def shifted(trace: Trace, first: int) -> Trace:
    """The steps from `first` on, renumbered from 0, on a clock that is 0 when they begin."""
    steps = trace.steps[first:]
    if not steps:
        return Trace(())
    zero = steps[0][0]
    spans = [
        replace(span, start_s=span.start_s - zero, end_s=span.end_s - zero, step=span.step - first)
        for span in trace.spans
        if span.step >= first
    ]
    return Trace(tuple(spans), tuple((start - zero, end - zero) for start, end in steps))


def use_of_devices(trace: Trace, devices: Sequence[int]) -> dict[str, Any]:
    """`utilization` of each device, `bubble_fraction` of all, `collective_s`: what collectives take in a step, on
    average. Null where the engine left no trace."""
    if not trace.spans:
        return {"utilization": None, "bubble_fraction": None, "collective_s": None}
    utilization = trace.utilization(devices)
    collective_s = statistics.mean(trace.collective_s(device) for device in devices) / max(1, len(trace.steps))
    return {
        "utilization": utilization,
        "bubble_fraction": 1 - sum(utilization) / len(utilization),
        "collective_s": collective_s,
    }
