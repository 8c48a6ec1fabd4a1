"""A model in training in torchgpipe's pipeline."""

from __future__ import annotations

import time
from collections import OrderedDict
from contextlib import nullcontext
from typing import Any

import torch
import torchgpipe
from torch import Tensor, nn
from torchgpipe.batchnorm import DeferredBatchNorm

from engines.torchgpipe.config import Config
from engines.torchgpipe.stage import Stage, stages
from harness.device_memory import DeviceMemory
from harness.interfaces import Batch, Model, SessionSpec, StepMetrics
from harness.plan import Plan
from harness.skip import named_layers
from harness.trace import Recording, Trace
from harness.training_state import (
    converted,
    initial_layers,
    intra_op_threads,
    load_optimizer_state,
    make_optimizer,
    model_state,
    optimizer_state,
)


class TorchGPipeSession:
    """A partition for each stage. Its trace has steps and no spans."""

    def __init__(self, model: Model, plan: Plan, spec: SessionSpec, config: Config) -> None:
        self.model, self.plan, self.spec = model, plan, spec
        self.pipe = torchgpipe.GPipe(
            nn.Sequential(*stages(initial_layers(model, spec), plan, spec)),
            balance=[1] * len(plan.stages),
            devices=[spec.devices[stage.device] for stage in plan.stages],
            chunks=plan.micro_batches,
            checkpoint=plan.recompute,
            deferred_batch_norm=config.deferred_batch_norm,
        )
        self.stages = [module for module in self.pipe.modules() if isinstance(module, Stage)]
        _mend_deferred(self.pipe)
        # as it was before the cut: its names, torchgpipe's parameters and buffers
        self.layers = nn.Sequential(OrderedDict(pair for stage in self.stages for pair in named_layers(stage.layers)))
        self.optimizer = make_optimizer(self.layers.parameters(), spec.optimizer)
        self.on_cpu = self.pipe.devices[0].type == "cpu"
        self.steps = 0
        self.recording = Recording()

    def __enter__(self) -> TorchGPipeSession:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def step(self, batch: Batch, meter: bool = False) -> StepMetrics:
        batch = converted(batch, self.spec.dtype)
        counters = self._count_memory() if meter and not self.on_cpu else []
        with intra_op_threads(1) if self.on_cpu else nullcontext():
            start = self._now()
            loss = self._forward_backward(batch)
            self.optimizer.step()
            end = self._now()
        self.steps += 1
        self.recording.add([], start, end)
        peaks = [counter.peak_bytes() for counter in counters] or None
        return StepMetrics(float(loss), end - start, peak_memory_bytes=peaks)

    def _forward_backward(self, batch: Batch) -> Tensor:
        self.layers.zero_grad(set_to_none=True)
        for stage in self.stages:
            stage.begin(self.steps)
        output = self.pipe(batch.inputs.to(self.pipe.devices[0]))
        loss = self.model.loss(output, batch.targets.to(output.device)) / len(batch)
        del output
        loss.backward()
        return loss.detach()

    def _now(self) -> float:
        if not self.on_cpu:
            for device in self.pipe.devices:
                torch.cuda.synchronize(device)
        return time.perf_counter()

    def _count_memory(self) -> list[DeviceMemory]:
        """The allocator of each GPU counts; all CPU devices share the memory and the threads."""
        return [DeviceMemory(torch.device(self.spec.devices[device]), []) for device in self.plan.devices]

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


def _mend_deferred(pipe: nn.Module) -> None:
    """What torchgpipe's deferred batch norm gathers gets the dtype of its statistics, and is no part of the state."""
    for module in pipe.modules():
        if isinstance(module, DeferredBatchNorm):
            like = module.get_buffer("running_mean")
            for name in ("sum", "sum_squares"):
                module.register_buffer(name, module.get_buffer(name).to(like), persistent=False)
