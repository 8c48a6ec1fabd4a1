"""Peak memory of one device during one step: the allocator's on CUDA, the exact count of live bytes on CPU.

On CPU every tensor storage is counted from its creation to its end:

    worker     with meter: |-- F0 --|         |---- B0 ----|        a mode sees the result of every operation
    storages           +a  +b  +ws -ws            +g   -b  -a       ws: the workspace inside one kernel
    live_bytes      0   1   2   3   2              3    2   1

A CPU device is a thread, and PyTorch runs the backward pass of CPU work in the thread that calls it, so entering the
meter in that thread sees forward pass, backward pass and optimizer step. A storage belongs to the meter that saw it
being created and leaves it when it is freed, by whichever thread. The result agrees with torch.profiler's allocator
events.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd import ProfilerConfig, ProfilerState, _disable_profiler_legacy, _enable_profiler_legacy
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

# torch.tensor(...) hands its fresh storage to this operation, the first that a mode sees of it.
_FRESH_INPUT = torch.ops.aten.lift_fresh.default


class Meter:
    """The memory of one device. Enter it in each thread that works for the device; every method is thread-safe.

    Bytes are those of whole storages: views and in-place results add nothing, a storage counts once. Of a DTensor this
    rank's shard counts.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._freed: deque[int] = deque()  # filled by weak references' callbacks, which must not take the lock
        self._live = 0
        self._peak = 0
        self._entered = threading.local()

    @property
    def live_bytes(self) -> int:
        """Bytes of all storages that are alive now."""
        with self._lock:
            return self._settled()

    @property
    def peak_bytes(self) -> int:
        """The most that was alive at once since the last `reset_peak`, workspaces inside kernels included."""
        with self._lock:
            return self._peak

    def reset_peak(self) -> None:
        """Start a new peak from what is alive now."""
        with self._lock:
            self._peak = self._settled()

    def add_static(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that exist already: parameters, gradients, buffers, optimizer state. Twice does no harm."""
        with self._lock:
            self._settled()
            for tensor in _counted(tensors):
                self._note(tensor.untyped_storage())
            self._peak = max(self._peak, self._live)

    def __enter__(self) -> Self:
        watcher = _Watcher(self)
        watcher.__enter__()
        self._watchers().append(watcher)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watchers().pop().__exit__(kind, error, trace)

    def operation(self, inputs: set[int], call: Callable[[], Any], fresh: bool = False) -> Any:
        """Run one operation and count its new storages, and the most that was allocated inside it.

        `inputs` are the keys of its inputs' storages, which are not new, unless they are `fresh`.
        """
        before = self.live_bytes
        result, inside_bytes = _with_peak(call)
        with self._lock:
            self._peak = max(self._peak, max(before, self._settled()) + inside_bytes)
            for tensor in _counted(_tensors(result)):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if fresh or key not in inputs or key in self._storages:
                    self._note(storage)
            self._peak = max(self._peak, self._live)
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        """Count a storage, or its new size if it has grown. Call with the lock held."""
        key, size = storage._cdata, storage.nbytes()
        if key in self._storages:
            reference, counted = self._storages[key]
        else:
            freed = self._freed
            reference, counted = weakref.ref(storage, lambda _: freed.append(key)), 0
        self._storages[key] = reference, size
        self._live += size - counted

    def _settled(self) -> int:
        """The live bytes, once everything that was freed meanwhile is subtracted. Call with the lock held."""
        while self._freed:
            _, size = self._storages.pop(self._freed.popleft())
            self._live -= size
        return self._live

    def _watchers(self) -> list[_Watcher]:
        if not hasattr(self._entered, "watchers"):
            self._entered.watchers = []
        return self._entered.watchers


class _Watcher(TorchDispatchMode):
    """Shows a meter every operation of one thread, below autograd."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # asking dynamo to skip would import it, for a second and more

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = {t.untyped_storage()._cdata for t in _counted(_tensors((args, tuple(kwargs.values()))))}
        return self._meter.operation(inputs, lambda: func(*args, **kwargs), fresh=func is _FRESH_INPUT)


_EXPERIMENTAL = torch._C._profiler._ExperimentalConfig()
_PROFILER = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _EXPERIMENTAL)  # True: memory


def _with_peak(call: Callable[[], Any]) -> tuple[Any, int]:
    """The result of `call`, and the most bytes that it had allocated at once (0 while another profiler is on).

    A convolution reorders its operands: such workspaces never become tensors. The legacy profiler reports them for
    2 us a call; torch.profiler would take 500.
    """
    if torch._C._autograd._profiler_enabled():
        return call(), 0
    _enable_profiler_legacy(_PROFILER)
    try:
        result = call()
    finally:
        threads = _disable_profiler_legacy()
    live = peak = 0
    for events in threads:
        for event in events:
            if str(event.kind()) == "memory_alloc":
                live += event.cpu_memory_usage()
                peak = max(peak, live)
    return result, peak


def _counted(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors with a storage on the CPU. A DTensor only wraps its shard, but reports the whole size."""
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor):
            yield from _counted(_tensors([getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]))
        elif tensor.device.type == "cpu" and tensor.layout is torch.strided:
            yield tensor


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


class DeviceMemory:
    """Counts from now on. `held` are the tensors that the device holds; enter `counting()` in each of its threads."""

    def __init__(self, device: torch.device, held: Iterable[Tensor]) -> None:
        self.device = device
        self.meter = Meter() if device.type == "cpu" else None
        if self.meter is not None:
            self.meter.add_static(held)
        else:
            torch.cuda.reset_peak_memory_stats(device)

    def counting(self) -> AbstractContextManager[object]:
        return nullcontext() if self.meter is None else self.meter

    def peak_bytes(self) -> int:
        if self.meter is not None:
            return self.meter.peak_bytes
        return torch.cuda.max_memory_allocated(self.device)

    def reserved_bytes(self) -> int | None:
        """Return what the allocator had taken from the GPU at most, in blocks that it kept; None on CPU."""
        return None if self.meter is not None else torch.cuda.max_memory_reserved(self.device)
