"""The unsplit module in a plain loop of PyTorch: no engine, no chain of layers, no code of theirs.

    for each step       for each micro-batch of two samples        loss of its samples / samples of the batch, backward
                        SGD

Micro-batches are those that every engine has, with replicas, too: consecutive samples. So batch norm sees the same
ones. The loop has one thread, as the ranks of engines have.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from harness.capture import torchvision_import
from harness.interfaces import Batch
from models.hf.config import Config, read, task_of
from tests.any_model.cases import BATCH, COMPARED, DTYPES, MICRO_BATCH, SEED, Case

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""The sum of the samples' losses, of a module for inputs and targets."""


@functools.cache
def losses(case: Case, precision: str) -> list[float]:
    """The mean loss of each step that is compared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _losses(case, getattr(torch, DTYPES[precision]), COMPARED[precision])
    finally:
        torch.set_num_threads(threads)


def _losses(case: Case, dtype: torch.dtype, steps: int) -> list[float]:
    module, loss, batch = made(case)
    module = module.to(dtype)
    inputs = batch.inputs.to(dtype) if batch.inputs.is_floating_point() else batch.inputs
    optimizer = torch.optim.SGD(module.parameters(), lr=case.lr)
    micro_batches = [*zip(inputs.split(MICRO_BATCH), batch.targets.split(MICRO_BATCH), strict=True)]
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for part, target in micro_batches:
            mean = loss(module, part, target) / BATCH
            mean.backward()
            total += mean.item()
        optimizer.step()
        found.append(total)
    return found


def made(case: Case) -> tuple[nn.Module, Loss, Batch]:
    """The module with the weights of the seed, its loss, and the samples that runs train on."""
    torchvision_import.prepare()
    if case.config is not None:
        return _of_transformers(case)
    from tests.any_model import nets

    torch.manual_seed(SEED)
    wrapper = getattr(nets, case.name)()
    examples = _seeded(0, getattr(nets, case.name))

    def loss(module: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return wrapper.loss(wrapper.select(module(inputs)), targets)

    return wrapper.module.train(), loss, _seeded(SEED, lambda: examples.sample(BATCH))


def _of_transformers(case: Case) -> tuple[nn.Module, Loss, Batch]:
    """By the classes of Transformers itself, experts as it computes them."""
    import transformers
    from omegaconf import OmegaConf

    from models.hf.hf import CLASSES, build

    overrides: Any = OmegaConf.to_container(OmegaConf.create(f"{{{case.overrides}}}"))
    config = Config(config=case.config, sequence=16, overrides=overrides)
    description = read(config)
    kind = str(task_of(config, description))
    settings = transformers.AutoConfig.for_model(description.pop("model_type"), **description)
    torch.manual_seed(SEED)
    module = getattr(transformers, CLASSES[kind]).from_config(settings).train()
    if module._can_set_experts_implementation():
        module.set_experts_implementation("eager")  # the others take no float64
    model = build(config)

    def loss(module: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return model.loss(model.logits(module, inputs), targets)

    return module, loss, _seeded(SEED, lambda: model.sample(BATCH))


def _seeded(seed: int, make: Callable[[], Any]) -> Any:
    torch.manual_seed(seed)
    return make()
