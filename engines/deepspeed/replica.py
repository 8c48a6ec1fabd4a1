"""A replica of the whole model in training, its state whole or in shards (ZeRO 0 to 3)."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engines.deepspeed import library
from engines.deepspeed.session import DeepSpeedSession
from harness.interfaces import Batch
from harness.op import Kind, Op
from harness.rank_session import Mark
from harness.schedule.zero import over_replicas
from harness.stage_module import stage_modules


class ReplicaSession(DeepSpeedSession):
    """DeepSpeed's plain engine.

    Its collectives run inside the passes and the step, layer by layer. The trace has them as blocks as long as they
    held up the rank: what is gathered before the pass, what is summed behind it, and the weights behind the step.
    """

    def build(self, layers: nn.Sequential) -> None:
        from engines.deepspeed.state import State

        self.own(stage_modules(layers, self.plan, [0])[0])
        named = self.named(self.stage)
        self.traffic = library.join(self.library, self.device, self.plan.mesh.data)
        self.optimizer = library.optimizer(self.stage, self.spec.optimizer, self.config.offload)
        module = Recomputed(self.stage) if self.stage.recomputes else self.stage
        self.engine = library.engine(self.library, module, self.optimizer, self.config, self.plan, self.spec)
        self.state = State(self.engine, self.stage, named, self.optimizer)

    def train(self, batch: Batch, size: int) -> float:
        self.traffic.take()
        pairs = enumerate(self.pairs(batch))
        total = sum(self._task(i, inputs, targets, size) for i, (inputs, targets) in pairs)
        return total / (self.micro_batches * self.plan.mesh.data)

    def _task(self, i: int, inputs: Tensor, targets: Tensor, size: int) -> float:
        """Forward, backward and, behind the last micro-batch, DeepSpeed's step. It takes the mean over all tasks."""
        self.stage.at(self.spec.seed, self.steps, self.number(i))
        start = self.now()
        output = self.engine(inputs.to(self.device))
        self._note("F", i, start)
        scale = self.micro_batches * self.plan.mesh.data / size
        loss = self.model.loss(output, targets.to(self.device)) * scale
        del output
        start = self.now()
        self.stage.at(self.spec.seed, self.steps, self.number(i), again=self.stage.recomputes)
        self.engine.backward(loss)
        if self.stage.recomputes:
            self.note(Op(0, "R", i), start, self.forward_end)
            start = self.forward_end
        self._note("B", i, start)
        start = self.now()
        self.engine.step()
        if i == self.micro_batches - 1:
            self._note("step", None, start)
        return float(loss.detach())

    def _note(self, kind: Kind, i: int | None, start: Mark) -> None:
        """The pass since `start`, and the collectives that ran in it."""
        end = self.now()
        seconds, sizes = self.traffic.take()
        whole = end - start if isinstance(start, float) and isinstance(end, float) else float("inf")
        shares = {algorithm: seconds[algorithm] / whole for algorithm in sizes}
        before = sum(share for algorithm, share in shares.items() if algorithm == "all_gather" and kind in "FB")
        behind = sum(shares.values()) - before
        self.note(Op(0, kind, i), start, end, before, 1 - behind)
        self._collectives(kind, i, start, end, shares, sizes)

    def _collectives(
        self, kind: Kind, i: int | None, start: Mark, end: Mark, shares: dict[str, float], sizes: Counter[str]
    ) -> None:
        at = 1 - sum(shares.values())
        for algorithm, share in shares.items():
            self.sent[algorithm] += sizes[algorithm]
            if algorithm == "all_gather" and kind in "FB":
                bucket = "forward" if kind == "F" else "backward"
                self.note(over_replicas(0, algorithm, sizes[algorithm], i, bucket), start, end, 0.0, share)
            else:
                at += share
                number = i if self.config.zero > 1 and kind == "B" else None
                self.note(over_replicas(0, algorithm, sizes[algorithm], number), start, end, at - share, at)


class Recomputed(nn.Module):
    """The stage, run again in the backward pass instead of keeping what autograd would save."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, inputs: Tensor) -> Any:
        return checkpoint(self.stage, inputs, use_reentrant=False)
