"""What a library's collectives take."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from harness.runtime.collectives import CollectiveCounter, new_group
from harness.runtime.device_clock import DeviceClock
from tests.support import fake_cuda

CLOCK = DeviceClock(torch.device("cpu"))


def test_times_and_bytes_add_up_until_they_are_taken() -> None:
    counter = CollectiveCounter(CLOCK.now)
    for size in (10, 20):
        with counter.counting("all_gather", size):
            time.sleep(0.01)
    with counter.counting("reduce_scatter", 5):
        pass
    held, sizes = counter.take()
    assert sizes == {"all_gather": 30, "reduce_scatter": 5}
    assert 0.02 <= CLOCK.total_s(held["all_gather"]) < 1
    assert CLOCK.total_s(held["reduce_scatter"]) < 0.01
    assert counter.take() == ({}, {})


def test_on_a_gpu_the_stream_is_timed_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host is through long before the collective begins."""
    cuda, clock = fake_cuda.install(monkeypatch), DeviceClock(torch.device("cuda:0"))
    counter = CollectiveCounter(clock.now)
    clock.synchronize()
    for _ in range(2):
        with counter.counting("all_gather", 8):
            cuda.time_s += 50.0
    held, _ = counter.take()
    assert clock.total_s(held["all_gather"]) == 100.0
    assert cuda.log.count(("mark", cuda.current())) == 1 + 4


def test_waiting_takes_time_and_no_bytes() -> None:
    """Also where the collective itself was taken before: it is not called a second time."""
    counter = CollectiveCounter(CLOCK.now)
    with counter.counting("all_reduce"):
        time.sleep(0.01)
    held, sizes = counter.take()
    assert CLOCK.total_s(held["all_reduce"]) >= 0.01
    assert list(sizes) == []


def test_what_was_not_called_took_nothing() -> None:
    held, sizes = CollectiveCounter(CLOCK.now).take()
    assert (held["all_gather"], sizes["all_gather"]) == ([], 0)


def test_a_collective_that_fails_is_not_counted() -> None:
    counter = CollectiveCounter(CLOCK.now)
    with pytest.raises(ZeroDivisionError), counter.counting("all_gather", 8):
        raise ZeroDivisionError
    assert counter.take() == ({}, {})


@pytest.mark.parametrize(("gpu", "rank", "said"), [(True, 0, True), (True, 1, False), (False, 0, False)])
def test_opening_communicators_is_progress(
    gpu: bool, rank: int, said: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of NCCL each takes seconds on many ranks, and a run that says nothing is ended."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: gpu)
    monkeypatch.setattr(dist, "new_group", lambda ranks, timeout, pg_options: tuple(ranks))
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    assert new_group(range(3)) == (0, 1, 2)  # type: ignore[comparison-overlap]
    assert ("ranks 0, 1, 2" in capsys.readouterr().out) is said
