"""Checkpoints of activations within a stage: only the inputs of segments of layers stay until the backward pass.

    layers     0   1   2 | 3   4   5 | 6   7            segments of 3; layer 7, the model's last one, stands alone
    forward    ->  .   . | ->  .   . | -> [saved]       ->  kept: what enters a segment, and the skips that it pops
    backward   [again, then backward of 6], of 3 to 5, of 0 to 2

A recomputation draws the same dropout masks and random numbers, sees the buffers that the first run saw, and leaves
them as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from harness.nn import dropout, skip
from harness.nn.skip import LayerSkip, Skippable
from harness.runtime.recomputation import Before, ForwardState
from harness.runtime.stage_module import StageModule
from harness.runtime.values import Form, distinct, mark_overlaps


@dataclass(frozen=True, eq=False)
class Segment:
    """Some layers of a stage; `gate` takes the skips that they pop from the stage, and leaves those that they stash."""

    layers: Sequence[tuple[str, nn.Module]]
    gate: Skippable
    state: ForwardState


class SegmentedStage(StageModule):
    """A stage whose `segments` (first and last layer, `harness.core.activation_checkpointing.segments`) are
    recomputed, one by one.

    `first` is the model's number of the stage's first layer.
    """

    def __init__(
        self,
        number: int,
        layers: Sequence[tuple[str, nn.Module]],
        first: int,
        skips: Sequence[LayerSkip],
        segments: Sequence[tuple[int, int]],
        prefix: int = 0,
    ) -> None:
        super().__init__(number, layers, first, skips, prefix)
        self.segments = [
            _segment(layers[start - first : end - first + 1], _gate(start, end, skips)) for start, end in segments
        ]
        self.rest = layers[segments[-1][1] - first + 1 :] if segments else layers

    def _layers(self, value: Any) -> Any:
        for segment in self.segments:
            value = self._kept(segment, value)
        return self._through(self.rest, value)

    def _kept(self, segment: Segment, value: Any) -> Any:
        """The segment's output; what it saves is made again in its backward pass."""
        gate, key = segment.gate, self.key
        form, own = Form.of(value), distinct(value)
        entering = [*own, *(gate.pop(name) for name in gate.pops)]
        out_form = form
        before: list[Before] = []

        def run(*tensors: Tensor) -> tuple[Tensor, ...]:
            nonlocal out_form
            tensors = tuple(tensor.clone() for tensor in tensors)  # any layer may work in place
            inside = form.built(tensors[: len(own)])
            with skip.carried(dict(zip(gate.pops, tensors[len(own) :], strict=True))) as left:
                out = self._through(segment.layers, inside)
                mark_overlaps(out, distinct(inside))
                out_form = Form.of(out)
                outs = (*distinct(out), *(left[name] for name in gate.stashes))
            before[0].same_outputs(outs)
            return outs

        def contexts() -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
            return _first(segment, before), _Again(segment, key, before)

        with set_checkpoint_early_stop(False):  # to the outputs, which are compared
            outs = checkpoint(run, *entering, use_reentrant=False, context_fn=contexts)
        several = len(out_form.marks)
        for name, tensor in zip(gate.stashes, outs[several:], strict=True):
            gate.stash(name, tensor)
        return out_form.built(outs[:several])


@contextmanager
def _first(segment: Segment, before: list[Before]) -> Iterator[None]:
    """Around a first run; `before` gets what its recomputation has to see."""
    with segment.state.first_run() as seen:
        before.append(seen)
        yield


class _Again(AbstractContextManager[None]):
    """Around each recomputation, in whatever thread it runs: there is one more for each gradient inside of a layer."""

    def __init__(self, segment: Segment, key: tuple[int, int, int], before: list[Before]) -> None:
        self.segment, self.key, self.before = segment, key, before
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self.segment.state.recomputation(self.before[0]))
            stack.enter_context(dropout.keyed(*self.key))
            self._entered.append(stack.pop_all())

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


def _segment(layers: Sequence[tuple[str, nn.Module]], gate: Skippable) -> Segment:
    state = ForwardState(
        (m for _, layer in layers for m in layer.modules()), f"layers {layers[0][0]} to {layers[-1][0]}"
    )
    return Segment(layers, gate, state)


def _gate(start: int, end: int, skips: Sequence[LayerSkip]) -> Skippable:
    """Return the skips of the layers `start` to `end`."""
    inside = range(start, end + 1)
    gate = Skippable()
    gate.pops = tuple(one.name for one in skips if one.target in inside and one.source not in inside)
    gate.stashes = tuple(one.name for one in skips if one.source in inside and one.target not in inside)
    return gate
