"""Measures a model layer by layer on a real device, the way a pipeline stage runs it.

Each repeat goes through the whole chain, so that caches and memory are as in training. Call `harness.malloc.tune` at
the start of the process, or large tensors cost more here than in a run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from harness import devices, dropout
from harness.chain import Chain, Phase, Task, tensors
from harness.interfaces import Model
from harness.precision import DTYPES
from harness.profile import LayerProfile, ModelProfile, Skip
from harness.skip import named_layers
from harness.training_state import intra_op_threads

THREADS = 1
"""Intra-op threads of one CPU device."""


def measure(
    model: Model, micro_batch: int, dtype: str, device: str, repeats: int = 5, autocast: str | None = None
) -> ModelProfile:
    """The profile of `model` for `micro_batch` samples: seconds are medians of `repeats` after a warm-up.

    `saved_bytes` are those of whole storages; a storage counts once, in the layer that first saves it. `bytes_moved`
    of a layer is its input, popped skips, output and parameters. The loss is left out: it belongs to no layer. Raises
    ValueError for impossible arguments; an error inside a layer says which one it was.
    """
    if micro_batch < 1 or repeats < 1:
        raise ValueError(f"micro_batch {micro_batch} and repeats {repeats} must be at least 1")
    if dtype not in DTYPES:
        raise ValueError(f"precision.dtype {dtype}   is not one of {', '.join(DTYPES)}")
    target = torch.device(device)
    cuda = [target] if target.type == "cuda" else []
    with intra_op_threads(THREADS), torch.random.fork_rng(devices=cuda), dropout.keyed(seed=0, step=0, micro_batch=0):
        torch.manual_seed(0)
        chain = Chain(model, micro_batch, getattr(torch, dtype), target, autocast)
        profile = _counted(chain, dtype)
        clock = Clock(target)
        for _ in range(1 + repeats):
            clock.new_repeat()
            chain.step(clock)
    layers = [
        replace(layer, forward_s=clock.seconds(index, "forward"), backward_s=clock.seconds(index, "backward"))
        for index, layer in enumerate(profile.layers)
    ]
    return replace(profile, layers=tuple(layers), source=_source(target))


class Counts:
    """Observes one forward pass of a chain: for each layer its FLOPs, and the bytes that autograd saves in it."""

    def __init__(self, layers: nn.Module) -> None:
        states = [*layers.parameters(), *layers.buffers()]
        self._seen = {s._cdata: s for s in (t.untyped_storage() for t in states)}  # kept, so that no key comes again
        self.saved_bytes: list[int] = []
        self.flops: list[int] = []

    @contextmanager
    def __call__(self, index: int, phase: Phase) -> Iterator[None]:
        self.saved_bytes.append(0)
        with _Flops() as counter, saved_tensors_hooks(self._save, lambda tensor: tensor):
            yield
        self.flops.append(counter.flops)

    def _save(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen[storage._cdata] = storage
            self.saved_bytes[-1] += storage.nbytes()
        return tensor


class _Flops(TorchDispatchMode):
    """FLOPs of matrix products, convolutions and attention: torch's FlopCounterMode without its import of dynamo,
    which takes longer than a profile."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.overloadpacket in flop_registry:
            self.flops += flop_registry[func.overloadpacket](*args, **kwargs, out_val=result)
        return result


class Clock:
    """Observes passes of a chain: seconds by the host's clock on CPU, by events in the stream on CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        self._repeats: list[dict[tuple[int, Phase], Callable[[], float]]] = []

    def new_repeat(self) -> None:
        """What follows is another pass. The first one warms up."""
        self._synchronize()
        self._repeats.append({})

    @contextmanager
    def __call__(self, index: int, phase: Phase) -> Iterator[None]:
        if self._cuda:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(torch.cuda.current_stream(self._cuda))
            yield
            end.record(torch.cuda.current_stream(self._cuda))
            self._repeats[-1][index, phase] = lambda: start.elapsed_time(end) / 1e3
        else:
            start_s = time.perf_counter()
            yield
            duration_s = time.perf_counter() - start_s
            self._repeats[-1][index, phase] = lambda: duration_s

    def seconds(self, index: int, phase: Phase) -> float:
        """The median over all passes but the first; 0 for what did not run, as the backward pass of an integer."""
        self._synchronize()
        return statistics.median(r[index, phase]() if (index, phase) in r else 0.0 for r in self._repeats[1:])

    def _synchronize(self) -> None:
        if self._cuda:
            torch.cuda.synchronize(self._cuda)


def _counted(chain: Chain, dtype: str) -> ModelProfile:
    """The profile without times, from one forward pass."""
    counts = Counts(chain.layers)
    tasks = chain.forward(counts)
    tied = _tied(chain.layers)
    layers = [
        _layer(name, layer, task, counts.flops[index], counts.saved_bytes[index], tied.get(name))
        for index, ((name, layer), task) in enumerate(zip(named_layers(chain.layers), tasks, strict=True))
    ]
    skips = tuple(Skip(s.source, s.target, _size(tasks[s.source].stashed[s.name]), s.name) for s in chain.skips)
    batch = chain.batch
    return ModelProfile(tuple(layers), chain.model.name, len(batch), dtype, _size(batch.inputs), skips)


def _layer(name: str, layer: nn.Module, task: Task, flops: int, saved_bytes: int, tied: str | None) -> LayerProfile:
    param_bytes = sum(map(_size, layer.parameters()))
    output_bytes = sum(map(_size, tensors(task.output)))
    input_bytes = sum(map(_size, [*tensors(task.entry), *task.popped.values()]))
    return LayerProfile(
        name=name,
        flops=flops,
        bytes_moved=input_bytes + output_bytes + param_bytes,
        param_bytes=param_bytes,
        buffer_bytes=sum(map(_size, layer.buffers())),
        output_bytes=output_bytes,
        saved_bytes=saved_bytes,
        tied=tied,
    )


def _tied(layers: nn.Sequential) -> dict[str, str]:
    """For each layer that shares a parameter with another one, that parameter's first name in the whole model."""
    owners: dict[nn.Parameter, list[str]] = {}
    for name, parameter in layers.named_parameters(remove_duplicate=False):
        owners.setdefault(parameter, []).append(name)
    return {
        name.split(".")[0]: names[0]
        for names in owners.values()
        for name in names
        if len({n.split(".")[0] for n in names}) > 1
    }


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _source(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else devices.cpu_model()
    return f"measured on {name}, {THREADS} thread{'s' * (THREADS != 1)}, torch {torch.__version__}"
