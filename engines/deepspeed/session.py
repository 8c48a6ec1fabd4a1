"""The common base of the sessions for DeepSpeed's pipeline and its plain engine."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo  # optimizers import it: once here, which takes a second, and not in each rank
from torch import Tensor

from engines.deepspeed import load_deepspeed, loss_scale
from harness.core.plan import Plan
from harness.core.problem import Problem
from harness.interfaces import Batch, Model, SessionSpec, StepMetrics
from harness.runtime.device_clock import TimePoint
from harness.runtime.distributed_session import DistributedSession
from harness.runtime.gradient_norms import UpdateNorms
from harness.runtime.stage_module import StageModule

if TYPE_CHECKING:
    from engines.deepspeed.engine import Config
    from engines.deepspeed.state_dict import State


class DeepSpeedSession(DistributedSession):
    """A rank with one stage. `forward_end` is when its last forward pass, or recomputation, ended."""

    engine: Any
    stage: StageModule
    state: State
    updates: UpdateNorms
    forward_end: TimePoint

    def __init__(self, model: Model, plan: Plan, spec: SessionSpec, config: Config) -> None:
        super().__init__(model, plan, spec)
        self.config = config
        self.finds_unused = config.zero == 3
        self.library = load_deepspeed.load(config.zero)

    def step(self, batch: Batch, meter: bool = False) -> StepMetrics:
        """Run one step; print and log a message if DeepSpeed skipped its optimizer step."""
        self.updates.begin()
        metrics = super().step(batch, meter)
        if self.engine.was_step_applied():
            return metrics
        why = "gradients are not finite, DeepSpeed skips the optimizer"
        if self.rank == 0:
            print(f"step {self.steps - 1}: {why}; {self.engine.skipped_steps} skipped so far", flush=True)
        skipped = Problem("precision.dtype", self.spec.dtype, why, self.spec.instead, "more steps")
        return replace(metrics, skipped=skipped)

    def updates_with(self, optimizer: torch.optim.Optimizer) -> None:
        """Take torch's optimizer, which DeepSpeed's drives."""
        self.optimizer, self.updates = optimizer, UpdateNorms([optimizer], self.parameter_names)

    def own(self, stage: StageModule) -> None:
        """Take the stage that this rank trains."""
        self.stage = stage
        stage.autocast = self.autocast_dtype
        stage.recomputes = self.plan.recompute == "always" and stage.has_backward
        stage.ungraded_out.clear()  # DeepSpeed goes back from every output, and gets zeros for what has no gradient
        stage.register_forward_hook(self._forward_ends, always_call=True)

    def _forward_ends(self, *_: Any) -> None:
        self.forward_end = self.now()

    def held_tensors(self) -> list[Tensor]:
        return self.state.held()

    def gradient_norms(self) -> dict[str, float]:
        return self.updates.norms()

    def local_state(self) -> dict[str, Any]:
        return self.state.save()

    def own_tensors(self) -> dict[str, Any]:
        return self.state.own()

    @property
    def split_over_replicas(self) -> bool:
        return bool(self.state.flat)

    def shard(self, name: str, own: Tensor) -> Any:
        parameters = self.state.parameters
        return self.state.blocks(parameters[name] if name in parameters else self.named_parameters()[name], own)

    def scale_state(self) -> dict[str, Any]:
        scale = loss_scale.state(self.engine.optimizer)
        return {"loss_scale": scale} if scale else {}

    def load_local_state(self, state: dict[str, Any]) -> None:
        self.state.load(state)
        loss_scale.load(self.engine.optimizer, state.get("loss_scale"))
