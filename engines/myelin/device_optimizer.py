"""The optimizer's state, and float32 weights, on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engines.myelin.buckets import Chunk
from engines.myelin.flat_buffers import FlatBuffers
from engines.myelin.optimizers import Optimizer, Run
from harness.core.op import Op
from harness.runtime.device_clock import TimePoint
from harness.runtime.loss_scale import unscaled


class DeviceOptimizer:
    """`master` are the weights that the optimizer updates, `rows` what it keeps of each.

    In half precision these are 4 bytes a parameter, and 4 of gradients in float32: with Adam 20 in all (section V-B).
    Else the master weights are the parameters themselves.
    """

    def __init__(
        self,
        flat: FlatBuffers,
        optimizer: Optimizer,
        stage: int,
        now: Callable[[], TimePoint],
        note: Callable[[Op, TimePoint, TimePoint], None],
    ) -> None:
        self.flat, self.optimizer, self.stage, self.now, self.note = flat, optimizer, stage, now, note
        self.master = flat.weights.to(flat.wide)
        self.gradients = torch.zeros_like(self.master) if flat.half else flat.gradients
        self.rows = [torch.zeros_like(self.master) for _ in optimizer.rows]

    def begin(self) -> None:
        """Updates of a step begin."""

    def update(self, chunk: Chunk, runs: Sequence[Run], scale: float) -> None:
        """Update the chunk's weights from its gradients, which are divided by `scale`."""
        began = self.now()
        for half in chunk.halves:
            part = slice(half.start, half.stop)
            master, gradients = self.master[part], self.gradients[part]
            if self.flat.half:
                unscaled(self.flat.gradients[part], gradients, scale)
            self.optimizer.step(master, gradients, [row[part] for row in self.rows], runs, half.start)
            if self.flat.half:
                self.flat.weights[part].copy_(master)
        self.note(Op(self.stage, "step", None, chunk.part), began, self.now())

    def synchronize(self) -> None:
        """Wait until `master` and `rows` can be read."""

    def held(self) -> list[Tensor]:
        """Return the optimizer's tensors on the device, in addition to parameters and gradients."""
        return [self.master, self.gradients, *self.rows] if self.flat.half else self.rows
