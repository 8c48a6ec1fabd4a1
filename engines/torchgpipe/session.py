"""A model in training in torchgpipe's pipeline."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import torchgpipe
from torch import Tensor, nn
from torchgpipe.batchnorm import DeferredBatchNorm

from engines.torchgpipe.skip_stage import SkipStage, stages
from harness.core.plan import Plan
from harness.interfaces import Batch, Model, SessionSpec
from harness.nn.skip import named_layers
from harness.runtime.local_session import LocalSession
from harness.runtime.memory_meter import DeviceMemory
from harness.runtime.training_state import make_optimizer
from harness.runtime.values import placed, tensors_of

if TYPE_CHECKING:
    from engines.torchgpipe.engine import Config


class TorchGPipeSession(LocalSession):
    """A partition for each stage. Its trace has steps and no spans."""

    def __init__(self, model: Model, plan: Plan, spec: SessionSpec, config: Config) -> None:
        super().__init__(model, plan, spec)
        self.config = config

    def build(self, layers: nn.Sequential) -> None:
        plan, spec = self.plan, self.spec
        self.pipe = torchgpipe.GPipe(
            nn.Sequential(*stages(layers, plan, spec)),
            balance=[1] * len(plan.stages),
            devices=[spec.devices[stage.device] for stage in plan.stages],
            chunks=plan.micro_batches,
            checkpoint=plan.recompute,
            deferred_batch_norm=self.config.deferred_batch_norm,
        )
        self.stages = [module for module in self.pipe.modules() if isinstance(module, SkipStage)]
        _fix_deferred_batch_norm(self.pipe)
        # as it was before the cut: its names, torchgpipe's parameters and buffers
        self.stage = nn.Sequential(OrderedDict(pair for stage in self.stages for pair in named_layers(stage.layers)))
        self.optimizer = make_optimizer(self.stage.parameters(), spec.optimizer)

    def train_step(self, batch: Batch) -> Tensor:
        self.stage.zero_grad(set_to_none=True)
        for stage in self.stages:
            stage.begin(self.steps)
        output = self.pipe(placed(batch.inputs, self.device))
        loss = self.model.loss(output, placed(batch.targets, tensors_of(output)[0].device)) / len(batch)
        del output
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def memory_meters(self, batch: Batch) -> dict[int, DeviceMemory]:
        """Return a meter for each GPU; CPU devices have none, because they share memory and threads."""
        return {} if self.on_cpu else super().memory_meters(batch)


def _fix_deferred_batch_norm(pipe: nn.Module) -> None:
    """Give torchgpipe's deferred statistics the dtype of the module's, and keep them out of the state dict."""
    for module in pipe.modules():
        if isinstance(module, DeferredBatchNorm):
            like = module.get_buffer("running_mean")
            for name in ("sum", "sum_squares"):
                module.register_buffer(name, module.get_buffer(name).to(like), persistent=False)
