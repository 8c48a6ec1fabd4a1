"""What a library's collectives take."""

from __future__ import annotations

import time

import pytest

from harness.runtime.collectives import CollectiveCounter


def test_seconds_and_bytes_add_up_until_they_are_taken() -> None:
    counter = CollectiveCounter()
    for size in (10, 20):
        with counter.counting("all_gather", size):
            time.sleep(0.01)
    with counter.counting("reduce_scatter", 5):
        pass
    seconds, sizes = counter.take()
    assert sizes == {"all_gather": 30, "reduce_scatter": 5}
    assert 0.02 <= seconds["all_gather"] < 1
    assert seconds["reduce_scatter"] < 0.01
    assert counter.take() == ({}, {})


def test_waiting_takes_time_and_no_bytes() -> None:
    """Also where the collective itself was taken before: it is not called a second time."""
    counter = CollectiveCounter()
    with counter.counting("all_reduce"):
        time.sleep(0.01)
    seconds, sizes = counter.take()
    assert seconds["all_reduce"] >= 0.01
    assert list(sizes) == []


def test_what_was_not_called_took_nothing() -> None:
    seconds, sizes = CollectiveCounter().take()
    assert (seconds["all_gather"], sizes["all_gather"]) == (0.0, 0)


def test_a_collective_that_fails_is_not_counted() -> None:
    counter = CollectiveCounter()
    with pytest.raises(ZeroDivisionError), counter.counting("all_gather", 8):
        raise ZeroDivisionError
    assert counter.take() == ({}, {})
