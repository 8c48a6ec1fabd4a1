"""Every engine, disturbed in every way while it trains: it ends soon, says truly how, and leaves nothing over.

Continuous integration has each engine and each fault once; `make soak` has all cells (`ARGS="faults and gpipe"`: some).
REGATTA_FAULTS_SEED chooses other moments.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.core.record import EXIT_CODES
from tests.support.faults import ENGINES, FAULTS, ROOT, Disturbed, Ending, processes

pytestmark = pytest.mark.usefixtures("commands")

SEED = os.environ.get("REGATTA_FAULTS_SEED", "0")
AUDITED = ("KILL rank", "KILL group", "KILL parent", "STOP rank", "INT INT", "TERM", "INT all")
STATUS = {"KILL parent": "lost", "STOP": "timeout", "KILL": "error", "TERM rank": "error", "INT": "preempted"}
"""By the beginning of a fault's name, the first that fits."""
ENDS_S = 5.0
"""After `launch.timeout_s`."""
EACH_ONCE = list(zip(ENGINES, itertools.cycle(AUDITED)))
ALL = [cell for cell in itertools.product(ENGINES, FAULTS) if cell not in EACH_ONCE]


def status_after(fault: str) -> str:
    return next((status for name, status in STATUS.items() if fault.startswith(name)), "preempted")


def disturb(engine: str, fault: str, folder: Path) -> tuple[Disturbed, Ending]:
    """Train, and after a random number of steps, at a random moment of one, do it."""
    rng = random.Random(f"{SEED} {engine} {fault}")
    with Disturbed(engine, folder) as run:
        run.wait_for_steps(rng.randint(21, 70))
        time.sleep(rng.uniform(0, 0.3))
        run.send(fault, rng)
        return run, run.end()


def check(engine: str, fault: str, folder: Path) -> None:
    run, ending = disturb(engine, fault, folder)
    assert ending.seconds <= run.timeout_s + ENDS_S
    assert ending.record.status == status_after(fault)
    assert ending.code == (-9 if fault == "KILL parent" else EXIT_CODES[ending.record.status])
    assert ending.left == []
    assert 1 <= len(ending.checkpoints) <= 2
    if fault in ("TERM", "INT all", "TERM all"):
        assert ending.checkpoints[0] == run.steps(), "a checkpoint after the last step"
    if fault in ("KILL rank", "STOP rank", "TERM rank"):
        assert f"rank {run.rank}" in ending.record.reason
        assert engine in ("single", "gpipe") or "stage" in ending.record.reason
    if fault == "KILL launcher" and engine not in ("single", "gpipe"):
        assert "rank 0" not in ending.record.reason


def test_no_run_outlives_tests_that_are_killed(tmp_path: Path) -> None:
    code = f"from tests.support.faults import *; run = Disturbed('ddp', Path({str(tmp_path)!r})); print(run.mark)"
    command = [sys.executable, "-c", f"{code}; sys.stdout.flush(); time.sleep(60)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as tests:
        assert tests.stdout
        mark = tests.stdout.readline().strip()
        deadline = time.monotonic() + 60
        while not any("run.py" in one.command for one in processes(mark)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert processes(mark)
        tests.kill()
    deadline = time.monotonic() + ENDS_S
    while processes(mark) and time.monotonic() < deadline:
        time.sleep(0.02)
    left = processes(mark)
    for one in left:
        os.kill(one.pid, signal.SIGKILL)
    assert left == []


@pytest.mark.parametrize(("engine", "fault"), EACH_ONCE)
def test_faults_each_engine_and_each_fault_once(engine: str, fault: str, tmp_path: Path) -> None:
    check(engine, fault, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize(("engine", "fault"), ALL)
def test_faults_all_others(engine: str, fault: str, tmp_path: Path) -> None:
    check(engine, fault, tmp_path)
