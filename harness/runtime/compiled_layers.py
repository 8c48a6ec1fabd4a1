"""`precision.compile`: torch.compile of a stage, module by module.

    layer 0   Linear, GELU, Linear              one compiled module
    layer 1   Dropout(0.1), Block               Block: what a mask depends on is no tensor
    layer 2   Join, which pops a skip; Conv     Conv: neither is a skip

Compiled are the largest modules of a stage in which nothing is that a compiler takes for a constant or leaves out:
masks that follow from the micro-batch, skips, statistics of a whole mini-batch, hooks. Layers stay apart, since they
are what profiles time, plans place and errors name. What draws from torch's generators draws the same numbers as
without. The compiler leaves a module of torch.nn that is called by itself as it is.
Importing this module does not import the compiler, which takes a second.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from harness.nn.batchnorm import DeferredBatchNorm
from harness.nn.dropout import Dropout
from harness.nn.skip import Skippable

OPTIONS = {"fallback_random": True, "compile_threads": 1}
"""Random numbers are torch's own; and compilers run for this process, without a pool that a killed rank would leave."""


def compile_layers(stage: nn.Module) -> None:
    """Have the modules of a stage compiled when they are first called, in place: their names and weights stay."""
    for module in compilable(stage):
        module.compile(dynamic=False, isolate_recompiles=True, options=OPTIONS)


def compilable(module: nn.Module) -> Iterator[nn.Module]:
    """The largest modules of this one, or itself, that are compiled; containers of all layers are not."""
    for part in dict.fromkeys(module.children()):
        if any(map(needs_python, part.modules())):
            yield from compilable(part)
        else:
            yield part


def needs_python(module: nn.Module) -> bool:
    """Whether what a module does depends on more than tensors, or others look at it."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    skips = isinstance(module, Skippable) and (module.stashes or module.pops)
    masks = isinstance(module, Dropout) and module.p > 0
    draws = getattr(module, "draws", False)  # a layer of a captured model, by `dropout.drawing`
    return bool(skips or masks or draws or isinstance(module, DeferredBatchNorm) or any(hooks))
