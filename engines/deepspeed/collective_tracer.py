"""The collectives that DeepSpeed calls: when they held up this rank, and the bytes of their buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from harness.runtime.collectives import CollectiveCounter
from harness.runtime.device_clock import TimePoint

ALGORITHMS = {
    "all_reduce": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "reduce": "reduce_scatter",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_gather": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_base": "all_gather",
    "all_gather_coalesced": "all_gather",
}
"""Methods of DeepSpeed's backend, by what a schedule calls them."""
SMALL_BYTES = 64
"""Smaller buffers are numbers: norms, overflows, losses."""


class CollectiveTracer(CollectiveCounter):
    """Watches a backend from now on.

    DeepSpeed asks a single replica, too: with fewer than 2 nothing is counted.
    """

    def __init__(self, backend: Any, replicas: int, now: Callable[[], TimePoint]) -> None:
        super().__init__(now)
        for method, algorithm in ALGORITHMS.items() if replicas > 1 else ():
            if hasattr(backend, method):
                setattr(backend, method, self._watched(algorithm, getattr(backend, method)))

    def _watched(self, algorithm: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            size = max((_bytes(value) for value in (*args, *kwargs.values())), default=0)
            if size < SMALL_BYTES:
                return call(*args, **kwargs)
            with self.counting(algorithm, size):
                handle = call(*args, **kwargs)
            return handle if handle is None or not hasattr(handle, "wait") else _Awaited(self, algorithm, handle)

        return watched


class _Awaited:
    """A handle whose waiting is counted."""

    def __init__(self, traffic: CollectiveTracer, algorithm: str, handle: Any) -> None:
        self._traffic, self._algorithm, self._handle = traffic, algorithm, handle

    def wait(self, *args: Any) -> Any:
        with self._traffic.counting(self._algorithm):
            return self._handle.wait(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, (list, tuple)):
        return sum(map(_bytes, value))
    return 0
