"""The lock around a build: one process at a time, and nothing that a killed one leaves keeps the next from going on."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing import get_context
from multiprocessing.synchronize import Event

import pytest

from engines.deepspeed import jit_build

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("REGATTA_CACHE", str(tmp_path))
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)


def test_a_lock_that_a_killed_run_left_is_removed(capsys):
    left = jit_build.folder() / "op" / "lock"
    left.parent.mkdir(parents=True)
    left.touch()
    with jit_build.alone("op"):
        assert not left.exists()
        assert os.environ["TORCH_EXTENSIONS_DIR"] == str(jit_build.folder())
    assert f"compiling DeepSpeed's op into {left.parent}, once" in capsys.readouterr().out
    (left.parent / "op.so").touch()
    with jit_build.alone("op"):
        pass
    assert capsys.readouterr().out == ""


def _hold(inside: Event) -> None:
    with jit_build.alone("op"):
        inside.set()
        time.sleep(60)


def test_one_process_at_a_time_and_a_killed_one_lets_go():
    fork = get_context("fork")
    first, second = fork.Event(), fork.Event()
    holder, waiter = (fork.Process(target=_hold, args=(event,), daemon=True) for event in (first, second))
    holder.start()
    try:
        assert first.wait(10)
        waiter.start()
        assert not second.wait(0.3)
        os.kill(holder.pid or 0, signal.SIGKILL)
        assert second.wait(10)
    finally:
        for process in (holder, waiter):
            if process.pid:
                process.kill()
                process.join()
