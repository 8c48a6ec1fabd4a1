"""Ranks on hosts whose clocks are a day apart."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch.distributed as dist

from harness.launch import forked_ranks
from harness.runtime import host_clocks
from harness.runtime.host_clocks import EVERY, HostClocks
from tests.harness.runtime.test_distributed_session import NET, SAMPLES, Toy, toys

DAY_S = 86400.0
CLOSE_S = 0.01
"""Half of what a message takes, on a machine that does other things, too."""


def travel(rank: int) -> None:
    """Each two ranks are on a host of their own; this process ends as a rank."""
    plain, host = time.perf_counter, rank // 2
    time.perf_counter = lambda: plain() + host * DAY_S
    host_clocks.host_clock = lambda: f"host {host}"


def test_clocks_of_other_hosts_are_corrected() -> None:
    def offset() -> list[float]:
        travel(dist.get_rank())
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, HostClocks().offset_s(0))
        return found

    found = forked_ranks.run_on_ranks(5, offset, ["cpu"] * 5)
    assert found == pytest.approx([0.0, 0.0, -DAY_S, -DAY_S, -2 * DAY_S], abs=CLOSE_S)
    assert found[:2] == [0.0, 0.0] and found[2] == found[3], "one host has one clock"


def test_ranks_of_one_host_say_nothing_about_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    def send(*_: Any) -> None:
        raise AssertionError

    for name in ("send", "recv", "broadcast"):
        monkeypatch.setattr(dist, name, send)
    assert forked_ranks.run_on_ranks(2, lambda: HostClocks().offset_s(0), ["cpu"] * 2) == 0.0


def test_clocks_are_compared_again_after_a_hundred_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = itertools.count()
    monkeypatch.setattr(host_clocks, "compare", lambda hosts: float(next(numbers)))
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "all_gather_object", lambda hosts, own: None)
    clocks = HostClocks()
    assert [clocks.offset_s(step) for step in (7, 8, 6 + EVERY, 7 + EVERY, 8 + EVERY)] == [0, 0, 0, 1, 1]


def test_a_step_is_on_the_clock_of_rank_0() -> None:
    """The second replica is on another host; so is what each of its ranks has seen of a message."""

    def step(session: Toy) -> Any:
        travel(session.rank)
        spans: list[Any] = []
        plain = session.merge_spans
        session.merge_spans = lambda replicas: spans.extend(replicas) or plain(replicas)  # type: ignore[func-returns-value,method-assign]
        metrics = session.step(NET.sample(SAMPLES))
        return metrics.step_time_s, session.trace().steps, spans

    for took_s, ((start_s, end_s),), replicas in toys(step):
        assert took_s < 10 and end_s - start_s < 10
        for span in (span for replica in replicas for span in replica):
            assert start_s - 1 < span.start_s <= span.end_s < end_s + 1
