"""A pass that fails leaves nothing over: no activations, no threads, no module."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from engines.gpipe.gpipe_module import GPipe
from tests.support.gpipe_drivers import DRIVERS

pytestmark = pytest.mark.usefixtures("commands")


class Watched(nn.Module):
    """Remembers its outputs weakly."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.outputs: list[weakref.ref[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        self.outputs.append(weakref.ref(y))
        return torch.tanh(y) * y


class Forward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x[0, 0] > 1e6:
            raise ArithmeticError("forward")
        return x


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return x * 1

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        raise ArithmeticError("backward")


class Backward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Backward.apply(x) if x.isnan().any() else x
        return y


class SlowInterrupted(nn.Module):
    """The caller gets Ctrl-C while this layer is at work."""

    def forward(self, x: Tensor) -> Tensor:
        if x[0, 0] > 1e6:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
        return x


FAILURES = {"forward": Forward, "backward": Backward, "interrupt": SlowInterrupted}


@pytest.mark.parametrize("keeps_the_error", [False, True])
@pytest.mark.parametrize("mode", ["never", "except_last"])
@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("driver", DRIVERS)
def test_a_failed_pass_is_released(driver: str, failure: str, mode: str, keeps_the_error: bool) -> None:
    watched, run = Watched(), DRIVERS[driver]
    layers = nn.Sequential(watched, FAILURES[failure](), nn.Linear(4, 4))
    x = torch.ones(8, 4)
    x[-1] = torch.nan if failure == "backward" else 1e9
    if failure != "backward":
        with torch.no_grad():
            watched.inner.weight.copy_(torch.eye(4))
    gc.collect()
    before = threading.active_count()
    pipe = GPipe(layers, [1, 2], ["cpu"] * 2, 8, mode)

    def fail() -> BaseException:
        try:
            run(pipe, x).sum().backward()
            time.sleep(5)
        except (ArithmeticError, KeyboardInterrupt) as error:
            return error
        raise AssertionError("no failure")

    errors = [fail() for _ in range(3)]
    if not keeps_the_error:
        errors.clear()
        gc.collect()
        assert [ref() for ref in watched.outputs if ref() is not None] == []
        there, queues = weakref.ref(pipe), pipe.queues
        assert queues is not None
        threads = [queue._thread for queue in queues.all()]
        del pipe, queues
        gc.collect()
        assert there() is None
        for thread in threads:
            thread.join(timeout=5)
        assert threading.active_count() <= before
    elif driver == "queues":
        gc.collect()
        alive = [ref() for ref in watched.outputs if ref() is not None]
        assert len(alive) <= len(errors), "an error holds the layer's tensors that its traceback shows, no others"


def _memory(fail: Callable[[], None]) -> int:
    fail()
    return sum(obj.untyped_storage().nbytes() for obj in gc.get_objects() if isinstance(obj, Tensor))


def test_memory_does_not_grow_with_failed_passes() -> None:
    pipe = GPipe(nn.Sequential(Watched(), Backward(), nn.Linear(4, 4)), [1, 2], ["cpu"] * 2, 4, "never")

    def fail() -> None:
        with pytest.raises(ArithmeticError):
            pipe(torch.full((4, 4), torch.nan)).sum().backward()

    sizes = [_memory(fail) for _ in range(4)]
    assert sizes[-1] <= sizes[0]


def test_a_failed_pass_does_not_go_backward_again() -> None:
    pipe = GPipe(nn.Sequential(nn.Linear(4, 4), Backward()), [1, 1], ["cpu"] * 2, 2, "never")
    loss = pipe(torch.full((4, 4), torch.nan)).sum()
    with pytest.raises(ArithmeticError):
        loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="call the pipeline again"):
        loss.backward()
    good = pipe(torch.ones(4, 4)).sum()
    good.backward()
