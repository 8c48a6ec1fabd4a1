"""Sums of gradients over the devices that have the same block: of weights while the backward pass continues, of all
that is no weight (biases, norms, positions) at its end, in one buffer for each group. Weights of few bytes wait for
each other, and are summed in one buffer, too: each sum costs its wait."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engines.sbp.block_collectives import Groups
from engines.sbp.block_layout import Digits, Mesh
from engines.sbp.sharded_state import Shard
from harness.runtime.collectives import CollectiveCounter
from harness.simulator.routes import STEPS

if TYPE_CHECKING:
    from engines.sbp.engine import Config

TOGETHER_BYTES = 1 << 18
"""Gradients of weights that are smaller wait until they are so many bytes together."""


class GradientSync:
    """`named` are this rank's parameters. With `config.overlap` sums of weights begin as soon as they can."""

    def __init__(
        self,
        named: dict[str, nn.Parameter],
        shards: dict[str, Shard],
        mesh: Mesh,
        groups: Groups,
        counter: CollectiveCounter,
        config: Config,
    ) -> None:
        self.mesh, self.groups, self.counter, self.overlap = mesh, groups, counter, config.overlap
        self.aligned = config.aligned
        self.last = False
        self.running: list[Any] = []
        self.waiting: dict[Digits, list[Tensor]] = defaultdict(list)
        self.together: list[tuple[Tensor, list[Tensor]]] = []
        self.weights: list[tuple[nn.Parameter, Digits]] = []
        self.small: dict[Digits, list[nn.Parameter]] = defaultdict(list)
        for name, parameter in named.items():
            shard = shards[name]
            if not (shard.sums and parameter.requires_grad):
                continue
            if not shard.weight:
                self.small[shard.sums].append(parameter)
                continue
            self.weights.append((parameter, shard.sums))
            if config.overlap:
                parameter.register_post_accumulate_grad_hook(lambda done, digits=shard.sums: self._begin(done, digits))

    @staticmethod
    def wanted(shards: dict[str, Shard]) -> set[Digits]:
        """The digits of all sums."""
        return {shard.sums for shard in shards.values() if shard.sums}

    def _begin(self, parameter: Tensor, digits: Digits) -> None:
        if self.last:
            assert parameter.grad is not None
            self.waiting[digits].append(parameter.grad)
            if sum(gradient.nbytes for gradient in self.waiting[digits]) >= TOGETHER_BYTES:
                self._flush(digits)

    def _flush(self, digits: Digits) -> None:
        """Begin the sum of what waits."""
        gradients = self.waiting.pop(digits)
        flat = gradients[0] if len(gradients) == 1 else _flat(gradients)
        if len(gradients) > 1:
            self.together.append((flat, gradients))
        self._sum(flat, digits, "weights", wait=False)

    def _sum(self, gradient: Tensor, digits: Digits, phase: str, wait: bool) -> None:
        members = self.mesh.size(digits)
        size = STEPS["all_reduce"] * (members - 1) * gradient.nbytes // members
        if self.aligned and wait:
            dist.barrier(self.groups.of("gradients", digits))
        with self.counter.counting(f"all_reduce@{phase}", size):
            work = dist.all_reduce(gradient, group=self.groups.of("gradients", digits), async_op=True)
            if wait and work:
                work.wait()
        if not wait:
            self.running.append(work)

    def finish(self) -> None:
        """All sums of a step, done."""
        for parameter, digits in self.weights if not self.overlap else ():
            self._sum(_gradient(parameter), digits, "weights", wait=self.aligned)
        for digits in list(self.waiting):
            self._flush(digits)
        with self.counter.counting("all_reduce@weights"):
            for work in self.running:
                work.wait()
        for flat, gradients in self.together:
            _spread(flat, gradients)
        self.running.clear()
        self.together.clear()
        for digits, parameters in self.small.items():
            gradients = [_gradient(parameter) for parameter in parameters]
            flat = _flat(gradients)
            self._sum(flat, digits, "small parameters", wait=True)
            _spread(flat, gradients)


def _flat(gradients: Sequence[Tensor]) -> Tensor:
    return torch.cat([gradient.flatten() for gradient in gradients])


def _spread(flat: Tensor, gradients: Sequence[Tensor]) -> None:
    """Back from one buffer."""
    for gradient, part in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def _gradient(parameter: nn.Parameter) -> Tensor:
    """Zeros where no sample of this device took part."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
