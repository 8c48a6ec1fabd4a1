"""A model in training on one device."""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from engines.single.config import Config
from harness import batchnorm, dropout
from harness.device_memory import DeviceMemory
from harness.interfaces import Batch, Model, SessionSpec, StepMetrics
from harness.op import Op
from harness.plan import Plan
from harness.schedule.gpipe import recomputed
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


class SingleSession:
    def __init__(self, model: Model, plan: Plan, spec: SessionSpec, config: Config) -> None:
        self.model, self.plan, self.spec = model, plan, spec
        self.device = torch.device(spec.devices[plan.stages[0].device])
        layers = initial_layers(model, spec)
        if config.deferred_batch_norm:
            layers = batchnorm.deferred(layers, plan.micro_batches)
        self.layers = layers.to(self.device)
        self.optimizer = make_optimizer(self.layers.parameters(), spec.optimizer)
        self.threads = config.threads or len(os.sched_getaffinity(0))
        self.steps = 0
        self.spans: list[Span] = []
        self.recording = Recording()

    def __enter__(self) -> SingleSession:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def step(self, batch: Batch, meter: bool = False) -> StepMetrics:
        batch = converted(batch, self.spec.dtype)
        counter = self._meter(batch) if meter else None
        with intra_op_threads(self.threads):
            start = self._now()
            with counter.counting() if counter else nullcontext():
                loss = self._accumulate(batch)
                stepping = self._now()
                self.optimizer.step()
            end = self._now()
        self.note(Op(0, "step"), stepping, end)
        self.steps += 1
        self.recording.add(self.spans, start, end)
        self.spans = []
        return StepMetrics(float(loss), end - start, {}, [counter.peak_bytes()] if counter else None)

    def _accumulate(self, batch: Batch) -> Tensor:
        self.layers.zero_grad(set_to_none=True)
        size, m = len(batch), min(self.plan.micro_batches, len(batch))
        batchnorm.begin(self.layers, m)
        total = torch.zeros((), device=self.device, dtype=torch.float64)
        pairs = zip(batch.inputs.tensor_split(m), batch.targets.tensor_split(m), strict=True)
        for i, (inputs, targets) in enumerate(pairs):
            task = _Task(self, i, inputs.to(self.device), targets.to(self.device), size)
            total += task.run(recomputed(i, m, self.plan.recompute))
        return total

    def note(self, op: Op, start_s: float, end_s: float) -> None:
        self.spans.append(Span(str(op), self.plan.stages[0].device, "compute", start_s, end_s))

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def around(self, i: int) -> AbstractContextManager[object]:
        return dropout.keyed(self.spec.seed, self.steps, i)

    def autocast(self) -> AbstractContextManager[object]:
        dtype = getattr(torch, self.spec.autocast) if self.spec.autocast else None
        return torch.autocast(self.device.type, dtype) if dtype else nullcontext()

    def _meter(self, batch: Batch) -> DeviceMemory:
        state = [*self.layers.parameters(), *self.layers.buffers(), *optimizer_tensors([self.optimizer])]
        return DeviceMemory(self.device, [*state, batch.inputs, batch.targets])

    def state_dict(self) -> dict[str, Any]:
        named = dict(self.layers.named_parameters())
        return {
            "model": model_state(self.layers),
            "optimizer": optimizer_state(named, [self.optimizer]),
            "step": self.steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.layers.load_state_dict(state["model"])
        load_optimizer_state(dict(self.layers.named_parameters()), [self.optimizer], state["optimizer"])
        self.steps = state["step"]

    def trace(self) -> Trace:
        return self.recording.trace()


class _Task:
    """Forward and backward of one micro-batch."""

    def __init__(self, session: SingleSession, i: int, inputs: Tensor, targets: Tensor, size: int) -> None:
        self.session, self.i, self.size = session, i, size
        self.inputs, self.targets = inputs, targets
        self.again = self.recompute = False

    def run(self, recompute: bool) -> Tensor:
        session, self.recompute = self.session, recompute
        started = session._now()
        with session.autocast():
            output = (
                checkpoint(self._forward, self.inputs, use_reentrant=False) if recompute else self._forward(self.inputs)
            )
        session.note(Op(0, "F", self.i), started, session._now())
        loss = session.model.loss(output, self.targets) / self.size
        del output
        self.began = session._now()
        loss.backward()
        session.note(Op(0, "B", self.i), self.began, session._now())
        return loss.detach()

    def _forward(self, inputs: Tensor) -> Any:
        """The layers; torch's checkpoint calls this a second time in the backward pass."""
        again, self.again = self.again, True
        started = self.session._now()
        with self.session.around(self.i):
            if not self.recompute:
                return self.session.layers(inputs)
            inputs = inputs.clone()  # for layers that work in place
            if not again:
                return self.session.layers(inputs)
            try:
                with batchnorm.throwaway(batchnorm.statistics(self.session.layers.modules())):
                    return self.session.layers(inputs)
            finally:  # torch leaves as soon as it has all it needs
                self.began = self.session._now()
                self.session.note(Op(0, "R", self.i), started, self.began)
