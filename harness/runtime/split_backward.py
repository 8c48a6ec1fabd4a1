"""A backward pass in two halves: the gradients of the inputs, then those of the weights.

    x --> [matmul] --> [relu] --> [matmul] --> y        autograd's graph, from y to x: the spine
             |                       |
             W1                      W2                 branches, which lead to weights only

The first half runs the spine. Autograd leaves out what no input needs, so the nodes where branches begin compute the
gradient of their input alone; the gradient that enters each of them is kept. The second half runs each of these nodes
again with the gradient that it had, for its weights alone.

What is no spine waits for the second half: outputs that depend on weights only, and all of a stage whose inputs have no
gradient. A weight of which several branches begin gets its gradient in the first half, and so do all weights where a
layer holds a reentrant checkpoint of torch, which cannot leave anything out. A hook of the tensor where a branch begins
(`Tensor.register_hook`) is called in both halves; the gradient is what its first call made of it. (The halves are B and
W in Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Gradients = tuple[Tensor | None, ...]
WHOLE = "CheckpointFunctionBackward"
"""The node of a reentrant checkpoint: it refuses a backward pass for some leaves."""


class SplitBackward:
    """The two halves of the backward pass from `edges` (with `gradients`) to leaves, `inputs` and `parameters`.

    Gradients add to `.grad` of both, as in `torch.autograd.backward`. Each half runs once, the first one first.
    """

    def __init__(
        self,
        edges: Sequence[GradientEdge],
        gradients: Sequence[Tensor],
        inputs: Sequence[Tensor],
        parameters: Iterable[nn.Parameter],
    ) -> None:
        self.outputs = list(zip(edges, gradients, strict=True))
        self.inputs = [one for one in inputs if one.requires_grad]
        weights = {get_gradient_edge(one).node: one for one in parameters if one.requires_grad}
        graph = _Graph([edge.node for edge in edges], {get_gradient_edge(one).node for one in self.inputs}, weights)
        self.spine = graph.spine
        begun: dict[nn.Parameter, list[Node]] = defaultdict(list)
        for node, reached in graph.branches.items():
            for weight in reached:
                begun[weight].append(node)
        self.early = [weight for weight, nodes in begun.items() if len(nodes) > 1]
        self.branches = {
            node: [weight for weight in reached if len(begun[weight]) == 1] for node, reached in graph.branches.items()
        }
        self.kept: dict[Node, Gradients] = {}
        self.whole = any(node.name() == WHOLE for node in graph.spine)

    def of_inputs(self) -> None:
        """Run the first half."""
        if self.whole:
            _backward(self.outputs, None, keep=False)
            self.outputs, self.branches = [], {}
            return
        wanted = [*self.inputs, *self.early]
        ready = [(edge, gradient) for edge, gradient in self.outputs if edge.node in self.spine]
        if not ready:
            return
        hooks = [node.register_prehook(self._keep(node)) for node, weights in self.branches.items() if weights]
        try:
            _backward(ready, wanted, keep=True)
        finally:
            for hook in hooks:
                hook.remove()

    def of_weights(self) -> None:
        """Run the second half."""
        rest = [(edge, gradient) for edge, gradient in self.outputs if edge.node not in self.spine]
        for node, weights in self.branches.items():
            given = self.kept.pop(node, ())
            starts = [(GradientEdge(node, number), one) for number, one in enumerate(given) if one is not None]
            if starts and weights:
                again = node.register_prehook(_returning(given))
                _backward(starts, weights, keep=bool(rest))  # branches share no node, but with the rest
                again.remove()
        if rest:
            _backward(rest, None, keep=False)
        self.outputs, self.branches = [], {}

    def _keep(self, node: Node) -> Callable[[Gradients], None]:
        def hook(gradients: Gradients) -> None:
            self.kept[node] = gradients

        return hook


def _returning(gradients: Gradients) -> Callable[[Gradients], Gradients]:
    """A hook that gives a node the gradients of the first half, whatever hooks of tensors make of them once more."""
    return lambda _: gradients


def _backward(starts: Sequence[tuple[GradientEdge, Tensor]], leaves: Sequence[Tensor] | None, keep: bool) -> None:
    """A backward pass to `leaves`, or to all; `keep` what its nodes have saved, for a later one."""
    edges, gradients = zip(*starts, strict=True)
    torch.autograd.backward(edges, gradients, retain_graph=keep, inputs=leaves)


class _Graph:
    """The nodes of a backward pass: `spine` leads to an input, `branches` are the spine's nodes with the weights that
    they reach without it."""

    def __init__(self, roots: Iterable[Node], inputs: set[Node], weights: dict[Node, nn.Parameter]) -> None:
        self.spine: set[Node] = set()
        self.branches: dict[Node, list[nn.Parameter]] = {}
        reached: dict[Node, dict[nn.Parameter, None]] = {}
        for node in _children_first(roots):
            after = _after(node)
            own = {weights[node]: None} if node in weights else {}
            for child in after:
                if child not in self.spine:
                    own |= reached[child]
            if node in inputs or any(child in self.spine for child in after):
                self.spine.add(node)
                if own:
                    self.branches[node] = list(own)
            reached[node] = own


def _after(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None]


def _children_first(roots: Iterable[Node]) -> Iterable[Node]:
    """Yield all nodes of a graph, each after those that follow it in a backward pass; graphs are deeper than Python's
    stack."""
    seen: set[Node] = set()
    stack: list[Any] = [(root, False) for root in dict.fromkeys(roots)]
    while stack:
        node, done = stack.pop()
        if done:
            yield node
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(child, False) for child in _after(node) if child not in seen]
