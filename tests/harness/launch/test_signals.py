"""Which signals end a run."""

from __future__ import annotations

import os
import signal

import pytest

from harness.launch.signals import Preempted, preemptible


def test_one_that_the_starter_has_ignored_stays_ignored() -> None:
    """`nohup python run.py ... &`: the run outlives its terminal."""
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with pytest.raises(Preempted, match="ended by SIGTERM"), preemptible():
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, former)
