"""What sessions in several ranks have in common: the replica's share of a batch, one report of a step, one state.

    rank = (replica * devices of a pipeline + device) * mesh.tensor + shard           mesh.data=2 mesh.pipeline=2
    rank 0: replica 0, device 0    rank 1: replica 0, device 1    rank 2: replica 1, device 0    ...

All that ranks tell each other goes through torch.distributed. Replicas are alike, and shards are: the trace is that of
the first.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from mmap import mmap
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.device_memory import DeviceMemory
from harness.interfaces import Batch, Model, SessionSpec, StepMetrics
from harness.op import Op
from harness.plan import Plan
from harness.schedule.graph import sender
from harness.trace import Recording, Span, Trace
from harness.training_state import converted, initial_layers, intra_op_threads

Mark = float | torch.cuda.Event
"""A point in the work of a device: seconds of the host's clock on a CPU, an event on a GPU."""


LINE = 128
"""Bytes in which a rank says where it is."""


@dataclass(frozen=True)
class Report:
    """What one rank knows of a step; `loss` is its part of the sum."""

    loss: float
    start_s: float
    end_s: float
    spans: list[Span]
    peak_bytes: int | None
    sent: Counter[str]


class RankSession:
    """A session in one of several ranks. An engine says how to `build`, `train`, keep and load its part.

    In `train` it notes what it ran (`note`) and what it sent (`sent`), and why nothing was updated (`skipped`), which
    is the same in all ranks.
    """

    def __init__(self, model: Model, plan: Plan, spec: SessionSpec) -> None:
        self.model, self.plan, self.spec = model, plan, spec
        self.steps = 0
        self.noted: list[tuple[Op, Mark, Mark, float, float]] = []
        self.sent: Counter[str] = Counter()
        self.skipped = ""
        self.recording = Recording()
        self._board = mmap(-1, LINE * plan.mesh.size)  # the host's and all ranks'

    def __enter__(self) -> Any:
        self.rank, self.width = dist.get_rank(), self.plan.mesh.pipeline * self.plan.mesh.tensor
        self.replica, inside = divmod(self.rank, self.width)
        self.place, self.shard = divmod(inside, self.plan.mesh.tensor)
        self.device = torch.device(self.spec.devices[self.rank])
        with self.at("while the session is built"):
            layers = initial_layers(self.model, self.spec)
            self.names = list(layers.state_dict())
            self.buffers = {name for name, _ in layers.named_buffers()}
            self.first_names = {parameter: name for name, parameter in layers.named_parameters()}
            self.build(layers)
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def build(self, layers: nn.Sequential) -> None:
        """Take this rank's part of the layers, which are the same in every rank."""
        raise NotImplementedError

    def train(self, batch: Batch, size: int) -> float:
        """One step on the replica's share of `size` samples; this rank's part of the loss."""
        raise NotImplementedError

    def held(self) -> list[Tensor]:
        """Tensors that this rank's device holds between steps."""
        raise NotImplementedError

    def local_state(self) -> dict[str, Any]:
        """This rank's part of {"model": ..., "optimizer": ...}, by the names of the whole model."""
        raise NotImplementedError

    def load_local(self, state: dict[str, Any]) -> None:
        """Take this rank's part of a whole state."""
        raise NotImplementedError

    @contextmanager
    def at(self, where: str) -> Iterator[None]:
        """Within it this rank is "in the forward pass of micro-batch 3": an error says so, and `last_seen` in the host.

        Of several that are nested the innermost counts.
        """
        line = slice(self.rank * LINE, (self.rank + 1) * LINE)
        text = f"in rank {self.rank}, stage {self.place}, {where}"
        before = self._board[line]
        self._board[line] = text.encode()[:LINE].ljust(LINE)
        try:
            yield
        except Exception as error:
            if not any(note.startswith("in rank ") for note in getattr(error, "__notes__", ())):
                error.add_note(text)
            raise
        self._board[line] = before

    def last_seen(self, rank: int) -> str:
        """Where a rank was when it ended without a word; "" if it was nowhere. Of the host, which has no rank."""
        return self._board[rank * LINE : (rank + 1) * LINE].rstrip(b"\0 ").decode(errors="replace")

    def named(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """The module's parameters, each by its first name in the whole model: one may stand in several layers."""
        return {self.first_names[parameter]: parameter for parameter in module.parameters()}

    @property
    def micro_batches(self) -> int:
        return self.plan.micro_batches

    def number(self, i: int) -> int:
        """The global number of this replica's micro-batch i."""
        return self.replica * self.micro_batches + i

    def step(self, batch: Batch, meter: bool = False) -> StepMetrics:
        share = converted(self.share(batch), self.spec.dtype)
        counter = DeviceMemory(self.device, [*self.held(), *self._needed(share)]) if meter else None
        self.noted, self.sent, self.skipped = [], Counter(), ""
        with intra_op_threads(1) if self.device.type == "cpu" else nullcontext():
            dist.barrier()
            start, first = self._settled(), self.now()
            with counter.counting() if counter else nullcontext():
                loss = self.train(share, len(batch))
            end = self._settled()
        self.steps += 1
        peak = counter.peak_bytes() if counter else None
        with self.at("in the report of a step"):
            return self._reported(Report(loss, start, end, self._spans(start, first), peak, self.sent))

    def share(self, batch: Batch) -> Batch:
        """The samples of this rank's replica."""
        data = self.plan.mesh.data
        return Batch(batch.inputs.tensor_split(data)[self.replica], batch.targets.tensor_split(data)[self.replica])

    def _needed(self, share: Batch) -> list[Tensor]:
        """What of it this rank's device works on: inputs in the first stage, targets in the last one."""
        stages = self.plan.stages
        return [share.inputs] * (self.place == stages[0].device) + [share.targets] * (self.place == stages[-1].device)

    def pairs(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and targets of each of the replica's micro-batches."""
        m = self.micro_batches
        return zip(batch.inputs.tensor_split(m), batch.targets.tensor_split(m), strict=True)

    def now(self) -> Mark:
        """This point in the device's work."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def note(self, op: Op, start: Mark, end: Mark, first: float = 0.0, last: float = 1.0) -> None:
        """The op ran between these points: all the time, or from the share `first` of it to the share `last`."""
        self.noted.append((op, start, end, first, last))

    def note_in_turn(self, ops: Sequence[Op], start: Mark, end: Mark) -> None:
        """The ops ran one after the other between these points, each as long as its bytes are of all."""
        whole, done = sum(op.bytes for op in ops) or 1, 0
        for op in ops:
            self.note(op, start, end, done / whole, (done + op.bytes) / whole)
            done += op.bytes

    def _settled(self) -> float:
        """Seconds, once the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _spans(self, start_s: float, first: Mark) -> list[Span]:
        """What was noted, in seconds; `first` was at `start_s`."""

        def seconds(mark: Mark) -> float:
            return mark if isinstance(mark, float) else start_s + first.elapsed_time(mark) / 1e3  # type: ignore[union-attr]

        spans = []
        for op, start, end, begin, finish in self.noted:
            began_s, took_s = seconds(start), seconds(end) - seconds(start)
            spans.append(Span(str(op), self.place, op.queue, began_s + begin * took_s, began_s + finish * took_s))
        return spans

    def autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, self.autocast_dtype) if self.autocast_dtype else nullcontext()

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        return getattr(torch, self.spec.autocast) if self.spec.autocast else None

    def merged(self, replicas: Sequence[list[Span]]) -> list[Span]:
        """The spans of the first replica, from what the ranks of each one saw."""
        return met(replicas[0])

    def _reported(self, own: Report) -> StepMetrics:
        reports: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(reports, own)
        tensor = self.plan.mesh.tensor
        replicas = [reports[rank : rank + self.width : tensor] for rank in range(0, len(reports), self.width)]
        first = replicas[0]
        spans = self.merged([[span for report in one for span in report.spans] for one in replicas])
        self.recording.add(spans, min(r.start_s for r in first), max(r.end_s for r in first))
        sent: Counter[str] = sum((report.sent for report in reports), Counter())
        peaks = None
        if own.peak_bytes is not None:
            places = [rank % self.width // tensor for rank in range(len(reports))]
            peaks = [
                max(r.peak_bytes for r, place in zip(reports, places, strict=True) if place == device)
                for device in self.plan.devices
            ]
        seconds = max(report.end_s - report.start_s for report in reports)
        loss = sum(report.loss for report in reports)
        return StepMetrics(loss, seconds, dict(sorted(sent.items())), peaks, self.skipped)

    def state_dict(self) -> dict[str, Any]:
        """In rank 0 the state of the whole model, in others nothing."""
        with self.at("while the state is gathered"):
            own = self.local_state()
            states: list[Any] | None = [None] * dist.get_world_size() if self.rank == 0 else None
            dist.gather_object(own, states)
            if states is None:
                return {}
            return {"model": self._model(states), "optimizer": self._optimizer(states), "step": self.steps}

    def _model(self, states: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Parameters of the first replica; running statistics averaged over all."""
        found: dict[str, list[Tensor]] = {}
        for state in states:
            for name, value in state["model"].items():
                found.setdefault(name, []).append(value)
        return {name: self._one(name, found[name]) for name in self.names}

    def _one(self, name: str, values: list[Tensor]) -> Tensor:
        if name in self.buffers and values[0].is_floating_point():
            return torch.stack(values).mean(0)
        return values[0]

    def _optimizer(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for state in states[: self.width]:
            found = {**state["optimizer"], **found}
        return {name: found[name] for name in self.first_names.values() if name in found}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with self.at("while a state is loaded"):
            self.load_local(state)
        self.steps = state["step"]

    def trace(self) -> Trace:
        return self.recording.trace()


def met(spans: list[Span]) -> list[Span]:
    """The spans, those of messages without the time in which one end waited for the other: that is idle time.

    send   |-- waits --|== sends ==|                 |== sends ==|
    recv               |== receives ==|        |-- waits --|== receives ==|
    """
    ops = [span.parsed for span in spans]
    began = {span.op: span.start_s for span in spans}
    other = {str(sender(op)): str(op) for op in ops if op.kind == "recv"}
    other |= {received: sent for sent, received in other.items()}

    def trimmed(span: Span) -> Span:
        start_s = max(span.start_s, began.get(other.get(span.op, ""), span.start_s))
        return replace(span, start_s=min(start_s, span.end_s))

    return [trimmed(span) for span in spans]
