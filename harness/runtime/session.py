"""The common base of all sessions: micro-batches, spans, the memory and the state of their stage.

`harness.runtime.local_session` builds on it where one process drives all devices, and
`harness.runtime.distributed_session` where each device has a process.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from harness.core.error_notes import StageNote, has_note
from harness.core.op import COMPUTE, Kind, Op
from harness.core.plan import Plan
from harness.core.problem import Problem, ProblemError
from harness.core.shared_buffers import homes
from harness.core.trace import Recording, Span, Trace
from harness.interfaces import Activity, Batch, Model, SessionSpec
from harness.nn.shared_state import SharedState
from harness.nn.skip import named_layers
from harness.runtime.compiled_layers import compile_layers
from harness.runtime.device_clock import DeviceClock, TimePoint
from harness.runtime.gradient_norms import norms_of
from harness.runtime.loss_scale import LossScale
from harness.runtime.stage_module import StageModule
from harness.runtime.training_state import (
    copies,
    kept_by_optimizers,
    load_optimizer_state,
    optimizer_tensors,
    split_batch,
)
from harness.runtime.values import Value, placed
from harness.schedule.builders.data_parallel import over_replicas

PHASES = {"F": "the forward pass", "B": "the backward pass", "step": "the optimizer step"}


class BaseSession(ABC):
    """A session that trains `stage`, some or all of the model's layers on `device`, with `optimizer`.

    An engine sets these three, or overrides the methods whose defaults use them. `clock` is the device's.
    """

    stage: nn.Module
    device: torch.device
    clock: DeviceClock
    optimizer: torch.optim.Optimizer
    stage_number = 0

    def __init__(self, model: Model, plan: Plan, spec: SessionSpec) -> None:
        self.model, self.plan, self.spec = model, plan, spec
        self.steps = 0
        self.scaling = LossScale(instead=spec.instead) if spec.grad_scaler else None
        self.skipped: Problem | None = None
        self.bytes_sent: Counter[str] = Counter()
        self.recording = Recording()
        self.spans: list[Span] = []
        self.module_names: Mapping[str, str] = {}
        self.facts: dict[str, Any] = {}  # for the record's manifest, of what the parent does not see
        self._recorded: list[Callable[[], None]] = []
        self.now_doing("")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Release what the session holds; by default that is nothing."""
        return

    def take_layers(self, layers: nn.Sequential) -> None:
        """Remember what the weights are called in the module that the layers are of, if that has other names. Raise
        ProblemError for layers that are others than those of the plan."""
        self.module_names = getattr(layers, "module_names", {})
        planned, found = self.plan.stages[-1].last + 1, len(named_layers(layers))
        if planned != found:
            message = f"has {found} layers, and the profile that was planned with has {planned}: sources have changed "
            message += "that its folder does not hold, or files that it reads"
            raise ProblemError(Problem("model", self.model.name, message, ({"remeasure": True},)))

    def watch_shared_state(self, layers: nn.Sequential) -> None:
        """Have steps raise ProblemError where they change what layers of several stages share."""
        self.shared_state = SharedState(named_layers(layers), homes(self.plan))
        self.shared_state.refuse(self.shared_state.statistics)

    def compile_layers(self) -> None:
        """Have the layers of `stage`, which is complete, compiled when they are first called, if the run wants it."""
        if self.spec.compile:
            compile_layers(self.stage)

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss from which the backward pass begins."""
        return loss * self.scaling.value if self.scaling else loss

    def unscale(self) -> bool:
        """Before the update: divide the gradients by the loss scale. Return whether there is to be an update: else the
        gradients overflow, the step is `skipped`, and the scale falls. All ranks have the same gradients."""
        if self.scaling is None:
            return True
        scale, overflow = self.scaling.value, not all(map(math.isfinite, self.gradient_norms().values()))
        self.scaling.judge(overflow)
        if overflow:
            message = f"is too coarse: {self.scaling.overflow}, now the scale is {self.scaling.value:g}"
            self.skipped = Problem("precision.autocast", "float16", message, self.spec.instead, "more steps")
            return False
        for gradient in (one.grad for one in self.stage.parameters() if one.grad is not None):
            gradient.div_(scale)
        return True

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype of mixed precision, if the run has it."""
        return getattr(torch, self.spec.autocast) if self.spec.autocast else None

    def autocast(self) -> AbstractContextManager[object]:
        """Mixed precision, if the run has it."""
        if not self.autocast_dtype:
            return nullcontext()
        cached = not self.spec.cuda_graphs  # a graph's memory holds no cache over its end
        return torch.autocast(self.device.type, self.autocast_dtype, cache_enabled=cached)

    def micro_batches(self, batch: Batch) -> Iterator[tuple[Value, Value]]:
        """Yield inputs and targets of each micro-batch, on the device; the stage runs it next."""
        for i, part in enumerate(split_batch(batch, self.plan.micro_batches)):
            if isinstance(self.stage, StageModule):
                self.use_micro_batch(i)
            yield placed(part.inputs, self.device), placed(part.targets, self.device)

    def now(self) -> TimePoint:
        """Return this point in the work of the device."""
        return self.clock.now()

    def record(self, op: Op, start: TimePoint, end: TimePoint, first: float = 0.0, last: float = 1.0) -> None:
        """The op ran between these points: all the time, or from the fraction `first` of it to the fraction `last`."""

        def add() -> None:
            start_s = self.clock.seconds(start)
            duration_s = self.clock.seconds(end) - start_s
            self.add_span(op, start_s + first * duration_s, start_s + last * duration_s)

        self.record_later(add)

    def record_later(self, add: Callable[[], None]) -> None:
        """Have `add` add spans to the trace (`add_span`) at the end of the step, when the points in it have times."""
        self._recorded.append(add)

    @abstractmethod
    def add_span(self, op: Op, start_s: float, end_s: float) -> None:
        """Add an op with its times to the trace of the step."""

    def recorded_spans(self) -> list[Span]:
        """Return the spans of the step, which the device has done."""
        for add in self._recorded:
            add()
        self._recorded = []
        return self.spans

    @contextmanager
    def span(self, kind: str, micro_batch: int | None = None, stage: int | None = None) -> Iterator[None]:
        """Record what runs within it in the trace, as an op of `stage` (by default `stage_number`).

        `kind` is "F", "B", "R", "W" or "step", or a collective of all replicas: "all_reduce", "all_gather" or
        "reduce_scatter".
        """
        number = self.stage_number if stage is None else stage
        is_task = kind in COMPUTE
        op = Op(number, cast(Kind, kind), micro_batch) if is_task else over_replicas(number, kind, 0, micro_batch)
        with self.phase(place(kind, None if micro_batch is None else self.global_micro_batch(micro_batch))):
            start = self.now()
            yield
            self.record(op, start, self.now())

    @contextmanager
    def phase(self, where: str, waits: bool = False) -> Iterator[None]:
        """Within it the session is `where`, "in the forward pass of micro-batch 3": an error and `activity` say so.

        `waits`: what takes long there is that others send nothing.
        """
        before, _, waited = self._activity
        self.now_doing(where, waits)
        try:
            yield
        except BaseException as error:
            if not has_note(error, StageNote):
                error.add_note(StageNote(f"in stage {self.stage_number}, {where}"))
            raise
        self.now_doing(before, waited)

    def global_micro_batch(self, i: int) -> int:
        """Return the number of this session's micro-batch i among those of all replicas."""
        return i

    def use_micro_batch(self, i: int, again: bool = False) -> None:
        """Set the stage to micro-batch i next: for dropout masks and errors. `again`: it recomputes."""
        assert isinstance(self.stage, StageModule)
        self.stage.at(self.spec.seed, self.steps, self.global_micro_batch(i), again)

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers of this process; an engine may have one for each stage."""
        return [self.optimizer]

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of this process by their names in the whole model."""
        return dict(self.stage.named_parameters())

    @property
    def pass_modules(self) -> nn.Module:
        """The modules that run in the passes of this process, with all copies of their weights."""
        return self.stage

    def gradient_norms(self) -> dict[str, float]:
        """Return the norms of the gradients that the last step has left in the parameters."""
        return norms_of({name: one.grad for name, one in self.named_parameters().items() if one.grad is not None})

    def stage_of(self, name: str) -> int:
        """Return the stage of a gradient of this process."""
        return self.stage_number

    def activity(self) -> Activity:
        """Return what this process is doing now."""
        where, since_s, waits = self._activity
        return Activity(where, time.monotonic() - since_s, waits)

    def now_doing(self, where: str, waits: bool = False) -> None:
        """From now on this process is `where`."""
        self._activity = where, time.monotonic(), waits

    def held_tensors(self) -> list[Tensor]:
        """Return the tensors that the device holds between steps: parameters, buffers and the optimizer's state."""
        return [*self.stage.parameters(), *self.stage.buffers(), *optimizer_tensors(self.optimizers())]

    def local_state(self) -> dict[str, Any]:
        """Return this process's part of {"model": ..., "optimizer": ...}, by names in the whole model, on the CPU."""
        return copies(self.own_tensors())

    def own_tensors(self) -> dict[str, Any]:
        """Return the same with the tensors that training goes on with, where they are."""
        kept = kept_by_optimizers(self.named_parameters(), self.optimizers())
        return {"model": self.stage.state_dict(), "optimizer": kept}

    def load_local_state(self, state: dict[str, Any]) -> None:
        """Take this process's part of the state of the whole model."""
        self.stage.load_state_dict({name: state["model"][name] for name in self.stage.state_dict()})
        load_optimizer_state(self.named_parameters(), self.optimizers(), state["optimizer"])

    def scale_state(self) -> dict[str, Any]:
        """Return the part of a state dict that has the loss scale, empty without one."""
        return {"loss_scale": self.scaling.state()} if self.scaling else {}

    def load_scale(self, state: dict[str, Any]) -> None:
        """Take the loss scale of a state dict."""
        if self.scaling:
            self.scaling.load(state.get("loss_scale"))

    def trace(self) -> Trace:
        """Return the spans of the last steps."""
        return self.recording.trace()


def place(kind: str, micro_batch: int | None) -> str:
    """`in the forward pass of micro-batch 3`"""
    return f"in {PHASES.get(kind, kind)}" + ("" if micro_batch is None else f" of micro-batch {micro_batch}")
