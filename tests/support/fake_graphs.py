"""CUDA graphs without a GPU: `torch.cuda.make_graphed_callables` with memory that stays, and is written again.

As a graph's replay, a pass reads inputs that were copied into the sample's memory, and leaves outputs and gradients in
the memory of the last one: who still holds them sees them change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_unflatten

from harness.runtime.graphed_layers import CAPTURE

WARM_UP = 3


class FakeGraphs:
    """What was captured: the modules and samples of each call, and how often graphs were replayed."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[nn.Module, ...], tuple[Any, ...]]] = []
        self.replayed: list[nn.Module] = []

    def make(self, callables: tuple[nn.Module, ...], samples: tuple[Any, ...], allow_unused_input: bool = False) -> Any:
        assert CAPTURE.locked(), "no other thread pins memory now"
        self.calls.append((callables, samples))
        casts = any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
        assert not (casts and torch.is_autocast_cache_enabled()), "as torch says it"
        for module, arguments in zip(callables, samples, strict=True):
            leaves = tree_leaves(arguments)
            assert all(isinstance(one, Tensor) and one.is_leaf for one in leaves)
            assert not (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)
            for _ in range(WARM_UP):
                self._backward(module(*arguments), _surface(module, arguments))
            module.forward = self._graphed(module, arguments, module.forward)  # type: ignore[method-assign]
        return callables

    @staticmethod
    def _backward(outputs: Any, surface: list[Tensor]) -> list[Tensor | None]:
        roots = [one for one in tree_leaves(outputs) if one.requires_grad]
        wanted = [one for one in surface if one.requires_grad]
        found = torch.autograd.grad(roots, wanted, [torch.ones_like(one) for one in roots], allow_unused=True)
        return [None if one is None else torch.empty_like(one) for one in found]

    def _graphed(self, module: nn.Module, arguments: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
        surface = _surface(module, arguments)
        given = len(tree_leaves(arguments))
        buffers = [(one, one.clone()) for one in module.buffers()]
        sample = forward(*arguments)
        outputs = [one.detach().clone() for one in tree_leaves(sample)]
        gradients = self._backward(sample, surface)
        for one, before in buffers:  # a capture runs nothing
            one.copy_(before)
        structure = torch.utils._pytree.tree_structure(sample)
        live: list[Any] = []

        class Graphed(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
                with torch.no_grad():
                    for own, one in zip(surface[:given], inputs[:given], strict=True):
                        own.copy_(one)
                self.replayed.append(module)
                with torch.enable_grad():
                    live[:] = tree_leaves(forward(*arguments))
                for own, one in zip(outputs, live, strict=True):
                    own.copy_(one.detach())
                return tuple(one.detach() for one in outputs)

            @staticmethod
            def backward(ctx: Any, *arrived: Tensor) -> tuple[Tensor | None, ...]:
                pairs = [(one, gradient) for one, gradient in zip(live, arrived, strict=True) if one.requires_grad]
                wanted = [one for one in surface if one.requires_grad]
                found = torch.autograd.grad([one for one, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
                for own, one in zip(gradients, found, strict=True):
                    if own is not None and one is not None:
                        own.copy_(one)
                left = iter(gradients)
                given_back = [next(left) if one.requires_grad else None for one in surface]
                return tuple(None if one is None else one.detach() for one in given_back)

        def call(*values: Any) -> Any:
            found = Graphed.apply(*tree_leaves(values), *surface[given:])
            return tree_unflatten(found, structure)

        return call


def _surface(module: nn.Module, arguments: Any) -> list[Tensor]:
    return [*tree_leaves(arguments), *module.parameters()]


def install(monkeypatch: pytest.MonkeyPatch) -> FakeGraphs:
    graphs = FakeGraphs()
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", graphs.make)
    return graphs
