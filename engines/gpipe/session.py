"""A model in training in the pipeline: the common interface over the GPipe module."""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from engines.gpipe.config import Config
from engines.gpipe.gpipe import GPipe
from engines.gpipe.ties import second_names
from harness.device_memory import DeviceMemory
from harness.interfaces import Batch, Model, SessionSpec, StepMetrics
from harness.op import Op
from harness.plan import Plan
from harness.trace import Recording, Span, Trace
from harness.training_state import (
    converted,
    initial_layers,
    intra_op_threads,
    load_optimizer_state,
    make_optimizer,
    model_state,
    optimizer_state,
    optimizer_tensors,
)
from harness.workers import Job, Run


class GPipeSession:
    def __init__(self, model: Model, plan: Plan, spec: SessionSpec, config: Config) -> None:
        self.model, self.plan, self.spec = model, plan, spec
        self.pipe = GPipe(
            initial_layers(model, spec),
            plan.balance,
            spec.devices,
            chunks=plan.micro_batches,
            checkpoint=plan.recompute,
            placement=[stage.device for stage in plan.stages],
            deferred_batch_norm=config.deferred_batch_norm,
            dependency=config.dependency,
            streams=config.streams,
            portals=config.portals,
        )
        self.pipe.seed = spec.seed
        self.optimizers = [make_optimizer(own, spec.optimizer) for own in self._parameters()]
        self.recording = Recording()

    def __enter__(self) -> GPipeSession:
        return self

    def __exit__(self, *error: object) -> None:
        if self.pipe.on_cpu:
            self.pipe.close()

    def _parameters(self) -> list[list[nn.Parameter]]:
        """The parameters of each stage; one that several stages of a device share belongs to the first of them."""
        seen: set[nn.Parameter] = set()
        owned = []
        for stage in self.pipe.stages:
            own = dict.fromkeys(p for _, layer in stage.layers for p in layer.parameters() if p not in seen)
            owned.append(list(own))
            seen |= own.keys()
        return owned

    def step(self, batch: Batch, meter: bool = False) -> StepMetrics:
        batch = converted(batch, self.spec.dtype)
        counters = self._count_memory(batch) if meter else {}
        self._synchronize()
        with intra_op_threads(1) if self.pipe.on_cpu else nullcontext(), ExitStack() as counting:
            start = time.perf_counter()
            if counters:
                counting.enter_context(counters[self.plan.stages[-1].device].counting())
            loss = self._forward_backward(batch)
            spans = self._update()
            self._synchronize()
            end = time.perf_counter()
        self.recording.add(spans, start, end)
        self._stop_counting()
        peaks = [counters[device].peak_bytes() for device in self.plan.devices] if counters else None
        return StepMetrics(float(loss), end - start, dict(self.pipe.bytes_sent), peaks)

    def _forward_backward(self, batch: Batch) -> Tensor:
        self.pipe.zero_grad(set_to_none=True)
        dtype = getattr(torch, self.spec.autocast) if self.spec.autocast else None
        with torch.autocast(self.pipe.devices[0].type, dtype) if dtype else nullcontext():
            output = self.pipe(batch.inputs)
        assert isinstance(output, Tensor)
        loss = self.model.loss(output, batch.targets.to(output.device)) / len(batch)
        del output
        loss.backward()
        return loss.detach()

    def _update(self) -> list[Span]:
        """Each stage's optimizer, on its own device."""
        if self.pipe.lanes is None:
            return self._update_in_turn()
        run = Run()
        jobs = []
        for stage, optimizer in zip(self.pipe.stages, self.optimizers, strict=True):
            lane = self.pipe.lanes.compute[self.plan.stages[stage.number].device]
            jobs.append(lane.submit(Job(run, optimizer.step, Op(stage.number, "step"))))
        for job in jobs:
            job.wait()
        run.raise_error()
        return [*self.pipe.spans, *run.spans]

    def _update_in_turn(self) -> list[Span]:
        recorder = self.pipe.recorder
        for stage, optimizer in zip(self.pipe.stages, self.optimizers, strict=True):
            with recorder.computing(Op(stage.number, "step"), self.plan.stages[stage.number].device):
                optimizer.step()
        self._synchronize()
        return recorder.spans()

    def _synchronize(self) -> None:
        if not self.pipe.on_cpu:
            for device in self.pipe.devices:
                torch.cuda.synchronize(device)

    def _count_memory(self, batch: Batch) -> dict[int, DeviceMemory]:
        """A counter for each device, entered around all work on its lanes."""
        held: dict[int, list[Tensor]] = defaultdict(list)
        for stage, optimizer in zip(self.pipe.stages, self.optimizers, strict=True):
            device = self.plan.stages[stage.number].device
            for _, layer in stage.layers:
                held[device] += [*layer.parameters(), *layer.buffers()]
            held[device] += optimizer_tensors([optimizer])
        held[self.plan.stages[0].device].append(batch.inputs)
        held[self.plan.stages[-1].device].append(batch.targets)
        counters = {d: DeviceMemory(torch.device(self.spec.devices[d]), held[d]) for d in self.plan.devices}
        for lane in self._lanes():
            lane.context = counters[lane.device].counting
        return counters

    def _stop_counting(self) -> None:
        for lane in self._lanes():
            lane.context = nullcontext

    def _lanes(self) -> list[Any]:
        lanes = self.pipe.lanes
        return [] if lanes is None else [*lanes.compute.values(), *(lanes.copy or {}).values()]

    def state_dict(self) -> dict[str, Any]:
        second = second_names(self.pipe, self.pipe.shared)
        named = {name: p for name, p in self.pipe.named_parameters() if name not in second}
        return {
            "model": model_state(self.pipe),
            "optimizer": optimizer_state(named, self.optimizers),
            "step": self.pipe.passes,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.pipe.load_state_dict(state["model"])
        saved, second = state["optimizer"], second_names(self.pipe, self.pipe.shared)
        saved = saved | {name: saved[first] for name, first in second.items() if first in saved}
        load_optimizer_state(dict(self.pipe.named_parameters()), self.optimizers, saved)
        self.pipe.passes = state["step"]

    def trace(self) -> Trace:
        return self.recording.trace()
