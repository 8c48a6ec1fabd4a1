"""The blocks of collectives next to a pass in the trace, on a GPU, where nothing has a time before the step's end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engines.deepspeed.replica_session import ReplicaSession
from engines.fsdp.session import FSDPSession
from engines.sbp.session import SBPSession
from harness.core.op import Op
from harness.core.plan import Mesh, Traffic
from harness.runtime.collectives import CollectiveCounter
from harness.runtime.device_clock import DeviceClock
from tests.support import fake_cuda


def blocks(monkeypatch: pytest.MonkeyPatch, note: Callable[[Any, Any], None], *collectives: str) -> list[Any]:
    """The spans (op's part or kind, from, to) of a pass of 10 s with collectives that take 1, 2, ... s of it.

    They are not known when the pass is noted: the fake GPU comes to its points only afterwards.
    """
    cuda, clock = fake_cuda.install(monkeypatch), DeviceClock(torch.device("cuda:0"))
    later: list[Callable[[], None]] = []
    spans: list[Any] = []
    began_s = clock.synchronize()
    session = SimpleNamespace(
        clock=clock, now=clock.now, bytes_sent=Counter(), collectives=Counter(), pipeline_rank=0,
        record_later=later.append,
        add_span=lambda op, start_s, end_s: spans.append((op.part or op.kind, start_s - began_s, end_s - began_s)),
        counter=CollectiveCounter(clock.now),
    )  # fmt: skip
    session.traffic = session.counter
    start = clock.now()
    for number, name in enumerate(collectives, 1):
        with session.counter.counting(name, 64):
            cuda.time_s += number
    cuda.time_s = 10.0
    note(session, start)
    assert not spans
    for add in later:
        add()
    return [(part.partition("@")[0], pytest.approx(first), pytest.approx(last)) for part, first, last in spans]


def test_fsdp(monkeypatch: pytest.MonkeyPatch) -> None:
    def note(session: Any, start: Any) -> None:
        session.plan = SimpleNamespace(mesh=Mesh(data=2))
        FSDPSession._record_pass(session, "B", 0, start, "backward", reduces=True)

    found = blocks(monkeypatch, note, "all_gather", "reduce_scatter")
    assert found == [("all_gather", 0.0, 1.0), ("B", 1.0, 8.0), ("reduce_scatter", 8.0, 10.0)]


def test_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    def note(session: Any, start: Any) -> None:
        session.config = SimpleNamespace(zero=3)
        ReplicaSession._note(session, "B", 0, start)

    found = blocks(monkeypatch, note, "all_gather", "reduce_scatter")
    assert found == [("B", 1.0, 8.0), ("all_gather", 0.0, 1.0), ("reduce_scatter", 8.0, 10.0)]


def test_tensor_parallelism(monkeypatch: pytest.MonkeyPatch) -> None:
    def note(session: Any, start: Any) -> None:
        traffic = [Traffic(name, "forward", 1.0, 64) for name in ("all_gather", "all_reduce")]
        session.plan = SimpleNamespace(traffic=[traffic])
        SBPSession._note(session, Op(0, "F", 0), start, session.now())

    found = blocks(monkeypatch, note, "all_gather@forward", "all_reduce@forward")
    assert found == [("F", 0.0, 7.0), ("all_gather", 7.0, 8.0), ("all_reduce", 8.0, 10.0)]
