"""A model in training in the pipeline: the common interface over the GPipe module."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from engines.gpipe.cpu_pipeline import DeviceQueues
from engines.gpipe.gpipe_module import GPipe
from engines.gpipe.tied_copies import second_names
from harness.core.op import Op
from harness.core.plan import Plan
from harness.core.shared_buffers import homes
from harness.core.trace import Span
from harness.interfaces import Batch, Model, SessionSpec
from harness.nn.shared_state import SharedState
from harness.nn.skip import named_layers
from harness.runtime.cpu_streams import Job, Run
from harness.runtime.local_session import LocalSession
from harness.runtime.memory_meter import DeviceMemory
from harness.runtime.training_state import load_optimizer_state, make_optimizer, optimizer_tensors
from harness.runtime.values import placed, tensors_of

if TYPE_CHECKING:
    from engines.gpipe.engine import Config


class GPipeSession(LocalSession):
    stage: GPipe
    """The whole pipeline."""

    def __init__(self, model: Model, plan: Plan, spec: SessionSpec, config: Config) -> None:
        super().__init__(model, plan, spec)
        self.config = config

    def watch_shared_state(self, layers: nn.Sequential) -> None:
        """The pipeline itself watches what its layers share in forward passes; backward passes end outside of it."""
        self.shared_state = SharedState(named_layers(layers), homes(self.plan)).of_hooks()

    def build(self, layers: nn.Sequential) -> None:
        plan, config = self.plan, self.config
        self.stage = GPipe(
            layers,
            plan.balance,
            self.spec.devices,
            chunks=plan.micro_batches,
            checkpoint=plan.recompute,
            placement=[stage.device for stage in plan.stages],
            deferred_batch_norm=config.deferred_batch_norm,
            dependency=config.dependency,
            streams=config.streams,
            portals=config.portals,
        )
        self.stage.seed = self.spec.seed
        self.stage_optimizers = [make_optimizer(own, self.spec.optimizer) for own in self._parameters()]

    def __exit__(self, *error: object) -> None:
        if self.on_cpu:
            self.stage.close()

    def _parameters(self) -> list[list[nn.Parameter]]:
        """The parameters of each stage; one that several stages of a device share belongs to the first of them."""
        seen: set[nn.Parameter] = set()
        owned = []
        for stage in self.stage.stages:
            own = dict.fromkeys(p for _, layer in stage.layers for p in layer.parameters() if p not in seen)
            owned.append(list(own))
            seen |= own.keys()
        return owned

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return self.stage_optimizers

    def train_step(self, batch: Batch) -> Tensor:
        self.stage.passes = self.steps
        loss = self._forward_backward(batch)
        self.unscale()
        if self.stage.queues is None:
            self._step_optimizers_in_sequence()
            self.spans = self.stage.recorder.spans()
        else:
            self.spans = self.stage.spans + self._step_optimizers(self.stage.queues)
        self.bytes_sent.update(self.stage.bytes_sent)
        return loss

    def _forward_backward(self, batch: Batch) -> Tensor:
        self.stage.zero_grad(set_to_none=True)
        with self.autocast():
            output = self.stage(batch.inputs)
        loss = self.model.loss(output, placed(batch.targets, tensors_of(output)[0].device)) / len(batch)
        del output
        self.scaled(loss).backward()
        return loss.detach()

    def _step_optimizers(self, queues: DeviceQueues) -> list[Span]:
        """Step each stage's optimizer on its own device, in parallel."""
        run = Run()
        jobs = []
        for stage, optimizer in zip(self.stage.stages, self.stage_optimizers, strict=True):
            queue = queues.compute[self.plan.stages[stage.number].device]
            jobs.append(queue.submit(Job(run, partial(self._update, optimizer), Op(stage.number, "step"))))
        for job in jobs:
            job.wait()
        run.raise_error()
        return run.spans

    def _step_optimizers_in_sequence(self) -> None:
        """Step the optimizers one after the other; CUDA devices still work in parallel, because the host does not
        wait."""
        for stage, optimizer in zip(self.stage.stages, self.stage_optimizers, strict=True):
            with self.stage.recorder.computing(Op(stage.number, "step"), self.plan.stages[stage.number].device):
                self._update(optimizer)
        self._synchronize()

    def _update(self, optimizer: torch.optim.Optimizer) -> None:
        if self.skipped is None:
            optimizer.step()

    def held_by_device(self) -> dict[int, list[Tensor]]:
        held: dict[int, list[Tensor]] = defaultdict(list)
        for stage, optimizer in zip(self.stage.stages, self.stage_optimizers, strict=True):
            device = self.plan.stages[stage.number].device
            for _, layer in stage.layers:
                held[device] += [*layer.parameters(), *layer.buffers()]
            held[device] += optimizer_tensors([optimizer])
        return held

    def count_memory(self, meters: Mapping[int, DeviceMemory]) -> None:
        for queue in self.stage.queues.all() if self.stage.queues else []:
            queue.context = meters[queue.device].counting if meters else nullcontext

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters, of those that several devices have a copy of the first."""
        second = second_names(self.stage, self.stage.shared)
        return {name: p for name, p in self.stage.named_parameters() if name not in second}

    def load_local_state(self, state: dict[str, Any]) -> None:
        self.stage.load_state_dict(state["model"])
        saved, second = state["optimizer"], second_names(self.stage, self.stage.shared)
        saved = saved | {name: saved[first] for name, first in second.items() if first in saved}
        load_optimizer_state(dict(self.stage.named_parameters()), self.stage_optimizers, saved)
