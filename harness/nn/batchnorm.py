"""Deferred batch norm: running statistics of the whole mini-batch, however it is split (torchgpipe, section 2.1).

Each micro-batch is normalized with its own statistics; the running mean and variance are updated once for each
mini-batch, from those of its micro-batches, as the unsplit layer would. No square of a mean is taken, so nothing
cancels where means are large next to deviations (Chan, Golub, LeVeque 1979).

    calls     mb 0: use 0, use 1   mb 1: use 0, use 1       a layer in two places: two updates for each mini-batch,
    updates                              use 0, use 1       each from the same use in all micro-batches
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from harness.nn import dropout

Buffer = tuple[nn.Module, str]  # a module, and the name of a buffer of its own


class DeferredBatchNorm(_BatchNorm):
    """A batch norm for `chunks` micro-batches a step. Its state dict is that of the layer it replaces.

    `mean`, `variance`, `count` and `seen` have a row for each use of the layer in a micro-batch, as far as the
    mini-batch has come; `call` is the micro-batch of the last call, and how many it has had. The host reads `seen` and
    `call` in each call: from `begin` on they are in its memory, so that it does not wait for a GPU.
    """

    mean: Tensor
    variance: Tensor
    count: Tensor
    seen: Tensor
    call: Tensor

    def __init__(self, features: int, chunks: int, **options: Any) -> None:
        super().__init__(features, **options)
        self.chunks = chunks
        device = self.running_mean.device if self.running_mean is not None else None
        dtype = self.running_mean.dtype if self.running_mean is not None else None
        self.register_buffer("mean", torch.zeros(0, features, device=device, dtype=dtype), persistent=False)
        self.register_buffer("variance", torch.zeros(0, features, device=device, dtype=dtype), persistent=False)
        self.register_buffer("count", torch.zeros(0, device=device, dtype=torch.long), persistent=False)
        self.register_buffer("seen", torch.zeros(0, device=device, dtype=torch.long), persistent=False)
        self.register_buffer("call", torch.zeros(2, device=device, dtype=torch.long), persistent=False)

    def begin(self, chunks: int) -> None:
        """Begins a mini-batch of `chunks` micro-batches; discards what an earlier one that failed has left."""
        self.chunks = chunks
        self.mean, self.variance, self.count = self.mean[:0], self.variance[:0], self.count[:0]
        self.seen, self.call = torch.zeros(0, dtype=torch.long), torch.zeros(2, dtype=torch.long)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.running_mean is None:
            return super().forward(input)
        with torch.no_grad():
            self._gather(input)
        return functional.batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)

    def _gather(self, input: Tensor) -> None:
        mean, variance = own_statistics(input)
        use = self._use()
        count = mean.new_full((), input.numel() // input.size(1), dtype=torch.long)
        means = torch.stack([_row(self.mean, use, mean).to(mean), mean])
        variances = torch.stack([_row(self.variance, use, mean).to(mean), variance])
        counts = torch.stack([_row(self.count, use, count), count])
        mean, variance = combined(means, variances, counts)
        count, seen = counts.sum(), _row(self.seen, use, self.seen.new_zeros(())) + 1
        if seen >= self.chunks:
            self._commit(mean, variance, count)
            mean, variance, count, seen = (torch.zeros_like(each) for each in (mean, variance, count, seen))
        self.mean, self.variance = _with_row(self.mean, use, mean), _with_row(self.variance, use, variance)
        self.count, self.seen = _with_row(self.count, use, count), _with_row(self.seen, use, seen)

    def _use(self) -> int:
        """The number of this call among those of its micro-batch; outside an engine each call is a micro-batch."""
        number = dropout.micro_batch()
        if number is None:
            return 0
        last, calls = self.call.tolist()
        use = int(calls) if last == number else 0
        self.call = self.call.new_tensor([number, use + 1])
        return use

    def _commit(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        factor = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        for running, value in ((self.running_mean, mean), (self.running_var, variance * count / (count - 1))):
            running.copy_(running.to(value).lerp_(value, factor))


def _row(buffer: Tensor, use: int, like: Tensor) -> Tensor:
    """A row of a buffer; zeros where it has none yet."""
    return buffer[use] if use < len(buffer) else torch.zeros_like(like)


def _with_row(buffer: Tensor, use: int, row: Tensor) -> Tensor:
    return torch.cat([buffer[:use].to(row), row.unsqueeze(0), buffer[use + 1 :].to(row)])


def own_statistics(input: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each channel, at least in float32."""
    input = input.float() if input.dtype in (torch.bfloat16, torch.float16) else input
    mean, variance = torch.batch_norm_update_stats(input, None, None, 0.0)
    return mean, variance


def combined(means: Tensor, variances: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of all samples, from those of parts: (parts, channels) twice, (parts) -> (channels).

    No square of a mean is taken.
    """
    shares = (counts.to(means) / counts.sum()).unsqueeze(1)
    mean = (shares * means).sum(0)
    return mean, (shares * (variances + (means - mean).square())).sum(0)


def begin(module: nn.Module, chunks: int) -> None:
    """Begins a mini-batch of `chunks` micro-batches in every deferred batch norm of `module`."""
    for layer in module.modules():
        if isinstance(layer, DeferredBatchNorm):
            layer.begin(chunks)


def deferred(module: nn.Sequential, chunks: int) -> nn.Sequential:
    """Replaces every batch norm of `module` that tracks statistics; parameters and buffers are shared.

    One that is in several places has one replacement.
    """
    replacements: dict[nn.Module, DeferredBatchNorm] = {}
    for parent in module.modules():
        for name, child in parent._modules.items():
            if isinstance(child, _BatchNorm) and not isinstance(child, DeferredBatchNorm) and child.track_running_stats:
                if child not in replacements:
                    replacements[child] = _replacement(child, chunks)
                parent._modules[name] = replacements[child]
    return module


def _replacement(layer: _BatchNorm, chunks: int) -> DeferredBatchNorm:
    options = {"eps": layer.eps, "momentum": layer.momentum, "affine": layer.affine}
    running_mean = layer.running_mean
    assert running_mean is not None
    new = DeferredBatchNorm(layer.num_features, chunks, device=running_mean.device, dtype=running_mean.dtype, **options)
    new.weight, new.bias = layer.weight, layer.bias
    new.running_mean, new.running_var = layer.running_mean, layer.running_var
    new.num_batches_tracked = layer.num_batches_tracked
    return new.train(layer.training)


def statistics(modules: Iterable[nn.Module]) -> list[Buffer]:
    """Returns the buffers of every batch norm among `modules`."""
    return [(layer, name) for layer in modules if isinstance(layer, _BatchNorm) for name in layer._buffers]


@contextmanager
def throwaway(buffers: Iterable[Buffer]) -> Iterator[None]:
    """Replaces these buffers by copies within the context (a recomputation), so that changes to them are discarded.

    They are swapped, not restored: autograd may have saved them.
    """
    kept = {(module, name): module._buffers[name] for module, name in buffers}
    for (module, name), buffer in kept.items():
        module._buffers[name] = None if buffer is None else buffer.clone()
    try:
        yield
    finally:
        for (module, name), buffer in kept.items():
            module._buffers[name] = buffer
