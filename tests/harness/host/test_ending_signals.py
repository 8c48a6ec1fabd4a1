"""Which signal has ended a process, in words."""

from __future__ import annotations

import resource
import signal

import pytest

from harness.host import ending_signals


def test_the_name_of_the_signal() -> None:
    assert ending_signals.explain("rank 1", signal.SIGTERM) == "rank 1 ended by signal 15 (SIGTERM)"


def test_a_bus_error_says_how_much_shared_memory_is_free(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending_signals, "SHARED_MEMORY", tmp_path)
    reason = ending_signals.explain("rank 1", signal.SIGBUS)
    assert reason.startswith("rank 1 ended by signal 7 (SIGBUS); of ")
    assert f"of shared memory in {tmp_path}" in reason and "--shm-size=" in reason


def test_the_limit_on_cpu_time_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", {resource.RLIMIT_CPU: (4, 5)}.__getitem__)
    reason = "rank 1 ended by signal 24 (SIGXCPU): the limit on CPU time, 4 s for each process -> a larger one"
    assert ending_signals.explain("rank 1", signal.SIGXCPU).startswith(reason)


def test_where_there_is_no_shared_memory_nothing_is_said_of_it(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending_signals, "SHARED_MEMORY", tmp_path / "none")
    assert ending_signals.explain("rank 1", signal.SIGBUS) == "rank 1 ended by signal 7 (SIGBUS)"
