"""Training with delayed weights, one micro-batch after the other in plain torch: what the engine must equal."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from harness.interfaces import Batch, Model, SessionSpec
from harness.nn import dropout
from harness.runtime.training_state import initial_layers

Named = dict[str, Tensor]


@dataclass
class Reported:
    """Losses of the steps, the gradient of each update, and the state after each step."""

    losses: list[float] = field(default_factory=list)
    gradients: list[Named] = field(default_factory=list)
    states: list[Named] = field(default_factory=list)


def train(model: Model, spec: SessionSpec, batches: list[Batch], micro_batches: int, every: int) -> Reported:
    """Every step: groups of `every` micro-batches, group k with the weights after max(k - 1, 0) updates."""
    layers = initial_layers(model, spec)
    newest = {name: nn.Parameter(p.detach().clone(), p.requires_grad) for name, p in layers.named_parameters()}
    optimizer = _optimizer(list(newest.values()), spec)
    reported = Reported()
    for step, batch in enumerate(batches):
        versions = [{name: p.detach().clone() for name, p in newest.items()}]
        pairs = list(
            zip(batch.inputs.tensor_split(micro_batches), batch.targets.tensor_split(micro_batches), strict=True)
        )
        loss = 0.0
        for k, first in enumerate(range(0, micro_batches, every)):
            group = pairs[first : first + every]
            samples = sum(len(inputs) for inputs, _ in group)
            with torch.no_grad():
                for name, p in layers.named_parameters():
                    p.copy_(versions[max(k - 1, 0)][name])
                    p.grad = None
            for i, (inputs, targets) in enumerate(group, first):
                with dropout.keyed(spec.seed, step, i):
                    share = model.loss(layers(_own(inputs, spec)), _own(targets, spec)) / samples
                share.backward()
                loss += share.item() * samples / len(batch)
            for name, p in layers.named_parameters():
                newest[name].grad = p.grad
            reported.gradients.append({n: p.grad.clone() for n, p in newest.items() if p.grad is not None})
            optimizer.step()
            versions.append({name: p.detach().clone() for name, p in newest.items()})
        reported.losses.append(loss)
        reported.states.append(
            {name: versions[-1].get(name, value).clone() for name, value in layers.state_dict().items()}
        )
    return reported


def _own(tensor: Tensor, spec: SessionSpec) -> Tensor:
    return tensor.to(getattr(torch, spec.dtype), copy=True) if tensor.is_floating_point() else tensor.clone()


def _optimizer(parameters: list[nn.Parameter], spec: SessionSpec) -> torch.optim.Optimizer:
    wanted = spec.optimizer
    if wanted.name == "sgd":
        return torch.optim.SGD(parameters, wanted.lr, wanted.momentum, weight_decay=wanted.weight_decay)
    return torch.optim.Adam(parameters, wanted.lr, weight_decay=wanted.weight_decay)
