"""Counts a model's work layer by layer: FLOPs, bytes and kernels of one forward pass, and what autograd saves in it.

`count` does so without weights: every tensor has a shape and no memory, so that a model of any size takes seconds.
`counted` is the same count of a chain that is there; `harness.measure.profile_model` adds times to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _BatchNorm

from harness.capture import AS_IT_IS, unsplit
from harness.capture.layers import Whole
from harness.capture.python_state import plain_attributes
from harness.config.schema import DTYPES
from harness.core.model_profile import BACKWARD, LayerProfile, ModelProfile, Skip
from harness.core.problem import CannotRun, Problem
from harness.core.shared_buffers import Home
from harness.interfaces import Batch, Model
from harness.measure.kernel_counter import Work
from harness.measure.layer_chain import Chain, Phase, Task, tensors
from harness.measure.layer_traits import Seen, given, traits
from harness.measure.own_checkpoints import Recomputed
from harness.nn import dropout
from harness.nn.fake_tensors import leaving_none
from harness.nn.object_state import Snapshot, hidden_modules
from harness.nn.shared_state import SharedState
from harness.nn.skip import named_layers
from harness.nn.tied import tensor_bytes, ties
from harness.runtime.values import mapped, tensors_of


class NotCounted(CannotRun):
    """A model whose operations depend on the values of tensors, as a mixture of experts: without weights there are
    none. `where` is the layer, or the line of the user's that makes it one layer, `whole`."""

    def __init__(self, model: str, where: str, whole: bool) -> None:
        message = f"chooses by the values of tensors what it computes ({where}): it cannot be counted"
        hint = "profile=FILE of mode=profile, measured where the model fits"
        hint += f"; {AS_IT_IS}" if whole else ""
        super().__init__([Problem("model", model, message, hint=hint)])
        self.where = where


def count(
    model: Model, micro_batch: int, dtype: str, autocast: str | None = None, watch: Callable[[str], None] | None = None
) -> ModelProfile:
    """The profile of `model` for `micro_batch` samples with everything but times, which are 0.

    All but times and their source equals what `harness.measure.profile_model.measure` finds on a CPU. Raises ValueError
    for impossible arguments, and NotCounted; an error inside a layer says which one it was. `watch` is called with the
    name of each module that has run.
    """
    check_arguments(micro_batch, dtype)
    chain = Chain(model, micro_batch, getattr(torch, dtype), torch.device("meta"), autocast)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    if watch:
        for name, module in chain.layers.named_modules():
            module.register_forward_hook(lambda *_, name=name: watch(name))
    try:
        with leaving_none(chain.layers), dropout.keyed(seed=0, step=0, micro_batch=0):
            pretend(chain, torch.device("cpu"), mode)
            with mode:
                profile = counted(chain, dtype, autocast)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        known = unsplit(chain.layers)
        where = known.text if known else "; ".join(getattr(error, "__notes__", []))
        raise NotCounted(model.name, where, whole=known is not None) from error
    return replace(profile, source=f"counted on the meta device, torch {torch.__version__}", times="none")


def counted(chain: Chain, dtype: str, autocast: str | None = None) -> ModelProfile:
    """The counts of one forward pass of `chain`; times are 0.

    `saved_bytes` are those of whole storages; a storage counts once, in the layer that first saves it. The loss is
    left out: it belongs to no layer.
    """
    counts = Counts(chain)
    named = named_layers(chain.layers)
    state = SharedState(named, [Home(number, number) for number in range(len(named))])
    with state.noting() as changed, counts.seen.modules(chain):
        tasks = chain.forward(counts)
    tied, shared = ties(chain.layers), state.in_profile(state.statistics | changed)
    found = traits(chain, tasks, counts.seen)
    layers = [
        replace(
            _layer(name, layer, task, counts.work[index], counts.saved_bytes[index]),
            working_bytes=counts.recomputed[index].bytes,
            tied=tied.get(name, ()),
            shared_buffers=shared.get(name, ()),
            traits=found[index],
        )
        for index, ((name, layer), task) in enumerate(zip(named, tasks, strict=True))
    ]
    stashed = {s: tasks[s.source].stashed[s.name] for s in chain.skips}
    skips = tuple(
        Skip(s.source, s.target, tensor_bytes(tensor), s.name, given(tensor)) for s, tensor in stashed.items()
    )
    batch = chain.batch
    profile = ModelProfile(
        tuple(layers),
        chain.model.name,
        len(batch),
        dtype,
        sum(map(tensor_bytes, tensors_of(batch.inputs))),
        skips,
        autocast=autocast,
        unsplit=unsplit(chain.layers),
        same_memory=chain.same_memory,
    )
    return replace(profile, layers=_with_frozen(profile, counts.work))


def check_arguments(micro_batch: int, dtype: str) -> None:
    """Raise ValueError if no model can be counted or measured so."""
    if micro_batch < 1:
        raise ValueError(f"micro_batch {micro_batch} must be at least 1")
    if dtype not in DTYPES:
        raise ValueError(f"precision.dtype {dtype}   is not one of {', '.join(DTYPES)}")


class Counts:
    """Observes one forward pass of a chain: for each layer its work, and the bytes that autograd saves in it."""

    def __init__(self, chain: Chain) -> None:
        self._layers, self._samples = list(chain.layers), len(chain.batch)
        self.seen = Seen(chain)
        states = [*chain.layers.parameters(), *chain.layers.buffers()]
        self._seen = {s._cdata: s for s in (t.untyped_storage() for t in states)}  # kept, so that no key comes again
        self.saved_bytes: list[int] = []
        self.recomputed: list[Recomputed] = []
        self.work: list[Work] = []

    @contextmanager
    def __call__(self, index: int, phase: Phase) -> Iterator[None]:
        self.saved_bytes.append(0)
        self.recomputed.append(Recomputed(self._seen))
        self.work.append(Work(self._layers[index], self._samples, self.seen.kernel))
        saved = saved_tensors_hooks(self._save, lambda tensor: tensor)
        with self.seen.layer(index), self.work[-1], saved, self.recomputed[-1].noting():
            yield

    def _save(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen[storage._cdata] = storage
            self.saved_bytes[-1] += storage.nbytes()
        return tensor


def pretend(chain: Chain, device: torch.device, mode: FakeTensorMode) -> None:
    """Let the tensors of a chain on the meta device say that they are on `device`, still without memory.

    The meta device itself knows neither autocast nor random generators, and takes other kernels for attention. Tensors
    that are plain attributes, or in a list of one, count, too.
    """
    fakes: dict[Tensor, Tensor] = {}

    def fake(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value not in fakes:
            made: Tensor = FakeTensor(mode, value.detach().to("meta"), device)
            made.requires_grad_(value.requires_grad)
            fakes[value] = nn.Parameter(made, value.requires_grad) if isinstance(value, nn.Parameter) else made
        return fakes[value]

    plain = [
        value
        for module in chain.layers.modules()
        for name, value in plain_attributes(module).items()
        if not (isinstance(module, Whole) and name == "select")  # it leads to the user's example, which stays
    ]
    for module in dict.fromkeys([*chain.layers.modules(), *hidden_modules(plain)]):
        attributes = plain_attributes(module)
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, attributes)
        for table in tables:
            table.update({name: fake(value) for name, value in table.items()})
        vars(module).update(attributes)
    Snapshot([(chain.model.name, value) for value in plain], fake, math.inf).put(lambda value: value)
    chain.batch = Batch(mapped(fake, chain.batch.inputs), mapped(fake, chain.batch.targets))
    chain.device = device


def _with_frozen(profile: ModelProfile, work: Sequence[Work]) -> tuple[LayerProfile, ...]:
    """Say what the backward passes of layers do that have frozen parameters, or come before all that are trained.

    Those of all others compute the gradients of inputs and of weights, as the model's first layer is taken to."""
    first = profile.first_trained
    before = any(layer.frozen_weights for layer in profile.layers[: first + 1])
    return tuple(
        _with_backward(layer, work[number]) if layer.frozen_weights or (before and number <= first) else layer
        for number, layer in enumerate(profile.layers)
    )


def _with_backward(layer: LayerProfile, work: Work) -> LayerProfile:
    both = work.input_flops + work.weight_flops
    return replace(
        layer,
        backward_matmuls=both / work.flops if work.flops else BACKWARD,
        backward_others=(
            BACKWARD * work.differentiated_bytes / work.elementwise_bytes if work.elementwise_bytes else BACKWARD
        ),
        input_share=work.input_flops / both if both else layer.input_share,
    )


def _layer(
    name: str,
    layer: nn.Module,
    task: Task,
    work: Work,
    saved_bytes: int,
) -> LayerProfile:
    frozen = [parameter for parameter in layer.parameters() if not parameter.requires_grad]
    return LayerProfile(
        name=name,
        flops=work.flops,
        bytes_moved=work.bytes_moved,
        elementwise_bytes=work.elementwise_bytes,
        kernels=work.kernels,
        param_bytes=sum(map(tensor_bytes, layer.parameters())),
        weights=len(list(layer.parameters())),
        frozen_bytes=sum(map(tensor_bytes, frozen)),
        frozen_weights=len(frozen),
        norms=sum(isinstance(module, _BatchNorm) for module in layer.modules()),
        norm_bytes=work.norm_bytes,
        buffer_bytes=sum(map(tensor_bytes, layer.buffers())),
        output_bytes=sum(map(tensor_bytes, tensors(task.output))),
        saved_bytes=saved_bytes,
        products=tuple(work.products),
        reads=work.reads,
    )
