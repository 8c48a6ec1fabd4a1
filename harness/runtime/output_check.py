"""Whether a recomputation gives what its first run gave: some elements of each output are compared.

    first run        outputs -> up to 1024 elements of each are kept
    recomputation    outputs -> the same elements, which must be equal but for some roundings of the largest

The outputs themselves are gone by then, or the next stage has worked on them in place. The check finds what
`harness.runtime.recomputation` cannot put back: random numbers of Python and NumPy, state outside of the layers. Random
places do not miss a change of a whole sample or channel; a change of a few elements of a large output they may.

Nothing waits for a GPU: results of comparisons there are read by `raise_differences`, after a step.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import torch
from torch import Tensor

ELEMENTS = 1024
ROUNDINGS = {"cpu": 64, "cuda": 1024}
"""By which elements may differ, in units of the format's precision; on GPUs kernels add in any order."""
DIFFERENT = (
    "a recomputation gives other outputs than its first run, so gradients would be wrong: the layers depend on state "
    "that is none of their buffers and attributes, or on random numbers of Python or NumPy -> checkpoint='never'"
)
WRITTEN = (
    "a forward pass changes a parameter in a way that torch does not count (by .data), and its recomputation would "
    "change it again -> make it a buffer, or checkpoint='never'"
)
_pending: list[tuple[Tensor, str]] = []
_lock = threading.Lock()


@dataclass(frozen=True)
class Sample:
    """Some elements of an output."""

    shape: torch.Size
    elements: Tensor

    @classmethod
    def of(cls, output: Tensor) -> Sample:
        detached = output.detach()
        if detached.numel() <= ELEMENTS:
            return cls(output.shape, detached.clone())
        return cls(output.shape, detached[_places(output.shape, output.device)])


def samples(outputs: Iterable[Tensor]) -> list[Sample]:
    """What `compare` needs of the outputs of a first run."""
    return [Sample.of(output) for output in outputs]


def compare(before: Sequence[Sample], outputs: Iterable[Tensor], where: str) -> None:
    """Raises RuntimeError if a recomputation's outputs are not those of its first run; on a GPU `raise_differences`
    does, and says `where`."""
    now = samples(outputs)
    if [(s.shape, s.elements.dtype) for s in now] != [(s.shape, s.elements.dtype) for s in before]:
        raise RuntimeError(DIFFERENT)
    for was, new in zip(before, now, strict=True):
        differs = _differs(was.elements, new.elements)
        if differs.device.type == "cpu":
            if differs.item():
                raise RuntimeError(DIFFERENT)
        elif not differs.is_meta:
            later(differs, f"in {where}, {DIFFERENT}")


def later(differs: Tensor, message: str) -> None:
    """`raise_differences` will raise `message` if `differs`, one truth value on a GPU, is true."""
    with _lock:
        _pending.append((differs, message))


def raise_differences() -> None:
    """Raises RuntimeError if what was compared on a GPU since the last call differs; waits for the GPU."""
    with _lock:
        pending = list(_pending)
        _pending.clear()
    by_device = groupby(sorted(pending, key=lambda one: str(one[0].device)), key=lambda one: one[0].device)
    for _, found in by_device:
        differs, messages = zip(*found, strict=True)
        if bad := torch.stack(differs).nonzero().flatten().tolist():  # waits once for each device
            raise RuntimeError(messages[bad[0]])


def _differs(was: Tensor, new: Tensor) -> Tensor:
    """One truth value. Some kernels, or the alignment of memory, change the last digits; at most half of them count."""
    if not was.numel() or not (was.is_floating_point() or was.is_complex()):
        return (was != new).any()
    scale = torch.nan_to_num(was.abs(), posinf=0.0).max()
    precision = torch.finfo(was.dtype).eps
    bound = min(precision**0.5, ROUNDINGS.get(was.device.type, ROUNDINGS["cuda"]) * precision)
    far = (new - was).abs() > bound * scale
    both = (new == was) | (new.isnan() & was.isnan())  # infinities are equal, and their difference is no number
    return ((far | new.isnan() | was.isnan()) & ~both).any()


@lru_cache(maxsize=256)
def _places(shape: torch.Size, device: torch.device) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    flat = torch.randint(shape.numel(), (ELEMENTS,), generator=generator)
    return tuple(place.to(device) for place in torch.unravel_index(flat, shape))
