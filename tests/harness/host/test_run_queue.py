"""How long threads wait for a core."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from harness.host.run_queue import CoreTime, of_process, of_thread, slowed


def test_waiting_of_all_threads_counts_by_what_they_compute() -> None:
    before = {"1": CoreTime(10.0, 5.0), "2": CoreTime(1.0, 1.0), "gone": CoreTime(9.0, 9.0)}
    now = {"1": CoreTime(13.0, 6.0), "2": CoreTime(1.0, 1.0), "new": CoreTime(1.0, 1.0)}
    assert slowed(before, now) == pytest.approx((4.0 + 2.0) / 4.0)
    assert slowed(now, now) is None, "nothing has computed"
    assert slowed({}, {}) is None


def test_threads_that_move_messages_are_no_other_program() -> None:
    """The threads of a rank in 4 seconds of steps of 30 ms on a quiet machine of two cores: gloo's take a core now and
    then. With a program that keeps one of the cores, the rank waits for longer than they run."""
    gloo = {"1": CoreTime(0.43, 0.48, messages=True), "2": CoreTime(0.02, 0.09, messages=True)}
    assert slowed({}, {"main": CoreTime(2.53, 0.43), **gloo}) == 1.0
    assert slowed({}, {"main": CoreTime(2.5, 1.5), **gloo}) == pytest.approx((2.5 + 1.5 - 0.45) / 2.5)


def test_devices_that_are_threads_all_compute() -> None:
    """Also those with little work."""
    stages = {"0": CoreTime(4.0, 1.0), "1": CoreTime(0.9, 0.5)}
    assert slowed({}, stages) == pytest.approx((4.9 + 1.5) / 4.9)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_gloos_threads_are_known_by_their_names() -> None:
    """A thread names itself when it first runs: on a busy machine some time after the group is there."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        end = time.monotonic() + 60
        while not any(one.messages for one in of_process().values()) and time.monotonic() < end:
            time.sleep(0.01)
        found = of_process()
        assert any(one.messages for one in found.values()) and not all(one.messages for one in found.values())
    finally:
        dist.destroy_process_group()


def test_what_the_system_does_not_say_is_zero(tmp_path: Path) -> None:
    assert of_thread(tmp_path) == CoreTime()
    (tmp_path / "schedstat").write_text("2000000000 500000000 7\n")
    assert of_thread(tmp_path) == CoreTime(2.0, 0.5)
    (tmp_path / "schedstat").write_text("\n")
    assert of_thread(tmp_path) == CoreTime()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_thread_that_computes_is_seen() -> None:
    def compute() -> None:
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass
        done.set()
        ended.wait()

    done, ended, before = threading.Event(), threading.Event(), of_process()
    thread = threading.Thread(target=compute)
    thread.start()
    done.wait()
    now = of_process()
    ended.set()
    thread.join()
    assert max(now[one].running_s - before.get(one, CoreTime()).running_s for one in now) >= 0.04
    assert (slowed(before, now) or 0.0) >= 1.0
