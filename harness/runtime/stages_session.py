"""The base class of sessions whose ranks have any number of stages: their modules, optimizers, sums over replicas.

device 0   stage 0, stage 3     passes of both in the engine's order | sums over replicas | tied weights | 0step 3step
device 1   stage 1, stage 2
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.core.plan import Plan
from harness.interfaces import Model, SessionSpec
from harness.nn.skip import named_layers
from harness.nn.tied import moved
from harness.runtime.distributed_session import DistributedSession
from harness.runtime.stage_module import StageModule
from harness.runtime.training_state import make_optimizer
from harness.schedule.builders.data_parallel import over_replicas


class StagesSession(DistributedSession):
    """A session whose rank has the stages `numbers` of the plan, as `modules`.

    An engine makes the modules (`make_modules`), runs the passes of a step, then calls `update`.
    """

    def __init__(self, model: Model, plan: Plan, spec: SessionSpec) -> None:
        super().__init__(model, plan, spec)
        self.modules: list[StageModule] = []

    def build(self, layers: nn.Sequential) -> None:
        self.numbers = [j for j, stage in enumerate(self.plan.stages) if stage.device == self.pipeline_rank]
        self.modules = self.make_modules(layers, self.numbers)
        for module in self.modules:
            module.autocast = self.autocast_dtype
        named = [pair for module in self.modules for pair in named_layers(module)]
        self.stage = moved(nn.Sequential(OrderedDict(named)), self.device)
        self.replicas = self.replica_group()
        self.tie_weights(layers)
        self._own()

    def make_modules(self, layers: nn.Sequential, numbers: Sequence[int]) -> list[StageModule]:
        """Return the modules of these stages."""
        raise NotImplementedError

    def _own(self) -> None:
        """Collect this rank's parameters; a shared one belongs to the first stage that has it, and to its optimizer."""
        seen: set[nn.Parameter] = set()
        self.parts: list[list[nn.Parameter]] = []
        for module in self.modules:
            self.parts.append([parameter for parameter in module.parameters() if parameter not in seen])
            seen.update(self.parts[-1])
        owners = zip(self.modules, self.parts, strict=True)
        self.owner = {self.parameter_names[one]: module.number for module, part in owners for one in part}
        self.stage_optimizers = [make_optimizer(part, self.spec.optimizer) for part in self.parts]

    def stage_of(self, name: str) -> int:
        """Return the stage of a parameter, the first one of this rank that has it."""
        return self.owner[name]

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return self.stage_optimizers

    def update(self) -> None:
        """After the passes: sum gradients over replicas and over copies of tied weights, then step the optimizers."""
        self._sum_over_replicas()
        self.sum_tied_gradients()
        for module, optimizer in zip(self.modules, self.stage_optimizers, strict=True):
            with self.span("step", stage=module.number):
                optimizer.step()

    def _sum_over_replicas(self) -> None:
        """The gradients of each stage, in one buffer for each dtype."""
        if self.replicas is None:
            return
        for module, part in zip(self.modules, self.parts, strict=True):
            start, total = self.now(), 0
            gradients = [p.grad for p in part if p.grad is not None]
            for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
                total += self._sum([gradient for gradient in gradients if gradient.dtype == dtype])
            self.record(over_replicas(module.number, "all_reduce", total), start, self.now())
            self.bytes_sent["all_reduce"] += total

    def _sum(self, gradients: list[Tensor]) -> int:
        buffer = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(buffer, group=self.replicas)
        for gradient, values in zip(gradients, buffer.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(values.view_as(gradient))
        return buffer.numel() * buffer.element_size()
