"""CUDA's streams and events without a GPU: they do nothing but say what they were asked for.

    cuda = fake_cuda.install(monkeypatch)          torch.cuda.Stream, Event, stream, current_stream, synchronize, ...
    cuda.log   [("wait", waiter, for whom), ("on", stream), ("mark", stream), ("keep", tensor, stream), ...]

Time is `cuda.time_s`, which a test moves: a mark is at the time at which it is recorded.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor


class FakeStream:
    def __init__(self, cuda: FakeCuda, device: Any, name: str = "") -> None:
        self.cuda, self.device = cuda, torch.device(device)
        self.name = name or f"{self.device}/{sum(one.device == self.device for one in cuda.streams)}"
        cuda.streams.append(self)

    def __repr__(self) -> str:
        return self.name

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.log.append(("wait", self, other))

    def wait_event(self, event: FakeEvent) -> None:
        self.cuda.log.append(("wait", self, event.stream))

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = event or FakeEvent(self.cuda)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.cuda.log.append(("synchronize", self))


class FakeEvent:
    def __init__(self, cuda: FakeCuda, enable_timing: bool = False, blocking: bool = False) -> None:
        self.cuda, self.blocking = cuda, blocking
        self.stream: FakeStream | None = None
        self.time_s = 0.0

    def record(self, stream: FakeStream | None = None) -> None:
        self.stream, self.time_s = stream or self.cuda.current(), self.cuda.time_s
        self.cuda.log.append(("mark", self.stream))

    def wait(self) -> None:
        self.cuda.current().wait_event(self)

    def synchronize(self) -> None:
        self.cuda.log.append(("sleep" if self.blocking else "spin", self.stream))

    def elapsed_time(self, end: FakeEvent) -> float:
        return (end.time_s - self.time_s) * 1e3


class FakeCuda:
    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.streams: list[FakeStream] = []
        self.time_s = 0.0
        self._default: dict[torch.device, FakeStream] = {}
        self._current = threading.local()
        self.device = torch.device("cuda:0")

    def current(self, device: Any = None) -> FakeStream:
        device = self.device if device is None else torch.device(device)
        if device not in self._default:
            self._default[device] = FakeStream(self, device, f"{device}/default")
        return [self._default[device], *self._on(device)][-1]

    def _on(self, device: torch.device) -> list[FakeStream]:
        """The streams that this thread has entered on a device."""
        found: list[FakeStream] = self._current.__dict__.setdefault(str(device), [])
        return found

    @contextmanager
    def on(self, stream: FakeStream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        self.log.append(("on", stream))
        stack = self._on(stream.device)
        stack.append(stream)
        try:
            yield
        finally:
            stack.pop()

    def synchronize(self, device: Any = None) -> None:
        self.log.append(("synchronize", self.device if device is None else torch.device(device)))

    def place(self, *entry: Any, after: int = 0) -> int:
        """Return where the log has this entry first, from the place `after` on."""
        return self.log.index(entry, after)


def install(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Have torch.cuda's streams and events be these; a tensor's `record_stream` is in the log as "keep"."""
    cuda = FakeCuda()

    def keep(tensor: Tensor, stream: FakeStream) -> None:
        cuda.log.append(("keep", id(tensor), stream))

    monkeypatch.setattr(
        torch.cuda, "Stream", lambda device=None: FakeStream(cuda, cuda.device if device is None else device)
    )
    monkeypatch.setattr(torch.cuda, "Event", lambda **keys: FakeEvent(cuda, **keys))
    monkeypatch.setattr(torch.cuda, "stream", cuda.on)
    monkeypatch.setattr(torch.cuda, "current_stream", cuda.current)
    monkeypatch.setattr(torch.cuda, "synchronize", cuda.synchronize)
    monkeypatch.setattr(Tensor, "record_stream", keep, raising=False)
    return cuda
