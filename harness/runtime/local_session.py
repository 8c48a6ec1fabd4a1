"""The base class of sessions in which one process drives all devices of the plan."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from harness.core.op import Op
from harness.core.plan import Plan
from harness.core.trace import Span
from harness.interfaces import Activity, Batch, Model, SessionSpec, StepMetrics
from harness.nn.skip import named_layers
from harness.nn.tied import moved
from harness.runtime import cpu_streams
from harness.runtime.device_clock import DeviceClock
from harness.runtime.memory_meter import DeviceMemory
from harness.runtime.session import BaseSession, place
from harness.runtime.stage_module import stage_modules
from harness.runtime.training_state import cast_batch, initial_layers, intra_op_threads, make_optimizer
from harness.runtime.values import Value, tensors_of


class LocalSession(BaseSession):
    """A session of one process. An engine says what a step is (`train_step`); the rest has defaults.

    The defaults are those of one device with all layers, which `build` makes, and its optimizer. An engine with several
    devices overrides `build` and what is said of the single one: `held_by_device`, `count_memory`, `local_state` and
    `load_local_state`. `devices[d]` is the plan's device d.
    """

    threads = 1
    """Intra-op threads of the calling thread on CPU devices."""

    def __init__(self, model: Model, plan: Plan, spec: SessionSpec) -> None:
        super().__init__(model, plan, spec)
        self.devices = {number: torch.device(spec.devices[number]) for number in plan.devices}
        self.device = self.devices[plan.stages[0].device]
        self.on_cpu = self.device.type == "cpu"
        self.clock = DeviceClock(self.device)

    def __enter__(self) -> Self:
        layers = initial_layers(self.model, self.spec)
        self.take_layers(layers)
        self.layer_names = [name for name, _ in named_layers(layers)]
        self.watch_shared_state(layers)
        self.build(layers)
        self.compile_layers()
        return self

    def build(self, layers: nn.Sequential) -> None:
        """Take the model's layers. By default they are one stage on one device, with an optimizer of its parameters."""
        stage = moved(stage_modules(layers, self.plan, [0])[0], self.device)
        stage.autocast = self.autocast_dtype
        self.stage = stage
        self.optimizer = make_optimizer(stage.parameters(), self.spec.optimizer)

    @abstractmethod
    def train_step(self, batch: Batch) -> Tensor | float:
        """Do forward and backward passes and the optimizer step; return the mean loss over the batch.

        Ops go into the trace by `span` and `record`, or as `spans`; `bytes_sent` counts what devices send.
        """

    def step(self, batch: Batch, meter: bool = False) -> StepMetrics:
        """Train on a batch and report it; with `meter` the memory of each device is counted."""
        batch = cast_batch(batch, self.spec.dtype)
        meters = self.memory_meters(batch) if meter else {}
        self.count_memory(meters)
        self._recorded, self.spans, self.bytes_sent, self.skipped = [], [], Counter(), None
        caller = meters.get(self.plan.stages[-1].device)  # the loss is computed in the calling thread
        with intra_op_threads(self.threads) if self.on_cpu else nullcontext(), self.shared_state.unchanged():
            start_s = self._synchronize()
            with caller.counting() if caller else nullcontext():
                loss = self.train_step(batch)
            end_s = self._synchronize()
        self.steps += 1
        self.recording.add(self.recorded_spans(), start_s, end_s)
        devices = [meters[device] for device in self.plan.devices] if meters else []
        peaks = [device.peak_bytes() for device in devices] or None
        reserved = [found for device in devices if (found := device.reserved_bytes()) is not None] or None
        return StepMetrics(float(loss), end_s - start_s, dict(self.bytes_sent), peaks, self.skipped, reserved)

    def micro_batches(self, batch: Batch) -> Iterator[tuple[Value, Value]]:
        """Yield inputs and targets of each micro-batch, on the device. None is empty, however few samples there are."""
        return (pair for pair in super().micro_batches(batch) if len(tensors_of(pair[1])[0]))

    def _synchronize(self) -> float:
        """Return the time in seconds, once all devices have done what they were given."""
        for device in self.devices.values() if not self.on_cpu else ():
            torch.cuda.synchronize(device)
        return self.clock.synchronize()

    def add_span(self, op: Op, start_s: float, end_s: float) -> None:
        self.spans.append(Span(str(op), self.plan.stages[op.stage].device, op.queue, start_s, end_s))

    def activity(self) -> Activity:
        """Return what this process is doing now: what its devices do, where each has a thread."""
        places = [f"in stage {op.stage}, {place(op.kind, op.micro_batch)}" for op in cpu_streams.running()]
        found = super().activity()
        return replace(found, where=", ".join(places)) if places else found

    def stage_of(self, name: str) -> int:
        """Return the stage whose layers have a parameter; the first one of a layer that stands in several places."""
        return self.plan.stage_of(self.layer_names.index(name.partition(".")[0]))

    def held_by_device(self) -> dict[int, list[Tensor]]:
        """Return the tensors that each device of the plan holds between steps."""
        return {self.plan.stages[0].device: self.held_tensors()}

    def memory_meters(self, batch: Batch) -> dict[int, DeviceMemory]:
        """Return a meter for each device of the plan, which knows what the device holds and its part of `batch`."""
        held = self.held_by_device()
        held[self.plan.stages[0].device] += tensors_of(batch.inputs)
        held[self.plan.stages[-1].device] += tensors_of(batch.targets)
        return {number: DeviceMemory(device, held[number]) for number, device in self.devices.items()}

    def count_memory(self, meters: Mapping[int, DeviceMemory]) -> None:
        """Have these meters count what runs on their devices from now on, in other threads than the caller's."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as `harness.interfaces.Session` describes it."""
        return {**self.local_state(), "step": self.steps, **self.scale_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a state of any engine."""
        self.load_local_state(state)
        self.load_scale(state)
        self.steps = state["step"]
