"""Calls of real processes are timed, and used by whoever simulates processes of this machine."""

from __future__ import annotations

import pytest

from harness.config import cluster_config
from harness.config.cluster_config import ClusterConfig
from harness.core.cluster import SEND, Device, Link
from harness.host import devices
from harness.host.machine import Machine
from harness.measure import time_calls
from harness.simulator.routes import STEPS


def test_two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_calls, "SIZES", (64, 2**16))
    monkeypatch.setattr(time_calls, "ROUNDS", 3)
    said: list[str] = []
    found = time_calls.measure(2, said.append)
    assert said == ["timing collectives among 2 processes", "timing messages between processes"]
    assert [(one.name, one.members, one.bytes) for one in found] == [(name, 2, (64, 2**16)) for name in (*STEPS, SEND)]
    assert all(0 < seconds < 1 for one in found for seconds in one.seconds)


def test_one_core_has_nobody_to_call() -> None:
    assert time_calls.measure(1) == ()


@pytest.mark.parametrize(("given", "used"), [({}, True), ({"alpha_s": 1e-4}, False), ({"bandwidth_gb_s": 3.0}, False)])
def test_a_link_that_the_user_gives_counts_instead(given: dict[str, float], used: bool) -> None:
    calls = time_calls.CallTimes(SEND, 2, (1, 2), (0.5, 0.6))
    machine = Machine(Device(devices.cpu_model()), Link(1e-5, 1e-9), cores=2.0, calls=(calls,))
    cluster = cluster_config.build(ClusterConfig(device="cpu", devices=2, **given), machine)
    assert cluster.calls == ((calls,) if used else ())
