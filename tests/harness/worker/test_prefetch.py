"""Loading ahead: what a step still waits for, how many batches are made, and where errors come out."""

from __future__ import annotations

import signal
import statistics
import threading
import time
import traceback
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from harness.interfaces import Batch
from harness.worker.prefetch import Loader

SLOW_S, FAST_S = 0.12, 0.04


class Numbered:
    """Batch `step` holds its step; `work` is done for each, in the loader's thread."""

    def __init__(self, work: Callable[[int], object] = lambda step: None) -> None:
        self.work = work
        self.made: list[int] = []

    def batch(self, step: int, size: int) -> Batch:
        self.work(step)
        self.made.append(step)
        return Batch(torch.full((size,), step), torch.full((size,), -step))


def loaders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "loader"]


def waits(batch_s: float, step_s: float, steps: int = 6) -> list[float]:
    """How long each step waits where a batch takes `batch_s` and a step `step_s`."""
    waited = []
    with Loader(Numbered(lambda step: time.sleep(batch_s)), 2, range(steps)) as batches:
        for _, wait in batches:
            waited.append(wait)
            time.sleep(step_s)
    return waited


def test_a_step_waits_only_for_what_does_not_overlap() -> None:
    """A batch takes 0.12 s and a step 0.04 s: without loading ahead each step would wait 0.12 s."""
    first, *others = waits(SLOW_S, FAST_S)
    assert first >= SLOW_S
    assert statistics.median(others) == pytest.approx(SLOW_S - FAST_S, abs=0.02)


def test_a_batch_that_is_faster_than_a_step_is_not_waited_for() -> None:
    first, *others = waits(FAST_S, SLOW_S)
    assert first >= FAST_S
    assert statistics.median(others) < FAST_S / 8


def test_resident_data_costs_nothing() -> None:
    resident = Batch(torch.zeros(2), torch.zeros(2))

    class Resident:
        def batch(self, step: int, size: int) -> Batch:
            return resident

    with Loader(Resident(), 2, range(50)) as batches:
        waited = []
        for batch, wait in batches:
            assert batch is resident
            waited.append(wait)
            time.sleep(1e-3)
    assert statistics.median(waited) < 1e-3


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_every_batch_in_order_and_none_beyond_the_last(steps: int) -> None:
    data = Numbered()
    with Loader(data, 3, range(steps)) as batches:
        for step, (batch, _) in enumerate(batches):
            assert batch.inputs.tolist() == [step] * 3 and batch.targets.tolist() == [-step] * 3
            time.sleep(0.02)
            assert data.made == list(range(min(step + 2, steps))), "one ahead, and not more"
    assert data.made == list(range(steps))
    assert not loaders()


def test_an_error_of_the_data_comes_out_with_its_traceback() -> None:
    def broken_at_2(step: int) -> None:
        if step == 2:
            raise ZeroDivisionError("on purpose")

    seen = []
    with (
        pytest.raises(ZeroDivisionError, match="on purpose") as caught,
        Loader(Numbered(broken_at_2), 1, range(5)) as batches,
    ):
        for batch, _ in batches:
            seen.append(batch.inputs.item())
    assert seen == [0, 1]
    assert caught.value.__notes__ == ["in making the batch of step 2"]
    assert "broken_at_2" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert not loaders()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_thread_ends_with_training(error: type[BaseException]) -> None:
    data = Numbered(lambda step: time.sleep(0.05))
    with pytest.raises(error), Loader(data, 1, range(9)) as batches:
        next(batches)
        raise error
    assert not loaders()
    assert data.made == [0, 1]


def test_an_interrupt_reaches_training_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ctrl-C does: the main thread is waiting for a batch that does not come."""
    monkeypatch.setattr("harness.worker.prefetch.SHUTDOWN_S", 0.1)
    stuck = threading.Event()
    main = threading.main_thread().ident
    assert main is not None
    ctrl_c = threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT))
    ctrl_c.start()
    began = time.perf_counter()
    with pytest.raises(KeyboardInterrupt), Loader(Numbered(lambda step: stuck.wait(20)), 1, range(2)) as batches:
        next(batches)
    stuck.set()
    assert time.perf_counter() - began < 5


def test_a_batch_that_hangs_does_not_hide_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.worker.prefetch.SHUTDOWN_S", 0.1)
    stuck = threading.Event()
    data = Numbered(lambda step: stuck.wait(20) if step == 1 else None)
    with pytest.raises(ValueError), Loader(data, 1, range(9)) as batches:
        next(batches)
        raise ValueError
    (thread,) = loaders()
    assert thread.daemon, "or the process could not end"
    stuck.set()
    thread.join(5)


def threads_of_a_new_thread() -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return found[0]


def test_the_loader_computes_with_one_thread_and_others_keep_theirs() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        inside: list[int] = []
        with Loader(Numbered(lambda step: inside.append(torch.get_num_threads())), 1, range(3)) as batches:
            assert torch.get_num_threads() == threads_of_a_new_thread() == 2
            for _ in batches:
                torch.set_num_threads(2)  # an engine that computes with all cores says so in every step
        assert inside == [1, 1, 1]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("gpu", [True, False])
def test_batches_are_pinned_where_a_gpu_takes_them(gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the host goes on while they are copied."""
    pinned: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: gpu)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: pinned.append(tensor.numel()) or tensor)
    tensors = torch.ones(4, 3), torch.ones(4)

    class Pairs:
        def batch(self, step: int, size: int) -> Batch:
            return Batch(tensors, torch.ones(4, 2))

    with Loader(Pairs(), 4, range(2)) as batches:  # type: ignore[arg-type]
        assert len(list(batches)) == 2
    assert pinned == ([12, 4, 8] * 2 if gpu else [])
