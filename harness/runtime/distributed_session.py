"""The base class of sessions in several ranks: the replica's share of a batch, one report of a step, one state.

    rank = (replica * devices of a pipeline + pipeline rank) * mesh.tensor + tensor rank    mesh.data=2 mesh.pipeline=2
    rank 0: replica 0, device 0    rank 1: replica 0, device 1    rank 2: replica 1, device 0    ...

Ranks communicate through torch.distributed alone. All replicas have the same schedule, and all tensor ranks: the trace
is that of the first.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from mmap import mmap
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.core.error_notes import RankNote, has_note
from harness.core.op import Op
from harness.core.plan import Plan
from harness.core.trace import Span
from harness.interfaces import Batch, Model, SessionSpec, StepMetrics
from harness.nn.tied import moved
from harness.runtime.collectives import new_group
from harness.runtime.device_clock import DeviceClock, TimePoint
from harness.runtime.foreign_layers import ForeignLayers
from harness.runtime.host_clocks import HostClocks
from harness.runtime.memory_meter import DeviceMemory
from harness.runtime.session import BaseSession
from harness.runtime.stage_module import StageModule, stage_modules
from harness.runtime.state_shards import parted
from harness.runtime.tied_weights import TiedWeights
from harness.runtime.training_state import (
    cast_batch,
    copies,
    initial_layers,
    intra_op_threads,
    make_optimizer,
    split_batch,
)
from harness.runtime.unused_weights import give_gradients
from harness.runtime.values import tensors_of
from harness.schedule.dependency_graph import TIED, sender

POSITION_BYTES = 128
"""Bytes in which a rank says where it is."""


@dataclass(frozen=True)
class StepReport:
    """One rank's part of a step's metrics; `loss` is its part of the sum."""

    loss: float
    start_s: float
    end_s: float
    spans: list[Span]
    peak_bytes: int | None
    reserved_bytes: int | None
    bytes_sent: Counter[str]
    collectives: Counter[str]

    def on_clock(self, offset_s: float) -> StepReport:
        """Return the same with times of a clock that is so many seconds ahead: that of rank 0."""
        if not offset_s:
            return self
        spans = [replace(one, start_s=one.start_s + offset_s, end_s=one.end_s + offset_s) for one in self.spans]
        return replace(self, start_s=self.start_s + offset_s, end_s=self.end_s + offset_s, spans=spans)


class DistributedSession(BaseSession):
    """A session in one of several ranks. An engine says what a step is (`train_step`); the rest has defaults.

    The defaults are those of a rank with one stage, which `build` makes, and its optimizer. `train_step` records what
    it ran (`span`, `record`), what it sent (`bytes_sent`), how many collectives (`collectives`), and why the optimizer
    skipped the step (`skipped`), which is the same in all ranks.
    """

    finds_unused = False
    """Whether it sums the gradients of all replicas though each may have some of other weights."""

    def __init__(self, model: Model, plan: Plan, spec: SessionSpec) -> None:
        super().__init__(model, plan, spec)
        self.collectives: Counter[str] = Counter()
        self._host_clocks = HostClocks()
        self._positions = mmap(-1, POSITION_BYTES * plan.mesh.size)  # shared by the host and all ranks

    def __enter__(self) -> Self:
        mesh = self.plan.mesh
        self.rank, self.ranks_per_replica = dist.get_rank(), mesh.pipeline * mesh.tensor
        self.replica, within = divmod(self.rank, self.ranks_per_replica)
        self.pipeline_rank, self.tensor_rank = divmod(within, mesh.tensor)
        self.stage_number = self.pipeline_rank
        self.device = torch.device(self.spec.devices[self.rank])
        self.clock = DeviceClock(self.device)
        with self.phase("while the session is built"):
            layers = initial_layers(self.model, self.spec)
            self.take_layers(layers)
            self.state_names = list(layers.state_dict())
            self.buffer_names = {name for name, _ in layers.named_buffers()}
            weights = layers.named_parameters(remove_duplicate=False)
            self.shard_names = {name for name, parameter in weights if parameter.dim()}
            self.parameter_names = {parameter: name for name, parameter in layers.named_parameters()}
            self.watch_shared_state(layers)
            foreign = ForeignLayers(layers, self.plan)
            if self.spec.by_value and self.plan.mesh.data > 1 and not self.finds_unused:
                give_gradients(layers)
            self.build(layers)
            foreign.watch(j for j, stage in enumerate(self.plan.stages) if stage.device == self.pipeline_rank)
            self.foreign = foreign
            self.compile_layers()
        return self

    def build(self, layers: nn.Sequential) -> None:
        """Take this rank's part of the model's layers, which are the same in every rank.

        By default that is one stage, and an optimizer of its parameters.
        """
        self.stage = self.own_stage(layers)
        self.optimizer = make_optimizer(self.stage.parameters(), self.spec.optimizer)

    def own_stage(self, layers: nn.Sequential) -> StageModule:
        """Return this rank's layers as one module, on its device, in the run's mixed precision."""
        stage = moved(stage_modules(layers, self.plan, [self.pipeline_rank])[0], self.device)
        stage.autocast = self.autocast_dtype
        return stage

    @abstractmethod
    def train_step(self, batch: Batch, batch_size: int) -> Tensor | float:
        """Do one step on `batch`, the replica's share of `batch_size` samples.

        Returns this rank's part of the loss: the sum over its samples, divided by `batch_size`. Nobody reads it before
        the device is through: a tensor on a GPU would make the host wait.
        """

    def step(self, batch: Batch, meter: bool = False) -> StepMetrics:
        """Train on this replica's share of a batch; the report is that of all ranks."""
        share = cast_batch(self.share(batch), self.spec.dtype)
        memory = DeviceMemory(self.device, [*self.held_tensors(), *self._used_here(share)]) if meter else None
        self._recorded, self.spans, self.bytes_sent, self.skipped = [], [], Counter(), None
        self.collectives = Counter()
        offset_s = self._host_clocks.offset_s(self.steps)
        with intra_op_threads(1) if self.device.type == "cpu" else nullcontext(), self.shared_state.unchanged():
            dist.barrier()
            start_s = self.clock.synchronize()
            with memory.counting() if memory else nullcontext():
                loss = self.train_step(share, len(batch))
            end_s = self.clock.synchronize()
        self.foreign.refuse()
        self.steps += 1
        peak, reserved = (memory.peak_bytes(), memory.reserved_bytes()) if memory else (None, None)
        with self.phase("in the report of a step"):
            spans, sent = self.recorded_spans(), self.bytes_sent
            report = StepReport(float(loss), start_s, end_s, spans, peak, reserved, sent, self.collectives)
            return self._combined(report.on_clock(offset_s))

    def share(self, batch: Batch) -> Batch:
        """Return the samples of this rank's replica."""
        return split_batch(batch, self.plan.mesh.data)[self.replica]

    def _used_here(self, share: Batch) -> list[Tensor]:
        """Return what this rank's device uses of a batch: inputs in the first stage, targets in the last one."""
        stages, device = self.plan.stages, self.pipeline_rank
        entering = tensors_of(share.inputs) if device == stages[0].device else ()
        return [*entering, *(tensors_of(share.targets) if device == stages[-1].device else ())]

    def global_micro_batch(self, i: int) -> int:
        """Return the number of this replica's micro-batch i among those of all replicas."""
        return self.replica * self.plan.micro_batches + i

    @contextmanager
    def phase(self, where: str, waits: bool = False, stage: int | None = None) -> Iterator[None]:
        """Within it this rank is `where`, "in the forward pass of micro-batch 3": an error says so, and `last_seen`.

        Of nested phases the innermost counts. `waits`: what takes long there is that others send nothing. `stage` is
        said where a device has several.
        """
        line = slice(self.rank * POSITION_BYTES, (self.rank + 1) * POSITION_BYTES)
        text = f"in rank {self.rank}, stage {self.pipeline_rank if stage is None else stage}, {where}"
        before, (where_before, _, waited) = self._positions[line], self._activity
        self._positions[line] = text.encode()[:POSITION_BYTES].ljust(POSITION_BYTES)
        self.now_doing(where, waits)
        try:
            yield
        except BaseException as error:
            if not has_note(error, RankNote):
                error.add_note(RankNote(text))
            raise
        self._positions[line] = before
        self.now_doing(where_before, waited)

    def last_seen(self, rank: int) -> str:
        """Return where a rank was when its process died: its stage at least. For the host, which has no rank."""
        line = self._positions[rank * POSITION_BYTES : (rank + 1) * POSITION_BYTES]
        return line.rstrip(b"\0 ").decode(errors="replace") or f"in rank {rank}, stage {self.plan.mesh.stage(rank)}"

    def add_span(self, op: Op, start_s: float, end_s: float) -> None:
        self.spans.append(Span(str(op), self.pipeline_rank, op.queue, start_s, end_s))

    def record_in_sequence(self, ops: Sequence[Op], start: TimePoint, end: TimePoint) -> None:
        """The ops ran one after the other between these points, each for a time in proportion to its bytes."""
        whole, done = sum(op.bytes for op in ops) or 1, 0
        for op in ops:
            self.record(op, start, end, done / whole, (done + op.bytes) / whole)
            done += op.bytes

    def merge_spans(self, replicas: Sequence[list[Span]]) -> list[Span]:
        """Return the spans of the first replica, from those that the ranks of each replica saw."""
        return without_waiting(replicas[0])

    def _combined(self, own: StepReport) -> StepMetrics:
        reports: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(reports, own)
        tensor, per_replica = self.plan.mesh.tensor, self.ranks_per_replica
        replicas = [reports[rank : rank + per_replica : tensor] for rank in range(0, len(reports), per_replica)]
        first = replicas[0]
        spans = self.merge_spans([[span for report in replica for span in report.spans] for replica in replicas])
        self.recording.add(spans, min(r.start_s for r in first), max(r.end_s for r in first))
        sent: Counter[str] = sum((report.bytes_sent for report in reports), Counter())
        peaks = self._fullest([report.peak_bytes for report in reports])
        reserved = self._fullest([report.reserved_bytes for report in reports])
        seconds = max(report.end_s - report.start_s for report in reports)
        loss = sum(report.loss for report in reports)
        calls = dict(sorted(own.collectives.items()))
        return StepMetrics(loss, seconds, dict(sorted(sent.items())), peaks, self.skipped, reserved, calls)

    def _fullest(self, of_ranks: Sequence[int | None]) -> list[int] | None:
        """Return the most bytes of each device of the plan, over its ranks; None where a rank does not know."""
        known = [found for found in of_ranks if found is not None]
        if len(known) < len(of_ranks):
            return None
        devices = [rank % self.ranks_per_replica // self.plan.mesh.tensor for rank in range(len(known))]
        its = [
            [size for size, one in zip(known, devices, strict=True) if one == device] for device in self.plan.devices
        ]
        return [max(sizes) for sizes in its]

    def replica_group(self) -> dist.ProcessGroup | None:
        """Return the ranks that have this stage in all replicas; None with one replica. Collective over all ranks."""
        width, data = self.ranks_per_replica, self.plan.mesh.data
        if data == 1:
            return None
        groups = [new_group([replica * width + first for replica in range(data)]) for first in range(width)]
        return groups[self.rank % width]

    def tie_weights(self, layers: nn.Sequential, communicator: str = TIED) -> None:
        """Find the parameters that layers on several devices share. Collective: every rank calls it in `build`."""
        self.tied = TiedWeights(layers, self.plan, self.rank, communicator)

    def sum_tied_gradients(self) -> None:
        """All-reduce the gradients of parameters that devices share, after the backward passes."""
        if self.tied.copies:
            self.bytes_sent[self.tied.counter] += self.tied.sum_gradients(self.now, self.record)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return this rank's parameters by their first names in the whole model: several layers may share one.

        One that a module makes in a forward pass is none: no optimizer trains it.
        """
        names = self.parameter_names
        return {names[parameter]: parameter for parameter in self.stage.parameters() if parameter in names}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the whole model in rank 0, an empty one in the others."""
        return self.gather_state(self.local_state, self.state_names)

    def gather_state(self, local_state: Callable[[], dict[str, Any]], names: Sequence[str]) -> dict[str, Any]:
        """Return in rank 0 the state of which each rank has a part, with the model's tensors of these names."""
        with self.phase("while the state is gathered"):
            own = local_state()
            if self.replica:  # of the first replica everything is taken, of others their statistics
                statistics = {name: value for name, value in own["model"].items() if name in self.buffer_names}
                own = {"model": statistics, "optimizer": {}}
            states: list[Any] | None = [None] * dist.get_world_size() if self.rank == 0 else None
            dist.gather_object(own, states)
            if states is None:
                return {}
            found = {"model": self._model(states, names), "optimizer": self._optimizer(states), "step": self.steps}
            return found | self.scale_state()

    def _model(self, states: list[dict[str, Any]], names: Sequence[str]) -> dict[str, Tensor]:
        """Parameters of the first replica; running statistics averaged over all."""
        values: dict[str, list[Tensor]] = {}
        for state in states:
            for name, value in state["model"].items():
                values.setdefault(name, []).append(value)
        return {name: self._one(name, values[name]) for name in names}

    def _one(self, name: str, values: list[Tensor]) -> Tensor:
        if name in self.buffer_names and values[0].is_floating_point():
            return torch.stack(values).mean(0)
        return values[0]

    def _optimizer(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for state in states[: self.ranks_per_replica]:
            merged = {**state["optimizer"], **merged}
        return {name: merged[name] for name in self.parameter_names.values() if name in merged}

    def sharded_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what ranks have whole, gathered in rank 0, and this rank's own weights and moments, without a copy.

        Of replicas that have the same ones the first hands them in; what several of its ranks have is written once.
        """
        rest, shards = parted(self.own_tensors(), self._tensors(), self.shard_names)
        whole = self.gather_state(lambda: copies(rest), [n for n in self.state_names if n not in self.shard_names])
        if self.replica and not self.split_over_replicas:
            return whole, {"model": {}, "optimizer": {}}
        return whole, self._as_shards(shards)

    def empty_shards(self, keys: Mapping[str, Sequence[str]]) -> dict[str, Any]:
        """Return tensors for this rank's shards of a checkpoint to be read into, those of weights its own."""
        own, parameters = self.own_tensors()["model"], self._tensors()
        known = {name: found for name, found in keys.items() if name in parameters}
        moments = {n: {key: torch.empty_like(parameters[n]) for key in found} for n, found in known.items()}
        return self._as_shards({"model": {n: own[n] for n in own if n in self.shard_names}, "optimizer": moments})

    def _as_shards(self, tensors: dict[str, Any]) -> dict[str, Any]:
        model = {name: self.shard(name, own) for name, own in tensors["model"].items()}
        moments = {
            n: {key: self.shard(n, own) for key, own in kept.items()} for n, kept in tensors["optimizer"].items()
        }
        return {"model": model, "optimizer": moments}

    @property
    def split_over_replicas(self) -> bool:
        """Whether each replica has other shards of weights and optimizer state."""
        return False

    def shard(self, name: str, own: Tensor) -> Any:
        """Return this rank's weight of this name, or a moment of it, as torch.distributed.checkpoint takes it. By
        default it is whole, or a DTensor."""
        return own

    def _tensors(self) -> dict[str, Tensor]:
        """Return this rank's parameters as a state has them, by their first names in the whole model."""
        own = self.own_tensors()["model"]
        return {first: own[name] for first, name in self.names_here().items()}

    def names_here(self) -> dict[str, str]:
        """Return the names of this rank's parameters in its stage, which may have a tied one under its second name."""
        names = {parameter: name for name, parameter in self.stage.named_parameters(remove_duplicate=False)}
        return {first: names[parameter] for first, parameter in self.named_parameters().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a state of any engine; each rank is given all of it."""
        with self.phase("while a state is loaded"):
            self.load_local_state(state)
        self.load_scale(state)
        self.steps = state["step"]


def without_waiting(spans: list[Span]) -> list[Span]:
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
