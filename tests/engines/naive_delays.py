"""Training with delayed weights in plain torch, with all weights of all updates kept: what the engines must equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

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


@dataclass
class Pipeline:
    """`balance` layers in each stage, `flights` micro-batches in flight, `every` micro-batches for an update. It drains
    at the end of each step if `drain`. `corrections` are those of the engines, by name. Stage j begins `ways_back[j]`
    backward tasks more until a micro-batch has gone from it to stage 0."""

    micro_batches: int
    every: int
    balance: Sequence[int] = (10**6,)
    flights: Sequence[int] = (1,)
    versions: str = "2bw"
    drain: bool = True
    corrections: dict[str, Any] = field(default_factory=dict)
    ways_back: Sequence[int] = (0,)

    def versions_of(self, j: int, n: int, start: int) -> tuple[int, int]:
        """After how many updates stage j has the weights for both tasks of micro-batch n, of those since the pipeline
        was empty; `start` updates had been made then."""
        group = n // self.every
        done = max(0, n - self.flights[j] + 1) // self.every
        return {
            "flush": (start + group, start + group),
            "2bw": (start + max(group - 1, 0),) * 2,
            "stash": (start + done, start + done),
            "none": (start + done, start + group),
        }[self.versions]

    def target(self, j: int, n: int, start: int) -> int:
        """Of which update the weights are that stage j predicts for micro-batch n."""
        group = start + n // self.every
        if not self.corrections.get("round_trip") or self.versions == "flush":
            return group
        through = n + 1 + self.ways_back[j]
        total = self.micro_batches if self.drain else through + self.every
        ends = [min(first + self.every, total) for first in range(0, total, self.every)]
        return max(group, start + sum(end <= through for end in ends) - 1)


def train(model: Model, spec: SessionSpec, batches: Sequence[Batch], pipe: Pipeline) -> Reported:
    """Each micro-batch through the whole model, each weight as old as that of its stage."""
    layers = initial_layers(model, spec)
    stage = _stages(layers, pipe.balance)
    newest = {name: nn.Parameter(p.detach().clone(), p.requires_grad) for name, p in layers.named_parameters()}
    optimizers = {j: _optimizer([p for n, p in newest.items() if stage[n] == j], spec) for j in set(stage.values())}
    weights, moves = [_copied(newest)], [dict[str, Tensor]()]  # after k updates, and the update that made them
    means = [{name: torch.zeros_like(w) for name, w in weights[0].items()}]  # PipeMare's delta
    reported, start, seen = Reported(), 0, 0
    first_names = {id(p): name for name, p in layers.named_parameters()}
    named = {name: first_names[id(p)] for name, p in layers.named_parameters(remove_duplicate=False)}
    for step, batch in enumerate(batches):
        if pipe.drain:
            start, seen = len(weights) - 1, 0
        parts = (whole.tensor_split(pipe.micro_batches) for whole in (batch.inputs, batch.targets))
        pairs = list(zip(*parts, strict=True))
        loss = 0.0
        for first in range(0, pipe.micro_batches, pipe.every):
            group = pairs[first : first + pipe.every]
            samples = sum(len(inputs) for inputs, _ in group)
            number = len(weights) - 1
            used = [
                {name: pipe.versions_of(j, seen + i, start) for name, j in stage.items()} for i in range(len(group))
            ]
            targets_of = [
                {name: pipe.target(j, seen + i, start) for name, j in stage.items()} for i in range(len(group))
            ]
            gradients: Named = {}
            for i, (inputs, targets) in enumerate(group):
                own = {
                    name: _weight(weights, moves, name, versions[0], targets_of[i][name], pipe)
                    for name, versions in used[i].items()
                }
                leaves = {name: w.clone().requires_grad_(newest[name].requires_grad) for name, w in own.items()}
                with dropout.keyed(spec.seed, step, first + i):
                    out = functional_call(layers, leaves, (_own(inputs, spec),))
                share = model.loss(out, _own(targets, spec)) / samples
                for name, versions in used[i].items():
                    backward = _weight(weights, moves, name, versions[1], targets_of[i][name], pipe)
                    if pipe.corrections.get("discrepancy"):
                        backward = backward - (versions[1] - versions[0]) * means[versions[1]][name]
                    leaves[name].data.copy_(backward)
                share.backward()
                loss += share.item() * samples / len(batch)
                for name, leaf in leaves.items():
                    if leaf.grad is not None:
                        gradients[name] = gradients[name] + leaf.grad if name in gradients else leaf.grad
            reported.gradients.append(gradients)
            late = {name: max(number - one[name][0] for one in used) for name in stage}
            moves.append(_update(newest, optimizers, gradients, stage, late, number, moves[-1], pipe, spec))
            weights.append(_copied(newest))
            means.append(_means(means[-1], weights[-2], weights[-1], late, pipe))
            seen += len(group)
        reported.losses.append(loss)
        newest_of = {name: weights[-1][first] for name, first in named.items()}
        reported.states.append({n: newest_of.get(n, value).clone() for n, value in layers.state_dict().items()})
    return reported


def _update(
    newest: dict[str, nn.Parameter],
    optimizers: dict[int, torch.optim.Optimizer],
    gradients: Named,
    stage: dict[str, int],
    late: dict[str, int],
    number: int,
    before: Named,
    pipe: Pipeline,
    spec: SessionSpec,
) -> Named:
    """Update the newest weights, and return by how much the optimizers alone moved them."""
    old = _copied(newest)
    for name, p in newest.items():
        p.grad = gradients.get(name)
    steps = pipe.corrections.get("lr_steps", 0)
    for j, optimizer in optimizers.items():
        delay = max(1, max(late[name] for name, of in stage.items() if of == j))
        power = 1 - min(number / steps, 1) if steps else 0
        optimizer.param_groups[0]["lr"] = spec.optimizer.lr * delay**-power
        optimizer.step()
    moved = {name: newest[name].detach() - old[name] for name in gradients}
    feedback, ahead = pipe.corrections.get("error_feedback", False), pipe.corrections.get("look_ahead", 0)
    with torch.no_grad():
        for name in moved.keys() & before.keys():
            if late[name]:
                newest[name] += (late[name] * feedback + ahead) * (moved[name] - before[name])
    return before | moved


def _means(before: Named, old: Named, new: Named, late: dict[str, int], pipe: Pipeline) -> Named:
    base = pipe.corrections.get("discrepancy", 0)
    keep = {name: base ** (1 / tau) if tau else 0.0 for name, tau in late.items()}
    return {name: keep[name] * mean + (1 - keep[name]) * (new[name] - old[name]) for name, mean in before.items()}


def _weight(weights: list[Named], moves: list[Named], name: str, version: int, target: int, pipe: Pipeline) -> Tensor:
    ahead = target - version
    if pipe.corrections.get("prediction") and ahead and name in moves[version]:
        return weights[version][name] + ahead * moves[version][name]
    return weights[version][name]


def _stages(layers: nn.Sequential, balance: Sequence[int]) -> dict[str, int]:
    """The stage of each parameter."""
    homes = [j for j, count in enumerate(balance) for _ in range(min(count, len(layers)))]
    of_layer = dict(zip((name for name, _ in layers.named_children()), homes, strict=False))
    return {name: of_layer[name.partition(".")[0]] for name, _ in layers.named_parameters()}


def _copied(named: dict[str, nn.Parameter]) -> Named:
    return {name: p.detach().clone() for name, p in named.items()}


def _own(tensor: Tensor, spec: SessionSpec) -> Tensor:
    return tensor.to(getattr(torch, spec.dtype), copy=True) if tensor.is_floating_point() else tensor.clone()


def _optimizer(parameters: list[nn.Parameter], spec: SessionSpec) -> torch.optim.Optimizer:
    wanted = spec.optimizer
    if wanted.name == "nadam":
        return torch.optim.NAdam(parameters, wanted.lr, (wanted.beta1 or 0.9, 0.999), decoupled_weight_decay=True)
    if wanted.name == "muon":  # for networks whose weights are all matrices
        return torch.optim.Muon(parameters, wanted.lr, wanted.weight_decay, adjust_lr_fn="match_rms_adamw")
    if wanted.name == "sgd":
        return torch.optim.SGD(parameters, wanted.lr, wanted.momentum, weight_decay=wanted.weight_decay)
    return torch.optim.Adam(parameters, wanted.lr, weight_decay=wanted.weight_decay)
