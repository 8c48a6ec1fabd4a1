"""Sums of gradients over the devices that have the same block: of weights while the backward pass goes on, one by one,
of all that is small (biases, norms, positions) at its end, in one buffer for each group."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engines.sbp.config import Config
from engines.sbp.exchange import Groups
from engines.sbp.layout import Digits, Mesh
from engines.sbp.shards import Shard
from harness.simulate.routes import STEPS
from harness.tally import Tally


class Gradients:
    """`named` are this rank's parameters. With `config.overlap` sums of weights begin as soon as they can."""

    def __init__(
        self, named: dict[str, nn.Parameter], shards: dict[str, Shard], mesh: Mesh, groups: Groups, tally: Tally,
        config: Config,
    ) -> None:  # fmt: skip
        self.mesh, self.groups, self.tally, self.overlap = mesh, groups, tally, config.overlap
        self.aligned = config.aligned
        self.last = False
        self.running: list[Any] = []
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
            self._sum(parameter.grad, digits, "weights", wait=False)

    def _sum(self, gradient: Tensor, digits: Digits, phase: str, wait: bool) -> None:
        members = self.mesh.size(digits)
        size = STEPS["all_reduce"] * (members - 1) * gradient.nbytes // members
        if self.aligned and wait:
            dist.barrier(self.groups.of("gradients", digits))
        with self.tally.counting(f"all_reduce@{phase}", size):
            work = dist.all_reduce(gradient, group=self.groups.of("gradients", digits), async_op=True)
            if wait and work:
                work.wait()
        if not wait:
            self.running.append(work)

    def finish(self) -> None:
        """All sums of a step, done."""
        for parameter, digits in self.weights if not self.overlap else ():
            self._sum(_gradient(parameter), digits, "weights", wait=self.aligned)
        with self.tally.counting("all_reduce@weights"):
            for work in self.running:
                work.wait()
        self.running.clear()
        for digits, parameters in self.small.items():
            gradients = [_gradient(parameter) for parameter in parameters]
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            self._sum(flat, digits, "small parameters", wait=True)
            for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))


def _gradient(parameter: nn.Parameter) -> Tensor:
    """Zeros where no sample of this device took part."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
