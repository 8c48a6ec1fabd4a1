"""A second process executes compiled code, and nothing depends on it: not the results, not whether there are any."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import pytest

from harness.launch import second_process

BEGIN = """
import os, signal, sys
from harness.launch import second_process

def step():
    from engines.gpipe.engine import Config, build
    from harness import simulator
    from harness.core.cluster import Cluster, Link
    from harness.core.memory_model import MemoryModel
    from harness.core.model_profile import LayerProfile, ModelProfile
    from harness.core.plan import Plan

    simulator.START_OPS = simulator.LARGE_OPS = 0
    layer = LayerProfile(forward_s=1, backward_s=3, saved_bytes=7, output_bytes=5)
    plan, profile = Plan.contiguous([2, 1], 5), ModelProfile((layer,) * 3)
    given = build(Config()).schedule(plan, profile), plan, profile, Cluster(devices_per_node=2, intra=Link(1, 2))
    expected, found = (one(*given, MemoryModel()) for one in (simulator.reference, simulator.simulate))
    assert list(found.end_s) == list(expected.end_s) and found.peaks == expected.peaks
    print("numba" if "numba" in sys.modules else "none", flush=True)

with second_process.helping(["cluster=flat", "engine=gpipe"]):
    from harness.simulator.compiled import loops
    one = loops.other
"""
FORKED = """
    step()
    if not os.fork():
        step()
        os._exit(0)
    assert os.wait()[1] == 0
    step()
"""


def printed(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", BEGIN + code], capture_output=True, text=True, timeout=120)
    assert not done.stderr and done.returncode == 0, done.stderr
    return done.stdout.split()


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_this_process_loads_nothing_and_leaves_nothing() -> None:
    *loaded, pid = printed("    step()\n    step()\nassert loops.other is None\nprint(one.pid)")
    assert loaded == ["none", "none"]
    assert is_gone(int(pid))


@pytest.mark.parametrize(
    "fault",
    {
        "killed at once": "os.kill(one.pid, signal.SIGKILL); step()",
        "killed later": "step(); os.kill(one.pid, signal.SIGKILL); step()",
        "stopped": "step(); one.socket.settimeout(0.2); os.kill(one.pid, signal.SIGSTOP); step()",
    }.values(),
)
def test_without_it_this_process_loads_the_code(fault: str) -> None:
    assert printed(f"    {fault}")[-1] == "numba"


def test_a_forked_process_does_without_it() -> None:
    assert printed(FORKED) == ["none", "numba", "none"]


def test_it_ends_with_its_parent() -> None:
    code = BEGIN + "    print(one.pid, flush=True)\n    os.kill(os.getpid(), signal.SIGKILL)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL
    end = time.monotonic() + 20
    while not is_gone(int(done.stdout)):
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["engine=gpipe", "cluster=summit"], True),
        (["cluster=summit"], False),
        (["engine=all", "cluster=summit"], False),
        (["engine=gpipe,ddp", "cluster=summit"], False),
        (["engine=gpipe", "cluster=local"], False),
        (["engine=gpipe"], False),
    ],
)
def test_it_helps_a_search_of_one_engine_elsewhere(
    overrides: Sequence[str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On this machine it would be measured that it loads."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert second_process.pays(["mode=tune", *overrides]) == expected
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert not second_process.pays(["mode=tune", *overrides])
