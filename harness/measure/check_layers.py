"""Compare the layers that a module was split into with the module itself, before a run: `harness.capture.verify`.

It takes a copy of the weights in float64, and a few passes of two samples. A model of the zoo is layers by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from harness.capture import Captured, unsplit, verify
from harness.core.problem import CannotRun, ProblemError
from harness.interfaces import Model

MOST_WEIGHTS = 2 * 10**8
"""Weights of a model that is compared: 1.6 GB in float64."""
AS_ONE = "{} in the place of the module: one layer, for engine=single, ddp or fsdp"
SEVERAL = "nn.Sequential(One(module)), where One.forward(self, inputs) returns self.module(*inputs),"
"""For a module with several inputs: a layer takes one value."""


def check(model: Model, device: str, say: Callable[[str], None] = lambda text: None) -> None:
    """Raise CannotRun, naming the layer, if the layers of a model compute something else than its module.

    A model without a module of its own is left, as is one that is too large, that cannot be split, or whose module does
    not run in float64; `say` is called with what is not compared.
    """
    make: Callable[[], Captured | None] = getattr(model, "captured", lambda: None)
    with torch.random.fork_rng(devices=[]), torch.device(device):
        found = make()
        if found is None or unsplit(found.chain):
            return
        if sum(weight.numel() for weight in found.module.parameters()) > MOST_WEIGHTS:
            say(f"{model.name} is large: its layers are not compared with the module")
            return
        say(f"comparing the layers of {model.name} with the module")
        try:
            verify(found.module, found.chain, found.args, found.kwargs, found.select)
        except ProblemError as error:
            several = len(found.args) + len(found.kwargs) > 1
            hint = AS_ONE.format(SEVERAL if several else "nn.Sequential(module)")
            raise CannotRun([replace(one, value=model.name, hint=hint) for one in error.problems]) from error
        except Exception as error:  # of the module itself: what it does in its own precision is not judged here
            say(f"the module does not run in float64, its layers are not compared: {type(error).__name__}: {error}")
