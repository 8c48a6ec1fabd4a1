"""A model in training by a pattern."""

from __future__ import annotations

import time
from collections import ChainMap, defaultdict
from typing import Any

import torch
from torch import Tensor

from engines.periodic import versions
from engines.periodic.lanes import Lanes
from engines.periodic.passes import Pass, Program
from engines.periodic.stage import Stage
from harness.device_memory import DeviceMemory
from harness.interfaces import Batch, Model, SessionSpec, StepMetrics
from harness.pattern import Pattern
from harness.plan import Plan
from harness.schedule.faults import faults
from harness.schedule.hops import Hop
from harness.stage_module import stage_modules
from harness.trace import Recording, Trace
from harness.training_state import converted, initial_layers


class PeriodicSession:
    """Each stage's weights in two versions; `every` micro-batches make an update."""

    def __init__(self, model: Model, plan: Plan, pattern: Pattern, spec: SessionSpec, every: int) -> None:
        self.model, self.plan, self.pattern, self.spec, self.every = model, plan, pattern, spec, every
        layers = initial_layers(model, spec)
        self.names = [name for name, _ in layers.named_parameters()]
        modules = stage_modules(layers, plan, range(len(plan.stages)))
        homes = [torch.device(spec.devices[stage.device]) for stage in plan.stages]
        self.stages = [Stage(module, home, spec) for module, home in zip(modules, homes, strict=True)]
        self.programs: dict[int, Program] = {}
        self.steps = 0
        self.recording = Recording()

    def __enter__(self) -> PeriodicSession:
        self.lanes = Lanes(self.plan, self.spec.devices)
        return self

    def __exit__(self, *error: object) -> None:
        self.lanes.close()

    def step(self, batch: Batch, meter: bool = False) -> StepMetrics:
        """All updates of the batch. After an error some stages may have been updated, and others not."""
        batch = converted(batch, self.spec.dtype)
        m = min(self.plan.micro_batches, len(batch))
        program = self._program(m)
        meters = self._meters(batch) if meter else {}
        self.lanes.counted_by(meters)
        run = Pass(self.stages, self.lanes, self.model, batch, m, self.every, (self.spec.seed, self.steps))
        start = time.perf_counter()
        run.execute(program)
        loss = run.loss()
        end = time.perf_counter()
        self.steps += 1
        self.recording.add(run.spans, start, end)
        self.lanes.counted_by({})
        peaks = [meters[device].peak_bytes() for device in self.plan.devices] if meters else None
        return StepMetrics(loss, end - start, run.bytes_sent, peaks)

    def _program(self, micro_batches: int) -> Program:
        """Raises ValueError for a pattern that cannot be executed: nothing may wait for ever."""
        if micro_batches not in self.programs:
            cuts = tuple(Hop(number, number + 1) for number in range(len(self.stages) - 1))
            schedule = versions.schedule(self.plan, self.pattern, micro_batches, self.every, cuts)
            if found := faults(schedule):
                raise ValueError("\n".join(found))
            self.programs[micro_batches] = Program(schedule)
        return self.programs[micro_batches]

    def _meters(self, batch: Batch) -> dict[int, DeviceMemory]:
        """A counter for each device, from what it holds now."""
        held: dict[int, list[Tensor]] = defaultdict(list)
        for stage, planned in zip(self.stages, self.plan.stages, strict=True):
            held[planned.device] += stage.held()
        held[self.plan.stages[0].device].append(batch.inputs)
        held[self.plan.stages[-1].device].append(batch.targets)
        return {device: DeviceMemory(home, held[device]) for device, home in self.lanes.devices.items()}

    def state_dict(self) -> dict[str, Any]:
        """With the newest weights."""
        optimizer = dict(ChainMap(*(stage.optimizer_state() for stage in self.stages)))
        return {
            "model": {name: value for stage in self.stages for name, value in stage.state().items()},
            "optimizer": {name: optimizer[name] for name in self.names if name in optimizer},
            "step": self.steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for stage in self.stages:
            stage.load(state["model"], state["optimizer"])
        self.steps = state["step"]

    def trace(self) -> Trace:
        return self.recording.trace()
