"""A replica of the whole model in training, its state whole or in shards (ZeRO 0 to 3)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engines.deepspeed import load_deepspeed
from engines.deepspeed.session import DeepSpeedSession
from harness.core.op import Kind, Op
from harness.interfaces import Batch
from harness.runtime.device_clock import TimePoint
from harness.runtime.session import place
from harness.runtime.stage_module import stage_modules
from harness.runtime.values import Value, rebuilt, tensors_of
from harness.schedule.builders.data_parallel import over_replicas


class ReplicaSession(DeepSpeedSession):
    """DeepSpeed's plain engine.

    Its collectives run inside the passes and the step, layer by layer. The trace has them as blocks as long as they
    held up the rank: what is gathered before the pass, what is summed after it, and the weights after the step.
    """

    def build(self, layers: nn.Sequential) -> None:
        from engines.deepspeed.state_dict import State

        self.own(stage_modules(layers, self.plan, [0])[0])
        named = self.named_parameters()
        self.traffic = load_deepspeed.join(self.library, self.device, self.plan.mesh.data, self.now)
        self.updates_with(load_deepspeed.optimizer(self.stage, self.spec.optimizer, self.config.offload))
        module: nn.Module = Recomputed(self.stage) if self.stage.recomputes else self.stage
        if self.config.zero == 3 and self.spec.by_value:
            module = AtOnce(module)
        self.engine = load_deepspeed.engine(self.library, module, self.optimizer, self.config, self.plan, self.spec)
        self.state = State(self.engine, self.stage, named, self.optimizer)

    def train_step(self, batch: Batch, batch_size: int) -> Tensor:
        self.traffic.take()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for i, (inputs, targets) in enumerate(self.micro_batches(batch)):
            total += self._task(i, inputs, targets, batch_size)
        return total / (self.plan.micro_batches * self.plan.mesh.data)

    def _task(self, i: int, inputs: Value, targets: Value, batch_size: int) -> Tensor:
        """Forward, backward and, after the last micro-batch, DeepSpeed's step. It takes the mean over all tasks."""
        start = self.now()
        number = self.global_micro_batch(i)
        with self.phase(place("F", number)):
            output = self.engine(inputs)
        self._note("F", i, start)
        scale = self.plan.micro_batches * self.plan.mesh.data / batch_size
        loss = self.model.loss(output, targets) * scale
        del output
        start = self.now()
        self.use_micro_batch(i, again=self.stage.recomputes)
        with self.phase(place("B", number)):
            self.engine.backward(loss)
        if self.stage.recomputes:
            self.record(Op(0, "R", i), start, self.forward_end)
            start = self.forward_end
        self._note("B", i, start)
        start = self.now()
        with self.phase(place("step", None)):
            self.engine.step()
        if i == self.plan.micro_batches - 1:
            self._note("step", None, start)
        return loss.detach()

    def _note(self, kind: Kind, i: int | None, start: TimePoint) -> None:
        """The pass since `start`, and the collectives that ran in it."""
        end = self.now()
        held, sizes = self.traffic.take()
        self.bytes_sent += sizes

        def add() -> None:
            start_s, end_s = self.clock.seconds(start), self.clock.seconds(end)
            gathers = {algorithm for algorithm in sizes if algorithm == "all_gather" and kind in "FB"}
            seconds = {algorithm: self.clock.total_s(held[algorithm]) for algorithm in sizes}
            first_s = start_s + sum(seconds[algorithm] for algorithm in gathers)
            last_s = end_s - sum(seconds[algorithm] for algorithm in sizes if algorithm not in gathers)
            self.add_span(Op(0, kind, i), first_s, last_s)
            for algorithm, size in sizes.items():
                if algorithm in gathers:
                    op = over_replicas(0, algorithm, size, i, "forward" if kind == "F" else "backward")
                    self.add_span(op, start_s, first_s)
                    continue
                number = i if self.config.zero > 1 and kind == "B" else None
                at_s, last_s = last_s, last_s + seconds[algorithm]
                self.add_span(over_replicas(0, algorithm, size, number), at_s, last_s)

        self.record_later(add)


class Recomputed(nn.Module):
    """The stage, run again in the backward pass instead of keeping what autograd would save."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, inputs: Value) -> Any:
        return checkpoint(self.stage, inputs, use_reentrant=False)


class AtOnce(nn.Module):
    """A stage whose weights ZeRO 3 gathers all at once, for layers that choose by values which ones they use.

    Else each replica would gather other ones, and wait for the others forever. DeepSpeed does so with a "leaf" module,
    gives weights that were not used a gradient of zero, and reduces them all when the leaf's inputs have theirs. That
    must come last: a second input requires a gradient, too, and is used before all else.
    """

    def __init__(self, stage: nn.Module) -> None:
        from deepspeed.utils import set_z3_leaf_module

        super().__init__()
        self.leaf = _Leaf(stage)
        set_z3_leaf_module(self.leaf, True)

    def forward(self, inputs: Value) -> Any:
        device = tensors_of(inputs)[0].device
        return self.leaf(inputs, torch.zeros((), device=device, requires_grad=True))


class _Leaf(nn.Module):
    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, inputs: Value, last: Tensor) -> Any:
        nothing = last * 0
        output = self.stage(inputs)
        outputs = list(tensors_of(output))
        first = next(number for number, tensor in enumerate(outputs) if tensor.is_floating_point())
        outputs[first] = outputs[first] + nothing.to(outputs[first])
        return rebuilt(output, outputs)
