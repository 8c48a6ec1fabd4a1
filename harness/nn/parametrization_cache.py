"""torch's cache of parametrized weights, for each task its own: that of the process mixes tasks and threads.

    with torch.nn.utils.parametrize.cached():
        pipe(x)      a first run without a graph would leave weights without a gradient for the recomputation

A task does not see what the caller caches; `cached` within a layer holds within its task.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Self

from torch import nn
from torch.nn.utils import parametrize


class _Count(threading.local):
    blocks = 0


class _PerThread:
    """In place of torch's number of `cached` blocks: one number for each thread."""

    def __init__(self) -> None:
        self.count = _Count()

    def __iadd__(self, more: int) -> Self:
        self.count.blocks += more
        return self

    def __isub__(self, less: int) -> Self:
        self.count.blocks -= less
        return self

    def __bool__(self) -> bool:
        return self.count.blocks > 0


def use(modules: Iterable[nn.Module]) -> None:
    """Before tasks of these modules, in the thread that calls them: count for each thread, if one is parametrized."""
    if isinstance(parametrize._cache_enabled, int) and any(map(parametrize.is_parametrized, modules)):
        counted = _PerThread()
        counted += parametrize._cache_enabled
        parametrize._cache_enabled = counted  # type: ignore[assignment]


@contextmanager
def own() -> Iterator[None]:
    """Around a task: nothing is cached yet."""
    counted: object = parametrize._cache_enabled
    if not isinstance(counted, _PerThread):
        yield
        return
    outer, counted.count.blocks = counted.count.blocks, 0
    cached, parametrize._cache = parametrize._cache, {}
    try:
        yield
    finally:
        counted.count.blocks = outer
        parametrize._cache = cached if outer else {}
