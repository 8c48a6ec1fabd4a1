"""How much longer work takes where threads do it at once: a lock that they share, sleep that they do not."""

from __future__ import annotations

import threading
import time

import pytest

from harness.measure import work_together
from harness.measure.work_together import Round, Work, lock_share, one_round, queues_of_devices, threads_together


def locked(lock: threading.Lock) -> Work:
    """3 ms of which one thread at a time has its turn."""

    def work() -> None:
        with lock:
            time.sleep(0.003)

    return work


def asleep() -> None:
    time.sleep(0.003)


def test_work_that_cannot_overlap_is_one_core_and_sleep_is_as_many_as_there_are_queues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(work_together, "CORES_S", 0.2)
    monkeypatch.setattr(work_together, "_clocks", lambda: (time.perf_counter(), time.perf_counter(), 0.0))
    lock = threading.Lock()
    with queues_of_devices(2) as queues:
        monkeypatch.setattr(work_together.reference_work, "layers", lambda: locked(lock))
        assert threads_together(queues) == pytest.approx(1, abs=0.3)
        monkeypatch.setattr(work_together.reference_work, "layers", lambda: asleep)
        assert threads_together(queues) == pytest.approx(2, abs=0.3)


def test_without_quiet_rounds_the_time_on_a_core_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two queues that take turns on one core that others use as well: 10 ms each by the clock, 4 and 5 ms of work."""
    rounds = {1: Round(0.01, 0.004, 0.005), 2: Round(0.03, 0.005, 0.02)}
    monkeypatch.setattr(work_together, "CORES_S", 0.01)
    monkeypatch.setattr(work_together, "one_round", lambda queues, passes, count: rounds[len(queues)])
    assert threads_together(["a", "b"]) == pytest.approx(2 * 4 / 5)  # type: ignore[list-item]


def test_threads_with_one_lock_take_twice_as_long_and_those_that_sleep_do_not() -> None:
    lock = threading.Lock()
    assert lock_share(locked(lock), locked(lock)) == pytest.approx(1.0, abs=0.3)
    assert lock_share(asleep, asleep) == pytest.approx(0.0, abs=0.3)


def test_an_error_in_a_queue_comes_out() -> None:
    def fails() -> None:
        raise RuntimeError("no memory")

    with queues_of_devices(2) as queues, pytest.raises(RuntimeError, match="no memory"):
        one_round(queues, [fails, fails], 1)
