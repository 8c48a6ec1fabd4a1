"""What a library's collectives take."""

from __future__ import annotations

import time

import pytest

from harness.tally import Tally


def test_seconds_and_bytes_add_up_until_they_are_taken() -> None:
    tally = Tally()
    for size in (10, 20):
        with tally.counting("all_gather", size):
            time.sleep(0.01)
    with tally.counting("reduce_scatter", 5):
        pass
    seconds, sizes = tally.take()
    assert sizes == {"all_gather": 30, "reduce_scatter": 5}
    assert 0.02 <= seconds["all_gather"] < 1
    assert seconds["reduce_scatter"] < 0.01
    assert tally.take() == ({}, {})


def test_waiting_takes_time_and_no_bytes() -> None:
    """Also where the collective itself was taken before: it is not called a second time."""
    tally = Tally()
    with tally.counting("all_reduce"):
        time.sleep(0.01)
    seconds, sizes = tally.take()
    assert seconds["all_reduce"] >= 0.01
    assert list(sizes) == []


def test_what_was_not_called_took_nothing() -> None:
    seconds, sizes = Tally().take()
    assert (seconds["all_gather"], sizes["all_gather"]) == (0.0, 0)


def test_a_collective_that_fails_is_not_counted() -> None:
    tally = Tally()
    with pytest.raises(ZeroDivisionError), tally.counting("all_gather", 8):
        raise ZeroDivisionError
    assert tally.take() == ({}, {})
