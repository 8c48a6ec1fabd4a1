"""Dropout whose masks do not depend on the order of execution.

A mask is a function of (seed, step, micro-batch, layer): engines that run stages in parallel, in another order, twice
(recomputation) or on other devices of the same type get the same one. Outside `keyed`, in a plain call of the model,
it draws from torch's own generator like `nn.Dropout`. `drawing` does the same for all that a layer of a captured model
draws from that generator.

A layer may recompute by itself (`torch.utils.checkpoint`), in the backward pass, which is outside of `keyed`:
`remember` has the key there again.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional


class Dropout(nn.Module):
    """Zeroes elements (whole channels, dimensions 0 and 1 kept apart, with `channels`) with probability `p`."""

    def __init__(self, p: float = 0.5, channels: bool = False) -> None:
        if not 0 <= p < 1:
            raise ValueError(f"dropout probability is {p}, must be at least 0 and below 1")
        super().__init__()
        self.p = p
        self.channels = channels
        self.layer = 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        if _key() is None:
            return functional.dropout2d(x, self.p) if self.channels else functional.dropout(x, self.p)
        shape = x.shape[:2] + (1,) * (x.dim() - 2) if self.channels else x.shape
        return x * self._mask(shape, x)

    def _mask(self, shape: tuple[int, ...], x: Tensor) -> Tensor:
        generator = torch.Generator(x.device)
        generator.manual_seed(_mixed((*(_key() or ()), self.layer)))
        kept = torch.rand(shape, generator=generator, device=x.device) >= self.p
        return kept.to(x.dtype).div_(1 - self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}, channels={self.channels}"


def has_mask(module: nn.Module) -> bool:
    """Whether a module multiplies by a mask that depends on the shape alone: a part of a tensor can have its part."""
    return isinstance(module, Dropout) or type(module) in (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


def mask_of(module: nn.Module, shape: tuple[int, ...], x: Tensor) -> Tensor:
    """The mask that a module which `has_mask` draws for a tensor of `shape`, of the dtype and on the device of `x`, in
    the order of dimensions in memory that `x` has."""
    if isinstance(module, Dropout):
        return module._mask(shape, x)
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    ones = x.new_ones([shape[n] for n in order]).permute([order.index(n) for n in range(x.dim())])
    with torch.no_grad():
        mask: Tensor = module(ones)
    return mask


def by_channel(module: nn.Module) -> bool:
    """Whether a module that `has_mask` drops whole channels."""
    return module.channels if isinstance(module, Dropout) else not isinstance(module, nn.Dropout)


def number(model: nn.Module) -> None:
    """Numbers the dropout layers of a whole model, before it is split: the number is a part of the mask's key."""
    for index, layer in enumerate(m for m in model.modules() if isinstance(m, Dropout)):
        layer.layer = index


class _State(threading.local):
    key: tuple[int, ...] | None = None
    backward: tuple[int, tuple[int, ...] | None] | None = None
    """A backward pass of autograd, and the key of what it goes through."""
    reseed: Callable[[int], object] | None = None


_state = _State()


@contextmanager
def keyed(seed: int, step: int, micro_batch: int) -> Iterator[None]:
    """Sets the key of this thread's masks within the context: seed, step and global micro-batch."""
    outer, _state.key = _state.key, (seed, step, micro_batch)
    try:
        yield
    finally:
        _state.key = outer


def used(modules: Iterable[nn.Module]) -> bool:
    """Returns whether any of these modules is a dropout layer."""
    return any(isinstance(module, Dropout) for module in modules)


def remember(outputs: Iterable[Tensor]) -> None:
    """Within `keyed`: the backward pass that begins at these outputs has the same key."""
    key = _state.key

    def begin(_: Tensor) -> None:
        _state.backward = _backward_pass(), key

    for tensor in outputs:
        if tensor.requires_grad:
            tensor.register_hook(begin)


def _key() -> tuple[int, ...] | None:
    """The key of this thread, also in the backward pass of what was keyed."""
    if _state.key is not None or _state.backward is None or _backward_pass() != _state.backward[0]:
        return _state.key
    return _state.backward[1]


def _backward_pass() -> int:
    """The number of autograd's pass in this thread, -1 outside of one."""
    number: int = torch._C._current_graph_task_id()
    return number


@contextmanager
def drawing(layer: int, device: torch.device, part: int = 0) -> Iterator[None]:
    """Within it and `keyed`, what torch's generators draw is a function of the key and the number of the layer, and of
    the part where each rank has one of a micro-batch, and draws for it alone."""
    key = _key()
    if key is None:
        yield
        return
    seed = _mixed((*key, layer, part))
    if _state.reseed is not None:
        _state.reseed(seed)
        yield
        return
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            torch.cuda.manual_seed(seed)
        yield


@contextmanager
def redirected(reseed: Callable[[int], object]) -> Iterator[None]:
    """Within it this thread draws from a stream of its own instead of torch's generator; `reseed` begins it again."""
    outer, _state.reseed = _state.reseed, reseed
    try:
        yield
    finally:
        _state.reseed = outer


def micro_batch() -> int | None:
    """Returns the global micro-batch within `keyed`, else None."""
    return _state.key[2] if _state.key else None


def _mixed(key: tuple[int, ...]) -> int:
    """Returns a 63-bit seed; similar keys give unrelated seeds."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big") >> 1
