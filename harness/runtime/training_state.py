"""The training state that all engines share: the same weights, optimizers and state dict by name."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from harness.interfaces import Batch, Model, OptimizerSpec, SessionSpec
from harness.nn import dropout
from harness.nn.tied import dtype_in, moved
from harness.runtime.muon import MuonAndAdamW
from harness.runtime.values import mapped, split

CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)
OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "nadam": torch.optim.NAdam,
    "muon": MuonAndAdamW,
}
FUSED = ("sgd", "adam", "adamw")
"""Those that have fused kernels."""
COUNTERS = ("step", "mu_product")
"""States of an optimizer that count its steps: numbers, which it reads on the CPU unless it is fused."""


def initial_layers(model: Model, spec: SessionSpec) -> nn.Sequential:
    """The model's layers with the weights that `spec.seed` gives, in `spec.dtype`, dropout layers numbered. It seeds
    the generators of Python and NumPy, too, for models that draw from these."""
    torch.manual_seed(spec.seed)
    random.seed(spec.seed)
    np.random.seed(spec.seed % 2**32)  # the generator that a model's own code draws from
    layers = moved(model.layers(), getattr(torch, spec.dtype))
    if spec.channels_last:
        put_channels_last(layers)
    dropout.number(layers)
    return layers


class RandomNumbers:
    """What torch's generators of the CPU and of `device` will give from now on, to draw the same `again`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.of_cpu = torch.get_rng_state()
        self.of_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def are_next(self) -> bool:
        """Whether nobody has drawn any since."""
        now = RandomNumbers(self.device)
        same = now.of_gpu is None or self.of_gpu is None or torch.equal(now.of_gpu, self.of_gpu)
        return same and torch.equal(now.of_cpu, self.of_cpu)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within it they are drawn again; afterwards the generators go on where they were. For one thread at a time."""
        with torch.random.fork_rng([self.device] if self.of_gpu is not None else []):
            torch.set_rng_state(self.of_cpu)
            if self.of_gpu is not None:
                torch.cuda.set_rng_state(self.of_gpu, self.device)
            yield


def put_channels_last(layers: nn.Module) -> None:
    """Reorder the weights of two-dimensional convolutions in memory, as `torch.channels_last` has it; these then
    compute their outputs so, whatever the order of their inputs is. They stay the same parameters; one that shows the
    memory of another one stays as it is."""
    shown = Counter(weight.untyped_storage()._cdata for weight in layers.parameters())
    for module in layers.modules():
        if isinstance(module, CONVOLUTIONS) and shown[module.weight.untyped_storage()._cdata] == 1:
            module.weight.data = module.weight.data.to(memory_format=torch.channels_last)


def choose_kernels(tf32: bool, cudnn_benchmark: bool) -> None:
    """Have GPUs multiply float32 numbers in TF32, or in float32: in convolutions as in matmuls, for this process; and
    have cuDNN try its algorithms, or take those that it expects to be fast."""
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = cudnn_benchmark


def make_optimizer(parameters: Iterable[nn.Parameter], spec: OptimizerSpec) -> torch.optim.Optimizer:
    """The optimizer that `spec` names. Where there are no parameters its step does nothing."""
    parameters = list(parameters)
    options: dict[str, Any] = {"lr": spec.lr, "weight_decay": spec.weight_decay}
    if spec.name in FUSED:
        options["fused"] = spec.fused or None
    if spec.name == "sgd":
        options |= {"momentum": spec.momentum, "nesterov": spec.nesterov}
    elif spec.name == "muon":
        options |= {"momentum": 0.95 if spec.beta1 is None else spec.beta1}
    else:
        options |= {"betas": spec.betas}
    if spec.name == "nadam":
        options["decoupled_weight_decay"] = True
    optimizer: torch.optim.Optimizer = OPTIMIZERS[spec.name]([{"params": parameters}], **options)
    return optimizer


def cast_batch(batch: Batch, dtype: str) -> Batch:
    """The batch with floating-point tensors in `dtype`, complex ones too; integers (tokens, classes) stay."""
    target = getattr(torch, dtype)

    def convert(tensor: Tensor) -> Tensor:
        return pinned_as(tensor, tensor.to(dtype_in(tensor, target)))

    return Batch(mapped(convert, batch.inputs), mapped(convert, batch.targets))


def pinned_as(source: Tensor, made: Tensor) -> Tensor:
    """What was made of a tensor on the host, in pinned memory if that is: else the host would wait for each copy of it
    to a GPU."""
    return made.pin_memory() if source.is_pinned() and not made.is_pinned() else made


def split_batch(batch: Batch, parts: int) -> list[Batch]:
    """The batch in `parts` parts of consecutive samples, whose sizes differ by one at most."""
    return list(map(Batch, split(batch.inputs, parts), split(batch.targets, parts)))


def optimizer_state(named: dict[str, nn.Parameter], optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    """{parameter name: its state tensors}."""
    return copies(kept_by_optimizers(named, optimizers))


def kept_by_optimizers(named: dict[str, nn.Parameter], optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    """The same with the optimizers' own tensors."""
    states = [optimizer.state for optimizer in optimizers]
    return {name: dict(state[parameter]) for name, parameter in named.items() for state in states if parameter in state}


def copies(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state with copies of its tensors on the CPU, mappings inside of it too."""
    return {key: copies(value) if isinstance(value, Mapping) else _copied(value) for key, value in state.items()}


def load_optimizer_state(
    named: dict[str, nn.Parameter], optimizers: list[torch.optim.Optimizer], saved: dict[str, Any]
) -> None:
    """The inverse of `optimizer_state`; parameters without saved state start from scratch."""
    for optimizer in optimizers:
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        optimizer.state.clear()
        for name, parameter in named.items():
            if id(parameter) in own and name in saved:
                optimizer.state[parameter] = {
                    key: counter(value, parameter, optimizer) if key in COUNTERS else _placed(value, parameter)
                    for key, value in saved[name].items()
                }


def counter(steps: Tensor, parameter: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
    """A copy of a counter of steps where `optimizer` has that of a parameter: on its device if it is fused, whose
    kernels read it; else on the CPU."""
    return steps.to(parameter.device if optimizer.defaults.get("fused") else "cpu", copy=True)


def _placed(value: Any, parameter: nn.Parameter) -> Any:
    """Moments go to the parameter's device and dtype."""
    return value.to(parameter.device, parameter.dtype, copy=True) if isinstance(value, Tensor) else value


def _copied(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def model_state(module: nn.Module) -> dict[str, Tensor]:
    """The state dict on the CPU, each tensor a copy."""
    return copies(module.state_dict())


def newest_state(module: nn.Module, newest: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of a module whose own weights may be older than the `newest`, which have their names once each."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    every = {name: newest[names[one]] for name, one in module.named_parameters(remove_duplicate=False)}
    return {name: _copied(every[name]) if name in every else value for name, value in model_state(module).items()}


def optimizer_tensors(optimizers: Iterable[torch.optim.Optimizer]) -> list[Tensor]:
    """Every tensor that the optimizers keep."""
    return [
        value
        for optimizer in optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]


@contextmanager
def intra_op_threads(count: int) -> Iterator[None]:
    """Within it, this thread's CPU ops use `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
