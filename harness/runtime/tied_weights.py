r"""Trained parameters that layers on several devices share, in an engine of ranks: every rank has its own copy.

    device 0   embedding.weight   gradient g0 --\              /--> g0 + g3
                                                 all_reduce --<                 over the ranks of one replica
    device 3   head.weight        gradient g3 --/              \--> g0 + g3

All copies begin equal and get the same gradient, so the same optimizer keeps them equal. With replicas that takes the
sums over these first, or one sum over the copies in all replicas: sums of floats depend on their order, and a ring's on
the place of a number in the buffer. `harness.schedule.tied_weight_ops` puts the same sums into schedules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.op import Op
from harness.core.plan import Plan
from harness.nn.skip import named_layers
from harness.nn.tied import ties
from harness.runtime.collectives import new_group
from harness.runtime.device_clock import TimePoint
from harness.schedule.dependency_graph import TIED
from harness.schedule.tied_weight_ops import Tie, plan_ties


@dataclass(frozen=True)
class SharedCopy:
    """A rank's copy of a shared parameter; `group` are the ranks whose copies are summed with it."""

    tie: Tie
    parameter: nn.Parameter
    group: dist.ProcessGroup
    stage: int

    @property
    def op(self) -> Op:
        """Return the op of the gradient sum in a trace."""
        return Op(self.stage, "collective", None, self.tie.part, bytes=self.tie.bytes)

    def sum_gradient(self) -> int:
        """Every copy gets the sum of all gradients; one without a gradient adds nothing. Where none has one, none gets
        one. The bytes of this copy's.
        """
        parameter = self.parameter
        there = torch.tensor(parameter.grad is not None, dtype=torch.uint8)  # by gloo: no GPU is waited for
        asked = dist.all_reduce(there, dist.ReduceOp.MAX, self.group, async_op=True)
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(gradient, group=self.group)
        asked.wait()
        parameter.grad = gradient if there else None
        return gradient.numel() * gradient.element_size()


class TiedWeights:
    """The shared parameters of this rank (`copies`), in the order of the layers.

    Gradients are summed over the copies of one replica, or of all replicas with the `communicator` "copies"; their
    bytes are counted as `counter`. Tensor ranks of the same number form a group. Every rank makes it at the same point
    and from the layers of all stages, since it opens process groups.
    """

    def __init__(self, layers: nn.Sequential, plan: Plan, rank: int, communicator: str = TIED) -> None:
        self.counter = f"all_reduce@{communicator}"
        tensor, replicas = plan.mesh.tensor, range(plan.mesh.data)
        together = [[one] for one in replicas] if communicator == TIED else [list(replicas)]
        width = plan.mesh.pipeline * tensor
        parameters = dict(layers.named_parameters())
        groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self.copies: list[SharedCopy] = []
        for tie in _ties(layers, plan, communicator):
            homes = {plan.stages[stage].device: stage for stage in tie.stages}
            for those, shard in product(together, range(tensor)):
                ranks = tuple(replica * width + device * tensor + shard for replica in those for device in homes)
                if ranks not in groups:
                    groups[ranks] = new_group(ranks)
                if rank in ranks:
                    home = homes[rank % width // tensor]
                    self.copies.append(SharedCopy(tie, parameters[tie.name], groups[ranks], home))

    def sum_gradients(self, now: Callable[[], TimePoint], record: Callable[[Op, TimePoint, TimePoint], None]) -> int:
        """All-reduce the gradients after the backward pass; return the bytes of this rank's copies.

        Call it after the all-reduce over replicas, with the communicator "copies" instead of that. `now` and `record`
        are those of the session. Collective over the ranks of each group.
        """
        total = 0
        for copy in self.copies:
            start = now()
            total += copy.sum_gradient()
            record(copy.op, start, now())
        return total

    def weights_and_groups(self) -> list[tuple[Tensor, dist.ProcessGroup]]:
        """The copies with the ranks that each is shared by."""
        return [(copy.parameter, copy.group) for copy in self.copies]


def _ties(layers: nn.Sequential, plan: Plan, communicator: str) -> list[Tie]:
    """Return the parameters that layers on different devices share."""
    shared = ties(layers)
    tied = [shared.get(name, ()) for name, _ in named_layers(layers)]
    profiles = [LayerProfile(param_bytes=sum(one.bytes for one in own), tied=own) for own in tied]
    return plan_ties(plan, ModelProfile(tuple(profiles)), communicator)
