"""A backward pass in two halves: the gradients of the inputs, then those of the weights.

    x --> [matmul] --> [relu] --> [matmul] --> y        autograd's graph, from y to x: the spine
             |                       |
             W1                      W2                 branches, which lead to weights only

The first half runs the spine. Autograd leaves out what no input needs, so the nodes where branches begin compute the
gradient of their input alone; the gradient that enters each of them is kept. The second half runs each of these nodes
again with the gradient that it had, for its weights alone.

What is no spine waits for the second half: outputs that depend on weights only, and all of a stage whose inputs have no
gradient. Some weights get their gradient in the first half: one of which several branches begin; those of branches that
have no matrix, as of norms, whose sums that half has anyway, and a pass of their own costs more than it saves; and all
where a layer holds a reentrant checkpoint of torch, which cannot leave anything out. A hook of the tensor where a
branch begins (`Tensor.register_hook`) is called in both halves; the gradient is what its first call made of it. (The
halves are B and W in Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Gradients = tuple[Tensor | None, ...]
MATRIX = 2
"""Dimensions from which on a weight is one of a matmul or a convolution."""
WHOLE = "CheckpointFunctionBackward"
"""The node of a reentrant checkpoint: it refuses a backward pass for some leaves."""


class SplitBackward:
    """The two halves of the backward pass from `edges` (with `gradients`) to leaves: to `inputs`, and to the weights.

    Gradients add to `.grad` of both, as in `torch.autograd.backward`. Each half runs once, the first one first.
    """

    def __init__(self, edges: Sequence[GradientEdge], gradients: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        self.outputs = list(zip(edges, gradients, strict=True))
        self.inputs = [one for one in inputs if one.requires_grad]
        graph = _Graph([edge.node for edge in edges], {get_gradient_edge(one).node for one in self.inputs})
        self.spine = graph.spine
        begun: dict[Tensor, list[Node]] = defaultdict(list)
        for node, reached in graph.branches.items():
            for weight in reached:
                begun[weight].append(node)
        first = {weight for weight, nodes in begun.items() if len(nodes) > 1}
        for reached in graph.branches.values():
            if all(weight.dim() < MATRIX for weight in reached):
                first.update(reached)
        self.early = [weight for weight in begun if weight in first]
        left = {node: [one for one in reached if one not in first] for node, reached in graph.branches.items()}
        self.branches = {node: weights for node, weights in left.items() if weights}
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
        hooks = [node.register_prehook(self._keep(node)) for node in self.branches]
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
            if starts:
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

    def __init__(self, roots: Iterable[Node], inputs: set[Node]) -> None:
        self.spine: set[Node] = set()
        self.branches: dict[Node, list[Tensor]] = {}
        reached: dict[Node, dict[Tensor, None]] = {}
        for node, after in _children_first(roots):
            own = {} if after or node in inputs else dict.fromkeys(_leaf(node))
            for child in after:
                if child not in self.spine:
                    own |= reached[child]
            if node in inputs or any(child in self.spine for child in after):
                self.spine.add(node)
                if own:
                    self.branches[node] = list(own)
            reached[node] = own


def _leaf(node: Node) -> Iterable[Tensor]:
    """Yield the tensor to whose `.grad` a node adds, if it is such a node."""
    if (tensor := getattr(node, "variable", None)) is not None:
        yield tensor


def _children_first(roots: Iterable[Node]) -> Iterable[tuple[Node, list[Node]]]:
    """Yield all nodes of a graph with those that follow each in a backward pass, which come earlier; graphs are deeper
    than Python's stack."""
    after: dict[Node, list[Node]] = {}
    stack: list[tuple[Node, bool]] = [(root, False) for root in dict.fromkeys(roots)]
    while stack:
        node, done = stack.pop()
        if done:
            yield node, after[node]
        elif node not in after:
            following = after[node] = [child for child, _ in node.next_functions if child is not None]
            stack.append((node, True))
            stack += [(child, False) for child in following if child not in after]
